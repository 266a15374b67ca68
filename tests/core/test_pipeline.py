"""One way from a request to a result: entry points that say the same get the same."""

import pytest
import torch

import scram
from scram.core import pipeline
from scram.core.pipeline import execute
from scram.core.resolve import Request

Q, K, V = torch.randn(3, 1, 2, 12, 13, 8, generator=torch.Generator().manual_seed(0)).unbind()
SEARCH = scram.Search(seed=3, start="drawn")
TAILS = {
    "none": None,
    "clusters": scram.Clusters(count=9, keys=0, seed=1),
    "routed clusters": scram.Clusters(count=9, keys=20, seed=1),
    "drawn keys": scram.DrawnKeys(samples=20, seed=1),
}


@pytest.mark.parametrize("name", TAILS)
def test_attention_attend_and_estimate_are_one_pipeline(name):
    tail = TAILS[name]
    whole = scram.attention(Q, K, V, search=SEARCH, tail=tail, return_lse=True)
    matches = scram.search(Q, K, search=SEARCH)
    for other in (scram.attend(Q, K, V, matches, tail=tail), execute(pipeline.run, Q, K, V, Request(SEARCH, tail))):
        assert torch.equal(whole.out, other.out)
        assert torch.equal(whole.lse, other.lse)
    if tail is not None:
        assert torch.equal(whole.out, scram.estimate(Q, K, V, matches, method=tail).out)


def test_clusters_may_be_made_before_or_inside():
    matches = scram.search(Q, K, search=SEARCH)
    tail = TAILS["routed clusters"]
    book = scram.cluster(Q, K, V, clusters=tail)
    assert torch.equal(scram.attend(Q, K, V, matches, tail=book).out, scram.attend(Q, K, V, matches, tail=tail).out)


def test_a_result_holds_what_was_found_and_made():
    result = execute(pipeline.run, Q, K, V, Request(SEARCH, TAILS["clusters"]))
    assert torch.equal(result.matches.index, scram.search(Q, K, search=SEARCH).index)
    assert result.codebook.samples == 9
    assert result.routes is None  # of no keys one by one
    dense = execute(pipeline.run, Q, K, V, Request())
    assert (dense.matches, dense.codebook, dense.lse) == (None, None, None)


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_of_dense_attention(causal, extra):
    pair = (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)) if extra else None
    assert scram.explain(Q, K, V, causal=causal, extra=pair).dense
    q = Q.clone().requires_grad_()
    out, lse = scram.attention(q, K, V, causal=causal, extra=pair, return_lse=True)
    assert torch.equal(out, scram.attention(q, K, V, causal=causal, extra=pair))
    scores = Q.flatten(2, 3) @ K.flatten(2, 3).mT * 8**-0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if extra:
        scores = torch.cat([scores, Q.flatten(2, 3) @ pair[0].mT * 8**-0.5], -1)
    torch.testing.assert_close(lse.flatten(2), scores.logsumexp(-1))
    assert torch.autograd.grad(lse.sum(), q)[0].abs().sum() > 0


def test_a_request_is_not_changed():
    request = Request(SEARCH, TAILS["clusters"])
    before = tuple(request)
    execute(pipeline.run, Q, K, V, request)
    assert tuple(request) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scram.attention(Q, K, None), "v must be a torch.Tensor"),
        (lambda: scram.attend(Q, K, None, scram.search(Q, K)), "v must be a torch.Tensor"),
        (lambda: scram.cluster(Q, K, None), "v must be a torch.Tensor"),
        (lambda: scram.local(Q, K, None, radius=1), "v must be a torch.Tensor"),
        (lambda: scram.explain(Q, K, None), "v must be a torch.Tensor"),
        (lambda: scram.tune(Q, K, None), "v must be a torch.Tensor"),
        (lambda: scram.trust(Q, K, None), "v must be a torch.Tensor"),
        (lambda: scram.attend(Q, K, V, None), "matches must be a scram.Matches"),
        (lambda: scram.estimate(Q, K, V, None, method=scram.Snis()), "matches must be a scram.Matches"),
        (lambda: scram.attention(Q, K, V, search=3), "search must be a scram.Search"),
        (lambda: scram.explain(Q, K, V, search=3), "search must be a scram.Search"),
        (lambda: scram.search(Q, K, search=None), "search must be a scram.Search"),
        (lambda: scram.attention(Q, K, V, return_lse="no"), "return_lse must be True or False"),
        (lambda: scram.attend(Q, K, V, scram.search(Q, K), tail="auto"), "tail must be None or settings"),
    ],
)
def test_what_is_missing_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_windows_without_matches_are_refused():
    with pytest.raises(ValueError, match="windows need matches"):
        execute(pipeline.run, Q, K, V, Request(search=None, tail=scram.DrawnKeys()))


def test_clusters_stand_alone():
    result = execute(pipeline.run, Q, K, V, Request(search=None, tail=TAILS["routed clusters"]))
    assert result.matches is None
    assert result.codebook.samples == 9
    assert torch.equal(result.routes, scram.route(Q, K, result.codebook).bits)
    assert torch.equal(result.out, scram.attend(Q, K, V, None, tail=result.codebook).out)


def test_explain_takes_every_argument_of_attention():
    assert scram.explain(Q, K, V, return_lse=True).dense


WAYS = {
    "windows": {"search": scram.Search(sweeps=0, seed=0), "radius": 99, "tail": None},
    "clusters of one key": {"search": None, "tail": scram.Clusters(count=999, keys=0, seed=0)},
    "dense": {},
    "dense, an l2 score": {"score": "l2"},
}


@pytest.mark.parametrize("name", WAYS)
def test_extra_keys_are_masked(name, impl):
    """Beside what holds every key of the grid: the exact answer and its gradients, whatever a masked key holds."""
    how = dict(WAYS[name])
    if "search" in how:
        how["impl"] = impl
    leaves = [x.expand(2, -1, -1, -1, -1)[:, :, :5, :6].clone().requires_grad_() for x in (Q, K[:, :1], V[:, :1])]
    more = [torch.randn(2, 1, 5, 8, requires_grad=True) for _ in range(2)]
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    hidden = [torch.where(mask[:, None, :, None], x, torch.nan) for x in more]
    out, lse = scram.attention(*leaves, extra=tuple(hidden), extra_mask=mask, return_lse=True, **how)
    one_by_one = [
        scram.attention(
            *(x[b : b + 1] for x in leaves),
            extra=tuple(x[b : b + 1, :, mask[b]] for x in more),
            **{**how, "search": None, "tail": None},
            return_lse=True,
        )
        for b in range(2)
    ]
    want = torch.cat([one.out for one in one_by_one])
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, torch.cat([one.lse for one in one_by_one]), rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(x.square().sum(), [*leaves, *more]) for x in (out, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_tune_and_plans_know_masked_extra_keys():
    extra = torch.randn(2, 1, 2, 4, 8).unbind()
    mask = torch.tensor([[True, False, True, False]])
    plan = scram.tune(Q, K, V, extra=extra, extra_mask=mask)
    assert plan.given == ("extra", "extra_mask")
    want = scram.attention(Q, K, V, extra=tuple(x[:, :, ::2] for x in extra), search=None, tail=None)
    torch.testing.assert_close(plan(Q, K, V, extra=extra, extra_mask=mask), want)
    assert plan.check(Q, K, V, extra=extra, extra_mask=mask).errors.worst[0] < 1e-4
    assert plan.code == "plan(q, k, v, extra=extra, extra_mask=extra_mask)"
