"""Keys that every query draws on its own: self-normalized importance sampling in plain Python."""

import math

import pytest
import torch

from support import plain
from support.plain_estimators import assert_close, made_by

SNIS_ROWS = ["Snis-rank-2", "Snis-unequal-grids", "Snis-causal,-masked,-separated", "Snis-one-row-fully-masked"]


@pytest.mark.parametrize("name", SNIS_ROWS)
def test_snis_in_plain_python(impl, widest, name):
    made, rule = made_by(impl, widest, name)
    one, row = rule.one, rule.row
    out, lse, variance, ess = (
        x.flatten(0, 1)[row].flatten(0, x.ndim - 3 - (x.ndim == made.out.ndim)).detach()
        for x in (made.out, made.lse, made.variance, made.ess)
    )
    for i in range(len(plain.points(one.case.grid))):
        keys = rule.snis_keys(i)
        if not keys:
            assert out[i].eq(0).all()
            assert variance[i].eq(torch.inf).all()
            assert (float(ess[i]), float(lse[i])) == (0.0, -math.inf)
            continue
        w = torch.stack([(rule.a[i, j] - math.log(rule.density(i, j))).exp() for j in keys])
        mean = (w[:, None] * rule.v[keys]).sum(0) / w.sum()
        assert_close(out[i], mean)
        assert_close(lse[i], (w.sum() / one.method.samples).log())
        assert_close(variance[i], ((w / w.sum())[:, None] * (rule.v[keys] - mean)).square().sum(0))
        assert_close(ess[i], w.sum() ** 2 / w.square().sum())
