"""Planes of whole numbers to bytes: predicted, folded to positive numbers, split into bytes, deflated.

A plane is one number for each point of a grid: a channel of features, a coordinate of the matches, a color. A plane is
stored as it is (PLAIN), less its left neighbor (LEFT), or less the plane `back` places before it (BEFORE), whichever
packs best. Differences wrap around in 16 bits. 0, -1, 1, -2, .. become 0, 1, 2, 3, ..; the lower bytes of a plane stand
before its upper bytes.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PLAIN = 0
LEFT = 1
BEFORE = 2
RUNS = 8  # stretches of points that the size is estimated from
RUN = 512  # points of each
LEVEL = 6

Planes = NDArray[np.int16]
Json = dict[str, Any]  # an object of the page's data


def folded(planes: Planes, back: int) -> tuple[NDArray[np.uint16], list[int]]:
    """Differences as positive numbers [P, n], and how each plane was predicted."""
    best = np.empty(planes.shape, np.uint16)
    predictors = []
    for p, plane in enumerate(planes):
        forms = [_positive(plane), _positive(np.diff(plane, prepend=np.int16(0)))]
        if back and p >= back:
            forms.append(_positive(plane - planes[p - back]))
        bits = [entropy(form) for form in forms]
        predictors.append(int(np.argmin(bits)))
        best[p] = forms[predictors[-1]]
    return best, predictors


def _positive(x: Planes) -> NDArray[np.uint16]:
    return ((x << 1) ^ (x >> 15)).view(np.uint16)


def entropy(x: NDArray[np.uint16]) -> float:
    """Bits that each number takes when its two bytes are coded one by one."""
    return _entropy(np.bincount((x & 255).ravel())) + _entropy(np.bincount((x >> 8).ravel()))


def _entropy(counts: NDArray[np.int64]) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def estimated_bytes(planes: NDArray[np.floating[Any]], step: float) -> float:
    """About how many bytes planes [P, n] take when they are rounded to multiples of `step`."""
    sample = some(planes)
    share = float(planes.shape[-1] / sample.shape[-1])
    return len(_deflated(folded(rounded(sample, step), 0)[0])) * share


def _deflated(positive: NDArray[np.uint16]) -> bytes:
    """The lower bytes of each plane, then its upper bytes."""
    return zlib.compress(np.stack((positive & 255, positive >> 8), 1).astype(np.uint8).tobytes(), LEVEL)


def some(planes: NDArray[Any]) -> NDArray[Any]:
    """A few stretches of the points [P, n]."""
    length = planes.shape[-1]
    if length <= RUNS * RUN:
        return planes
    return np.concatenate([planes[:, at : at + RUN] for at in np.linspace(0, length - RUN, RUNS).astype(int)], 1)


def rounded(planes: NDArray[np.floating[Any]], step: float) -> Planes:
    """Whole multiples of the step, cut to 16 bits."""
    whole: Planes = np.clip(np.rint(planes / step), -32767, 32767).astype(np.int16)
    return whole


@dataclass
class Packed:
    """Named arrays in one run of bytes, and the list that says where each stands."""

    entries: list[Json] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def add(self, name: str, planes: Planes, back: int = 0) -> None:
        """Whole numbers int16 [P, n]."""
        positive, predictors = folded(np.ascontiguousarray(planes), back)
        entry = {"name": name, "kind": "planes", "shape": list(planes.shape), "how": predictors, "back": back}
        self._store(entry, _deflated(positive))

    def add_floats(self, name: str, x: NDArray[Any]) -> None:
        """Few numbers, as float32 of any shape."""
        data = zlib.compress(np.ascontiguousarray(x, "<f4").tobytes(), LEVEL)
        self._store({"name": name, "kind": "floats", "shape": list(x.shape)}, data)

    def _store(self, entry: Json, data: bytes) -> None:
        self.entries.append({**entry, "at": len(self), "bytes": len(data)})
        self.parts.append(data)

    def append(self, other: Packed) -> None:
        """All arrays of another one."""
        start = len(self)
        self.entries += [{**entry, "at": entry["at"] + start} for entry in other.entries]
        self.parts += other.parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def text(self) -> str:
        """All bytes in base64."""
        return base64.b64encode(b"".join(self.parts)).decode()


def unpacked(entries: list[Json], text: str) -> dict[str, NDArray[Any]]:
    """The arrays that `Packed` holds, by name: what the page reads, in Python.

    >>> packed = Packed()
    >>> packed.add("x", np.array([[3, -4, 5]], np.int16))
    >>> unpacked(packed.entries, packed.text())["x"]
    array([[ 3, -4,  5]], dtype=int16)
    """
    data = base64.b64decode(text)
    arrays = {}
    for entry in entries:
        raw = zlib.decompress(data[entry["at"] : entry["at"] + entry["bytes"]])
        shape = tuple(entry["shape"])
        if entry["kind"] == "floats":
            arrays[entry["name"]] = np.frombuffer(raw, "<f4").reshape(shape)
            continue
        low, high = np.frombuffer(raw, np.uint8).reshape(shape[0], 2, -1).astype(np.uint16).swapaxes(0, 1)
        positive = low | high << 8
        planes = ((positive >> 1) ^ (0 - (positive & 1))).view(np.int16).copy()
        for p, predictor in enumerate(entry["how"]):
            if predictor == LEFT:
                planes[p] = np.cumsum(planes[p], dtype=np.int16)
            elif predictor == BEFORE:
                planes[p] += planes[p - entry["back"]]
        arrays[entry["name"]] = planes
    return arrays
