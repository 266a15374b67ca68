"""An ONNX graph, read without `onnx` and run by torch; attention layers by name.

The operators are those of MobileSAM, of SAM 2's decoder, and of the encoders of HTDemucs and Moonshine.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Fields = dict[int, list[Any]]  # of a message of protocol buffers, by number
Attributes = dict[str, Any]
DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
}


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
        flat = (
            torch.frombuffer(bytearray(given[9][0]), dtype=dtype) if len(given[9][0]) else torch.empty(0, dtype=dtype)
        )
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
            if kind == "Split":
                attributes.setdefault("num_outputs", len(one[2]))
            node = Node(kind, name, text(one.get(1, [])), text(one[2]), attributes)
            if kind == "Constant":
                constants[node.outputs[0]] = attributes["value"]
            else:
                nodes.append(node)
        return Graph(nodes, constants, [text(fields_of(one)[1])[0] for one in graph[12]])

    def sites(self) -> dict[str, Site]:
        """The attention layers with a bias, by name: "layers.2.5" is block 5 of layer 2."""
        made = {node.outputs[0]: node for node in self.nodes}
        read = {name: node for node in self.nodes for name in node.inputs}
        found = {}
        for softmax in [node for node in self.nodes if node.kind == "Softmax"]:
            add, after = made[softmax.inputs[0]], read[softmax.outputs[0]]
            if add.kind == "Add" and add.inputs[1] in self.constants:
                q, k = made[made[add.inputs[0]].inputs[0]].inputs  # the product, before it is scaled
                bias = self.constants[add.inputs[1]]
                layer = softmax.name.removesuffix("/attn/Softmax").strip("/").replace("/blocks", "")
                found[layer] = Site(q, k, after.inputs[1], bias.reshape(bias.shape[-3:]), after.outputs[0])
        return found

    def run(
        self, given: dict[str, Tensor], wanted: list[str] | None = None, instead: dict[str, Windowed] | None = None
    ) -> list[Tensor]:
        """The wanted tensors of the graph, from given ones; no operator runs that they do not need.

        Args:
            given: the inputs, or any tensors of the graph, by name.
            wanted: names of tensors; None is the outputs.
            instead: functions that stand in the place of attention layers, by the name of the layer.
        """
        sites = self.sites() if instead else {}
        ours = {sites[layer].out: (sites[layer], way) for layer, way in (instead or {}).items()}
        wanted = self.outputs if wanted is None else wanted
        left: dict[str, int] = dict.fromkeys(wanted, 1)  # how often a tensor will still be read
        todo = []
        for node in reversed(self.nodes):
            if any(name in left and name not in given for name in node.outputs):
                inputs = node.inputs
                if node.outputs[0] in ours:
                    site = ours[node.outputs[0]][0]
                    inputs = [site.q, site.k, site.v]
                todo.append((node, inputs))
                for name in inputs:
                    left[name] = left.get(name, 0) + 1
        known = {**self.constants, **given}
        for node, inputs in reversed(todo):
            values: list[Any] = [known[name] if name else None for name in inputs]
            if node.outputs[0] in ours:
                site, way = ours[node.outputs[0]]
                made: Any = way(values[0], values[1].mT, values[2], site.bias)
            else:
                made = OPERATORS[node.kind](node.attributes, *values)
            known.update(zip(node.outputs, made if isinstance(made, tuple | list) else [made], strict=True))
            for name in inputs:
                left[name] -= 1
                if not left[name] and name not in self.constants:
                    known.pop(name, None)
        return [known[name] for name in wanted]


# The operators, as ONNX defines them: attributes first, then tensors.


def numbers(x: Tensor) -> list[int]:
    return [int(n) for n in x.flatten().tolist()]


def reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[n] if size == 0 else size for n, size in enumerate(numbers(shape))])


def unsqueeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    for axis in a["axes"] if axes is None else numbers(axes):
        x = x.unsqueeze(axis)
    return x


def slice_(
    a: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Any = None
) -> Tensor:
    first, last = numbers(starts), numbers(ends)
    along = list(range(len(first))) if axes is None else numbers(axes)
    by = [1] * len(first) if steps is None else numbers(steps)
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        x = x.index_select(axis, torch.arange(x.shape[axis])[list(range(x.shape[axis]))[start:end:step]])
    return x


def pad(a: Attributes, x: Tensor, pads: Tensor, value: Tensor | None = None) -> Tensor:
    size = numbers(pads)
    both = [size[n + axis] for axis in reversed(range(x.ndim)) for n in (0, x.ndim)]
    return F.pad(x, both, value=0.0 if value is None else float(value))


def conv(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    axes = x.ndim - 2
    pads = a.get("pads", [0] * (2 * axes))
    both = [pads[n + axis] for axis in reversed(range(axes)) for n in (0, axes)]
    by = [a.get(name, [1] * axes) for name in ("strides", "dilations")]
    return {1: F.conv1d, 2: F.conv2d}[axes](F.pad(x, both), weight, bias, by[0], 0, by[1], a.get("group", 1))


def conv_transpose(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    top, left, _, _ = a["pads"]
    return F.conv_transpose2d(x, weight, bias, a["strides"], (top, left), 0, a["group"], a["dilations"])


def split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    even = -(-x.shape[a["axis"]] // a["num_outputs"])
    return torch.split(x, a.get("split", even) if sizes is None else numbers(sizes), a["axis"])


def squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze(tuple(a["axes"] if axes is None else numbers(axes)))


def scatter_nd(a: Attributes, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    return x.index_put(index.unbind(-1), updates)


def quantize(a: Attributes, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as whole numbers 0..255, the size of a step, and the number that is 0."""
    low, high = x.min().clamp(max=0), x.max().clamp(min=0)
    step = (high - low) / 255
    zero = (-low / step).round().clamp(0, 255)
    return ((x / step).round() + zero).clamp(0, 255).to(torch.uint8), step, zero.to(torch.uint8)


def matmul_integer(a: Attributes, x: Tensor, y: Tensor, x_zero: Any = 0, y_zero: Any = 0) -> Tensor:
    product: Tensor = (x.double() - x_zero) @ (y.double() - y_zero)  # float64 is exact here, and fast
    return product.to(torch.int32)


def gather(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = a.get("axis", 0) % x.ndim
    picked = x.index_select(axis, index.flatten() % x.shape[axis])
    return picked.reshape(x.shape[:axis] + index.shape + x.shape[axis + 1 :])


def layer_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, a["epsilon"])


def instance_norm(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=a["epsilon"])


def gemm(a: Attributes, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    product: Tensor = x @ (y.mT if a.get("transB") else y)
    scaled: Tensor = product * a.get("alpha", 1.0) + bias * a.get("beta", 1.0)
    return scaled


def div(a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def one_hot(a: Attributes, index: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    hot = F.one_hot(index % int(depth), int(depth)).bool()
    return torch.where(hot, values[1], values[0])


OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": lambda a, x, y: x + y,
    "ArgMax": lambda a, x: x.argmax(a["axis"], keepdim=bool(a["keepdims"])),
    "Cast": lambda a, x: x.to(DTYPES[a["to"]]),
    "Clip": lambda a, x, low=None, high=None: x.clamp(low, high),
    "Concat": lambda a, *x: torch.cat(x, a["axis"]),
    "ConstantOfShape": lambda a, x: a["value"].expand(numbers(x)),
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Cos": lambda a, x: x.cos(),
    "Div": div,
    "DynamicQuantizeLinear": quantize,
    "Equal": lambda a, x, y: x == y,
    "Erf": lambda a, x: x.erf(),
    "Expand": lambda a, x, shape: x * torch.ones(numbers(shape), dtype=x.dtype),
    "Flatten": lambda a, x: x.reshape(math.prod(x.shape[: a["axis"]]), -1),
    "Gather": gather,
    "Gemm": gemm,
    "InstanceNormalization": instance_norm,
    "LayerNormalization": layer_norm,
    "MatMul": lambda a, x, y: x @ y,
    "MatMulInteger": matmul_integer,
    "Mod": lambda a, x, y: x % y,
    "Mul": lambda a, x, y: x * y,
    "Neg": lambda a, x: -x,
    "Not": lambda a, x: ~x,
    "OneHot": one_hot,
    "Pad": pad,
    "Pow": lambda a, x, y: x**y,
    "Range": lambda a, start, end, step: torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype),
    "ReduceMean": lambda a, x: x.mean(a["axes"], keepdim=bool(a.get("keepdims", 1))),
    "ReduceProd": lambda a, x: x.prod(),
    "Relu": lambda a, x: x.relu(),
    "Reshape": reshape,
    "ScatterND": scatter_nd,
    "Shape": lambda a, x: torch.tensor(x.shape),
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Sin": lambda a, x: x.sin(),
    "Slice": slice_,
    "Softmax": lambda a, x: x.softmax(a["axis"]),
    "Split": split,
    "Sqrt": lambda a, x: x.sqrt(),
    "Squeeze": squeeze,
    "Sub": lambda a, x, y: x - y,
    "Tanh": lambda a, x: x.tanh(),
    "Tile": lambda a, x, times: x.repeat(numbers(times)),
    "Transpose": lambda a, x: x.permute(a["perm"]),
    "Unsqueeze": unsqueeze,
    "Where": lambda a, which, x, y: torch.where(which, x, y),
}
