"""What the kernels over windows share: their arguments, the keys of a window, the weights and their gradients."""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .grid import GEOMETRY, divide, geometry, near
from .launch import kinds
from .noise import absorb, below_argument, seed_arguments

Flags = tuple[bool, str, bool, bool]  # causal, weight, dropout, several matches
SETTINGS = ("low", "high", "mask_heads", "group", "kappa", "extras", "threshold", *GEOMETRY, "b0", "b1", "b2", "b3")


def window_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    k_extra: Tensor | None,
    v_extra: Tensor | None,
    seed: Tensor | None,
    radius: tuple[int, ...],
    causal: bool,
    scale: float,
    weight: str,
    dropout_p: float,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the kernels over windows, forward and backward, begin with, and what their variant follows from."""
    tensors = [None if x is None else x.contiguous() for x in (q, k, v, index, key_mask, k_extra, v_extra)]
    pointer, low, high = seed_arguments(seed)
    settings = (
        q.shape[1] if key_mask is not None and key_mask.ndim == k.ndim - 2 else 1,
        q.shape[1] // k.shape[1],
        index.shape[-1],
        0 if k_extra is None else k_extra.shape[2],
        below_argument(dropout_p),
        *_reaches(q.shape, k.shape, radius),
        scale,
        1 / (1 - dropout_p),
    )
    flags = (causal, weight, seed is not None and dropout_p > 0, index.shape[-1] > 1)
    return (*tensors, pointer, low, high, *settings), (q.shape, v.shape, flags, kinds(*tensors, pointer))


@lru_cache(maxsize=256)
def _reaches(q_shape: tuple[int, ...], k_shape: tuple[int, ...], radius: tuple[int, ...]) -> tuple[int, ...]:
    key_grid = tuple(k_shape[2:-1])
    reach = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    return (*geometry(tuple(q_shape[2:-1]), key_grid), *reach, *[0] * (4 - len(reach)))


def window_flags(q_shape: tuple[int, ...], v_shape: tuple[int, ...], flags: Flags) -> dict[str, Any]:
    causal, weight, dropout, several = flags
    shape = {"RANK": len(q_shape) - 3, "E": q_shape[-1], "F": v_shape[-1]}
    return {**shape, "CAUSAL": causal, "WEIGHT": weight, "DROPOUT": dropout, "SEVERAL": several}


@triton.jit
def window_size(REACH, RANK: tl.constexpr):
    n = 2 * REACH[0] + 1
    for a in tl.static_range(1, RANK):
        n = n * (2 * REACH[a] + 1)
    return n


@triton.jit
def first_offset(REACH, RANK: tl.constexpr):
    """Where a walk through a window begins, as an offset from its centre on every axis."""
    offset = ()
    for a in tl.static_range(RANK):
        offset += (-REACH[a],)
    return offset


@triton.jit
def next_offset(offset, REACH, RANK: tl.constexpr):
    """The next place of a walk, row-major: counting up takes a fifth of the instructions of dividing a number."""
    moved, carry = (), 1
    for a in tl.static_range(RANK - 1, -1, -1):
        here = offset[a] + carry
        carry = (here > REACH[a]).to(tl.int32)
        moved = (tl.where(carry > 0, -REACH[a], here),) + moved  # noqa: RUF005 - Triton knows no unpacking
    return moved


@triton.jit
def offset_of(number, REACH, RANK: tl.constexpr):
    """The place `number`, row-major."""
    offset = ()
    for a in tl.static_range(RANK - 1, -1, -1):
        offset = (number % (2 * REACH[a] + 1) - REACH[a],) + offset  # noqa: RUF005 - Triton knows no unpacking
        number = number // (2 * REACH[a] + 1)
    return offset


@triton.jit
def window_key(match, offset, KG, MAGIC, RANK: tl.constexpr):
    """The key at an offset from each match, and whether it lies on the grid."""
    rest, key, stride, ok = match, match, 1, match >= 0
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(rest, MAGIC[a]) if a > 0 else rest * 0
        ok = ok & ((rest - up * KG[a] + offset[a]).to(tl.uint32) < KG[a].to(tl.uint32))
        key += offset[a] * stride
        rest, stride = up, stride * KG[a]
    return key, ok


@triton.jit
def match_of(index_row, query, e, valid, kappa, keys):
    """Match e of each query, -1 for none; what is off the grid is none."""
    match = tl.load(index_row + query.to(tl.int64) * kappa + e, mask=valid, other=-1)
    return tl.where(match < keys, match, -1)


@triton.jit
def legal_key(
    match, e, number, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH,
    RANK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Key `number` of window e, and whether it counts."""
    offset = offset_of(number, REACH, RANK)
    return legal_at(
        match, e, offset, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH, RANK, CAUSAL, True
    )


@triton.jit
def legal_at(
    match, e, offset, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """The key at `offset` in window e, and whether it counts: on the grid, allowed, and in no window before e."""
    key, ok = window_key(match, offset, KG, MAGIC, RANK)
    ok = ok & valid
    if CAUSAL:
        ok = ok & (key <= query)
    if mask is not None:
        ok = ok & (tl.load(mask + mask_row * keys + key, mask=ok, other=0) != 0)
    if SEVERAL:
        for before in range(e):
            earlier = match_of(index_row, query, before, ok, kappa, keys)
            ok = ok & ~((earlier >= 0) & near(key, tl.maximum(earlier, 0), REACH, KG, MAGIC, RANK))
    return key, ok


@triton.jit
def weigh(s, ok, WEIGHT: tl.constexpr):
    """The weight before normalisation of scores under "mean" and "relu"."""
    f = tl.where(s < 0, 0.0, s) if WEIGHT == "relu" else s
    return tl.where(ok, f, 0.0)


@triton.jit
def rough_weight(s, ok, lse):
    """exp(s - lse), where lse has been rounded: all weights of a query are off by one and the same factor."""
    above = s - lse
    return tl.where(ok, tl.exp(tl.where(above > 60.0, 60.0, above)), 0.0)  # finite; a NaN stays


@triton.jit
def kept(key, noise, threshold, keep, DROPOUT: tl.constexpr):
    """What dropout makes of a weight: a factor."""
    factor = (key * 0 + 1).to(tl.float32)
    if DROPOUT:
        factor = tl.where(absorb(noise, key) >= threshold.to(tl.uint32), keep, 0.0)
    return factor


@triton.jit
def pair_gradient(
    s, dp, ok, lse, over, shift, key, noise, threshold, keep, WEIGHT: tl.constexpr, DROPOUT: tl.constexpr
):  # fmt: skip
    """The weight of a value in out, and the gradient of the scaled score less what `shift` takes from it.

    `over` is one over the sum of the query's rough weights: were it taken for 1, no gradient would cancel where
    scores are large.
    """
    r = kept(key, noise, threshold, keep, DROPOUT)
    if WEIGHT == "softmax":
        p = rough_weight(s, ok, lse) * over
        ds = p * (tl.where(r == 0, 0.0, r * dp) - shift)
    else:
        share = 1 / tl.maximum(tl.floor(tl.exp(lse) + 0.5), 1.0)
        p = weigh(s, ok, WEIGHT) * share
        flat = (r == 0) | (s <= 0) if WEIGHT == "relu" else r == 0
        ds = tl.where(flat, 0.0, r * dp * share)
    p = tl.where(r == 0, 0.0, p * r)  # what is dropped is zero, NaN too
    return tl.where(ok, p, 0.0), tl.where(ok, ds, 0.0)


@triton.jit
def add(sums, factor, pieces, PIECES: tl.constexpr):
    """sums + factor * pieces."""
    more = ()
    for n in tl.static_range(PIECES):
        more += (sums[n] + factor[:, None] * pieces[n],)
    return more
