"""The example of SAM 2 on made-up weights: the reader of .ort files, the encoder, masks, and what is measured."""

import importlib
import importlib.util
import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import scram

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))
try:
    SPEC = importlib.util.spec_from_file_location("sam2_example", FOLDER / "sam2.py")
    example = importlib.util.module_from_spec(SPEC)
    sys.modules["sam2_example"] = example  # its dataclasses look for their module
    SPEC.loader.exec_module(example)
    hiera = importlib.import_module("hiera")
finally:
    sys.path.remove(str(FOLDER))

TRUNK = "/image_encoder/trunk"


class Writer:
    """A writer of flatbuffers, as small as the reader: what a table points to lies behind it."""

    def __init__(self):
        self.data = bytearray(4)

    def table(self, pointer, fields):
        """A table that the pointer leads to, with values of 32 bits by number; the places of its fields."""
        start, offsets = len(self.data), [0] * (max(fields) + 1)
        for n, number in enumerate(fields):
            offsets[number] = 4 + 4 * n
        self.data += struct.pack(f"<{2 + len(offsets)}H", 4 + 2 * len(offsets), 4 + 4 * len(fields), *offsets)
        at = len(self.data)
        struct.pack_into("<I", self.data, pointer, at - pointer)
        self.data += struct.pack(f"<i{len(fields)}I", at - start, *fields.values())
        return {number: at + offsets[number] for number in fields}

    def vector(self, pointer, values, count=None):
        """A vector that the pointer leads to; the place of its values."""
        struct.pack_into("<I", self.data, pointer, len(self.data) - pointer)
        self.data += struct.pack("<I", len(values) if count is None else count) + values
        return len(self.data) - len(values)


def ort_file(weights):
    """The bytes of an .ort file with these constants, each with the number of its type."""
    file = Writer()
    session = file.table(0, {1: 0})
    model = file.table(session[1], {7: 0})
    graph = file.table(model[7], {0: 0})
    first = file.vector(graph[0], bytes(4 * len(weights)), len(weights))
    for n, (name, (kind, weight)) in enumerate(weights.items()):
        dims = {2: 0} if weight.ndim else {}
        tensor = file.table(first + 4 * n, {0: 0, **dims, 3: kind, 4: 0})
        file.vector(tensor[0], name.encode())
        if dims:
            file.vector(tensor[2], struct.pack(f"<{weight.ndim}q", *weight.shape), weight.ndim)
        file.vector(tensor[4], weight.numpy().tobytes())
    return file.data


def test_weights_of_a_file():
    given = {"one": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(0.5), "last": torch.tensor([7.0])}
    kinds = {name: (1, weight) for name, weight in given.items()} | {"whole": (7, torch.tensor([3]))}
    found = hiera.weights_of(ort_file(kinds))
    assert found.keys() == given.keys()
    for name, weight in given.items():
        assert torch.equal(found[name], weight)


def test_another_file_is_refused():
    file = Writer()
    file.table(0, {0: 0})
    with pytest.raises(ValueError, match="field 1 is missing"):
        hiera.weights_of(file.data)


def test_windows_are_padded_and_joined_again():
    x = torch.arange(1.0, 36).reshape(1, 5, 7, 1)
    made = hiera.windows(x, 3)
    assert made.shape == (6, 3, 3, 1)
    assert made[1, ..., 0].tolist() == x[0, :3, 3:6, 0].tolist()
    assert made[5, ..., 0].tolist() == [[28, 0, 0], [35, 0, 0], [0, 0, 0]]
    assert torch.equal(hiera.joined(made, (5, 7)), x)


def test_positions_of_another_side():
    torch.manual_seed(0)
    coarse, fine = torch.randn(1, 3, 7, 7), torch.randn(1, 3, 8, 8)

    def table(side):
        return F.interpolate(coarse, (side, side), mode="bicubic") + fine.repeat(1, 1, side // 8, side // 8)

    for side in (32, 48):
        torch.testing.assert_close(hiera.positions(table(32), side), table(side), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def encoder():
    """An encoder of random weights, 8 wide at first, with a position table of 32 x 32."""
    torch.manual_seed(0)
    weights = {f"{TRUNK}/Transpose_output_0": torch.randn(1, 8, 32, 32)}
    plain = "model.image_encoder.trunk."
    weights |= {
        f"{plain}patch_embed.proj.weight": torch.randn(8, 3, 7, 7),
        f"{plain}patch_embed.proj.bias": torch.zeros(8),
        "no_mem_embed": torch.randn(1, 16, 1),
    }
    width = 8
    for n in range(hiera.BLOCKS):
        wide = 2 * width if n in hiera.DOWN else width
        sizes = {"attn.qkv": (width, 3 * wide), "attn.proj": (wide, wide), "mlp.layers.0": (wide, 2 * wide)}
        sizes |= {"mlp.layers.1": (2 * wide, wide)} | ({"proj": (width, wide)} if wide > width else {})
        for name, size in sizes.items():
            weights[f"{TRUNK}/blocks.{n}/{name.replace('.', '/', 1)}/Transpose_output_0"] = (
                torch.randn(size) / size[0] ** 0.5
            )
            weights[f"{plain}blocks.{n}.{name}.bias"] = torch.randn(size[1])
        for name, size in (("norm1", width), ("norm2", wide)):
            weights |= {f"{plain}blocks.{n}.{name}.{x}": torch.randn(size) for x in ("weight", "bias")}
        width = wide
    convs = {f"image_encoder.neck.convs.{n}.conv": (16, 64 >> n) for n in range(4)}
    convs |= {"sam_mask_decoder.conv_s0": (3, 16), "sam_mask_decoder.conv_s1": (4, 16)}
    for name, (out, into) in convs.items():
        weights |= {f"model.{name}.weight": torch.randn(out, into, 1, 1) / 4, f"model.{name}.bias": torch.randn(out)}
    return hiera.Hiera(weights)


def test_global_blocks_attend_all_tokens(encoder):
    found = encoder.global_blocks(torch.rand(1, 3, 128, 128))
    assert [block.number for block in found] == [5, 7, 9]
    for block in found:
        assert block.q.shape == block.k.shape == block.v.shape == block.out.shape == (8, 8, 4, 8)
        q, k, v = (x.reshape(64, 4, 8).movedim(1, 0) for x in (block.q, block.k, block.v))
        out = (q @ k.mT * 8**-0.5).softmax(-1) @ v
        torch.testing.assert_close(block.out, out.movedim(0, 1).reshape(8, 8, 4, 8))


def test_a_picture_of_another_side_has_its_own_positions(encoder, monkeypatch):
    picture = torch.rand(1, 3, 192, 192)
    found = encoder.global_blocks(picture)[0]
    assert found.q.shape[:2] == (12, 12)
    monkeypatch.setattr(encoder, "table", hiera.positions(encoder.table, 48))
    encoder.places.cache_clear()
    assert torch.equal(found.out, encoder.global_blocks(picture)[0].out)


def test_other_blocks_attend_their_windows(encoder):
    """A change of one token reaches its window alone: 8 x 8 tokens, or 4 x 4 where the block halves the grid."""
    x = torch.randn(1, 32, 32, 8)
    changed = x.clone()
    changed[0, 9, 17] = torch.randn(8)
    for number, reached in ((0, (8, 16, 16, 24)), (1, (4, 8, 8, 12))):
        before, after = (encoder.block(number, y) for y in (x, changed))
        off = (before != after).any(-1)[0].nonzero()
        low, high = off.amin(0), off.amax(0) + 1
        assert (int(low[0]), int(high[0]), int(low[1]), int(high[1])) == reached


def test_features_of_all_stages(encoder):
    """The neck: the last two stages make the embedding, the last one twice as large; the first two are beside it."""
    ends = [x.movedim(-1, 1) for x in encoder.trunk(torch.ones(1, 3, 128, 128) / 2)]
    assert [tuple(x.shape[1:]) for x in ends] == [(8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)]
    features = encoder.features(torch.ones(1, 3, 128, 128) / 2)
    lowest, low = encoder.conv("neck.convs.0.conv", ends[3]), encoder.conv("neck.convs.1.conv", ends[2])
    wanted = low + lowest.repeat_interleave(2, 2).repeat_interleave(2, 3) + encoder.weights["no_mem_embed"][..., None]
    torch.testing.assert_close(features.embedding, wanted)
    assert [tuple(x.shape) for x in features.high] == [(1, 3, 32, 32), (1, 4, 16, 16)]


def test_attention_of_global_blocks_alone_is_replaced(encoder):
    calls = []

    def nothing(number, q, k, v):
        calls.append((number, tuple(q.shape)))
        return torch.zeros_like(q)

    picture = torch.rand(1, 3, 128, 128)
    changed = encoder.features(picture, nothing)
    assert calls == [(number, (1, 4, 8, 8, 8)) for number in (5, 7, 9)]
    exact = encoder.features(picture)
    assert not torch.allclose(changed.embedding, exact.embedding)
    assert torch.equal(changed.high[1], exact.high[1])  # before them
    half = encoder.to("cpu", torch.bfloat16).features(picture)
    assert half.embedding.dtype == torch.bfloat16
    assert example.off(half.embedding, exact.embedding) < 0.1


@dataclass
class Decoder:
    """Masks are the features of the highest resolution, the second of three predicted to be best."""

    constants: dict

    def run(self, given, wanted):
        assert wanted == ["masks", "iou_predictions"]
        side = given["image_embed"].shape[-1]
        middles = torch.linspace(-1 + 1 / side, 1 - 1 / side, side)
        right, down = self.constants[example.PLACES].unbind(-1)
        torch.testing.assert_close(right, middles.expand(side, side))
        torch.testing.assert_close(down, middles[:, None].expand(side, side))
        assert given["mask_input"].shape[-1] == 4 * side
        # A point of the picture's left half is not sure.
        sure = torch.where(given["point_coords"][:, 0] > 512, 0.99, 0.6)[:, :1]
        masks = given["high_res_feats_0"] + given["image_embed"].mean() + given["mask_input"]
        return masks, sure * torch.tensor([0.5, 1.0, 0.7])


@pytest.fixture
def model(encoder):
    return example.Model(encoder, Decoder({}))


def test_masks_of_points(model):
    features = model.encoder.features(torch.rand(1, 3, 128, 128))
    at = example.points()
    assert at.shape == (25, 2)
    assert at[1].tolist() == pytest.approx([0.3, 0.1])  # right, down
    found, predicted = example.masks(model.decoder, features, at)
    assert found.shape == (25, 3, 32, 32)
    assert predicted.shape == (25, 3)
    assert torch.equal(example.best(found, predicted), found[:, 1])
    assert (predicted.amax(-1) > example.SURE).tolist() == (at[:, 0] > 0.5).tolist()


def test_iou():
    a = torch.tensor([[[1, 1, 0, 0]], [[0, 0, 0, 0]], [[1, 0, 0, 0]]]).bool()
    b = torch.tensor([[[0, 1, 1, 0]], [[0, 0, 0, 0]], [[0, 0, 0, 1]]]).bool()
    assert example.iou(a, b) == pytest.approx([1 / 3, 1.0, 0.0])


@pytest.mark.slow
def test_rows_of_a_photograph_and_of_times(model, monkeypatch, tmp_path):
    """Small grids are tuned to dense attention, which is exact; the default settings are not."""
    pictures = {name: torch.rand(1, 3, 128, 128) for name in (example.TUNED, "astronaut")}
    plans = {}
    monkeypatch.setattr(example, "SETTINGS", ((8, 16), (512, 1024)))  # the second visits more keys than there are
    rows = dict(
        example.measure(
            model, [128], ["astronaut"], list(example.PARTS), "cpu", plans, lambda name, side: pictures[name], 1
        )
    )
    assert sorted(plans) == [f"{budget} 8x8 {number}" for budget in ("0.02", "0.05") for number in (5, 7, 9)]
    quality, times = rows["cpu 128 astronaut"], rows["cpu 128 times"]
    assert (quality["sure"], quality["points"]) == (10, 25)
    for name in example.WAYS:
        assert len(quality[name]["iou"]) == 10
        assert quality[name]["embedding_error"] < 0.1
        assert times[name]["layers"][0] > 0
    assert quality["0.02"]["embedding_error"] == 0
    assert times["dense"]["layer_errors"] == [0, 0, 0]
    assert times["chosen"]["0.05"] == ["dense attention"] * 3
    tuned = rows["cpu 128 tuned"]
    assert tuned["chosen"] == times["chosen"]
    assert 0 < tuned["0.02"]["layers"] == tuned["0.02"]["dense"]  # the plan is dense attention
    alone = rows["cpu 128 settings-astronaut"]
    assert {name for name in alone if "+" in name} == {f"{number} 8+16" for number in (5, 7, 9)}
    assert all(alone[f"{number} 8+16"]["p95"][0] > 0 < alone[f"{number} dense"]["seconds"] for number in (5, 7, 9))
    drawn = tmp_path / "picture.jpg"
    example.draw(model, pictures["astronaut"], plans, tuned, drawn)
    assert drawn.stat().st_size > 1000


def test_plans_are_read_again(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(example.Model, "load", lambda *_: model)
    monkeypatch.setattr(example, "photograph", lambda *_, **__: torch.rand(1, 3, 128, 128))
    results, plans = tmp_path / "rows.json", tmp_path / "plans.json"
    command = ["sam2.py", "--sides", "128", "--photographs", "fig", "--parts", "quality"]
    monkeypatch.setattr(sys, "argv", [*command, "--results", str(results), "--plans", str(plans)])
    example.main()
    assert json.loads(results.read_text())["cpu 128 fig"]["machine"]
    assert len(scram.Plans.load(plans)) == 6
    monkeypatch.setattr(example, "tuned", lambda *_: pytest.fail("the plans are there"))
    example.main()
    assert capsys.readouterr().out.count("cpu 128 fig: ") == 2
    monkeypatch.setattr(sys, "argv", [*command[:2], "100"])
    with pytest.raises(SystemExit):
        example.main()
    assert "multiples of 128" in capsys.readouterr().err


def test_a_photograph_is_cut_to_a_square():
    shown = example.photograph("chelsea", 64)
    assert shown.shape == (1, 3, 64, 64)
    assert 0 <= shown.min() < shown.max() <= 1


def test_a_graph_is_moved_with_all_its_tensors():
    onnx_graph = sys.modules["onnx_graph"]
    node = onnx_graph.Node("ConstantOfShape", "", ["shape"], ["out"], {"value": torch.zeros(1), "axis": 0})
    graph = example.placed(onnx_graph.Graph([node], {"shape": torch.tensor([2])}, ["out"]), "meta")
    assert graph.nodes[0].attributes["value"].is_meta
    assert graph.nodes[0].attributes["axis"] == 0
    assert graph.constants["shape"].is_meta
