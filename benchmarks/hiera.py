"""The image encoder of SAM 2 (Hiera-tiny) in torch, with the weights of a file in ONNX Runtime's own format (.ort)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DOWN = (1, 3, 10)  # blocks that halve the grid and double width and heads: a stage begins
GLOBAL = (5, 7, 9)  # blocks whose tokens attend all tokens
WINDOWS = (8, 4, 14, 7)  # tokens along a side, by stage
STEP = 4  # pixels of a token of the first stage
COARSE, FINE = 7, 8  # the table is bicubic of 7 x 7, plus 8 x 8 repeated
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the pixels that the encoder was trained on
FLOAT = 1  # the number of float32 in the file


class Flat:
    """A reader of flatbuffers: tables, whose fields are found by number, vectors and strings."""

    def __init__(self, data: bytearray) -> None:
        self.data = memoryview(data)

    def number(self, at: int, form: str = "I") -> int:
        value: int = struct.unpack_from(f"<{form}", self.data, at)[0]
        return value

    def follow(self, at: int) -> int:
        return at + self.number(at)

    def field(self, table: int, number: int) -> int | None:
        """The place of a field; None where the table leaves it out."""
        names = table - self.number(table, "i")
        entry = 4 + 2 * number
        offset = self.number(names + entry, "H") if entry < self.number(names, "H") else 0
        return table + offset if offset else None

    def child(self, table: int, number: int) -> int:
        """The place of a table or a vector that a field points to."""
        at = self.field(table, number)
        if at is None:
            raise ValueError(f"field {number} is missing in the table at byte {table}; is this an .ort file?")
        return self.follow(at)

    def bytes(self, vector: int, width: int = 1) -> memoryview:
        return self.data[vector + 4 : vector + 4 + width * self.number(vector)]

    def tables(self, vector: int) -> Iterator[int]:
        for n in range(self.number(vector)):
            yield self.follow(vector + 4 + 4 * n)


def weights_of(data: bytearray) -> dict[str, Tensor]:
    """The float32 constants of an .ort file by name; they share the memory of `data`."""
    flat, found = Flat(data), {}
    graph = flat.child(flat.child(flat.number(0), 1), 7)  # session, model, graph
    for tensor in flat.tables(flat.child(graph, 0)):
        kind = flat.field(tensor, 3)
        if kind is not None and flat.number(kind) == FLOAT:
            dims = flat.field(tensor, 2)
            shape = [] if dims is None else memoryview(flat.bytes(flat.follow(dims), 8)).cast("q").tolist()
            name = bytes(flat.bytes(flat.child(tensor, 0))).decode()
            found[name] = torch.frombuffer(flat.bytes(flat.child(tensor, 4)), dtype=torch.float32).reshape(shape)
    return found


def windows(x: Tensor, side: int) -> Tensor:
    """[1, H, W, C] -> [windows, side, side, C], 0 where windows lie beyond the grid."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % side, 0, -x.shape[1] % side))[0]
    split = x.unflatten(1, (-1, side)).unflatten(0, (-1, side))  # [rows, side, columns, side, C]
    return split.transpose(1, 2).flatten(0, 1)


def joined(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """The reverse of `windows`, cut to the grid."""
    side = x.shape[1]
    split = x.unflatten(0, (-(-grid[0] // side), -1)).transpose(1, 2)
    return split.flatten(2, 3).flatten(0, 1)[None, : grid[0], : grid[1]]


def pooled(x: Tensor) -> Tensor:
    """The largest of 2 x 2, [N, H, W, C]."""
    return F.max_pool2d(x.movedim(-1, 1), 2).movedim(1, -1)


def bicubic(side: int) -> Tensor:
    """The matrix [side, COARSE] of an interpolation along one axis."""
    return F.interpolate(torch.eye(COARSE, dtype=torch.float64)[None, None], (side, COARSE), mode="bicubic")[0, 0]


def positions(table: Tensor, side: int) -> Tensor:
    """A position table [1, C, n, n], made anew for another side; least squares find its two parts."""
    old = table.shape[-1]
    parts = bicubic(old), torch.eye(FINE, dtype=torch.float64).repeat(old // FINE, 1)
    design = torch.cat([torch.einsum("yi,xj->yxij", x, x).reshape(old * old, -1) for x in parts], 1)
    wanted = table[0].double().flatten(1).T
    both = torch.linalg.pinv(design.T @ design, rtol=1e-10) @ (design.T @ wanted)  # a constant is in either part
    coarse, fine = both.T.split([COARSE**2, FINE**2], 1)
    smooth = torch.einsum("yi,xj,cij->cyx", bicubic(side), bicubic(side), coarse.unflatten(1, (COARSE, COARSE)))
    repeated = fine.unflatten(1, (FINE, FINE)).repeat(1, side // FINE, side // FINE)
    return (smooth + repeated).float()[None]


@dataclass(frozen=True)
class Block:
    """The attention of a global block: q, k, v and the output [H, W, heads, E]."""

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class Hiera:
    """The encoder, without its neck.

    Args:
        weights: constants of the file, by name.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {}
        for name, weight in weights.items():
            if name.startswith("/image_encoder/trunk/blocks") and name.endswith("/Transpose_output_0"):
                short = name.removeprefix("/image_encoder/trunk/").removesuffix("/Transpose_output_0")
                self.weights[short.replace("/", ".") + ".weight"] = weight.T
            elif name.startswith("model.image_encoder.trunk."):
                self.weights[name.removeprefix("model.image_encoder.trunk.")] = weight
        self.table = weights["/image_encoder/trunk/Transpose_output_0"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-6)

    def attend(self, name: str, x: Tensor, heads: int, down: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Attention within each grid of x [N, h, w, C]; and q, k, v and the output [N, h, w, heads, E]."""
        q, k, v = self.linear(f"{name}.attn.qkv", x).unflatten(-1, (3, heads, -1)).unbind(3)
        if down:
            q = pooled(q.flatten(-2)).unflatten(-1, (heads, -1))
        out = F.scaled_dot_product_attention(*(y.flatten(1, 2).transpose(1, 2) for y in (q, k, v)))
        out = out.transpose(1, 2).unflatten(1, q.shape[1:3])
        return self.linear(f"{name}.attn.proj", out.flatten(-2)), (q, k, v, out)

    def block(self, number: int, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A block [1, H, W, C] -> [1, H, W, C], and what `attend` returns."""
        name, down = f"blocks.{number}", number in DOWN
        stage = sum(number >= first for first in DOWN)
        y = self.norm(f"{name}.norm1", x)
        x = pooled(self.linear(f"{name}.proj", y)) if down else x
        if number not in GLOBAL:
            y = windows(y, WINDOWS[stage - down])  # a stage begins with the windows of the last one
        y, seen = self.attend(name, y, 2**stage, down)
        x = x + (y if number in GLOBAL else joined(y, (x.shape[1], x.shape[2])))
        hidden = F.gelu(self.linear(f"{name}.mlp.layers.0", self.norm(f"{name}.norm2", x)))
        return x + self.linear(f"{name}.mlp.layers.1", hidden), seen

    def global_blocks(self, picture: Tensor) -> Iterator[Block]:
        """The attention of the global blocks on a picture [1, 3, S, S] in 0..1; S is a multiple of 32."""
        mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, DEVIATION))
        patch = self.weights["patch_embed.proj.weight"], self.weights["patch_embed.proj.bias"]
        x = F.conv2d((picture - mean) / deviation, *patch, stride=STEP, padding=3)
        side = x.shape[-1]
        x = x + (self.table if side == self.table.shape[-1] else positions(self.table, side))
        x = x.movedim(1, -1)
        for number in range(GLOBAL[-1] + 1):
            x, seen = self.block(number, x)
            if number in GLOBAL:
                q, k, v, out = (y[0] for y in seen)
                yield Block(number, q, k, v, out)
