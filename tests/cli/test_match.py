"""`scram match`: what it finds and writes, which pictures it reads."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from command import call
from scram.cli import denoise as denoise_module
from scram.cli.features import read_picture, sample_pair

pytestmark = pytest.mark.slow


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
