"""The gradient of Algorithm 2 in Triton, through out and through lse.

With p the weights, r the dropout factor, dp_j = <grad_out, v_j> and delta = sum_j p_j r_j dp_j, the gradient of a score
is p_j (r_j dp_j - delta + grad_lse). The sum of the weights and delta are made anew in a first walk through the
windows: lse and out were rounded. Queries add what they owe to keys and values by float32 atomics; where repeatable
bits are asked for, keys collect it in a fixed order instead.
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

from ...grid import grid_of
from .attend_keys import collect
from .block_sizes import backward_tile
from .grid import dot, features, lane_query, points, put, tile_at, tiles
from .launch import Kernel, kinds, on_device
from .noise import absorb, row_state
from .windows import (
    SETTINGS,
    Flags,
    add,
    first_offset,
    kept,
    legal_at,
    match_of,
    next_offset,
    pair_gradient,
    rough_weight,
    window_arguments,
    window_flags,
    window_size,
)


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    k_extra: Tensor | None,
    v_extra: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    radius: tuple[int, ...],
    causal: bool,
    scale: float,
    weight: str,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """grad_out [B, H, *G, F], grad_lse [B, H, *G] -> dq, dk, dv, dk_extra, dv_extra in the dtypes of their tensors."""
    repeatable = torch.are_deterministic_algorithms_enabled()
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    block = backward_tile(q.ndim - 3, q.shape[-1], v.shape[-1], q.dtype, v.dtype)
    count = tiles(grid_of(q), block["TILE"])
    programs = q.shape[0] * q.shape[1] * count
    dk_extra, dv_extra = (extra_slots(x, programs, repeatable) for x in (k_extra, v_extra))
    if dq.numel():
        arguments, variant = window_arguments(
            q, k, v, index, key_mask, k_extra, v_extra, seed, radius, causal, scale, weight, dropout_p
        )
        # One over the sum of the weights, and delta - grad_lse: what keys need to collect.
        sums = torch.empty((*lse.shape, 2), dtype=torch.float32, device=q.device) if repeatable else None
        from_above = (grad_out.contiguous(), grad_lse.contiguous(), lse.contiguous())
        with on_device(q):
            grads = (sums, dq, dk, dv, dk_extra, dv_extra)
            _kernel(*variant, kinds(*from_above), repeatable)(*arguments, *from_above, *grads)
            if sums is not None:
                collect(arguments, from_above, sums, dk, dv, index, radius, window_flags(*variant[:3]))
    return dq, dk.to(k.dtype), dv.to(v.dtype), from_slots(dk_extra, k_extra), from_slots(dv_extra, v_extra)


@lru_cache(maxsize=256)
def _kernel(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    flags: Flags,
    given: tuple[Any, ...],
    from_above: tuple[Any, ...],
    repeatable: bool,
) -> Kernel:
    block = backward_tile(len(q_shape) - 3, q_shape[-1], v_shape[-1], given[0][1], given[2][1])
    programs = q_shape[0] * q_shape[1] * tiles(q_shape[2:-1], block["TILE"])
    constants = {**window_flags(q_shape, v_shape, flags), "REPEATABLE": repeatable, **block}
    return Kernel(backward_kernel, programs, constants)


def extra_slots(extra: Tensor | None, programs: int, repeatable: bool) -> Tensor | None:
    """Where the gradient of extra keys or values [B, Hk, X, width] is summed, float32 [slots, X, width].

    Atomics share one slot per key row; repeatable sums need one per program, and `from_slots` adds them up in order.
    """
    if extra is None:
        return None
    slots = programs if repeatable else extra.shape[0] * extra.shape[1]
    return torch.zeros((slots, *extra.shape[2:]), dtype=torch.float32, device=extra.device)


def from_slots(grad: Tensor | None, extra: Tensor | None) -> Tensor | None:
    """The gradient in the shape and dtype of what it belongs to."""
    if grad is None or extra is None:
        return None
    key_rows = extra.shape[0] * extra.shape[1]
    if len(grad) != key_rows:
        grad = grad.reshape(key_rows, len(grad) // key_rows, *grad.shape[1:]).sum(1)
    return grad.reshape(extra.shape).to(extra.dtype)


@triton.jit
def add_rows(
    base, at, factor, pieces, ok, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """base[at] += factor * pieces, atomically, for the lanes that are ok."""
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)[None, :]
        place = base + at.to(tl.int64)[:, None] * E + e
        tl.atomic_add(place, factor[:, None] * pieces[n], mask=ok[:, None] & (e < E), sem="relaxed")


@triton.jit
def add_sum(
    base, factor, pieces, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr, REPEATABLE: tl.constexpr
):  # fmt: skip
    """base += the sum over lanes of factor * pieces; a plain store where the slot is the program's own."""
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)
        total = tl.sum(factor[:, None] * pieces[n], axis=0)
        if REPEATABLE:
            tl.store(base + e, total, mask=e < E)
        else:
            tl.atomic_add(base + e, total, mask=e < E, sem="relaxed")


@triton.jit(do_not_specialize=SETTINGS)
def backward_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    grad_out, grad_lse, lse, sums, dq, dk, dv, dk_extra, dv_extra,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, SEVERAL: tl.constexpr, REPEATABLE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
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
    wish = features(grad_out + row * queries * F, query, valid, F, FW, FPIECES)
    norm = tl.load(lse + row * queries + query, mask=valid, other=0.0)
    noise = absorb(row_state(SEED, low, high, row), query)
    window = window_size(REACH, RANK)

    shift, over = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    if WEIGHT == "softmax":
        total = tl.zeros([LANES], tl.float32)
        for e in range(kappa):
            match = match_of(index_row, query, e, valid, kappa, keys)
            offset = first_offset(REACH, RANK)
            for _step in range(window):
                key, ok = legal_at(
                    match, e, offset, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH,
                    RANK, CAUSAL, SEVERAL,
                )  # fmt: skip
                offset = next_offset(offset, REACH, RANK)
                s = dot(mine, features(k_row, key, ok, E, W, PIECES), PIECES) * scale
                dp = dot(wish, features(v_row, key, ok, F, FW, FPIECES), FPIECES)
                p = rough_weight(s, ok, norm)
                total += p
                r = kept(key, noise, threshold, keep, DROPOUT)
                shift += tl.where(ok & (r > 0), p * r * dp, 0.0)
        if k_extra is not None:
            for x in range(extras):
                there = query * 0 + x
                s = dot(mine, features(k_extra + source * extras * E, there, valid, E, W, PIECES), PIECES) * scale
                dp = dot(wish, features(v_extra + source * extras * F, there, valid, F, FW, FPIECES), FPIECES)
                p = rough_weight(s, valid, norm)
                total += p
                r = kept(keys + there, noise, threshold, keep, DROPOUT)
                shift += tl.where(valid & (r > 0), p * r * dp, 0.0)
        over = 1 / tl.where(total == 0, 1.0, total)
        shift = shift * over - tl.load(grad_lse + row * queries + query, mask=valid, other=0.0)
    if REPEATABLE:
        tl.store(sums + (row * queries + query) * 2, over, mask=valid)
        tl.store(sums + (row * queries + query) * 2 + 1, shift, mask=valid)

    mixed = ()
    for _ in tl.static_range(PIECES):
        mixed += (tl.zeros([LANES, W], tl.float32),)
    for e in range(kappa):
        match = match_of(index_row, query, e, valid, kappa, keys)
        offset = first_offset(REACH, RANK)
        for _step in range(window):
            key, ok = legal_at(
                match, e, offset, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH,
                RANK, CAUSAL, SEVERAL,
            )  # fmt: skip
            offset = next_offset(offset, REACH, RANK)
            theirs = features(k_row, key, ok, E, W, PIECES)
            s = dot(mine, theirs, PIECES) * scale
            dp = dot(wish, features(v_row, key, ok, F, FW, FPIECES), FPIECES)
            p, ds = pair_gradient(s, dp, ok, norm, over, shift, key, noise, threshold, keep, WEIGHT, DROPOUT)
            mixed = add(mixed, ds * scale, theirs, PIECES)
            if not REPEATABLE:
                add_rows(dk + source * keys * E, key, ds * scale, mine, ok, E, W, PIECES)
                add_rows(dv + source * keys * F, key, p, wish, ok, F, FW, FPIECES)
    if k_extra is not None:
        slot = (tl.program_id(0).to(tl.int64) if REPEATABLE else source) * extras
        for x in range(extras):
            there = query * 0 + x
            theirs = features(k_extra + source * extras * E, there, valid, E, W, PIECES)
            s = dot(mine, theirs, PIECES) * scale
            dp = dot(wish, features(v_extra + source * extras * F, there, valid, F, FW, FPIECES), FPIECES)
            p, ds = pair_gradient(
                s, dp, valid, norm, over, shift, keys + there, noise, threshold, keep, WEIGHT, DROPOUT
            )
            mixed = add(mixed, ds * scale, theirs, PIECES)
            add_sum(dk_extra + (slot + x) * E, ds * scale, mine, E, W, PIECES, REPEATABLE)
            add_sum(dv_extra + (slot + x) * F, p, wish, F, FW, FPIECES, REPEATABLE)

    put(dq + row * queries * E, query, mixed, valid, E, W, PIECES)
