"""What holds for every shape: random ranks, extents, grids, masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scram

pytestmark = pytest.mark.slow

EXTENTS = {1: 12, 2: 5, 3: 4, 4: 3}


@st.composite
def problems(draw):
    """q, k, v, settings and what attend needs, of any rank."""
    rank = draw(st.integers(1, 4))
    extents = st.integers(1, EXTENTS[rank])
    key_grid = tuple(draw(st.lists(extents, min_size=rank, max_size=rank)))
    causal = draw(st.booleans())
    grid = key_grid if causal else tuple(draw(st.lists(extents, min_size=rank, max_size=rank)))
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    heads = key_heads * group
    q = torch.randn(batch, heads, *grid, 3, generator=generator)
    k = torch.randn(batch, key_heads, *key_grid, 3, generator=generator)
    mask = None
    if draw(st.booleans()):
        shape = (batch, heads, *key_grid) if draw(st.booleans()) else (batch, *key_grid)
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    how = scram.Search(
        matches=draw(st.integers(1, 4)),
        separation=draw(st.integers(0, 2)),
        sweeps=draw(st.integers(0, 2)),
        jumps=draw(st.sampled_from([(), (1,), (2, 1)])),
        propagate=draw(st.sampled_from(["shift", "stay", "both", "turns"])),
        gossip=draw(st.integers(0, 2)),
        seed=draw(st.integers(-3, 3)),
    )
    radius = tuple(draw(st.lists(st.integers(0, 2), min_size=rank, max_size=rank)))
    return q, k, how, causal, mask, radius


def legal_table(q, k, causal, mask):
    """bool [B*H, N, M]."""
    rows, n, m = q.shape[0] * q.shape[1], math.prod(q.shape[2:-1]), math.prod(k.shape[2:-1])
    table = torch.ones(rows, n, m, dtype=torch.bool)
    if causal:
        table &= torch.arange(m) <= torch.arange(n)[:, None]
    if mask is not None:
        per_row = mask.reshape(q.shape[0], -1, m).expand(-1, q.shape[1], -1)
        table &= per_row.reshape(rows, 1, m)
    return table


def places(grid):
    return torch.cartesian_prod(*[torch.arange(extent) for extent in grid]).reshape(-1, len(grid))


@settings(max_examples=80)
@given(problem=problems())
def test_matches_are_legal_distinct_and_apart(impl, problem):
    q, k, how, causal, mask, _ = problem
    found = scram.search(q, k, search=how, causal=causal, key_mask=mask, impl=impl)
    legal = legal_table(q, k, causal, mask)
    index = found.index.reshape(*legal.shape[:2], -1).long()
    score = found.score.reshape(index.shape)
    some = index >= 0
    assert (index < legal.shape[-1]).all()
    assert (legal.gather(-1, index.clamp(0)) | ~some).all()
    # Every query with a legal key has a match; none has more than there are; none comes last.
    assert torch.equal(some.any(-1), legal.any(-1))
    assert (some.sum(-1) <= legal.sum(-1)).all()
    assert (some[..., :-1] | ~some[..., 1:]).all()
    assert (score[..., :-1] >= score[..., 1:]).all()
    assert torch.equal(score == -torch.inf, ~some)
    at = places(found.key_grid)[index.clamp(0)]
    apart = (at.unsqueeze(-2) - at.unsqueeze(-3)).abs().amax(-1) > how.separation
    pairs = some.unsqueeze(-1) & some.unsqueeze(-2) & ~torch.eye(index.shape[-1], dtype=torch.bool)
    assert apart[pairs].all()


@settings(max_examples=80)
@given(problem=problems())
def test_rows_of_weights_sum_to_one_over_the_union(impl, problem):
    q, k, how, causal, mask, radius = problem
    keys = math.prod(k.shape[2:-1])
    q, k = q.requires_grad_(), k.requires_grad_()
    v = torch.eye(keys).reshape(1, 1, *k.shape[2:-1], keys).expand(*k.shape[:-1], keys)
    found = scram.search(q, k, search=how, causal=causal, key_mask=mask, impl=impl)
    out, lse = scram.attend(q, k, v, found, radius=radius, causal=causal, key_mask=mask, impl=impl)
    legal = legal_table(q, k, causal, mask)
    p = out.detach().reshape(legal.shape)
    index = found.index.reshape(*legal.shape[:2], -1).long()
    at, everywhere = places(found.key_grid)[index.clamp(0)], places(found.key_grid)
    near = ((at.unsqueeze(-2) - everywhere).abs() <= torch.tensor(radius)).all(-1)
    union = (near & (index >= 0).unsqueeze(-1)).any(-2) & legal
    assert torch.equal(p > 0, union)
    torch.testing.assert_close(p.sum(-1), union.any(-1).float())
    assert torch.equal(lse.reshape(legal.shape[:2]) == -torch.inf, ~union.any(-1))
    # A key counted twice would double its weight.
    group = q.shape[1] // k.shape[1]
    scores = q.flatten(2, -2) @ k.repeat_interleave(group, 1).flatten(2, -2).mT * 3**-0.5
    dense = scores.detach().reshape(legal.shape).masked_fill(~union, -torch.inf).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(p, dense)
    grads = torch.autograd.grad(out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum(), [q, k])
    assert all(grad.isfinite().all() for grad in grads)


@settings(max_examples=30)
@given(problem=problems())
def test_exact_search_bounds_every_search(impl, problem):
    q, k, how, causal, mask, _ = problem
    found = scram.search(q, k, search=how, causal=causal, key_mask=mask, impl=impl)
    best = scram.exact_search(q, k, causal=causal, key_mask=mask)
    assert (found.score[..., 0] <= best.score[..., 0] + 1e-5).all()
