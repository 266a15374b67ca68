"""Pairs of a tile's queries and of keys in the backward pass: scores, and what keys are owed."""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from .cells import rows_at
from .shared import finite, product


@triton.jit
def nothing(ROWS: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr):
    """PIECES sums [ROWS, W] of nothing."""
    sums = ()
    for _ in tl.static_range(PIECES):
        sums += (tl.zeros([ROWS, W], tl.float32),)
    return sums


@triton.jit
def pairs(
    mine, wish, k_row, v_row, at, there, scale, E: tl.constexpr, F: tl.constexpr, WEIGHT: tl.constexpr,
    LANES: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr,
    FPIECES: tl.constexpr,
):  # fmt: skip
    """Scaled scores and <grad_out, v> of every pair [LANES, BN], and the features of the keys."""
    theirs, s, dp = (), tl.zeros([LANES, BN], tl.float32), tl.zeros([LANES, BN], tl.float32)
    for n in tl.static_range(PIECES):
        theirs += (rows_at(k_row, at, there, n, E, W, WEIGHT),)
        s = product(mine[n], tl.trans(theirs[n]), s)
    for n in tl.static_range(FPIECES):
        dp = product(wish[n], tl.trans(rows_at(v_row, at, there, n, F, FW, WEIGHT)), dp)
    return s * scale, dp, theirs


@triton.jit
def spoils(wish, FPIECES: tl.constexpr):
    """Whose gradient is not finite."""
    bad = None
    for n in tl.static_range(FPIECES):
        here = tl.max(tl.where(tl.abs(wish[n].to(tl.float32)) < float("inf"), 0, 1), 1) > 0
        bad = here if bad is None else bad | here
    return bad


@triton.jit
def owed(
    p, ds, ok, bad, mine, wish, k_sums, v_sums, CAUSAL: tl.constexpr, PIECES: tl.constexpr, FPIECES: tl.constexpr
):  # fmt: skip
    """k_sums + ds^T q, v_sums + p^T grad_out. Under causal order a pair that is none must not spoil the others'."""
    if CAUSAL:
        p = tl.where(ok & bad[:, None], float("nan"), p)
    ds, p = tl.trans(ds), tl.trans(p)
    k_more, v_more = (), ()
    for n in tl.static_range(PIECES):
        x = finite(mine[n]) if CAUSAL else mine[n]
        k_more += (product(ds.to(x.dtype), x, k_sums[n]),)
    for n in tl.static_range(FPIECES):
        x = finite(wish[n]) if CAUSAL else wish[n]
        v_more += (product(p.to(x.dtype), x, v_sums[n]),)
    return k_more, v_more


@triton.jit
def put_owed(
    base, at, there, pieces, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """base[at] += pieces by atomics, or base[at] = pieces where the rows are the program's own."""
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)[None, :]
        to, here = base + at.to(tl.int64)[:, None] * E + e, there[:, None]
        if E % W != 0:
            here = here & (e < E)
        if ADD:
            tl.atomic_add(to, pieces[n], mask=here, sem="relaxed")
        else:
            tl.store(to, pieces[n], mask=here)
