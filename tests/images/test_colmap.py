"""Text files for COLMAP: keypoints with the half pixel, matches by number, points that pairs share."""

import pytest
import torch

from scram.images import save_colmap
from scram.results import MatchedPoints


def points(a, b):
    return MatchedPoints(torch.tensor(a), torch.tensor(b), torch.ones(len(a)))


def keypoints(path):
    first, *lines = path.read_text().splitlines()
    assert first == f"{len(lines)} 128"
    rows = [line.split() for line in lines]
    assert all(len(row) == 4 + 128 for row in rows)
    return [tuple(map(float, row[:4])) for row in rows]


def matches(path):
    blocks = {}
    for block in path.read_text().strip().split("\n\n"):
        names, *lines = block.splitlines()
        blocks[tuple(names.split())] = [tuple(map(int, line.split())) for line in lines]
    return blocks


def test_points_come_back_with_half_a_pixel_more(tmp_path):
    a = [[0.0, 0.0], [5.0, 7.0], [2.0, 1.0]]
    b = [[1.25, 0.5], [6.0, 9.75], [3.0, 1.0]]
    c = [[4.0, 4.0], [8.5, 2.0]]
    pairs = {("a.jpg", "b.jpg"): points(a, b), ("a.jpg", "c.png"): points(a[:2], c)}
    save_colmap(pairs, tmp_path)
    assert sorted(x.name for x in tmp_path.rglob("*.txt")) == ["a.jpg.txt", "b.jpg.txt", "c.png.txt", "matches.txt"]
    found = {name: keypoints(tmp_path / "features" / f"{name}.txt") for name in ("a.jpg", "b.jpg", "c.png")}
    assert len(found["a.jpg"]) == 3  # the second pair shares its points
    listed = matches(tmp_path / "matches.txt")
    for names, given in pairs.items():
        got = {tuple(found[name][i][:2] for name, i in zip(names, pair, strict=True)) for pair in listed[names]}
        want = {
            tuple((x + 0.5, y + 0.5) for x, y in pair) for pair in zip(given.a.tolist(), given.b.tolist(), strict=True)
        }
        assert got == want


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        (3, TypeError, "pairs must be a dict .*got int"),
        ({"a.jpg": points([[0.0, 0]], [[0.0, 0]])}, ValueError, "pairs must have two file names as keys, got 'a.jpg'"),
        ({("a", "a"): points([[0.0, 0]], [[0.0, 0]])}, ValueError, "pictures of different names, got 'a' twice"),
        ({("a b", "c"): points([[0.0, 0]], [[0.0, 0]])}, ValueError, "without folders and blanks, got 'a b'"),
        ({("../a", "c"): points([[0.0, 0]], [[0.0, 0]])}, ValueError, "without folders and blanks, got '../a'"),
        ({("a", "c"): points([[0.0, 0]], [[torch.nan, 0]])}, ValueError, "b of points must be finite"),
        ({("a", "c"): points([[0.0, 0]], [[0.0, 0], [1, 1]])}, ValueError, r"b of points must be \[n, 2\] = \(1, 2\)"),
        ({("a", "c"): 3}, TypeError, "must be a MatchedPoints, got int"),
    ],
)
def test_errors_leave_nothing_behind(tmp_path, pairs, error, message):
    with pytest.raises(error, match=message):
        save_colmap(pairs, tmp_path / "new")
    assert not (tmp_path / "new").exists()
