"""Which keys a point may take in a search, and the keys it starts from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.calls import SearchCall
from ...spec.grid import Grid, grid_of
from .compiled import compiled
from .layout import Array
from .noise import absorb, below, row_states


class Choices(NamedTuple):
    """What keys are drawn from: the unmasked keys, lists without elements where there is no mask; and warm keys."""

    order: Array  # int32 [R or B, M], the unmasked keys of a row of the mask, ascending
    count: Array  # type: ignore[assignment]  # int32 [R or B, M], how many come up to each key
    warm: Array  # int32 [P, any number]
    seed: Array  # uint32 [R], the hash after the seed and the row

    @staticmethod
    def of(call: SearchCall, mask: Array) -> Choices:
        order = np.zeros(mask.shape, np.int32)
        warm = np.zeros((0, 0), np.int32)
        for row in range(len(mask)):
            unmasked = np.flatnonzero(mask[row])
            order[row, : len(unmasked)] = unmasked
        if call.warm is not None:
            warm = call.warm.flatten(0, -2).contiguous().numpy()
        return Choices(order, mask.cumsum(1, dtype=np.int32), warm, row_states(call.seed, call.q, call.rows))


class Bounds(NamedTuple):
    """A match must be at most `reach` from one of the keys that its point starts from, on every axis."""

    starts: Array  # int32 [P, any number]; without elements: there is no such limit
    reach: Grid  # of each axis; without limit as far as the grid

    @staticmethod
    def of(call: SearchCall) -> Bounds:
        if call.starts is None:
            return Bounds(np.zeros((0, 0), np.int32), grid_of(call.k))
        return Bounds(call.starts.flatten(0, -2).contiguous().numpy(), call.reach)


class Earlier(NamedTuple):
    """What limits a point's new match: it must be farther than `separation` from each that the point has."""

    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    run: int  # how many there are
    separation: int
    starts: Array  # as in `Bounds`
    reach: Grid


@compiled
def drawn(geometry, choices, row, query, bits):
    """A key drawn from the allowed ones, -1 if there is none."""
    last = query if geometry.causal else geometry.keys - 1
    if len(choices.count) == 0:
        return below(bits, last + 1)
    mask_row = row // geometry.rows_per_mask
    most = choices.count[mask_row, last]
    if most == 0:
        return np.int64(-1)
    return np.int64(choices.order[mask_row, below(bits, most)])


@compiled
def fresh(geometry, choices, earlier, number, row, query, noise, first, draw):
    """A key for a point without one: drawn from the allowed ones by `draw`, -1 if there is none.

    Where matches must be near a start: from the box around the start of that number, by `first` and the draws after it.
    """
    if len(earlier.starts) == 0:
        return drawn(geometry, choices, row, query, absorb(noise, draw))
    point = row * geometry.queries + query
    start = np.int64(earlier.starts[point, number % earlier.starts.shape[1]])
    key = np.int64(0)
    for axis in range(len(geometry.grid)):
        extent = geometry.grid[axis]
        stride = geometry.strides[axis]
        far = earlier.reach[axis]
        at = start // stride % extent
        low = max(at - far, 0)
        high = min(at + far, extent - 1)
        key += stride * (low + below(absorb(noise, first + axis), high - low + 1))
    return key


@compiled
def reached(geometry, earlier, point, key):
    """Whether a key is near enough to a start of the point."""
    for n in range(earlier.starts.shape[1]):
        start = np.int64(earlier.starts[point, n])
        close = True
        for axis in range(len(geometry.grid)):
            extent = geometry.grid[axis]
            stride = geometry.strides[axis]
            apart = key // stride % extent - start // stride % extent
            close &= -earlier.reach[axis] <= apart <= earlier.reach[axis]
        if close:
            return True
    return len(earlier.starts) == 0


@compiled
def legal(geometry, earlier, row, query, point, key):
    """Whether a key on the grid may be taken: unmasked, in causal order, far from earlier matches, near a start."""
    if geometry.causal and key > query:
        return False
    if len(geometry.mask) and not geometry.mask[row // geometry.rows_per_mask, key]:
        return False
    for match in range(earlier.run):
        other = np.int64(earlier.index[point, match])
        close = earlier.separation and other >= 0 and near(geometry, key, other, earlier.separation)
        if close or other == key:
            return False
    return reached(geometry, earlier, point, key)


@compiled
def near(geometry, key, other, separation):
    """Whether two keys are at most `separation` apart on every axis."""
    for axis in range(len(geometry.grid)):
        extent = geometry.grid[axis]
        stride = geometry.strides[axis]
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
    noise = absorb(absorb(absorb(choices.seed[row], query), entry), 0)
    key = fresh(geometry, choices, earlier, entry, row, query, noise, 0, 0)
    if key >= 0 and legal(geometry, earlier, row, query, point, key):
        return key
    return np.int64(-1)
