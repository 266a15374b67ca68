"""`scram generate`: as many pictures as asked for, a file for each seed."""

import json

import numpy as np
import pytest
from PIL import Image

from support.command import call

pytestmark = pytest.mark.slow


def test_every_seed_has_its_picture(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((48, 48), Image.Resampling.NEAREST).save(tmp_path / "a.png")
    arguments = ("generate", tmp_path / "a.png", "--size", "40x52", "--iterations", 1, "--out", tmp_path / "out")
    code, printed, complaints = call(*arguments, "--count", 2, "--seed", 3, "--json")
    assert (code, complaints) == (0, "")
    made = json.loads(printed)["pictures"]
    assert [row["file"] for row in made] == ["generated-3.png", "generated-4.png"]
    first, second = (np.asarray(Image.open(tmp_path / "out" / row["file"])) for row in made)
    assert first.shape == (52, 40, 3)
    assert not np.array_equal(first, second)
    assert "generated-4.png" in call(*arguments, "--seed", 4)[1]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / "generated-4.png")), second)


def test_bad_arguments_are_one_line(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    for words, message in ((("--variety", "-1"), "variety"), (("--size", "9"), "size must be")):
        code, _, complaints = call("generate", tmp_path / "a.png", *words, "--out", tmp_path / "out")
        assert code == 2
        assert message in complaints
        assert complaints.count("\n") == 1


def test_a_scene_is_one_line_and_writes_nothing(tmp_path):
    arguments = ("generate", "rocket", "--size", "40x40", "--iterations", 1, "--out", tmp_path / "out")
    code, printed, complaints = call(*arguments)
    assert (code, printed) == (2, "")
    assert "rocket: this is a scene, not a texture" in complaints
    assert complaints.count("\n") == 1
    assert not (tmp_path / "out").exists()
    code, printed, _ = call(*arguments, "--scenes", "--json")
    assert code == 0
    assert json.loads(printed)["unevenness"] > 0.165
