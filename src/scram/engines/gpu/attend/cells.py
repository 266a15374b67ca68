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

from ....spec.grid import cell_sides
from ....spec.schedule import TILE_QUERIES
from ..primitives import Geometry, divide, points, reaches, tile_at, tile_block, tiles, unmasked
from ..runtime.block_sizes import LIST_BLOCK, LIST_WARPS, MOST_SORTED
from ..runtime.launch import Kernel, cached, kinds

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


class CellList(NamedTuple):
    """The cells of one tile, in a kernel."""

    first: Any  # pointer to the first keys of its cells
    number: Any  # of its cells
    end: Any  # how many keys they have
    mask_row: Any  # row of the mask, int64


class Frame(NamedTuple):
    """The grid of cells, one int per axis in each field. It has a rim on the axes on which a window may touch two."""

    sides: tuple[int, ...]  # of a cell, in keys
    reach: tuple[int, ...]  # of a window, in keys
    number: tuple[int, ...]  # of cells
    spans: tuple[int, ...]  # 1 where it has a rim
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
    sides = cell_sides(radius, key_grid)
    reach = reaches(radius, key_grid)
    number = tuple(-(-extent // side) for extent, side in zip(key_grid, sides, strict=True))
    spans = tuple(int(b > 0 and n > 1) for b, n in zip(reach, number, strict=True))
    rim = tuple(n + 2 * one for n, one in zip(number, spans, strict=True))
    joined = [math.prod(rim[axis + 1 :]) for axis, one in enumerate(spans) if one]
    moves = (*joined, *[0] * (len(rim) - len(joined)))
    frame = Frame(sides, reach, number, spans, rim, moves, len(joined))
    block = tile_block(len(key_grid))
    count = rows * tiles(query_grid, block.TILE)
    flags: dict[str, Any] = {"B": block, "IDS": triton.next_power_of_2(TILE_QUERIES * kappa)}
    options = {"num_warps": LIST_WARPS, "enable_fp_fusion": True}
    corner = Kernel(corner_kernel, count, {**flags, **options})
    flags |= {"SORT": TILE_QUERIES * kappa <= MOST_SORTED, "BLOCK": LIST_BLOCK}
    cells = Kernel(cells_kernel, count, {**flags, **options})
    return _Plan(corner, cells, count, (TILE_QUERIES * kappa) << len(joined), frame)


@triton.jit
def cell_place(number, sides):
    """Coordinates of the `number`-th key of a cell, from its first."""
    place = ()
    for a in tl.static_range(len(sides) - 1, -1, -1):
        place = (number % sides[a] if a > 0 else number,) + place  # noqa: RUF005 - Triton knows no unpacking
        number = number // sides[a]
    return place


@triton.jit
def cell_key(first, place, ok, geo):
    """The key at a place in the cell that begins with key `first`, and whether it is on the grid if that is `ok`."""
    rest = first
    key = first
    stride = 1
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        ok = ok & (rest - up * geo.k[a] + place[a] < geo.k[a])
        key += place[a] * stride
        rest = up
        stride = stride * geo.k[a]
    return key, ok


@triton.jit
def cell_list(tile, row, cells, masked):
    """The cells of a tile of queries of a row."""
    number = tl.load(cells.count + tile)
    end = number * points(cells.sides)
    mask_row = (row // masked.group).to(tl.int64)
    return CellList(cells.first + tile.to(tl.int64) * cells.room, number, end, mask_row)


@triton.jit
def keys_at(begin, listed, sides, masked, geo, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, COPIES: tl.constexpr):
    """BLOCK_K keys of a CellList from number `begin` on, -1 for one that does not exist or is masked: [BK].

    EVEN: they are whole cells. The compiler computes a vector again for every layout in which it is used, unless each
    thread has a load to make for it. Where there are more threads than keys each key is hence loaded twice, COPIES.
    """
    lane = tl.arange(0, COPIES * BLOCK_K) // COPIES  # [COPIES * BK]
    size = points(sides)
    if EVEN:  # places are the same every time
        place = cell_place(lane % size, sides)
        cell = begin // size + lane // size
    else:
        place = cell_place((begin + lane) % size, sides)
        cell = (begin + lane) // size
    exists = begin + lane < listed.end
    key, exists = cell_key(tl.load(listed.first + cell, mask=exists, other=0), place, exists, geo)
    key = tl.where(unmasked(key, exists, listed.mask_row, masked, geo), key, -1)
    if COPIES == 2:
        key, _ = tl.split(tl.reshape(key, [BLOCK_K, 2]))
    return key


@triton.jit
def tile_corners(index, tile, kappa, geo, frame, B: tl.constexpr, IDS: tl.constexpr):
    """The corner of every match of a tile: the number of its first cell on the grid of cells with a rim, [IDS]."""
    row, corner = tile_at(tile, geo, B)
    n = tl.arange(0, IDS)  # [IDS]
    rest = n // kappa
    query = n * 0
    stride = 1
    exists = n // kappa < QUERIES
    for a in tl.static_range(len(geo.q) - 1, -1, -1):
        place = corner[a] + (rest % B.TILE[a] if a > 0 else rest)
        exists = exists & (place < geo.q[a])
        query += place * stride
        rest = rest // B.TILE[a]
        stride = stride * geo.q[a]
    point = row.to(tl.int64) * points(geo.q) + query  # [IDS]
    match = tl.load(index + point * kappa + n % kappa, mask=exists, other=-1)  # [IDS]
    on_grid = (match >= 0) & (match < points(geo.k))
    rest = tl.where(on_grid, match, 0)
    number = n * 0
    stride = 1
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        place = rest - up * geo.k[a] + frame.spans[a] * (frame.sides[a] - frame.reach[a])
        number += place // frame.sides[a] * stride
        rest = up
        stride = stride * frame.rim[a]
    return tl.where(on_grid, number, NO_CELL)


@triton.jit
def corner_kernel(index, corners, kappa, geo, frame, B: tl.constexpr, IDS: tl.constexpr):
    """More corners than a program sorts. Program: tile."""
    number = tile_corners(index, tl.program_id(0), kappa, geo, frame, B, IDS)  # [IDS]
    n = tl.arange(0, IDS)  # [IDS]
    tl.store(corners + tl.program_id(0).to(tl.int64) * (kappa * QUERIES) + n, number, mask=n < kappa * QUERIES)


@triton.jit
def lower_bound(base, count, x):
    """How many of the `count` sorted numbers at `base` are less than each x."""
    low = x * 0
    high = x * 0 + count
    left = count
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
    index,
    corners,
    lists,
    cells,
    kappa,
    geo,
    frame,
    B: tl.constexpr,
    IDS: tl.constexpr,
    SORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cells of a tile, each once, ascending; from `corners`, sorted before unless SORT. Program: tile."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    room = cells.room
    buffers = lists + tile * 2 * room
    result = cells.first + tile * room
    all_corners = kappa * QUERIES
    count = 0
    if SORT:
        number = tl.sort(tile_corners(index, tl.program_id(0), kappa, geo, frame, B, IDS))  # [IDS]
        tl.store(corners + tile * all_corners + tl.arange(0, IDS), number, mask=tl.arange(0, IDS) < all_corners)
        tl.debug_barrier()
    for begin in range(0, all_corners, BLOCK):
        n = begin + lane  # [BLOCK]
        x = tl.load(corners + tile * all_corners + n, mask=n < all_corners, other=NO_CELL)  # [BLOCK]
        before = tl.load(corners + tile * all_corners + n - 1, mask=(n > 0) & (n < all_corners), other=-1)  # [BLOCK]
        new = ((x != before) & (x < NO_CELL)).to(tl.int32)  # [BLOCK]
        tl.store(buffers + count + tl.cumsum(new, 0) - 1, x, mask=new > 0)
        count += tl.sum(new, 0)
    tl.debug_barrier()
    for step in range(frame.joins):
        move = frame.moves[0]
        for a in tl.static_range(1, len(frame.moves)):
            move = tl.where(step == a, frame.moves[a], move)
        given = buffers + step % 2 * room
        joined = buffers + (1 - step % 2) * room
        doubles = 0
        for begin in range(0, count, BLOCK):
            n = begin + lane  # [BLOCK]
            x = tl.load(given + n, mask=n < count, other=0)  # [BLOCK]
            at = lower_bound(given, count, x + move)  # [BLOCK]
            known = tl.load(given + at, mask=(n < count) & (at < count), other=-1) == x + move
            known = (known & (n < count)).to(tl.int32)
            earlier = doubles + tl.cumsum(known, 0) - known  # [BLOCK]
            tl.store(result + n, earlier, mask=n < count)
            tl.store(joined + n - earlier + at, x + move, mask=(n < count) & (known == 0))
            doubles += tl.sum(known, 0)
        tl.debug_barrier()
        for begin in range(0, count, BLOCK):
            n = begin + lane  # [BLOCK]
            x = tl.load(given + n, mask=n < count, other=0)  # [BLOCK]
            at = lower_bound(given, count, x - move)  # [BLOCK]
            earlier = tl.load(result + at, mask=n < count, other=0)  # [BLOCK]
            tl.store(joined + n + at - earlier, x, mask=n < count)
        count = 2 * count - doubles
        tl.debug_barrier()
    given = buffers + frame.joins % 2 * room
    kept = 0
    for begin in range(0, count, BLOCK):
        n = begin + lane  # [BLOCK]
        rest = tl.load(given + n, mask=n < count, other=0)  # [BLOCK]
        key = n * 0  # [BLOCK]
        stride = 1
        on_grid = n < count
        for a in tl.static_range(len(geo.k) - 1, -1, -1):
            place = (rest % frame.rim[a] if a > 0 else rest) - frame.spans[a]
            on_grid = on_grid & (place >= 0) & (place < frame.number[a])
            key += place * frame.sides[a] * stride
            rest = rest // frame.rim[a]
            stride = stride * geo.k[a]
        new = on_grid.to(tl.int32)  # [BLOCK]
        tl.store(result + kept + tl.cumsum(new, 0) - 1, key, mask=on_grid)
        kept += tl.sum(new, 0)
    tl.store(cells.count + tl.program_id(0), kept)
