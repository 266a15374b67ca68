"""What an estimate is, in every implementation: the table against the reference, exact limits, gradients, words."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import scram
from support.cases import assert_as_near_float64, parameter
from support.estimates import (
    CELLS,
    ESTIMATES,
    HYBRID,
    SMALL,
    SNIS,
    WALKS,
    assert_estimated_as_near_float64,
    estimated,
    run_estimate,
    size,
    tensors_of,
)

ROWS = [parameter(one, one.case) for one in ESTIMATES]
ROWS += [pytest.param(one, id=f"small {one}", marks=pytest.mark.interpreted) for one in SMALL]


@pytest.mark.parametrize("one", ROWS)
def test_as_near_float64_as_the_reference(one, engine):
    assert_estimated_as_near_float64(one, engine)


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(batch=1, heads=2, grid=(7, 8), width=4, kappa=2, causal=False, seed=0, dtype=torch.float64):
    q, k, v = (features(batch, heads, *grid, width, seed=seed + n).to(dtype) for n in range(3))
    found = scram.search(q, k, search=scram.Search(matches=kappa, seed=0), causal=causal, impl="numba")
    return q, k, v, found


@pytest.mark.parametrize("method", [HYBRID, SNIS, WALKS], ids=lambda method: type(method).__name__)
def test_the_seed_is_torchs(impl, widest, method):
    q, k, v, found = problem(dtype=widest)

    def run(seed):
        return scram.estimate(q, k, v, found, method=replace(method, seed=seed), impl=impl).out

    torch.manual_seed(3)
    first, second = run(None), run(None)
    torch.manual_seed(3)
    assert torch.equal(run(None), first)
    assert not torch.equal(first, second)
    assert torch.equal(run(torch.tensor(4)), run(4))


def test_a_nan_stays_where_it_is(impl, widest):
    q, k, v, found = problem(heads=1, causal=True)
    for name, x in (("q", q), ("k", k), ("v", v)):
        x[0, 0, 3, 3] = torch.nan
        made = scram.estimate(q, k, v, found, method=scram.DrawnKeys(56, seed=0), causal=True, impl=impl)
        x[0, 0, 3, 3] = 0
        bad = made.out[0, 0].isnan().any(-1).flatten()
        expected = torch.zeros(56, dtype=torch.bool)
        expected[27 : 28 if name == "q" else None] = True
        assert torch.equal(bad, expected), name


@pytest.mark.slow
def test_gradients_of_the_hybrid_and_of_snis_in_float64(impl):
    leaves = [features(1, 1, 3, 3, 2, seed=n).requires_grad_() for n in range(3)]
    extra = [features(1, 1, 1, 2, seed=n + 5).requires_grad_() for n in range(2)]
    found = scram.Matches(
        torch.tensor([4, -1, 0, 8, 3, 2, 9, 1, 5], dtype=torch.int32).reshape(1, 1, 3, 3, 1),
        torch.zeros(1, 1, 3, 3, 1),
        (3, 3),
    )
    for method in (scram.DrawnKeys(4, seed=1), scram.Snis(5, 0.5, 0.6, seed=1)):

        def run(q, k, v, k_extra, v_extra, method=method):
            made = scram.estimate(q, k, v, found, method=method, radius=0, extra=(k_extra, v_extra), impl=impl)
            return made.out, made.lse

        assert torch.autograd.gradcheck(run, [*leaves, *extra])


@pytest.mark.parametrize("method", [HYBRID, CELLS, SNIS], ids=["hybrid", "stratified", "snis"])
def test_a_large_part_that_all_scores_share_costs_no_digits(engine, method):
    """Weights made from an lse of 10000 in float32 would be off by a thousandth, and dq by as much of a common key."""
    leaves = [features(1, 2, 7, 8, 4, seed=n) for n in range(3)]
    leaves[0][..., 0], leaves[1][..., 0] = 100, 200
    truth, same, ours = (everything_of(leaves, method, *how) for how in shared_part_runs(engine))
    assert float(truth[1].min()) > 9e3
    assert_as_near_float64(truth, same, ours, size)


def shared_part_runs(impl):
    return ("reference", torch.float64), ("reference", torch.float32), (impl, torch.float32)


def everything_of(leaves, method, impl, dtype):
    """out, lse and the gradients of a functional of both."""
    leaves = [x.float().to(dtype).requires_grad_() for x in leaves]
    index = torch.arange(2 * 56, dtype=torch.int32).reshape(1, 2, 7, 8, 1) % 56
    found = scram.Matches(index, torch.zeros(index.shape), (7, 8))
    made = scram.estimate(*leaves, found, method=method, impl=impl)
    total = (made.out * features(*made.out.shape, seed=7).to(dtype)).sum() + made.lse.sum()
    return [made.out.detach(), made.lse.detach(), *torch.autograd.grad(total, leaves)]


def test_diagnostics_carry_no_gradient(impl, widest):
    q, k, v, found = problem(dtype=widest)
    q.requires_grad_()
    for method in (HYBRID, SNIS, WALKS):
        made = scram.estimate(q, k, v, found, method=method, impl=impl)
        assert made.out.requires_grad
        for x in (made.variance, made.ess, made.acceptance, made.rhat):
            assert x is None or not x.requires_grad


def test_an_estimate_says_what_is_wrong_with_it():
    q, k, v, found = problem()
    sharp = scram.estimate(30 * q, k, v, found, method=scram.Snis(64, 0.0, seed=0))
    assert any("effective samples under 5%" in words for words in sharp.warnings)
    assert "warning: effective samples under 5 % of 64 for" in str(sharp)
    assert "effective samples: median" in str(sharp)
    stuck = scram.estimate(30 * q, k, v, found, method=scram.MetropolisHastings(64, seed=0))
    assert any("acceptance under 10%" in words for words in stuck.warnings)
    assert any("rhat over 1.1" in words for words in stuck.warnings)
    few = scram.estimate(q, k, v, found, method=scram.DrawnKeys(1, seed=0))
    assert any("variance unknown" in words for words in few.warnings)
    rough = scram.estimate(q, k, v, found, method=scram.DrawnKeys(3, seed=0))
    assert any("standard error over 50% of the size of out" in words for words in rough.warnings)
    fine = scram.estimate(q, k, v, found, method=scram.DrawnKeys(56, seed=0))
    assert fine.warnings == []
    assert "no warnings" in str(fine)
    assert repr(fine) == "Estimate(out (1, 2, 7, 8, 4) by DrawnKeys(samples=56, stratified=False, seed=0))"


def test_an_estimate_names_its_worst_query():
    ess = torch.full((1, 2, 3, 4), 9.0)
    ess[0, 1, 2, 1] = 2.0
    made = scram.Estimate(torch.ones(1, 2, 3, 4, 5), None, None, ess, None, None, scram.Snis(10))
    assert "effective samples: median 9.0, worst 2.0 (batch 0, head 1, query 9)" in str(made)


@pytest.mark.parametrize(
    ("name", "row"), [("drawn_tail", "DrawnKeys-mask-of-each-head"), ("sample", "Snis-one-key-head")]
)
def test_operators_are_what_torch_expects_of_them(name, row):
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.scram, name), _arguments(name, estimated(row)), test_utils=checks)


def _arguments(name, one):
    """What the operator of that name is called with for a row of the table."""
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is getattr(torch.ops.scram, name).default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    tensors = tensors_of(one)
    with Spy():
        run_estimate(one, tensors, [x.detach() for x in tensors.leaves(torch.float32)], "numba")
    return tuple(x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", [HYBRID, SNIS, WALKS], ids=lambda method: type(method).__name__)
def test_compiles_into_one_graph(method):
    q, k, v, found = problem(grid=(4, 5))
    q.requires_grad_()

    def run(q, k, v):
        return scram.estimate(q, k, v, found, method=method, impl="numba").out.square().sum()

    eager, fast = run(q, k, v), torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(eager, fast)
    torch.testing.assert_close(*(torch.autograd.grad(x, q)[0] for x in (eager, fast)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own forward mode
@pytest.mark.parametrize("method", [HYBRID, SNIS], ids=lambda method: type(method).__name__)
def test_what_an_engine_cannot_differentiate_is_refused(method):
    q, k, v, found = problem(grid=(4, 5))
    q.requires_grad_()
    out = scram.estimate(q, k, v, found, method=method, impl="numba").out
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), q)
    q = q.detach()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        scram.estimate(forward_ad.make_dual(q, q), k, v, found, method=method, impl="numba")


def test_matches_of_inference_mode_serve_training():
    q, k, v, _ = problem()
    q.requires_grad_()
    with torch.inference_mode():
        found = scram.search(q, k, search=scram.Search(seed=0), impl="numba")
    for method in (HYBRID, SNIS, WALKS):
        scram.estimate(q, k, v, found, method=method, impl="numba").out.sum().backward()
    assert q.grad.abs().sum() > 0


def test_a_callable_score_runs_in_the_reference():
    q, k, v, found = problem(heads=1, grid=(4, 4))
    for method in (HYBRID, SNIS, WALKS):
        own = scram.estimate(q, k, v, found, method=method, score=lambda a, b: (a * b).sum(-1), scale=0.5)
        dot = scram.estimate(q, k, v, found, method=method, scale=0.5, impl="reference")
        torch.testing.assert_close(own.out, dot.out)


def test_outputs_that_are_not_finite_are_told():
    q = torch.randn(1, 1, 6, 6, 4)
    bad = q.clone()
    bad[0, 0, 0, 0, 0] = torch.nan
    made = scram.estimate(bad, q, q, scram.search(q, q), method=scram.DrawnKeys(8, seed=0), impl="reference")
    assert "NaN or infinite" in str(made)
    made = scram.estimate(q, q, q, scram.search(q, q), method=scram.DrawnKeys(8, seed=0), impl="reference")
    assert "NaN" not in str(made)


def test_one_step_of_a_walk_is_an_estimate():
    q = torch.randn(1, 1, 1, 9, 3)
    found = scram.search(q, q, search=scram.Search(matches=2, seed=1))
    made = [
        scram.estimate(q, q, q, found, method=scram.MetropolisHastings(1, seed=0), impl=i)
        for i in ("reference", "numba")
    ]
    torch.testing.assert_close(made[0].out, made[1].out)
    assert (made[0].rhat == torch.inf).all()
