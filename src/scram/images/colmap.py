"""Matched points as the text files that COLMAP's feature_importer and matches_importer read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.checks import instance
from ..results import MatchedPoints
from .files import replacing

HALF = 0.5  # COLMAP's center of the first pixel
DESCRIPTOR = " ".join(["0"] * 128)  # must be there; matches that are given need none


def save_colmap(pairs: Mapping[tuple[str, str], MatchedPoints], folder: str | os.PathLike[str]) -> None:
    """Write the keypoints of every picture to `features/NAME.txt` and the matches of all pairs to `matches.txt`.

    `colmap feature_importer --import_path FOLDER/features` and `colmap matches_importer --match_type raw
    --match_list_path FOLDER/matches.txt` read them. A point that a picture shares between pairs is one keypoint.

    Args:
        pairs: for the file names of every two pictures their points, places [n, 2] as `Matching.sample` returns them.
        folder: made if it is not there.

    >>> import tempfile, torch
    >>> points = MatchedPoints(torch.zeros(1, 2), torch.tensor([[3.25, 1.0]]), torch.ones(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_colmap({("a.jpg", "b.jpg"): points}, folder)
    ...     print(Path(folder, "matches.txt").read_text().split())
    ['a.jpg', 'b.jpg', '0', '0']
    """
    _check(pairs)
    folder = Path(folder)
    (folder / "features").mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[NDArray[np.float64]]] = {}
    for names, points in pairs.items():
        for name, places in zip(names, points[:2], strict=True):
            parts.setdefault(name, []).append(places.detach().cpu().double().numpy() + HALF)
    numbers: dict[str, list[NDArray[np.intp]]] = {}
    for name, part in parts.items():
        keypoints, number = np.unique(np.concatenate(part), axis=0, return_inverse=True)
        ends = np.cumsum([len(places) for places in part])[:-1]
        numbers[name] = np.split(number.reshape(-1), ends)
        lines = [f"{len(keypoints)} 128", *(f"{x:.4f} {y:.4f} 1 0 {DESCRIPTOR}" for x, y in keypoints.tolist())]
        _write(folder / "features" / f"{name}.txt", lines)
    lines = []
    for a, b in pairs:
        both = np.unique(np.stack((numbers[a].pop(0), numbers[b].pop(0)), 1), axis=0)
        lines += [f"{a} {b}", *(f"{i} {j}" for i, j in both.tolist()), ""]
    _write(folder / "matches.txt", lines)


def check_names(a: str, b: str) -> None:
    """Raise ValueError where COLMAP could not tell the two pictures by these names."""
    for name in (a, b):
        if not name or name != Path(name).name or any(letter.isspace() for letter in name):
            raise ValueError(f"COLMAP needs file names without folders and blanks, got {name!r}; rename the picture")
    if a == b:
        raise ValueError(f"COLMAP needs pictures of different names, got {a!r} twice; rename one")


def _check(pairs: Mapping[tuple[str, str], MatchedPoints]) -> None:
    instance("pairs", pairs, Mapping, "dict of (name, name) to points", "; for example {('a.jpg', 'b.jpg'): points}")
    for names, points in pairs.items():
        if not isinstance(names, tuple) or len(names) != 2 or not all(isinstance(name, str) for name in names):
            raise ValueError(f"pairs must have two file names as keys, got {names!r}")
        check_names(*names)
        instance(f"pairs[{names}]", points, MatchedPoints, "MatchedPoints", "; Matching.sample returns them")
        for name, places in (("a", points.a), ("b", points.b)):
            if places.ndim != 2 or places.shape != (len(points.a), 2):
                raise ValueError(f"{name} of points must be [n, 2] = {(len(points.a), 2)}, got {tuple(places.shape)}")
            if not bool(places.isfinite().all()):
                raise ValueError(f"{name} of points must be finite; drop points that were not found")


def _write(path: Path, lines: list[str]) -> None:
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")
