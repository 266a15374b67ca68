"""Truth: the sample is exact attention, and errors are those of the definition."""

import pytest
import torch

import scram
from scram.core.dense import every_key
from scram.quality.truth import Errors, Truth


def tensors(heads=2, key_heads=2, grid=(9, 11), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, *grid, 6, generator=generator).to(dtype)
    k, v = (torch.randn(2, key_heads, *grid, width, generator=generator).to(dtype) for width in (6, 5))
    return q, k, v


MASK = torch.arange(2 * 99).reshape(2, 9, 11) % 3 > 0
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"key_mask": MASK},
    "cosine": {"score": "cosine", "scale": 3.0},
    "callable": {"score": lambda q, k: -(q - k).abs().sum(-1), "scale": 0.5},
}


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_sample_is_exact_attention(name, key_heads, extra):
    """Against dense attention of all keys in one matrix."""
    q, k, v = tensors(key_heads=key_heads)
    more = (torch.randn(2, key_heads, 3, 6), torch.randn(2, key_heads, 3, 5)) if extra else None
    how = CASES[name]
    truth = Truth.of(q, k, v, extra=more, num_queries=40, seed=3, **how)
    assert torch.equal(truth.queries, scram.measure.sample_queries(q, 40, 3))
    assert truth.points == 99
    want = in_one_matrix(q, k, v, more, **how)
    torch.testing.assert_close(truth.out, want.flatten(2, 3)[:, :, truth.queries], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(every_key(q, k, v, extra=more, **how), want, atol=1e-5, rtol=1e-4)
    with_lse = Truth.of(q, k, v, extra=more, num_queries=40, seed=3, with_lse=True, **how)
    torch.testing.assert_close(with_lse.out, truth.out, atol=1e-5, rtol=1e-4)
    assert with_lse.lse.abs().max() > 0.1


def in_one_matrix(q, k, v, extra, causal=False, key_mask=None, scale=None, score="dot"):
    each = q.shape[1] // k.shape[1]
    flat, keys, values = q.flatten(2, 3), *(x.flatten(2, 3) for x in (k, v))
    legal = torch.ones(2, 1, 99, 99, dtype=torch.bool)
    legal = legal.tril() if causal else legal
    legal = legal if key_mask is None else legal & key_mask.reshape(2, 1, 1, 99)
    if extra is not None:
        keys, values = torch.cat([keys, extra[0]], 2), torch.cat([values, extra[1]], 2)
        legal = torch.cat([legal, legal.new_ones(2, 1, 99, 3)], -1)
    keys, values = (x.repeat_interleave(each, 1) for x in (keys, values))
    if score == "cosine":
        flat, keys = (torch.nn.functional.normalize(x, dim=-1) for x in (flat, keys))
    a = score(flat.unsqueeze(3), keys.unsqueeze(2)) if callable(score) else flat @ keys.mT
    a = (a * (scale or (6**-0.5 if score == "dot" else 1))).masked_fill(~legal, -torch.inf)
    return (a.softmax(-1) @ values).reshape(*q.shape[:-1], 5)


def test_errors_are_those_of_the_definition():
    q, k, v = tensors()
    exact = scram.exact_attention(q, k, v).out
    out = exact + 0.1 * torch.randn(exact.shape)
    found = Truth.of(q, k, v).errors(out)
    rms = exact.square().sum(-1).flatten(2).mean(-1).sqrt()
    each = (out - exact).norm(dim=-1).flatten(2) / rms.unsqueeze(-1)
    torch.testing.assert_close(found.p95.value, each.quantile(0.95, -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.median.value, each.quantile(0.5, -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.output, (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1))
    worst = float(found.p95.high.max())
    assert found.worst[2] == worst
    assert found.keeps(worst * 1.001)
    assert not found.keeps(worst * 0.999)


def test_the_root_mean_square_is_of_the_sample_too():
    """All errors are equal, sizes are not: what is open is the root alone."""
    size = torch.randn(1, 1, 100).exp()
    found = Errors.of(torch.ones(1, 1, 100), size, 1000).p95
    assert found.low < 0.98 * found.value
    assert found.high > 1.02 * found.value
    assert Errors.of(torch.ones(1, 1, 100), size, 100).p95.high == found.value


def test_every_head_must_keep_it():
    q, k, v = tensors()
    out = scram.exact_attention(q, k, v).out.clone()
    out[1, 1] *= 2
    assert not Truth.of(q, k, v).errors(out).keeps(0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_truth_of_half_precision_is_not_rounded(dtype):
    q, k, v = tensors(dtype=dtype)
    truth = Truth.of(q, k, v)
    assert truth.out.dtype == torch.float32
    exact = scram.exact_attention(q.float(), k.float(), v.float()).out
    torch.testing.assert_close(truth.out, exact.flatten(2, 3), atol=1e-5, rtol=1e-4)
    rounding = truth.errors(exact.to(dtype)).p95.value
    assert (rounding > 1e-5).all()
    assert (rounding < 1e-2).all()


def test_queries_without_a_key_are_left_out():
    q, k, v = tensors()
    mask = torch.ones(2, 9, 11, dtype=torch.bool)
    mask[1] = False
    found = Truth.of(q, k, v, key_mask=mask).errors(scram.exact_attention(q, k, v, key_mask=mask).out + 1)
    assert found.p95.value[1].isnan().all()
    assert (found.p95.value[0] > 0).all()
    assert not found.keeps(0.1)
    assert found.worst[2] == float(found.p95.high[0].max())
    nothing = Truth.of(q, k, v, key_mask=mask & False).errors(torch.zeros(2, 2, 9, 11, 5))
    assert nothing.keeps(0.0)


def test_sizes_are_of_the_queries_that_count():
    """Under causal order the first half of the queries has no key here."""
    q, k, v = tensors()
    mask = (torch.arange(99) >= 50).reshape(1, 9, 11).expand(2, -1, -1)
    how = {"causal": True, "key_mask": mask}
    exact = scram.exact_attention(q, k, v, **how).out
    found = Truth.of(q, k, v, **how).errors(exact + 0.1)
    rms = exact.flatten(2, 3)[:, :, 50:].square().sum(-1).mean(-1).sqrt()
    torch.testing.assert_close(found.median.value, (5 * 0.01) ** 0.5 / rms, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.output, (5 * 0.01) ** 0.5 / rms, rtol=1e-4, atol=1e-5)


def test_what_is_not_finite_is_infinitely_far_off():
    q, k, v = tensors()
    out = scram.exact_attention(q, k, v).out.clone()
    out[0, 0, :4] = torch.nan
    found = Truth.of(q, k, v).errors(out)
    assert found.p95.high[0, 0] == torch.inf
    assert not found.keeps(1e30)
    assert found.p95.high[0, 1] < 1e-4


def test_outputs_of_zero():
    """Nothing can be relative to 0: right is right, and anything else is infinitely far off."""
    size = torch.zeros(1, 1, 100)
    assert Errors.of(torch.zeros(1, 1, 100), size, 100).keeps(0.0)
    assert not Errors.of(torch.full((1, 1, 100), 1e-9), size, 100).keeps(1e9)


def test_a_callable_score_takes_no_dropout():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="callable score takes no dropout; pass dropout_p=0"):
        every_key(q, k, v, score=lambda q, k: (q * k).sum(-1), dropout_p=0.1)


@pytest.mark.parametrize("unit", [1e-25, 1e-22, 1e25, 1e37])
def test_outputs_far_from_one_are_compared(unit):
    q, k, v = torch.randn(3, 1, 1, 8, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()
    truth = Truth.of(q, k, v * unit)
    assert float(truth.errors(torch.zeros_like(v)).output) == pytest.approx(1, rel=1e-3)
    near = Truth.of(q, k, v).errors(1.5 * scram.exact_attention(q, k, v).out)
    far = truth.errors(1.5 * scram.exact_attention(q, k, v * unit).out)
    torch.testing.assert_close(far.output, near.output, rtol=1e-3, atol=0)


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("unit", [1e-20, 1e-21, 1e-22, 1e-23])
def test_clusters_of_tiny_values_are_those_of_the_scores(impl, unit):
    smooth = torch.nn.functional.interpolate(
        2 * torch.randn(3, 8, 6, 6, generator=torch.Generator().manual_seed(0)), (24, 24), mode="bicubic"
    )
    q, k, v = smooth.movedim(1, -1)[:, None, None]
    tail = scram.Clusters(count=64, keys=64, seed=0)
    out = scram.attention(q, k, v * unit, search=None, tail=tail, impl=impl)
    off = (out / unit - scram.exact_attention(q, k, v).out).norm() / scram.exact_attention(q, k, v).out.norm()
    assert float(off) < 0.2
