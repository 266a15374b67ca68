"""Dense attention in causal order: the reference by plain loops, and the CPU engine as near float64 as it."""

import math

import pytest
import torch

from scram.engines.cpu.engine import earlier, earlier_backward
from scram.engines.reference.earlier import earlier as plainly
from scram.spec.noise import noise
from support.cases import assert_as_near_float64, size
from support.earlier_calls import CASES, by_engine, differentiated, earlier_call


def by_loops(call):
    """out and lse by the words of EarlierCall."""
    batch, heads, length, _ = call.q.shape
    group = heads // call.k.shape[1]
    out = torch.zeros(*call.q.shape[:-1], call.v.shape[-1], dtype=torch.float64)
    lse = torch.full(call.q.shape[:-1], -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            source = h // group
            for i in range(length):
                keys = [j for j in range(i + 1) if call.usable is None or call.usable[b, source, j]]
                if not keys:
                    continue
                a = [call.scale * float(call.q[b, h, i] @ call.k[b, source, j]) for j in keys]
                top = max(a)
                total = sum(math.exp(x - top) for x in a)
                lse[b, h, i] = math.log(total) + top
                for j, x in zip(keys, a, strict=True):
                    p = math.exp(x - top) / total
                    if call.dropout_seed is not None:
                        drops = int(noise(call.dropout_seed, b * heads + h, i, j)) < int(call.dropout_p * 2**32)
                        p = 0.0 if drops else p / (1 - call.dropout_p)
                    out[b, h, i] += p * call.v[b, source, j]
    return out, lse


@pytest.mark.parametrize("one", CASES[:4], ids=str)
def test_the_reference_by_plain_loops(one):
    call = earlier_call(one, torch.float64)
    for made, want in zip(plainly(call), by_loops(call), strict=True):
        torch.testing.assert_close(made, want)


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_cpu_engine_is_as_near_float64_as_the_reference(one):
    truth, same = (differentiated(earlier_call(one, dtype), plainly) for dtype in (torch.float64, torch.float32))
    found = by_engine(earlier_call(one), earlier, earlier_backward)
    assert_as_near_float64(truth, same, found, size)


def test_nothing_of_later_or_masked_keys_is_read():
    call = earlier_call(CASES[2])
    large = torch.finfo(torch.float32).max
    masked = ~call.usable.unsqueeze(-1)
    spoiled = call._replace(k=torch.where(masked, large, call.k), v=torch.where(masked, torch.nan, call.v))
    for one, two in zip(*(by_engine(x, earlier, earlier_backward) for x in (call, spoiled)), strict=True):
        assert torch.equal(one, two)


def test_a_later_value_too_large_for_a_product_reaches_no_earlier_gradient():
    call = earlier_call(CASES[1])
    call.v[:, :, 100:] = 3e38
    out, lse = earlier(call)
    grad = torch.zeros_like(out)
    grad[:, :, :100] = 5.0
    grads = earlier_backward(call, out, lse, grad, torch.zeros_like(lse))
    assert all(bool(x.isfinite().all()) for x in grads)
    assert not grads.v[:, :, 100:].any()
