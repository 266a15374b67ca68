"""Metropolis-Hastings walks in Triton: a lane is a query, whose walks follow each other; all lanes step together."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..attend.windows import unmasked
from ..noise import absorb, below, row_state
from ..primitives import dot, features, points
from ..sample.draw import find, place_of


class Walks(NamedTuple):
    """What a walk needs besides the proposal: its target, its length, and where its diagnostics go."""

    q: Tensor  # [B, H, *G, E]
    k: Tensor  # [B, Hk, *G', E]
    acceptance: Tensor  # float32 [B, H, *G]
    rhat: Tensor  # float32 [B, H, *G]
    group: int  # rows of queries that share a row of keys
    chains_per_mode: int
    burn_in: int
    rounds: int  # steps of the longest walk
    scale: float


@triton.jit
def walk_kernel(x, chunk, walks, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, ROW: tl.constexpr):
    """The keys of a chunk, -1 without a mode, and the diagnostics of its points."""
    queries, keys, geo = points(x.geo.q), points(x.geo.k), x.geo
    samples, burn_in, scale, k = x.samples, walks.burn_in, walks.scale, walks.k
    lane = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = lane < chunk.size
    point = chunk.begin + lane.to(tl.int64)
    row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
    mask_row, source = (row // x.masked.heads).to(tl.int64), (row // walks.group).to(tl.int64) * keys
    mine = features(walks.q, point, valid, ROW)
    prefix = absorb(row_state(x.seed, row), query)
    chains = tl.minimum(tl.load(x.count + point, mask=valid, other=0) * walks.chains_per_mode, samples)
    shortest, longer = samples // tl.maximum(chains, 1), samples % tl.maximum(chains, 1)
    half = samples // 2
    length = tl.where(chains > 1, shortest, half)

    chain, done, made, accepted, key = lane * 0, lane * 0, lane * 0, lane * 0, lane * 0
    a = tl.zeros([BLOCK_Q], tl.float32)
    # Of the part at hand: its states so far, their mean and sum of squares; of the parts before: Welford's sums again.
    states, mean, inner = lane * 0, a, a
    parts, within, middle, spread, first, agree = lane * 0, a, a, a, a, a == a
    for _ in range(walks.rounds):
        active = valid & (made < samples) & (chains > 0)
        begins = active & (done == 0)
        start = tl.load(x.modes + point * x.kappa + chain // walks.chains_per_mode, mask=begins, other=0)
        key = tl.where(begins, start, key)
        a = tl.where(begins, dot(mine, features(k, source + key, begins, ROW)) * scale, a)
        noise = absorb(absorb(prefix, chain), done)
        to, there = lane * 0, active
        for axis in tl.static_range(len(geo.k)):
            bits = absorb(noise, lane * 0 + axis)
            target = below(bits, tl.load(x.table + x.steps))
            place = place_of(key, axis, geo) + find(x.table, target, x.steps)
            there = there & (place >= 0) & (place < geo.k[axis])
            to = to * geo.k[axis] + place
        there = there & (to != key)
        if CAUSAL:
            there = there & (to <= query)
        to = tl.where(there, to, 0)
        there = unmasked(to, there, mask_row, x)
        b = dot(mine, features(k, source + to, there, ROW)) * scale
        u = (absorb(noise, lane * 0 + len(geo.k)).to(tl.float32) + 0.5) / 4294967296.0
        take = there & ((b >= a) | (u < tl.exp(tl.minimum(b - a, 0.0))))
        key, a = tl.where(take, to, key), tl.where(take, b, a)
        counted = active & (done >= burn_in)
        tl.store(chunk.keys + lane.to(tl.int64) * samples + made, key, mask=counted)
        accepted += (take & counted).to(tl.int32)

        step = done - burn_in
        own = counted & ((step < length) | ((chains == 1) & (step >= samples - half)))
        states += own.to(tl.int32)
        gap = a - mean
        mean = tl.where(own, mean + gap / tl.maximum(states, 1).to(tl.float32), mean)
        inner = tl.where(own, inner + gap * (a - mean), inner)
        closes = own & (states == length)
        parts += closes.to(tl.int32)
        within = tl.where(closes, within + inner / tl.maximum(length - 1, 1).to(tl.float32), within)
        gap = mean - middle
        middle = tl.where(closes, middle + gap / tl.maximum(parts, 1).to(tl.float32), middle)
        spread = tl.where(closes, spread + gap * (mean - middle), spread)
        first = tl.where(closes & (parts == 1), mean, first)
        agree = agree & (~closes | (mean == first))
        states, mean, inner = tl.where(closes, 0, states), tl.where(closes, 0.0, mean), tl.where(closes, 0.0, inner)

        made += counted.to(tl.int32)
        done += active.to(tl.int32)
        ended = active & (done == burn_in + shortest + (chain < longer).to(tl.int32))
        chain, done = chain + ended.to(tl.int32), tl.where(ended, 0, done)

    n, number = tl.maximum(length, 1).to(tl.float32), tl.maximum(parts, 2).to(tl.float32)
    w = within / number
    known = tl.sqrt(((n - 1) / n * w + spread / (number - 1)) / tl.where(w == 0, 1.0, w))
    r = tl.where(w == 0, tl.where(agree, 1.0, float("inf")), known)
    tl.store(walks.rhat + point, tl.where((chains > 0) & (length > 0), r, float("inf")), mask=valid)
    tl.store(walks.acceptance + point, accepted.to(tl.float32) / samples, mask=valid)
    for t in range(samples):
        tl.store(chunk.keys + lane.to(tl.int64) * samples + t, lane * 0 - 1, mask=valid & (chains == 0))
