"""The keys that one query attends, in a list."""

import numpy as np

from .compiled import compiled


@compiled
def expand(windows, geometry, row, point, keys, places):
    """Write the legal keys in the union of the windows around a point's matches to `keys`, each once; return how many.

    `places` holds the matches' coordinates, its last row those of the line of keys at hand: windows are walked line by
    line along the last axis, and a key is new when no earlier window holds it.
    """
    grid, strides, mask, index, reach = geometry.grid, geometry.strides, geometry.mask, windows.index, windows.reach
    rank, found, lines = len(grid), 0, 1
    query, mask_row, last = point - row * geometry.queries, row // geometry.rows_per_mask, rank - 1
    for axis in range(last):
        lines *= 2 * reach[axis] + 1
    line = places[index.shape[1]]
    for e in range(index.shape[1]):
        match = np.int64(index[point, e])
        if not 0 <= match < geometry.keys:
            places[e, 0] = -1
            continue
        for axis in range(rank):
            places[e, axis] = match // strides[axis]
            match -= places[e, axis] * strides[axis]
        for number in range(lines):
            rest, first, there = number, np.int64(0), True
            for axis in range(last - 1, -1, -1):
                side = 2 * reach[axis] + 1
                line[axis] = places[e, axis] + rest % side - reach[axis]
                rest //= side
                there = there and 0 <= line[axis] < grid[axis]
                first += line[axis] * strides[axis]
            if not there:
                continue
            low, high = max(places[e, last] - reach[last], 0), min(places[e, last] + reach[last], grid[last] - 1)
            for at in range(low, high + 1):
                key = first + at
                if geometry.causal and key > query:
                    break
                if len(mask) and not mask[mask_row, key]:
                    continue
                line[last] = at
                if _new(e, places, line, reach):
                    keys[found] = key
                    found += 1
    return found


@compiled
def _new(e, places, place, reach):
    for before in range(e):
        if places[before, 0] < 0:
            continue
        covered = True
        for axis in range(len(reach)):
            covered = covered and -reach[axis] <= place[axis] - places[before, axis] <= reach[axis]
        if covered:
            return False
    return True
