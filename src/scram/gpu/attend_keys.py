"""Gradients of keys and values with repeatable bits: every key collects from the queries that attend it, in order.

The queries that match a key stand together in a list sorted by key; those that attend it are the lists of all keys of
its window. No atomics, no list of pairs.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grid import dot, features, near, points, put
from .launch import Kernel
from .noise import absorb, row_state
from .tiles import collect_tile
from .windows import SETTINGS, add, first_offset, next_offset, pair_gradient, window_key, window_size


def collect(
    arguments: tuple[Any, ...],
    from_above: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    index: Tensor,
    flags: dict[str, Any],
) -> None:
    """Fill dk and dv, float32 and zero before. `sums` [B, H, *G, 2] is what the queries found."""
    rows, key_rows, keys = index.shape[0] * index.shape[1], dk.shape[0] * dk.shape[1], dk[0, 0, ..., 0].numel()
    source = torch.arange(key_rows, device=index.device).repeat_interleave(rows // key_rows)
    match = index.reshape(rows, -1).long()
    there = (match >= 0) & (match < keys)
    names = torch.where(there, match + keys * source.unsqueeze(1), key_rows * keys).flatten()
    names, order = names.sort(stable=True)
    first = torch.searchsorted(names, torch.arange(key_rows * keys + 1, device=names.device))
    q, v = arguments[0], arguments[2]
    block = collect_tile(q.shape[-1], v.shape[-1], q.dtype, v.dtype)
    grad_out, _, lse = from_above
    kernel = Kernel(collect_kernel, triton.cdiv(key_rows * keys, block["LANES"]), {**flags, **block})
    kernel(*arguments, grad_out, lse, sums, dk, dv, order, first, key_rows)


@triton.jit(do_not_specialize=[*SETTINGS, "key_rows"])
def collect_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    grad_out, lse, sums, dk, dv, order, first, key_rows,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, SEVERAL: tl.constexpr, LANES: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """LANES keys of any rows. order[first[j]:first[j + 1]] are the matches (point, e) on key j."""
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK).to(tl.int64), points(KG, RANK)
    place = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    valid = place < key_rows.to(tl.int64) * keys
    source, key = place // keys, (place % keys).to(tl.int32)
    mine = features(k, place, valid, E, W, PIECES)
    value = features(v, place, valid, F, FW, FPIECES)
    k_sum, v_sum = (), ()
    for _ in tl.static_range(PIECES):
        k_sum += (tl.zeros([LANES, W], tl.float32),)
    for _ in tl.static_range(FPIECES):
        v_sum += (tl.zeros([LANES, FW], tl.float32),)
    offset = first_offset(REACH, RANK)
    for _step in range(window_size(REACH, RANK)):
        centre, near_by = window_key(key, offset, KG, MAGIC, RANK)
        offset = next_offset(offset, REACH, RANK)
        near_by = near_by & valid
        begin = tl.load(first + source * keys + centre, mask=near_by, other=0)
        end = tl.load(first + source * keys + centre + 1, mask=near_by, other=0)
        for t in range(tl.max(end - begin).to(tl.int32)):
            ok = begin + t < end
            entry = tl.load(order + begin + t, mask=ok, other=0)
            point, e = entry // kappa, entry % kappa
            row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
            if CAUSAL:
                ok = ok & (key <= query)
            if mask is not None:
                ok = ok & (tl.load(mask + (row // mask_heads).to(tl.int64) * keys + key, mask=ok, other=0) != 0)
            if SEVERAL:
                for before in range(kappa - 1):
                    earlier = tl.load(index + point * kappa + before, mask=ok & (before < e), other=-1)
                    there = (earlier >= 0) & (earlier < keys)
                    ok = ok & ~(there & near(key, tl.where(there, earlier, 0), REACH, KG, MAGIC, RANK))
            theirs = features(q, point, ok, E, W, PIECES)
            wish = features(grad_out, point, ok, F, FW, FPIECES)
            norm = tl.load(lse + point, mask=ok, other=0.0)
            over = tl.load(sums + point * 2, mask=ok, other=0.0)
            shift = tl.load(sums + point * 2 + 1, mask=ok, other=0.0)
            noise = absorb(row_state(SEED, low, high, row), query)
            s = dot(theirs, mine, PIECES) * scale
            dp = dot(wish, value, FPIECES)
            p, ds = pair_gradient(s, dp, ok, norm, over, shift, key, noise, threshold, keep, WEIGHT, DROPOUT)
            k_sum = add(k_sum, ds * scale, theirs, PIECES)
            v_sum = add(v_sum, p, wish, FPIECES)
    put(dk, place, k_sum, valid, E, W, PIECES)
    put(dv, place, v_sum, valid, F, FW, FPIECES)
