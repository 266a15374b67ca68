"""Clusters beside tiles of queries, in Triton: a table of the clusters, and how many keys of each a query has left.

What every query needs of a cluster is computed once: its centre and value in whole blocks, for 16 bits as the rounded
number and what rounding left of it, and the log of its weight. A place without a cluster has no keys. How many keys of
each cluster a query attends is counted once too, for some tiles at a time: bits n of 32 counts are one word of plane n,
so that a product tests one bit per plane where it would compare every label.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import ClusterTailCall
from ....grid import grid_of
from ....schedule import TILE_QUERIES
from ..attend.cells import WIDEN, cells_of, keys_at
from ..attend.windows import UNMASKED, first_offset, legal_at, match_of, next_offset, reaches, window_size
from ..drawn_tail.shared_keys import block_of, product, stages, whole_block
from ..noise import Seed, absorb, below_argument, row_state, seed_argument
from ..primitives import Block, Geometry, KeyMask, geometry, lane_query, points, tile_at, tile_shape, tiles
from ..runtime.block_sizes import tile_pieces
from ..runtime.launch import Kernel, cached, kinds

BLOCK_BYTES = 48 << 10  # of the table at most that are multiplied at a time
PLANE_BYTES = 48 << 20  # of counts at most that are kept at a time
MOST_WORDS = 8  # of counts that a program makes
TABLE_BLOCK = 64  # the table is a whole number of these


class Table(NamedTuple):
    """The clusters of all rows, as kernels take them. The widths are whole pieces."""

    k: Tensor  # [rows, padded, E], centres
    k_rest: Tensor | None  # what rounding to 16 bits left of them
    v: Tensor  # [rows, padded, F]
    v_rest: Tensor | None
    logs: Tensor  # float32 [rows, padded], log of size times gain
    sizes: Tensor  # float32 [rows, padded]
    shares: Tensor  # float32 [rows, padded], 1 / size
    count: int  # clusters of a row
    padded: int


class ClusterTail(NamedTuple):
    """A ClusterTailCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor
    index: Tensor
    label: Tensor
    head_lse: Tensor
    head_out: Tensor
    table: Table
    taken: Tensor | None  # float32 [tiles, padded], keys of each cluster that the queries of a tile attend
    planes: Tensor | None  # int32 [tiles, padded / 32, planes, TILE_QUERIES], keys of each cluster a query attends
    first: int  # tile of `planes`
    masked: KeyMask  # none
    seed: Seed
    geo: Geometry
    reach: tuple[int, ...]
    group: int  # rows of queries that share a row of clusters
    kappa: int
    first_name: int
    threshold: int
    keep: float
    scale: float


class ClusterMode(NamedTuple):
    """What a kernel over clusters is compiled for."""

    PLANES: int  # bits of a count of keys in a query's windows
    SEVERAL: bool  # matches
    TILE: bool  # queries of a tile attend the same keys
    DROPOUT: bool
    NARROW: bool  # features and values of 16 bits
    FP16: bool
    GAINS: bool  # of a fit, whose values are not means: products need more digits than 16 bits have
    BLOCK_C: int  # clusters per product
    PARTS: int  # programs that share the width of a tile's values


class ListMode(NamedTuple):
    """What `taken_kernel` is compiled for: as `keys_at` wants it."""

    BLOCK_K: int
    BLOCK_C: int
    EVEN: bool
    COPIES: int


class TailQueries(NamedTuple):
    """The queries of a tile, in a kernel."""

    row: Any
    query: Any  # int32 [BLOCK_Q], flat
    start: Any  # of the row among all queries, int64
    exists: Any
    index_row: Any  # pointer
    mask_row: Any
    label_row: Any  # pointer
    noise: Any
    slot: Any  # of the row's first cluster in the table, int64
    counts: Any  # pointer to `taken` or `planes` of the tile


def tail_flags(call: ClusterTailCall, half: tuple[int, int, int], exact: tuple[int, int, int]) -> dict[str, Any]:
    """Flags of a kernel over clusters. `half`, `exact`: its clusters per product, warps and stages at most."""
    dropout = call.dropout_seed is not None and call.dropout_p > 0
    seen = (call.q.dtype, call.head_out.dtype, call.q.device)
    shapes = (call.index.shape, tuple(call.label.shape[2:]), call.q.shape[-1], call.head_out.shape[-1])
    return _tail_flags(*shapes, call.radius, call.window, dropout, call.gains is not None, seen, half, exact)


@cached
def _tail_flags(
    index_shape: torch.Size,
    key_grid: tuple[int, ...],
    width: int,
    value_width: int,
    radius: tuple[int, ...],
    window: str,
    dropout: bool,
    gains: bool,
    seen: tuple[torch.dtype, torch.dtype, torch.device],
    half: tuple[int, int, int],
    exact: tuple[int, int, int],
) -> dict[str, Any]:
    (dtype, value_dtype, device), matches, rank = seen, index_shape[-1], len(index_shape) - 3
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    clusters, warps, most = half if narrow else exact
    rows = tile_pieces(width, value_width, narrow)
    sizes = ((rows["ROW"], dtype), (rows["VROW"], value_dtype))
    own = sum(row.W * row.PIECES * kind.itemsize for row, kind in sizes)
    each = own * (2 if narrow else 1)
    while clusters > 16 and clusters * each > BLOCK_BYTES:
        clusters //= 2
    keys = math.prod(2 * b + 1 for b in reaches(radius, key_grid))
    mode = ClusterMode(
        (matches * keys).bit_length(),
        matches > 1,
        window == "tile",
        dropout,
        narrow,
        narrow and torch.half in (dtype, value_dtype),
        gains,
        clusters,
        rows["VROW"].PIECES,
    )
    ahead = stages(device, most, clusters * each, 2 * TILE_QUERIES * own)
    block = Block(tile_shape(TILE_QUERIES, rank), TILE_QUERIES)
    how = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
    return {"MODE": mode, "B": block, **rows, **how}


def tiles_of(call: ClusterTailCall) -> int:
    """Of all rows."""
    rank = call.q.ndim - 3
    return call.q.shape[0] * call.q.shape[1] * tiles(grid_of(call.q), tile_shape(TILE_QUERIES, rank))


def tail_of(call: ClusterTailCall, flags: dict[str, Any]) -> ClusterTail:
    """The call with its table, and for tiles the keys they have taken."""
    q, index, label = call.q.contiguous(), call.index.contiguous(), call.label.contiguous()
    key_grid = tuple(label.shape[2:])
    geo, table, taken = geometry(grid_of(q), key_grid), table_of(call, flags), None
    if call.window == "tile":
        count = tiles_of(call)
        cells = cells_of(index, geo, call.radius)
        taken = torch.empty((count, table.padded), dtype=torch.float32, device=q.device)
        group = q.shape[1] // label.shape[1]
        _taken(count, cells.size, flags["B"], kinds(label, taken))(
            taken, label, cells, UNMASKED, geo, group, table.padded
        )
    return ClusterTail(
        q,
        index,
        label,
        call.head_lse.contiguous(),
        call.head_out.contiguous(),
        table,
        taken,
        None,
        0,
        UNMASKED,
        seed_argument(call.dropout_seed, call.rows),
        geo,
        reaches(call.radius, key_grid),
        q.shape[1] // label.shape[1],
        index.shape[-1],
        call.first_name,
        below_argument(call.dropout_p),
        1 / (1 - call.dropout_p),
        call.scale,
    )


class Chunk(NamedTuple):
    """Some tiles in turn, and the call with the counts of their queries."""

    tail: ClusterTail
    tiles: int


def tiles_at_a_time(call: ClusterTailCall, mode: ClusterMode) -> int:
    """Whole rows of keys where they fit."""
    every, rows, count = tiles_of(call), call.label.shape[0] * call.label.shape[1], call.centres.shape[2]
    if mode.TILE:
        return every
    words = -(-count // TABLE_BLOCK) * TABLE_BLOCK // 32
    size = max(1, PLANE_BYTES // (words * mode.PLANES * TILE_QUERIES * 4))
    return min(every, size if size < every // rows else size // (every // rows) * (every // rows))


def chunks(call: ClusterTailCall, tail: ClusterTail, flags: dict[str, Any]) -> Iterator[Chunk]:
    """All tiles, so many at a time that their counts take little memory."""
    every, mode = tiles_of(call), flags["MODE"]
    if mode.TILE:
        yield Chunk(tail, every)
        return
    size, words = tiles_at_a_time(call, mode), tail.table.padded // 32
    shape = (size, words, mode.PLANES, TILE_QUERIES)
    tail = tail._replace(planes=torch.empty(shape, dtype=torch.int32, device=tail.q.device))
    each, seen = min(MOST_WORDS, words & -words), kinds(tail.index, tail.label, tail.seed)
    for first in range(0, every, size):
        one = Chunk(tail._replace(first=first), min(size, every - first))
        _counts(one.tiles * words // each, mode, flags["B"], each, seen)(one.tail)
        yield one


def table_of(call: ClusterTailCall, flags: dict[str, Any]) -> Table:
    centres, values, row, value_row = call.centres, call.values, flags["ROW"], flags["VROW"]
    rows, count = centres.shape[0] * centres.shape[1], centres.shape[2]
    padded = -(-count // TABLE_BLOCK) * TABLE_BLOCK
    narrow, device = flags["MODE"].NARROW, centres.device

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, padded, width), dtype=dtype, device=device)

    k, v = (row.W * row.PIECES, call.q.dtype), (value_row.W * value_row.PIECES, call.head_out.dtype)
    numbers = torch.empty((3, rows, padded), dtype=torch.float32, device=device)
    rest = (empty(*k), empty(*v)) if narrow else (None, None)
    table = Table(empty(*k), rest[0], empty(*v), rest[1], numbers[0], numbers[1], numbers[2], count, padded)
    gains = None if call.gains is None else call.gains.contiguous()
    given = (centres.contiguous(), values.contiguous(), call.sizes.contiguous(), gains)
    _table(rows * padded // TABLE_BLOCK, row, value_row, kinds(*given, table))(*given, table)
    return table


@cached
def _table(programs: int, row: Any, value_row: Any, given: tuple[Any, ...]) -> Kernel:
    flags = {"BLOCK_C": TABLE_BLOCK, "ROW": row, "VROW": value_row, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(table_kernel, programs, flags)


@cached
def _counts(programs: int, mode: ClusterMode, block: Block, words: int, given: tuple[Any, ...]) -> Kernel:
    flags = {"MODE": mode, "WORDS": words, "B": block, "num_warps": 2, "enable_fp_fusion": True}
    return Kernel(counts_kernel, programs, flags)


@cached
def _taken(count: int, size: int, block: Block, given: tuple[Any, ...]) -> Kernel:
    mode = ListMode(64, TABLE_BLOCK, 64 % size == 0, 2)
    return Kernel(taken_kernel, count, {"MODE": mode, "B": block, "num_warps": 4, "enable_fp_fusion": True})


@triton.jit
def put_halves(high, rest, slot, at, there, base, ROW: tl.constexpr):
    """Rows base[at] to rows `slot` of a table, rounded, and what rounding left of them."""
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        x = block_of(base, at, there, n, ROW).to(tl.float32)
        to = slot[:, None] * (ROW.W * ROW.PIECES) + (n * ROW.W + tl.arange(0, ROW.W))[None, :]
        rounded = x.to(high.dtype.element_ty)
        tl.store(high + to, rounded)
        if rest is not None:
            left = x - rounded.to(tl.float32)
            left = tl.where(tl.abs(left) < float("inf"), left, 0.0)  # what is not finite is so in the first half
            tl.store(rest + to, left.to(high.dtype.element_ty))


@triton.jit
def table_kernel(
    centres, values, sizes, gains, table, BLOCK_C: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """Program (row, block of clusters)."""
    blocks = table.padded // BLOCK_C
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    there, slot, source = at < table.count, row * table.padded + at, row * table.count
    put_halves(table.k, table.k_rest, slot, at, there, centres + source * ROW.E, ROW)
    put_halves(table.v, table.v_rest, slot, at, there, values + source * VROW.E, VROW)
    size = tl.load(sizes + source + at, mask=there, other=0).to(tl.float32)
    weight = size
    if gains is not None:
        weight = size * tl.load(gains + source + at, mask=there, other=0.0)
    tl.store(table.logs + slot, tl.where(weight == 0, -float("inf"), tl.log(tl.where(weight == 0, 1.0, weight))))
    tl.store(table.sizes + slot, size)
    tl.store(table.shares + slot, tl.where(size > 0, 1 / tl.maximum(size, 1.0), 0.0))


class Listing(NamedTuple):
    """What `keys_at` reads, in a kernel."""

    first: Any
    end: Any
    mask_row: Any


class Unmasked(NamedTuple):
    """Keys of which none is masked, in a kernel."""

    masked: Any
    geo: Any


@triton.jit
def taken_kernel(taken, label, cells, masked, geo, group, padded, MODE: tl.constexpr, B: tl.constexpr):
    """How many keys of each cluster the cells of a tile hold. Program: tile."""
    tile = tl.program_id(0)
    row, _ = tile_at(tile, geo, B)
    label_row = label + (row // group).to(tl.int64) * points(geo.k)
    end = tl.load(cells.count + tile) * points(cells.sides)
    listed = Listing(cells.first + tile.to(tl.int64) * cells.room, end, row.to(tl.int64))
    for start in range(0, padded, MODE.BLOCK_C):
        name = start + tl.arange(0, MODE.BLOCK_C)
        found = tl.zeros([MODE.BLOCK_K, MODE.BLOCK_C], tl.int32)
        for begin in range(0, end, MODE.BLOCK_K):
            key = keys_at(begin, listed, cells.sides, Unmasked(masked, geo), MODE)
            theirs = tl.load(label_row + key, mask=key >= 0, other=-1)
            found += (theirs[:, None] == name[None, :]).to(tl.int32)
        tl.store(taken + tile.to(tl.int64) * padded + name, tl.sum(found, 0).to(tl.float32))


@triton.jit
def tail_queries(tile, t, MODE: tl.constexpr, B: tl.constexpr):
    row, corner = tile_at(tile, t.geo, B)
    query, exists = lane_query(corner, t.geo, B)
    start, source = row * points(t.geo.q).to(tl.int64), (row // t.group).to(tl.int64)
    index_row, label_row = t.index + start * t.kappa, t.label + source * points(t.geo.k)
    noise, slot = absorb(row_state(t.seed, row), query), source * t.table.padded
    if t.taken is not None:
        counts = t.taken + tl.cast(tile, tl.int64) * t.table.padded
    else:
        counts = t.planes + tl.cast(tile - t.first, tl.int64) * (t.table.padded // 32 * MODE.PLANES * B.BLOCK_Q)
    return TailQueries(row, query, start, exists, index_row, start, label_row, noise, slot, counts)


@triton.jit
def label_at(match, e, offset, here, t, MODE: tl.constexpr):
    """The label of the key at an offset from match e; -1 where it counts no more or is none."""
    key, ok = legal_at(match, e, offset, here, t, False, MODE.SEVERAL)
    return tl.load(here.label_row + key, mask=ok, other=-1)


@triton.jit
def counts_kernel(t, MODE: tl.constexpr, WORDS: tl.constexpr, B: tl.constexpr):
    """How many keys of each cluster lie in the union of each query's windows. Program (tile, WORDS words of planes)."""
    groups = t.table.padded // (32 * WORDS)
    tile, word = t.first + tl.program_id(0) // groups, tl.program_id(0) % groups * WORDS + tl.arange(0, WORDS)
    here, planes = tail_queries(tile, t, MODE, B), ()
    for n in tl.static_range(tl.constexpr(MODE.PLANES)):  # noqa: B007 - Triton wants other loops' `_` a tensor
        planes += (tl.zeros([WORDS, B.BLOCK_Q], tl.int32),)
    for e in range(t.kappa):
        match, offset = match_of(e, here.exists, here, t), first_offset(t.reach)
        for _ in range(window_size(t.reach)):
            label = label_at(match, e, offset, here, t, MODE)
            bit = (label * 0 + 1) << (label & 31)
            carry = tl.where((label >> 5)[None, :] == word[:, None], bit[None, :], 0)
            more = ()
            for n in tl.static_range(len(planes)):
                more += (planes[n] ^ carry,)
                carry = planes[n] & carry
            planes, offset = more, next_offset(offset, t.reach)
    for n in tl.static_range(len(planes)):
        at = (word[:, None] * MODE.PLANES + n) * B.BLOCK_Q + tl.arange(0, B.BLOCK_Q)[None, :]
        tl.store(here.counts + at, planes[n])


@triton.jit
def left_of(start, here, t, MODE: tl.constexpr, B: tl.constexpr):
    """How many keys of BLOCK_C clusters from `start` on each query has left: [BLOCK_Q or 1, BLOCK_C]; whole numbers."""
    at = start + tl.arange(0, MODE.BLOCK_C)
    left = tl.load(t.table.sizes + here.slot + at)[None, :]
    if MODE.TILE:
        left -= tl.load(here.counts + at)[None, :]
    else:
        bit, lane = ((at * 0 + 1) << (at & 31))[None, :], tl.arange(0, B.BLOCK_Q)
        left = tl.broadcast_to(left, [B.BLOCK_Q, MODE.BLOCK_C])
        for n in tl.static_range(tl.constexpr(MODE.PLANES)):
            counts = here.counts + n * B.BLOCK_Q + lane
            plane = tl.load(counts + start // 32 * (MODE.PLANES * B.BLOCK_Q))[:, None]
            for w in tl.static_range(1, tl.constexpr(MODE.BLOCK_C) // 32):
                word = tl.load(counts + (start // 32 + w) * (MODE.PLANES * B.BLOCK_Q))[:, None]
                plane = tl.where((at - start < 32 * w)[None, :], plane, word)
            left -= tl.where((plane & bit) != 0, 1.0 * (1 << n), 0.0)
    return left


@triton.jit
def for_product(x):
    """Triton's interpreter multiplies no bfloat16."""
    return x.to(tl.float32) if WIDEN and x.dtype == tl.bfloat16 else x


@triton.jit
def own_rows(base, here, ROW: tl.constexpr):
    """Rows of the queries as all their pieces."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        pieces += (for_product(block_of(base + here.start * ROW.E, here.query, here.exists, n, ROW)),)
    return pieces


@triton.jit
def table_rows(base, slot, piece, ROW: tl.constexpr):
    return for_product(whole_block(base, slot, piece, ROW))


@triton.jit
def table_products(mine, base, rest, slot, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr):
    """Rows of the queries, in pieces, times rows of a table: [BLOCK_Q, BLOCK_C]."""
    total = tl.zeros([B.BLOCK_Q, MODE.BLOCK_C], tl.float32)
    for n in tl.static_range(len(mine)):
        if rest is not None:
            total = product(mine[n], tl.trans(table_rows(rest, slot, n, ROW)), total)
        total = product(mine[n], tl.trans(table_rows(base, slot, n, ROW)), total)
    return total


@triton.jit
def cluster_scores(start, mine, here, t, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr):
    """BLOCK_C clusters from `start` on: their names, places in the table, scores, and the share of keys that is left.

    The score is scale <q, centre> plus the log of size and gain, -inf where no key is left.
    """
    at = start + tl.arange(0, MODE.BLOCK_C)
    slot, log = here.slot + at, tl.load(t.table.logs + here.slot + at)
    s = table_products(mine, t.table.k, t.table.k_rest, slot, MODE, B, ROW)
    left = left_of(start, here, t, MODE, B)
    s = tl.where(left > 0, s * t.scale + log[None, :], -float("inf"))
    return at, slot, s, left * tl.load(t.table.shares + slot)[None, :]
