"""The image encoder of SAM 2 (Hiera-tiny) in torch, with the weights of a file in ONNX Runtime's own format (.ort)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

FILE = "dist/sam2_hiera_tiny_encoder.with_runtime_opt.ort"  # in the package of npm
BLOCKS = 12
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
    split = x.reshape(x.shape[0] // side, side, x.shape[1] // side, side, x.shape[2])
    return split.transpose(1, 2).flatten(0, 1)


def joined(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """The reverse of `windows`, cut to the grid."""
    side = x.shape[1]
    rows = -(-grid[0] // side)
    split = x.reshape(rows, len(x) // rows, *x.shape[1:]).transpose(1, 2)  # [rows, side, columns, side, C]
    return split.flatten(2, 3).flatten(0, 1)[None, : grid[0], : grid[1]]


def pooled(x: Tensor) -> Tensor:
    """The largest of 2 x 2, [N, H, W, C]."""
    return F.max_pool2d(x.movedim(-1, 1), 2).movedim(1, -1)


def bicubic(side: int) -> Tensor:
    """The matrix [side, COARSE] of an interpolation along one axis."""
    made: Tensor = F.interpolate(torch.eye(COARSE, dtype=torch.float64)[None, None], (side, COARSE), mode="bicubic")
    return made[0, 0]


def positions(table: Tensor, side: int) -> Tensor:
    """A position table [1, C, n, n], made anew for another side; least squares find its two parts."""
    old = table.shape[-1]
    parts = bicubic(old), torch.eye(FINE, dtype=torch.float64).repeat(old // FINE, 1)
    design = torch.cat([torch.einsum("yi,xj->yxij", x, x).reshape(old * old, -1) for x in parts], 1)
    wanted = table[0].double().flatten(1).T
    both = torch.linalg.pinv(design.T @ design, rtol=1e-10) @ (design.T @ wanted)  # a constant is in either part
    coarse = both.T[:, : COARSE**2].reshape(-1, COARSE, COARSE)
    fine = both.T[:, COARSE**2 :].reshape(-1, FINE, FINE)
    smooth: Tensor = torch.einsum("yi,xj,cij->cyx", bicubic(side), bicubic(side), coarse)
    repeated = fine.repeat(1, side // FINE, side // FINE)
    whole: Tensor = (smooth + repeated).float()
    return whole[None]


@dataclass(frozen=True)
class Block:
    """The attention of a global block: q, k, v and the output [H, W, heads, E]."""

    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


@dataclass(frozen=True)
class Features:
    """What the decoder reads: of S pixels, S / 16 tokens along a side."""

    embedding: Tensor  # [1, 256, S / 16, S / 16]
    high: tuple[Tensor, Tensor]  # [1, 32, S / 4, S / 4], [1, 64, S / 8, S / 8]


Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # block, q [N, heads, *G, E], k, v [N, heads, *G', E]


def dense(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by torch, [N, heads, *G, E]."""
    out = F.scaled_dot_product_attention(q.flatten(2, -2), k.flatten(2, -2), v.flatten(2, -2))
    return out.reshape(q.shape)


class Hiera:
    """The encoder.

    Args:
        weights: constants of the file, by name.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {}
        for name, weight in weights.items():
            if name.startswith("/image_encoder/trunk/blocks") and name.endswith("/Transpose_output_0"):
                short = name.removeprefix("/image_encoder/trunk/").removesuffix("/Transpose_output_0")
                self.weights[short.replace("/", ".") + ".weight"] = weight.T
            elif not name.startswith("/"):
                short = re.sub(r"^model\.(image_encoder\.trunk\.|image_encoder\.|sam_mask_decoder\.)?", "", name)
                self.weights[short] = weight
        self.table = weights["/image_encoder/trunk/Transpose_output_0"]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Hiera:
        """The same encoder elsewhere, or in another precision; the position table stays as it is."""
        made = Hiera({"/image_encoder/trunk/Transpose_output_0": self.table})
        made.weights = {name: x.to(device, dtype) for name, x in self.weights.items()}
        return made

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def conv(self, name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], stride, padding)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], 1e-6)

    def block(self, number: int, x: Tensor, attention: Attention = dense) -> Tensor:
        """A block [1, H, W, C] -> [1, H, W, C]; half as high and wide where a stage begins."""
        name, down = f"blocks.{number}", number in DOWN
        stage = sum(number >= first for first in DOWN)
        y = self.norm(f"{name}.norm1", x)
        x = pooled(self.linear(f"{name}.proj", y)) if down else x
        if number not in GLOBAL:
            y = windows(y, WINDOWS[stage - down])  # a stage begins with the windows of the last one
        three = self.linear(f"{name}.attn.qkv", y)
        q, k, v = three.reshape(*y.shape[:-1], 3, 2**stage, -1).unbind(3)
        if down:
            q = pooled(q.flatten(-2))
            q = q.reshape(*q.shape[:-1], 2**stage, -1)
        attend = attention if number in GLOBAL else dense
        out = attend(number, *(z.movedim(-2, 1) for z in (q, k, v))).movedim(1, -2).flatten(-2)
        y = self.linear(f"{name}.attn.proj", out)
        x = x + (y if number in GLOBAL else joined(y, (x.shape[1], x.shape[2])))
        hidden = F.gelu(self.linear(f"{name}.mlp.layers.0", self.norm(f"{name}.norm2", x)))
        return x + self.linear(f"{name}.mlp.layers.1", hidden)

    def trunk(self, picture: Tensor, attention: Attention = dense) -> list[Tensor]:
        """What the four stages end with [1, H, W, C], of a picture [1, 3, S, S] in 0..1; S is a multiple of 32."""
        x = self.embedded(picture)
        ends = []
        for number in range(BLOCKS):
            if number in DOWN:
                ends.append(x)
            x = self.block(number, x, attention)
        return [*ends, x]

    def embedded(self, picture: Tensor) -> Tensor:
        """A picture [1, 3, S, S] -> tokens with their places [1, S / 4, S / 4, C]."""
        like = self.weights["patch_embed.proj.weight"]
        mean, deviation = (torch.tensor(x, device=picture.device).view(3, 1, 1) for x in (MEAN, DEVIATION))
        x = self.conv("patch_embed.proj", ((picture - mean) / deviation).to(like), STEP, 3)
        return (x + self.places(x.shape[-1]).to(like)).movedim(1, -1)

    @lru_cache(maxsize=1)  # noqa: B019 - an encoder lives as long as the program
    def places(self, side: int) -> Tensor:
        """The position table [1, C, side, side]."""
        return self.table if side == self.table.shape[-1] else positions(self.table, side)

    def features(self, picture: Tensor, attention: Attention = dense) -> Features:
        """What the decoder reads, of a picture [1, 3, S, S] in 0..1; S is a multiple of 32.

        Args:
            picture: its pixels.
            attention: of the global blocks.
        """
        first, second, third, fourth = (x.movedim(-1, 1) for x in self.trunk(picture, attention))
        wide = self.conv("neck.convs.1.conv", third) + F.interpolate(
            self.conv("neck.convs.0.conv", fourth), scale_factor=2.0
        )
        high = self.conv("conv_s0", self.conv("neck.convs.3.conv", first))
        middle = self.conv("conv_s1", self.conv("neck.convs.2.conv", second))
        return Features(wide + self.weights["no_mem_embed"].view(1, -1, 1, 1), (high, middle))

    def global_blocks(self, picture: Tensor) -> list[Block]:
        """The attention of the global blocks on a picture [1, 3, S, S] in 0..1."""
        found = []

        def kept(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = dense(number, q, k, v)
            found.append(Block(number, *(x[0].movedim(0, -2) for x in (q, k, v, out))))
            return out

        self.trunk(picture, kept)
        return found
