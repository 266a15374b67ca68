"""Keys that every query walks to: Metropolis and Hastings in plain Python."""

import pytest

from support.plain_estimators import assert_close, made_by

WALK_ROWS = [
    "MetropolisHastings-rank-2",
    "MetropolisHastings-unequal-grids",
    "MetropolisHastings-causal,-masked,-separated",
]


@pytest.mark.parametrize("name", WALK_ROWS)
def test_metropolis_in_plain_python(impl, widest, name):
    made, rule = made_by(impl, widest, name)
    one, row = rule.one, rule.row
    out = made.out.detach().flatten(0, 1)[row].flatten(0, -2)
    acceptance = made.acceptance.flatten(0, 1)[row].flatten()
    for i in range(len(out)):
        states, accepted = rule.walk_keys(i)
        if not states:
            assert out[i].eq(0).all()
            continue
        assert len(states) == one.method.samples
        assert_close(out[i], rule.v[states].mean(0))
        assert float(acceptance[i]) == pytest.approx(accepted / len(states))
