"""Attending: the set of keys, the empty row, extra keys, dropout, NaN, and the exact union of two results."""

import sys

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.core.tails.base import draw_seed
from support import plain
from support.cases import ATTENDED, assert_attended_as_near_float64, gradients, make_tensors, run_attend, size, table


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def matches(index, key_grid):
    index = torch.as_tensor(index, dtype=torch.int32)
    return scram.Matches(index, torch.zeros(index.shape), key_grid)


def random_matches(shape, key_grid, kappa, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = int(torch.tensor(key_grid).prod())
    return matches(torch.randint(-1, keys, (*shape, kappa), generator=generator), key_grid)


def shares(index, key_grid, impl, **how):
    """p over the keys [N, M] for matches [N][kappa] on a rank-free grid: values are one-hot, scores all 0."""
    keys = int(torch.tensor(key_grid).prod())
    queries = (len(index),) + (1,) * (len(key_grid) - 1)
    q = torch.zeros(1, 1, *queries, 1)
    k, v = torch.zeros(1, 1, *key_grid, 1), torch.eye(keys).reshape(1, 1, *key_grid, keys)
    found = matches(torch.tensor(index).reshape(1, 1, *queries, -1), key_grid)
    return scram.attend(q, k, v, found, impl=impl, **how).out.reshape(len(index), keys)


@pytest.mark.parametrize("kappa", [1, 3])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)], ids=["", "grouped"])
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param((30,), id="rank 1"),
        pytest.param((5, 6), id="rank 2"),
        pytest.param((2, 5, 3), id="rank 3", marks=pytest.mark.slow),
    ],
)
def test_window_over_the_grid_is_dense_attention(impl, grid, heads, key_heads, causal, kappa):
    n = 30
    leaves = [randn(2, h, n, e, seed=e).requires_grad_() for h, e in ((heads, 8), (key_heads, 8), (key_heads, 5))]
    q, k, v = (x.unflatten(2, grid) for x in leaves)
    # The first match is one; the others may be none.
    found = random_matches((2, heads, *grid), grid, kappa)
    found.index[..., 0].clamp_(0)
    ours = scram.attend(q, k, v, found, radius=30, causal=causal, impl=impl).out.flatten(2, -2)
    dense = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=heads != key_heads)
    torch.testing.assert_close(ours, dense)
    weight = randn(*dense.shape, seed=9)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((dense * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_overlapping_windows_count_a_key_once(impl):
    p = shares([[2, 3, 3], [0, 0, 0], [9, 4, 0]], (10,), impl)
    expected = torch.zeros(3, 10)
    expected[0, 1:5] = 1 / 4
    expected[1, 0:2] = 1 / 2
    expected[2, [0, 1, 3, 4, 5, 8, 9]] = 1 / 7
    torch.testing.assert_close(p, expected)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
def test_every_key_of_the_union_has_one_share(impl, weight):
    key_grid, radius = (4, 3, 5), (1, 0, 2)
    q, k = torch.ones(1, 1, 6, 6, 6, 1), torch.ones(1, 1, *key_grid, 1)
    v = torch.eye(60).reshape(1, 1, *key_grid, 60)
    found = random_matches((1, 1, 6, 6, 6), key_grid, 5)
    attended = scram.attend(q, k, v, found, radius=radius, weight=weight, scale=1.0, impl=impl)
    p = attended.out.reshape(-1, 60)
    places = torch.cartesian_prod(*[torch.arange(extent) for extent in key_grid])
    index = found.index.reshape(-1, 5).long()
    near = ((places[index.clamp(0)][:, :, None] - places).abs() <= torch.tensor(radius)).all(-1)
    union = (near & (index >= 0)[..., None]).any(1)
    torch.testing.assert_close(p, union / union.sum(-1, keepdim=True).clamp(min=1))
    one = 1 if weight == "softmax" else 0
    torch.testing.assert_close(attended.lse.flatten(), union.sum(-1).log() + one)


def test_windows_hold_no_illegal_key(impl):
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    mask[0, 2, 2] = mask[0, 1, 3] = False
    q, k = torch.zeros(1, 1, 5, 5, 1), torch.zeros(1, 1, 5, 5, 1)
    v = torch.eye(25).reshape(1, 1, 5, 5, 25)
    found = matches(torch.full((1, 1, 5, 5, 1), 12), (5, 5))  # the match itself is masked
    p = scram.attend(q, k, v, found, key_mask=mask, causal=True, impl=impl).out[0, 0].reshape(25, 25)
    neighbors = {6, 7, 11, 13, 16, 17, 18}
    for i in range(25):
        legal = {j for j in neighbors if j <= i}
        assert set(p[i].nonzero().flatten().tolist()) == legal
        assert p[i].sum() == pytest.approx(1 if legal else 0)


def test_none_may_stand_anywhere_and_off_the_grid_is_none(impl):
    p = shares([[-1, 4, -1], [4, -1, -1], [-1, -1, 4], [4, 9, 2**31 - 1], [-7, 4, -(2**31)]], (9,), impl)
    expected = torch.zeros(5, 9)
    expected[:, 3:6] = 1 / 3
    torch.testing.assert_close(p, expected)


def test_none_does_not_cover_the_first_key(impl):
    p = shares([[-1, 0], [9, 0]], (3, 3), impl, radius=1)
    expected = torch.zeros(2, 9)
    expected[:, [0, 1, 3, 4]] = 1 / 4
    torch.testing.assert_close(p, expected)


def test_radius_per_axis(impl):
    p = shares([[12]], (5, 5), impl, radius=(0, 2))
    assert p[0].nonzero().flatten().tolist() == [10, 11, 12, 13, 14]
    p = shares([[12]], (5, 5), impl, radius=[1, 0])
    assert p[0].nonzero().flatten().tolist() == [7, 12, 17]


def test_one_match_without_a_window_is_the_argmax_glimpse(impl):
    q, k, v = randn(1, 2, 5, 5, 4), randn(1, 2, 6, 6, 4, seed=1), randn(1, 2, 6, 6, 3, seed=2)
    best = scram.exact_search(q, k)
    out, lse = scram.attend(q, k, v, best, radius=0, impl=impl)
    index = best.index.flatten(2).long().unsqueeze(-1)
    assert torch.equal(out.flatten(2, 3), v.flatten(2, 3).gather(2, index.expand(-1, -1, -1, 3)))
    torch.testing.assert_close(lse, best.score[..., 0] * 0.5)


@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
@pytest.mark.parametrize("score", ["dot", "cosine", "l2"])
def test_query_without_a_key_gives_nothing_and_finite_gradients(impl, weight, score):
    leaves = [randn(2, 1, 4, 4, e, seed=e).requires_grad_() for e in (4, 5, 6)]
    q, k, v = leaves[0], leaves[1][..., :4], leaves[2]
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1] = False
    found = random_matches((2, 1, 4, 4), (4, 4), 2)
    found.index[..., 0].clamp_(0)
    found.index[0, 0, 0, 0] = -1
    out, lse = scram.attend(q, k, v, found, key_mask=mask, weight=weight, score=score, impl=impl)
    empty = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    empty[1] = empty[0, 0, 0, 0] = True
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all()
    grads = torch.autograd.grad(out.square().sum() + lse.exp().sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][empty] == 0).all()
    assert all((grad[1] == 0).all() for grad in grads)
    if (score, weight) != ("l2", "relu"):  # -distance is never positive
        assert all((grad[0] != 0).any() for grad in grads)


def test_extra_keys_are_attended_by_all(impl):
    q, k, v = randn(2, 4, 5, 5, 4), randn(2, 2, 5, 5, 4, seed=1), randn(2, 2, 5, 5, 3, seed=2)
    extra = randn(2, 2, 3, 4, seed=3), randn(2, 2, 3, 3, seed=4)
    everywhere = matches(torch.zeros(2, 4, 5, 5, 1), (5, 5))
    together = scram.attend(q, k, v, everywhere, radius=9, extra=extra, impl=impl)
    dense = F.scaled_dot_product_attention(
        q.flatten(2, 3),
        torch.cat([k.flatten(2, 3), extra[0]], 2),
        torch.cat([v.flatten(2, 3), extra[1]], 2),
        enable_gqa=True,
    )
    torch.testing.assert_close(together.out.flatten(2, 3), dense)


def test_extra_keys_alone(impl):
    q, k, v = randn(1, 1, 3, 3, 4), randn(1, 1, 3, 3, 4, seed=1), randn(1, 1, 3, 3, 3, seed=2)
    extra = randn(1, 1, 2, 4, seed=3), randn(1, 1, 2, 3, seed=4)
    nothing = matches(torch.full((1, 1, 3, 3, 1), -1), (3, 3))
    out = scram.attend(q, k, v, nothing, extra=extra, causal=True, impl=impl).out
    torch.testing.assert_close(out.flatten(2, 3), F.scaled_dot_product_attention(q.flatten(2, 3), *extra))


def test_no_dropout_changes_nothing(impl):
    q, k, v = randn(3, 1, 2, 6, 6, 4).unbind()
    found = random_matches((1, 2, 6, 6), (6, 6), 2)
    plain = scram.attend(q, k, v, found, impl=impl)
    state = torch.get_rng_state()
    assert torch.equal(scram.attend(q, k, v, found, dropout_p=0.0, impl=impl).out, plain.out)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_drops_single_weights_and_keeps_lse(impl):
    index = torch.arange(16).reshape(1, 1, 4, 4, 1)
    q, k, v = torch.zeros(1, 1, 4, 4, 1), torch.zeros(1, 1, 4, 4, 1), torch.eye(16).reshape(1, 1, 4, 4, 16)
    out, lse = scram.attend(q, k, v, matches(index, (4, 4)), radius=4, dropout_p=0.25, impl=impl)
    dropped = (out == 0).float().mean()
    assert 0.1 < dropped < 0.4
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 16 / 0.75))
    torch.testing.assert_close(lse, torch.full_like(lse, 16).log())


def test_dropout_keeps_the_mean(impl):
    q, k, v = randn(1, 1, 4, 4, 3), randn(1, 1, 4, 4, 3, seed=1), randn(1, 1, 4, 4, 3, seed=2)
    found = random_matches((1, 1, 4, 4), (4, 4), 2)
    extra = randn(1, 1, 2, 3, seed=3), randn(1, 1, 2, 3, seed=4)
    plain = scram.attend(q, k, v, found, extra=extra, impl=impl).out
    draws = torch.stack([scram.attend(q, k, v, found, extra=extra, dropout_p=0.3, impl=impl).out for _ in range(400)])
    deviation = (draws.mean(0) - plain).abs() / (draws.std(0) / 400**0.5)
    assert deviation.max() < 4.5
    assert draws.std(0).min() > 0.01


def test_dropout_follows_manual_seed(impl):
    q, k, v = randn(3, 1, 2, 6, 6, 4).unbind()
    found = random_matches((1, 2, 6, 6), (6, 6), 2)

    def draw(seed):
        torch.manual_seed(seed)
        return scram.attend(q, k, v, found, dropout_p=0.5, impl=impl).out

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_dropout_drops_the_same_weights_backward(impl):
    q, k = torch.zeros(1, 1, 4, 4, 1), torch.zeros(1, 1, 4, 4, 1)
    v = torch.eye(16).reshape(1, 1, 4, 4, 16).requires_grad_()
    found = matches(torch.zeros(1, 1, 4, 4, 1), (4, 4))
    out = scram.attend(q, k, v, found, radius=4, dropout_p=0.5, impl=impl).out
    for i in (0, 5):
        (grad,) = torch.autograd.grad(out[0, 0].reshape(16, 16)[i].sum(), v, retain_graph=True)
        torch.testing.assert_close(grad[0, 0].reshape(16, 16)[:, 0], out[0, 0].reshape(16, 16)[i].detach())


def test_dropout_is_as_precise_as_its_dtype(impl):
    q, k = torch.zeros(2, 1, 1, 4, 4, 1, dtype=torch.float64).unbind()
    v = torch.ones(1, 1, 4, 4, 1, dtype=torch.float64)
    found = matches(torch.zeros(1, 1, 4, 4, 1), (4, 4))
    out = scram.attend(q, k, v, found, radius=4, dropout_p=0.3, impl=impl).out * 16 * 0.7
    assert (out - out.round()).abs().max() < 1e-12


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
def test_nan_reaches_only_queries_whose_windows_hold_it(impl, which, weight):
    leaves = [randn(1, 1, 40, 4, seed=s).requires_grad_() for s in (0, 1, 2)]
    q, k, v = (x * 1 for x in leaves)
    (k if which == "k" else v).data[0, 0, 7] = torch.nan
    found = matches(torch.arange(40).reshape(1, 1, 40, 1), (40,))
    mask = torch.ones(1, 40, dtype=torch.bool)
    out = scram.attend(q, k, v, found, radius=2, key_mask=mask, weight=weight, impl=impl).out
    reached = out.isnan().any(-1).flatten()
    assert reached.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]
    mask[0, 7] = False
    out, lse = scram.attend(q, k, v, found, radius=2, key_mask=mask, weight=weight, impl=impl)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("weight", ["mean", "relu"])
def test_a_dropped_weight_is_zero_even_if_it_was_nan(impl, weight):
    """Without a softmax one NaN score is one NaN weight; some queries drop it, the same ones everywhere."""
    q, k, v = (torch.ones(1, 1, 40, 1) for _ in range(3))
    k[0, 0, 20] = torch.nan
    matches = scram.Matches(torch.full((1, 1, 40, 1), 20, dtype=torch.int32), torch.zeros(1, 1, 40, 1), (40,))
    torch.manual_seed(0)
    out = scram.attend(q, k, v, matches, weight=weight, dropout_p=0.5, impl=impl).out.flatten()
    torch.manual_seed(0)
    kept = scram.attend(q, k.nan_to_num(9), v, matches, weight=weight, dropout_p=0.5, impl=impl).out.flatten() > 3
    assert (out.isnan() == kept).all()
    assert 10 < kept.sum() < 30


@pytest.mark.interpreted
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_nan_reaches_the_same_gradients_in_every_engine(impl, which, weight, dropout_p):
    tensors = [randn(1, 1, 5, 4, 3, seed=s) for s in (0, 1, 2)]
    tensors[which][0, 0, 2, 2] = torch.nan
    found = random_matches((1, 1, 5, 4), (5, 4), 1)
    grads = []
    for engine in (impl, "reference"):
        torch.manual_seed(0)  # the same weights are dropped
        leaves = [x.clone().requires_grad_() for x in tensors]
        attended = scram.attend(*leaves, found, weight=weight, dropout_p=dropout_p, impl=engine)
        grads.append(torch.autograd.grad(attended.out.sum() + attended.lse.sum(), leaves))
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_nan_query_reaches_no_other(impl):
    q, k, v = randn(3, 1, 1, 40, 4).unbind()
    found = matches(torch.arange(40).reshape(1, 1, 40, 1), (40,))
    clean = scram.attend(q, k, v, found, impl=impl).out
    q = q.clone()
    q[0, 0, 7, 2] = torch.nan
    dirty = scram.attend(q, k, v, found, impl=impl).out
    others = torch.arange(40) != 7
    assert torch.equal(clean[:, :, others], dirty[:, :, others])
    assert dirty[0, 0, 7].isnan().all()


def test_softmax_survives_large_scores(impl):
    q, k, v = (100 * randn(1, 1, 9, 4, seed=s) for s in range(3))
    found = matches(torch.arange(9).reshape(1, 1, 9, 1), (9,))
    out, lse = scram.attend(q, k, v, found, radius=9, impl=impl)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    assert lse.isfinite().all()


def test_chunks_do_not_change_the_answer(monkeypatch):
    leaves = [randn(2, 2, 5, 5, 4, seed=s).requires_grad_() for s in range(3)]
    found = random_matches((2, 2, 5, 5), (5, 5), 2)

    def everything():
        out, lse = scram.attend(*leaves, found, impl="reference")
        return [out, lse, *torch.autograd.grad(out.sum() + lse.square().sum(), leaves)]

    whole = everything()
    monkeypatch.setattr(sys.modules["scram.engines.reference.attend"], "CHUNK_ELEMENTS", 1000)
    for one, other in zip(whole, everything(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_the_result(impl, dtype):
    q, k, v = randn(3, 1, 1, 5, 5, 4).to(dtype).unbind()
    out, lse = scram.attend(q, k, v, random_matches((1, 1, 5, 5), (5, 5), 1), impl=impl)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_wide_values_are_not_rounded(impl, dtype):
    """Coordinates of 16 bits are off by up to half a point; the output has the values' dtype."""
    q, k, v = randn(1, 1, 40, 50, 8).to(dtype), randn(1, 1, 40, 50, 8, seed=1).to(dtype), 1000 + randn(1, 1, 40, 50, 2)
    found = scram.search(q, k, search=scram.Search(seed=0), impl=impl)
    assert torch.equal(
        scram.attend(q, k, v, found, radius=0, impl=impl).out.flatten(2, 3),
        v.flatten(2, 3)[:, :, found.index.flatten().long()],
    )
    wide = scram.attend(q.float(), k.float(), v, found, radius=2, impl=impl)
    ours = scram.attend(q, k, v, found, radius=2, impl=impl)
    assert ours.out.dtype == torch.float32
    torch.testing.assert_close(ours, wide, rtol=1e-6, atol=1e-5)
    rounded = scram.attend(q, k, v.to(dtype), found, radius=2, impl=impl)
    assert (rounded.out - wide.out).abs().max() > 0.1


def test_wide_values_in_every_stage(impl):
    q, k, v = randn(1, 2, 9, 10, 8).bfloat16(), randn(1, 2, 9, 10, 8, seed=1).bfloat16(), randn(1, 2, 9, 10, 3, seed=2)
    extra = (randn(1, 2, 3, 8, seed=3).bfloat16(), randn(1, 2, 3, 3, seed=4))
    settings = {"search": scram.Search(seed=0), "extra": extra, "impl": impl}
    for tail in (None, scram.Clusters(count=9, keys=20, seed=0), scram.DrawnKeys(samples=20, seed=0)):
        ours = scram.attention(q, k, v, tail=tail, **settings)
        wide = scram.attention(
            q.float(), k.float(), v, tail=tail, **{**settings, "extra": (extra[0].float(), extra[1])}
        )
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wide, rtol=1e-5, atol=1e-5)
    dense = scram.attention(q, k, v, extra=extra)  # small: dense
    torch.testing.assert_close(dense, scram.attention(q.float(), k.float(), v, extra=(extra[0].float(), extra[1])))
    exact = scram.exact_attention(q, k, v)
    torch.testing.assert_close(exact.out, scram.exact_attention(q.float(), k.float(), v).out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ATTENDED, ids=str)
def test_reference_attends_what_plain_python_attends(case):
    tensors = make_tensors(case)
    leaves, plain_leaves = tensors.leaves(torch.float64), tensors.leaves(torch.float64)
    attended = run_attend(case, tensors, leaves, "reference", dropout_seed=3)
    torch.manual_seed(3)
    expected = scram.Attended(*plain.attend(case, tensors, plain_leaves, int(draw_seed())))
    torch.testing.assert_close(attended.out, expected.out)
    torch.testing.assert_close(attended.lse, expected.lse)
    if case.batch:
        for ours, theirs in zip(gradients(attended, leaves), gradients(expected, plain_leaves), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", table(ATTENDED, "attend"))
def test_attend_is_as_near_float64_as_the_reference(case, impl):
    assert_attended_as_near_float64(case, make_tensors(case), impl, by=size if impl == "triton" else _largest)


def _largest(x):
    finite = torch.where(x.isfinite(), x, 0).abs()
    return float(finite.max()) if x.numel() else 0.0
