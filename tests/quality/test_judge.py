"""`scram.judge`: the figures are those of their definitions, whatever the function does."""

import json
import math
from functools import partial
from time import sleep

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.quality import baseline, judge
from scram.quality.timing import Timing


def tensors(heads=2, size=12, width=8, batch=1, key_heads=None):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, size, size, width, generator=generator)
    k, v = torch.randn(2, batch, key_heads or heads, size, size, width, generator=generator).unbind()
    return q, k, v


def exact(q, k, v):
    return (q.flatten(2, 3) @ k.flatten(2, 3).mT * q.shape[-1] ** -0.5).softmax(-1) @ v.flatten(2, 3)


def test_an_error_that_is_known_is_found():
    """Of 144 queries the outputs of 100 are off by 1, 40 by 2, 4 by 8, in units of the head's RMS."""
    q, k, v = tensors()
    off = torch.tensor([1.0] * 100 + [2.0] * 40 + [8.0] * 4)

    def wrong(q, k, v):
        out = exact(q, k, v)
        rms = out.square().sum(-1).mean(-1).sqrt()
        way = F.normalize(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)), dim=-1)
        way[:, 1] /= 2
        return (out + rms[..., None, None] * off[:, None] * way).reshape(q.shape)

    found = scram.judge(wrong, q, k, v)
    assert found.name.endswith("wrong")
    assert (found.num_queries, found.queries) == (144, 144)
    for interval, values in ((found.median_error, (1.0, 0.5)), (found.p95_error, (2.0, 1.0))):
        torch.testing.assert_close(interval.value, torch.tensor([values]), rtol=1e-4, atol=0)
        assert (interval.low == interval.value).all()
        assert (interval.high == interval.value).all()  # all queries were looked at
    whole = math.sqrt((100 + 4 * 40 + 64 * 4) / 144)
    torch.testing.assert_close(found.output_error, torch.tensor([[whole, whole / 2]]), rtol=1e-4, atol=0)
    assert found.worst == (0, 0)


@pytest.mark.slow
def test_a_sample_has_intervals_that_hold_the_truth(monkeypatch):
    # Not timed: each of 21 calls would be made again and again.
    monkeypatch.setattr(judge, "clock", lambda call, *_, **__: (Timing(1.0, 1.0, 1.0, 1, None), call()))
    q, k, v = tensors(heads=1, size=40)
    lossy = partial(scram.attention, search=scram.Search(seed=0), tail=None)
    whole = scram.judge(lossy, q, k, v, num_queries=1600)
    held = 0
    for seed in range(20):
        found = scram.judge(lossy, q, k, v, num_queries=100, seed=seed)
        held += bool(found.p95_error.low <= whole.p95_error.value <= found.p95_error.high)
        held += bool(found.median_error.low <= whole.median_error.value <= found.median_error.high)
        assert found.median_error.low < found.median_error.value < found.median_error.high
    assert held >= 36
    assert "100 of 1600 queries" in str(found)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_dense_attention_is_exact_in_both_layouts(key_heads):
    q, k, v = tensors(heads=4, batch=2, key_heads=key_heads)
    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
    for found in (
        scram.judge(sdpa, q, k, v, layout="sdpa", name="torch"),
        scram.judge(lambda q, k, v: scram.exact_attention(q, k, v).out, q, k, v, num_queries=50),
    ):
        assert found.output_error.shape == (2, 4)
        assert found.p95_error.value.max() < 1e-5
    masked = torch.ones(2, 12, 12, dtype=torch.bool)
    masked[:, 6:] = False
    how = {"key_mask": masked, "scale": 0.7}
    right = scram.judge(partial(scram.attention, **how), q, k, v, **how)
    assert right.p95_error.high.max() < 1e-5
    assert scram.judge(scram.attention, q, k, v, **how).p95_error.low.min() > 0.1
    causal = scram.judge(partial(sdpa, is_causal=True), q, k, v, layout="sdpa", causal=True)
    assert causal.p95_error.high.max() < 1e-5


def test_sixteen_bits_are_seen():
    """The truth is not rounded: a function that is right to its last bit is off by that bit."""
    q, k, v = (x.to(torch.bfloat16) for x in tensors())
    found = scram.judge(scram.attention, q, k, v)
    assert found.median_error.value.min() > 1e-4
    assert found.p95_error.value.max() < 1e-2

    def wide(q, k, v):
        return scram.exact_attention(q.float(), k.float(), v.float()).out

    assert scram.judge(wide, q, k, v).p95_error.value.max() < 1e-5
    rounded = scram.judge(lambda q, k, v: wide(q, k, v).to(torch.bfloat16), q, k, v)
    assert rounded.median_error.value.min() > 1e-4


def test_time_is_that_of_a_call_and_the_ratio_that_of_dense_attention():
    q, k, v = tensors(size=20)

    def slow(q, k, v):
        sleep(0.02)
        return scram.exact_attention(q, k, v).out

    found = scram.judge(slow, q, k, v)
    assert 0.02 <= found.timing.least <= found.timing.seconds <= found.timing.most
    assert found.ratio == found.dense_seconds / found.timing.seconds < 1
    assert f"{1 / found.ratio:.3g} times slower" in str(found)
    assert not found.dense_is_continued


def test_dense_attention_that_takes_too_long_is_continued(monkeypatch):
    q, k, v = tensors(size=32)
    monkeypatch.setattr(baseline, "DENSE_PAIRS", {"cpu": 2 * 1024 * 256})
    assert not judge.Judge(q, k, v).dense_is_continued
    monkeypatch.setattr(judge, "LONGEST", 0.0)
    truth = judge.Judge(q, k, v)
    assert truth.dense_is_continued
    found = truth.judge(lambda q, k, v: scram.exact_attention(q, k, v).out)
    assert found.dense_is_continued
    assert "dense attention about" in str(found)


BUSY = "repeated times differ by more than a third"


@pytest.mark.parametrize(
    ("dense", "steady_function", "steady"),
    [((0.3, 0.3), True, True), ((0.3, 0.5), True, False), ((0.5, 0.3), True, False), ((0.3, 0.3), False, False)],
)
def test_times_that_differ_are_said(monkeypatch, dense, steady_function, steady):
    """Of the function, or of dense attention before and after it."""
    made = [Timing(seconds, seconds, seconds, 1, None) for seconds in dense]
    made.insert(1, Timing(0.1, 0.1, 0.1, 3, None, steady_function))
    monkeypatch.setattr(judge, "clock", lambda call, *_, **__: (made.pop(0), call()))
    found = scram.judge(scram.attention, *tensors())
    assert found.steady == found.numbers()["steady"] == steady
    assert (BUSY in str(found)) == (not steady)


def test_numbers_are_json():
    q, k, v = tensors()
    found = scram.judge(scram.attention, q, k, v, num_queries=20)
    numbers = json.loads(json.dumps(found.numbers(), allow_nan=False))
    assert numbers["p95_error"]["high"] == [[None, None]]  # 20 queries do not bound it
    assert numbers["median_error"]["value"] == found.median_error.value.tolist()
    assert numbers["seconds"] == found.timing.seconds
    assert numbers["ratio"] == found.ratio


def test_what_it_prints():
    q, k, v = tensors(heads=20)
    found = scram.judge(scram.attention, q, k, v, name="mine")
    lines = repr(found).splitlines()
    assert lines[0] == "mine, on 144 of 144 queries"
    assert found.p95_error.cell(0, 3) in lines[5]
    assert "  ... and 4 more" in lines
    made = {**vars(found), "timing": Timing(0.5, 0.4, 0.6, 3, 3 << 20), "dense_seconds": 2.0}
    text = str(scram.Judgment(**made))
    assert "time: 500 ms (400 ms to 600 ms, calls: 3); dense attention 2 s: 4 times faster" in text
    assert "peak memory of a call: 3.0 MiB" in text


def test_queries_without_keys_are_left_out_and_nan_counts():
    q, k, v = tensors(batch=2)
    mask = torch.ones(2, 12, 12, dtype=torch.bool)
    mask[1] = False
    found = scram.judge(partial(scram.attention, key_mask=mask), q, k, v, key_mask=mask)
    assert found.p95_error.value[0].max() < 1e-5
    assert found.p95_error.value[1].isnan().all()
    assert found.worst[0] == 0

    def broken(q, k, v):
        out = scram.attention(q, k, v, key_mask=mask)
        out[0, 0, :, 2] = torch.nan
        return out

    assert scram.judge(broken, q, k, v, key_mask=mask).p95_error.value[0, 0] == torch.inf


BAD = torch.full((1, 2, 12, 12, 8), torch.nan)


@pytest.mark.parametrize(
    ("function", "how", "message"),
    [
        (lambda q, k, v: 3, {}, r"function must return a tensor of shape \(1, 2, 12, 12, 8\), got int"),
        (lambda q, k, v: q.flatten(2, 3), {}, r"got \(1, 2, 144, 8\); it may need layout='sdpa'"),
        (lambda q, k, v: q[..., 0], {"layout": "sdpa"}, r"got \(1, 2, 144\); it may need layout='grid'"),
        (lambda q, k, v: q.to("meta"), {}, "must return a tensor on cpu, got meta"),
        (lambda q, k, v: q / 0 * 0, {}, "returned 2304 of 2304 values that are NaN or infinite"),
        (scram.attention, {"layout": "flat"}, "layout must be one of 'grid', 'sdpa', got 'flat'"),
        (scram.attention, {"num_queries": 0}, "num_queries must be at least 1"),
        (scram.attention, {"is_causal": True}, r"judge\(\) has no argument is_causal; use causal="),
        (scram.attention, {"q": BAD}, "q must be finite, 2304 of its 2304 values"),
        (scram.attention, {"v": BAD}, "v must be finite"),
        (scram.attention, {"q": BAD[0]}, "k must have as many axes as q"),
        (scram.attention, {"q": BAD[:0], "k": BAD[:0], "v": BAD[:0]}, "q must hold at least one query"),
    ],
)
def test_wrong_use_is_refused(function, how, message):
    q, k, v = tensors()
    given = {"q": q, "k": k, "v": v} | how
    with pytest.raises((ValueError, TypeError), match=message):
        scram.judge(function, given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_a_function_that_writes_into_its_inputs_harms_no_other():
    truth = judge.Judge(*tensors())
    for _ in range(2):
        found = truth.judge(lambda q, k, v: scram.exact_attention(q, k, v.mul_(1)).out + 0 * q.zero_())
        assert found.p95_error.value.max() < 1e-5
    assert truth.q.abs().sum() > 0


def test_an_error_of_the_function_is_not_hidden():
    def fails(q, k, v):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scram.judge(fails, *tensors())


def test_what_is_no_attention_function_is_refused():
    q = torch.randn(1, 1, 4, 4, 8)
    with pytest.raises(TypeError, match="function must be callable"):
        scram.judge(None, q, q, q)
    with pytest.raises(ValueError, match="would attend along rows; pass layout='sdpa'"):
        scram.judge(torch.nn.functional.scaled_dot_product_attention, q, q, q)
