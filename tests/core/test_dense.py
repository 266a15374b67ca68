"""Dense attention by torch, with everything that a call of `scram.attention` may have."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram
from scram.core import dense
from scram.core.dense import dense_attention

SEEDED = torch.Generator().manual_seed(0)
Q = torch.randn(2, 4, 5, 6, 8, generator=SEEDED)
K = torch.randn(2, 2, 5, 6, 8, generator=SEEDED)
V = torch.randn(2, 2, 5, 6, 3, generator=SEEDED)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scale": 0.7},
        {"score": "l2"},
        {"score": "cosine", "scale": 3.0},
        {"causal": True},
        {"key_mask": torch.rand(2, 5, 6) < 0.5},
        {"key_mask": torch.rand(2, 4, 5, 6) < 0.5, "causal": True},
    ],
    ids=lambda how: " ".join(how) or "plain",
)
def test_it_is_exact(how):
    torch.testing.assert_close(dense_attention(Q, K, V, **how), scram.exact_attention(Q, K, V, **how).out)


@pytest.mark.parametrize("keys_at_once", [7, 4096])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scale": 40.0},
        {"score": "cosine"},
        {"causal": True},
        {"key_mask": torch.rand(2, 5, 6) < 0.2},
        {"key_mask": torch.rand(2, 4, 5, 6) < 0.2, "causal": True},
    ],
    ids=lambda how: " ".join(how) or "plain",
)
def test_few_queries_are_those_of_all(monkeypatch, how, keys_at_once):
    """In parts of the keys: what one part masks whole, and what no part leaves a key."""
    monkeypatch.setattr(dense, "KEYS_AT_ONCE", keys_at_once)
    queries = torch.tensor([29, 0, 17, 4, 11])
    some = dense_attention(Q, K, V, queries=queries, **how)
    torch.testing.assert_close(some, dense_attention(Q, K, V, **how).flatten(2, 3)[:, :, queries])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_few_queries_keep_the_dtype(dtype):
    queries = torch.tensor([3, 9])
    some = dense_attention(*(x.to(dtype) for x in (Q, K, V)), queries=queries)
    assert some.dtype == dtype
    rough = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(some.float(), dense_attention(Q, K, V).flatten(2, 3)[:, :, queries], **rough)


def fused_only():
    """On a CPU torch has one fused kernel; without another it refuses what would need the map of all pairs."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION])


@pytest.mark.parametrize("width", [3, 8, 13])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"score": "l2"},
        {"causal": True},
        {"key_mask": torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.5},
    ],
    ids=lambda how: " ".join(how) or "plain",
)
def test_values_of_any_width_take_the_fused_kernel(how, width):
    torch.manual_seed(0)
    q, k, v = (x.detach().clone().requires_grad_() for x in (Q, K, torch.randn(2, 2, 5, 6, width)))
    with fused_only():
        out = dense_attention(q, k, v, **how)
    want = scram.exact_attention(q, k, v, **how).out
    torch.testing.assert_close(out, want)
    over = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, (q, k, v), over) for x in (out, want))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("width", [3, 13])
def test_extra_values_of_another_width_take_the_fused_kernel(width):
    v, extra = torch.randn(2, 2, 5, 6, width), (torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, width))
    with fused_only():
        out = dense_attention(Q, K, v, extra=extra)
    k, v = (torch.cat([x.flatten(2, 3), more], 2) for x, more in zip((K, v), extra, strict=True))
    torch.testing.assert_close(out, scram.exact_attention(Q.flatten(2, 3), k, v).out.reshape(2, 4, 5, 6, width))


@pytest.mark.parametrize("use", ["tune", "plan", "judge"])
def test_what_is_compared_with_dense_attention_compares_with_the_fused_kernel(use):
    """Or the speed-ups of plans and judgments would be those over torch's slow path."""
    v = V.repeat_interleave(2, 1)
    plan = scram.tune(Q, K, V, error=0)
    with fused_only():
        if use == "tune":
            plan = scram.tune(Q, K, V, error=0)
        if use == "judge":
            scram.judge(scram.attention, Q, K.repeat_interleave(2, 1), v)
        assert plan.dense
        assert plan(Q, K, V).shape == v.shape


def test_a_query_without_a_legal_key_has_output_0():
    mask = torch.ones(2, 4, 5, 6, dtype=torch.bool)
    mask[1, 2] = False
    out = dense_attention(Q, K, V, key_mask=mask)
    assert (out[1, 2] == 0).all()
    torch.testing.assert_close(out[0], scram.exact_attention(Q, K, V).out[0])


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 4, 5, 6)])
def test_what_a_masked_key_holds_does_not_matter(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 2, 3] = False
    bad_k, bad_v = K.clone(), V.clone()
    bad_k[..., 2, 3, 0], bad_v[..., 2, 3, 1] = torch.nan, torch.inf
    want = dense_attention(Q, K, V, key_mask=mask)
    torch.testing.assert_close(dense_attention(Q, bad_k, bad_v, key_mask=mask), want)


def test_extra_keys_are_more_keys():
    extra = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 3)
    k, v = (torch.cat([x.flatten(2, 3), more], 2) for x, more in zip((K, V), extra, strict=True))
    want = scram.exact_attention(Q.flatten(2, 3), k, v).out.reshape(2, 4, 5, 6, 3)
    torch.testing.assert_close(dense_attention(Q, K, V, extra=extra), want)


def test_a_callable_score_is_refused():
    with pytest.raises(ValueError, match="takes no callable score"):
        dense_attention(Q, K, V, score=lambda q, k: (q * k).sum(-1))


@pytest.mark.parametrize("shape", [(0, 4, 5), (0, 2, 4, 5)], ids=str)
def test_an_empty_batch_with_a_mask(shape):
    q, k = torch.zeros(0, 2, 4, 5, 3), torch.zeros(0, 1, 4, 5, 3)
    assert dense_attention(q, k, k, key_mask=torch.ones(shape, dtype=torch.bool)).shape == q.shape
