"""`scram match`: what it finds and writes, which pictures it reads."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from scram.cli.features import sample_pair
from scram.cli.match import area_under_curve
from support.command import call

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
    assert numbers["median_flow_px"] == pytest.approx([-3, 2], abs=0.3)
    with np.load(tmp_path / "match.npz") as arrays:
        assert arrays["warp"].shape == (*arrays["certainty"].shape, 2)
        assert arrays["points_a"].shape == arrays["points_b"].shape == (numbers["sampled_points"], 2)
        moved = np.median(arrays["points_b"] - arrays["points_a"], 0)
        assert moved == pytest.approx(numbers["median_flow_px"], abs=0.2)
        assert arrays["pose"].shape == arrays["score"].shape
        assert 0 <= arrays["certainty"].min() <= arrays["certainty"].max() <= 1
    for name in ("match", "field", "lines", "rebuilt", "certainty", "error"):
        assert (tmp_path / f"{name}.png").stat().st_size > 100, name


def test_match_takes_photographs_of_unequal_size(pair, tmp_path):
    Image.open(pair / "b.png").crop((0, 0, 60, 40)).save(tmp_path / "small.png")
    arguments = ("match", pair / "a.png", tmp_path / "small.png", "--patch", 5, "--json", "--out", tmp_path)
    first, second = (json.loads(call(*arguments, "--matches", 2, "--seed", 4)[1]) for _ in range(2))
    assert (first["grid_a"][0], first["grid_b"]) == (48, [40, 60])
    assert first["median_flow_px"] == second["median_flow_px"]


def test_match_says_which_frame_it_took(pair, tmp_path):
    a = Image.open(pair / "a.png")
    a.save(tmp_path / "a.gif", save_all=True, append_images=[a.rotate(180)])
    code, printed, _ = call("match", tmp_path / "a.gif", pair / "b.png", "--patch", 5, "--out", tmp_path)
    assert code == 0
    assert "the first of 2 frames" in printed


def test_match_turns_the_picture_where_it_is_asked_to(pair, tmp_path):
    with Image.open(pair / "a.png") as a:
        a.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png")
    arguments = ("match", pair / "a.png", tmp_path / "turned.png", "--patch", 5, "--json", "--out", tmp_path)
    code, printed, complaints = call(*arguments)
    assert code == 0
    assert "of the matches fail the check" in complaints
    assert "--rotations 0,90,180,270" in complaints
    plain = json.loads(printed)
    code, printed, complaints = call(*arguments, "--rotations", "0,90,180,270")
    assert (code, complaints) == (0, "")
    numbers = json.loads(printed)
    assert numbers["poses"][0]["rotation"] == 90
    assert numbers["sure_share"] > max(0.8, 2 * plain["sure_share"])
    code, _, complaints = call(*arguments, "--scales", "1,x")
    assert (code, complaints) == (2, "scram: scales must be numbers with commas, got 1,x\n")
    code, _, complaints = call(*arguments, "--scales", "100")
    assert (code, complaints) == (2, "scram: scales must lie between 0.1 and 10, got 100\n")


def test_colmap_gets_points_in_pixels_of_the_files(pair, tmp_path):
    arguments = ("match", pair / "a.png", pair / "b.png", "--patch", 5, "--points", 50, "--colmap", "--out", tmp_path)
    assert call(*arguments, "--size", 36)[0] == 0
    places = []
    for name in "ab":
        first, *lines = (tmp_path / "colmap/features" / f"{name}.png.txt").read_text().splitlines()
        assert first == f"{len(lines)} 128"
        places.append(np.array([line.split()[:2] for line in lines], dtype=float))
    names, *lines = (tmp_path / "colmap/matches.txt").read_text().split("\n")
    assert names == "a.png b.png"
    number = np.array([line.split() for line in lines if line], dtype=int)
    assert len(number) == 50
    moved = np.median(places[1][number[:, 1]] - places[0][number[:, 0]], 0)
    assert moved == pytest.approx([-3, 2], abs=0.3)


def test_colmap_says_which_pictures_it_cannot_tell(pair, tmp_path):
    (tmp_path / "in").mkdir()
    with Image.open(pair / "a.png") as a:
        a.save(tmp_path / "in/a.png")
        turned = a.getexif()
        turned[0x0112] = 3
        a.save(tmp_path / "in/turned.jpg", exif=turned)
    out = ("--colmap", "--out", tmp_path / "out")
    for names, message in (
        (("--sample", "city"), "--colmap is for two files, not for a sample; leave it out"),
        ((pair / "a.png", tmp_path / "in/a.png"), "COLMAP needs pictures of different names, got 'a.png' twice"),
        ((pair / "a.png", tmp_path / "in/turned.jpg"), "turned.jpg: COLMAP reads its pixels as they are stored"),
    ):
        code, _, complaints = call("match", *names, *out)
        assert code == 2
        assert message in complaints
        assert complaints.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_area_under_curve_is_the_chance_that_right_is_surer():
    certainty = torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0)) / 8
    hit = torch.rand(60, generator=torch.Generator().manual_seed(1)) < certainty
    pairs = [(x > y) + 0.5 * (x == y) for x in certainty[hit].tolist() for y in certainty[~hit].tolist()]
    assert area_under_curve(certainty, hit) == pytest.approx(sum(pairs) / len(pairs))
    assert area_under_curve(certainty, torch.ones(60).bool()) is None


def test_match_warns_of_a_picture_without_anything_in_it(pair, tmp_path):
    Image.new("RGB", (40, 40), (90, 10, 200)).save(tmp_path / "flat.png")
    code, printed, complaints = call("match", tmp_path / "flat.png", pair / "b.png", "--json", "--out", tmp_path)
    assert code == 0
    assert complaints == "scram: warning: 100% of photograph A is one color: matches there say nothing\n"
    assert json.loads(printed)["plain_share"] == {"a": 1.0, "b": 0.0}


def test_demo_runs_what_match_runs(tmp_path):
    demo = json.loads(call("demo", "--size", 32, "--json", "--out", tmp_path)[1])["settings"]["default"]
    call("match", "--sample", "city", "--size", 32, "--out", tmp_path)
    rebuilt = torch.from_numpy(np.asarray(Image.open(tmp_path / "rebuilt.png"), dtype=np.float32) / 255)
    error = float((rebuilt - sample_pair(32)[0]).square().mean())
    assert -10 * np.log10(error) == pytest.approx(demo["psnr_db"], abs=0.1)
