"""Arguments of the commands: a wrong one is one line and exit code 2."""

import numpy as np
import pytest
import torch
from PIL import Image

from support.command import call

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("match", "none.png", "b.png"), "No such file"),
        (("match", "text.png", "b.png"), "not a picture of a kind that is read"),
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
        (("denoise", "text.png"), "not a picture of a kind that is read"),
        (("denoise", "half.png"), "half.png: image file is truncated"),
        (("denoise", "folder"), "folder: a folder without pictures"),
        (("denoise", "tiny.png"), "too small"),
        (("denoise", "a.png", "--patch", 4), "odd"),
        (("denoise", "a.png", "--patch", 5), "patch is a setting of the fast method; give --fast too"),
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
