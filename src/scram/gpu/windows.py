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
    flags = (causal, weight, seed is not None and dropout_p > 0)
    return (*tensors, pointer, low, high, *settings), (q.shape, v.shape, flags, kinds(*tensors, pointer))


@lru_cache(maxsize=256)
def _reaches(q_shape: tuple[int, ...], k_shape: tuple[int, ...], radius: tuple[int, ...]) -> tuple[int, ...]:
    key_grid = tuple(k_shape[2:-1])
    reach = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    return (*geometry(tuple(q_shape[2:-1]), key_grid), *reach, *[0] * (4 - len(reach)))


def window_flags(q_shape: tuple[int, ...], v_shape: tuple[int, ...], flags: tuple[bool, str, bool]) -> dict[str, Any]:
    causal, weight, dropout = flags
    rank, width, value_width = len(q_shape) - 3, q_shape[-1], v_shape[-1]
    return {"RANK": rank, "E": width, "F": value_width, "CAUSAL": causal, "WEIGHT": weight, "DROPOUT": dropout}


@triton.jit
def window_size(REACH, RANK: tl.constexpr):
    n = 2 * REACH[0] + 1
    for a in tl.static_range(1, RANK):
        n = n * (2 * REACH[a] + 1)
    return n


@triton.jit
def window_key(match, number, KG, MAGIC, REACH, RANK: tl.constexpr):
    """Key `number`, row-major, of the window around each match, and whether it lies on the grid."""
    rest, key, stride, ok = match, match, 1, match >= 0
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(rest, MAGIC[a]) if a > 0 else rest * 0
        offset = number % (2 * REACH[a] + 1) - REACH[a]
        ok = ok & ((rest - up * KG[a] + offset).to(tl.uint32) < KG[a].to(tl.uint32))
        key += offset * stride
        rest, stride, number = up, stride * KG[a], number // (2 * REACH[a] + 1)
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
    """Key `number` of window e, and whether it counts: on the grid, allowed, and in no window before e."""
    key, ok = window_key(match, number, KG, MAGIC, REACH, RANK)
    ok = ok & valid
    if CAUSAL:
        ok = ok & (key <= query)
    if mask is not None:
        ok = ok & (tl.load(mask + mask_row * keys + key, mask=ok, other=0) != 0)
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
def pair_gradient(
    s, dp, ok, lse, shift, key, noise, threshold, keep, WEIGHT: tl.constexpr, DROPOUT: tl.constexpr
):  # fmt: skip
    """The weight of a value in out, and the gradient of the scaled score less what `shift` takes from it."""
    r = dp * 0 + 1.0
    if DROPOUT:
        r = tl.where(absorb(noise, key) >= threshold.to(tl.uint32), keep, 0.0)
    if WEIGHT == "softmax":
        p = tl.where(ok, tl.exp(s - lse), 0.0)
        ds = p * (r * dp - shift)
        p = p * r
    else:
        share = r / tl.maximum(tl.floor(tl.exp(lse) + 0.5), 1.0)
        p = weigh(s, ok, WEIGHT) * share
        slope = tl.where(s > 0, 1.0, 0.0) if WEIGHT == "relu" else 1.0
        ds = dp * share * slope
    return tl.where(ok, p, 0.0), tl.where(ok, ds, 0.0)


@triton.jit
def add(sums, factor, pieces, PIECES: tl.constexpr):
    """sums + factor * pieces."""
    more = ()
    for n in tl.static_range(PIECES):
        more += (sums[n] + factor[:, None] * pieces[n],)
    return more
