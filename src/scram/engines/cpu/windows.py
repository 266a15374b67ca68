"""The keys in the windows: of one query in a list, of a block of queries in slots."""

import numpy as np

from .compiled import compiled, inlined
from .vectors import coordinates


@compiled
def expand(windows, geometry, row, point, keys, places):
    """Write the allowed keys in the union of the windows of a point's matches to `keys`, each once; return how many.

    `places` holds the matches' coordinates, and last those of the line of keys at hand: windows are walked line by line
    along the last axis, and a key is new when no earlier window holds it.
    """
    grid = geometry.grid
    strides = geometry.strides
    mask = geometry.mask
    index = windows.index
    reach = windows.reach
    rank = len(grid)
    count = 0
    lines = 1
    query = point - row * geometry.queries
    mask_row = row // geometry.rows_per_mask
    last = rank - 1
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
            rest = number
            first = np.int64(0)
            on_grid = True
            for axis in range(last - 1, -1, -1):
                side = 2 * reach[axis] + 1
                line[axis] = places[e, axis] + rest % side - reach[axis]
                rest //= side
                on_grid = on_grid and 0 <= line[axis] < grid[axis]
                first += line[axis] * strides[axis]
            if not on_grid:
                continue
            low = max(places[e, last] - reach[last], 0)
            high = min(places[e, last] + reach[last], grid[last] - 1)
            for at in range(low, high + 1):
                key = first + at
                if geometry.causal and key > query:
                    break
                if len(mask) and not mask[mask_row, key]:
                    continue
                line[last] = at
                if _new(e, places, line, reach):
                    keys[count] = key
                    count += 1
    return count


@compiled
def _new(e, places, place, reach):
    """Whether a key at `place` lies in none of the windows before number e."""
    for before in range(e):
        if places[before, 0] < 0:
            continue
        covered = True
        for axis in range(len(reach)):
            covered = covered and -reach[axis] <= place[axis] - places[before, axis] <= reach[axis]
        if covered:
            return False
    return True


@inlined
def expand_block(windows, geometry, extras, block, keys, places):
    """For every slot of the windows and every point its key, or -1: off the grid, not allowed, or in a window before.

    Slots of the extra keys follow.
    """
    grid = geometry.grid
    strides = geometry.strides
    reach = windows.reach
    size = block.size
    rank = len(grid)
    match = keys[len(keys) - 1]  # int32 [size], spare
    matches = len(places)
    slots = len(keys) - 1 - extras
    per_window = slots // max(matches, 1)
    for x in range(extras):
        for p in range(size):
            keys[slots + x, p] = geometry.keys + x
    for e in range(matches):
        for p in range(size):
            match[p] = windows.index[block.first + p, e]
        for axis in range(rank):
            coordinates(match, grid[axis], strides[axis], places[e, axis], size)
        for p in range(size):
            places[e, 0, p] = places[e, 0, p] if (match[p] >= 0) & (match[p] < geometry.keys) else -1
        for number in range(per_window):
            slot = keys[e * per_window + number]  # int32 [size]
            rest = number
            move = 0
            for p in range(size):
                slot[p] = places[e, 0, p] >= 0
            for axis in range(rank - 1, -1, -1):
                side = 2 * reach[axis] + 1
                offset = np.int32(rest % side - reach[axis])
                rest //= side
                move += offset * strides[axis]
                for p in range(size):
                    at = places[e, axis, p] + offset
                    slot[p] &= (at >= 0) & (at < grid[axis])
            for p in range(size):
                slot[p] = match[p] + move if slot[p] else -1
            for before in range(e):
                _leave_out(slot, number, reach, places[e], places[before], size)
            if geometry.causal:
                for p in range(size):
                    slot[p] = slot[p] if slot[p] <= block.begin + p else -1
            if len(geometry.mask):
                unmasked = geometry.mask[block.row // geometry.rows_per_mask]  # [M]
                for p in range(size):
                    slot[p] = slot[p] if slot[p] >= 0 and unmasked[slot[p]] else -1


@compiled
def _leave_out(slot, number, reach, places, before, size):
    """Set to -1 the keys of window slot `number` that lie in an earlier window too."""
    rank = len(reach)
    for p in range(size):
        covered = before[0, p] >= 0
        rest = number
        for axis in range(rank - 1, -1, -1):
            side = 2 * reach[axis] + 1
            apart = places[axis, p] + rest % side - reach[axis] - before[axis, p]
            rest //= side
            covered &= (apart >= -reach[axis]) & (apart <= reach[axis])
        slot[p] = -1 if covered else slot[p]
