"""The nearest center of every key, in Triton: a product with the forms of all centers, and its argmax.

A program holds the forms of a group of centers and reads keys, the next ones while it multiplies. Groups of a key meet
in one number of 64 bits, the score above the cluster: its maximum is the same in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..noise import absorb, row_state
from ..primitives import WIDEN, for_product, load_padded, load_pieces, product
from .forms import ABSENT
from .space import value_weight

NONE = -(1 << 63)  # of a key without a cluster
LAST = tl.constexpr(0x7FFFFFFF)


class AssignConfig(NamedTuple):
    """What `assign_kernel` is compiled for."""

    BLOCK_S: int  # keys
    BLOCK_C: int  # clusters of a group
    AHEAD: bool  # whether keys are loaded while others are multiplied


@triton.jit
def load_keys(source, row, at, E: tl.constexpr, F: tl.constexpr):
    """Keys and values in pieces; behind the last one it comes up again: what is loaded has no mask."""
    place = tl.minimum(at, source.keys - 1)  # [BK]
    exists = place >= 0  # [BK]
    k_block = load_pieces(source.k + row * source.keys * E.SIZE, place, exists, E)  # [BK, E]
    v_block = load_pieces(source.v + row * source.keys * F.SIZE, place, exists, F)  # [BK, F]
    return k_block, v_block


@triton.jit
def largest(s):
    """The largest number of each row but NaN; the interpreter warns of rows that have no other."""
    return tl.max(tl.where(s == s, s, -float("inf")) if WIDEN else s, 1)


@triton.jit
def assign_kernel(source, forms, best, splits, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """`best` int64 [R, M]: the largest of what it was and the score and cluster of each key; the lower of two clusters
    that are as near. No key that is not finite has a score. Program (row, split of the keys, group of clusters)."""
    groups = forms.padded // CONFIG.BLOCK_C
    group = tl.program_id(0) % groups
    rest = tl.program_id(0) // groups
    split = rest % splits
    row = (rest // splits).to(tl.int64)
    each = (source.keys + CONFIG.BLOCK_S * splits - 1) // (CONFIG.BLOCK_S * splits) * CONFIG.BLOCK_S
    first = split * each
    last = tl.minimum(first + each, source.keys)
    name = group * CONFIG.BLOCK_C + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    slot = row * forms.padded + name  # [BC]
    a = ()
    b = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        a += (tl.trans(for_product(load_padded(forms.a, slot, n, E))),)  # [E, BC]
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        b += (tl.trans(for_product(load_padded(forms.b, slot, n, F))),)  # [F, BC]
    bias = tl.load(forms.bias + slot)  # [BC]
    k_block, v_block = load_keys(source, row, first + tl.arange(0, CONFIG.BLOCK_S), E, F)
    for begin in range(first, last, CONFIG.BLOCK_S):
        at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
        if CONFIG.AHEAD:
            k_next, v_next = load_keys(source, row, at + CONFIG.BLOCK_S, E, F)
        else:
            k_block, v_block = load_keys(source, row, at, E, F)
        s = tl.zeros([CONFIG.BLOCK_S, CONFIG.BLOCK_C], tl.float32)  # [BK, BC]
        for n in tl.static_range(len(k_block)):
            s = product(for_product(k_block[n]), a[n], s)
        by_values = s * 0.0 if forms.units is not None else s  # [BK, BC]
        for n in tl.static_range(len(v_block)):
            by_values = product(for_product(v_block[n]), b[n], by_values)
        if forms.units is not None:
            s = s * tl.load(forms.units + row * 2) + by_values * tl.load(forms.units + row * 2 + 1)
        else:
            s = by_values
        s += bias[None, :]
        score = largest(s)  # [BK]
        nearest = tl.min(tl.where(s == score[:, None], name[None, :], LAST), 1)  # [BK]
        bits = score.to(tl.int32, bitcast=True)  # [BK]
        bits = bits ^ ((bits >> 31) & LAST)  # in the order of the scores
        both = (bits.to(tl.int64) << 32) | (nearest ^ LAST).to(tl.int64)  # [BK]
        counts = (at < last) & (score > ABSENT / 2) & (score < float("inf"))  # [BK]
        tl.atomic_max(best + row * source.keys + at, both, mask=counts, sem="relaxed")
        if CONFIG.AHEAD:
            k_block = k_next
            v_block = v_next


class FarConfig(NamedTuple):
    """What `far_kernel` is compiled for."""

    BLOCK_S: int  # keys
    PLACES: int  # far keys of each block


@triton.jit
def far_kernel(
    some,
    forms,
    label,
    starting,
    far,
    draws,
    space,
    step,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Some keys of a block that are far from their centers, drawn by their squared distances, where a cluster is empty.

    `far` int32 [R, PLACES, blocks], -1 for none. Program (row, block).
    """
    blocks = (some.keys + CONFIG.BLOCK_S - 1) // CONFIG.BLOCK_S
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    empty = tl.zeros([256], tl.int32)  # [256]
    start_row = starting + row * (forms.count + 1)
    for begin in range(0, forms.count, 256):
        c = begin + tl.arange(0, 256)  # [256]
        inside = c < forms.count
        start = tl.load(start_row + c, mask=inside, other=0)  # [256]
        empty += (inside & (tl.load(start_row + c + 1, mask=inside, other=0) == start)).to(tl.int32)
    if tl.sum(empty, 0) > 0:
        at = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
        name = tl.load(label + row * some.keys + at, mask=at < some.keys, other=-1)  # [BK]
        exists = name >= 0
        k_block = load_pieces(some.k + row * some.keys * E.SIZE, at, exists, E)  # [BK, E]
        v_block = load_pieces(some.v + row * some.keys * F.SIZE, at, exists, F)  # [BK, F]
        slot = row * forms.padded + tl.maximum(name, 0)  # [BK]
        weight, least = value_weight(space, row)
        distance = squared_distance(k_block, v_block, exists, slot, row, weight, forms, space, CONFIG, E, F)  # [BK]
        # The first of clocks that ring at random times, at rates that are the distances.
        noise = absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), 4 + step)
        share = ((absorb(noise, at) >> 8).to(tl.float32) + 0.5) / 16777216.0  # [BK]
        candidate = exists & (distance > least)
        clock = tl.where(candidate, -tl.log(share) / tl.where(candidate, distance, 1.0), float("inf"))  # [BK]
        for n in range(CONFIG.PLACES):
            soonest = tl.min(clock, 0)
            chosen = tl.min(tl.where(clock == soonest, at, LAST), 0)
            place = far + (row * CONFIG.PLACES + n) * blocks + block
            tl.store(place, tl.where(soonest < float("inf"), chosen, -1))
            clock = tl.where(at == chosen, float("inf"), clock)


@triton.jit
def squared_distance(
    k_block,
    v_block,
    exists,
    slot,
    row,
    weight,
    forms,
    space,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The squared distance [BK] of each key from the center at its slot; its metric to the digits of bfloat16."""
    width = E.BLOCK * E.PIECES
    value_width = F.BLOCK * F.PIECES
    distance = tl.zeros([CONFIG.BLOCK_S], tl.float32)  # [BK]
    apart = ()
    for n in tl.static_range(len(k_block)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        center = tl.load(forms.k + slot[:, None] * width + e[None, :])  # [BK, E]
        apart += (tl.where(exists[:, None], k_block[n].to(tl.float32) - center, 0.0),)
    for n in tl.static_range(len(k_block)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        acc = tl.zeros([CONFIG.BLOCK_S, E.BLOCK], tl.float32)  # [BK, E]
        for m in tl.static_range(len(k_block)):
            i = m * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
            metric = tl.load(space.metric + (row * width + i)[:, None] * width + e[None, :])  # [E, E]
            rough = apart[m].to(tl.bfloat16)  # [BK, E]
            rough_metric = metric.to(tl.bfloat16)  # [E, E]
            acc = tl.dot(for_product(rough), for_product(rough_metric), acc)
        distance += tl.sum(acc * apart[n], 1)
    for n in tl.static_range(len(v_block)):
        f = n * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        value = tl.load(forms.v + slot[:, None] * value_width + f[None, :])  # [BK, F]
        value_apart = tl.where(exists[:, None], v_block[n].to(tl.float32) - value, 0.0)  # [BK, F]
        distance += weight * tl.sum(value_apart * value_apart, 1)
    return distance
