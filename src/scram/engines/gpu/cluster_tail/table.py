"""Clusters beside tiles of queries, in Triton: a table of the clusters, and how many keys of each a query has left.

What every query needs of a cluster is computed once: its center and value in whole blocks and the dtype of the
features, and the log of its size. A center of 16 bits is as far from the mean of its keys as they are from what they
were rounded from; that of one key, or of copies of one, is exact. A place without a cluster has no keys. How many keys
of each cluster the windows of a query hold is counted once too, for some tiles at a time: counts of several clusters
share a word, of which a product takes out the bits of one where it would compare every label.
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
from ....spec.routing import MOST_RAISED
from ....spec.schedule import TILE_QUERIES
from ..primitives import (
    LOG2E,
    UNMASKED,
    Block,
    Dropout,
    MatchWindows,
    QueryBlock,
    Width,
    all_finite,
    attended_key,
    dropout_argument,
    dropout_noise,
    finite,
    first_offset,
    for_product,
    geometry,
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
from ..route.lists import RoutedKeys, load_listed, routed_keys
from ..runtime.block_sizes import stages, tile_pieces
from ..runtime.launch import Flags, Kernel, cached, kinds

BLOCK_BYTES = 48 << 10  # of keys and values, or centers and values, at most that are multiplied at a time
COUNT_BYTES = 24 << 20  # of counts at most that are kept at a time
NARROW_WIDTHS = 128  # features and values together, at most, that have blocks of their own
MOST_WORDS = 16  # of counts that a program makes
TABLE_BLOCK = 64  # the table is a whole number of these; no kernel reads more clusters at a time
TABLE_BLOCK_SIZE = tl.constexpr(TABLE_BLOCK)
RAISED = tl.constexpr(MOST_RAISED)


class Table(NamedTuple):
    """The clusters of all rows, as kernels take them. The widths are whole pieces."""

    k: Tensor  # [rows, padded, E], centers, with zeros for what is not finite: no query without its keys is to see it
    v: Tensor | None  # [rows, padded, F], likewise
    slope: Tensor | None  # [rows, E, F], float32 unless features and values have 16 bits
    slope_scale: Tensor | None  # float32 [rows], what it was divided by to fit float16; None: 1
    logs: Tensor  # float32 [rows, padded], log of the size, log2 beside features and values of 16 bits; NaN: not finite
    sizes: Tensor  # float32 [rows, padded]
    shares: Tensor  # float32 [rows, padded], 1 / size
    spreads: Tensor | None  # float32 [rows, padded]
    used: (
        Tensor  # int32 [rows], behind the last block with a cluster that has keys: in causal order there are many more
    )
    count: int  # clusters of a row
    padded: int  # at least one block


class Inputs(NamedTuple):
    """A ClusterTailCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor  # [B, H, *G, E]
    k: Tensor | None  # [B, Hk, *G', E]
    v: Tensor | None  # [B, Hk, *G', F]
    label: Tensor  # int32 [B, Hc, *G']
    variance: Tensor  # float32 [B, Hc, E]
    near_lse: Tensor | None  # [B, H, *G]
    near_out: Tensor | None  # [B, H, *G, F]
    table: Table
    routes: Tensor | None  # int32 [tiles, words]
    listed: RoutedKeys | None
    counts: Tensor | None  # int32 [tiles, padded * BITS / 32, TILE_QUERIES], keys of each cluster in the windows
    touched: Tensor | None  # int32 [tiles, padded * BITS / 32], whether any of the counts that are read is not 0
    first: int  # tile of `counts`
    windows: MatchWindows  # without a mask: a masked key has no label
    dropout: Dropout
    group: int  # rows of queries that share a row of clusters
    key_group: int  # rows of queries that share a row of keys
    words: int
    first_name: int
    scale: float


class TailConfig(NamedTuple):
    """What a kernel over clusters is compiled for."""

    BITS: int  # of a count of keys in a query's windows, a power of two; 0 without windows
    SEVERAL: bool  # matches
    DROPOUT: bool
    NARROW: bool  # features and values of 16 bits; scores are over log 2 then
    FP16: bool
    BLOCK_C: int  # clusters per product
    BLOCK_K: int  # routed keys per product
    SKIPS: bool  # counts where windows have no key of a block's clusters: a branch, which pays in large blocks
    PARTS: int  # programs that share the width of a tile's values


class TailQueries(NamedTuple):
    """The queries of a tile, in a kernel."""

    block: Any  # QueryBlock
    start: Any  # of the row among all queries, int64
    source: Any  # the row of clusters, int64
    noise: Any  # [BQ]
    slot: Any  # of the row's first cluster in the table, int64
    counts: Any  # pointer to `counts` of the tile
    touched: Any  # pointer to `touched` of the tile
    words: Any  # pointer to the routes of the tile
    tile: Any  # int64


class Chunk(NamedTuple):
    """Some tiles in turn, and the call with the counts of their queries."""

    inputs: Inputs
    tiles: int


def has_windows(call: ClusterTailCall) -> bool:
    return call.index is not None and call.index.shape[-1] > 0


def is_narrow(call: ClusterTailCall) -> bool:
    return call.q.shape[-1] + call.values.shape[-1] <= NARROW_WIDTHS


def tail_flags(
    call: ClusterTailCall, half: tuple[int, ...], exact: tuple[int, ...], half_keys: int | None = None
) -> Flags:
    """Flags of a kernel over clusters.

    `half`, `exact`: clusters or keys per product, warps, stages at most, and where it is given registers at most.
    `half_keys`: other than clusters, keys per product.
    """
    dropout = call.dropout_seed is not None and call.dropout_p > 0
    matches = call.index.shape[-1] if call.index is not None else 0
    seen = (call.q.dtype, call.out_dtype, call.q.device)
    shapes = (call.q.ndim - 3, tuple(call.label.shape[2:]), call.q.shape[-1], call.values.shape[-1])
    return _tail_flags(*shapes, call.radius, matches, dropout, seen, half, exact, half_keys)


@cached
def _tail_flags(
    rank: int,
    key_grid: tuple[int, ...],
    width: int,
    value_width: int,
    radius: tuple[int, ...],
    matches: int,
    dropout: bool,
    seen: tuple[torch.dtype, torch.dtype, torch.device],
    half: tuple[int, ...],
    exact: tuple[int, ...],
    half_keys: int | None,
) -> Flags:
    dtype, value_dtype, device = seen
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    block, warps, most, *registers = half if narrow else exact
    widths = tile_pieces(width, value_width, narrow)
    features = widths["E"]
    values = widths["F"]
    each = features.BLOCK * features.PIECES * dtype.itemsize + values.BLOCK * values.PIECES * value_dtype.itemsize
    block = min(block, TABLE_BLOCK)
    while block > 16 and block * each > BLOCK_BYTES:
        block //= 2
    keys_block = half_keys if half_keys and narrow else block
    while keys_block > 16 and keys_block * each > BLOCK_BYTES:
        keys_block //= 2
    keys = math.prod(2 * b + 1 for b in reaches(radius, key_grid)) if matches else 0
    config = TailConfig(
        BITS=_bits_of(matches * keys),
        SEVERAL=matches > 1,
        DROPOUT=dropout,
        NARROW=narrow,
        FP16=narrow and torch.half in (dtype, value_dtype),
        BLOCK_C=block,
        BLOCK_K=keys_block,
        SKIPS=narrow and half_keys is not None and block >= 64,
        PARTS=values.PIECES,
    )
    ahead = stages(device, most, max(block, keys_block) * each, TILE_QUERIES * each)
    options = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
    limit = {"maxnreg": registers[0]} if registers else {}
    return {"CONFIG": config, "B": tile_block(rank), **widths, **options, **limit}


def _bits_of(most: int) -> int:
    """Of a field that holds counts up to `most`, of which whole numbers fill a word; 0 for none."""
    return max(4, triton.next_power_of_2(most.bit_length())) if most else 0


def tiles_of(call: ClusterTailCall) -> int:
    """Of all rows."""
    rank = call.q.ndim - 3
    return call.q.shape[0] * call.q.shape[1] * tiles(grid_of(call.q), tile_block(rank).TILE)


def inputs_of(call: ClusterTailCall, flags: Flags) -> Inputs:
    """The call with its table and the keys that its tiles route."""
    q = call.q.contiguous()
    label = call.label.contiguous()
    key_grid = tuple(label.shape[2:])
    geo = geometry(grid_of(q), key_grid)
    index = call.index.contiguous() if has_windows(call) and call.index is not None else None
    listed = None
    if call.routes is not None and call.order is not None:
        listed = routed_keys(call.routes, call.order, call.sizes, call.keys)
    return Inputs(
        q=q,
        k=contiguous(call.k),
        v=contiguous(call.v),
        label=label,
        variance=call.variance.contiguous(),
        near_lse=contiguous(call.near_lse),
        near_out=contiguous(call.near_out),
        table=tail_table(call, flags),
        routes=contiguous(call.routes),
        listed=listed,
        counts=None,
        touched=None,
        first=0,
        windows=MatchWindows(
            index, UNMASKED, geo, reaches(call.radius, key_grid), 0 if index is None else index.shape[-1]
        ),
        dropout=dropout_argument(call.dropout_seed, call.dropout_p, call.rows),
        group=q.shape[1] // label.shape[1],
        key_group=1 if call.k is None else q.shape[1] // call.k.shape[1],
        words=0 if call.routes is None else call.routes.shape[-1],
        first_name=call.first_name,
        scale=call.scale,
    )


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def tiles_at_a_time(call: ClusterTailCall, config: TailConfig) -> int:
    """Whole rows of keys where they fit; all tiles without windows."""
    all_tiles = tiles_of(call)
    if not config.BITS:
        return all_tiles
    words = -(-call.centers.shape[2] // TABLE_BLOCK) * TABLE_BLOCK * config.BITS // 32
    size = max(1, COUNT_BYTES // (words * TILE_QUERIES * 4))
    tiles_of_row = all_tiles // (call.label.shape[0] * call.label.shape[1])
    return min(all_tiles, size if size < tiles_of_row else size // tiles_of_row * tiles_of_row)


def chunks(call: ClusterTailCall, inputs: Inputs, flags: Flags) -> Iterator[Chunk]:
    """All tiles, so many at a time that their counts take little memory."""
    all_tiles = tiles_of(call)
    config = flags["CONFIG"]
    if not config.BITS:
        yield Chunk(inputs, all_tiles)
        return
    size = tiles_at_a_time(call, config)
    words = inputs.table.padded * config.BITS // 32
    counts = torch.empty((size, words, TILE_QUERIES), dtype=torch.int32, device=inputs.q.device)
    inputs = inputs._replace(counts=counts, touched=counts.new_empty((size, words)))
    each = min(MOST_WORDS, words & -words)
    seen = kinds(*inputs)
    for first in range(0, all_tiles, size):
        chunk = Chunk(inputs._replace(first=first), min(size, all_tiles - first))
        _counts(chunk.tiles * words // each, config, flags["B"], each, seen)(chunk.inputs)
        yield chunk


def tail_table(call: ClusterTailCall, flags: Flags) -> Table:
    given = (call.centers, call.values, call.slope, call.sizes, call.spreads)
    return table_of(*given, flags["E"], flags["F"], flags["CONFIG"].NARROW, (call.q.dtype, call.out_dtype))


def table_of(
    centers: Tensor,
    values: Tensor | None,
    slope: Tensor | None,
    sizes: Tensor,
    spreads: Tensor | None,
    features: Width,
    value_features: Width,
    narrow: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Table:
    """centers [B, Hc, C, E], values [B, Hc, C, F], slope [B, Hc, E, F], sizes and spreads [B, Hc, C]."""
    rows = centers.shape[0] * centers.shape[1]
    count = centers.shape[2]
    padded = max(1, -(-count // TABLE_BLOCK)) * TABLE_BLOCK  # never 0: loops over it need not ask
    width = features.BLOCK * features.PIECES
    value_width = value_features.BLOCK * value_features.PIECES

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=centers.device)

    slope_dtype = dtypes[0] if narrow else torch.float32
    slope_scale = None
    if slope is not None and slope_dtype == torch.float16:
        slope_scale = torch.ldexp(torch.ones_like(slope[..., 0, 0]), slope.abs().amax((-2, -1)).frexp().exponent)
    logs, sizes_here, shares, spreads_here = torch.empty(
        (4, rows, padded), dtype=torch.float32, device=centers.device
    ).unbind()
    table = Table(
        k=empty(padded, width, dtype=dtypes[0]),
        v=None if values is None else empty(padded, value_width, dtype=dtypes[1]),
        slope=None if slope is None else empty(width, value_width, dtype=slope_dtype),
        slope_scale=slope_scale,
        logs=logs,
        sizes=sizes_here,
        shares=shares,
        spreads=None if spreads is None else spreads_here,
        used=torch.zeros(rows, dtype=torch.int32, device=centers.device),
        count=count,
        padded=padded,
    )
    given = (centers.contiguous(), contiguous(values), contiguous(slope), sizes.contiguous(), contiguous(spreads))
    blocks = padded // TABLE_BLOCK + (0 if slope is None else triton.cdiv(width, TABLE_BLOCK))
    unit = LOG2E.value if narrow else 1.0
    _table(rows * blocks, features, value_features, kinds(*given, table))(*given, table, unit)
    return table


@cached
def _table(programs: int, features: Width, values: Width, given: tuple[Any, ...]) -> Kernel:
    flags = {"BLOCK_C": TABLE_BLOCK, "E": features, "F": values, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(table_kernel, programs, flags)


@cached
def _counts(programs: int, config: TailConfig, block: Block, words: int, given: tuple[Any, ...]) -> Kernel:
    flags = {"CONFIG": config, "WORDS": words, "B": block, "num_warps": 2, "enable_fp_fusion": True}
    return Kernel(counts_kernel, programs, flags)


@triton.jit
def used_of(table, source):
    """How many clusters of a row are looked at, whole blocks of them: at least one, so that loops need not ask."""
    return tl.maximum(tl.load(table.used + source), TABLE_BLOCK_SIZE)


@triton.jit
def store_padded(table, slot, at, exists, room, base, scale, E: tl.constexpr):
    """Vectors base[at] / scale to vectors `slot` of a table where `room`, in its dtype."""
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        x = load_piece(base, at, exists, n, E).to(tl.float32) / scale  # [BC, E]
        place = slot[:, None] * (E.BLOCK * E.PIECES) + (n * E.BLOCK + tl.arange(0, E.BLOCK))[None, :]  # [BC, E]
        tl.store(table + place, x.to(table.dtype.element_ty), mask=room[:, None])


@triton.jit
def store_finite(table, slot, at, exists, base, E: tl.constexpr):
    """`store_padded` with zeros for what is not finite; and which vectors are finite [BC]."""
    ok = at >= 0  # [BC]
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        x = load_piece(base, at, exists, n, E).to(table.dtype.element_ty)  # [BC, E]
        ok = ok & all_finite((x,))
        place = slot[:, None] * (E.BLOCK * E.PIECES) + (n * E.BLOCK + tl.arange(0, E.BLOCK))[None, :]  # [BC, E]
        tl.store(table + place, finite(x))
    return ok


@triton.jit
def table_kernel(
    centers, values, slope, sizes, spreads, table, unit, BLOCK_C: tl.constexpr, E: tl.constexpr, F: tl.constexpr
):
    """Program (row, block of clusters, or of the slope's rows behind them)."""
    lane = tl.arange(0, BLOCK_C)  # [BC]
    cluster_blocks = table.padded // BLOCK_C
    blocks = cluster_blocks
    if slope is not None:
        blocks += (E.BLOCK * E.PIECES + BLOCK_C - 1) // BLOCK_C
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if block < cluster_blocks:
        at = block * BLOCK_C + lane  # [BC]
        exists = at < table.count  # [BC]
        slot = row * table.padded + at  # [BC]
        start = row * table.count
        ok = store_finite(table.k, slot, at, exists, centers + start * E.SIZE, E)  # [BC]
        if values is not None:
            ok = ok & store_finite(table.v, slot, at, exists, values + start * F.SIZE, F)
        size = tl.load(sizes + start + at, mask=exists, other=0).to(tl.float32)  # [BC]
        log = tl.where(ok, tl.log(tl.maximum(size, 1.0)) * unit, float("nan"))  # [BC]
        tl.store(table.logs + slot, tl.where(size > 0, log, -float("inf")))
        if tl.max(size, 0) > 0:
            tl.atomic_max(table.used + row, (block + 1) * BLOCK_C, sem="relaxed")
        tl.store(table.sizes + slot, size)
        tl.store(table.shares + slot, tl.where(size > 0, 1 / tl.maximum(size, 1.0), 0.0))
        if spreads is not None:
            tl.store(table.spreads + slot, tl.load(spreads + start + at, mask=exists, other=0.0))
    elif slope is not None:
        at = (block - cluster_blocks) * BLOCK_C + lane  # [BC]
        room = at < E.BLOCK * E.PIECES  # [BC]
        slot = row * (E.BLOCK * E.PIECES) + at  # [BC]
        scale = 1.0
        if table.slope_scale is not None:
            scale = tl.load(table.slope_scale + row)
        store_padded(table.slope, slot, at, at < E.SIZE, room, slope + row * (E.SIZE * F.SIZE), scale, F)


@triton.jit
def tail_queries(tile, inputs, CONFIG: tl.constexpr, B: tl.constexpr):
    windows = inputs.windows
    row, corner = tile_at(tile, windows.geo, B)
    query, exists = lane_query(corner, windows.geo, B)
    number = tl.cast(tile, tl.int64)
    start = row * points(windows.geo.q).to(tl.int64)
    source = (row // inputs.group).to(tl.int64)
    index_row = number  # what is not there is a number: a function of Triton 3.6 returns no None
    counts = number
    touched = number
    words = number
    if CONFIG.BITS:
        index_row = windows.index + start * windows.kappa
        first_word = (number - inputs.first) * (inputs.table.padded * CONFIG.BITS // 32)
        counts = inputs.counts + first_word * B.BLOCK_Q
        touched = inputs.touched + first_word
    if inputs.routes is not None:
        words = inputs.routes + number * inputs.words
    noise = dropout_noise(inputs.dropout, row, query)  # [BQ]
    block = QueryBlock(query, exists, index_row, start, row)  # of no mask
    slot = tl.multiple_of(source * inputs.table.padded, 16)  # a whole number of blocks: so that loads are wide
    return TailQueries(block, start, source, noise, slot, counts, touched, words, number)


@triton.jit
def counts_kernel(inputs, CONFIG: tl.constexpr, WORDS: tl.constexpr, B: tl.constexpr):
    """How many keys of each cluster lie in the union of each query's windows, 0 for a routed one.

    Program (tile, WORDS words of counts).
    """
    EACH: tl.constexpr = 32 // CONFIG.BITS  # counts of a word
    windows = inputs.windows
    groups = inputs.table.padded // (EACH * WORDS)
    tile = inputs.first + tl.program_id(0) // groups
    word = tl.program_id(0) % groups * WORDS + tl.arange(0, WORDS)  # [WORDS]
    queries = tail_queries(tile, inputs, CONFIG, B)
    label_row = inputs.label + queries.source * points(windows.geo.k)
    counts = tl.zeros([WORDS, B.BLOCK_Q], tl.int32)  # [WORDS, BQ]
    for e in range(windows.kappa):
        match = match_of(e, queries.block.exists, queries.block, windows)  # [BQ]
        offset = first_offset(windows.reach)
        for _ in range(window_size(windows.reach)):
            key, ok = attended_key(match, e, offset, queries.block, windows, False, CONFIG.SEVERAL)
            label = tl.load(label_row + key, mask=ok, other=-1)  # [BQ]
            if inputs.routes is not None:
                routed = tl.load(queries.words + (label >> 5), mask=label >= 0, other=0)  # [BQ]
                label = tl.where(((routed >> (label & 31)) & 1) != 0, -1, label)
            place = label.to(tl.uint32)  # [BQ], of -1 in no word
            one = (label * 0 + 1) << (place % EACH * CONFIG.BITS).to(tl.int32)  # [BQ]
            counts += tl.where((place // EACH).to(tl.int32)[None, :] == word[:, None], one[None, :], 0)
            offset = next_offset(offset, windows.reach)
    lane = tl.arange(0, B.BLOCK_Q)  # [BQ]
    tl.store(queries.counts + word[:, None] * B.BLOCK_Q + lane[None, :], counts)
    tl.store(queries.touched + word, tl.max((counts != 0).to(tl.int32), 1))


@triton.jit
def keys_left(start, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr):
    """How many keys of BLOCK_C clusters from `start` on the windows of each query leave: [BQ, BC]; whole numbers."""
    EACH: tl.constexpr = 32 // CONFIG.BITS  # counts of a word
    in_block = tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    size = tl.load(inputs.table.sizes + queries.slot + start + in_block)  # [BC]
    counts = queries.counts + start // EACH * B.BLOCK_Q + tl.arange(0, B.BLOCK_Q)  # [BQ]
    word = tl.load(counts)[:, None]  # [BQ, 1]
    for w in tl.static_range(1, tl.constexpr(CONFIG.BLOCK_C) // EACH):
        # Known when compiling: a thread has the same places of every EACH clusters.
        word = tl.where((in_block // EACH < w)[None, :], word, tl.load(counts + w * B.BLOCK_Q)[:, None])
    if EACH > 1:
        word = (word >> (in_block % EACH * CONFIG.BITS)[None, :]) & ((1 << CONFIG.BITS) - 1)  # [BQ, BC]
    return size[None, :] - word.to(tl.float32)


@triton.jit
def share_left(start, at, counts, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr):
    """`keys_left` over the sizes of clusters `at` [BC], 0 where not `counts`: [BQ, BC]."""
    left = keys_left(start, queries, inputs, CONFIG, B)  # [BQ, BC]
    return tl.where(counts, left * tl.load(inputs.table.shares + queries.slot + at)[None, :], 0.0)


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
def load_slope(base, source, piece, value_piece, E: tl.constexpr, F: tl.constexpr):
    """A block [E, F] of the slope of row `source` of clusters."""
    e = source * (E.BLOCK * E.PIECES) + piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    return for_product(load_padded(base, e, value_piece, F))


@triton.jit
def slope_factor(spread, queries, inputs):
    """What q @ slope of the table is multiplied by to be the first-order term of a weight of 1: [BQ]."""
    scale = inputs.scale
    if inputs.table.slope_scale is not None:
        scale = inputs.scale * tl.load(inputs.table.slope_scale + queries.source)
    return scale / (1 + spread)


@triton.jit
def slope_weights(slot, table, BLOCK_C: tl.constexpr):
    """What clusters in these slots of the table [BC] count in the first-order term."""
    weights = tl.full([BLOCK_C], 1.0, tl.float32)  # [BC]
    if table.spreads is not None:
        weights = tl.load(table.spreads + slot)
    return weights


@triton.jit
def query_spreads(q_block, queries, inputs, E: tl.constexpr):
    """scale^2 sum_e q_e^2 variance_e of each query: [BQ]."""
    square = q_block[0].to(tl.float32) * q_block[0].to(tl.float32)  # [BQ, E]
    total = tl.sum(square * load_variance(0, queries, inputs, E)[None, :], 1)  # [BQ]
    for n in tl.static_range(1, len(q_block)):
        square = q_block[n].to(tl.float32) * q_block[n].to(tl.float32)  # [BQ, E]
        total += tl.sum(square * load_variance(n, queries, inputs, E)[None, :], 1)
    return total * (inputs.scale * inputs.scale)


@triton.jit
def load_variance(piece, queries, inputs, E: tl.constexpr):
    """A piece [E] of the variance of the row's keys."""
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
    return tl.load(inputs.variance + queries.source * E.SIZE + e, mask=e < E.SIZE, other=0.0).to(tl.float32)


@triton.jit
def score_unit(CONFIG: tl.constexpr):
    """What scores are multiplied by: those of 16 bits are powers of two."""
    return LOG2E if CONFIG.NARROW else 1.0


@triton.jit
def open_clusters(start, queries, inputs, BLOCK_C: tl.constexpr):
    """Logs of the sizes of BLOCK_C clusters from `start` on, -inf where the tile routes one or it has no keys: [BC]."""
    in_block = tl.arange(0, BLOCK_C)  # [BC]
    log = tl.load(inputs.table.logs + queries.slot + start + in_block)  # [BC]
    if inputs.routes is not None:
        first = start // 32
        word = in_block * 0  # [BC]
        for w in tl.static_range((BLOCK_C + 31) // 32):
            # One load for 32 clusters. Known when compiling: a thread has the same places of each.
            routed = tl.load(queries.words + first + w, mask=first + w < inputs.words, other=0)
            word = tl.where(in_block // 32 == w, routed, word)
        log = tl.where(((word >> ((start + in_block) & 31)) & 1) != 0, -float("inf"), log)
    return log


@triton.jit
def cluster_scores(start, q_block, spread, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """BLOCK_C clusters from `start` on: their names, scores, and the share of keys that is left, 1.0 without windows.

    The score is that of `ClusterTailCall` with the whole size; -inf where no key is left and for a routed cluster.
    """
    at = start + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    log = open_clusters(start, queries, inputs, CONFIG.BLOCK_C)  # [BC]
    s = tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_C], tl.float32)  # [BQ, BC]
    for n in tl.static_range(len(q_block)):
        s = product(q_block[n], tl.trans(load_table(inputs.table.k, queries.slot + at, n, E)), s)
    s = s * (inputs.scale * score_unit(CONFIG)) + log[None, :]
    if inputs.table.spreads is not None:
        raised = tl.load(inputs.table.spreads + queries.slot + at) * (score_unit(CONFIG) * 0.5)  # [BC]
        s += tl.minimum(spread[:, None] * raised[None, :], score_unit(CONFIG) * 0.5 * RAISED)
    counts = (log != -float("inf"))[None, :]  # [1, BC]
    share = 1.0
    if CONFIG.BITS:
        if CONFIG.SKIPS:
            share = tl.where(counts, 1.0, tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_C], tl.float32))  # [BQ, BC]
            WORDS: tl.constexpr = CONFIG.BLOCK_C * CONFIG.BITS // 32
            touched = tl.load(queries.touched + start * CONFIG.BITS // 32 + tl.arange(0, WORDS))  # [WORDS]
            if tl.max(touched, 0) != 0:
                share = share_left(start, at, counts, queries, inputs, CONFIG, B)
        else:
            share = share_left(start, at, counts, queries, inputs, CONFIG, B)  # [BQ, BC]
        counts = counts & (share > 0)
    return at, tl.where(counts, s, -float("inf")), share


@triton.jit
def row_of_keys(base, queries, inputs, E: tl.constexpr):
    """Where the vectors of the row of keys begin, or those of its values."""
    return base + (queries.block.row // inputs.key_group).to(tl.int64) * points(inputs.windows.geo.k) * E.SIZE


@triton.jit
def key_scores(begin, number, q_block, queries, inputs, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """BLOCK_K routed keys from number `begin` of a tile's list on: themselves and their scores [BQ, BK], -inf for none.

    What is behind the end of the list is one of its keys.
    """
    at = begin + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    key = tl.load(inputs.listed.keys + queries.tile * inputs.listed.most + at)  # [BK]
    k_row = row_of_keys(inputs.k, queries, inputs, E)
    s = tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_K], tl.float32)  # [BQ, BK]
    for n in tl.static_range(len(q_block)):
        s = product(q_block[n], tl.trans(load_listed(k_row, key, n, E)), s)
    hidden = tl.where(at < number, 0.0, -float("inf"))  # [BK]
    return key, s * (inputs.scale * score_unit(CONFIG)) + hidden[None, :]
