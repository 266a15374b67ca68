"""trust: the figures of the measures and of `attention`, and intervals that hold."""

from dataclasses import replace

import pytest
import torch

import scram
from support.trusting import SEARCH, coherent, diffuse

INTERVALS = ("mass", "recall", "median_error", "p95_error", "tail_median_error", "tail_p95_error")


def relative(off, size):
    """Distances of queries [B, H, n] over the root mean square of the exact sizes [B, H, n]."""
    return off / size.square().mean(-1, keepdim=True).sqrt()


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"key_mask": torch.arange(2 * 80).reshape(2, 8, 10) % 3 > 0},
    "other": {"score": "cosine", "scale": 4.0, "radius": (0, 2)},
    "separated": {"search": scram.Search(matches=3, separation=2, seed=0)},
}


@pytest.mark.parametrize("name", CASES)
def test_all_queries_give_what_the_measures_give(name):
    how = {"search": SEARCH, "radius": 1, **CASES[name]}
    q, k, v = torch.randn(2, 4, 8, 10, 6), torch.randn(2, 2, 8, 10, 6), torch.randn(2, 2, 8, 10, 5)
    cold = {} if "causal" in how else {"tail": scram.Clusters(count=8, keys=0)}  # no routed keys to start from
    found = scram.trust(q, k, v, **how, **cold)
    same = {name: how[name] for name in ("causal", "key_mask", "score") if name in how}
    matches = scram.search(q, k, search=how["search"], **same)
    attended = scram.attend(q, k, v, matches, radius=how["radius"], scale=how.get("scale"), **same)
    wide = {"scale": how.get("scale"), **same}
    mass = scram.measure.captured_mass(q, k, attended, **wide)
    torch.testing.assert_close(found.mass.value, mass)
    torch.testing.assert_close(found.output_error, scram.measure.output_error(q, k, v, attended, **wide))
    separation = how["search"].separation
    torch.testing.assert_close(found.recall.value, scram.measure.recall(q, k, matches, separation=separation, **same))
    exact = scram.exact_attention(q, k, v, **wide).out
    error = relative((attended.out - exact).norm(dim=-1).flatten(2), exact.norm(dim=-1).flatten(2))
    torch.testing.assert_close(found.median_error.value, error.quantile(0.5, -1))
    torch.testing.assert_close(found.p95_error.value, error.quantile(0.95, -1))
    for interval in (getattr(found, one) for one in INTERVALS):
        torch.testing.assert_close(interval.low, interval.high)  # nothing is left to chance


TAILS = {
    "auto": {},
    "few": {"tail": scram.Clusters(count=9, keys=0)},
    "own seed": {
        "tail": scram.Clusters(count=32, keys=64, seed=7),
        "search": scram.Search(matches=3, separation=2, seed=0),
    },
    "few keys": {"tail": scram.Clusters(count=24, keys=64), "radius": 2},
    "mask": {"tail": scram.Clusters(count=32, keys=64), "key_mask": torch.arange(24 * 24).reshape(1, 24, 24) % 3 > 0},
    "mask of each head": {
        "tail": scram.Clusters(count=32, keys=64),
        "key_mask": torch.arange(4 * 24 * 24).reshape(1, 4, 24, 24) % 5 > 1,
    },
    "cosine": {"tail": scram.Clusters(count=32, keys=64), "score": "cosine", "scale": 4.0},
    "l2": {"tail": scram.Clusters(count=32, keys=64), "score": "l2", "scale": 0.05, "radius": (0, 2)},
    "all keys": {"tail": scram.Clusters(count=576)},
}


@pytest.mark.parametrize("name", TAILS)
@pytest.mark.parametrize("sample", [100, 576])
def test_the_error_with_clusters_is_that_of_attention(name, sample):
    q, k, v = diffuse(heads=2)
    how = {"search": SEARCH, **TAILS[name]}
    found = scram.trust(q, k, v, num_queries=sample, seed=3, **how)
    out = scram.attention(q, k, v, **how)
    wanted = scram.measure.sample_queries(q, sample, 3)
    same = {one: how[one] for one in ("key_mask", "scale", "score") if one in how}
    exact = scram.exact_attention(q, k, v, queries=wanted, **same).out
    off, size = (out.flatten(2, 3)[:, :, wanted] - exact).norm(dim=-1), exact.norm(dim=-1)
    close = {"atol": 1e-6, "rtol": 1e-3}
    error = relative(off, size)
    torch.testing.assert_close(found.tail_median_error.value, error.quantile(0.5, -1), **close)
    torch.testing.assert_close(found.tail_p95_error.value, error.quantile(0.95, -1), **close)
    torch.testing.assert_close(found.tail_output_error, off.norm(dim=-1) / size.norm(dim=-1), **close)
    assert (found.tail_output_error < found.output_error).all()
    assert (found.tail_output_error > 1e-4).all() == (name not in ("all keys", "auto"))  # of 576


def test_a_codebook_is_used_as_it_is():
    q, k, v = diffuse()
    matches, extra = scram.search(q, k, search=SEARCH), (torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 16))
    old = scram.cluster(q, k.roll(1, 2), v, clusters=scram.Clusters(count=16, keys=32, seed=0))
    found = scram.trust(q, k, v, tail=old, matches=matches, extra=extra)
    out = scram.attend(q, k, v, matches, tail=old, extra=extra).out
    exact = scram.merge(scram.exact_attention(q, k, v), _off_grid(q, extra, 2)).out
    some = scram.measure.sample_queries(q, 512, 0)
    error = relative(*(x.norm(dim=-1).flatten(2)[..., some] for x in (out - exact, exact)))
    torch.testing.assert_close(found.tail_p95_error.value, error.quantile(0.95, -1), atol=1e-6, rtol=1e-3)
    assert found.tail is old
    assert "16 clusters" in str(found)


def test_the_tail_is_that_of_attention():
    q, k, v = diffuse()
    assert isinstance(scram.trust(q, k, v).tail, scram.Clusters)
    causal = scram.trust(q[:, :1], k, v, causal=True, search="auto").tail
    assert isinstance(causal, scram.Clusters)
    assert causal.stretch
    drawn = scram.trust(q[:, :1], k, v, causal=True, search="auto", tail=scram.DrawnKeys()).tail
    assert isinstance(drawn, scram.DrawnKeys)
    for how in ({"tail": None}, {"score": lambda q, k: (q * k).sum(-1)}):
        found = scram.trust(q, k, v, search=SEARCH, **how)
        assert found.tail is None
        assert found.tail_output_error.isnan().all()
        assert found.tail_median_error.value.isnan().all()
        assert found.verdict == "dense"
        assert found.cost.tail == found.cost.sparse
        assert "tail: median" not in str(found)


def test_extra_keys_are_held():
    q, k, v = torch.randn(1, 2, 8, 10, 6), torch.randn(1, 2, 8, 10, 6), torch.randn(1, 2, 8, 10, 5)
    extra = torch.randn(1, 2, 3, 6), torch.randn(1, 2, 3, 5)
    matches = scram.search(q, k, search=SEARCH)
    found = scram.trust(q, k, v, extra=extra, matches=matches)
    joined = scram.merge(scram.exact_attention(q, k, v), _off_grid(q, extra, 1))
    ours = scram.attend(q, k, v, matches, extra=extra)
    want = (ours.lse - joined.lse).exp().flatten(2).mean(-1)
    torch.testing.assert_close(found.mass.value, want)


def _off_grid(q, extra, each):
    """Dense attention over the extra keys, each of whose heads serves `each` of q's."""
    keys, values = (x.repeat_interleave(each, 1) for x in extra)
    a = torch.einsum("bhxye,bhke->bhxyk", q, keys) * q.shape[-1] ** -0.5
    return scram.Attended(torch.einsum("bhxyk,bhkf->bhxyf", a.softmax(-1), values), a.logsumexp(-1))


def test_drawn_keys_are_really_drawn():
    q, k, v = diffuse()
    tail = scram.DrawnKeys(samples=60, seed=5)
    found = scram.trust(q[:, :1], k, v, search=SEARCH, tail=tail, num_queries=576, causal=True)
    out = scram.attention(q[:, :1], k, v, search=SEARCH, tail=tail, causal=True)
    exact = scram.exact_attention(q[:, :1], k, v, causal=True).out
    error = relative((out - exact).norm(dim=-1).flatten(2), exact.norm(dim=-1).flatten(2))
    torch.testing.assert_close(found.tail_p95_error.value, error.quantile(0.95, -1), atol=1e-6, rtol=1e-3)
    assert found.tail_p95_error.value > 0.01


@pytest.mark.slow
def test_intervals_enclose_the_truth():
    """In at least 90 of 100 samples of 512 queries."""
    q, k, v = coherent(sharpness=50)
    matches = scram.search(q, k, search=SEARCH)
    tail = scram.cluster(q, k, v, clusters=scram.Clusters(count=64, seed=0))
    truth = scram.trust(q, k, v, matches=matches, tail=tail, num_queries=q[0, 0, ..., 0].numel())
    assert 0.3 < truth.mass.value < 0.95
    assert truth.tail_median_error.value > 1e-3
    held, widths = dict.fromkeys(INTERVALS, 0), []
    for seed in range(100):
        found = scram.trust(q, k, v, matches=matches, tail=tail, seed=seed)
        widths.append(found.mass.high - found.mass.low)
        for name in INTERVALS:
            value, low, high = getattr(truth, name).value, getattr(found, name).low, getattr(found, name).high
            held[name] += bool(low <= value <= high)
    assert min(held.values()) >= 90, held
    assert torch.stack(widths).mean() < 0.1


def test_masked_keys_are_as_if_they_were_not_there():
    q, k, v = (torch.randn(1, 1, 16, 6) for _ in range(3))
    mask = (torch.arange(16) < 9)[None]
    fewer = scram.search(q, k[:, :, :9], search=SEARCH)
    same = scram.Matches(fewer.index, fewer.score, (16,))
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    book = scram.cluster(q, k[:, :, :9], v[:, :, :9], clusters=scram.Clusters(count=3, keys=0, seed=0))
    label = torch.cat([book.label, torch.full((1, 1, 7), -1, dtype=torch.int32)], -1)
    tails = (replace(book, label=label, order=None, key_mask=mask), book), (None, None)
    for of_all, of_fewer in tails:
        masked = scram.trust(q, k, v, key_mask=mask, matches=same, tail=of_all)
        gone = scram.trust(q, k[:, :, :9], v[:, :, :9], matches=fewer, tail=of_fewer)
        for name in INTERVALS:
            torch.testing.assert_close(getattr(masked, name).value, getattr(gone, name).value, equal_nan=True)
        assert of_all is None or gone.tail_median_error.value > 0.01


def test_no_match_holds_nothing():
    q, k, v = (x.requires_grad_() for x in coherent(size=12))
    found = scram.search(q, k, search=SEARCH)
    none = scram.Matches(torch.full_like(found.index, -1), found.score, found.key_grid)
    for index in (none.index, torch.full_like(found.index, 144)):
        trust = scram.trust(q, k, v, matches=scram.Matches(index, found.score, found.key_grid), seed=4)
        assert trust.mass.value == 0
        torch.testing.assert_close(trust.output_error, torch.ones(1, 1))
        assert trust.tail_output_error < 1e-5  # as many clusters as keys
        assert not trust.output_error.requires_grad


def test_the_sample_is_seeded():
    q, k, v = coherent()
    matches = scram.search(q, k, search=SEARCH)
    one, same, other = (scram.trust(q, k, v, matches=matches, num_queries=100, seed=seed) for seed in (1, 1, 2))
    assert one.mass.value == same.mass.value != other.mass.value
    for trust, seed in ((one, 1), (other, 2)):
        assert trust.recall.value == scram.measure.recall(q, k, matches, num_queries=100, seed=seed)
    assert (one.num_queries, one.queries) == (100, 1600)
    assert "on 100 of 1600 queries" in repr(one)


def test_queries_without_keys_are_left_out():
    q, k, v = torch.randn(2, 1, 8, 10, 6), torch.randn(2, 1, 8, 10, 6), torch.randn(2, 1, 8, 10, 5)
    mask = torch.ones(2, 8, 10, dtype=torch.bool)
    mask[1] = False
    found = scram.trust(q, k, v, key_mask=mask, search=SEARCH)
    assert found.mass.value[0].isfinite()
    assert found.mass.value[1].isnan()
    assert found.median_error.value[1].isnan()
    assert str(found)


def test_autocast_does_not_blur_it():
    q, k, v = coherent(size=12)
    matches = scram.search(q, k, search=SEARCH)
    plain = scram.trust(q, k, v, matches=matches)
    with torch.autocast("cpu", torch.bfloat16):
        assert (scram.trust(q, k, v, matches=matches).output_error == plain.output_error).all()
