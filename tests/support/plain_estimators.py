"""Every draw of the estimators in plain Python, written without looking at the library's own code."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from support import plain
from support.estimates import estimated, run_estimate, tensors_of

WORD = 1 << 32


def step_weights(method, key_grid):
    """Integer weights of the steps -R..R, from the definition."""
    reach = min(math.ceil(4 * method.bandwidth), max(key_grid) - 1)
    weights = [math.exp(-0.5 * (d / method.bandwidth) ** 2) for d in range(-reach, reach + 1)]
    return {d: round(2**30 * w / sum(weights)) for d, w in zip(range(-reach, reach + 1), weights, strict=True)}


def take(weights, bits):
    """The step that the bits draw from {step: weight}."""
    target = bits * sum(weights.values()) // WORD
    for step, weight in weights.items():
        if target < weight:
            return step
        target -= weight
    raise AssertionError


def on_axis(weights, center, extent):
    return {d: w for d, w in weights.items() if 0 <= center + d < extent}


class Plain:
    """One row of a case in plain Python."""

    def __init__(self, one, row):
        self.one, self.case, self.row = one, one.case, row
        self.tensors = tensors_of(one)
        batch, head = plain.key_head(self.case, row)
        k = self.tensors.k[batch, head].double().reshape(self.case.keys, -1)
        self.v = self.tensors.v[batch, head].double().reshape(self.case.keys, -1)
        q = self.tensors.q[batch, row % self.case.heads].double().reshape(-1, k.shape[1])
        self.a = q @ k.T / k.shape[1] ** 0.5
        self.places = plain.points(self.case.keys_grid)
        index = self.tensors.matches.index[batch, row % self.case.heads]
        self.matches = [[j for j in m if 0 <= j < self.case.keys] for m in index.reshape(-1, self.case.kappa).tolist()]

    def legal(self, i):
        return [j for j in plain.allowed(self.case, self.tensors, self.row) if not self.case.causal or j <= i]

    def bits(self, *counters):
        return plain.noise(11, self.row, *counters)

    def density(self, i, j):
        """r_i(j)."""
        method, grid, modes = self.one.method, self.case.keys_grid, self.matches[i]
        weights, total = step_weights(method, grid), 0.0
        for m in modes:
            g = 1.0
            for axis, extent in enumerate(grid):
                here = on_axis(weights, self.places[m][axis], extent)
                g *= here.get(self.places[j][axis] - self.places[m][axis], 0) / sum(here.values())
            total += g / len(modes)
        alpha = method.alpha if modes else 0.0
        return alpha * total + (1 - alpha) / len(self.legal(i))

    def snis_keys(self, i):
        method, modes, legal = self.one.method, self.matches[i], self.legal(i)
        keys = []
        for t in range(method.samples):
            if modes and self.bits(i, t, 0) < int(method.alpha * WORD):
                mode = self.places[modes[self.bits(i, t, 1) * len(modes) // WORD]]
                place = []
                for axis, extent in enumerate(self.case.keys_grid):
                    steps = on_axis(step_weights(method, self.case.keys_grid), mode[axis], extent)
                    place.append(mode[axis] + take(steps, self.bits(i, t, 2 + axis)))
                keys.append(plain.flat(place, self.case.keys_grid))
            elif legal:
                keys.append(legal[self.bits(i, t, 1) * len(legal) // WORD])
        return [j for j in keys if j in legal]

    def walk_keys(self, i):
        """The states that count, and how many steps moved."""
        method, legal, grid = self.one.method, self.legal(i), self.case.keys_grid
        modes = [m for m in self.matches[i] if m in legal]
        chains = min(len(modes) * method.chains_per_mode, method.samples)
        weights, states, accepted = step_weights(method, grid), [], 0
        for chain in range(chains):
            key = modes[chain // method.chains_per_mode]
            length = method.samples // chains + (chain < method.samples % chains)
            for step in range(method.burn_in + length):
                moves = [take(weights, self.bits(i, chain, step, axis)) for axis in range(len(grid))]
                to = plain.flat([c + d for c, d in zip(self.places[key], moves, strict=True)], grid)
                u = (self.bits(i, chain, step, len(grid)) + 0.5) / WORD
                moved = to in legal and to != key and u < math.exp(min(float(self.a[i, to] - self.a[i, key]), 0.0))
                key = to if moved else key
                if step >= method.burn_in:
                    states.append(key)
                    accepted += moved
        return states, accepted


def made_by(impl, dtype, name):
    """The estimate of the row of that name, and the last row of its tensors in plain Python."""
    one = estimated(name)
    one = replace(one, case=replace(one.case, dtype=dtype))
    made = run_estimate(one, tensors_of(one), tensors_of(one).leaves(dtype), impl)
    return made, Plain(one, one.case.batch * one.case.heads - 1)


def assert_close(ours, want):
    """To rounding: of float64, or of float32 where an engine has no float64."""
    tolerance = {} if ours.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, want.to(ours.dtype), **tolerance)
