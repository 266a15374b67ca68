"""Gradients of keys and values with repeatable bits: every key collects from the queries that attend it, in order.

The queries that match a key stand together in a list sorted by key, so those that match the keys of a row of its window
do too. Most queries may attend one key: pairs beyond a first share are summed in further shares, by programs of their
own, and added in order. No atomics, no list of pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import AttendGrads
from ..attend import windows as win
from ..noise import absorb, row_state
from ..primitives import divide, dot, features, near, points, put
from ..runtime.block_sizes import LEAST_SHARE, collect_tile
from ..runtime.launch import Kernel


class Upstream(NamedTuple):
    """What a backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]
    lse: Tensor  # [B, H, *G]
    sums: Tensor | None  # float32 [B, H, *G, 2 or more], what queries find and keys need to collect: inv_sum, delta, ..


class Lists(NamedTuple):
    """Who matches which key: order[first[j]:first[j + 1]] are the matches (point, e) on key j of all key rows."""

    order: Tensor  # int64 [matches]
    first: Tensor  # int64 [keys + 1]
    further: Tensor  # int64 [keys], shares of each key beyond its first
    ends: Tensor  # int64 [keys], running sums of `further`
    owner: Tensor  # int64 [further shares], the key of each
    k_parts: Tensor  # float32 [further shares, E], what they sum
    v_parts: Tensor  # float32 [further shares, F]
    key_rows: int
    share: int  # pairs at most of one


def collect(
    windows: win.Windows, variant: win.Variant, above: Upstream, grads: AttendGrads, radius: tuple[int, ...]
) -> None:
    """Fill the gradients of k and v, float32."""
    index, dk = windows.index, grads.k
    rows, key_rows, keys = index.shape[0] * index.shape[1], dk.shape[0] * dk.shape[1], dk[0, 0, ..., 0].numel()
    device, every = index.device, key_rows * keys
    small = torch.int32 if every < 2**31 - 1 else torch.int64  # sorted in half the time
    source = torch.arange(key_rows, dtype=small, device=device).repeat_interleave(rows // key_rows)
    match = index.reshape(rows, -1).to(small)
    there = (match >= 0) & (match < keys)
    names = torch.where(there, match + keys * source.unsqueeze(1), every).flatten()
    names, order = names.sort(stable=True)
    first = torch.searchsorted(names, torch.arange(every + 1, dtype=small, device=device))
    window = math.prod(min(2 * b + 1, extent) for b, extent in zip(radius, dk.shape[2:-1], strict=True))
    share = max(LEAST_SHARE, 8 * len(names) * window // every)
    shares = len(names) * window // share  # at most, beyond the first of each key: a share for eight keys
    further = torch.empty(every, dtype=torch.int64, device=device)
    counts = Kernel(share_kernel, triton.cdiv(every, 128), {"BLOCK": 128, "enable_fp_fusion": True})
    counts(first, further, key_rows, share, windows.geo, windows.reach)
    ends = further.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(shares, device=device), right=True)
    k_parts, v_parts = (torch.empty((shares, width), dtype=torch.float32, device=device) for width in variant.widths)
    lists = Lists(order, first, further, ends, owner, k_parts, v_parts, key_rows, share)
    flags = {"MODE": variant.mode, **collect_tile(variant.widths, variant.dtypes)}
    if shares:
        Kernel(collect_kernel, shares, {**flags, "FIRST": False})(windows, above, grads, lists)
    Kernel(collect_kernel, every, {**flags, "FIRST": True})(windows, above, grads, lists)


@triton.jit
def sides(key, reach, geo):
    """How far the window of a key goes to both sides on the last axis, and its reach on the others."""
    last: tl.constexpr = len(geo.k) - 1
    at = key - divide(key, geo.magic[last]) * geo.k[last] if last > 0 else key
    rows = ()
    for a in tl.static_range(len(geo.k)):
        rows += (reach[a] * (a != last),)
    return tl.minimum(at, reach[last]), tl.minimum(geo.k[last] - 1 - at, reach[last]), rows


@triton.jit
def matched(first, place, key, offset, left, right, ok, geo):
    """Where the list of matches on a row of a key's window begins and ends."""
    centre, there = win.window_key(key, offset, geo)
    at, there = first + place + (centre - key), there & ok
    return tl.load(at - left, mask=there, other=0), tl.load(at + right + 1, mask=there, other=0)


@triton.jit
def share_kernel(first, further, key_rows, share, geo, reach, BLOCK: tl.constexpr):
    """How many shares each key has beyond its first."""
    keys = points(geo.k)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = place < tl.cast(key_rows, tl.int64) * keys
    key = (place % keys).to(tl.int32)
    left, right, rows = sides(key, reach, geo)
    offset, total = win.first_offset(rows), place * 0
    for _ in range(win.window_size(rows)):
        begin, end = matched(first, place, key, offset, left, right, valid, geo)
        offset = win.next_offset(offset, rows)
        total += end - begin
    tl.store(further + place, tl.maximum(total - 1, 0) // share, mask=valid)


@triton.jit
def collect_kernel(
    w, above, grads, lists, MODE: tl.constexpr, BLOCK_Q: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """One share of the pairs of one key, BLOCK_Q at a time: a further one, or the FIRST, and then the sum of all."""
    queries, keys = points(w.geo.q).to(tl.int64), points(w.geo.k)
    number, every = tl.program_id(0).to(tl.int64), tl.cast(lists.key_rows, tl.int64) * keys
    place = number if FIRST else tl.load(lists.owner + number)
    exists = place < every
    others = tl.load(lists.further + place, mask=exists, other=0)
    start = tl.load(lists.ends + place, mask=exists, other=0) - others
    key, lane = (place % keys).to(tl.int32), tl.arange(0, BLOCK_Q)
    one, own = tl.arange(0, 1) + number, tl.arange(0, 1) + place < every
    mine = features(w.k, one - number + place, own, ROW)
    value = features(w.v, one - number + place, own, VROW)
    k_sum, v_sum = win.zeros(BLOCK_Q, ROW), win.zeros(BLOCK_Q, VROW)
    left, right, rows = sides(key, w.reach, w.geo)
    offset = win.first_offset(rows)
    skip = place * 0 if FIRST else (number - start + 1) * lists.share  # pairs of this key in other shares
    for _ in range(tl.where(exists, win.window_size(rows), 0)):
        begin, end = matched(lists.first, place, key, offset, left, right, exists, w.geo)
        offset = win.next_offset(offset, rows)
        stop = tl.minimum(end, tl.maximum(begin + skip + lists.share, begin))
        at, skip = begin + tl.maximum(skip, 0), skip - (end - begin)
        for t in range(((stop - at + BLOCK_Q - 1) // BLOCK_Q).to(tl.int32)):
            ok = at + t * BLOCK_Q + lane < stop
            entry = tl.load(lists.order + at + t * BLOCK_Q + lane, mask=ok, other=0)
            point, e = entry // w.kappa, entry % w.kappa
            row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
            here = query * 0 + key
            if MODE.CAUSAL:
                ok = ok & (key <= query)
            ok = win.unmasked(key, ok, (row // w.masked.heads).to(tl.int64), w)
            if MODE.SEVERAL:
                for before in range(w.kappa - 1):
                    earlier = tl.load(w.index + point * w.kappa + before, mask=ok & (before < e), other=-1)
                    there = (earlier >= 0) & (earlier < keys)
                    ok = ok & ~(there & near(here, tl.where(there, earlier, 0), w.reach, w.geo))
            theirs = features(w.q, point, ok, ROW)
            grad_out = features(above.grad_out, point, ok, VROW)
            lse = tl.load(above.lse + point, mask=ok, other=0.0)
            inv_sum = tl.load(above.sums + point * 2, mask=ok, other=0.0)
            delta = tl.load(above.sums + point * 2 + 1, mask=ok, other=0.0)
            noise = absorb(row_state(w.seed, row), query)
            s, dp = dot(theirs, mine) * w.scale, dot(grad_out, value)
            p, ds = win.pair_gradient(s, dp, ok, lse, inv_sum, delta, here, noise, w, MODE.WEIGHT, MODE.DROPOUT)
            k_sum = win.add(k_sum, ds * w.scale, theirs)
            v_sum = win.add(v_sum, p, grad_out)
    if FIRST:
        for t in range(((others + BLOCK_Q - 1) // BLOCK_Q).to(tl.int32)):
            part, ok = start + t * BLOCK_Q + lane, t * BLOCK_Q + lane < others
            k_sum = win.add(k_sum, ok.to(tl.float32), features(lists.k_parts, part, ok, ROW))
            v_sum = win.add(v_sum, ok.to(tl.float32), features(lists.v_parts, part, ok, VROW))
    put(grads.k if FIRST else lists.k_parts, one, sum_queries(k_sum), own, ROW)
    put(grads.v if FIRST else lists.v_parts, one, sum_queries(v_sum), own, VROW)


@triton.jit
def sum_queries(sums):
    """[BLOCK_Q, W] -> [1, W]."""
    whole = ()
    for n in tl.static_range(len(sums)):
        whole += (tl.sum(sums[n], axis=0)[None, :],)
    return whole
