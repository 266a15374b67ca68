"""Pairs of a tile's queries and of keys: products over the whole width, and gradients in the backward pass.

Features wider than one product come in pieces. A program owns one piece of what it sums; the others it only reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ....schedule import TILE_QUERIES
from ..attend.cells import keys_at, rows_at
from ..attend.windows import Variant, kept, pair_gradient, rough_weight
from ..drawn_tail.shared_keys import LOG2E, finite, powers, product, stages
from ..noise import absorb, row_state
from ..primitives import Block, lane_query, points, tile_at, tile_shape
from ..runtime.block_sizes import tile_pieces


class TileMode(NamedTuple):
    """What a kernel over cells is compiled for."""

    CAUSAL: bool
    WEIGHT: str
    DROPOUT: bool
    NARROW: bool  # features and values of 16 bits, and softmax
    BLOCK_K: int  # keys per product
    EVEN: bool  # these are whole cells
    COPIES: int  # of each key among the threads
    PARTS: int  # programs that share the width of a tile's rows
    FP16_SCALE: bool  # slopes are float16, hence scaled


class TileQueries(NamedTuple):
    """The queries of a tile, in a kernel."""

    row: Any
    query: Any  # int32 [BLOCK_Q], flat
    start: Any  # of the row among all queries, int64
    exists: Any
    noise: Any
    q_row: Any  # pointer
    mine: Any  # [BLOCK_Q, W], the program's piece of the features


class TileGrads(NamedTuple):
    """What comes from above to the queries of a tile, in a kernel."""

    row: Any  # pointer
    mine: Any  # [BLOCK_Q, VW], the program's piece of grad_out
    lse: Any


class Listed(NamedTuple):
    """Where the keys of a tile are, in a kernel."""

    first: Any  # pointer to the first keys of its cells
    end: Any  # how many keys they have
    source: Any  # row of keys, int64
    mask_row: Any  # row of the mask, int64


class Keys(NamedTuple):
    """Some keys of a tile, in a kernel."""

    k_row: Any  # pointers to a row of keys and values
    v_row: Any
    at: Any  # int32 [BLOCK_K], their places there
    there: Any  # bool [BLOCK_K]
    name: Any  # int32 [BLOCK_K], for dropout
    ok: Any  # bool [1 or BLOCK_Q, BLOCK_K], who may attend them


def tile_block(rank: int) -> Block:
    return Block(tile_shape(TILE_QUERIES, rank), TILE_QUERIES)


def tile_flags(
    variant: Variant, size: int, half: tuple[int, int, int], exact: tuple[int, int, int], backward: bool = True
) -> dict[str, Any]:
    """Flags of a kernel over cells of `size` keys. `half`, `exact`: its keys per product, warps and stages at most."""
    mode, (dtype, value_dtype) = variant.mode, variant.dtypes
    narrow = dtype.itemsize == value_dtype.itemsize == 2 and mode.WEIGHT == "softmax"
    keys, warps, most = half if narrow else exact
    rows = tile_pieces(*variant.widths, narrow)
    row, value_row = rows["ROW"], rows["VROW"]
    parts = max(row.PIECES, value_row.PIECES) if backward else value_row.PIECES
    copies, scaled = 2 if 32 * warps > keys else 1, backward and narrow and dtype == torch.half
    chosen = (narrow, keys, keys % size == 0, copies, parts, scaled)
    each = row.W * dtype.itemsize + value_row.W * value_dtype.itemsize
    ahead = stages(variant.device, most, keys * each, TILE_QUERIES * each)
    flags = {"MODE": TileMode(mode.CAUSAL, mode.WEIGHT, mode.DROPOUT, *chosen), "B": tile_block(variant.rank), **rows}
    return {**flags, "num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}


@triton.jit
def own_piece(piece, ROW: tl.constexpr):
    """Which piece of rows a program reads as its own: whole rows have the first one only."""
    return piece if ROW.PIECES > 1 else 0


@triton.jit
def tile_queries(tile, piece, w, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr):
    row, corner = tile_at(tile, w.geo, B)
    query, exists = lane_query(corner, w.geo, B)
    start = row * points(w.geo.q).to(tl.int64)
    q_row = w.q + start * ROW.E
    mine = rows_at(q_row, query, exists, own_piece(piece, ROW), ROW, MODE.WEIGHT)
    return TileQueries(row, query, start, exists, absorb(row_state(w.seed, row), query), q_row, mine)


@triton.jit
def tile_grads(here, piece, above, MODE: tl.constexpr, VROW: tl.constexpr):
    row = above.grad_out + here.start * VROW.E
    mine = rows_at(row, here.query, here.exists, own_piece(piece, VROW), VROW, MODE.WEIGHT)
    return TileGrads(row, mine, tl.load(above.lse + here.start + here.query, mask=here.exists, other=float("inf")))


@triton.jit
def listed_keys(tile, row, w, cells):
    end = tl.load(cells.count + tile) * points(cells.sides)
    source, mask_row = (row // w.group).to(tl.int64), (row // w.masked.heads).to(tl.int64)
    return Listed(cells.first + tile.to(tl.int64) * cells.room, end, source, mask_row)


@triton.jit
def keys_from(
    begin, listed, query, w, cells, EXTRA: tl.constexpr, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """BLOCK_K keys of a tile from number `begin` on: of its cells, or EXTRA keys."""
    keys = points(w.geo.k)
    if EXTRA:
        at = begin + tl.arange(0, MODE.BLOCK_K)
        there, before = at < w.extras, listed.source * w.extras
        made = Keys(w.k_extra + before * ROW.E, w.v_extra + before * VROW.E, at, there, keys + at, there[None, :])
    else:
        at, before = keys_at(begin, listed, cells.sides, w, MODE), listed.source * keys
        there = at >= 0
        made = Keys(w.k + before * ROW.E, w.v + before * VROW.E, at, there, at, pairs_of(at, there, query, MODE))
    return made


@triton.jit
def dots(own, row, here, base, keys, piece, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr):
    """Rows of the queries at `row` times rows of the keys at `base` [BLOCK_Q, BLOCK_K]; the program's piece of these.

    `own` is the program's piece of the former.
    """
    total = tl.zeros([B.BLOCK_Q, MODE.BLOCK_K], tl.float32)
    theirs = rows_at(base, keys.at, keys.there, piece, ROW, MODE.WEIGHT)
    if ROW.PIECES == 1:
        total = product(own, tl.trans(theirs), total)
    else:
        for n in range(ROW.PIECES):
            other = rows_at(base, keys.at, keys.there, n, ROW, MODE.WEIGHT)
            total = product(rows_at(row, here.query, here.exists, n, ROW, MODE.WEIGHT), tl.trans(other), total)
    return total, theirs


@triton.jit
def pair_dots(here, up, keys, piece, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """<q, k> and <grad_out, v> of all pairs, and the program's piece of the keys."""
    s, theirs = dots(here.mine, here.q_row, here, keys.k_row, keys, own_piece(piece, ROW), MODE, B, ROW)
    dp, _ = dots(up.mine, up.row, here, keys.v_row, keys, own_piece(piece, VROW), MODE, B, VROW)
    return s, dp, theirs


@triton.jit
def pairs_of(key, there, query, MODE: tl.constexpr):
    """Which keys [BLOCK_K] a query may attend: [1, BLOCK_K], under causal order [BLOCK_Q, BLOCK_K]."""
    ok = there[None, :]
    if MODE.CAUSAL:
        ok = ok & (key[None, :] <= query[:, None])
    return ok


@triton.jit
def in_powers(scale, NARROW: tl.constexpr):
    """What a score is multiplied by: so that it is a power of two for NARROW features, of e for others."""
    return scale * LOG2E if NARROW else scale


@triton.jit
def powers_of(s, top, NARROW: tl.constexpr):
    """exp(s - top) of what `in_powers` made. Of two it is one instruction with the product, which is then not rounded;
    where it is, as in Triton's interpreter, a large score loses digits: hence for NARROW features only."""
    return tl.exp2(s - top) if NARROW else powers(s, top)


@triton.jit
def weights(s, ok, lse, scale, NARROW: tl.constexpr):
    """exp(scale s - lse), up to a factor that all pairs of a query share: lse has been rounded."""
    if NARROW:
        p = tl.where(ok, tl.exp2(s * in_powers(scale, NARROW) - (lse * LOG2E)[:, None]), 0.0)
    else:
        p = rough_weight(s * scale, ok, lse[:, None])
    return p


@triton.jit
def summed(total, delta, slope_bound, s, dp, here, up, keys, w, MODE: tl.constexpr):
    """Some more pairs: the sum of the weights, delta, for float16 the largest part of delta; all but for a factor."""
    p = weights(s, keys.ok, up.lse, w.scale, MODE.NARROW)
    total += tl.sum(p, 1)
    factor = kept(keys.name[None, :], here.noise[:, None], w, MODE.DROPOUT)
    share = tl.where(keys.ok & (factor > 0), p * factor * dp, 0.0)
    delta += tl.sum(share, 1)
    if MODE.FP16_SCALE:
        slope_bound = tl.maximum(slope_bound, tl.max(tl.abs(share), 1))
    return total, delta, slope_bound


@triton.jit
def slopes(s, dp, inv_sum, delta, fp16_scale, here, up, keys, w, MODE: tl.constexpr, GUARD: tl.constexpr):
    """The weight of every value in out, and the gradient of every score times `fp16_scale`.

    GUARD: some pairs of a query are none while others are; then what is not finite of the query must not reach them.
    """
    name, noise = keys.name[None, :], here.noise[:, None]
    if MODE.NARROW:
        p = weights(s, keys.ok, up.lse, w.scale, MODE.NARROW) * inv_sum[:, None]
        if MODE.DROPOUT:
            r = kept(name, noise, w, MODE.DROPOUT)
            ds = p * (tl.where(r == 0, 0.0, r * dp) - delta[:, None])
            p = tl.where(r == 0, 0.0, p * r)  # what is dropped is zero, NaN too
        else:
            ds = p * (dp - delta[:, None])
        if GUARD:
            p, ds = tl.where(keys.ok, p, 0.0), tl.where(keys.ok, ds, 0.0)
    else:
        lse, inv, mean = up.lse[:, None], inv_sum[:, None], delta[:, None]
        p, ds = pair_gradient(s * w.scale, dp, keys.ok, lse, inv, mean, name, noise, w, MODE.WEIGHT, MODE.DROPOUT)
    return p, ds * (w.scale * fp16_scale)


@triton.jit
def fine_product(a, b, total, NARROW: tl.constexpr):
    """total + a @ b, where a is float32 and b may not be; of NARROW features a keeps twice the digits of b."""
    rounded = a.to(b.dtype)
    if NARROW:
        total = product((a - rounded.to(tl.float32)).to(b.dtype), b, total)
    return product(rounded, b, total)


@triton.jit
def fp16_scale_of(slope_bound, scale, FP16_SCALE: tl.constexpr):
    """A power of two that lifts slopes of at most `slope_bound` off the smallest numbers of float16, of few digits.

    The largest becomes 2^12 to 2^13; 2^16 would be too large.
    """
    factor = 1.0
    if FP16_SCALE:
        most = tl.max(tl.where(slope_bound < float("inf"), slope_bound, 0.0), 0) * tl.abs(scale)
        factor = tl.exp2(12.0 - tl.floor(tl.log2(tl.minimum(tl.maximum(most, 2.0**-100), 2.0**100))))
    return factor


@triton.jit
def key_grads(p, ds, fp16_scale, ok, here, up, k_sum, v_sum, MODE: tl.constexpr, GUARD: tl.constexpr):
    """k_sum + ds^T q / fp16_scale, v_sum + p^T grad_out."""
    mine, grad_out = here.mine, up.mine
    if GUARD:
        bad = tl.max(tl.where(tl.abs(grad_out.to(tl.float32)) < float("inf"), 0, 1), 1) > 0  # rows that are not finite
        p = tl.where(ok & bad[:, None], float("nan"), p)
        mine, grad_out = finite(mine), finite(grad_out)
    if MODE.FP16_SCALE:
        k_sum += fine_product(tl.trans(ds), mine, k_sum * 0.0, MODE.NARROW) / fp16_scale
    else:
        k_sum = fine_product(tl.trans(ds), mine, k_sum, MODE.NARROW)
    return k_sum, fine_product(tl.trans(p), grad_out, v_sum, False)


@triton.jit
def put_piece(base, at, there, piece, x, PARTS: tl.constexpr, ADD: tl.constexpr, ROW: tl.constexpr):
    """A piece of the rows base[at], plus x by atomics, or x where the rows are the program's own.

    PARTS programs share the wider of features and values; of the narrower some have no piece.
    """
    e, here = piece * ROW.W + tl.arange(0, ROW.W)[None, :], there[:, None]
    if ROW.E != ROW.W or PARTS > 1:
        here = here & (e < ROW.E)
    to = base + at.to(tl.int64)[:, None] * ROW.E + e
    if ADD:
        tl.atomic_add(to, x, mask=here, sem="relaxed")
    else:
        tl.store(to, x.to(base.dtype.element_ty), mask=here)
