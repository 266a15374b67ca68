"""Every draw and formula of the estimators in plain Python, against every implementation."""

import math
from dataclasses import replace

import pytest
import torch

import plain
from estimates import estimated, run_estimate, tensors_of

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


def on_axis(weights, centre, extent):
    return {d: w for d, w in weights.items() if 0 <= centre + d < extent}


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


SNIS_ROWS = ["Snis-rank-2", "Snis-unequal-grids", "Snis-causal,-masked,-separated"]


@pytest.mark.parametrize("name", SNIS_ROWS)
def test_snis_in_plain_python(impl, name):
    one = replace(estimated(name), case=replace(estimated(name).case, dtype=torch.float64))
    made = run_estimate(one, tensors_of(one), tensors_of(one).leaves(torch.float64), impl)
    row = one.case.batch * one.case.heads - 1
    rule = Plain(one, row)
    out, lse, variance, ess = (x.flatten(0, 1)[row].flatten(0, x.ndim - 3 - (x.ndim == made.out.ndim)).detach()
                               for x in (made.out, made.lse, made.variance, made.ess))  # fmt: skip
    for i in range(len(plain.points(one.case.grid))):
        keys = rule.snis_keys(i)
        if not keys:
            assert out[i].eq(0).all()
            assert variance[i].eq(torch.inf).all()
            assert (float(ess[i]), float(lse[i])) == (0.0, -math.inf)
            continue
        w = torch.stack([(rule.a[i, j] - math.log(rule.density(i, j))).exp() for j in keys])
        mean = (w[:, None] * rule.v[keys]).sum(0) / w.sum()
        torch.testing.assert_close(out[i], mean)
        torch.testing.assert_close(lse[i], (w.sum() / one.method.samples).log())
        torch.testing.assert_close(variance[i], ((w / w.sum())[:, None] * (rule.v[keys] - mean)).square().sum(0))
        torch.testing.assert_close(ess[i], w.sum() ** 2 / w.square().sum())


WALK_ROWS = [
    "MetropolisHastings-rank-2",
    "MetropolisHastings-unequal-grids",
    "MetropolisHastings-causal,-masked,-separated",
]


@pytest.mark.parametrize("name", WALK_ROWS)
def test_metropolis_in_plain_python(impl, name):
    one = replace(estimated(name), case=replace(estimated(name).case, dtype=torch.float64))
    made = run_estimate(one, tensors_of(one), tensors_of(one).leaves(torch.float64), impl)
    row = one.case.batch * one.case.heads - 1
    rule = Plain(one, row)
    out = made.out.detach().flatten(0, 1)[row].flatten(0, -2)
    acceptance = made.acceptance.flatten(0, 1)[row].flatten()
    for i in range(len(out)):
        states, accepted = rule.walk_keys(i)
        if not states:
            assert out[i].eq(0).all()
            continue
        assert len(states) == one.method.samples
        torch.testing.assert_close(out[i], rule.v[states].mean(0))
        assert float(acceptance[i]) == pytest.approx(accepted / len(states))


@pytest.mark.parametrize(
    "name", ["Hybrid-rank-2", "Hybrid-causal", "Hybrid-mask-of-each-head", "Hybrid-radius-per-axis"]
)
def test_hybrid_in_plain_python(impl, name):
    one = replace(estimated(name), case=replace(estimated(name).case, dtype=torch.float64))
    made = run_estimate(one, tensors_of(one), tensors_of(one).leaves(torch.float64), impl)
    row = one.case.batch * one.case.heads - 1
    rule = Plain(one, row)
    open_keys = plain.allowed(one.case, rule.tensors, row)
    drawn = sorted(open_keys, key=lambda j: (rule.bits(j), j))[: one.method.samples]
    radius = one.case.radius if isinstance(one.case.radius, tuple) else (one.case.radius,) * len(one.case.grid)
    out, lse, variance = (x.detach().flatten(0, 1)[row] for x in (made.out, made.lse, made.variance))
    out, lse, variance = out.flatten(0, -2), lse.flatten(), variance.flatten(0, -2)
    for i in range(len(out)):
        legal = rule.legal(i)
        head = [
            j
            for j in legal
            if any(
                all(abs(x - y) <= b for x, y, b in zip(rule.places[j], rule.places[m], radius, strict=True))
                for m in rule.matches[i]
            )
        ]
        tail = [j for j in drawn if j in legal and j not in head]
        left = len(legal) - len(head)
        w = torch.cat([rule.a[i, head].exp(), rule.a[i, tail].exp() * left / max(len(tail), 1)])
        p = w / w.sum()
        mean = p @ rule.v[head + tail]
        torch.testing.assert_close(out[i], mean)
        torch.testing.assert_close(lse[i], w.sum().log())
        r = p[len(head) :, None] * (rule.v[tail] - mean)
        m = len(tail)
        expected = torch.zeros_like(mean)
        if m < left:
            spread = (r - r.mean(0)).square().sum(0)
            expected = (1 - m / left) * m / (m - 1) * spread if m >= 2 else expected + torch.inf
        torch.testing.assert_close(variance[i], expected)
