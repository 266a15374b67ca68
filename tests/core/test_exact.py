"""The truth itself: against plain loops, against torch, and within bounded memory."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import scram
from scram.core import exact


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape, seed=0):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def distance(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def greedy(scores, legal, places, kappa, separation):
    """Best key, then the best farther away, ties to the lower index: [(key, score)] of one query."""
    found = []
    for _ in range(kappa):
        best = None
        for j in range(len(scores)):
            apart = all(distance(places[j], places[f]) > separation for f, _ in found)
            if legal[j] and apart and (best is None or scores[j] > scores[best]):
                best = j
        if best is None:
            return found + [(-1, -torch.inf)] * (kappa - len(found))
        found.append((best, scores[best]))
    return found


@pytest.mark.parametrize("separation", [0, 1, 2, 3, 10])
@pytest.mark.parametrize("key_grid", [(13,), (4, 5), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_search_is_the_plain_loop(key_grid, separation, causal):
    grid = key_grid if causal else (3,) * len(key_grid)
    q, k = integers(2, 2, *grid, 3), integers(2, 1, *key_grid, 3, seed=1)  # integers: many ties
    mask = torch.rand(2, 2, *key_grid, generator=torch.Generator().manual_seed(2)) < 0.7
    found = scram.exact_search(q, k, matches=4, separation=separation, causal=causal, key_mask=mask)
    places = torch.cartesian_prod(*[torch.arange(n) for n in key_grid]).reshape(-1, len(key_grid)).tolist()
    for b in range(2):
        for h in range(2):
            table = (q[b, h].reshape(-1, 3) @ k[b, 0].reshape(-1, 3).T).tolist()
            index, score = found.index[b, h].reshape(-1, 4).tolist(), found.score[b, h].reshape(-1, 4).tolist()
            for i, scores in enumerate(table):
                legal = [ok and (not causal or j <= i) for j, ok in enumerate(mask[b, h].flatten().tolist())]
                assert list(zip(index[i], score[i], strict=True)) == greedy(scores, legal, places, 4, separation)


def test_ties_go_to_the_lower_index():
    found = scram.exact_search(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 70, 1), matches=3)
    assert found.index[0, 0].tolist() == [[0, 1, 2]] * 2


def test_search_prefers_a_number_and_takes_a_nan():
    k = torch.tensor([[[[torch.nan], [-5.0], [-torch.inf]]]])
    found = scram.exact_search(torch.ones(1, 1, 1, 1), k, matches=4)
    assert found.index.flatten().tolist() == [1, 0, 2, -1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grid", [(30,), (5, 6), (2, 5, 3)], ids=str)
def test_attention_is_that_of_torch(grid, causal):
    leaves = [randn(2, heads, 30, width, seed=width).requires_grad_() for heads, width in ((4, 8), (2, 8), (2, 5))]
    q, k, v = (x.unflatten(2, grid) for x in leaves)
    out, lse = scram.exact_attention(q, k, v, causal=causal)
    dense = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out.flatten(2, -2), dense)
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 8**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(30, 30).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse.flatten(2), scores.logsumexp(-1))
    for mine, theirs in zip(
        torch.autograd.grad(out.square().sum(), leaves), torch.autograd.grad(dense.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("per_head", [False, True])
def test_attention_under_a_mask(per_head):
    q, k, v = randn(3, 2, 2, 4, 5, 3).unbind()
    mask = randn(2, 2, 4, 5, seed=1) < 0 if per_head else randn(2, 4, 5, seed=1) < 0
    mask[1] = False
    out, lse = scram.exact_attention(q, k, v, key_mask=mask)
    dense_mask = mask.reshape(2, -1, 1, 20)
    dense = F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, v)), attn_mask=dense_mask)
    torch.testing.assert_close(out[0].flatten(1, 2), dense[0])
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


def test_masked_nan_reaches_nobody():
    leaves = [randn(1, 1, 6, 3, seed=s).requires_grad_() for s in range(3)]
    q, k, v = (x * 1 for x in leaves)
    k.data[0, 0, 2] = v.data[0, 0, 2] = torch.nan
    mask = torch.arange(6).ne(2)[None]
    out, lse = scram.exact_attention(q, k, v, key_mask=mask)
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, lse, *grads))


@pytest.mark.parametrize("causal", [False, True])
def test_chosen_queries_are_rows_of_the_whole(causal):
    q, k, v = randn(3, 2, 2, 5, 4, 3).unbind()
    some = torch.tensor([19, 3, 3, 0])
    whole, part = (
        scram.exact_attention(q, k, v, causal=causal),
        scram.exact_attention(q, k, v, causal=causal, queries=some),
    )
    torch.testing.assert_close(part.out, whole.out.flatten(2, 3)[:, :, some])
    torch.testing.assert_close(part.lse, whole.lse.flatten(2)[:, :, some])
    all_, few = (
        scram.exact_search(q, k, matches=2, separation=1, causal=causal, queries=queries) for queries in (None, some)
    )
    assert few.index.shape == (2, 2, 4, 1, 2)
    assert torch.equal(few.index[:, :, :, 0], all_.index.flatten(2, 3)[:, :, some])


@pytest.mark.parametrize("score", ["dot", "callable"])
def test_chunks_do_not_change_the_answer(monkeypatch, score):
    q, k, v = randn(3, 2, 2, 5, 4, 3).unbind()
    given = "dot" if score == "dot" else lambda a, b: (a * b).sum(-1)

    def everything():
        return [
            *scram.exact_attention(q, k, v, causal=True, score=given, scale=1.0),
            scram.exact_search(q, k, matches=3, separation=1, causal=True, score=given).index,
        ]

    whole = everything()
    monkeypatch.setattr(exact, "CHUNK_ELEMENTS", 65)
    for one, other in zip(whole, everything(), strict=True):
        torch.testing.assert_close(one, other)


class Largest(TorchDispatchMode):
    """The most elements any tensor had that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                held = min(x.numel(), x.untyped_storage().nbytes() // x.element_size())  # an expanded view holds little
                self.elements = max(self.elements, held)
        return result


@pytest.mark.parametrize("score", ["dot", "callable"])
def test_no_table_of_all_pairs_exists(monkeypatch, score):
    monkeypatch.setattr(exact, "CHUNK_ELEMENTS", 1000)
    given = "dot" if score == "dot" else lambda a, b: (a * b).sum(-1)
    n = 200
    leaves = [randn(1, 1, n, 2, seed=s).requires_grad_() for s in range(3)]
    mask = torch.ones(1, n, dtype=torch.bool)
    with Largest() as largest:
        out, lse = scram.exact_attention(*leaves, key_mask=mask, causal=True, score=given)
        torch.autograd.grad(out.sum() + lse.sum(), leaves)
        scram.exact_search(leaves[0], leaves[1], matches=2, separation=1, key_mask=mask, causal=True, score=given)
        scram.measure.recall(
            leaves[0], leaves[1], scram.exact_search(leaves[0], leaves[1], matches=2, score=given), score=given
        )
    assert 100 < largest.elements <= 1000


def test_reference_holds_no_table_either(monkeypatch):
    monkeypatch.setattr(sys.modules["scram.engines.reference.attend"], "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(sys.modules["scram.engines.reference.search"], "CHUNK_ELEMENTS", 1000)
    n = 300
    leaves = [randn(1, 1, n, 3, seed=s).requires_grad_() for s in range(3)]
    with Largest() as largest:
        scram.attention(
            *leaves, search=scram.Search(sweeps=1, seed=0), tail=None, radius=4, impl="reference"
        ).sum().backward()
    assert 500 < largest.elements <= 1000


@pytest.mark.parametrize("call", ["attention", "attend", "exact_attention"])
def test_empty_batch_has_empty_gradients(call):
    q = torch.zeros(0, 2, 3, 4, 5, requires_grad=True)
    if call == "attend":
        out = scram.attend(q, q, q, scram.exact_search(q, q), impl="reference").out
    else:
        out = scram.attention(q, q, q, impl="reference") if call == "attention" else scram.exact_attention(q, q, q).out
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad.shape == q.shape


def random_matches(shape, key_grid, kappa):
    keys = int(torch.tensor(key_grid).prod())
    index = torch.randint(-1, keys, (*shape, kappa), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return scram.Matches(index, torch.zeros(index.shape), key_grid)


@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
def test_merge_is_exact(impl, weight):
    leaves = [randn(2, 1, 5, 5, e, seed=e).requires_grad_() for e in (4, 5, 3)]
    q, k, v = leaves[0], leaves[1][..., :4], leaves[2]
    found = random_matches((2, 1, 5, 5), (5, 5), 2)
    found.index[0, 0, 0, 0] = -1
    one = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.3
    one[1] = False  # a whole row on one side
    whole, first, second = (
        scram.attend(q, k, v, found, key_mask=mask, weight=weight, impl=impl)
        for mask in (torch.ones_like(one), one, ~one)
    )
    assert (first.lse == -torch.inf).any()
    both = scram.merge(first, second)
    torch.testing.assert_close(both.out, whole.out)
    torch.testing.assert_close(both.lse, whole.lse)
    empty = whole.lse == -torch.inf
    assert empty.any()

    def total(attended):
        return attended.out.square().sum() + torch.where(empty, 0, attended.lse).square().sum()

    for mine, theirs in zip(
        torch.autograd.grad(total(both), leaves, retain_graph=True),
        torch.autograd.grad(total(whole), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_merge_of_nothing_is_nothing():
    nothing = scram.Attended(torch.zeros(1, 3), torch.full((1,), -torch.inf, requires_grad=True))
    both = scram.merge(nothing, nothing)
    assert both.out.tolist() == [[0, 0, 0]]
    assert both.lse.item() == -torch.inf
    (grad,) = torch.autograd.grad(both.out.sum(), nothing.lse)
    assert grad.isfinite().all()


def test_merge_survives_large_scores():
    low, high = torch.tensor([-5000.0]), torch.tensor([5000.0])
    both = scram.merge(scram.Attended(torch.ones(1, 1), low), scram.Attended(torch.zeros(1, 1), high))
    assert (both.out.item(), both.lse.item()) == (0, 5000)
    both = scram.merge(scram.Attended(torch.ones(1, 1), low), scram.Attended(torch.zeros(1, 1), low))
    assert both.out.item() == 0.5
    assert both.lse.item() == pytest.approx(-5000 + torch.tensor(2.0).log().item())


def test_a_mask_made_in_inference_mode_is_taken_in_training():
    q, k, v = (torch.randn(1, 1, 4, 5, 3).requires_grad_() for _ in range(3))
    with torch.inference_mode():
        mask = torch.rand(1, 4, 5) < 0.8
    scram.exact_attention(q, k, v, key_mask=mask).out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
