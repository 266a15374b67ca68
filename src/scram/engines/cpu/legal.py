"""Which keys a point may take in a search, and the keys it starts from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compiled import compiled
from .layout import Array
from .noise import absorb, below


class Lists(NamedTuple):
    """The unmasked keys; arrays without elements where there is no mask."""

    order: Array  # int32 [Rm, M], those of a mask row, ascending
    count: Array  # type: ignore[assignment]  # int32 [Rm, M], how many come up to each key

    @staticmethod
    def of(mask: Array) -> Lists:
        order = np.zeros(mask.shape, np.int32)
        for row in range(len(mask)):
            legal = np.flatnonzero(mask[row])
            order[row, : len(legal)] = legal
        return Lists(order, mask.cumsum(1, dtype=np.int32))


class Earlier(NamedTuple):
    """The matches that a point has: a new one must be farther than `separation` from each."""

    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    run: int  # how many there are
    separation: int


@compiled
def drawn(geometry, lists, row, query, bits):
    """A key drawn from the legal ones, -1 if there is none."""
    last = query if geometry.causal else geometry.keys - 1
    if len(lists.count) == 0:
        return below(bits, last + 1)
    mask_row = row // geometry.rows_per_mask
    choices = lists.count[mask_row, last]
    if choices == 0:
        return np.int64(-1)
    return np.int64(lists.order[mask_row, below(bits, choices)])


@compiled
def legal(geometry, earlier, row, query, point, key):
    """Whether a key on the grid may be taken: by mask, by order, and by its distance from earlier matches."""
    if geometry.causal and key > query:
        return False
    if len(geometry.mask) and not geometry.mask[row // geometry.rows_per_mask, key]:
        return False
    for match in range(earlier.run):
        other = np.int64(earlier.index[point, match])
        close = earlier.separation and other >= 0 and near(geometry, key, other, earlier.separation)
        if close or other == key:
            return False
    return True


@compiled
def near(geometry, key, other, separation):
    """Whether two keys are at most `separation` apart on every axis."""
    for axis in range(len(geometry.grid)):
        extent, stride = geometry.grid[axis], geometry.strides[axis]
        apart = key // stride % extent - other // stride % extent
        if not -separation <= apart <= separation:
            return False
    return True


@compiled
def first_key(geometry, lists, earlier, warm, entry, seed, row, query):
    """The warm key where it is legal, else a drawn one where that is legal, else -1."""
    point = row * geometry.queries + query
    if entry < warm.shape[1]:
        key = np.int64(warm[point, entry])
        if 0 <= key < geometry.keys and legal(geometry, earlier, row, query, point, key):
            return key
    noise = absorb(absorb(absorb(absorb(absorb(seed, row), query), entry), 0), 0)
    key = drawn(geometry, lists, row, query, noise)
    if key >= 0 and legal(geometry, earlier, row, query, point, key):
        return key
    return np.int64(-1)
