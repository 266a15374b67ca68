"""`scram denoise`: it removes noise, measures itself and its rivals."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from PIL import Image

from scram.cli.features import sample_pair
from scram.images.films import Writer, open_film
from scram.images.reading import Picture, read, write
from support.command import call

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
        # OpenCV smears so small a color picture; it is shown as it is.
        least = -3 if name.startswith("OpenCV") else 1
        assert row["psnr_db"] > numbers["noisy_psnr_db"] + least, name
    with Image.open(tmp_path / "denoised.png") as picture:
        assert picture.size == a.size
    assert numbers["method"] == "collaborative"
    fast = json.loads(call(*arguments, "--no-rivals", "--fast", "--patch", 3, "--json")[1])
    assert (fast["method"], fast["settings"]["patch"]) == ("non-local means", 3)
    assert fast["results"]["SCRAM"]["psnr_db"] < numbers["results"]["SCRAM"]["psnr_db"]
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
def test_depth_gray_and_alpha_are_kept(channels, bits, tmp_path):
    values = (0.5 + 0.1 * torch.randn(20, 24, channels)).clamp(0, 1)
    colors = 1 if channels < 3 else 3
    before = Picture(values[..., :colors], values[..., colors:] if channels % 2 == 0 else None, bits)
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


def test_a_folder_of_frames_is_a_film(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(3):
        write(Picture(sample_pair(48)[0][:, n : n + 64]), tmp_path / "in" / f"{n}.png")
    arguments = ("denoise", tmp_path / "in", "--add-noise", 25, "--reach", 1, "--out", tmp_path / "out")
    code, printed, complaints = call(*arguments, "--json")
    assert (code, complaints) == (0, "")
    numbers = json.loads(printed)
    assert numbers["frames"] == 3
    assert numbers["method"] == "collaborative"
    assert numbers["sigma"] == pytest.approx(25, rel=0.5)  # texture counts as noise
    assert numbers["psnr_db"] > numbers["noisy_psnr_db"] + 3
    assert sorted(file.name for file in (tmp_path / "out" / "denoised").iterdir()) == ["0.png", "1.png", "2.png"]
    assert (tmp_path / "out" / "denoise.png").stat().st_size > 100
    fast = json.loads(call(*arguments, "--json", "--fast", "--patch", 3)[1])
    assert (fast["method"], fast["settings"]["patch"]) == ("non-local means", 3)
    assert numbers["psnr_db"] > fast["psnr_db"]
    code, _, complaint = call(*arguments, "--patch", 3)
    assert code == 2
    assert "patch is a setting of the fast method; give --fast too, or leave it out" in complaint


def test_an_empty_folder_is_refused(tmp_path):
    code, _, complaints = call("denoise", tmp_path, "--out", tmp_path / "out")
    assert code == 2
    assert complaints.strip().splitlines() == [complaints.strip()]
    assert "a folder without pictures" in complaints


def test_a_film_that_is_stopped_is_kept(tmp_path, monkeypatch):
    pytest.importorskip("av")
    from scram.cli import denoise_film

    with Writer(tmp_path / "film.mp4", Fraction(25)) as writer:
        for n in range(4):
            writer.write(Picture(sample_pair(48)[0][:, n : n + 64]))

    def stopped(frames, *_, **__):
        yield from list(frames)[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(denoise_film, "denoise_frames", stopped)
    code, _, complaints = call("denoise", tmp_path / "film.mp4", "--sigma", 25, "--out", tmp_path / "out")
    assert code == 130
    assert "2 frames kept in" in complaints
    assert len(list(open_film(tmp_path / "out" / "denoised-interrupted.mp4").frames)) == 2


def test_unknown_photograph_lists_the_samples(tmp_path: Path) -> None:
    code, printed, complaint = call("denoise", "cofee", "--out", tmp_path / "new")
    assert (code, printed) == (2, "")
    for words in (
        "cofee: No such file or sample",
        "did you mean coffee?",
        "astronaut, brick, camera, chelsea, coffee, grass, gravel, retina, rocket",
    ):
        assert words in complaint
    assert "did you mean" not in call("denoise", "zzz")[2]
