"""`scram inpaint`: masks, rectangles, transparency, depth; one line for what is wrong."""

import json

import numpy as np
import pytest
from PIL import Image

from scram.cli.features import sample_pair
from support.command import call

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A photograph, and masks of it."""
    folder = tmp_path_factory.mktemp("inpaint")
    photo = Image.fromarray((sample_pair(48)[0] * 255).byte().numpy())
    photo.save(folder / "photo.png")
    photo.convert("L").save(folder / "gray.png")
    hole = np.zeros((48, photo.width), np.uint8)
    hole[10:20, 30:45] = hole[40:, :8] = 255
    Image.fromarray(hole).save(folder / "mask.png")
    clear = np.dstack((np.asarray(photo), 255 - hole))
    Image.fromarray(clear).save(folder / "clear.png")
    Image.fromarray(np.dstack((np.full_like(hole, 90), 255 - hole))).save(folder / "clear_mask.png")
    Image.fromarray(np.zeros_like(hole)).save(folder / "empty.png")
    Image.fromarray(hole[:20]).save(folder / "small.png")
    return folder


def pixels(path):
    with Image.open(path) as file:
        return file.mode, np.asarray(file)


@pytest.mark.parametrize(
    ("image", "how", "mode"),
    [
        ("photo.png", ("--mask", "mask.png"), "RGB"),
        ("gray.png", ("--mask", "clear_mask.png"), "L"),
        ("clear.png", (), "RGBA"),
        ("photo.png", ("--rectangle", "30,10,15,10", "--rectangle", "0,40,8,50"), "RGB"),
    ],
    ids=["mask", "gray", "transparent", "rectangles"],
)
def test_holes_are_filled_and_the_rest_is_kept(folder, tmp_path, image, how, mode):
    given = [folder / word if word.endswith(".png") else word for word in how]
    code, printed, complaints = call("inpaint", folder / image, *given, "--out", tmp_path, "--iterations", 1)
    assert (code, complaints) == (0, "")
    assert "inpainted.png" in printed
    hole = pixels(folder / "mask.png")[1] > 0
    (kind, before), (kind_after, after) = pixels(folder / image), pixels(tmp_path / "inpainted.png")
    assert kind == kind_after == mode
    assert np.array_equal(before[~hole], after[~hole])
    if mode == "RGBA":
        assert (after[..., 3] == 255).all()
    numbers = json.loads((tmp_path / "inpaint.json").read_text())
    assert numbers["hole_share"] == pytest.approx(hole.mean())
    assert pixels(tmp_path / "inpaint.png")[0].startswith("RGB")


def test_sharp_takes_single_patches(folder, tmp_path):
    arguments = ("inpaint", folder / "photo.png", "--mask", folder / "mask.png", "--iterations", 1, "--json")
    settings = json.loads(call(*arguments, "--sharp", "--out", tmp_path)[1])["settings"]
    assert (settings["matches"], settings["iterations"]) == (1, 1)
    assert settings["selective"] > 0


def test_a_failure_is_told_with_its_place(tmp_path):
    """A face in a hole cannot be known; a hole in the wall behind it can."""
    results = []
    for rectangle in ("180,60,90,120", "330,10,50,40"):
        arguments = ("inpaint", "astronaut", "--rectangle", rectangle, "--iterations", 1, "--out", tmp_path)
        code, printed, complaints = call(*arguments)
        assert (code, complaints) == (0, "")
        results.append((printed, json.loads((tmp_path / "inpaint.json").read_text())["doubts"]))
    (printed, found), (quiet, none) = results
    assert "warning" in printed
    assert found[0]["distance"] > 0.095
    assert all(abs(got - want) <= 8 for got, want in zip(found[0]["rectangle"], (180, 60, 90, 120), strict=True))
    assert "warning" not in quiet
    assert none == []


def test_json_and_seeds(folder, tmp_path):
    arguments = ("inpaint", folder / "photo.png", "--mask", folder / "mask.png", "--iterations", 1, "--json")
    results = []
    for name in ("one", "two"):
        numbers = json.loads(call(*arguments, "--out", tmp_path / name)[1])
        assert numbers["settings"]["iterations"] == 1
        results.append((tmp_path / name / "inpainted.png").read_bytes())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("photo.png",), "--mask or --rectangle"),
        (("photo.png", "--mask", "empty.png"), "hole is empty"),
        (("photo.png", "--mask", "small.png"), "both must be equal"),
        (("photo.png", "--mask", "nothing.png"), "nothing.png"),
        (("nothing.png",), "No such file or sample"),
        (("photo.png", "--rectangle", "5,5"), "left,top,width,height"),
        (("photo.png", "--rectangle", "500,5,3,3"), "outside the picture"),
        (("photo.png", "--rectangle", "0,0,999,999"), "whole picture"),
        (("photo.png", "--rectangle", "1,1,5,5", "--patch", "4"), "odd"),
        (("photo.png", "--rectangle", "1,1,5,5", "--device", "tpu"), "device"),
    ],
    ids=str,
)
def test_errors_are_one_line_and_write_nothing(folder, tmp_path, words, message):
    (tmp_path / "inpainted.png").write_text("old")
    given = [folder / word if word.endswith(".png") else word for word in words]
    code, printed, complaints = call("inpaint", *given, "--out", tmp_path)
    assert (code, printed) == (2, "")
    assert message in complaints
    assert complaints.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["inpainted.png"]
    assert (tmp_path / "inpainted.png").read_text() == "old"
