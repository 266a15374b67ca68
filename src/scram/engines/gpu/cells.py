"""Which keys a tile of queries attends together, in Triton: the cells of the key grid that its windows touch.

A window touches one or two cells on an axis, so a match stands for its first cell, a corner, on a grid with a rim. The
corners of a tile are sorted and freed of doubles; then for each axis the list is joined with itself moved by one cell,
two sorted lists whose places in the union follow from binary searches.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grid import cell_sides, grid_of
from ...schedule import LANES
from .block_sizes import INTERPRETED, LIST_BLOCK, LIST_WARPS, MOST_SORTED
from .grid import GEOMETRY, divide, geometry, points, tile_at, tile_shape, tiles
from .launch import Kernel, kinds
from .shared_keys import block_of

WIDEN = tl.constexpr(INTERPRETED)  # Triton's interpreter multiplies no bfloat16
QUERIES = tl.constexpr(LANES)  # of a tile
NO_CELL = tl.constexpr(2**31 - 1)
FRAME = ("s0", "s1", "s2", "s3", "b0", "b1", "b2", "b3", "u0", "u1", "u2", "u3", "l0", "l1", "l2", "l3")
STEPS = ("steps", "t0", "t1", "t2", "t3", "n0", "n1", "n2", "n3")


class Cells(NamedTuple):
    """first int32 [tiles, room]: the first key of each cell of a tile, ascending; count int32 [tiles]."""

    sides: tuple[int, ...]  # of a cell, four
    room: int
    first: Tensor
    count: Tensor

    @property
    def size(self) -> int:
        """Keys of a cell."""
        return math.prod(self.sides)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the kernels that walk cells take."""
        return (*self.sides, self.room, self.first, self.count)


class _Plan(NamedTuple):
    """The kernels and the numbers that shapes give."""

    corner: Kernel
    cells: Kernel
    tiles: int
    room: int
    sides: tuple[int, ...]
    frame: tuple[int, ...]
    joins: tuple[int, ...]


def cells_of(q: Tensor, k: Tensor, index: Tensor, radius: tuple[int, ...]) -> Cells:
    """The cells of every tile of queries; `index` [B, H, *G, kappa] contiguous."""
    kappa = index.shape[-1]
    plan = _plan(tuple(q.shape[:-1]), grid_of(k), kappa, radius, kinds(index))
    corners, first, room = (
        torch.empty((plan.tiles, n), dtype=torch.int32, device=q.device)
        for n in (LANES * kappa, plan.room, 2 * plan.room)
    )
    count = torch.empty(plan.tiles, dtype=torch.int32, device=q.device)
    extents = geometry(grid_of(q), grid_of(k))
    if LANES * kappa > MOST_SORTED:
        plan.corner(index, corners, kappa, *extents, *plan.frame)
        corners = corners.sort(1).values
    plan.cells(index, corners, room, first, count, kappa, plan.room, *extents, *plan.frame, *plan.joins)
    return Cells(plan.sides, plan.room, first, count)


@lru_cache(maxsize=256)
def _plan(
    q_shape: tuple[int, ...], key_grid: tuple[int, ...], kappa: int, radius: tuple[int, ...], given: tuple[Any, ...]
) -> _Plan:
    rank, rest = len(key_grid), 4 - len(key_grid)
    sides = cell_sides(radius, key_grid)
    reach = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    number = [-(-extent // side) for extent, side in zip(key_grid, sides, strict=True)]
    spans = [b > 0 and n > 1 for b, n in zip(reach, number, strict=True)]  # a window may touch two cells
    rim = [n + 2 * one for n, one in zip(number, spans, strict=True)]
    strides = [math.prod(rim[axis + 1 :]) for axis in range(rank)]
    joined = [stride for stride, one in zip(strides, spans, strict=True) if one]
    frame = [[*sides, *[1] * rest], [*reach, *[0] * rest], [*rim, *[1] * rest], [*map(int, spans), *[0] * rest]]
    joins = (len(joined), *joined, *[0] * (4 - len(joined)), *number, *[1] * rest)
    tile = tile_shape(LANES, rank)
    count = q_shape[0] * q_shape[1] * tiles(q_shape[2:], tile)
    flags: dict[str, Any] = {"RANK": rank, "TILE": tile, "IDS": triton.next_power_of_2(LANES * kappa)}
    how = {"num_warps": LIST_WARPS, "enable_fp_fusion": True}
    corner = Kernel(corner_kernel, count, {**flags, **how})
    flags |= {"SORT": LANES * kappa <= MOST_SORTED, "BLOCK": LIST_BLOCK}
    cells = Kernel(cells_kernel, count, {**flags, **how})
    room = (LANES * kappa) << len(joined)
    return _Plan(corner, cells, count, room, (*sides, *[1] * rest), tuple(n for part in frame for n in part), joins)


@triton.jit
def place_of(number, SIDE, RANK: tl.constexpr):
    """Coordinates of the `number`-th key of a cell, from its first."""
    place = ()
    for a in tl.static_range(RANK - 1, -1, -1):
        place = (number % SIDE[a] if a > 0 else number,) + place  # noqa: RUF005 - Triton knows no unpacking
        number = number // SIDE[a]
    return place


@triton.jit
def key_of(first, place, ok, KG, MAGIC, RANK: tl.constexpr):
    """The key at a place in the cell that begins with key `first`, and whether it is on the grid if that is `ok`."""
    rest, key, stride = first, first, 1
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(rest, MAGIC[a]) if a > 0 else rest * 0
        ok = ok & (rest - up * KG[a] + place[a] < KG[a])
        key += place[a] * stride
        rest, stride = up, stride * KG[a]
    return key, ok


@triton.jit
def keys_at(
    begin, cells, total, mask, mask_row, keys, KG, MAGIC, SIDE, size,
    RANK: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """BN keys of a tile's cells from number `begin` on, -1 for one that does not exist or is masked.

    The compiler makes a vector anew for every layout it is wanted in, unless each thread has a load to make for it.
    Where there are more threads than keys each key is hence loaded twice.
    """
    lane = tl.arange(0, COPIES * BN) // COPIES
    if EVEN:  # whole cells: places are the same every time
        place, cell = place_of(lane % size, SIDE, RANK), begin // size + lane // size
    else:
        place, cell = place_of((begin + lane) % size, SIDE, RANK), (begin + lane) // size
    here = begin + lane < total
    key, there = key_of(tl.load(cells + cell, mask=here, other=0), place, here, KG, MAGIC, RANK)
    if mask is not None:
        there = there & (tl.load(mask + mask_row * keys + key, mask=there, other=0) != 0)
    key = tl.where(there, key, -1)
    if COPIES == 2:
        key, _ = tl.split(tl.reshape(key, [BN, 2]))
    return key


@triton.jit
def rows_at(base, at, there, piece, E: tl.constexpr, W: tl.constexpr, WEIGHT: tl.constexpr):
    """`block_of`, as float32 where weights are scores themselves, which 16 bits may not hold."""
    x = block_of(base, at, there, piece, E, W)
    if WEIGHT != "softmax" or (WIDEN and x.dtype == tl.bfloat16):
        x = x.to(tl.float32)
    return x


@triton.jit
def corners_of(
    index, tile, kappa, QG, KG, MAGIC, SIDE, REACH, RIM, LIFT, RANK: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr
):  # fmt: skip
    """The corner of every match of a tile: the number of its first cell on the grid of cells with a rim."""
    row, corner = tile_at(tile, QG, RANK, TILE)
    n = tl.arange(0, IDS)
    rest, query, stride, here = n // kappa, n * 0, 1, n // kappa < QUERIES
    for a in tl.static_range(RANK - 1, -1, -1):
        place = corner[a] + (rest % TILE[a] if a > 0 else rest)
        here = here & (place < QG[a])
        query += place * stride
        rest, stride = rest // TILE[a], stride * QG[a]
    point = row.to(tl.int64) * points(QG, RANK) + query
    match = tl.load(index + point * kappa + n % kappa, mask=here, other=-1)
    here = (match >= 0) & (match < points(KG, RANK))
    rest, number, stride = tl.where(here, match, 0), n * 0, 1
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(rest, MAGIC[a]) if a > 0 else rest * 0
        place = (rest - up * KG[a] + LIFT[a] * (SIDE[a] - REACH[a])) // SIDE[a]
        number += place * stride
        rest, stride = up, stride * RIM[a]
    return tl.where(here, number, NO_CELL)


@triton.jit(do_not_specialize=["kappa", *GEOMETRY, *FRAME])
def corner_kernel(
    index, corners, kappa, q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3,
    s0, s1, s2, s3, b0, b1, b2, b3, u0, u1, u2, u3, l0, l1, l2, l3,
    RANK: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """More corners than a program sorts."""
    number = corners_of(
        index, tl.program_id(0), kappa, (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (s0, s1, s2, s3),
        (b0, b1, b2, b3), (u0, u1, u2, u3), (l0, l1, l2, l3), RANK, TILE, IDS,
    )  # fmt: skip
    n = tl.arange(0, IDS)
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


@triton.jit(do_not_specialize=["kappa", "room", *GEOMETRY, *FRAME, *STEPS])
def cells_kernel(
    index, corners, lists, first, count, kappa, room, q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3,
    s0, s1, s2, s3, b0, b1, b2, b3, u0, u1, u2, u3, l0, l1, l2, l3, steps, t0, t1, t2, t3, n0, n1, n2, n3,
    RANK: tl.constexpr, TILE: tl.constexpr, IDS: tl.constexpr, SORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cells of a tile, each once, ascending; from `corners`, sorted before unless SORT."""
    QG, KG, MAGIC, SIDE = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (s0, s1, s2, s3)
    RIM, LIFT, NUMBER = (u0, u1, u2, u3), (l0, l1, l2, l3), (n0, n1, n2, n3)
    tile, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mine, result = lists + tile * 2 * room, first + tile * room
    found, have = kappa * QUERIES, 0
    if SORT:
        number = tl.sort(
            corners_of(
                index, tl.program_id(0), kappa, QG, KG, MAGIC, SIDE, (b0, b1, b2, b3), RIM, LIFT, RANK, TILE, IDS
            )
        )  # fmt: skip
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
    for step in range(steps):
        move = tl.where(step == 0, t0, tl.where(step == 1, t1, tl.where(step == 2, t2, t3)))
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
    given = mine + steps % 2 * room
    kept = 0
    for begin in range(0, have, BLOCK):
        n = begin + lane
        rest = tl.load(given + n, mask=n < have, other=0)
        key, stride, on = n * 0, 1, n < have
        for a in tl.static_range(RANK - 1, -1, -1):
            place = (rest % RIM[a] if a > 0 else rest) - LIFT[a]
            on = on & (place >= 0) & (place < NUMBER[a])
            key += place * SIDE[a] * stride
            rest, stride = rest // RIM[a], stride * KG[a]
        new = on.to(tl.int32)
        tl.store(result + kept + tl.cumsum(new, 0) - 1, key, mask=on)
        kept += tl.sum(new, 0)
    tl.store(count + tl.program_id(0), kept)
