"""trust: verdicts where the answer is known, what it recommends, and what it refuses."""

import pytest
import torch

import scram
from scram.core.statistics import Interval
from scram.quality.plan import Setting
from scram.quality.trust import Cost, Trust
from support.trusting import SEARCH, coherent, diffuse


def test_sharp_and_coherent_is_sparse():
    q, k, v = coherent(sharpness=25, noise=0.05)
    found = scram.trust(q, k, v, search=scram.Search(seed=0, sweeps=12), scale=1.0)
    assert (found.verdict, found.verdicts) == ("sparse", [["sparse"]])
    assert "verdict: windows suffice: in the worst head output error under 0.05 %, 95th percentile" in str(found)
    assert found.code.endswith("search=scram.Search(sweeps=12, seed=0), tail=None, scale=1.0)")


def test_diffuse_is_for_the_tail():
    found = scram.trust(*diffuse(heads=2, size=48), search=SEARCH)
    assert found.verdicts == [["tail"] * 4]
    whole, off = (100 * float(x.max()) for x in (found.tail_output_error, found.tail_p95_error.value))
    assert "use the tail: in the worst head output error" in found.reason
    assert f" with the windows alone; {whole:.1f} % and {off:.1f} % with 512 clusters + 1152 keys" in str(found)
    assert (
        found.code == "scram.attention(q, k, v, search=scram.Search(seed=0), tail=scram.Clusters(count=512, keys=1152))"
    )
    head = str(found).splitlines()[2]
    for interval in (found.median_error, found.tail_median_error, found.tail_p95_error):
        value, low, high = (float(x[0, 0]) for x in interval)
        assert f"{value:.3f} [{low:.3f}, {high:.3f}]" in head
    assert f"{float(found.tail_output_error[0, 0]):.4f}" in head


def test_what_no_tail_mends_stays_dense():
    q, k, _ = diffuse(size=40)
    v = torch.randn(1, 1, 40, 40, 3, generator=torch.Generator().manual_seed(0))  # their mean is small beside them
    found = scram.trust(q, k, v, search=SEARCH, tail=scram.Clusters(count=64))
    assert found.tail_median_error.high.max() > 0.1
    assert found.verdict == "dense"
    assert "stay dense: in the worst head" in str(found)
    assert "% with 64 clusters" in str(found)
    assert "scram.tune(q, k, v, error=0.1)" in found.reason
    assert found.code.startswith("torch.nn.functional.scaled_dot_product_attention(")
    out = eval(found.code, {"torch": torch, "q": q, "k": k.expand_as(q), "v": v.expand(1, 2, -1, -1, -1)})
    torch.testing.assert_close(out, scram.exact_attention(q, k, v).out)


def test_diffuse_with_drawn_keys():
    q, k, v = coherent(sharpness=2)
    found = scram.trust(q, k, v + 60, search=SEARCH, tail=scram.DrawnKeys(samples=200))
    assert found.verdict == "tail"
    assert "% with 200 drawn keys" in str(found)
    found = scram.trust(q, k, torch.randn(1, 1, 40, 40, 3), search=SEARCH, tail=scram.DrawnKeys(samples=200))
    assert found.verdict == "dense"  # the mean of the values is small beside their spread


def test_what_is_recommended_is_better():
    """On sharp, diffuse and mixed tensors: the line runs, keeps the budget, and is no worse than what it replaces."""
    cases = [coherent(sharpness=x, noise=0.05) for x in (1, 6, 25)] + [diffuse(size=40)]
    for q, k, v in cases:
        found = scram.trust(q, k, v, search=SEARCH, num_queries=1600)
        each = q.shape[1] // k.shape[1]
        names = {"q": q, "k": k.repeat_interleave(each, 1), "v": v.repeat_interleave(each, 1), "scram": scram}
        out, exact = eval(found.code, names | {"torch": torch}), scram.exact_attention(q, k, v).out
        off = (out - exact).norm(dim=-1).flatten(2) / exact.square().sum(-1).flatten(2).mean(-1, keepdim=True).sqrt()
        p95 = off.quantile(0.95, -1)
        assert (p95 <= 0.1).all()
        if found.verdict != "sparse":
            assert (p95 <= found.p95_error.value + 1e-5).all()


def test_near_uniform_attention_is_not_for_more_sweeps():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 40, 40, 16, generator=generator).unbind()
    found = scram.trust(0.01 * q, k, v, search=scram.Search(sweeps=1, seed=0), tail=None)
    assert found.recall.value < 0.9
    assert found.better is None
    assert "sweeps it is" not in found.reason


def test_a_search_that_is_to_blame_gets_more_sweeps():
    q, k, v = coherent(sharpness=25, noise=0.05)
    found = scram.trust(q, k, v, search=scram.Search(sweeps=2, seed=0), scale=1.0, tail=None)
    assert found.verdict == "dense"
    setting, errors = found.better
    assert setting.search.sweeps == 4
    assert "verdict: search longer: in the worst head" in str(found)
    assert found.code == setting.code(scale=1.0)
    again = scram.trust(q, k, v, search=setting.search, scale=1.0, tail=None)
    torch.testing.assert_close(again.p95_error.value, errors.p95.value)
    assert again.p95_error.value < 0.9 * found.p95_error.value
    assert setting.code(**found.arguments) in str(found)


def test_a_small_grid_stays_dense():
    q, k, v = coherent(size=12, sharpness=25, noise=0.0)
    found = scram.trust(q, k, v, search=SEARCH, scale=1.0)
    assert found.mass.value > 0.9
    assert found.verdict == "dense"
    assert f"on so small a grid SCRAM may visit {found.cost.tail} keys, dense attention 144" in str(found)


def test_the_worst_head_decides():
    q, k, v = coherent(sharpness=25, noise=0.05)
    heads = [torch.cat([x, y], 1) for x, y in ((q, q / 20), (k, k), (v, v))]
    search = scram.Search(seed=0, sweeps=12)
    found = scram.trust(*heads, search=search, tail=scram.Clusters(count=128, keys=128), scale=1.0)
    assert found.verdicts[0][0] == "sparse"
    assert found.verdict == found.verdicts[0][1] != "sparse"
    assert "1 of 2 heads" in found.reason


def made(
    error=(0.05, 0.04, 0.06),
    tail_error=(0.05, 0.04, 0.06),
    heads=1,
    tail=True,
    cost=(100, 200, 1000),
    budget=0.1,
    mass=0.9,
):
    """A Trust of these figures."""

    def interval(value, low, high):
        return Interval(*(torch.full((1, heads), x) for x in (value, low, high)))

    known, share = torch.full((1, heads), 0.1), interval(mass, mass, mass)
    setting = Setting(SEARCH, scram.Clusters(count=64) if tail else None)
    wide, after = interval(*error), interval(*tail_error)
    return Trust(
        known, wide, wide, known, after, after, share, share, Cost(*cost), setting, {}, budget, None, 10, 20, 0
    )


DIFFUSE = {"error": (0.05, 0.01, 0.2)}
NOTHING = (torch.nan,) * 3


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({}, "sparse"),
        (DIFFUSE, "tail"),
        ({**DIFFUSE, "budget": 0.2}, "sparse"),
        ({**DIFFUSE, "tail_error": (0.09, 0.08, 0.11)}, "dense"),
        ({**DIFFUSE, "tail": False, "tail_error": NOTHING}, "dense"),
        ({**DIFFUSE, "cost": (100, 1000, 1000)}, "dense"),
        ({"cost": (100, 1000, 1000)}, "sparse"),
        ({"cost": (1000, 1000, 1000)}, "dense"),
        ({"error": NOTHING, "tail_error": NOTHING, "mass": torch.nan}, "sparse"),
        ({"error": NOTHING, "tail_error": NOTHING}, "dense"),
    ],
)
def test_the_unfavorable_end_decides(figures, verdict):
    assert made(**figures).verdict == verdict


def test_a_tail_that_is_too_dear_is_named():
    assert "SCRAM may visit 1000 keys, dense attention 900" in made(**DIFFUSE, cost=(100, 1000, 900)).reason
    assert "SCRAM may visit" not in made(**DIFFUSE, tail_error=(0.3, 0.2, 0.4)).reason
    assert "... and 4 more" in str(made(heads=20))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"error": -0.1}, r"error must be in \[0, inf\), got -0.1"),
        ({"num_queries": 0}, "num_queries must be at least 1"),
        ({"tail": 3}, "tail must be None, 'auto' or one of scram.Clusters, scram.Codebook, scram.DrawnKeys"),
        ({"search": "best"}, "search must be one of 'auto', got 'best'"),
        ({"is_causal": True}, "no argument is_causal; use causal="),
        ({"impl": "triton"}, "impl='triton' cannot run this call"),
        ({"radius": -1}, "radius must be at least 0"),
        ({"matches": 3}, "matches must be a scram.Matches"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"key_mask": torch.zeros(1, 12, 12)}, "a float mask is a bias: pass its factors"),
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
