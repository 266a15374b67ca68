"""Metropolis-Hastings walks in Triton: a lane is a query, whose walks follow each other; all lanes step together."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..noise import absorb, below, row_state
from ..primitives import dot, load_float32, points, unmasked
from .draw import place_on, step_of


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
def walk_kernel(proposal, chunk, walks, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, E: tl.constexpr):
    """The keys of a chunk, -1 without a mode, and the diagnostics of its points."""
    geo = proposal.geo
    queries = points(geo.q)
    keys = points(geo.k)
    samples = proposal.samples
    burn_in = walks.burn_in
    scale = walks.scale
    lane = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BQ]
    exists = lane < chunk.size
    point = chunk.begin + lane.to(tl.int64)  # [BQ]
    row = (point // queries).to(tl.int32)  # [BQ]
    query = (point % queries).to(tl.int32)  # [BQ]
    mask_row = (row // proposal.masked.group).to(tl.int64)  # [BQ]
    first_key = (row // walks.group).to(tl.int64) * keys  # [BQ]
    q_block = load_float32(walks.q, point, exists, E)  # [BQ, E]
    prefix = absorb(row_state(proposal.seed, row), query)  # [BQ]
    chains = tl.minimum(tl.load(proposal.count + point, mask=exists, other=0) * walks.chains_per_mode, samples)  # [BQ]
    shortest = samples // tl.maximum(chains, 1)
    longer = samples % tl.maximum(chains, 1)
    half = samples // 2
    length = tl.where(chains > 1, shortest, half)  # [BQ]

    chain = lane * 0  # [BQ], like all below
    done = lane * 0
    counted = lane * 0
    accepted = lane * 0
    key = lane * 0
    a = tl.zeros([BLOCK_Q], tl.float32)
    # Of the part at hand: its states so far, their mean and sum of squares; of the parts before: Welford's sums again.
    states = lane * 0
    mean = a
    inner = a
    parts = lane * 0
    within = a
    middle = a
    spread = a
    first = a
    agree = a == a
    for _ in range(walks.rounds):
        active = exists & (counted < samples) & (chains > 0)
        begins = active & (done == 0)
        start = tl.load(proposal.modes + point * proposal.kappa + chain // walks.chains_per_mode, mask=begins, other=0)
        key = tl.where(begins, start, key)
        a = tl.where(begins, dot(q_block, load_float32(walks.k, first_key + key, begins, E)) * scale, a)
        noise = absorb(absorb(prefix, chain), done)
        target_key = lane * 0
        ok = active
        for axis in tl.static_range(len(geo.k)):
            bits = absorb(noise, lane * 0 + axis)
            target = below(bits, tl.load(proposal.table + proposal.steps))
            place = place_on(key, axis, geo) + step_of(proposal.table, target, proposal.steps)
            ok = ok & (place >= 0) & (place < geo.k[axis])
            target_key = target_key * geo.k[axis] + place
        ok = ok & (target_key != key)
        if CAUSAL:
            ok = ok & (target_key <= query)
        target_key = tl.where(ok, target_key, 0)
        ok = unmasked(target_key, ok, mask_row, proposal.masked, geo)
        b = dot(q_block, load_float32(walks.k, first_key + target_key, ok, E)) * scale
        u = (absorb(noise, lane * 0 + len(geo.k)).to(tl.float32) + 0.5) / 4294967296.0
        take = ok & ((b >= a) | (u < tl.exp(tl.minimum(b - a, 0.0))))
        key = tl.where(take, target_key, key)
        a = tl.where(take, b, a)
        counts = active & (done >= burn_in)
        tl.store(chunk.keys + lane.to(tl.int64) * samples + counted, key, mask=counts)
        accepted += (take & counts).to(tl.int32)

        step = done - burn_in
        in_part = counts & ((step < length) | ((chains == 1) & (step >= samples - half)))
        states += in_part.to(tl.int32)
        gap = a - mean
        mean = tl.where(in_part, mean + gap / tl.maximum(states, 1).to(tl.float32), mean)
        inner = tl.where(in_part, inner + gap * (a - mean), inner)
        closes = in_part & (states == length)
        parts += closes.to(tl.int32)
        within = tl.where(closes, within + inner / tl.maximum(length - 1, 1).to(tl.float32), within)
        gap = mean - middle
        middle = tl.where(closes, middle + gap / tl.maximum(parts, 1).to(tl.float32), middle)
        spread = tl.where(closes, spread + gap * (mean - middle), spread)
        first = tl.where(closes & (parts == 1), mean, first)
        agree = agree & (~closes | (mean == first))
        states = tl.where(closes, 0, states)
        mean = tl.where(closes, 0.0, mean)
        inner = tl.where(closes, 0.0, inner)

        counted += counts.to(tl.int32)
        done += active.to(tl.int32)
        ended = active & (done == burn_in + shortest + (chain < longer).to(tl.int32))
        chain = chain + ended.to(tl.int32)
        done = tl.where(ended, 0, done)

    n = tl.maximum(length, 1).to(tl.float32)
    number = tl.maximum(parts, 2).to(tl.float32)
    w = within / number
    known = tl.sqrt(((n - 1) / n * w + spread / (number - 1)) / tl.where(w == 0, 1.0, w))
    rhat = tl.where(w == 0, tl.where(agree, 1.0, float("inf")), known)
    tl.store(walks.rhat + point, tl.where((chains > 0) & (length > 0), rhat, float("inf")), mask=exists)
    tl.store(walks.acceptance + point, accepted.to(tl.float32) / samples, mask=exists)
    for t in range(samples):
        tl.store(chunk.keys + lane.to(tl.int64) * samples + t, lane * 0 - 1, mask=exists & (chains == 0))
