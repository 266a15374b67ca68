"""The keys in the windows: of one query in a list, of a block of queries in slots."""

import numpy as np

from .compiled import compiled, inlined
from .tiles import is_routed, tile_of, tiles_of
from .vectors import coordinates

SPARE = 3  # rows of `keys` after the slots that `expand_block` writes to


@compiled
def expand(windows, geometry, row, point, keys, places):
    """Write the allowed keys in the union of the windows of a point's matches to `keys`, each once; return how many.

    Keys that the point's tile routes are not allowed. `places`: scratch, as `Windows.places` makes it.
    """
    mask = geometry.mask
    routing = windows.routing
    query = point - row * geometry.queries
    mask_row = row // geometry.rows_per_mask
    number = union(windows.index, point, geometry.keys, geometry.grid, geometry.strides, windows.reach, keys, places)
    routes = len(routing.words) > 0
    tile = tile_of(routing.grids, query) if routes else 0
    if not (geometry.causal or len(mask) or routes):
        return number
    count = 0
    for n in range(number):
        key = keys[n]
        allowed = not (geometry.causal and key > query) and (len(mask) == 0 or mask[mask_row, key])
        if allowed and not (routes and is_routed(routing, row, tile, key, geometry.keys)):
            keys[count] = key
            count += 1
    return count


@compiled
def union(index, point, keys, grid, strides, reach, result, places):
    """Write the keys in the windows of a point's matches to `result`, each once; return how many there are.

    `places` holds the matches' coordinates, and last those of the line of keys at hand: windows are walked line by line
    along the last axis, and a key is new when no earlier window holds it. Of matches only those below `keys` exist.
    """
    rank = len(grid)
    count = 0
    lines = 1
    last = rank - 1
    for axis in range(last):
        lines *= 2 * reach[axis] + 1
    line = places[index.shape[1]]
    for e in range(index.shape[1]):
        match = np.int64(index[point, e])
        if not 0 <= match < keys:
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
                line[last] = at
                if _new(e, places, line, reach):
                    result[count] = first + at
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

    Keys that the point's tile routes are not allowed. Slots of the extra keys follow, then SPARE rows.
    """
    grid = geometry.grid
    strides = geometry.strides
    reach = windows.reach
    size = block.size
    rank = len(grid)
    match = keys[len(keys) - 1]  # int32 [size], spare
    tile = keys[len(keys) - 2]  # int32 [size], spare
    matches = len(places)
    slots = len(keys) - SPARE - extras
    per_window = slots // max(matches, 1)
    for x in range(extras):
        for p in range(size):
            keys[slots + x, p] = geometry.keys + x
    routing = windows.routing
    if len(routing.words):
        tiles_of(routing.grids, block.begin, size, tile, match, keys[len(keys) - 3])
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
            if len(routing.words):
                for p in range(size):
                    if slot[p] >= 0 and is_routed(routing, block.row, tile[p], slot[p], geometry.keys):
                        slot[p] = -1


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
