"""The hybrid's tail in Triton: the keys that a row shares as matrix products, the head's keys left out by comparison.

A program takes a block of queries and walks the shared keys in blocks. A key is the head's when it lies within the
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

from ....calls import DrawnTail, DrawnTailCall
from ....grid import LegalKeys, grid_of
from ....schedule import TILE_QUERIES
from ..attend.windows import dropped, legal_at, masked_by, match_of, offset_of, reaches, window_size
from ..drawn_tail import shared_keys as sk
from ..drawn_tail.attended import TileHeads, tile_heads
from ..noise import Seed, absorb, below_argument, row_state, seed_argument
from ..primitives import Geometry, KeyMask, geometry, lane_query, points, tile_at, tile_count, tile_shape, tiles
from ..runtime.block_sizes import tile_pieces
from ..runtime.launch import Kernel, on_device

# Queries per program, warps, stages at most. H200, 512x512, E = F = 64, bf16, 512 shared keys, one match, us, forward:
# 64 queries, 4 warps, 2 and 3 stages 351, 342; 128, 8 warps 391, 388; with blocks of 32 keys 400, of 128 630.
# Both kernels of the backward pass with 2 and 3 stages: 993, 925.
# Where a product is of float32: two warps make Triton multiply by mma.sync. With four it takes wgmma on sm_90, which in
# its version 3.6 read shared memory out of bounds (products of float32 beside those of bfloat16, a stratified tail).
HALF, EXACT = (64, 4, 3), (32, 2, 2)
UNROLLED = 8  # matches at most that are compared without a loop


class Tail(NamedTuple):
    """A DrawnTailCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor
    index: Tensor
    head_lse: Tensor
    shared: sk.SharedKeys
    masked: KeyMask
    seed: Seed  # of dropout
    geo: Geometry
    reach: tuple[int, ...]
    heads: TileHeads | None  # of tiles
    kappa: int
    threshold: int
    keep: float
    scale: float


class TailMode(NamedTuple):
    """What a kernel over shared keys is compiled for."""

    CAUSAL: bool
    DROPOUT: bool
    TILED: bool  # the windows are those of tiles
    MATCHES: int  # of a query, 0: too many to be unrolled
    WHOLE: tuple[int, ...]  # where TILED: the sides of a tile
    TILE: tuple[int, ...]  # and of a block of queries, a part of it
    BLOCK_Q: int
    BLOCK_K: int
    SCORES_FIRST: bool  # scores before comparisons: fewer registers forward, more backward


class TailQueries(NamedTuple):
    """Some queries of a row, in a kernel."""

    query: Any  # int32 [BLOCK_Q], flat
    exists: Any  # bool [BLOCK_Q]
    index_row: Any  # pointer to the row of matches
    mask_row: Any  # the number of the row of the mask, int64
    noise: Any  # [BLOCK_Q], of dropout
    tile: Any  # where TILED: its number among those of all rows, int64


def drawn_tail(call: DrawnTailCall) -> DrawnTail:
    q, v = call.q, call.v
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=v.dtype, device=q.device)
    lse, offset = (torch.empty(shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    variance = torch.empty(shape, dtype=torch.float32, device=q.device)
    with on_device(q):
        legal = LegalKeys.of(q, call.k, call.causal, call.key_mask)
        found = DrawnTail(out, lse, variance, offset, *sk.draw_names(call))
        if lse.numel():
            tail = tail_of(call, sk.side_by_side(call, found.names, found.represents, call.dropout_seed is None))
            flags = {"STRATIFIED": call.stratified, **tail_flags(call, forward=True)}
            programs = blocks_of_queries(call, flags) * flags["VROW"].PIECES
            Kernel(tail_kernel, programs, flags)(tail, call.head_out.contiguous(), legal.count, found)
    return found


def tail_of(call: DrawnTailCall, shared: sk.SharedKeys) -> Tail:
    q, index, head_lse = call.q.contiguous(), call.index.contiguous(), call.head_lse.contiguous()
    key_grid, masked = grid_of(call.k), masked_by(q, call.k, call.key_mask)
    geo = geometry(grid_of(q), key_grid)
    heads = tile_heads(call, index, shared, masked, geo) if call.window == "tile" else None
    seed = seed_argument(call.dropout_seed, call.rows)
    windows = (geo, reaches(call.radius, key_grid), heads, index.shape[-1])
    dropout = below_argument(call.dropout_p), 1 / (1 - call.dropout_p)
    return Tail(q, index, head_lse, shared, masked, seed, *windows, *dropout, call.scale)


def tail_flags(call: DrawnTailCall, forward: bool) -> dict[str, Any]:
    q, v, matches = call.q, call.v, call.index.shape[-1]
    queries, warps, most = HALF if q.element_size() == v.element_size() == 2 else EXACT
    rows = tile_pieces(q.shape[-1], v.shape[-1], False)
    row, value_row = rows["ROW"], rows["VROW"]
    each = fixed = row.W * row.PIECES * q.element_size()
    if forward:
        each += value_row.W * (v.element_size() + 2 * (4 if v.dtype == torch.float32 else 2))
    else:
        each = fixed = fixed + value_row.W * value_row.PIECES * v.element_size()
    tiled, whole, part = call.window == "tile", *(tile_shape(n, q.ndim - 3) for n in (TILE_QUERIES, queries))
    unrolled = matches if matches <= UNROLLED and not tiled else 0
    dropout = call.dropout_seed is not None and call.dropout_p > 0
    mode = TailMode(call.causal, dropout, tiled, unrolled, whole, part, queries, sk.BLOCK_K, forward)
    ahead = sk.stages(q.device, most, sk.BLOCK_K * each, queries * fixed)
    return {"MODE": mode, **rows, "num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}


def blocks_of_queries(call: DrawnTailCall, flags: dict[str, Any]) -> int:
    """Of all rows."""
    rows, mode = call.q.shape[0] * call.q.shape[1], flags["MODE"]
    grid = grid_of(call.q)
    return rows * int(tiles(grid, mode.TILE) if mode.TILED else -(-math.prod(grid) // mode.BLOCK_Q))


@triton.jit
def head_size(here, t, CAUSAL: tl.constexpr):
    """|S_i|: the legal keys in the union of a query's own windows."""
    found = here.query * 0
    for e in range(t.kappa):
        match = match_of(e, here.exists, here, t)
        for number in range(window_size(t.reach)):
            _, ok = legal_at(match, e, offset_of(number, t.reach), here, t, CAUSAL, True)
            found += ok.to(tl.int32)
    return found


@triton.jit
def plus(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def rough_product(a, b, total):
    """total + a @ b, to about three digits."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32")


@triton.jit
def block_queries(row, number, t, MODE: tl.constexpr):
    """The queries of a block of a row; `row` is int64."""
    queries, tile = points(t.geo.q), row
    if MODE.TILED:
        _, corner = tile_at(number, t.geo, MODE)
        query, exists = lane_query(corner, t.geo, MODE)
        for a in tl.static_range(len(corner)):
            tile = tile * ((t.geo.q[a] + MODE.WHOLE[a] - 1) // MODE.WHOLE[a]) + corner[a] // MODE.WHOLE[a]
    else:
        query = number * MODE.BLOCK_Q + tl.arange(0, MODE.BLOCK_Q)
        exists = query < queries
    noise = absorb(row_state(t.seed, row), query)
    return TailQueries(query, exists, t.index + row * queries * t.kappa, row // t.masked.heads, noise, tile)


@triton.jit
def row_blocks(t, MODE: tl.constexpr):
    """Blocks of queries of a row."""
    return tile_count(t.geo, MODE) if MODE.TILED else (points(t.geo.q) + MODE.BLOCK_Q - 1) // MODE.BLOCK_Q


@triton.jit
def thinned(x, at, shared, here, t, MODE: tl.constexpr):
    """What dropout makes of numbers [BLOCK_Q, BLOCK_K] of the shared keys `at`."""
    if MODE.DROPOUT:
        x = dropped(x, sk.name_of(at, shared, t)[None, :], here.noise[:, None], t, True)
    return x


@triton.jit
def tail_kernel(
    t, head_out, count, found, MODE: tl.constexpr, STRATIFIED: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    queries, keys = points(t.geo.q), points(t.geo.k)
    piece, block = tl.program_id(0) % VROW.PIECES, tl.program_id(0) // VROW.PIECES
    blocks = row_blocks(t, MODE)
    row, rows = (block // blocks).to(tl.int64), tl.num_programs(0) // (VROW.PIECES * blocks)
    here = block_queries(row, block % blocks, t, MODE)
    query, valid, point = here.query, here.exists, row * queries + here.query
    shared = sk.shared_row(row, t, MODE, ROW, VROW)
    if not MODE.DROPOUT:
        away_row = t.shared.away + row * shared.padded * (VROW.W * VROW.PIECES)
        squares_row = away_row + rows.to(tl.int64) * shared.padded * (VROW.W * VROW.PIECES)
    mine = sk.blocks_of(t.q + row * queries * ROW.E, query, valid, ROW)

    low = sk.corners_of(here, t, MODE)
    top = tl.full([MODE.BLOCK_Q], sk.LOWEST, tl.float32)
    whole = tl.zeros([MODE.BLOCK_Q], tl.float32)
    squares, seen = whole, whole
    mixed = tl.zeros([MODE.BLOCK_Q, VROW.W], tl.float32)
    first, second, spoiled = mixed, mixed, mixed
    for start in range(0, shared.padded, MODE.BLOCK_K):
        at, s, ok = sk.tail_scores(start, mine, low, shared, here, t, MODE, ROW)
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, p = sk.powers(top, higher), sk.powers(s, higher[:, None])
        top = higher
        value = sk.whole_block(shared.v, at, piece, VROW)
        if MODE.CAUSAL:  # a weight of 0 lets no NaN of a later key through
            bad = ~(tl.abs(value.to(tl.float32)) < float("inf"))
            spoiled = rough_product(tl.where(ok, 1.0, 0.0), tl.where(bad, 1.0, 0.0).to(value.dtype), spoiled)
            value = sk.finite(value)
        kept = thinned(p, at, shared, here, t, MODE)
        mixed = sk.product(kept.to(value.dtype), value, mixed * shrink[:, None])
        if MODE.DROPOUT:
            whole, seen = whole * shrink + tl.sum(p, 1), seen + tl.sum(tl.where(ok, 1.0, 0.0), 1)
        else:
            p2, less = (p * p).to(away_row.dtype.element_ty), (shrink * shrink)[:, None]  # rounded alike in all sums
            first = rough_product(p2, sk.whole_block(away_row, at, piece, VROW), first * less)
            second = rough_product(p2, sk.whole_block(squares_row, at, piece, VROW), second * less)
            p_sum, p2_sum, ok_sum = tl.reduce((p, p2.to(tl.float32), tl.where(ok, 1.0, 0.0)), 1, plus)
            whole, squares, seen = whole * shrink + p_sum, squares * shrink * shrink + p2_sum, seen + ok_sum

    size = tl.load(t.heads.sizes + point, mask=valid, other=0) if MODE.TILED else head_size(here, t, MODE.CAUSAL)
    last = query if MODE.CAUSAL else query * 0 + keys - 1
    total = last + 1
    if count is not None:
        total = tl.load(count + here.mask_row * keys + last, mask=valid, other=0).to(tl.int32)
    left = (total - size).to(tl.float32)
    some, add = valid & (seen > 0), tl.zeros([MODE.BLOCK_Q], tl.float32)
    if not STRATIFIED:
        add = tl.log(tl.where(some, left, 1.0) / tl.maximum(seen, 1.0))
    head = tl.load(t.head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
    factor, share, top, norm = sk.joined(top, whole, some, add, head)
    f = piece * VROW.W + tl.arange(0, VROW.W)
    to, inside = point[:, None] * VROW.E + f[None, :], valid[:, None] & (f < VROW.E)[None, :]
    theirs = tl.load(head_out + to, mask=inside, other=0.0).to(tl.float32)
    theirs = tl.where((head == -float("inf"))[:, None], 0.0, theirs)
    answer = tl.where(some[:, None], mixed * factor[:, None], 0.0)
    answer += tl.where((share == 0.0)[:, None], 0.0, share[:, None] * theirs)
    if MODE.CAUSAL:
        answer = tl.where(spoiled > 0, float("nan"), answer)

    known = tl.full([MODE.BLOCK_Q, VROW.W], float("inf"), tl.float32)
    if not MODE.DROPOUT:
        # Values are measured from the mean of a few, so that little cancels in the sums of squares.
        middle_row = t.shared.middle + row * (VROW.W * VROW.PIECES) + f
        middle, unit = tl.load(middle_row), tl.load(middle_row + rows * (VROW.W * VROW.PIECES))
        apart, each = (answer - middle[None, :]) / unit[None, :], factor[:, None] * unit[None, :]
        r_squares = (second - 2 * apart * first + apart * apart * squares[:, None]) * (each * each)
        r_sum = share[:, None] * (answer - theirs)  # all residuals add up to 0, so the tail's are the head's negated
        spread = tl.maximum(r_squares - r_sum * r_sum / tl.maximum(seen, 1.0)[:, None], 0.0)
        rest = (1 - seen / tl.maximum(left, 1.0)) * seen / tl.maximum(seen - 1, 1.0)
        known = tl.where((seen >= 2)[:, None], rest[:, None] * spread, float("inf"))
        known = tl.where((seen == left)[:, None], 0.0, known)

    tl.store(found.out + to, answer.to(found.out.dtype.element_ty), mask=inside)
    tl.store(found.variance + to, known, mask=inside)
    if piece == 0:
        tl.store(found.lse + point, top + norm * sk.LN2, mask=valid)
        tl.store(found.offset + point, add, mask=valid)
