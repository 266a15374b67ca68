"""`scram retarget`: sizes, what it measures, and one line for what is wrong."""

import json

import numpy as np
import pytest
from PIL import Image

from support.command import call

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("size", "want"), [("48x", (48, 48)), ("x40", (72, 40)), ("80x56", (80, 56))])
def test_the_result_has_the_size(tmp_path, size, want):
    columns = np.arange(72)[None] + 3 * np.arange(48)[:, None]
    Image.fromarray((127 + 120 * np.sin(columns * 0.7)).astype(np.uint8)).save(tmp_path / "a.png")
    code, printed, complaints = call(
        "retarget", tmp_path / "a.png", "--size", size, "--out", tmp_path / "out", "--json"
    )
    assert (code, complaints) == (0, "")
    with Image.open(tmp_path / "out" / "retargeted.png") as file:
        assert (file.size, file.mode) == (want, "L")
    numbers = json.loads(printed)
    assert numbers["result"] == [want[1], want[0]]
    assert numbers["shape_error"].keys() == {"retargeted", "resized"}
    change = want[1] / 48 * 72 / want[0]
    assert numbers["shape_error"]["resized"] == pytest.approx(max(change, 1 / change) - 1, rel=1e-4)


@pytest.mark.parametrize("size", ["48", "x", "ax3", "0x10"])
def test_sizes_that_are_none(tmp_path, size):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    code, _, complaints = call("retarget", tmp_path / "a.png", "--size", size, "--out", tmp_path / "out")
    assert code == 2
    assert "size must be" in complaints
    assert not (tmp_path / "out").exists()
