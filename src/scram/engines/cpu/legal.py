"""Which keys a point may take in a search, and the keys it starts from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...calls import SearchCall
from .compiled import compiled
from .layout import Array
from .noise import absorb, below, row_states


class Choices(NamedTuple):
    """What keys are drawn from: the unmasked keys, lists without elements where there is no mask; and warm keys."""

    order: Array  # int32 [Rm, M], the unmasked keys of a mask row, ascending
    count: Array  # type: ignore[assignment]  # int32 [Rm, M], how many come up to each key
    warm: Array  # int32 [P, any number]
    seed: Array  # uint32 [R], the hash after the seed and the row

    @staticmethod
    def of(call: SearchCall, mask: Array) -> Choices:
        order, warm = np.zeros(mask.shape, np.int32), np.zeros((0, 0), np.int32)
        for row in range(len(mask)):
            legal = np.flatnonzero(mask[row])
            order[row, : len(legal)] = legal
        if call.warm is not None:
            warm = call.warm.flatten(0, -2).contiguous().numpy()
        return Choices(order, mask.cumsum(1, dtype=np.int32), warm, row_states(call.seed, call.q, call.rows))


class Earlier(NamedTuple):
    """The matches that a point has: a new one must be farther than `separation` from each."""

    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    run: int  # how many there are
    separation: int


@compiled
def drawn(geometry, choices, row, query, bits):
    """A key drawn from the legal ones, -1 if there is none."""
    last = query if geometry.causal else geometry.keys - 1
    if len(choices.count) == 0:
        return below(bits, last + 1)
    mask_row = row // geometry.rows_per_mask
    most = choices.count[mask_row, last]
    if most == 0:
        return np.int64(-1)
    return np.int64(choices.order[mask_row, below(bits, most)])


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
def first_key(geometry, choices, earlier, entry, row, query):
    """The warm key where it is legal, else a drawn one where that is legal, else -1."""
    point = row * geometry.queries + query
    if entry < choices.warm.shape[1]:
        key = np.int64(choices.warm[point, entry])
        if 0 <= key < geometry.keys and legal(geometry, earlier, row, query, point, key):
            return key
    noise = absorb(absorb(absorb(absorb(choices.seed[row], query), entry), 0), 0)
    key = drawn(geometry, choices, row, query, noise)
    if key >= 0 and legal(geometry, earlier, row, query, point, key):
        return key
    return np.int64(-1)
