"""Algorithm 2 in Triton: the windows around a query's matches, their weights and the mix of their values in one pass.

A lane walks its windows key by key; lanes of a tile are neighbours, whose windows overlap and share cache lines.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_sizes import attend_tile
from .grid import dot, features, lane_query, points, put, tile_at, tiles
from .launch import Kernel, on_device
from .noise import absorb, row_state
from .windows import (
    SETTINGS,
    Flags,
    first_offset,
    legal_at,
    match_of,
    next_offset,
    weigh,
    window_arguments,
    window_flags,
    window_size,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    k_extra: Tensor | None,
    v_extra: Tensor | None,
    seed: Tensor | None,
    *,
    radius: tuple[int, ...],
    causal: bool,
    scale: float,
    weight: str,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """q [B, H, *G, E], k [B, Hk, *G', E], v [B, Hk, *G', F], index [B, H, *G, kappa] -> out [B, H, *G, F], lse."""
    out = v.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    arguments, variant = window_arguments(
        q, k, v, index, key_mask, k_extra, v_extra, seed, radius, causal, scale, weight, dropout_p
    )
    with on_device(q):
        _kernel(*variant)(*arguments, out, lse)
    return out, lse


@lru_cache(maxsize=256)
def _kernel(q_shape: tuple[int, ...], v_shape: tuple[int, ...], flags: Flags, given: tuple[Any, ...]) -> Kernel:
    block = attend_tile(len(q_shape) - 3, q_shape[-1], v_shape[-1], given[0][1], given[2][1])
    programs = q_shape[0] * q_shape[1] * tiles(q_shape[2:-1], block["TILE"])
    return Kernel(attend_kernel, programs, {**window_flags(q_shape, v_shape, flags), **block})


@triton.jit(do_not_specialize=SETTINGS)
def attend_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    out, lse,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, SEVERAL: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    row, corner = tile_at(tl.program_id(0), QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys = points(QG, RANK).to(tl.int64), points(KG, RANK)
    source = (row // group).to(tl.int64)
    k_row, v_row, index_row = k + source * keys * E, v + source * keys * F, index + row * queries * kappa
    mask_row = (row // mask_heads).to(tl.int64)
    mine = features(q + row * queries * E, query, valid, E, W, PIECES)
    noise = absorb(row_state(SEED, low, high, row), query)

    top = tl.full([LANES], -float("inf"), tl.float32)
    total, count = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    mixed = ()
    for _ in tl.static_range(FPIECES):
        mixed += (tl.zeros([LANES, FW], tl.float32),)
    for e in range(kappa):
        match = match_of(index_row, query, e, valid, kappa, keys)
        offset = first_offset(REACH, RANK)
        for _step in range(window_size(REACH, RANK)):
            key, ok = legal_at(
                match, e, offset, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH,
                RANK, CAUSAL, SEVERAL,
            )  # fmt: skip
            offset = next_offset(offset, REACH, RANK)
            s = dot(mine, features(k_row, key, ok, E, W, PIECES), PIECES) * scale
            value = features(v_row, key, ok, F, FW, FPIECES)
            top, total, count, mixed = mix(
                s, ok, key, value, top, total, count, mixed, noise, threshold, keep, WEIGHT, DROPOUT, FPIECES
            )
    if k_extra is not None:
        for x in range(extras):
            there = query * 0 + x
            s = dot(mine, features(k_extra + source * extras * E, there, valid, E, W, PIECES), PIECES) * scale
            value = features(v_extra + source * extras * F, there, valid, F, FW, FPIECES)
            top, total, count, mixed = mix(
                s,
                valid,
                keys + there,
                value,
                top,
                total,
                count,
                mixed,
                noise,
                threshold,
                keep,
                WEIGHT,
                DROPOUT,
                FPIECES,
            )

    some = count > 0
    whole = tl.where(some, total if WEIGHT == "softmax" else count, 1.0)
    if WEIGHT == "softmax":
        top = tl.where(top == -float("inf"), 0.0, top)
        norm = tl.where(some, tl.log(whole) + top, -float("inf"))
    else:
        norm = tl.where(some, tl.log(whole), -float("inf"))
    tl.store(lse + row * queries + query, norm, mask=valid)
    shares = ()
    for n in tl.static_range(FPIECES):
        shares += (mixed[n] / whole[:, None],)
    put(out + row * queries * F, query, shares, valid, F, FW, FPIECES)


@triton.jit
def mix(
    s, ok, key, value, top, total, count, mixed, noise, threshold, keep,
    WEIGHT: tl.constexpr, DROPOUT: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """One more key per lane: the running maximum, normaliser, number of keys and weighted sum of values."""
    shrink = tl.full(s.shape, 1.0, tl.float32)
    if WEIGHT == "softmax":
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, s)
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
        shrink = tl.exp(top - safe)
        p = tl.exp(s - safe)
        total = total * shrink + p
        top = higher
    else:
        p = weigh(s, ok, WEIGHT)
    count += tl.where(ok, 1.0, 0.0)
    if DROPOUT:
        p = tl.where(absorb(noise, key) >= threshold.to(tl.uint32), p * keep, 0.0)
    sums = ()
    for n in tl.static_range(FPIECES):
        sums += (mixed[n] * shrink[:, None] + p[:, None] * value[n],)
    return top, total, count, sums
