"""`scram denoise`: it removes noise, measures itself and its rivals."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from command import call
from scram.cli.features import sample_pair
from scram.images.reading import Picture, read, write

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [8, 16])
def test_depth_grey_and_alpha_are_kept(channels, bits, tmp_path):
    values = (0.5 + 0.1 * torch.randn(20, 24, channels)).clamp(0, 1)
    colours = 1 if channels < 3 else 3
    before = Picture(values[..., :colours], values[..., colours:] if channels % 2 == 0 else None, bits)
    write(before, tmp_path / "a.png")
    before = read(tmp_path / "a.png")
    code, printed, _ = call("denoise", tmp_path / "a.png", "--sigma", 20, "--out", tmp_path)
    assert code == 0
    after = read(tmp_path / "denoised.png")
    assert after.kind == before.kind
    assert before.kind in printed
    assert ("transparency is kept" in printed) == before.has_alpha
    assert not torch.equal(after.pixels, before.pixels)
    if before.has_alpha:
        assert torch.equal(after.alpha, before.alpha)


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
