"""Gradients of keys and values with repeatable bits: every key collects from the queries that attend it, in order.

The queries that match a key stand together in a list sorted by key, so those that match the keys of a row of its window
do too. A key may be wanted by most queries: what is beyond one share of pairs is summed in shares, by programs of their
own, and added in order. No atomics, no list of pairs.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_sizes import LEAST_SHARE, collect_tile
from .grid import GEOMETRY, divide, dot, features, near, points, put
from .launch import Kernel
from .noise import absorb, row_state
from .windows import SETTINGS, add, first_offset, next_offset, pair_gradient, window_key, window_size


def collect(
    arguments: tuple[Any, ...],
    from_above: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
    index: Tensor,
    radius: tuple[int, ...],
    flags: dict[str, Any],
) -> None:
    """Fill dk and dv, float32. `sums` [B, H, *G, 2] is what the queries found."""
    rows, key_rows, keys = index.shape[0] * index.shape[1], dk.shape[0] * dk.shape[1], dk[0, 0, ..., 0].numel()
    device, every = index.device, key_rows * keys
    small = torch.int32 if every < 2**31 - 1 else torch.int64  # sorted in half the time
    source = torch.arange(key_rows, dtype=small, device=device).repeat_interleave(rows // key_rows)
    match = index.reshape(rows, -1).to(small)
    there = (match >= 0) & (match < keys)
    names = torch.where(there, match + keys * source.unsqueeze(1), every).flatten()
    names, order = names.sort(stable=True)
    first = torch.searchsorted(names, torch.arange(every + 1, dtype=small, device=device))
    q, v = arguments[0], arguments[2]
    block = {**flags, **collect_tile(q.shape[-1], v.shape[-1], q.dtype, v.dtype)}
    window = math.prod(min(2 * b + 1, extent) for b, extent in zip(radius, dk.shape[2:-1], strict=True))
    share = max(LEAST_SHARE, 8 * len(names) * window // every)
    shares = len(names) * window // share  # at most, beyond the first of each key: a share for eight keys
    more = torch.empty(every, dtype=torch.int64, device=device)
    counts = Kernel(
        share_kernel, triton.cdiv(every, 128), {"RANK": flags["RANK"], "BLOCK": 128, "enable_fp_fusion": True}
    )
    counts(first, more, key_rows, share, *arguments[-17:-2])
    ends = more.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(shares, device=device), right=True)
    parts = [torch.empty((shares, x.shape[-1]), dtype=torch.float32, device=device) for x in (q, v)]
    grad_out, _, lse = from_above
    given = (*arguments, grad_out, lse, sums, dk, dv, order, first, more, ends, owner, *parts, key_rows, share)
    if shares:
        Kernel(collect_kernel, shares, {**block, "EXTRA": True})(*given)
    Kernel(collect_kernel, every, {**block, "EXTRA": False})(*given)


@triton.jit
def sides(key, REACH, KG, MAGIC, RANK: tl.constexpr):
    """How far the window of a key goes to both sides on the last axis, and its reach on the others."""
    last: tl.constexpr = RANK - 1
    at = key - divide(key, MAGIC[last]) * KG[last] if RANK > 1 else key
    rows = ()
    for a in tl.static_range(4):
        rows += (REACH[a] * (a != last),)
    return tl.minimum(at, REACH[last]), tl.minimum(KG[last] - 1 - at, REACH[last]), rows


@triton.jit
def matched(first, place, key, offset, left, right, ok, KG, MAGIC, RANK: tl.constexpr):
    """Where the list of matches on a row of a key's window begins and ends."""
    centre, there = window_key(key, offset, KG, MAGIC, RANK)
    at, there = first + place + (centre - key), there & ok
    return tl.load(at - left, mask=there, other=0), tl.load(at + right + 1, mask=there, other=0)


@triton.jit(do_not_specialize=["key_rows", "share", *GEOMETRY, "b0", "b1", "b2", "b3"])
def share_kernel(
    first, more, key_rows, share, q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many shares each key has beyond its first."""
    KG, MAGIC, REACH = (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    keys = points(KG, RANK)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < key_rows.to(tl.int64) * keys
    key = (place % keys).to(tl.int32)
    left, right, rows = sides(key, REACH, KG, MAGIC, RANK)
    offset, total = first_offset(rows, RANK), place * 0
    for _ in range(window_size(rows, RANK)):
        begin, end = matched(first, place, key, offset, left, right, valid, KG, MAGIC, RANK)
        offset = next_offset(offset, rows, RANK)
        total += end - begin
    tl.store(more + place, tl.maximum(total - 1, 0) // share, mask=valid)


@triton.jit(do_not_specialize=[*SETTINGS, "key_rows", "share"])
def collect_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    grad_out, lse, sums, dk, dv, order, first, more, ends, owner, k_parts, v_parts, key_rows, share,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, SEVERAL: tl.constexpr, LANES: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """One share of the pairs of one key, LANES at a time: an EXTRA one, or the first, and then the sum of all.

    order[first[j]:first[j + 1]] are the matches (point, e) on key j.
    """
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK).to(tl.int64), points(KG, RANK)
    number, every = tl.program_id(0).to(tl.int64), key_rows.to(tl.int64) * keys
    place = tl.load(owner + number) if EXTRA else number
    exists = place < every
    others = tl.load(more + place, mask=exists, other=0)
    start = tl.load(ends + place, mask=exists, other=0) - others
    key, lane = (place % keys).to(tl.int32), tl.arange(0, LANES)
    one, own = tl.arange(0, 1) + number, tl.arange(0, 1) + place < every
    mine = features(k, one - number + place, own, E, W, PIECES)
    value = features(v, one - number + place, own, F, FW, FPIECES)
    k_sum, v_sum = (), ()
    for _ in tl.static_range(PIECES):
        k_sum += (tl.zeros([LANES, W], tl.float32),)
    for _ in tl.static_range(FPIECES):
        v_sum += (tl.zeros([LANES, FW], tl.float32),)
    left, right, rows = sides(key, REACH, KG, MAGIC, RANK)
    offset = first_offset(rows, RANK)
    skip = (number - start + 1) * share if EXTRA else place * 0  # pairs of this key that are others' share
    for _ in range(tl.where(exists, window_size(rows, RANK), 0)):
        begin, end = matched(first, place, key, offset, left, right, exists, KG, MAGIC, RANK)
        offset = next_offset(offset, rows, RANK)
        stop = tl.minimum(end, tl.maximum(begin + skip + share, begin))
        at, skip = begin + tl.maximum(skip, 0), skip - (end - begin)
        for t in range(((stop - at + LANES - 1) // LANES).to(tl.int32)):
            ok = at + t * LANES + lane < stop
            entry = tl.load(order + at + t * LANES + lane, mask=ok, other=0)
            point, e = entry // kappa, entry % kappa
            row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
            here = query * 0 + key
            if CAUSAL:
                ok = ok & (key <= query)
            if mask is not None:
                ok = ok & (tl.load(mask + (row // mask_heads).to(tl.int64) * keys + key, mask=ok, other=0) != 0)
            if SEVERAL:
                for before in range(kappa - 1):
                    earlier = tl.load(index + point * kappa + before, mask=ok & (before < e), other=-1)
                    there = (earlier >= 0) & (earlier < keys)
                    ok = ok & ~(there & near(here, tl.where(there, earlier, 0), REACH, KG, MAGIC, RANK))
            theirs = features(q, point, ok, E, W, PIECES)
            wish = features(grad_out, point, ok, F, FW, FPIECES)
            norm = tl.load(lse + point, mask=ok, other=0.0)
            over = tl.load(sums + point * 2, mask=ok, other=0.0)
            shift = tl.load(sums + point * 2 + 1, mask=ok, other=0.0)
            noise = absorb(row_state(SEED, low, high, row), query)
            s = dot(theirs, mine, PIECES) * scale
            dp = dot(wish, value, FPIECES)
            p, ds = pair_gradient(s, dp, ok, norm, over, shift, here, noise, threshold, keep, WEIGHT, DROPOUT)
            k_sum = add(k_sum, ds * scale, theirs, PIECES)
            v_sum = add(v_sum, p, wish, FPIECES)
    if EXTRA:
        to_k, to_v = k_parts, v_parts
    else:
        to_k, to_v = dk, dv
        for t in range(((others + LANES - 1) // LANES).to(tl.int32)):
            part, ok = start + t * LANES + lane, t * LANES + lane < others
            k_sum = add(k_sum, ok.to(tl.float32), features(k_parts, part, ok, E, W, PIECES), PIECES)
            v_sum = add(v_sum, ok.to(tl.float32), features(v_parts, part, ok, F, FW, FPIECES), FPIECES)
    put(to_k, one, over_lanes(k_sum, PIECES), own, E, W, PIECES)
    put(to_v, one, over_lanes(v_sum, FPIECES), own, F, FW, FPIECES)


@triton.jit
def over_lanes(sums, PIECES: tl.constexpr):
    """[LANES, W] -> [1, W]."""
    whole = ()
    for n in tl.static_range(PIECES):
        whole += (tl.sum(sums[n], axis=0)[None, :],)
    return whole
