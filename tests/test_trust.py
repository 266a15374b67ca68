"""trust: the figures of the measures and of `attention`, intervals that hold, verdicts where the answer is known."""

from dataclasses import replace

import pytest
import torch

import scram
from scram.statistics import Interval
from scram.trust import Cost, Trust

SEARCH = scram.Search(seed=0)
INTERVALS = ("mass", "recall", "median_error", "p95_error", "tail_median_error", "tail_p95_error")


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
    for interval in (getattr(found, one) for one in INTERVALS):
        torch.testing.assert_close(interval.low, interval.high)  # nothing is left to chance


def diffuse(heads=1, size=24):
    """Attention that spreads, over smooth keys and values; two query heads share a key head."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.nn.functional.interpolate(torch.randn(heads, 8, 6, 6, generator=generator), (size, size))
    keys = keys + 0.3 * torch.randn(keys.shape, generator=generator)
    k = keys.movedim(1, -1)[None]
    q = torch.randn(1, 2 * heads, size, size, 8, generator=generator)
    return q, k, torch.cat([k, torch.ones_like(k)], -1)


TAILS = {
    "auto": {},
    "few": {"tail": scram.Clusters(count=9)},
    "own seed": {"tail": scram.Clusters(count=32, seed=7), "search": scram.Search(matches=3, separation=2, seed=0)},
    "fit": {"tail": scram.Clusters(count=24, fit=64), "radius": 2},
    "mask": {"tail": scram.Clusters(count=32), "key_mask": torch.arange(24 * 24).reshape(1, 24, 24) % 3 > 0},
    "mask of each head": {
        "tail": scram.Clusters(count=32),
        "key_mask": torch.arange(4 * 24 * 24).reshape(1, 4, 24, 24) % 5 > 1,
    },
    "cosine": {"tail": scram.Clusters(count=32), "score": "cosine", "scale": 4.0},
    "l2": {"tail": scram.Clusters(count=32), "score": "l2", "scale": 0.05, "radius": (0, 2)},
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
    torch.testing.assert_close(found.tail_median_error.value, (off / size).quantile(0.5, -1), **close)
    torch.testing.assert_close(found.tail_p95_error.value, (off / size).quantile(0.95, -1), **close)
    torch.testing.assert_close(found.tail_l2_error, off.norm(dim=-1) / size.norm(dim=-1), **close)
    assert (found.tail_l2_error < found.l2_error).all()
    assert (found.tail_l2_error > 1e-4).all() == (name != "all keys")


def test_a_codebook_is_used_as_it_is():
    q, k, v = diffuse()
    matches, extra = scram.search(q, k, search=SEARCH), (torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 16))
    old = scram.cluster(
        q, k.roll(1, 2), v, clusters=scram.Clusters(count=16, fit=32, seed=0), matches=matches, radius=1
    )
    found = scram.trust(q, k, v, tail=old, matches=matches, extra=extra)
    out = scram.attend(q, k, v, matches, tail=old, extra=extra).out
    exact = scram.merge(scram.exact_attention(q, k, v), _off_grid(q, extra, 2)).out
    error = ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten(2)[..., scram.measure.sample_queries(q, 512, 0)]
    torch.testing.assert_close(found.tail_p95_error.value, error.quantile(0.95, -1), atol=1e-6, rtol=1e-3)
    assert found.tail is old
    assert "16 clusters" in str(found)


def test_the_tail_is_that_of_attention():
    q, k, v = diffuse()
    assert isinstance(scram.trust(q, k, v).tail, scram.Clusters)
    assert isinstance(scram.trust(q[:, :1], k, v, causal=True, search="auto").tail, scram.Hybrid)
    for how in ({"tail": None}, {"score": lambda q, k: (q * k).sum(-1)}):
        found = scram.trust(q, k, v, search=SEARCH, **how)
        assert found.tail is None
        assert found.tail_l2_error.isnan().all()
        assert found.tail_median_error.value.isnan().all()
        assert found.verdict == "dense"
        assert found.cost.tail == found.cost.sparse
        assert "or use a tail" in str(found)
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


def test_sharp_and_coherent_is_sparse():
    q, k, v = coherent(sharpness=25, noise=0.05)
    found = scram.trust(q, k, v, search=scram.Search(seed=0, sweeps=12), scale=1.0)
    assert (found.verdict, found.verdicts) == ("sparse", [["sparse"]])
    assert "sparse and coherent, SCRAM's windows suffice" in str(found)


def test_diffuse_is_for_the_tail():
    found = scram.trust(*diffuse(heads=2, size=40), search=SEARCH)
    assert found.verdicts == [["tail"] * 4]
    off = 100 * float(found.tail_median_error.value.max())
    assert "diffuse, use a tail: in the worst head the windows hold" in found.reason
    assert f"with 256 clusters a typical query is {off:.1f} % off" in str(found)
    head = str(found).splitlines()[2]
    for interval in (found.median_error, found.tail_median_error, found.tail_p95_error):
        value, low, high = (float(x[0, 0]) for x in interval)
        assert f"{value:.3f} [{low:.3f}, {high:.3f}]" in head
    assert f"{float(found.tail_l2_error[0, 0]):.4f}" in head


def test_what_no_tail_mends_stays_dense():
    q, k, _ = diffuse(size=40)
    v = torch.randn(1, 1, 40, 40, 3, generator=torch.Generator().manual_seed(0))  # their mean is small beside them
    found = scram.trust(q, k, v, search=SEARCH, tail=scram.Clusters(count=64))
    assert found.tail_median_error.high.max() > 0.1
    assert found.verdict == "dense"
    assert "stay dense: in the worst head" in str(found)
    assert "with 64 clusters a typical query is" in str(found)


def test_diffuse_with_drawn_keys():
    q, k, v = coherent(sharpness=2)
    found = scram.trust(q, k, v + 10, search=SEARCH, tail=scram.Hybrid(samples=200))
    assert found.verdict == "tail"
    assert "with 200 drawn keys a typical query would be" in str(found)
    assert "the errors with drawn keys are predicted" in str(found)
    found = scram.trust(q, k, torch.randn(1, 1, 40, 40, 3), search=SEARCH, tail=scram.Hybrid(samples=200))
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
    found = scram.trust(q, k, k, search=search, radius=0, matches=matches, tail=scram.Clusters(count=40))
    looked = found.cost.sparse - 2  # without the windows
    assert 0.9 * looked < made <= looked
    assert found.cost == (looked + 2, looked + 42, 256)
    drawn = scram.trust(q, k, k, search=search, radius=0, matches=matches, tail=scram.Hybrid(samples=40))
    assert drawn.cost == found.cost


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
    found = scram.trust(q, k, v, matches=matches, tail=scram.Hybrid(samples=40))
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
    squares = torch.stack(errors).mean(0)
    real = (squares.sqrt() / exact.norm(dim=-1)).median()
    torch.testing.assert_close(found.tail_median_error.value[0, 0], real, rtol=0.1, atol=0)
    real = (squares.sum() / exact.square().sum()).sqrt()
    torch.testing.assert_close(found.tail_l2_error[0, 0], real, rtol=0.1, atol=0)


def test_the_typical_query_counts():
    """Most of them sharp: the error with a tail is theirs, not that of the few."""
    q, k, v = coherent(size=12, sharpness=60, noise=0.0)
    q[:, :, :4] /= 60
    found = scram.trust(q, k, v, search=SEARCH, scale=1.0, tail=scram.Hybrid(samples=10))
    assert found.tail_median_error.value < 1e-6


def test_masked_keys_are_as_if_they_were_not_there():
    q, k, v = (torch.randn(1, 1, 16, 6) for _ in range(3))
    mask = (torch.arange(16) < 9)[None]
    fewer = scram.search(q, k[:, :, :9], search=SEARCH)
    same = scram.Matches(fewer.index, fewer.score, (16,))
    k[:, :, 9:], v[:, :, 9:] = torch.nan, torch.nan
    book = scram.cluster(q, k[:, :, :9], v[:, :, :9], clusters=scram.Clusters(count=3, seed=0))
    label = torch.cat([book.label, torch.full((1, 1, 7), -1, dtype=torch.int32)], -1)
    tails = (replace(book, label=label, key_mask=mask), book), (scram.Hybrid(samples=4), scram.Hybrid(samples=4))
    for of_all, of_fewer in tails:
        masked = scram.trust(q, k, v, key_mask=mask, matches=same, tail=of_all)
        gone = scram.trust(q, k[:, :, :9], v[:, :, :9], matches=fewer, tail=of_fewer)
        for name in INTERVALS:
            torch.testing.assert_close(getattr(masked, name).value, getattr(gone, name).value)
        assert gone.tail_median_error.value > 0.01


def test_no_match_holds_nothing():
    q, k, v = (x.requires_grad_() for x in coherent(size=12))
    found = scram.search(q, k, search=SEARCH)
    none = scram.Matches(torch.full_like(found.index, -1), found.score, found.key_grid)
    for index in (none.index, torch.full_like(found.index, 144)):
        trust = scram.trust(q, k, v, matches=scram.Matches(index, found.score, found.key_grid), seed=4)
        assert trust.mass.value == 0
        assert trust.median_error.value == 1
        assert trust.tail_l2_error < 1e-5  # as many clusters as keys
        assert not trust.l2_error.requires_grad


CLUSTERS = scram.Clusters(count=64)
HYBRID = scram.Hybrid(samples=64)


def made(mass=(0.95, 0.92, 0.97), error=(0.05, 0.04, 0.06), tail_error=(0.05, 0.04, 0.06), recall=0.99, heads=1,
         tail=CLUSTERS, cost=(100, 200, 1000)):  # fmt: skip
    """A Trust of these figures."""

    def interval(value, low, high):
        return Interval(*(torch.full((1, heads), x) for x in (value, low, high)))

    known, share = torch.full((1, heads), 0.1), interval(recall, recall, recall)
    wide, after = interval(*error), interval(*tail_error)
    return Trust(interval(*mass), share, wide, wide, known, after, after, known, Cost(*cost), tail, 10, 20, "nothing")


DIFFUSE = {"error": (0.05, 0.01, 0.2)}


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({}, "sparse"),
        ({"mass": (0.95, 0.85, 0.99)}, "tail"),
        (DIFFUSE, "tail"),
        ({**DIFFUSE, "tail_error": (0.09, 0.08, 0.11)}, "dense"),
        ({**DIFFUSE, "tail_error": (0.2, 0.1, 0.3), "tail": HYBRID}, "tail"),
        ({**DIFFUSE, "tail_error": (0.3, 0.2, 0.4), "tail": HYBRID}, "dense"),
        ({**DIFFUSE, "tail": None, "tail_error": (torch.nan,) * 3}, "dense"),
        ({**DIFFUSE, "cost": (100, 1000, 1000)}, "dense"),
        ({"cost": (100, 1000, 1000)}, "sparse"),
        ({"cost": (1000, 1000, 1000)}, "dense"),
    ],
)
def test_the_unfavourable_end_decides(figures, verdict):
    assert made(**figures).verdict == verdict


def test_a_tail_that_is_too_dear_is_named():
    assert "where SCRAM may score 1000 keys, dense attention 900" in made(**DIFFUSE, cost=(100, 1000, 900)).reason
    assert "SCRAM may score" not in made(**DIFFUSE, tail_error=(0.3, 0.2, 0.4)).reason


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


@pytest.mark.parametrize("name", ["samples", "tail_samples"])
def test_the_old_names_still_work(name):
    q, k, v = coherent(size=12)
    new = scram.trust(q, k, v, search=SEARCH, tail=scram.Hybrid(samples=9), num_queries=20)
    with pytest.warns(DeprecationWarning, match="is now") as caught:
        old = scram.trust(q, k, v, search=SEARCH, sample=20, **{name: 9})
    meant = "tail=Hybrid(samples=9, stratified=False, seed=None)"
    assert {str(one.message) for one in caught} == {
        f"trust: {name}= is now {meant}; the old name goes with the next version",
        "trust: sample= is now num_queries=; the old name goes with the next version",
    }
    assert {one.filename for one in caught} == {__file__}
    assert repr(old) == repr(new)
    with pytest.warns(DeprecationWarning, match=r"Trust: \.sample is now \.num_queries"):
        assert old.sample == old.num_queries == 20
    with pytest.warns(DeprecationWarning, match=rf"Trust: \.{name} is now \.tail\.samples"):
        assert getattr(old, name) == old.tail.samples == 9
    with pytest.warns(DeprecationWarning, match=r"Trust: \.hybrid_error is now \.tail_median_error\.value"):
        assert old.hybrid_error == new.tail_median_error.value


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
        ({"tail": 3}, "tail must be None, 'auto', scram.Clusters, scram.Codebook or scram.Hybrid"),
        ({"tail": scram.Clusters(), "causal": True}, "clusters of keys need weight='softmax', no causal order"),
        ({"search": "best"}, "search must be one of 'auto', got 'best'"),
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


def test_a_codebook_of_other_keys_is_refused():
    q, k, v = coherent(size=12)
    book = scram.cluster(q, k, v, clusters=scram.Clusters(count=8, seed=0))
    with pytest.raises(ValueError, match="tail was made for score='dot', scale="):
        scram.trust(q, k, v, tail=book, scale=3.0)


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
