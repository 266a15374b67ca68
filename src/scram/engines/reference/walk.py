"""Metropolis-Hastings: walks from the modes, one after the other in a query's samples; all queries step together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import SampleCall
from ...spec.grid import AllowedKeys, coordinates, flat, grid_of, inside, key_row, rows
from ...spec.noise import below, noise, numbered
from ...spec.scoring import accumulator, pair_score
from .visited import Visit, Visited


def walks_of(call: SampleCall) -> Visit:
    """The keys that points walk to, with acceptance and rhat.

    The noise of a step is noise(seed, row, query, chain, step, draw): draw axis is the move, draw rank accepts it.
    """
    q = call.q
    k = call.k
    modes = call.modes
    seed = call.seed
    samples = call.samples
    burn_in = call.burn_in
    chains_per_mode = call.chains_per_mode
    table = call.table.long()
    allowed = AllowedKeys.of(q, k, call.causal, call.key_mask)
    key_grid = grid_of(k)
    queries = math.prod(grid_of(q))
    keys = math.prod(grid_of(k))
    flat_modes = modes.reshape(-1, modes.shape[-1]).long()
    flat_count = call.count.reshape(-1).long()
    q_points = rows(q).flatten(0, 1)
    k_points = rows(k).flatten(0, 1)
    wide = accumulator(call.v.dtype)
    reach = len(table) // 2 - 1
    most = min(modes.shape[-1] * chains_per_mode, samples)

    def visit(at: Tensor) -> Visited:
        row = at // queries  # [C]
        query = at % queries  # [C]
        number = numbered(row, call.rows)
        source = key_row(row, q.shape[1], k.shape[1]) * keys
        q_own = q_points[at]  # [C, E]
        chains = (flat_count[at] * chains_per_mode).clamp(max=samples)
        shortest = samples // chains.clamp(min=1)
        longer = samples % chains.clamp(min=1)

        def score_of(key: Tensor) -> Tensor:
            return call.scale * pair_score(q_own, k_points[source + key], call.score).to(wide)

        chain = torch.zeros_like(at)
        done = torch.zeros_like(at)
        filled = torch.zeros_like(at)  # samples so far
        state = torch.zeros_like(at)
        a = torch.zeros(at.shape, dtype=wide, device=at.device)
        visited = torch.zeros(
            (len(at), samples + 1), dtype=torch.int64, device=at.device
        )  # the last takes what does not count
        scores = torch.zeros(len(at), samples + 1, dtype=wide, device=at.device)
        accepted = torch.zeros_like(at)
        for _ in range(samples + burn_in * most):
            active = (filled < samples) & (chains > 0)
            begins = active & (done == 0)
            start = flat_modes[at, (chain // chains_per_mode).clamp(max=modes.shape[-1] - 1)]
            state = torch.where(begins, start.clamp(0, keys - 1), state)
            a = torch.where(begins, score_of(state), a)
            place = coordinates(state, key_grid)
            to = []
            for axis, c in enumerate(place):
                bits = noise(seed, number, query, chain, done, axis)
                to.append(c + torch.searchsorted(table, below(bits, table[-1]), right=True) - 1 - reach)
            on_grid = inside(to, key_grid)
            key = torch.where(on_grid, flat(to, key_grid), state)
            move = on_grid & (key != state) & allowed.allows(row, query, key)
            b = score_of(key)
            u = (noise(seed, number, query, chain, done, len(key_grid)).to(wide) + 0.5) / 2**32
            take = active & move & ((b >= a) | (u < (b - a).exp()))
            state = torch.where(take, key, state)
            a = torch.where(take, b, a)
            counted = active & (done >= burn_in)
            slot = torch.where(counted, filled, samples).unsqueeze(-1)
            visited.scatter_(1, slot, state.unsqueeze(-1))
            scores.scatter_(1, slot, a.unsqueeze(-1))
            accepted = accepted + (take & counted)
            filled = filled + counted
            done = done + active
            ends = done == burn_in + shortest + (chain < longer)
            chain = chain + ends
            done = torch.where(ends, 0, done)
        some = (chains > 0).unsqueeze(-1)
        zero = torch.zeros(some.shape, dtype=wide, device=some.device)
        log_weight = zero.masked_fill(~some, -torch.inf).expand(-1, samples)
        return visited[:, :samples], log_weight, (accepted.to(wide) / samples, rhat(scores[:, :samples], chains, most))

    return visit


def rhat(scores: Tensor, chains: Tensor, most: int) -> Tensor:
    """Gelman and Rubin's statistic of the scores [C, T] of `chains` [C] walks, at most `most`, one after the other.

    Walks are cut to the shortest; a single one is cut into halves.
    """
    samples = scores.shape[1]
    slot = torch.arange(samples, device=scores.device)
    number = chains.clamp(min=1).unsqueeze(-1)
    shortest = samples // number
    longer = samples % number
    ahead = longer * (shortest + 1)
    walk = torch.where(slot < ahead, slot // (shortest + 1), longer + (slot - ahead) // shortest)
    step = slot - walk * shortest - walk.clamp(max=longer)
    half = samples // 2
    length = torch.where(number > 1, shortest, half)
    walk = torch.where(number > 1, walk, (slot >= samples - half).long())
    kept = torch.where(number > 1, step < shortest, (slot < half) | (slot >= samples - half))
    parts = torch.where(number > 1, number, 2)
    everyone = torch.arange(max(most, 2), device=scores.device)
    exists = everyone < parts
    own = ((walk.unsqueeze(-1) == everyone) & kept.unsqueeze(-1)).to(scores.dtype)  # [C, T, walks]
    starts = torch.where(number > 1, everyone * shortest + everyone.clamp(max=longer), everyone * (samples - half))
    # Measured from where each walk stands first, so that one that never moves has a variance of exactly 0.
    origin = scores.gather(1, torch.where(exists, starts, 0).clamp(max=samples - 1))
    away = (scores.unsqueeze(-1) - origin.unsqueeze(1)) * own  # [C, T, walks]
    mean = away.sum(1) / length.clamp(min=1)  # [C, walks]
    inner = ((away - mean.unsqueeze(1)) * own).square().sum(1) / (length - 1).clamp(min=1)
    mean = mean + origin
    w = (inner * exists).sum(-1) / parts.squeeze(-1)
    center = (mean * exists).sum(-1, keepdim=True) / parts
    between = ((mean - center) * exists).square().sum(-1) / (parts.squeeze(-1) - 1)
    n = length.squeeze(-1).clamp(min=1).to(scores.dtype)
    r = (((n - 1) / n * w + between) / w).sqrt()
    apart = ((mean - mean[:, :1]) * exists != 0).any(-1)
    agree = torch.ones_like(r).masked_fill(apart, torch.inf)
    r = torch.where(w == 0, agree, r)
    return torch.where((chains > 0) & (length.squeeze(-1) > 0), r, torch.inf)
