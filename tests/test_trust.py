"""trust: the figures of the measures, intervals that hold, and verdicts that are right where the answer is known."""

import pytest
import torch

import scram
from scram.trust import Cost, Interval, Trust, _mean, _quantile

SEARCH = scram.Search(seed=0)


def coherent(size=40, sharpness=9.0, noise=0.4, width=24):
    """Each query has a key of its own, a few points away, as in matching; noise makes some of them hard."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 1, size, size, width, generator=generator), dim=-1)
    moved = k.roll((2, 3), (2, 3))
    q = moved + noise * torch.randn(k.shape, generator=generator) * torch.rand(1, 1, size, size, 1, generator=generator)
    v = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1)[None, None].float()
    return sharpness * q, k, v


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
    found = scram.trust(q, k, v, **how)
    same = {name: how[name] for name in ("causal", "key_mask", "score") if name in how}
    matches = scram.search(q, k, search=how["search"], **same)
    attended = scram.attend(q, k, v, matches, radius=how["radius"], scale=how.get("scale"), **same)
    wide = {"scale": how.get("scale"), **same}
    mass = scram.measure.captured_mass(q, k, attended, **wide)
    torch.testing.assert_close(found.mass.value, mass)
    torch.testing.assert_close(found.l2_error, scram.measure.output_error(q, k, v, attended, **wide))
    separation = how["search"].separation
    torch.testing.assert_close(found.recall.value, scram.measure.recall(q, k, matches, separation=separation, **same))
    exact = scram.exact_attention(q, k, v, **wide).out
    error = ((attended.out - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten(2)
    torch.testing.assert_close(found.median_error.value, error.quantile(0.5, -1))
    torch.testing.assert_close(found.p95_error.value, error.quantile(0.95, -1))
    for interval in (found.mass, found.recall, found.median_error, found.p95_error):
        torch.testing.assert_close(interval.low, interval.high)  # nothing is left to chance


def test_extra_keys_are_held():
    q, k, v = torch.randn(1, 2, 8, 10, 6), torch.randn(1, 2, 8, 10, 6), torch.randn(1, 2, 8, 10, 5)
    extra = torch.randn(1, 2, 3, 6), torch.randn(1, 2, 3, 5)
    matches = scram.search(q, k, search=SEARCH)
    found = scram.trust(q, k, v, extra=extra, matches=matches)
    joined = scram.merge(scram.exact_attention(q, k, v), _off_grid(q, extra))
    ours = scram.attend(q, k, v, matches, extra=extra)
    want = (ours.lse - joined.lse).exp().flatten(2).mean(-1)
    torch.testing.assert_close(found.mass.value, want)


def _off_grid(q, extra):
    """Dense attention over the extra keys."""
    a = torch.einsum("bhxye,bhke->bhxyk", q, extra[0]) * q.shape[-1] ** -0.5
    return scram.Attended(torch.einsum("bhxyk,bhkf->bhxyf", a.softmax(-1), extra[1]), a.logsumexp(-1))


@pytest.mark.slow
def test_intervals_enclose_the_truth():
    """In at least 90 of 100 samples of 512 queries."""
    q, k, v = coherent(sharpness=50)
    matches = scram.search(q, k, search=SEARCH)
    truth = scram.trust(q, k, v, matches=matches, num_queries=q[0, 0, ..., 0].numel())
    assert 0.3 < truth.mass.value < 0.95
    names = ("mass", "recall", "median_error", "p95_error")
    held, widths = dict.fromkeys(names, 0), []
    for seed in range(100):
        found = scram.trust(q, k, v, matches=matches, seed=seed)
        widths.append(found.mass.high - found.mass.low)
        for name in names:
            value, low, high = getattr(truth, name).value, getattr(found, name).low, getattr(found, name).high
            held[name] += bool(low <= value <= high)
    assert min(held.values()) >= 90, held
    assert torch.stack(widths).mean() < 0.1


def test_intervals_of_small_samples():
    """Drawn from laws whose mean and quantiles are known, without end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 2000, 100, generator=generator)
    held = {
        "share": _held(_mean((x < 0.98).float(), 10**9), 0.98),
        "mean": _held(_mean(x.square(), 10**9), 1 / 3),
        "median": _held(_quantile(x, 0.5, 10**9), 0.5),
        "p95": _held(_quantile(x, 0.95, 10**9), 0.95),
    }
    assert all(0.93 < share < 0.99 for share in held.values()), held
    whole = _mean(torch.ones(1, 1, 512), 10**9)
    assert 0.99 < whole.low < whole.value == whole.high == 1


def _held(interval: Interval, truth: float) -> float:
    return float(((interval.low <= truth) & (truth <= interval.high)).float().mean())


def test_sharp_and_coherent_is_sparse():
    q, k, v = coherent(sharpness=25, noise=0.05)
    found = scram.trust(q, k, v, search=scram.Search(seed=0, sweeps=12), scale=1.0)
    assert (found.verdict, found.verdicts) == ("sparse", [["sparse"]])
    assert "sparse and coherent, use SCRAM" in str(found)


def test_diffuse_is_not_sparse():
    q, k, v = coherent(sharpness=2)
    found = scram.trust(q, k, v + 10, search=SEARCH, tail_samples=200)
    assert found.verdict == "hybrid"
    assert "diffuse, use the hybrid estimator" in str(found)
    found = scram.trust(q, k, torch.randn(1, 1, 40, 40, 3), search=SEARCH, tail_samples=200)
    assert found.verdict == "dense"  # the mean of the values is small beside their spread
    assert "stay dense: in the worst head" in str(found)


def test_a_small_grid_stays_dense():
    q, k, v = coherent(size=12, sharpness=25, noise=0.0)
    found = scram.trust(q, k, v, search=SEARCH, scale=1.0)
    assert found.mass.value > 0.9
    assert found.verdict == "dense"
    assert f"on so small a grid SCRAM may score {found.cost.sparse} keys, dense attention 144" in str(found)


@pytest.mark.parametrize("method", ["query", "tile"])
def test_the_cost_is_what_the_search_scores(method):
    """Counted in the reference with a score that counts; no more, and, since some offers fail, not much less."""
    grid, sweeps, scored = (16, 16), 3, 0

    def score(q, k):
        nonlocal scored
        pairs = torch.broadcast_tensors(q, k)[0]
        scored += pairs[..., 0].numel()
        return (q * k).sum(-1)

    q, k = torch.randn(1, 1, *grid, 4), torch.randn(1, 1, *grid, 4)
    search = scram.Search(method, matches=2, sweeps=sweeps, jumps=(2, 1), gossip=2, seed=0)
    matches = scram.search(q, k, search=search, score=score)
    made = scored / 256
    found = scram.trust(q, k, k, search=search, radius=0, matches=matches, tail_samples=40)
    looked = found.cost.sparse - 2  # without the windows
    assert 0.9 * looked < made <= looked
    assert found.cost == (looked + 2, looked + 42, 256)


def test_the_worst_head_decides():
    q, k, v = coherent(sharpness=25, noise=0.05)
    heads = [torch.cat([x, y], 1) for x, y in ((q, q / 20), (k, k), (v, v))]
    found = scram.trust(*heads, search=scram.Search(seed=0, sweeps=12), scale=1.0)
    assert found.verdicts[0][0] == "sparse"
    assert found.verdict == found.verdicts[0][1] != "sparse"
    assert "1 of 2 heads are sparse" in found.reason


def test_predicted_error_of_the_hybrid():
    """Against hybrids that are really drawn."""
    q, k, v = coherent(size=12, sharpness=3)
    matches = scram.search(q, k, search=SEARCH)
    found = scram.trust(q, k, v, matches=matches, tail_samples=40)
    a = (q.flatten(2, 3) @ k.flatten(2, 3).mT * q.shape[-1] ** -0.5)[0, 0]
    exact = a.softmax(-1) @ v.flatten(2, 3)[0, 0]
    rows, columns = (torch.arange(144) // 12)[:, None], (torch.arange(144) % 12)[:, None]
    best = matches.index.flatten().long()[:, None]
    inside = ((rows.T - best // 12).abs() <= 1) & ((columns.T - best % 12).abs() <= 1)
    errors = []
    for _ in range(400):
        noise = torch.rand(144, 144).masked_fill(inside, 2)
        drawn = noise <= noise.kthvalue(40, -1, keepdim=True).values
        weight = torch.where(inside, 1.0, drawn * ((~inside).sum(-1, keepdim=True) / 40))
        p = weight * (a - a.amax(-1, keepdim=True)).exp()
        out = p @ v.flatten(2, 3)[0, 0] / p.sum(-1, keepdim=True)
        errors.append((out - exact).square().sum(-1))
    real = (torch.stack(errors).mean(0).sqrt() / exact.norm(dim=-1)).median()
    torch.testing.assert_close(found.hybrid_error[0, 0], real, rtol=0.1, atol=0)


def test_the_typical_query_counts():
    """Most of them sharp: the hybrid's error is theirs, not that of the few."""
    q, k, v = coherent(size=12, sharpness=60, noise=0.0)
    q[:, :, :4] /= 60
    found = scram.trust(q, k, v, search=SEARCH, scale=1.0, tail_samples=10)
    assert found.hybrid_error < 1e-6


def test_masked_keys_are_as_if_they_were_not_there():
    q, k, v = (torch.randn(1, 1, 16, 6) for _ in range(3))
    mask = (torch.arange(16) < 9)[None]
    fewer = scram.search(q, k[:, :, :9], search=SEARCH)
    same = scram.Matches(fewer.index, fewer.score, (16,))
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    masked = scram.trust(q, k, v, key_mask=mask, matches=same, tail_samples=4)
    gone = scram.trust(q, k[:, :, :9], v[:, :, :9], matches=fewer, tail_samples=4)
    for ours, theirs in ((masked.mass, gone.mass), (masked.p95_error, gone.p95_error), (masked.recall, gone.recall)):
        torch.testing.assert_close(ours.value, theirs.value)
    torch.testing.assert_close(masked.hybrid_error, gone.hybrid_error)


def test_no_match_holds_nothing():
    q, k, v = (x.requires_grad_() for x in coherent(size=12))
    found = scram.search(q, k, search=SEARCH)
    none = scram.Matches(torch.full_like(found.index, -1), found.score, found.key_grid)
    for index in (none.index, torch.full_like(found.index, 144)):
        trust = scram.trust(q, k, v, matches=scram.Matches(index, found.score, found.key_grid))
        assert trust.mass.value == 0
        assert trust.median_error.value == 1
        assert not trust.l2_error.requires_grad


def test_quantiles_leave_out_what_is_missing():
    x = torch.rand(1, 1, 60)
    x[..., ::2] = torch.nan
    torch.testing.assert_close(_quantile(x, 0.95, 1000), _quantile(x[..., 1::2], 0.95, 1000))


def made(mass=(0.95, 0.92, 0.97), error=(0.05, 0.04, 0.06), hybrid=0.2, recall=0.99, heads=1):
    """A Trust of these figures."""

    def interval(value, low, high):
        return Interval(*(torch.full((1, heads), x) for x in (value, low, high)))

    known, share = torch.full((1, heads), hybrid), interval(recall, recall, recall)
    wide = interval(*error)
    return Trust(interval(*mass), share, wide, wide, known, known, Cost(100, 200, 1000), 64, 10, 20, "nothing")


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({}, "sparse"),
        ({"mass": (0.95, 0.85, 0.99)}, "hybrid"),
        ({"error": (0.05, 0.01, 0.2)}, "hybrid"),
        ({"error": (0.05, 0.01, 0.2), "hybrid": 0.3}, "dense"),
    ],
)
def test_the_unfavourable_end_decides(figures, verdict):
    assert made(**figures).verdict == verdict


def test_a_search_that_is_to_blame_is_named():
    assert "more sweeps may help" in made(mass=(0.5, 0.4, 0.6), recall=0.5).reason
    assert "more sweeps" not in made(mass=(0.5, 0.4, 0.6)).reason
    assert "... and 4 more" in str(made(heads=20))


def test_the_sample_is_seeded():
    q, k, v = coherent()
    matches = scram.search(q, k, search=SEARCH)
    one, same, other = (scram.trust(q, k, v, matches=matches, num_queries=100, seed=seed) for seed in (1, 1, 2))
    assert one.mass.value == same.mass.value != other.mass.value
    for trust, seed in ((one, 1), (other, 2)):
        assert trust.recall.value == scram.measure.recall(q, k, matches, sample=100, seed=seed)
    assert (one.num_queries, one.queries) == (100, 1600)
    assert "on 100 of 1600 queries" in repr(one)


def test_the_old_names_still_work():
    q, k, v = coherent(size=12)
    new = scram.trust(q, k, v, search=SEARCH, tail_samples=9, num_queries=20)
    with pytest.warns(DeprecationWarning, match="is now") as caught:
        old = scram.trust(q, k, v, search=SEARCH, samples=9, sample=20)
    assert {str(one.message) for one in caught} == {
        "trust: samples= is now tail_samples=; the old name goes with the next version",
        "trust: sample= is now num_queries=; the old name goes with the next version",
    }
    assert {one.filename for one in caught} == {__file__}
    assert repr(old) == repr(new)
    with pytest.warns(DeprecationWarning, match=r"Trust: \.sample is now \.num_queries"):
        assert old.sample == old.num_queries == 20
    with pytest.warns(DeprecationWarning, match=r"Trust: \.samples is now \.tail_samples"):
        assert old.samples == old.tail_samples == 9


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
        assert (scram.trust(q, k, v, matches=matches).l2_error == plain.l2_error).all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_queries": 0}, "num_queries must be at least 1"),
        ({"tail_samples": 0}, "tail_samples must be at least 1"),
        ({"is_causal": True}, "no argument is_causal; use causal="),
        ({"impl": "triton"}, "impl='triton' cannot run this call"),
        ({"radius": -1}, "radius must be at least 0"),
        ({"matches": 3}, "matches must be a scram.Matches"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"key_mask": torch.zeros(1, 12, 12)}, "a float attention bias is not supported"),
    ],
)
def test_wrong_use_is_refused(how, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scram.trust(*coherent(size=12), **how)


def test_what_is_not_finite_is_not_judged():
    q = torch.randn(1, 1, 8, 8, 4)
    bad = q.clone()
    bad[0, 0, 3, 3, 1] = torch.nan
    for given in ((bad, q, q), (q, bad, q), (q, q, bad)):
        with pytest.raises(ValueError, match="must be finite, 1 of its 256 values"):
            scram.trust(*given)
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    mask[0, 3, 3] = False
    scram.trust(q, bad, q, key_mask=mask)
