"""Which keys a point may take in a search, and the keys it starts from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...spec.grid import Grid
from .compiled import compiled
from .layout import Array
from .noise import absorb, below


class Earlier(NamedTuple):
    """What limits a point's new match: it must be farther than `separation` from each that the point has."""

    index: Array  # type: ignore[assignment]  # int32 [P, kappa]
    run: int  # how many there are
    separation: int
    starts: Array  # as in `search.Bounds`
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
