"""Metropolis-Hastings walks in Triton: a lane is a query, whose walks follow each other; all lanes step together."""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from .draw import SETTINGS, find, place_of
from .grid import dot, features, points
from .noise import absorb, below, row_state


@triton.jit(do_not_specialize=[*SETTINGS, "chains_per_mode", "burn_in", "rounds"])
def walk_kernel(
    modes, count, total, order, mask, table, SEED, low, high, mask_heads, group, kappa, samples, threshold, steps,
    begin, size, q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, alpha,
    q, k, scale, chains_per_mode, burn_in, rounds, keys_out, logs_out, acceptance, rhat,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Keys [C, T] of `size` points from `begin` on, -1 without a mode; acceptance and rhat of these points."""
    QG, KG, MAGIC = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    valid = lane < size
    point = begin + lane.to(tl.int64)
    row, query = (point // queries).to(tl.int32), (point % queries).to(tl.int32)
    mask_row, source = (row // mask_heads).to(tl.int64), (row // group).to(tl.int64) * keys
    mine = features(q, point, valid, E, W, PIECES)
    prefix = absorb(row_state(SEED, low, high, row), query)
    chains = tl.minimum(tl.load(count + point, mask=valid, other=0) * chains_per_mode, samples)
    shortest, longer = samples // tl.maximum(chains, 1), samples % tl.maximum(chains, 1)
    half = samples // 2
    length = tl.where(chains > 1, shortest, half)

    chain, done, made, accepted, key = lane * 0, lane * 0, lane * 0, lane * 0, lane * 0
    a = tl.zeros([LANES], tl.float32)
    # Of the part at hand: its states so far, their mean and sum of squares; of the parts before: Welford's sums again.
    states, mean, inner = lane * 0, a, a
    parts, within, middle, spread, first, agree = lane * 0, a, a, a, a, a == a
    for _ in range(rounds):
        active = valid & (made < samples) & (chains > 0)
        begins = active & (done == 0)
        start = tl.load(modes + point * kappa + chain // chains_per_mode, mask=begins, other=0)
        key = tl.where(begins, start, key)
        a = tl.where(begins, dot(mine, features(k, source + key, begins, E, W, PIECES), PIECES) * scale, a)
        noise = absorb(absorb(prefix, chain), done)
        to, there = lane * 0, active
        for axis in tl.static_range(RANK):
            bits = absorb(noise, lane * 0 + axis)
            place = place_of(key, axis, KG, MAGIC, RANK) + find(table, below(bits, tl.load(table + steps)), steps)
            there = there & (place >= 0) & (place < KG[axis])
            to = to * KG[axis] + place
        there = there & (to != key)
        if CAUSAL:
            there = there & (to <= query)
        to = tl.where(there, to, 0)
        if mask is not None:
            there = there & (tl.load(mask + mask_row * keys + to, mask=there, other=0) != 0)
        b = dot(mine, features(k, source + to, there, E, W, PIECES), PIECES) * scale
        u = (absorb(noise, lane * 0 + RANK).to(tl.float32) + 0.5) / 4294967296.0
        take = there & ((b >= a) | (u < tl.exp(tl.minimum(b - a, 0.0))))
        key, a = tl.where(take, to, key), tl.where(take, b, a)
        counted = active & (done >= burn_in)
        tl.store(keys_out + lane.to(tl.int64) * samples + made, key, mask=counted)
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
        over = active & (done == burn_in + shortest + (chain < longer).to(tl.int32))
        chain, done = chain + over.to(tl.int32), tl.where(over, 0, done)

    n, number = tl.maximum(length, 1).to(tl.float32), tl.maximum(parts, 2).to(tl.float32)
    w = within / number
    known = tl.sqrt(((n - 1) / n * w + spread / (number - 1)) / tl.where(w == 0, 1.0, w))
    r = tl.where(w == 0, tl.where(agree, 1.0, float("inf")), known)
    tl.store(rhat + point, tl.where((chains > 0) & (length > 0), r, float("inf")), mask=valid)
    tl.store(acceptance + point, accepted.to(tl.float32) / samples, mask=valid)
    for t in range(samples):
        tl.store(keys_out + lane.to(tl.int64) * samples + t, lane * 0 - 1, mask=valid & (chains == 0))
