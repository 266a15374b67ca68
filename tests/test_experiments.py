"""`scram match`, `denoise`, `figures`, `coherence`: what they find, what they write, how they refuse."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import scram
from scram.cli import coherence as coherence_module
from scram.cli import denoise as denoise_module
from scram.cli import figures as figures_module
from scram.cli.features import read_picture, sample_pair
from test_cli import call


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A photograph and the same moved by (2, -3), as files, and the true offsets."""
    folder = tmp_path_factory.mktemp("pair")
    a = (sample_pair(48)[0] * 255).byte()
    Image.fromarray(a.numpy()).save(folder / "a.png")
    Image.fromarray(a.roll((2, -3), (0, 1)).numpy()).save(folder / "b.png")
    truth = np.tile(np.array([2.0, -3.0], np.float32), (*a.shape[:2], 1))
    truth[-8:], truth[:, :9] = np.nan, np.inf  # what left the picture
    np.save(folder / "truth.npy", truth)
    return folder


def test_match_finds_a_moved_picture(pair, tmp_path):
    code, printed, complaints = call(
        "match", pair / "a.png", pair / "b.png", "--truth", pair / "truth.npy", "--out", tmp_path, "--patch", 5
    )
    assert (code, complaints) == (0, "")
    assert "median error" in printed
    numbers = json.loads((tmp_path / "match.json").read_text())
    assert numbers["truth"]["median_error_px"] < 0.3
    assert numbers["truth"]["within_2px"] > 0.9
    assert numbers["median_offset_px"] == pytest.approx([2, -3], abs=0.3)
    with np.load(tmp_path / "match.npz") as arrays:
        assert arrays["offset"].shape == (*arrays["confidence"].shape, 2)
        assert arrays["index"].shape[:2] == arrays["lse"].shape
        assert 0 <= arrays["confidence"].min() <= arrays["confidence"].max() <= 1
    for name in ("match", "field", "warped", "arrows", "confidence", "error"):
        assert (tmp_path / f"{name}.png").stat().st_size > 100, name


def test_match_takes_photographs_of_unequal_size(pair, tmp_path):
    Image.open(pair / "b.png").crop((0, 0, 60, 40)).save(tmp_path / "small.png")
    arguments = ("match", pair / "a.png", tmp_path / "small.png", "--patch", 5, "--json", "--out", tmp_path)
    first, second = (json.loads(call(*arguments, "--matches", 2, "--seed", 4)[1]) for _ in range(2))
    assert (first["grid_a"][0], first["grid_b"]) == (48, [40, 60])
    assert first["median_offset_px"] == second["median_offset_px"]


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "I;16"])
def test_every_kind_of_picture_is_read(mode, pair, tmp_path):
    a = Image.open(pair / "a.png")
    name = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    grey16 = Image.fromarray(np.asarray(a.convert("L")).astype(np.uint16) * 257)
    other = {"I;16": lambda: grey16, "P": a.quantize}.get(mode, lambda: a.convert(mode))
    other().save(name)
    want = read_picture(pair / "a.png")
    if mode[0] in "LI":
        want = torch.from_numpy(np.asarray(a.convert("L"), np.float32) / 255)[..., None].expand(want.shape)
    read = read_picture(name)
    assert read.shape == want.shape
    assert float((read - want).abs().mean()) < 0.05
    assert denoise_module.read(name).shape[-1] == (1 if mode[0] in "LI" else 3)


def test_match_warns_of_a_picture_without_anything_in_it(pair, tmp_path):
    Image.new("RGB", (40, 40), (90, 10, 200)).save(tmp_path / "flat.png")
    code, printed, complaints = call("match", tmp_path / "flat.png", pair / "b.png", "--json", "--out", tmp_path)
    assert code == 0
    assert complaints == "scram: warning: 100% of photograph A is one colour: matches there say nothing\n"
    assert json.loads(printed)["plain_share"] == {"a": 1.0, "b": 0.0}


def test_demo_runs_what_match_runs(tmp_path):
    demo = json.loads(call("demo", "--size", 32, "--json", "--out", tmp_path)[1])["settings"]["default"]
    call("match", "--sample", "city", "--size", 32, "--out", tmp_path)
    warped = torch.from_numpy(np.asarray(Image.open(tmp_path / "warped.png"), dtype=np.float32) / 255)
    error = float((warped - sample_pair(32)[0]).square().mean())
    assert -10 * np.log10(error) == pytest.approx(demo["psnr_db"], abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("match", "none.png", "b.png"), "No such file"),
        (("match", "text.png", "b.png"), "cannot identify image file"),
        (("match", "half.png", "b.png"), "half.png: image file is truncated"),
        (("match", "float.tif", "b.png"), "floats of unknown range"),
        (("match", "folder", "b.png"), "folder: Is a directory"),
        (("match", "tiny.png", "b.png"), "too small"),
        (("match", "a.png", "b.png", "--size", 8), "'--size'"),
        (("match", "a.png", "b.png", "--sideways"), "--sideways"),
        (("sideways",), "sideways"),
        (("match", "a.png"), "give two photographs"),
        (("match", "a.png", "b.png", "--sample", "city"), "not both"),
        (("match", "--sample", "moon"), "city or motorcycle"),
        (("match", "a.png", "b.png", "--truth", "bad.npy"), "must hold"),
        (("match", "a.png", "b.png", "--truth", "text.png"), "not a .npy file"),
        (("match", "a.png", "b.png", "--patch", 4), "odd"),
        (("match", "a.png", "b.png", "--impl", "fast"), "impl"),
        (("match", "a.png", "b.png", "--device", "cuda"), "no CUDA GPU"),
        (("match", "a.png", "b.png", "--out", "a.png/x"), "a.png"),
        (("denoise", "none.png"), "No such file"),
        (("denoise", "text.png"), "cannot identify image file"),
        (("denoise", "half.png"), "half.png: image file is truncated"),
        (("denoise", "folder"), "folder: Is a directory"),
        (("denoise", "tiny.png"), "too small"),
        (("denoise", "a.png", "--patch", 4), "odd"),
        (("denoise", "a.png", "--strength", 0), "strength must be positive"),
        (("denoise", "flat.png"), "nothing to remove"),
        (("denoise", "a.png", "--out", "a.png"), "not a folder"),
        (("figures", "--only", "everything"), "only must name"),
        (("figures", "--only", "curves", "--data", "folder"), "No such file"),
        (("coherence", "--out", "a.png"), "not a folder"),
        (("demo", "--out", "/proc/none/x"), "/proc/none"),
        (("bench", "--resume", "--out", "folder"), "holds no rows"),
        (("bench", "--widths", "5000"), "widths must be 147 or less"),
        (("denoise", "a.png", "--strength", "nan"), "strength must be positive and finite"),
        (("match", "a.png", "b.png", "--scale", "nan"), "scale must be positive and finite, got nan\n"),
        (("bench", "--sizes", "16", "--budget", "0", "--out", "none"), "no time to measure anything"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, words, pair, tmp_path, monkeypatch):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes((pair / name).read_bytes())
    (tmp_path / "text.png").write_text("not a picture")
    Image.new("RGB", (4, 4)).save(tmp_path / "tiny.png")
    Image.new("L", (40, 40)).save(tmp_path / "flat.png")
    (tmp_path / "half.png").write_bytes((pair / "a.png").read_bytes()[:2000])
    Image.fromarray(np.zeros((40, 40), np.float32)).save(tmp_path / "float.tif")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "bench.json").write_text("[]")
    np.save(tmp_path / "bad.npy", np.zeros((3, 3)))
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    code, printed, complaints = call(*arguments)
    assert (code, printed) == (2, ""), complaints
    assert words in complaints
    assert complaints.startswith("scram: ")
    assert complaints.count("\n") == 1
    made = {path.name for path in set(tmp_path.rglob("*")) - before}
    assert made == ({"none", "bench.json"} if "--budget" in arguments else set())


def test_every_command_shows_examples():
    for name in ("demo", "match", "denoise", "figures", "bench", "coherence", "info"):
        code, printed, _ = call(name, "--help")
        assert code == 0
        assert f"scram {name}" in printed.split("Examples:")[1]


def noisy_ramp(channels, sigma):
    line = torch.linspace(0, 1, 48)
    picture = torch.stack([(line[:, None] + 0.3 * n * line[None]) % 0.8 for n in range(channels)], -1)
    return picture, picture + sigma * torch.randn(picture.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels", [1, 3])
def test_denoise_removes_noise(channels):
    picture, noisy = noisy_ramp(channels, 0.1)
    clean = denoise_module.denoise_picture(noisy, 0.1, denoise_module.Settings.of(channels))
    assert clean.shape == picture.shape
    assert denoise_module.psnr(clean, picture) > denoise_module.psnr(noisy, picture) + 5


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_noise_is_estimated(sigma):
    assert denoise_module.estimate_noise(noisy_ramp(3, sigma)[1]) == pytest.approx(sigma, rel=0.12)


def test_a_window_of_everything_is_textbook_non_local_means():
    """With one window over the whole picture the means are those of the dense formula, each patch weighed as a twin."""
    noisy = noisy_ramp(1, 0.1)[1][:20, :20]
    settings = denoise_module.Settings(patch=3, width=9, strength=1.0, matches=1, radius=20)
    features, left = denoise_module._features(noisy, 0.1, settings)
    x = features[0, 0].flatten(0, 1).double()
    weights = torch.exp(-torch.cdist(x, x).square() / (0.01 * left))
    weights.fill_diagonal_(np.exp(-2.0))
    total = weights.sum(1, keepdim=True)
    mean = (weights / total) @ denoise_module._unfold(noisy, 3).flatten(0, 1).double()
    trust = (total / np.exp(-2.0)).sqrt().float().reshape(20, 20, 1)
    want = denoise_module._fold(mean.float().reshape(20, 20, 9), trust, 3, 1)
    torch.testing.assert_close(denoise_module.denoise_picture(noisy, 0.1, settings), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_denoise_command_measures_itself_and_its_rivals(mode, tmp_path):
    pytest.importorskip("skimage")
    pytest.importorskip("cv2")
    a = Image.fromarray((sample_pair(48)[0] * 255).byte().numpy()).convert(mode)
    a.save(tmp_path / "a.png")
    arguments = ("denoise", tmp_path / "a.png", "--add-noise", 25, "--sigma", 25, "--out", tmp_path)
    code, printed, complaints = call(*arguments)
    assert (code, complaints) == (0, "")
    numbers = json.loads((tmp_path / "denoise.json").read_text())
    assert numbers["channels"] == len(mode)
    assert len(numbers["results"]) == 4
    for name, row in numbers["results"].items():
        assert name in printed
        # OpenCV smears so small a colour picture; it is shown as it is.
        least = -3 if name.startswith("OpenCV") else 1
        assert row["psnr_db"] > numbers["noisy_psnr_db"] + least, name
    with Image.open(tmp_path / "denoised.png") as picture:
        assert picture.size == a.size
    plain = json.loads(call("denoise", tmp_path / "a.png", "--json", "--out", tmp_path)[1])
    assert plain["sigma_estimated"]
    assert plain["results"].keys() == {"SCRAM"}
    assert plain["results"]["SCRAM"]["psnr_db"] is None
    assert "scikit-image uses one" in printed
    code, printed, _ = call("denoise", tmp_path / "a.png", "--out", tmp_path)  # who did not run is not spoken of
    assert "SCRAM" in printed
    assert "scikit-image" not in printed


def test_figures_show_what_the_paper_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(figures_module, "SEEDS", 2)
    code, printed, complaints = call("figures", "--size", 64, "--out", tmp_path)
    assert (code, complaints) == (0, "")
    numbers = json.loads((tmp_path / "figures.json").read_text())
    holds = [value for claim, value in numbers["maps"]["claims"].items() if claim.startswith("rows whose maximum")]
    assert len(holds) == 2
    assert min(holds) >= 0.95
    anywhere, apart, more, fewer = numbers["modes"]["claims"].values()
    assert apart > 1.2 * anywhere
    assert more > 3 * fewer
    assert len(numbers["modes"]["rows"]) == 9
    recall = list(numbers["sweeps"]["claims"].values())
    assert recall[0] < 0.05 < recall[2] < recall[3] < recall[4]
    assert recall[4] > 0.85
    for points in numbers["curves"]["lines"]["radius"].values():
        masses = [mass for _, mass in points]
        assert masses == sorted(masses)
    for name in ("maps", "modes", "sweeps", "curves"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000, name
        assert name in printed


def test_low_rank_queries_and_keys_are_the_svd_of_the_picture():
    q, k, picture = figures_module.low_rank()
    u, s, vh = torch.linalg.svd(picture)
    near = (u[:, :4] * s[:4]) @ vh[:4]
    torch.testing.assert_close(q[0, 0, :, 0] @ k[0, 0, :, 0].T, near, rtol=1e-3, atol=1e-3)


def test_blobs_are_connected_regions():
    weights = torch.zeros(6, 7)
    weights[0, 0] = weights[1, 1] = 1.0  # touch at a corner
    weights[4, 3:6] = 0.5
    weights[0, 6] = 0.05  # too faint
    labels = figures_module.blobs(weights)
    assert len(set(labels.flatten().tolist()) - {0}) == 2
    assert labels[0, 0] == labels[1, 1] != labels[4, 4]


def test_shuffled_blocks_are_the_same_keys_elsewhere():
    x = torch.arange(64.0).reshape(1, 1, 8, 8, 1)
    shuffled = coherence_module.shuffle_blocks(x, 4, 0)
    assert sorted(shuffled.flatten().tolist()) == x.flatten().tolist()
    assert not torch.equal(shuffled, x)
    inside = shuffled[0, 0, :4, :4, 0]
    assert torch.equal(inside - inside[0, 0], x[0, 0, :4, :4, 0])


def test_coherence_decides_the_recall(tmp_path):
    code, printed, complaints = call("coherence", "--size", 32, "--out", tmp_path)
    assert (code, complaints) == (0, "")
    assert "photo pair" in printed
    rows = json.loads((tmp_path / "coherence.json").read_text())["rows"]
    recall = {(row["kind"], row["degree"], row["search"]): row["recall"] for row in rows}
    assert recall["photo pair", 1, "shift"] < 0.3 < recall["photo pair", 32, "shift"]
    assert recall["projected photo", 32, "both, gossip"] > recall["projected photo", 32, "shift"] + 0.1
    assert (tmp_path / "coherence.png").stat().st_size > 10_000


def test_settings_of_the_analysis_are_valid_searches():
    assert all(isinstance(one, scram.Search) for one in coherence_module.settings(0).values())
