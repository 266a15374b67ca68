"""Pairs of a tile's queries and of keys: products over the whole width, and gradients in the backward pass.

Features wider than one product come in pieces. A program owns one piece of what it sums; the others it only reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ....schedule import TILE_QUERIES
from ..primitives import (
    LOG2E,
    dropout_factor,
    dropout_noise,
    fine_product,
    finite,
    for_product,
    is_finite,
    lane_query,
    load_piece,
    own_piece,
    points,
    product,
    tile_at,
    tile_block,
)
from ..runtime.block_sizes import stages, tile_pieces
from .cells import keys_at
from .windows import Variant, pair_gradient, rough_weight


class TileConfig(NamedTuple):
    """What a kernel over cells is compiled for."""

    CAUSAL: bool
    WEIGHT: str
    DROPOUT: bool
    NARROW: bool  # features and values of 16 bits, and softmax
    BLOCK_K: int  # keys per product
    EVEN: bool  # these are whole cells
    COPIES: int  # of each key among the threads
    PARTS: int  # programs that share the width of a tile's vectors
    FP16_SCALE: bool  # slopes are float16, hence scaled


class TileQueries(NamedTuple):
    """The queries of a tile, in a kernel."""

    row: Any
    query: Any  # int32 [BQ], flat
    start: Any  # of the row among all queries, int64
    exists: Any  # bool [BQ]
    noise: Any  # [BQ]
    q_row: Any  # pointer
    q_block: Any  # [BQ, E], the program's piece of the features


class TileGrads(NamedTuple):
    """What comes from above to the queries of a tile, in a kernel."""

    grad_row: Any  # pointer
    grad_out: Any  # [BQ, F], the program's piece
    lse: Any  # [BQ]


class TileKeys(NamedTuple):
    """Some keys of a tile, in a kernel."""

    k_row: Any  # pointers to a row of keys and values
    v_row: Any
    at: Any  # int32 [BK], their places in the row
    exists: Any  # bool [BK]
    name: Any  # int32 [BK], for dropout
    ok: Any  # bool [1 or BQ, BK], whether a query may attend them


def tile_flags(
    variant: Variant, size: int, half: tuple[int, int, int], exact: tuple[int, int, int], backward: bool = True
) -> dict[str, Any]:
    """Flags of a kernel over cells of `size` keys. `half`, `exact`: its keys per product, warps and stages at most."""
    dtype, value_dtype = variant.dtypes
    config = variant.config
    narrow = dtype.itemsize == value_dtype.itemsize == 2 and config.WEIGHT == "softmax"
    keys, warps, most = half if narrow else exact
    widths = tile_pieces(*variant.widths, narrow)
    features = widths["E"]
    values = widths["F"]
    tile_config = TileConfig(
        CAUSAL=config.CAUSAL,
        WEIGHT=config.WEIGHT,
        DROPOUT=config.DROPOUT,
        NARROW=narrow,
        BLOCK_K=keys,
        EVEN=keys % size == 0,
        COPIES=2 if 32 * warps > keys else 1,
        PARTS=max(features.PIECES, values.PIECES) if backward else values.PIECES,
        FP16_SCALE=backward and narrow and dtype == torch.half,
    )
    each = features.BLOCK * dtype.itemsize + values.BLOCK * value_dtype.itemsize
    ahead = stages(variant.device, most, keys * each, TILE_QUERIES * each)
    flags = {"CONFIG": tile_config, "B": tile_block(variant.rank), **widths}
    return {**flags, "num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}


@triton.jit
def load_operand(base, at, exists, piece, E: tl.constexpr, WEIGHT: tl.constexpr):
    """`load_piece`, as float32 where weights are scores themselves, which 16 bits may not hold."""
    x = load_piece(base, at, exists, piece, E)  # [BQ or BK, E]
    return x.to(tl.float32) if WEIGHT != "softmax" else for_product(x)


@triton.jit
def tile_queries(tile, piece, inputs, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    geo = inputs.windows.geo
    row, corner = tile_at(tile, geo, B)
    query, exists = lane_query(corner, geo, B)
    start = row * points(geo.q).to(tl.int64)
    q_row = inputs.q + start * E.SIZE
    q_block = load_operand(q_row, query, exists, own_piece(piece, E), E, CONFIG.WEIGHT)  # [BQ, E]
    return TileQueries(row, query, start, exists, dropout_noise(inputs.dropout, row, query), q_row, q_block)


@triton.jit
def tile_grads(queries, piece, above, CONFIG: tl.constexpr, F: tl.constexpr):
    grad_row = above.grad_out + queries.start * F.SIZE
    grad_out = load_operand(grad_row, queries.query, queries.exists, own_piece(piece, F), F, CONFIG.WEIGHT)  # [BQ, F]
    lse = tl.load(above.lse + queries.start + queries.query, mask=queries.exists, other=float("inf"))  # [BQ]
    return TileGrads(grad_row, grad_out, lse)


@triton.jit
def keys_from(
    begin,
    listed,
    key_row,
    query,
    inputs,
    cells,
    EXTRA: tl.constexpr,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """BLOCK_K keys of a tile from number `begin` on: of its cells, or EXTRA keys."""
    windows = inputs.windows
    keys = points(windows.geo.k)
    if EXTRA:
        at = begin + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
        exists = at < inputs.extras
        first = key_row * inputs.extras
        k_row = inputs.k_extra + first * E.SIZE
        v_row = inputs.v_extra + first * F.SIZE
        block = TileKeys(k_row, v_row, at, exists, keys + at, exists[None, :])
    else:
        at = keys_at(
            begin, listed, cells.sides, windows.masked, windows.geo, CONFIG.BLOCK_K, CONFIG.EVEN, CONFIG.COPIES
        )
        first = key_row * keys
        exists = at >= 0  # [BK]
        k_row = inputs.k + first * E.SIZE
        v_row = inputs.v + first * F.SIZE
        block = TileKeys(k_row, v_row, at, exists, at, allowed_pairs(at, exists, query, CONFIG.CAUSAL))
    return block


@triton.jit
def allowed_pairs(key, exists, query, CAUSAL: tl.constexpr):
    """Which keys [BK] a query may attend: [1, BK], under causal order [BQ, BK]."""
    ok = exists[None, :]
    if CAUSAL:
        ok = ok & (key[None, :] <= query[:, None])
    return ok


@triton.jit
def dots(own, q_row, queries, k_row, keys, piece, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """Vectors of the queries at `q_row` times those of the keys at `k_row`, [BQ, BK], and a piece of the latter.

    `own` is the program's piece of the former.
    """
    acc = tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_K], tl.float32)  # [BQ, BK]
    k_block = load_operand(k_row, keys.at, keys.exists, piece, E, CONFIG.WEIGHT)  # [BK, E]
    if E.PIECES == 1:
        acc = product(own, tl.trans(k_block), acc)
    else:
        for n in range(E.PIECES):
            k_piece = load_operand(k_row, keys.at, keys.exists, n, E, CONFIG.WEIGHT)  # [BK, E]
            q_piece = load_operand(q_row, queries.query, queries.exists, n, E, CONFIG.WEIGHT)  # [BQ, E]
            acc = product(q_piece, tl.trans(k_piece), acc)
    return acc, k_block


@triton.jit
def pair_dots(queries, up, keys, piece, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """<q, k> and <grad_out, v> of all pairs, and the program's piece of the keys."""
    s, k_block = dots(queries.q_block, queries.q_row, queries, keys.k_row, keys, own_piece(piece, E), CONFIG, B, E)
    dp, _ = dots(up.grad_out, up.grad_row, queries, keys.v_row, keys, own_piece(piece, F), CONFIG, B, F)
    return s, dp, k_block


@triton.jit
def power_scale(scale, NARROW: tl.constexpr):
    """What a score is multiplied by: so that it is a power of two for NARROW features, of e for others."""
    return scale * LOG2E if NARROW else scale


@triton.jit
def weights(s, ok, lse, scale, NARROW: tl.constexpr):
    """exp(scale s - lse) [BQ, BK], up to a factor that all pairs of a query share: lse has been rounded."""
    if NARROW:
        p = tl.where(ok, tl.exp2(s * power_scale(scale, NARROW) - (lse * LOG2E)[:, None]), 0.0)
    else:
        p = rough_weight(s * scale, ok, lse[:, None])
    return p


@triton.jit
def add_pairs(p_sum, delta, slope_bound, s, dp, queries, up, keys, inputs, CONFIG: tl.constexpr):
    """Some more pairs: the sum of the weights, delta, for float16 the largest part of delta; all but for a factor."""
    p = weights(s, keys.ok, up.lse, inputs.scale, CONFIG.NARROW)  # [BQ, BK]
    p_sum += tl.sum(p, 1)
    r = dropout_factor(
        keys.name[None, :], queries.noise[:, None], inputs.dropout, CONFIG.DROPOUT
    )  # [BQ, BK] or [1, BK]
    share = tl.where(keys.ok & (r > 0), p * r * dp, 0.0)  # [BQ, BK]
    delta += tl.sum(share, 1)
    if CONFIG.FP16_SCALE:
        slope_bound = tl.maximum(slope_bound, tl.max(tl.abs(share), 1))
    return p_sum, delta, slope_bound


@triton.jit
def slopes(s, dp, inv_sum, delta, fp16_scale, queries, up, keys, inputs, CONFIG: tl.constexpr, GUARD: tl.constexpr):
    """The weight of every value in out, and the gradient of every score times `fp16_scale`: [BQ, BK].

    GUARD: some pairs of a query are none while others are; then what is not finite of the query must not reach them.
    """
    name = keys.name[None, :]
    noise = queries.noise[:, None]
    if CONFIG.NARROW:
        p = weights(s, keys.ok, up.lse, inputs.scale, CONFIG.NARROW) * inv_sum[:, None]
        if CONFIG.DROPOUT:
            r = dropout_factor(name, noise, inputs.dropout, CONFIG.DROPOUT)
            ds = p * (tl.where(r == 0, 0.0, r * dp) - delta[:, None])
            p = tl.where(r == 0, 0.0, p * r)  # what is dropped is zero, NaN too
        else:
            ds = p * (dp - delta[:, None])
        if GUARD:
            p = tl.where(keys.ok, p, 0.0)
            ds = tl.where(keys.ok, ds, 0.0)
    else:
        p, ds = pair_gradient(
            s * inputs.scale,
            dp,
            keys.ok,
            up.lse[:, None],
            inv_sum[:, None],
            delta[:, None],
            name,
            noise,
            inputs.dropout,
            CONFIG.WEIGHT,
            CONFIG.DROPOUT,
        )
    return p, ds * (inputs.scale * fp16_scale)


@triton.jit
def key_grads(p, ds, fp16_scale, ok, queries, up, dk, dv, CONFIG: tl.constexpr, GUARD: tl.constexpr):
    """dk [BK, E] + ds^T q / fp16_scale, dv [BK, F] + p^T grad_out."""
    q_block = queries.q_block  # [BQ, E]
    grad_out = up.grad_out  # [BQ, F]
    if GUARD:
        bad = tl.max(tl.where(is_finite(grad_out), 0, 1), 1) > 0  # [BQ], some of grad_out is not finite
        p = tl.where(ok & bad[:, None], float("nan"), p)
        q_block = finite(q_block)
        grad_out = finite(grad_out)
    if CONFIG.FP16_SCALE:
        dk += fine_product(tl.trans(ds), q_block, dk * 0.0, CONFIG.NARROW) / fp16_scale
    else:
        dk = fine_product(tl.trans(ds), q_block, dk, CONFIG.NARROW)
    return dk, fine_product(tl.trans(p), grad_out, dv, False)
