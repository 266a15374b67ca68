"""The hybrid's tail in Triton: the keys that a row shares as matrix products, attended keys left out by comparison.

A program takes a block of queries and walks the shared keys in blocks. The windows have a key when it lies within the
radius of one of the query's matches, or in a cell of its tile, so no key counts twice and nothing is subtracted
afterwards.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import DrawnTail, DrawnTailCall
from ....spec.grid import AllowedKeys, grid_of
from ..primitives import (
    LN2,
    LOWEST,
    Dropout,
    MatchWindows,
    QueryBlock,
    attended_key,
    divide,
    dropout_argument,
    dropout_noise,
    dropped,
    finite,
    for_product,
    geometry,
    is_finite,
    join_lse,
    load_padded,
    load_piece,
    mask_argument,
    match_of,
    offset_of,
    points,
    product,
    reaches,
    softmax_step,
    window_size,
)
from ..runtime.block_sizes import stages, tile_pieces
from ..runtime.launch import Flags, Kernel, on_device
from .shared_keys import BLOCK_K, SharedKeys, draw_names, shared_row, side_by_side

# Queries per program, warps, stages at most. H200, 512x512, E = F = 64, bf16, 512 shared keys, one match, us, forward:
# 64 queries, 4 warps, 2 and 3 stages 351, 342; 128, 8 warps 391, 388; with blocks of 32 keys 400, of 128 630.
# Both kernels of the backward pass with 2 and 3 stages: 993, 925.
# Where a product is of float32: two warps make Triton multiply by mma.sync. With four it takes wgmma on sm_90, which in
# its version 3.6 read shared memory out of bounds (products of float32 beside those of bfloat16, a stratified tail).
HALF = (64, 4, 3)
EXACT = (32, 2, 2)
UNROLLED = 8  # matches at most that are compared without a loop


class Inputs(NamedTuple):
    """A DrawnTailCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor  # [B, H, *G, E]
    near_lse: Tensor  # [B, H, *G]
    shared: SharedKeys
    windows: MatchWindows
    dropout: Dropout
    scale: float


class TailConfig(NamedTuple):
    """What a kernel over shared keys is compiled for."""

    CAUSAL: bool
    DROPOUT: bool
    MATCHES: int  # of a query, 0: too many to be unrolled
    BLOCK_Q: int
    BLOCK_K: int
    SCORES_FIRST: bool  # scores before comparisons: fewer registers forward, more backward


class TailQueries(NamedTuple):
    """Some queries of a row, in a kernel."""

    block: Any  # QueryBlock
    noise: Any  # [BQ], of dropout


def drawn_tail(call: DrawnTailCall) -> DrawnTail:
    q = call.q
    shape = (*q.shape[:-1], call.v.shape[-1])
    out = torch.empty(shape, dtype=call.v.dtype, device=q.device)
    lse, offset = (torch.empty(shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    variance = torch.empty(shape, dtype=torch.float32, device=q.device)
    with on_device(q):
        allowed = AllowedKeys.of(q, call.k, call.causal, call.key_mask)
        result = DrawnTail(out, lse, variance, offset, *draw_names(call))
        if lse.numel():
            shared = side_by_side(call, result.names, result.represents, call.dropout_seed is None)
            flags = {"STRATIFIED": call.stratified, **tail_flags(call, forward=True)}
            programs = blocks_of_queries(call, flags) * flags["F"].PIECES
            kernel = Kernel(tail_kernel, programs, flags)
            kernel(inputs_of(call, shared), call.near_out.contiguous(), allowed.count, result)
    return result


def inputs_of(call: DrawnTailCall, shared: SharedKeys) -> Inputs:
    q = call.q.contiguous()
    index = call.index.contiguous()
    key_grid = grid_of(call.k)
    windows = MatchWindows(
        index,
        mask_argument(q, call.k, call.key_mask),
        geometry(grid_of(q), key_grid),
        reaches(call.radius, key_grid),
        index.shape[-1],
    )
    return Inputs(
        q,
        call.near_lse.contiguous(),
        shared,
        windows,
        dropout_argument(call.dropout_seed, call.dropout_p, call.rows),
        call.scale,
    )


def tail_flags(call: DrawnTailCall, forward: bool) -> Flags:
    q = call.q
    v = call.v
    matches = call.index.shape[-1]
    queries, warps, most = HALF if q.element_size() == v.element_size() == 2 else EXACT
    widths = tile_pieces(q.shape[-1], v.shape[-1], False)
    values = widths["F"]
    query_bytes = widths["E"].BLOCK * widths["E"].PIECES * q.element_size()
    key_bytes = query_bytes
    if forward:
        key_bytes += values.BLOCK * (v.element_size() + 2 * (4 if v.dtype == torch.float32 else 2))
    else:
        query_bytes += values.BLOCK * values.PIECES * v.element_size()
        key_bytes = query_bytes
    config = TailConfig(
        CAUSAL=call.causal,
        DROPOUT=call.dropout_seed is not None and call.dropout_p > 0,
        MATCHES=matches if matches <= UNROLLED else 0,
        BLOCK_Q=queries,
        BLOCK_K=BLOCK_K,
        SCORES_FIRST=forward,
    )
    ahead = stages(q.device, most, BLOCK_K * key_bytes, queries * query_bytes)
    return {"CONFIG": config, **widths, "num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}


def blocks_of_queries(call: DrawnTailCall, flags: Flags) -> int:
    """Of all rows."""
    rows = call.q.shape[0] * call.q.shape[1]
    config: TailConfig = flags["CONFIG"]
    return rows * -(-math.prod(grid_of(call.q)) // config.BLOCK_Q)


@triton.jit
def block_queries(row, number, inputs, CONFIG: tl.constexpr):
    """The queries of a block of a row; `row` is int64."""
    windows = inputs.windows
    geo = windows.geo
    queries = points(geo.q)
    query = number * CONFIG.BLOCK_Q + tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
    exists = query < queries
    noise = dropout_noise(inputs.dropout, row, query)  # [BQ]
    index_row = windows.index + row * queries * windows.kappa
    return TailQueries(QueryBlock(query, exists, index_row, row // windows.masked.group, row), noise)


@triton.jit
def row_blocks(geo, CONFIG: tl.constexpr):
    """Blocks of queries of a row."""
    return (points(geo.q) + CONFIG.BLOCK_Q - 1) // CONFIG.BLOCK_Q


@triton.jit
def load_queries(base, query_block, E: tl.constexpr):
    """Vectors of the queries as all their pieces [BQ, E]."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        pieces += (for_product(load_piece(base, query_block.query, query_block.exists, n, E)),)
    return pieces


@triton.jit
def load_shared(base, at, piece, E: tl.constexpr):
    """A piece [BK, E] of vectors of the shared keys."""
    return for_product(load_padded(base, at, piece, E))


@triton.jit
def window_corner(match, windows):
    """The first coordinates, last axis first, of the window around a match [BQ]; far off for none."""
    rest = tl.maximum(match, 0)
    corner = ()
    for a in tl.static_range(len(windows.reach) - 1, -1, -1):
        up = divide(rest, windows.geo.magic[a]) if a > 0 else rest * 0
        first = rest - up * windows.geo.k[a] - windows.reach[a]
        corner += (tl.where(match >= 0, first, -2 * windows.reach[a] - 1),)
        rest = up
    return corner


@triton.jit
def window_corners(query_block, windows, CONFIG: tl.constexpr):
    """`window_corner` of the first MATCHES matches, one after the other."""
    corners = ()
    for e in tl.static_range(tl.constexpr(CONFIG.MATCHES)):
        corners += window_corner(match_of(e, query_block.exists, query_block, windows), windows)
    return corners


@triton.jit
def name_of(at, shared, geo):
    """The names [BK] of shared keys."""
    return tl.load(shared.places + len(geo.k) * shared.padded + at)


@triton.jit
def in_tail(at, log, corners, shared, queries, inputs, CONFIG: tl.constexpr):
    """Which shared keys [BK] count for which queries [BQ]: those that exist, come up to the query under CAUSAL, and lie
    in none of its windows."""
    ok = (log > -float("inf"))[None, :]  # [1, BK]
    if CONFIG.CAUSAL:
        ok = ok & (name_of(at, shared, inputs.windows.geo)[None, :] <= queries.block.query[:, None])
    return outside_windows(ok, at, corners, shared, queries.block, inputs.windows, CONFIG)


@triton.jit
def outside_windows(ok, at, corners, shared, query_block, windows, CONFIG: tl.constexpr):
    """Which shared keys are `ok` and in none of the query's own windows: [BQ, BK]."""
    place = ()
    for a in tl.static_range(len(windows.reach) - 1, -1, -1):
        place += (tl.load(shared.places + a * shared.padded + at),)  # [BK]
    for e in tl.static_range(tl.constexpr(CONFIG.MATCHES)):
        ok = ok & ~covered(place, corners, e, windows.reach)
    if CONFIG.MATCHES == 0:
        ok = ok & query_block.exists[:, None]  # a loop keeps the shape
        for e in range(windows.kappa):
            corner = window_corner(match_of(e, query_block.exists, query_block, windows), windows)
            ok = ok & ~covered(place, corner, 0, windows.reach)
    return ok


@triton.jit
def covered(place, corners, e: tl.constexpr, reach):
    """Which shared keys [BK], by their coordinates, lie in the e-th windows [BQ]: [BQ, BK]."""
    inside = None
    for n in tl.static_range(len(reach)):
        span = tl.cast(2 * reach[len(reach) - 1 - n], tl.uint32)
        within = (place[n][None, :] - corners[e * len(reach) + n][:, None]).to(tl.uint32) <= span
        inside = within if inside is None else inside & within
    return inside


@triton.jit
def shared_products(q_block, base, at, CONFIG: tl.constexpr, E: tl.constexpr):
    """Vectors of the queries, in pieces, times vectors base[at] of the shared keys: [BQ, BK]."""
    acc = tl.zeros([CONFIG.BLOCK_Q, CONFIG.BLOCK_K], tl.float32)  # [BQ, BK]
    for n in tl.static_range(len(q_block)):
        acc = product(q_block[n], tl.trans(load_shared(base, at, n, E)), acc)
    return acc


@triton.jit
def tail_scores(start, q_block, corners, shared, queries, inputs, CONFIG: tl.constexpr, E: tl.constexpr):
    """BLOCK_K shared keys from `start` on: where they are, their scores, and which count for which query.

    The score is scale <q, k> plus the log of how many keys each represents, -inf where it does not count.
    """
    at = start + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    log = tl.load(shared.logs + at)  # [BK]
    if CONFIG.SCORES_FIRST:
        s = shared_products(q_block, shared.k, at, CONFIG, E)  # [BQ, BK]
        ok = in_tail(at, log, corners, shared, queries, inputs, CONFIG)  # [BQ, BK]
    else:
        ok = in_tail(at, log, corners, shared, queries, inputs, CONFIG)
        s = shared_products(q_block, shared.k, at, CONFIG, E)
    s = s * inputs.scale + log[None, :]
    return at, tl.where(ok, s, -float("inf")), ok


@triton.jit
def thinned(weights, at, shared, queries, inputs, CONFIG: tl.constexpr):
    """What dropout makes of numbers [BQ, BK] of the shared keys `at`."""
    if CONFIG.DROPOUT:
        name = name_of(at, shared, inputs.windows.geo)[None, :]
        weights = dropped(weights, name, queries.noise[:, None], inputs.dropout, True)
    return weights


@triton.jit
def attended_count(query_block, windows, CAUSAL: tl.constexpr):
    """|S_i| [BQ]: the allowed keys in the union of a query's own windows."""
    count = query_block.query * 0
    for e in range(windows.kappa):
        match = match_of(e, query_block.exists, query_block, windows)  # [BQ]
        for number in range(window_size(windows.reach)):
            offset = offset_of(number, windows.reach)
            _, ok = attended_key(match, e, offset, query_block, windows, CAUSAL, True)
            count += ok.to(tl.int32)
    return count


@triton.jit
def plus(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def rough_product(a, b, acc):
    """acc + a @ b, to about three digits."""
    return tl.dot(for_product(a.to(b.dtype)), for_product(b), acc, input_precision="tf32")


@triton.jit
def tail_kernel(
    inputs, near_out, count, result, CONFIG: tl.constexpr, STRATIFIED: tl.constexpr, E: tl.constexpr, F: tl.constexpr
):
    """Program (block of queries, piece of the values). `count` int64 [rows of the mask, M]: allowed keys up to one."""
    geo = inputs.windows.geo
    keys = points(geo.k)
    value_width = F.BLOCK * F.PIECES
    piece = tl.program_id(0) % F.PIECES
    block = tl.program_id(0) // F.PIECES
    blocks = row_blocks(geo, CONFIG)
    row = (block // blocks).to(tl.int64)
    rows = tl.num_programs(0) // (F.PIECES * blocks)
    queries = block_queries(row, block % blocks, inputs, CONFIG)
    query = queries.block.query  # [BQ]
    exists = queries.block.exists  # [BQ]
    first_point = row * points(geo.q)
    point = first_point + query  # [BQ]
    shared = shared_row(row, inputs.shared, geo, CONFIG.BLOCK_K, E, F)
    if not CONFIG.DROPOUT:
        away_row = inputs.shared.away + row * shared.padded * value_width
        squares_row = away_row + rows.to(tl.int64) * shared.padded * value_width
    q_block = load_queries(inputs.q + first_point * E.SIZE, queries.block, E)  # [BQ, E]

    corners = window_corners(queries.block, inputs.windows, CONFIG)
    running_max = tl.full([CONFIG.BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    running_sum = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    square_sum = running_sum  # [BQ], of the squares of the weights
    seen = running_sum  # [BQ], how many shared keys count
    acc = tl.zeros([CONFIG.BLOCK_Q, F.BLOCK], tl.float32)  # [BQ, F]
    away_acc = acc  # [BQ, F], squared weights times values and times their squares, for the variance
    squares_acc = acc  # [BQ, F]
    spoiled = acc  # [BQ, F], how many values are not finite
    for start in range(0, shared.padded, CONFIG.BLOCK_K):
        at, s, ok = tail_scores(start, q_block, corners, shared, queries, inputs, CONFIG, E)
        running_max, rescale, p = softmax_step(running_max, s, None, "powers", False, 1)
        v_block = load_shared(shared.v, at, piece, F)  # [BK, F]
        if CONFIG.CAUSAL:  # a weight of 0 lets no NaN of a later key through
            bad = ~is_finite(v_block)  # [BK, F]
            spoiled = rough_product(tl.where(ok, 1.0, 0.0), tl.where(bad, 1.0, 0.0).to(v_block.dtype), spoiled)
            v_block = finite(v_block)
        kept = thinned(p, at, shared, queries, inputs, CONFIG)  # [BQ, BK]
        acc = product(kept.to(v_block.dtype), v_block, acc * rescale[:, None])
        if CONFIG.DROPOUT:
            running_sum = running_sum * rescale + tl.sum(p, 1)
            seen = seen + tl.sum(tl.where(ok, 1.0, 0.0), 1)
        else:
            p2 = (p * p).to(away_row.dtype.element_ty)  # [BQ, BK], rounded alike in all sums
            rescale2 = (rescale * rescale)[:, None]  # [BQ, 1]
            away_acc = rough_product(p2, load_padded(away_row, at, piece, F), away_acc * rescale2)
            squares_acc = rough_product(p2, load_padded(squares_row, at, piece, F), squares_acc * rescale2)
            p_sum, p2_sum, ok_sum = tl.reduce((p, p2.to(tl.float32), tl.where(ok, 1.0, 0.0)), 1, plus)  # [BQ]
            running_sum = running_sum * rescale + p_sum
            square_sum = square_sum * rescale * rescale + p2_sum
            seen = seen + ok_sum

    attended = attended_count(queries.block, inputs.windows, CONFIG.CAUSAL)  # [BQ]
    last = query if CONFIG.CAUSAL else query * 0 + keys - 1  # [BQ]
    allowed = last + 1  # [BQ]
    if count is not None:
        allowed = tl.load(count + queries.block.mask_row * keys + last, mask=exists, other=0).to(tl.int32)
    left = (allowed - attended).to(tl.float32)  # [BQ]
    has_keys = exists & (seen > 0)  # [BQ]
    offset = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    if not STRATIFIED:
        offset = tl.log(tl.where(has_keys, left, 1.0) / tl.maximum(seen, 1.0))
    near_lse = tl.load(inputs.near_lse + point, mask=exists, other=-float("inf")).to(tl.float32)  # [BQ]
    factor, near_factor, base, norm = join_lse(running_max, running_sum, has_keys, offset, near_lse)
    f = piece * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
    place = point[:, None] * F.SIZE + f[None, :]  # [BQ, F]
    inside = exists[:, None] & (f < F.SIZE)[None, :]  # [BQ, F]
    head_block = tl.load(near_out + place, mask=inside, other=0.0).to(tl.float32)  # [BQ, F]
    head_block = tl.where((near_lse == -float("inf"))[:, None], 0.0, head_block)
    out = tl.where(has_keys[:, None], acc * factor[:, None], 0.0)  # [BQ, F]
    out += tl.where((near_factor == 0.0)[:, None], 0.0, near_factor[:, None] * head_block)
    if CONFIG.CAUSAL:
        out = tl.where(spoiled > 0, float("nan"), out)

    variance = tl.full([CONFIG.BLOCK_Q, F.BLOCK], float("inf"), tl.float32)  # [BQ, F]
    if not CONFIG.DROPOUT:
        # Values are measured from the mean of a few, so that little cancels in the sums of squares.
        middle_row = inputs.shared.middle + row * value_width + f
        middle = tl.load(middle_row)  # [F]
        unit = tl.load(middle_row + rows * value_width)  # [F]
        apart = (out - middle[None, :]) / unit[None, :]  # [BQ, F]
        each = factor[:, None] * unit[None, :]  # [BQ, F]
        r_squares = (squares_acc - 2 * apart * away_acc + apart * apart * square_sum[:, None]) * (each * each)
        # All residuals add up to 0, so the tail's are those of the windows, negated.
        r_sum = near_factor[:, None] * (out - head_block)  # [BQ, F]
        spread = tl.maximum(r_squares - r_sum * r_sum / tl.maximum(seen, 1.0)[:, None], 0.0)  # [BQ, F]
        rest = (1 - seen / tl.maximum(left, 1.0)) * seen / tl.maximum(seen - 1, 1.0)  # [BQ]
        variance = tl.where((seen >= 2)[:, None], rest[:, None] * spread, float("inf"))
        variance = tl.where((seen == left)[:, None], 0.0, variance)

    tl.store(result.out + place, out.to(result.out.dtype.element_ty), mask=inside)
    tl.store(result.variance + place, variance, mask=inside)
    if piece == 0:
        tl.store(result.lse + point, base + norm * LN2, mask=exists)
        tl.store(result.offset + point, offset, mask=exists)
