"""Clusters beside tiles of queries, in Triton: a table of the clusters, and how many keys of each a query has left.

What every query needs of a cluster is computed once: its center and value in whole blocks, for 16 bits as the rounded
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

from ....core.calls import ClusterTailCall
from ....spec.grid import grid_of
from ....spec.schedule import TILE_QUERIES
from ..attend.cells import cell_list, cells_of, keys_at
from ..primitives import (
    UNMASKED,
    Block,
    Dropout,
    MatchWindows,
    QueryBlock,
    attended_key,
    dropout_argument,
    dropout_noise,
    first_offset,
    for_product,
    geometry,
    is_finite,
    lane_query,
    load_padded,
    load_piece,
    match_of,
    next_offset,
    points,
    product,
    reaches,
    tile_at,
    tile_block,
    tiles,
    window_size,
)
from ..runtime.block_sizes import stages, tile_pieces
from ..runtime.launch import Kernel, cached, kinds

BLOCK_BYTES = 48 << 10  # of the table at most that are multiplied at a time
PLANE_BYTES = 48 << 20  # of counts at most that are kept at a time
MOST_WORDS = 8  # of counts that a program makes
TABLE_BLOCK = 64  # the table is a whole number of these


class Table(NamedTuple):
    """The clusters of all rows, as kernels take them. The widths are whole pieces."""

    k: Tensor  # [rows, padded, E], centers
    k_rest: Tensor | None  # what rounding to 16 bits left of them
    v: Tensor  # [rows, padded, F]
    v_rest: Tensor | None
    logs: Tensor  # float32 [rows, padded], log of size times gain
    sizes: Tensor  # float32 [rows, padded]
    shares: Tensor  # float32 [rows, padded], 1 / size
    count: int  # clusters of a row
    padded: int


class Inputs(NamedTuple):
    """A ClusterTailCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor  # [B, H, *G, E]
    label: Tensor  # int32 [B, Hk, *G']
    near_lse: Tensor  # [B, H, *G]
    near_out: Tensor  # [B, H, *G, F]
    table: Table
    taken: Tensor | None  # float32 [tiles, padded], keys of each cluster that the queries of a tile attend
    planes: Tensor | None  # int32 [tiles, padded / 32, planes, TILE_QUERIES], keys of each cluster a query attends
    first: int  # tile of `planes`
    windows: MatchWindows  # without a mask: a masked key has no label
    dropout: Dropout
    group: int  # rows of queries that share a row of clusters
    first_name: int
    scale: float


class TailConfig(NamedTuple):
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


class TailQueries(NamedTuple):
    """The queries of a tile, in a kernel."""

    block: Any  # QueryBlock
    start: Any  # of the row among all queries, int64
    label_row: Any  # pointer
    noise: Any  # [BQ]
    slot: Any  # of the row's first cluster in the table, int64
    counts: Any  # pointer to `taken` or `planes` of the tile


class Chunk(NamedTuple):
    """Some tiles in turn, and the call with the counts of their queries."""

    inputs: Inputs
    tiles: int


def tail_flags(call: ClusterTailCall, half: tuple[int, int, int], exact: tuple[int, int, int]) -> dict[str, Any]:
    """Flags of a kernel over clusters. `half`, `exact`: its clusters per product, warps and stages at most."""
    dropout = call.dropout_seed is not None and call.dropout_p > 0
    seen = (call.q.dtype, call.near_out.dtype, call.q.device)
    shapes = (call.index.shape, tuple(call.label.shape[2:]), call.q.shape[-1], call.near_out.shape[-1])
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
    dtype, value_dtype, device = seen
    matches = index_shape[-1]
    rank = len(index_shape) - 3
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    clusters, warps, most = half if narrow else exact
    widths = tile_pieces(width, value_width, narrow)
    features = widths["E"]
    values = widths["F"]
    query_bytes = (
        features.BLOCK * features.PIECES * dtype.itemsize + values.BLOCK * values.PIECES * value_dtype.itemsize
    )
    cluster_bytes = query_bytes * (2 if narrow else 1)
    while clusters > 16 and clusters * cluster_bytes > BLOCK_BYTES:
        clusters //= 2
    keys = math.prod(2 * b + 1 for b in reaches(radius, key_grid))
    config = TailConfig(
        PLANES=(matches * keys).bit_length(),
        SEVERAL=matches > 1,
        TILE=window == "tile",
        DROPOUT=dropout,
        NARROW=narrow,
        FP16=narrow and torch.half in (dtype, value_dtype),
        GAINS=gains,
        BLOCK_C=clusters,
        PARTS=values.PIECES,
    )
    ahead = stages(device, most, clusters * cluster_bytes, 2 * TILE_QUERIES * query_bytes)
    block = tile_block(rank)
    options = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
    return {"CONFIG": config, "B": block, **widths, **options}


def tiles_of(call: ClusterTailCall) -> int:
    """Of all rows."""
    rank = call.q.ndim - 3
    return call.q.shape[0] * call.q.shape[1] * tiles(grid_of(call.q), tile_block(rank).TILE)


def inputs_of(call: ClusterTailCall, flags: dict[str, Any]) -> Inputs:
    """The call with its table, and for tiles the keys they have taken."""
    q = call.q.contiguous()
    index = call.index.contiguous()
    label = call.label.contiguous()
    key_grid = tuple(label.shape[2:])
    geo = geometry(grid_of(q), key_grid)
    group = q.shape[1] // label.shape[1]
    table = table_of(call, flags)
    taken = None
    if call.window == "tile":
        count = tiles_of(call)
        cells = cells_of(index, geo, call.radius)
        taken = torch.empty((count, table.padded), dtype=torch.float32, device=q.device)
        kernel = _taken(count, cells.size, flags["B"], kinds(label, taken))
        kernel(taken, label, cells, UNMASKED, geo, group, table.padded)
    return Inputs(
        q=q,
        label=label,
        near_lse=call.near_lse.contiguous(),
        near_out=call.near_out.contiguous(),
        table=table,
        taken=taken,
        planes=None,
        first=0,
        windows=MatchWindows(index, UNMASKED, geo, reaches(call.radius, key_grid), index.shape[-1]),
        dropout=dropout_argument(call.dropout_seed, call.dropout_p, call.rows),
        group=group,
        first_name=call.first_name,
        scale=call.scale,
    )


def tiles_at_a_time(call: ClusterTailCall, config: TailConfig) -> int:
    """Whole rows of keys where they fit."""
    all_tiles = tiles_of(call)
    if config.TILE:
        return all_tiles
    words = -(-call.centers.shape[2] // TABLE_BLOCK) * TABLE_BLOCK // 32
    size = max(1, PLANE_BYTES // (words * config.PLANES * TILE_QUERIES * 4))
    tiles_of_row = all_tiles // (call.label.shape[0] * call.label.shape[1])
    return min(all_tiles, size if size < tiles_of_row else size // tiles_of_row * tiles_of_row)


def chunks(call: ClusterTailCall, inputs: Inputs, flags: dict[str, Any]) -> Iterator[Chunk]:
    """All tiles, so many at a time that their counts take little memory."""
    all_tiles = tiles_of(call)
    config = flags["CONFIG"]
    if config.TILE:
        yield Chunk(inputs, all_tiles)
        return
    size = tiles_at_a_time(call, config)
    words = inputs.table.padded // 32
    shape = (size, words, config.PLANES, TILE_QUERIES)
    inputs = inputs._replace(planes=torch.empty(shape, dtype=torch.int32, device=inputs.q.device))
    each = min(MOST_WORDS, words & -words)
    seen = kinds(inputs.windows.index, inputs.label, inputs.dropout.seed)
    for first in range(0, all_tiles, size):
        chunk = Chunk(inputs._replace(first=first), min(size, all_tiles - first))
        _counts(chunk.tiles * words // each, config, flags["B"], each, seen)(chunk.inputs)
        yield chunk


def table_of(call: ClusterTailCall, flags: dict[str, Any]) -> Table:
    centers = call.centers
    features = flags["E"]
    values = flags["F"]
    rows = centers.shape[0] * centers.shape[1]
    count = centers.shape[2]
    padded = -(-count // TABLE_BLOCK) * TABLE_BLOCK
    narrow = flags["CONFIG"].NARROW

    def empty_k() -> Tensor:
        return torch.empty((rows, padded, features.BLOCK * features.PIECES), dtype=call.q.dtype, device=centers.device)

    def empty_v() -> Tensor:
        shape = (rows, padded, values.BLOCK * values.PIECES)
        return torch.empty(shape, dtype=call.near_out.dtype, device=centers.device)

    logs, sizes, shares = torch.empty((3, rows, padded), dtype=torch.float32, device=centers.device).unbind()
    table = Table(
        k=empty_k(),
        k_rest=empty_k() if narrow else None,
        v=empty_v(),
        v_rest=empty_v() if narrow else None,
        logs=logs,
        sizes=sizes,
        shares=shares,
        count=count,
        padded=padded,
    )
    gains = None if call.gains is None else call.gains.contiguous()
    given = (centers.contiguous(), call.values.contiguous(), call.sizes.contiguous(), gains)
    _table(rows * padded // TABLE_BLOCK, features, values, kinds(*given, table))(*given, table)
    return table


@cached
def _table(programs: int, features: Any, values: Any, given: tuple[Any, ...]) -> Kernel:
    flags = {"BLOCK_C": TABLE_BLOCK, "E": features, "F": values, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(table_kernel, programs, flags)


@cached
def _counts(programs: int, config: TailConfig, block: Block, words: int, given: tuple[Any, ...]) -> Kernel:
    flags = {"CONFIG": config, "WORDS": words, "B": block, "num_warps": 2, "enable_fp_fusion": True}
    return Kernel(counts_kernel, programs, flags)


@cached
def _taken(count: int, size: int, block: Block, given: tuple[Any, ...]) -> Kernel:
    sizes = {"BLOCK_K": 64, "BLOCK_C": TABLE_BLOCK, "EVEN": 64 % size == 0, "B": block}
    return Kernel(taken_kernel, count, {**sizes, "num_warps": 4, "enable_fp_fusion": True})


@triton.jit
def store_halves(high, rest, slot, at, exists, base, E: tl.constexpr):
    """Vectors base[at] to vectors `slot` of a table, rounded, and what rounding left of them."""
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        x = load_piece(base, at, exists, n, E).to(tl.float32)  # [BC, E]
        place = slot[:, None] * (E.BLOCK * E.PIECES) + (n * E.BLOCK + tl.arange(0, E.BLOCK))[None, :]  # [BC, E]
        rounded = x.to(high.dtype.element_ty)
        tl.store(high + place, rounded)
        if rest is not None:
            left = x - rounded.to(tl.float32)
            left = tl.where(is_finite(left), left, 0.0)  # what is not finite is so in the first half
            tl.store(rest + place, left.to(high.dtype.element_ty))


@triton.jit
def table_kernel(centers, values, sizes, gains, table, BLOCK_C: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row, block of clusters)."""
    blocks = table.padded // BLOCK_C
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)  # [BC]
    exists = at < table.count  # [BC]
    slot = row * table.padded + at  # [BC]
    start = row * table.count
    store_halves(table.k, table.k_rest, slot, at, exists, centers + start * E.SIZE, E)
    store_halves(table.v, table.v_rest, slot, at, exists, values + start * F.SIZE, F)
    size = tl.load(sizes + start + at, mask=exists, other=0).to(tl.float32)  # [BC]
    weight = size
    if gains is not None:
        weight = size * tl.load(gains + start + at, mask=exists, other=0.0)
    tl.store(table.logs + slot, tl.where(weight == 0, -float("inf"), tl.log(tl.where(weight == 0, 1.0, weight))))
    tl.store(table.sizes + slot, size)
    tl.store(table.shares + slot, tl.where(size > 0, 1 / tl.maximum(size, 1.0), 0.0))


@triton.jit
def taken_kernel(
    taken,
    label,
    cells,
    masked,
    geo,
    group,
    padded,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    B: tl.constexpr,
):
    """How many keys of each cluster the cells of a tile hold. Program: tile."""
    tile = tl.program_id(0)
    row, _ = tile_at(tile, geo, B)
    label_row = label + (row // group).to(tl.int64) * points(geo.k)
    listed = cell_list(tile, row, cells, masked)
    for start in range(0, padded, BLOCK_C):
        name = start + tl.arange(0, BLOCK_C)  # [BC]
        count = tl.zeros([BLOCK_K, BLOCK_C], tl.int32)  # [BK, BC]
        for begin in range(0, listed.end, BLOCK_K):
            key = keys_at(begin, listed, cells.sides, masked, geo, BLOCK_K, EVEN, 2)  # [BK]
            key_label = tl.load(label_row + key, mask=key >= 0, other=-1)  # [BK]
            count += (key_label[:, None] == name[None, :]).to(tl.int32)
        tl.store(taken + tile.to(tl.int64) * padded + name, tl.sum(count, 0).to(tl.float32))


@triton.jit
def tail_queries(tile, inputs, CONFIG: tl.constexpr, B: tl.constexpr):
    windows = inputs.windows
    row, corner = tile_at(tile, windows.geo, B)
    query, exists = lane_query(corner, windows.geo, B)
    start = row * points(windows.geo.q).to(tl.int64)
    key_row = (row // inputs.group).to(tl.int64)
    index_row = windows.index + start * windows.kappa
    label_row = inputs.label + key_row * points(windows.geo.k)
    noise = dropout_noise(inputs.dropout, row, query)  # [BQ]
    slot = key_row * inputs.table.padded
    if inputs.taken is not None:
        counts = inputs.taken + tl.cast(tile, tl.int64) * inputs.table.padded
    else:
        counts = inputs.planes + tl.cast(tile - inputs.first, tl.int64) * (
            inputs.table.padded // 32 * CONFIG.PLANES * B.BLOCK_Q
        )
    mask_row = start  # of no mask
    return TailQueries(QueryBlock(query, exists, index_row, mask_row), start, label_row, noise, slot, counts)


@triton.jit
def label_at(match, e, offset, queries, windows, CONFIG: tl.constexpr):
    """The label [BQ] of the key at an offset from match e; -1 where it counts no more or is none."""
    key, ok = attended_key(match, e, offset, queries.block, windows, False, CONFIG.SEVERAL)
    return tl.load(queries.label_row + key, mask=ok, other=-1)


@triton.jit
def counts_kernel(inputs, CONFIG: tl.constexpr, WORDS: tl.constexpr, B: tl.constexpr):
    """How many keys of each cluster lie in the union of each query's windows. Program (tile, WORDS words of planes)."""
    windows = inputs.windows
    groups = inputs.table.padded // (32 * WORDS)
    tile = inputs.first + tl.program_id(0) // groups
    word = tl.program_id(0) % groups * WORDS + tl.arange(0, WORDS)  # [WORDS]
    queries = tail_queries(tile, inputs, CONFIG, B)
    planes = ()
    for n in tl.static_range(tl.constexpr(CONFIG.PLANES)):  # noqa: B007 - Triton wants other loops' `_` a tensor
        planes += (tl.zeros([WORDS, B.BLOCK_Q], tl.int32),)  # [WORDS, BQ]
    for e in range(windows.kappa):
        match = match_of(e, queries.block.exists, queries.block, windows)  # [BQ]
        offset = first_offset(windows.reach)
        for _ in range(window_size(windows.reach)):
            label = label_at(match, e, offset, queries, windows, CONFIG)  # [BQ]
            bit = (label * 0 + 1) << (label & 31)  # [BQ]
            carry = tl.where((label >> 5)[None, :] == word[:, None], bit[None, :], 0)  # [WORDS, BQ]
            more = ()
            for n in tl.static_range(len(planes)):
                more += (planes[n] ^ carry,)
                carry = planes[n] & carry
            planes = more
            offset = next_offset(offset, windows.reach)
    for n in tl.static_range(len(planes)):
        at = (word[:, None] * CONFIG.PLANES + n) * B.BLOCK_Q + tl.arange(0, B.BLOCK_Q)[None, :]  # [WORDS, BQ]
        tl.store(queries.counts + at, planes[n])


@triton.jit
def keys_left(start, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr):
    """How many keys of BLOCK_C clusters from `start` on each query has left: [BQ or 1, BC]; whole numbers."""
    at = start + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    left = tl.load(inputs.table.sizes + queries.slot + at)[None, :]  # [1, BC]
    if CONFIG.TILE:
        left -= tl.load(queries.counts + at)[None, :]
    else:
        bit = ((at * 0 + 1) << (at & 31))[None, :]  # [1, BC]
        lane = tl.arange(0, B.BLOCK_Q)  # [BQ]
        left = tl.broadcast_to(left, [B.BLOCK_Q, CONFIG.BLOCK_C])
        for n in tl.static_range(tl.constexpr(CONFIG.PLANES)):
            counts = queries.counts + n * B.BLOCK_Q + lane  # [BQ]
            plane = tl.load(counts + start // 32 * (CONFIG.PLANES * B.BLOCK_Q))[:, None]  # [BQ, 1]
            for w in tl.static_range(1, tl.constexpr(CONFIG.BLOCK_C) // 32):
                word = tl.load(counts + (start // 32 + w) * (CONFIG.PLANES * B.BLOCK_Q))[:, None]  # [BQ, 1]
                plane = tl.where((at - start < 32 * w)[None, :], plane, word)
            left -= tl.where((plane & bit) != 0, 1.0 * (1 << n), 0.0)
    return left


@triton.jit
def load_queries(base, queries, E: tl.constexpr):
    """Vectors of the queries as all their pieces [BQ, E]."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        x = load_piece(base + queries.start * E.SIZE, queries.block.query, queries.block.exists, n, E)  # [BQ, E]
        pieces += (for_product(x),)
    return pieces


@triton.jit
def load_table(base, slot, piece, E: tl.constexpr):
    """A piece [BC, E] of vectors of the table."""
    return for_product(load_padded(base, slot, piece, E))


@triton.jit
def table_products(q_block, base, rest, slot, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """Vectors of the queries, in pieces, times those of a table: [BQ, BC]."""
    acc = tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_C], tl.float32)  # [BQ, BC]
    for n in tl.static_range(len(q_block)):
        if rest is not None:
            acc = product(q_block[n], tl.trans(load_table(rest, slot, n, E)), acc)
        acc = product(q_block[n], tl.trans(load_table(base, slot, n, E)), acc)
    return acc


@triton.jit
def cluster_scores(start, q_block, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """BLOCK_C clusters from `start` on: their names, places in the table, scores, and the share of keys that is left.

    The score is scale <q, center> plus the log of size and gain, -inf where no key is left.
    """
    at = start + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    slot = queries.slot + at  # [BC]
    log = tl.load(inputs.table.logs + queries.slot + at)  # [BC]
    s = table_products(q_block, inputs.table.k, inputs.table.k_rest, slot, CONFIG, B, E)  # [BQ, BC]
    left = keys_left(start, queries, inputs, CONFIG, B)  # [BQ or 1, BC]
    s = tl.where(left > 0, s * inputs.scale + log[None, :], -float("inf"))
    return at, slot, s, left * tl.load(inputs.table.shares + slot)[None, :]
