"""Pairs of a tile's queries and of keys: products over the whole width, and what keys are owed in the backward pass.

Features wider than one product come in pieces. A program owns one piece of what it sums; the others it only reads.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from .cells import rows_at
from .shared_keys import LOG2E, finite, powers, product
from .windows import kept, pair_gradient, rough_weight


@triton.jit
def own_pieces(piece, PIECES: tl.constexpr, FPIECES: tl.constexpr):
    """Which pieces of features and of values a program reads as its own: whole rows have the first one only."""
    return piece if PIECES > 1 else 0, piece if FPIECES > 1 else 0


@triton.jit
def dots(
    own, row, query, valid, base, at, there, piece, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
    WEIGHT: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Rows `query` at `row` times rows `at` of `base` [LANES, BN], and of the latter the program's own piece.

    `own` is that piece of the former.
    """
    total, theirs = tl.zeros([LANES, BN], tl.float32), rows_at(base, at, there, piece, E, W, WEIGHT)
    if PIECES == 1:
        total = product(own, tl.trans(theirs), total)
    else:
        for n in range(PIECES):
            other = rows_at(base, at, there, n, E, W, WEIGHT)
            total = product(rows_at(row, query, valid, n, E, W, WEIGHT), tl.trans(other), total)
    return total, theirs


@triton.jit
def pairs_of(key, there, query, CAUSAL: tl.constexpr):
    """Which keys [BN] a query may attend: [1, BN], under causal order [LANES, BN]."""
    ok = there[None, :]
    if CAUSAL:
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
def weights(s, ok, norm, scale, NARROW: tl.constexpr):
    """exp(scale s - norm), up to a factor that all pairs of a query share: norm has been rounded."""
    if NARROW:
        p = tl.where(ok, tl.exp2(s * in_powers(scale, NARROW) - (norm * LOG2E)[:, None]), 0.0)
    else:
        p = rough_weight(s * scale, ok, norm[:, None])
    return p


@triton.jit
def summed(
    p, dp, ok, name, noise, threshold, keep, total, shift, steep, DROPOUT: tl.constexpr, LIFT: tl.constexpr
):  # fmt: skip
    """Some more pairs: the sum of the weights, delta, and with LIFT the largest part of delta; all but for a factor."""
    total += tl.sum(p, 1)
    factor = kept(name[None, :], noise[:, None], threshold, keep, DROPOUT)
    share = tl.where(ok & (factor > 0), p * factor * dp, 0.0)
    shift += tl.sum(share, 1)
    if LIFT:
        steep = tl.maximum(steep, tl.max(tl.abs(share), 1))
    return total, shift, steep


@triton.jit
def slopes(
    s, dp, ok, norm, over, shift, name, noise, threshold, keep, scale, unit,
    WEIGHT: tl.constexpr, DROPOUT: tl.constexpr, NARROW: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """The weight of every value in out, and the gradient of every score times `unit`.

    GUARD: some pairs of a query are none while others are; then what is not finite of the query must not reach them.
    """
    if NARROW:
        p = weights(s, ok, norm, scale, NARROW) * over[:, None]
        if DROPOUT:
            r = kept(name[None, :], noise[:, None], threshold, keep, DROPOUT)
            ds = p * (tl.where(r == 0, 0.0, r * dp) - shift[:, None])
            p = tl.where(r == 0, 0.0, p * r)  # what is dropped is zero, NaN too
        else:
            ds = p * (dp - shift[:, None])
        if GUARD:
            p, ds = tl.where(ok, p, 0.0), tl.where(ok, ds, 0.0)
    else:
        p, ds = pair_gradient(
            s * scale, dp, ok, norm[:, None], over[:, None], shift[:, None], name[None, :], noise[:, None],
            threshold, keep, WEIGHT, DROPOUT,
        )  # fmt: skip
    return p, ds * (scale * unit)


@triton.jit
def fine_product(a, b, total, NARROW: tl.constexpr):
    """total + a @ b, where a is float32 and b may not be; of NARROW features a keeps twice the digits of b."""
    rounded = a.to(b.dtype)
    if NARROW:
        total = product((a - rounded.to(tl.float32)).to(b.dtype), b, total)
    return product(rounded, b, total)


@triton.jit
def unit_of(steep, scale, LIFT: tl.constexpr):
    """A power of two that lifts slopes of at most `steep` off the smallest numbers of float16, which have few digits.

    The largest becomes 2^12 to 2^13; 2^16 would be too large.
    """
    unit = 1.0
    if LIFT:
        most = tl.max(tl.where(steep < float("inf"), steep, 0.0), 0) * tl.abs(scale)
        unit = tl.exp2(12.0 - tl.floor(tl.log2(tl.minimum(tl.maximum(most, 2.0**-100), 2.0**100))))
    return unit


@triton.jit
def spoils(wish):
    """Whose gradient is not finite."""
    return tl.max(tl.where(tl.abs(wish.to(tl.float32)) < float("inf"), 0, 1), 1) > 0


@triton.jit
def owed(
    p, ds, unit, ok, mine, wish, k_sum, v_sum, NARROW: tl.constexpr, LIFT: tl.constexpr, GUARD: tl.constexpr
):  # fmt: skip
    """k_sum + ds^T q / unit, v_sum + p^T grad_out."""
    if GUARD:
        p = tl.where(ok & spoils(wish)[:, None], float("nan"), p)
        mine, wish = finite(mine), finite(wish)
    if LIFT:
        k_sum += fine_product(tl.trans(ds), mine, k_sum * 0.0, NARROW) / unit
    else:
        k_sum = fine_product(tl.trans(ds), mine, k_sum, NARROW)
    return k_sum, fine_product(tl.trans(p), wish, v_sum, False)


@triton.jit
def put_owed(base, at, there, piece, x, E: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr):
    """A piece of the rows base[at], plus x by atomics, or x where the rows are the program's own.

    PARTS programs share the wider of features and values; of the narrower some have no piece.
    """
    e, here = piece * W + tl.arange(0, W)[None, :], there[:, None]
    if E != W or PARTS > 1:
        here = here & (e < E)
    to = base + at.to(tl.int64)[:, None] * E + e
    if ADD:
        tl.atomic_add(to, x, mask=here, sem="relaxed")
    else:
        tl.store(to, x.to(base.dtype.element_ty), mask=here)
