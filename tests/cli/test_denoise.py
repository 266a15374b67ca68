"""`scram denoise`: it removes noise, measures itself and its rivals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from command import call
from scram.cli import denoise as denoise_module
from scram.cli.features import sample_pair

pytestmark = pytest.mark.slow


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


def test_unknown_photograph_lists_the_samples(tmp_path: Path) -> None:
    code, printed, complaint = call("denoise", "cofee", "--out", tmp_path / "new")
    assert (code, printed) == (2, "")
    for words in (
        "cofee: No such file or sample",
        "did you mean coffee?",
        "astronaut, camera, chelsea, coffee, retina",
    ):
        assert words in complaint
    assert "did you mean" not in call("denoise", "zzz")[2]
