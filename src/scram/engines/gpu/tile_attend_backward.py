"""The gradient of attention of whole tiles in Triton, through out and through lse.

Meaning and names are those of `attend_backward`; pairs come in blocks, and the sums of gradients are matrix products.
Tiles add what they owe to keys and values by float32 atomics; where repeatable bits are asked for, `tile_keys` lets
cells collect it in a fixed order instead.
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

from .attend_backward import extra_slots, from_slots
from .block_sizes import TILE_BACKWARD, TILE_BACKWARD_EXACT
from .cells import cells_of, keys_at, rows_at
from .grid import lane_query, points, tile_at
from .launch import Kernel, kinds, on_device
from .noise import absorb, row_state
from .shared_keys import finite
from .tile_attend import CELL, tile_count
from .tile_keys import backward_flags, collect
from .tile_pairs import dots, fine_product, owed, own_pieces, pairs_of, put_owed, slopes, summed, unit_of, weights
from .windows import SETTINGS, Flags, window_arguments


def tile_attend_backward(
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
    dk_extra, dv_extra = (extra_slots(x, tile_count(q.shape), repeatable) for x in (k_extra, v_extra))
    if dq.numel():
        arguments, variant = window_arguments(
            q, k, v, index, key_mask, k_extra, v_extra, seed, radius, causal, scale, weight, dropout_p
        )
        # One over the sum of the weights, delta - grad_lse and a bound of the slopes: what keys need to collect.
        sums = torch.empty((*lse.shape, 3), dtype=torch.float32, device=q.device) if repeatable else None
        above = (grad_out.contiguous(), grad_lse.contiguous(), lse.contiguous())
        with on_device(q):
            cells = cells_of(q, k, arguments[3], radius)
            kernel = _kernel(*variant, cells.size, kinds(*above), repeatable)
            kernel(*arguments, *cells.arguments, *above, sums, dq, dk, dv, dk_extra, dv_extra)
            if sums is not None:
                collect(arguments, variant, cells, above, sums, dk, dv)
    return dq, dk.to(k.dtype), dv.to(v.dtype), from_slots(dk_extra, k_extra), from_slots(dv_extra, v_extra)


@lru_cache(maxsize=256)
def _kernel(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    flags: Flags,
    given: tuple[Any, ...],
    size: int,
    above: tuple[Any, ...],
    repeatable: bool,
) -> Kernel:
    block = backward_flags(q_shape, v_shape, flags, given, size, TILE_BACKWARD, TILE_BACKWARD_EXACT)
    return Kernel(
        tile_backward_kernel,
        tile_count(q_shape) * block["PARTS"],
        {**block, "REPEATABLE": repeatable},
    )


@triton.jit(do_not_specialize=[*SETTINGS, *CELL])
def tile_backward_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    s0, s1, s2, s3, room, cells, count, grad_out, grad_lse, lse, sums, dq, dk, dv, dk_extra, dv_extra,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, REPEATABLE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, COPIES: tl.constexpr, NARROW: tl.constexpr, LIFT: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (tile, piece of the features and of the values)."""
    QG, KG, MAGIC, SIDE = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (s0, s1, s2, s3)
    piece, tile = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    row, corner = tile_at(tile, QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys, size = points(QG, RANK).to(tl.int64), points(KG, RANK), points(SIDE, RANK)
    source, mask_row = (row // group).to(tl.int64), (row // mask_heads).to(tl.int64)
    k_row, v_row, point = k + source * keys * E, v + source * keys * F, row * queries + query
    q_row, wish_row = q + row * queries * E, grad_out + row * queries * F
    noise = absorb(row_state(SEED, low, high, row), query)
    e_piece, f_piece = own_pieces(piece, PIECES, FPIECES)
    mine = rows_at(q_row, query, valid, e_piece, E, W, WEIGHT)
    wish = rows_at(wish_row, query, valid, f_piece, F, FW, WEIGHT)
    norm = tl.load(lse + point, mask=valid, other=float("inf"))
    mine_cells, last = cells + tile.to(tl.int64) * room, tl.load(count + tile) * size

    shift, over = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    steep = shift
    if WEIGHT == "softmax":
        total = tl.zeros([LANES], tl.float32)
        for begin in range(0, last, BN):
            key = keys_at(
                begin, mine_cells, last, mask, mask_row, keys, KG, MAGIC, SIDE, size, RANK, BN, EVEN, COPIES
            )  # fmt: skip
            there = key >= 0
            ok = pairs_of(key, there, query, CAUSAL)
            s, _ = dots(mine, q_row, query, valid, k_row, key, there, e_piece, E, W, PIECES, WEIGHT, LANES, BN)
            dp, _ = dots(wish, wish_row, query, valid, v_row, key, there, f_piece, F, FW, FPIECES, WEIGHT, LANES, BN)
            p = weights(s, ok, norm, scale, NARROW)
            total, shift, steep = summed(
                p, dp, ok, key, noise, threshold, keep, total, shift, steep, DROPOUT, LIFT
            )  # fmt: skip
        if k_extra is not None:
            for begin in range(0, extras, BN):
                x = begin + tl.arange(0, BN)
                there, k_more, v_more = x < extras, k_extra + source * extras * E, v_extra + source * extras * F
                ok = there[None, :]
                s, _ = dots(mine, q_row, query, valid, k_more, x, there, e_piece, E, W, PIECES, WEIGHT, LANES, BN)
                dp, _ = dots(wish, wish_row, query, valid, v_more, x, there, f_piece, F, FW, FPIECES, WEIGHT, LANES, BN)
                p = weights(s, ok, norm, scale, NARROW)
                total, shift, steep = summed(
                    p, dp, ok, keys + x, noise, threshold, keep, total, shift, steep, DROPOUT, LIFT
                )  # fmt: skip
        over = 1 / tl.where(total == 0, 1.0, total)
        shift = shift * over - tl.load(grad_lse + point, mask=valid, other=0.0)
        steep = steep * over + tl.abs(shift)
    if REPEATABLE:  # noqa: SIM102 - what is known to the compiler apart
        if piece == 0:
            tl.store(sums + point * 3, over, mask=valid)
            tl.store(sums + point * 3 + 1, shift, mask=valid)
            tl.store(sums + point * 3 + 2, steep, mask=valid)

    unit = unit_of(steep, scale, LIFT)
    mixed = tl.zeros([LANES, W], tl.float32)
    for begin in range(0, last, BN):
        key = keys_at(
            begin, mine_cells, last, mask, mask_row, keys, KG, MAGIC, SIDE, size, RANK, BN, EVEN, COPIES
        )  # fmt: skip
        there = key >= 0
        ok = pairs_of(key, there, query, CAUSAL)
        s, theirs = dots(mine, q_row, query, valid, k_row, key, there, e_piece, E, W, PIECES, WEIGHT, LANES, BN)
        dp, _ = dots(wish, wish_row, query, valid, v_row, key, there, f_piece, F, FW, FPIECES, WEIGHT, LANES, BN)
        p, ds = slopes(
            s, dp, ok, norm, over, shift, key, noise, threshold, keep, scale, unit, WEIGHT, DROPOUT, NARROW, CAUSAL
        )  # fmt: skip
        # Under causal order a slope may be 0 where a key is not finite; where it is not, the slope is NaN.
        mixed = fine_product(ds, finite(theirs) if CAUSAL else theirs, mixed, NARROW)
        if not REPEATABLE:
            k_sum, v_sum = tl.zeros([BN, W], tl.float32), tl.zeros([BN, FW], tl.float32)
            k_sum, v_sum = owed(p, ds, unit, ok, mine, wish, k_sum, v_sum, NARROW, LIFT, CAUSAL)
            put_owed(dk + source * keys * E, key, there, piece, k_sum, E, W, PARTS, True)
            put_owed(dv + source * keys * F, key, there, piece, v_sum, F, FW, PARTS, True)
    if k_extra is not None:
        slot = (tile.to(tl.int64) if REPEATABLE else source) * extras
        for begin in range(0, extras, BN):
            x = begin + tl.arange(0, BN)
            there, k_more, v_more = x < extras, k_extra + source * extras * E, v_extra + source * extras * F
            ok = there[None, :]
            s, theirs = dots(mine, q_row, query, valid, k_more, x, there, e_piece, E, W, PIECES, WEIGHT, LANES, BN)
            dp, _ = dots(wish, wish_row, query, valid, v_more, x, there, f_piece, F, FW, FPIECES, WEIGHT, LANES, BN)
            p, ds = slopes(
                s, dp, ok, norm, over, shift, keys + x, noise, threshold, keep, scale, unit,
                WEIGHT, DROPOUT, NARROW, CAUSAL,
            )  # fmt: skip
            mixed = fine_product(ds, finite(theirs) if CAUSAL else theirs, mixed, NARROW)
            k_sum, v_sum = tl.zeros([BN, W], tl.float32), tl.zeros([BN, FW], tl.float32)
            k_sum, v_sum = owed(p, ds, unit, ok, mine, wish, k_sum, v_sum, NARROW, LIFT, CAUSAL)
            put_owed(dk_extra + slot * E, x, there, piece, k_sum, E, W, PARTS, not REPEATABLE)
            put_owed(dv_extra + slot * F, x, there, piece, v_sum, F, FW, PARTS, not REPEATABLE)
    put_owed(dq + row * queries * E, query, valid, piece, mixed / unit, E, W, PARTS, False)
