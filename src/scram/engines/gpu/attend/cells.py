"""Which keys a tile of queries attends together, in Triton: the cells of the key grid that its windows touch.

A window touches one or two cells on an axis, so a match stands for its first cell, a corner, on a grid with a rim. The
corners of a tile are sorted and doubles are removed. Then for each axis the list is joined with itself moved by one
cell: two sorted lists whose places in the union follow from binary searches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....grid import cell_sides
from ....schedule import TILE_QUERIES
from ..attend.windows import reaches, unmasked
from ..drawn_tail.shared_keys import block_of
from ..primitives import Block, Geometry, divide, points, tile_at, tile_shape, tiles
from ..runtime.block_sizes import LIST_BLOCK, LIST_WARPS, MOST_SORTED
from ..runtime.launch import INTERPRETED, Kernel, cached, kinds

WIDEN = tl.constexpr(INTERPRETED)  # Triton's interpreter multiplies no bfloat16
QUERIES = tl.constexpr(TILE_QUERIES)  # of a tile
NO_CELL = tl.constexpr(2**31 - 1)


class Cells(NamedTuple):
    """The cells of every tile of queries."""

    first: Tensor  # int32 [tiles, room], the first key of each cell of a tile, ascending
    count: Tensor  # int32 [tiles]
    room: int
    sides: tuple[int, ...]  # of a cell, in keys

    @property
    def size(self) -> int:
        """Keys of a cell."""
        return math.prod(self.sides)


class Frame(NamedTuple):
    """The grid of cells, one int per axis in each field. It has a rim on the axes on which a window may touch two."""

    sides: tuple[int, ...]  # of a cell, in keys
    reach: tuple[int, ...]  # of a window, in keys
    number: tuple[int, ...]  # of cells
    spans: tuple[int, ...]  # 1 where there is a rim
    rim: tuple[int, ...]  # cells with the rim
    moves: tuple[int, ...]  # the strides of the axes with a rim, then zeros
    joins: int  # how many have one


class _Plan(NamedTuple):
    """The kernels and the numbers that shapes give."""

    corner: Kernel
    cells: Kernel
    tiles: int
    room: int
    frame: Frame


def cells_of(index: Tensor, geo: Geometry, radius: tuple[int, ...]) -> Cells:
    """The cells of every tile of queries; index int32 [B, H, *G, kappa], contiguous."""
    kappa = index.shape[-1]
    plan = _plan(index.shape[0] * index.shape[1], geo.q, geo.k, kappa, radius, kinds(index))
    corners, first, lists = (
        torch.empty((plan.tiles, n), dtype=torch.int32, device=index.device)
        for n in (TILE_QUERIES * kappa, plan.room, 2 * plan.room)
    )
    count = torch.empty(plan.tiles, dtype=torch.int32, device=index.device)
    cells = Cells(first, count, plan.room, plan.frame.sides)
    if TILE_QUERIES * kappa > MOST_SORTED:
        plan.corner(index, corners, kappa, geo, plan.frame)
        corners = corners.sort(1).values
    plan.cells(index, corners, lists, cells, kappa, geo, plan.frame)
    return cells


@cached
def _plan(
    rows: int,
    query_grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    kappa: int,
    radius: tuple[int, ...],
    given: tuple[Any, ...],
) -> _Plan:
    sides, reach = cell_sides(radius, key_grid), reaches(radius, key_grid)
    number = tuple(-(-extent // side) for extent, side in zip(key_grid, sides, strict=True))
    spans = tuple(int(b > 0 and n > 1) for b, n in zip(reach, number, strict=True))
    rim = tuple(n + 2 * one for n, one in zip(number, spans, strict=True))
    joined = [math.prod(rim[axis + 1 :]) for axis, one in enumerate(spans) if one]
    moves = (*joined, *[0] * (len(rim) - len(joined)))
    frame = Frame(sides, reach, number, spans, rim, moves, len(joined))
    block = Block(tile_shape(TILE_QUERIES, len(key_grid)), TILE_QUERIES)
    count = rows * tiles(query_grid, block.TILE)
    flags: dict[str, Any] = {"B": block, "IDS": triton.next_power_of_2(TILE_QUERIES * kappa)}
    how = {"num_warps": LIST_WARPS, "enable_fp_fusion": True}
    corner = Kernel(corner_kernel, count, {**flags, **how})
    flags |= {"SORT": TILE_QUERIES * kappa <= MOST_SORTED, "BLOCK": LIST_BLOCK}
    cells = Kernel(cells_kernel, count, {**flags, **how})
    return _Plan(corner, cells, count, (TILE_QUERIES * kappa) << len(joined), frame)


@triton.jit
def place_of(number, sides):
    """Coordinates of the `number`-th key of a cell, from its first."""
    place = ()
    for a in tl.static_range(len(sides) - 1, -1, -1):
        place = (number % sides[a] if a > 0 else number,) + place  # noqa: RUF005 - Triton knows no unpacking
        number = number // sides[a]
    return place


@triton.jit
def key_of(first, place, ok, geo):
    """The key at a place in the cell that begins with key `first`, and whether it is on the grid if that is `ok`."""
    rest, key, stride = first, first, 1
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        ok = ok & (rest - up * geo.k[a] + place[a] < geo.k[a])
        key += place[a] * stride
        rest, stride = up, stride * geo.k[a]
    return key, ok


@triton.jit
def keys_at(begin, listed, sides, w, MODE: tl.constexpr):
    """BLOCK_K keys of a tile's cells from number `begin` on, -1 for one that does not exist or is masked.

    The compiler computes a vector again for every layout in which it is used, unless each thread has a load to make for
    it. Where there are more threads than keys each key is hence loaded twice.
    """
    lane, size = tl.arange(0, MODE.COPIES * MODE.BLOCK_K) // MODE.COPIES, points(sides)
    if MODE.EVEN:  # whole cells: places are the same every time
        place, cell = place_of(lane % size, sides), begin // size + lane // size
    else:
        place, cell = place_of((begin + lane) % size, sides), (begin + lane) // size
    here = begin + lane < listed.end
    key, there = key_of(tl.load(listed.first + cell, mask=here, other=0), place, here, w.geo)
    key = tl.where(unmasked(key, there, listed.mask_row, w), key, -1)
    if MODE.COPIES == 2:
        key, _ = tl.split(tl.reshape(key, [MODE.BLOCK_K, 2]))
    return key


@triton.jit
def rows_at(base, at, there, piece, ROW: tl.constexpr, WEIGHT: tl.constexpr):
    """`block_of`, as float32 where weights are scores themselves, which 16 bits may not hold."""
    x = block_of(base, at, there, piece, ROW)
    if WEIGHT != "softmax" or (WIDEN and x.dtype == tl.bfloat16):
        x = x.to(tl.float32)
    return x


@triton.jit
def corners_of(index, tile, kappa, geo, frame, B: tl.constexpr, IDS: tl.constexpr):
    """The corner of every match of a tile: the number of its first cell on the grid of cells with a rim."""
    row, corner = tile_at(tile, geo, B)
    n = tl.arange(0, IDS)
    rest, query, stride, here = n // kappa, n * 0, 1, n // kappa < QUERIES
    for a in tl.static_range(len(geo.q) - 1, -1, -1):
        place = corner[a] + (rest % B.TILE[a] if a > 0 else rest)
        here = here & (place < geo.q[a])
        query += place * stride
        rest, stride = rest // B.TILE[a], stride * geo.q[a]
    point = row.to(tl.int64) * points(geo.q) + query
    match = tl.load(index + point * kappa + n % kappa, mask=here, other=-1)
    here = (match >= 0) & (match < points(geo.k))
    rest, number, stride = tl.where(here, match, 0), n * 0, 1
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        at = rest - up * geo.k[a] + frame.spans[a] * (frame.sides[a] - frame.reach[a])
        number += at // frame.sides[a] * stride
        rest, stride = up, stride * frame.rim[a]
    return tl.where(here, number, NO_CELL)


@triton.jit
def corner_kernel(index, corners, kappa, geo, frame, B: tl.constexpr, IDS: tl.constexpr):
    """More corners than a program sorts."""
    number, n = corners_of(index, tl.program_id(0), kappa, geo, frame, B, IDS), tl.arange(0, IDS)
    tl.store(corners + tl.program_id(0).to(tl.int64) * (kappa * QUERIES) + n, number, mask=n < kappa * QUERIES)


@triton.jit
def lower_bound(base, count, x):
    """How many of the `count` sorted numbers at `base` are less than each x."""
    low, high, left = x * 0, x * 0 + count, count
    while left > 0:
        middle = (low + high) // 2
        open_ = low < high
        less = tl.load(base + middle, mask=open_, other=0) < x
        low = tl.where(open_ & less, middle + 1, low)
        high = tl.where(open_ & ~less, middle, high)
        left = left // 2
    return low


@triton.jit
def cells_kernel(
    index, corners, lists, cells, kappa, geo, frame,
    B: tl.constexpr, IDS: tl.constexpr, SORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cells of a tile, each once, ascending; from `corners`, sorted before unless SORT."""
    tile, lane, room = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), cells.room
    mine, result = lists + tile * 2 * room, cells.first + tile * room
    found, have = kappa * QUERIES, 0
    if SORT:
        number = tl.sort(corners_of(index, tl.program_id(0), kappa, geo, frame, B, IDS))
        tl.store(corners + tile * found + tl.arange(0, IDS), number, mask=tl.arange(0, IDS) < found)
        tl.debug_barrier()
    for begin in range(0, found, BLOCK):
        n = begin + lane
        x = tl.load(corners + tile * found + n, mask=n < found, other=NO_CELL)
        before = tl.load(corners + tile * found + n - 1, mask=(n > 0) & (n < found), other=-1)
        new = ((x != before) & (x < NO_CELL)).to(tl.int32)
        tl.store(mine + have + tl.cumsum(new, 0) - 1, x, mask=new > 0)
        have += tl.sum(new, 0)
    tl.debug_barrier()
    for step in range(frame.joins):
        move = frame.moves[0]
        for a in tl.static_range(1, len(frame.moves)):
            move = tl.where(step == a, frame.moves[a], move)
        given, joined = mine + step % 2 * room, mine + (1 - step % 2) * room
        double = 0
        for begin in range(0, have, BLOCK):
            n = begin + lane
            x = tl.load(given + n, mask=n < have, other=0)
            at = lower_bound(given, have, x + move)
            known = tl.load(given + at, mask=(n < have) & (at < have), other=-1) == x + move
            known = (known & (n < have)).to(tl.int32)
            earlier = double + tl.cumsum(known, 0) - known
            tl.store(result + n, earlier, mask=n < have)
            tl.store(joined + n - earlier + at, x + move, mask=(n < have) & (known == 0))
            double += tl.sum(known, 0)
        tl.debug_barrier()
        for begin in range(0, have, BLOCK):
            n = begin + lane
            x = tl.load(given + n, mask=n < have, other=0)
            at = lower_bound(given, have, x - move)
            earlier = tl.load(result + at, mask=n < have, other=0)
            tl.store(joined + n + at - earlier, x, mask=n < have)
        have = 2 * have - double
        tl.debug_barrier()
    given = mine + frame.joins % 2 * room
    kept = 0
    for begin in range(0, have, BLOCK):
        n = begin + lane
        rest = tl.load(given + n, mask=n < have, other=0)
        key, stride, on = n * 0, 1, n < have
        for a in tl.static_range(len(geo.k) - 1, -1, -1):
            place = (rest % frame.rim[a] if a > 0 else rest) - frame.spans[a]
            on = on & (place >= 0) & (place < frame.number[a])
            key += place * frame.sides[a] * stride
            rest, stride = rest // frame.rim[a], stride * geo.k[a]
        new = on.to(tl.int32)
        tl.store(result + kept + tl.cumsum(new, 0) - 1, key, mask=on)
        kept += tl.sum(new, 0)
    tl.store(cells.count + tl.program_id(0), kept)
