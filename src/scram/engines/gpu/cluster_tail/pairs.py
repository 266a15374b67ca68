"""What the gradients of the clustered tail share: totals of each query, and pairs of queries and clusters or keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..primitives import dropout_factor, fine_product, fp16_scale_of, product


class Upstream(NamedTuple):
    """What the backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]


class Totals(NamedTuple):
    """What the gradients of all scores of a query need, float32 [tiles, TILE_QUERIES]: those of a tile lie together.

    A weight is factor * `power` over base. The normalizer is computed again: from lse, rounded, the weights would not
    add up to 1 where scores are large. A place without a query has zeros.
    """

    delta: Tensor
    base: Tensor
    factor: Tensor
    spread: Tensor  # `query_spreads`
    first: Tensor  # <grad_out, first-order term>
    tail: Tensor  # [B, H, *G], what q^T grad_out is multiplied by in the gradient of the slope


class TileTotals(NamedTuple):
    """Totals of the queries of a tile, in a kernel."""

    base: Any  # [1, BQ]
    factor: Any  # [1, BQ]
    delta: Any  # [1, BQ]
    places: Any  # [BQ], int64


@triton.jit
def tile_places(tile, B: tl.constexpr):
    """Where the totals of the queries of a tile are: [BQ]."""
    return tl.cast(tile, tl.int64) * B.BLOCK_Q + tl.arange(0, B.BLOCK_Q)


@triton.jit
def load_totals(tile, totals, B: tl.constexpr):
    places = tile_places(tile, B)  # [BQ]
    base = tl.load(totals.base + places)[None, :]  # [1, BQ]
    factor = tl.load(totals.factor + places)[None, :]  # [1, BQ]
    return TileTotals(base, factor, tl.load(totals.delta + places)[None, :], places)


@triton.jit
def score_product(ds, block, acc, CONFIG: tl.constexpr):
    """acc + ds @ block, to more digits than 16 bits have; the smallest numbers of float16 have few, so it is lifted
    off them."""
    if CONFIG.FP16:
        lift = fp16_scale_of(tl.max(tl.abs(ds), 1), 1.0, CONFIG.FP16)
        acc += fine_product(ds * lift, block, acc * 0.0, CONFIG.NARROW) / lift
    else:
        acc = fine_product(ds, block, acc, CONFIG.NARROW)
    return acc


@triton.jit
def after_dropout(dp, name, noise, dropout, DROPOUT: tl.constexpr):
    """r dp and r, where dropout multiplies weights by r; what is dropped is zero, NaN too."""
    r = 1.0
    if DROPOUT:
        r = dropout_factor(name, noise, dropout, DROPOUT)
        dp = tl.where(r == 0, 0.0, r * dp)
    return dp, r


@triton.jit
def row_products(x, y, CONFIG: tl.constexpr, B: tl.constexpr):
    """Vectors of clusters or keys times those of queries, both in pieces: [BC, BQ]."""
    s = tl.zeros([CONFIG.BLOCK_C, B.BLOCK_Q], tl.float32)  # [BC, BQ]
    for n in tl.static_range(len(x)):
        s = product(x[n], tl.trans(y[n]), s)
    return s


@triton.jit
def add_pairs(dk_acc, dv_acc, p, dp, delta, name, queries, q_block, grad_out, inputs, CONFIG: tl.constexpr):
    """The gradients of clusters or keys, and what the queries of a tile add by weights p [BC, BQ]."""
    dp, r = after_dropout(dp, name, queries.noise[None, :], inputs.dropout, CONFIG.DROPOUT)
    ds = tl.where(p == 0, 0.0, p * (dp - delta) * inputs.scale)  # [BC, BQ]
    if CONFIG.DROPOUT:
        p = tl.where(r == 0, 0.0, p * r)  # what is dropped is zero, NaN too
    dk_more = ()
    for n in tl.static_range(len(dk_acc)):
        dk_more += (score_product(ds, q_block[n], dk_acc[n], CONFIG),)
    dv_more = ()
    for n in tl.static_range(len(dv_acc)):
        # Weights are not negative, so their rounding cancels nothing; the smallest numbers of float16 have few digits.
        dv_more += (fine_product(p, grad_out[n], dv_acc[n], CONFIG.FP16),)
    return dk_more, dv_more
