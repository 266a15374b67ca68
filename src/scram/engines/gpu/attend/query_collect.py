"""Gradients of keys and values with repeatable bits: every key collects from the queries that attend it, in order.

The queries that match a key stand together in a list sorted by key, so those that match the keys of a line of its
window, along the last axis, do too. Most queries may attend one key: pairs beyond a first share are summed in further
shares, by programs of their own, and added in order. No atomics, no list of pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import AttendGrads
from ..primitives import (
    add_scaled,
    divide,
    dot,
    dropout_noise,
    first_offset,
    load_float32,
    near,
    next_offset,
    points,
    store_pieces,
    unmasked,
    unrouted,
    window_key,
    window_size,
    zero_pieces,
)
from ..runtime.block_sizes import LEAST_SHARE, collect_tile
from ..runtime.launch import Kernel
from .windows import Inputs, Upstream, Variant, pair_gradient


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


def collect(inputs: Inputs, variant: Variant, above: Upstream, grads: AttendGrads, radius: tuple[int, ...]) -> None:
    """Fill the gradients of k and v, float32."""
    windows = inputs.windows
    index = windows.index
    dk = grads.k
    rows = index.shape[0] * index.shape[1]
    key_rows = dk.shape[0] * dk.shape[1]
    keys = dk[0, 0, ..., 0].numel()
    device = index.device
    all_keys = key_rows * keys
    small = torch.int32 if all_keys < 2**31 - 1 else torch.int64  # sorted in half the time
    key_row = torch.arange(key_rows, dtype=small, device=device).repeat_interleave(rows // key_rows)
    match = index.reshape(rows, -1).to(small)
    on_grid = (match >= 0) & (match < keys)
    names = torch.where(on_grid, match + keys * key_row.unsqueeze(1), all_keys).flatten()
    names, order = names.sort(stable=True)
    first = torch.searchsorted(names, torch.arange(all_keys + 1, dtype=small, device=device))
    size = math.prod(min(2 * b + 1, extent) for b, extent in zip(radius, dk.shape[2:-1], strict=True))
    share = max(LEAST_SHARE, 8 * len(names) * size // all_keys)
    shares = len(names) * size // share  # at most, beyond the first of each key: a share for eight keys
    further = torch.empty(all_keys, dtype=torch.int64, device=device)
    counts = Kernel(share_kernel, triton.cdiv(all_keys, 128), {"BLOCK": 128, "enable_fp_fusion": True})
    counts(first, further, key_rows, share, windows.geo, windows.reach)
    ends = further.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(shares, device=device), right=True)
    k_parts, v_parts = (torch.empty((shares, width), dtype=torch.float32, device=device) for width in variant.widths)
    lists = Lists(
        order=order,
        first=first,
        further=further,
        ends=ends,
        owner=owner,
        k_parts=k_parts,
        v_parts=v_parts,
        key_rows=key_rows,
        share=share,
    )
    flags = {"CONFIG": variant.config, **collect_tile(variant.widths, variant.dtypes)}
    if shares:
        Kernel(collect_kernel, shares, {**flags, "FIRST": False})(inputs, above, grads, lists)
    Kernel(collect_kernel, all_keys, {**flags, "FIRST": True})(inputs, above, grads, lists)


@triton.jit
def sides(key, reach, geo):
    """How far the window of a key goes to both sides on the last axis, and its reach on the others."""
    last: tl.constexpr = len(geo.k) - 1
    place = key - divide(key, geo.magic[last]) * geo.k[last] if last > 0 else key
    other_reach = ()
    for a in tl.static_range(len(geo.k)):
        other_reach += (reach[a] * (a != last),)
    return tl.minimum(place, reach[last]), tl.minimum(geo.k[last] - 1 - place, reach[last]), other_reach


@triton.jit
def matched(first, place, key, offset, left, right, ok, geo):
    """Where the list of matches on a line of a key's window, along the last axis, begins and ends."""
    center, on_grid = window_key(key, offset, geo)
    at = first + place + (center - key)
    on_grid = on_grid & ok
    return tl.load(at - left, mask=on_grid, other=0), tl.load(at + right + 1, mask=on_grid, other=0)


@triton.jit
def share_kernel(first, further, key_rows, share, geo, reach, BLOCK: tl.constexpr):
    """How many shares each key has beyond its first."""
    keys = points(geo.k)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = place < tl.cast(key_rows, tl.int64) * keys
    key = (place % keys).to(tl.int32)  # [BLOCK]
    left, right, other_reach = sides(key, reach, geo)
    offset = first_offset(other_reach)
    total = place * 0  # [BLOCK]
    for _ in range(window_size(other_reach)):
        begin, end = matched(first, place, key, offset, left, right, exists, geo)
        offset = next_offset(offset, other_reach)
        total += end - begin
    tl.store(further + place, tl.maximum(total - 1, 0) // share, mask=exists)


@triton.jit
def collect_kernel(
    inputs,
    above,
    grads,
    lists,
    CONFIG: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One share of the pairs of one key, BLOCK_Q at a time: a further one, or the FIRST, and then the sum of all."""
    windows = inputs.windows
    queries = points(windows.geo.q).to(tl.int64)
    keys = points(windows.geo.k)
    number = tl.program_id(0).to(tl.int64)
    all_keys = tl.cast(lists.key_rows, tl.int64) * keys
    place = number if FIRST else tl.load(lists.owner + number)
    exists = place < all_keys
    others = tl.load(lists.further + place, mask=exists, other=0)
    start = tl.load(lists.ends + place, mask=exists, other=0) - others
    key = (place % keys).to(tl.int32)
    lane = tl.arange(0, BLOCK_Q)  # [BQ]
    slot = tl.arange(0, 1) + number  # [1]
    slot_exists = tl.arange(0, 1) + place < all_keys  # [1]
    k_block = load_float32(inputs.k, slot - number + place, slot_exists, E)  # [1, E]
    v_block = load_float32(inputs.v, slot - number + place, slot_exists, F)  # [1, F]
    dk = zero_pieces(BLOCK_Q, E)  # [BQ, E]
    dv = zero_pieces(BLOCK_Q, F)  # [BQ, F]
    left, right, other_reach = sides(key, windows.reach, windows.geo)
    offset = first_offset(other_reach)
    skip = place * 0 if FIRST else (number - start + 1) * lists.share  # pairs of this key in other shares
    for _ in range(tl.where(exists, window_size(other_reach), 0)):
        begin, end = matched(lists.first, place, key, offset, left, right, exists, windows.geo)
        offset = next_offset(offset, other_reach)
        stop = tl.minimum(end, tl.maximum(begin + skip + lists.share, begin))
        at = begin + tl.maximum(skip, 0)
        skip = skip - (end - begin)
        for t in range(((stop - at + BLOCK_Q - 1) // BLOCK_Q).to(tl.int32)):
            ok = at + t * BLOCK_Q + lane < stop  # [BQ]
            entry = tl.load(lists.order + at + t * BLOCK_Q + lane, mask=ok, other=0)  # [BQ]
            point = entry // windows.kappa  # [BQ]
            e = entry % windows.kappa  # [BQ]
            row = (point // queries).to(tl.int32)  # [BQ]
            query = (point % queries).to(tl.int32)  # [BQ]
            name = query * 0 + key  # [BQ]
            if CONFIG.CAUSAL:
                ok = ok & (key <= query)
            ok = unmasked(key, ok, (row // windows.masked.group).to(tl.int64), windows.masked, windows.geo)
            ok = unrouted(key, ok, row, query, windows.routed, windows.geo)
            if CONFIG.SEVERAL:
                for before in range(windows.kappa - 1):
                    earlier = tl.load(windows.index + point * windows.kappa + before, mask=ok & (before < e), other=-1)
                    on_grid = (earlier >= 0) & (earlier < keys)
                    ok = ok & ~(on_grid & near(name, tl.where(on_grid, earlier, 0), windows.reach, windows.geo))
            q_block = load_float32(inputs.q, point, ok, E)  # [BQ, E]
            grad_out = load_float32(above.grad_out, point, ok, F)  # [BQ, F]
            lse = tl.load(above.lse + point, mask=ok, other=0.0)  # [BQ]
            inv_sum = tl.load(above.sums + point * 2, mask=ok, other=0.0)  # [BQ]
            delta = tl.load(above.sums + point * 2 + 1, mask=ok, other=0.0)  # [BQ]
            noise = dropout_noise(inputs.dropout, row, query)  # [BQ]
            s = dot(q_block, k_block) * inputs.scale  # [BQ]
            dp = dot(grad_out, v_block)  # [BQ]
            p, ds = pair_gradient(
                s, dp, ok, lse, inv_sum, delta, name, noise, inputs.dropout, CONFIG.WEIGHT, CONFIG.DROPOUT
            )
            dk = add_scaled(dk, ds * inputs.scale, q_block)
            dv = add_scaled(dv, p, grad_out)
    if FIRST:
        for t in range(((others + BLOCK_Q - 1) // BLOCK_Q).to(tl.int32)):
            part = start + t * BLOCK_Q + lane  # [BQ]
            ok = t * BLOCK_Q + lane < others  # [BQ]
            dk = add_scaled(dk, ok.to(tl.float32), load_float32(lists.k_parts, part, ok, E))
            dv = add_scaled(dv, ok.to(tl.float32), load_float32(lists.v_parts, part, ok, F))
    store_pieces(grads.k if FIRST else lists.k_parts, slot, sum_queries(dk), slot_exists, E)
    store_pieces(grads.v if FIRST else lists.v_parts, slot, sum_queries(dv), slot_exists, F)


@triton.jit
def sum_queries(pieces):
    """[BQ, E.BLOCK] -> [1, E.BLOCK]."""
    sums = ()
    for n in tl.static_range(len(pieces)):
        sums += (tl.sum(pieces[n], axis=0)[None, :],)
    return sums
