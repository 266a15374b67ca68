"""`scram explore`: pictures and tensors to one page; refusals in one line, and no file where one was."""

import json

import numpy as np
import pytest
from PIL import Image

from scram.cli.explore import MOST_PIXELS, _small
from scram.explorer.page import read_back
from scram.images.reading import Picture
from support.command import call

FAST = ("--sweeps", 1, "--clusters", 16, "--patch", 5, "--width", 8, "--matches", 1)


def test_two_pictures(pair, tmp_path):
    code, printed, complaints = call("explore", pair / "a.png", pair / "b.png", "--out", tmp_path, "--json", *FAST)
    assert (code, complaints) == (0, "")
    numbers = json.loads(printed)
    assert numbers["panes"] == 2
    assert numbers["scale"] == 100
    assert numbers["title"] == "a.png and b.png"
    page = tmp_path / "explore.html"
    assert numbers["bytes"] == page.stat().st_size
    about, _ = read_back(page.read_text(encoding="utf-8"))
    assert about["quality"] == numbers["quality"]
    assert json.loads((tmp_path / "explore.json").read_text()) == numbers


def test_one_picture_attends_to_itself(pair, tmp_path):
    code, printed, complaints = call("explore", pair / "a.png", "--out", tmp_path, "--size", 24, *FAST)
    assert code == 0
    assert "captured mass of the windows" in printed
    assert "captured with routed keys" in printed
    assert "explore.html" in printed
    assert complaints == "scram: a.png is scaled from 85 x 48 to 42 x 24 pixels.\n"
    assert json.loads((tmp_path / "explore.json").read_text())["panes"] == 1


def test_without_a_search(pair, tmp_path):
    wanted = ("--matches", 0, "--clusters", 32, "--keys", 40, *FAST[4:8])
    code, printed, _ = call("explore", pair / "a.png", "--out", tmp_path, *wanted)
    assert code == 0
    assert "captured by routed keys" in printed
    assert "windows" not in printed
    numbers = json.loads((tmp_path / "explore.json").read_text())
    assert (numbers["matches"], numbers["clusters"], numbers["routed_keys"]) == (0, 32, 40)


def test_tensors_of_a_file(tmp_path):
    q, k, v = np.random.default_rng(0).standard_normal((3, 9, 11, 2, 4)).astype(np.float16)
    np.savez(tmp_path / "qkv.npz", q=q, k=k, v=v, scale=0.25)
    code, printed, _ = call("explore", tmp_path / "qkv.npz", "--axes", "yxhe", "--out", tmp_path, "--json", *FAST[:4])
    assert code == 0
    numbers = json.loads(printed)
    assert (len(numbers["heads"]), numbers["queries"]["grid"], numbers["scale"]) == (2, [9, 11], 0.25)


def test_large_pictures_are_scaled_down():
    whole = Picture(np_picture(300, 500))
    assert _small(whole, None).pixels.shape[0] == 198
    assert np.prod(_small(whole, None).pixels.shape[:2]) <= MOST_PIXELS * 1.01
    assert _small(whole, 150).pixels.shape[:2] == (150, 250)
    assert _small(Picture(np_picture(20, 30)), None).pixels.shape[:2] == (20, 30)


def np_picture(height, width):
    import torch

    return torch.rand(height, width, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give a picture, two pictures, or tensors"),
        ("none.png", "none.png: No such file or sample"),
        ("none.npz", "none.npz: No such file or directory"),
        ("qkv.npz other.png", "qkv.npz holds queries and keys; leave out other.png"),
        ("a.png --sample city", "give files or --sample, not both"),
        ("--sample citty", "sample must be one of city, motorcycle, got citty; did you mean city?"),
        ("a.png --panes tow", "panes must be one of auto, one, two, got tow; did you mean two?"),
        ("a.png --scale 0", "scale must be positive and finite, got 0.0"),
        ("a.png --patch 4", "patch must be odd, got 4"),
        ("a.png --matches 0 --clusters 0", "without matches and clusters nothing is attended"),
        ("qkv.npz --grid 5x5", "q has 4 x 6 = 24 points, but the grid 5 x 5 has 25"),
        ("qkv.npz --size 64", "--size is for pictures, and qkv.npz holds tensors; leave it out"),
        ("a.png --grid 48x85", "--grid is for tensors, and a.png is a picture; leave it out"),
        ("--sample city --axes yxe", "--axes is for tensors, and city is a picture; leave it out"),
        ("broken.png", "broken.png: not a picture of a kind that is read"),
        ("small.png", "a 3 x 3 picture is too small for 11 x 11 patches"),
    ],
)
def test_refusals_are_one_line_and_leave_the_old_page(arguments, message, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes((pair / "a.png").read_bytes())
    (tmp_path / "broken.png").write_text("no picture")
    np.savez(tmp_path / "qkv.npz", **dict.fromkeys("qkv", np.zeros((1, 1, 4, 6, 2), np.float32)))
    Image.new("RGB", (3, 3)).save(tmp_path / "small.png")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "explore.html").write_text("old")
    code, printed, complaint = call("explore", *arguments.split(), "--out", "out")
    assert (code, printed) == (2, "")
    assert complaint.startswith(f"scram: {message}")
    assert complaint.count("\n") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["explore.html"]
    assert (tmp_path / "out" / "explore.html").read_text() == "old"
