"""tune: the budget is kept, the fastest that keeps it is chosen, nothing that cannot help is tried."""

import math
import sys
from dataclasses import replace

import pytest
import torch

import scram
from scram.core.resolve import SEARCHES, Resolved
from scram.core.statistics import Interval, ranks, shared
from scram.core.tails.base import NO_TAIL
from scram.quality import baseline
from scram.quality.plan import Setting
from scram.quality.timing import Believed
from scram.quality.truth import Errors
from scram.quality.tune import NUM_QUERIES, TAILS, Work, ladder
from support.trusting import coherent, diffuse

FEW = SEARCHES["cpu"].sweeps
WINDOWS = Work(1, scram.Search().sweeps, 0, 0)
SMALL = Work(0, 0, *TAILS[0])
MIDDLE = Work(0, 0, *TAILS[1])
LARGE = Work(0, 0, *TAILS[2])
SEARCHED = Work(1, FEW, *TAILS[1])
SEARCHED_LARGE = Work(1, FEW, *TAILS[2])
tuning = sys.modules["scram.quality.tune"]  # scram.tune is the function


class Clock:
    """Seconds by what a setting does, in place of a real clock: each run takes what `times` says, or 1 + its work."""

    def __init__(self, dense=100.0):
        self.dense, self.runs = dense, []

    def seconds(self, work):
        return 1 + 2 * work.matches + 0.01 * (work.tail + work.keys)

    def __call__(self, call, device, limit=math.inf, beside=None):
        resolved = call.args[0]
        if not isinstance(resolved, Resolved):
            self.runs.append("dense")
            return Believed(self.dense_again if self.runs.count("dense") > 1 else self.dense, True), call()
        work = Work.of(Setting(resolved.search, None if resolved.tail is NO_TAIL else resolved.tail))
        self.runs.append(work)
        return Believed(self.seconds(work), True), call()

    @property
    def dense_again(self):
        return self.dense


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(tuning, "believed", made)
    return made


def p95_of_all(plan, q, k, v, **how):
    """The promised error on all queries, worst head."""
    exact = scram.exact_attention(q.float(), k.float(), v.float(), **how).out
    off = (plan(q, k, v).float() - exact).norm(dim=-1).flatten(2)
    rms = exact.square().sum(-1).flatten(2).mean(-1, keepdim=True).sqrt()
    return float((off / rms).quantile(0.95, -1).max())


@pytest.mark.parametrize("error", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("case", ["sharp", "between", "diffuse"])
def test_the_budget_is_kept(case, error, clock):
    q, k, v = diffuse(size=40) if case == "diffuse" else coherent(sharpness={"sharp": 120, "between": 12}[case])
    plan = scram.tune(q, k, v, error=error, num_queries=400)
    assert p95_of_all(plan, q, k, v) <= error
    chosen = plan.rungs[plan.chosen]
    assert chosen.keeps
    assert chosen.error[2] <= error
    assert chosen.seconds == min(rung.seconds for rung in plan.rungs if rung.keeps)
    assert plan.num_queries in (400, 1600)
    assert plan.queries == 1600


def test_where_windows_suffice_nothing_slower_is_tried(clock):
    q, k, v = coherent(sharpness=25, noise=0.02)
    plan = scram.tune(q, k, v, scale=1.0)
    assert plan.setting == Setting(scram.Search(seed=0))
    # No search may be faster than windows, few clusters are not; then what is chosen once more.
    assert clock.runs == ["dense", WINDOWS, SMALL, "dense", WINDOWS]
    few = 1 + 0.01 * sum(TAILS[0])
    assert [rung.seconds for rung in plan.rungs] == [3.0, few, *[None] * (len(plan.rungs) - 3), 100.0]
    assert all(rung.note.startswith("not tried: ") for rung in plan.rungs[2:-1])
    assert plan.code == "scram.attention(q, k, v, search=scram.Search(seed=0), tail=None, scale=1.0)"
    assert plan.speedup == pytest.approx(100 / 3)


def test_where_nothing_can_be_faster_it_is_dense(clock):
    clock.dense = 3.5  # 1.3 times faster than that is less than any setting takes
    plan = scram.tune(*diffuse(), error=1e9)
    assert not plan.dense  # the first is tried, since nothing is known of it
    clock.dense, clock.runs = 2.0, []
    plan = scram.tune(*diffuse(), error=1e-6)
    assert plan.dense
    assert clock.runs == ["dense", WINDOWS, SMALL]
    assert "dense attention: nothing that could be faster kept 1e-06" in str(plan)


def test_noise_goes_dense():
    """By the real clock: whatever takes how long, no setting keeps the budget."""
    q, k, v = torch.randn(3, 1, 2, 32, 32, 32, generator=torch.Generator().manual_seed(0)).unbind()
    plan = scram.tune(q, k, v, error=0.05)
    assert plan.dense
    assert torch.equal(plan(q, k, v), scram.tune(q, k, v, error=0)(q, k, v))
    tried = [rung for rung in plan.rungs[:-1] if rung.error is not None]
    assert tried
    assert not any(rung.keeps for rung in tried)
    assert f"{tried[-1].setting}" in str(plan)


@pytest.mark.parametrize("size", [10, 24])
def test_nothing_that_visits_more_keys_than_there_are_is_tried(size, clock):
    """However little time it is said to take."""
    q, k, v = diffuse(size=size)
    plan = scram.tune(q, k, v, error=1e-3)
    for rung in plan.rungs[:-1]:
        many = rung.keys >= size * size
        assert (rung.seconds is None) or not many
        assert rung.note.startswith(f"not tried: it may visit {rung.keys} keys, there are {size * size}") == many
    assert any(rung.seconds is not None for rung in plan.rungs[:-1]) == (size == 24)
    assert plan.rungs[plan.chosen].keys <= size * size
    assert scram.tune(q, k, v, error=1e9).dense == (size == 10)


def climbed(clock, monkeypatch, table, error=0.05, dense=1000.0):
    """A plan on a ladder with these (seconds, 95th percentile) of each setting."""
    clock.dense, clock.runs, clock.seconds = dense, [], lambda work: table[work][0]

    def errors(truth, out, confidence):
        p95 = torch.full((1, 1), table[clock.runs[-1]][1])
        interval = Interval(p95, p95, p95)
        return Errors(p95, interval, interval)

    monkeypatch.setattr(tuning.Truth, "errors", errors)
    q = torch.randn(1, 1, 48, 48, 4)
    return scram.tune(q, q, q, error=error)


USUAL = {
    WINDOWS: (10.0, 0.9),
    SMALL: (20.0, 0.2),
    MIDDLE: (30.0, 0.1),
    LARGE: (60.0, 0.06),
    SEARCHED: (50.0, 0.07),
    SEARCHED_LARGE: (80.0, 0.04),
}


def test_the_ladder_is_climbed_until_a_rung_keeps_the_budget(clock, monkeypatch):
    for error, chosen in ((1.0, WINDOWS), (0.2, SMALL), (0.1, MIDDLE), (0.05, SEARCHED_LARGE)):
        plan = climbed(clock, monkeypatch, USUAL, error)
        assert Work.of(plan.setting) == chosen
        assert clock.runs[-1] == chosen
    plan = climbed(clock, monkeypatch, USUAL, 0.001)
    assert plan.dense


def test_the_fastest_is_chosen_even_if_it_comes_late(clock, monkeypatch):
    """Many clusters are slow here, a search is cheap, and both keep the budget."""
    table = {**USUAL, LARGE: (90.0, 0.04), SEARCHED: (35.0, 0.04)}
    plan = climbed(clock, monkeypatch, table)
    assert Work.of(plan.setting) == SEARCHED
    assert LARGE in clock.runs
    assert SEARCHED_LARGE not in clock.runs
    slow = {**table, SEARCHED: (95.0, 0.04)}
    assert Work.of(climbed(clock, monkeypatch, slow).setting) == LARGE


def test_a_slow_run_of_a_cheap_rung_does_not_hide_the_others(clock, monkeypatch):
    """Something else ran while the first was timed: what does more and took less shows it."""
    table = {**USUAL, SMALL: (58.0, 0.2), LARGE: (60.0, 0.04), SEARCHED: (31.0, 0.04)}
    assert Work.of(climbed(clock, monkeypatch, table).setting) == SEARCHED


def test_what_is_chosen_is_timed_again_and_so_is_dense_attention(clock, monkeypatch):
    """Something else ran while dense attention was timed at first: nothing is 16 times faster than it."""
    monkeypatch.setattr(Clock, "dense_again", 63.0)
    plan = climbed(clock, monkeypatch, {**USUAL, LARGE: (60.0, 0.04)})
    assert plan.dense
    assert plan.rungs[-1].seconds == 63.0
    assert clock.runs[-2:] == ["dense", LARGE]
    monkeypatch.setattr(Clock, "dense_again", 90.0)
    plan = climbed(clock, monkeypatch, {**USUAL, LARGE: (60.0, 0.04)})
    assert Work.of(plan.setting) == LARGE
    assert plan.speedup == pytest.approx(1.5)


def test_times_that_do_not_agree_are_said(clock, monkeypatch):
    made = clock.__call__
    monkeypatch.setattr(
        tuning,
        "believed",
        lambda *given, **named: (made(*given, **named)[0]._replace(steady=False), made(*given, **named)[1]),
    )
    plan = scram.tune(*diffuse(), error=1e9)
    assert plan.rungs[plan.chosen].note == plan.rungs[-1].note == "its times differ by more than 20%"


def test_budgets_of_nothing_and_of_everything(clock):
    q, k, v = diffuse()
    none = scram.tune(q, k, v, error=0)
    assert none.dense
    assert clock.runs == ["dense"]
    assert "only dense attention is exact" in str(none)
    every = scram.tune(q, k, v, error=1e30)
    assert every.setting == Setting(scram.Search(seed=0))


def test_the_seed_makes_it_repeatable(clock):
    q, k, v = diffuse(size=40)
    one, same, other = (scram.tune(q, k, v, num_queries=200, seed=seed) for seed in (1, 1, 2))
    assert replace(one, busy=False) == replace(same, busy=False)  # what else runs on the machine is no setting
    assert torch.equal(one(q, k, v), same(q, k, v))
    assert one.rungs[0].error != other.rungs[0].error
    assert (one.setting.search or one.setting.tail).seed == 1


def test_confidence_is_shared_over_the_ladder(clock):
    q, k, v = diffuse(size=40)
    plan = scram.tune(q, k, v, error=0.5, num_queries=200)
    assert plan.num_queries == 200
    assert plan.confidence == shared(2 * (len(plan.rungs) - 1))
    alone = plan.check(q, k, v, num_queries=200)
    assert plan.rungs[plan.chosen].error[2] > float(alone.errors.p95.high.max())
    assert ranks(NUM_QUERIES, 0.95, 10**9, shared(16))[1] < 0.965 * NUM_QUERIES


def test_a_second_look_decides_what_the_first_leaves_open(clock):
    q, k, v = diffuse(size=40)
    every = scram.tune(q, k, v, error=0.2, num_queries=1600)
    assert not every.dense
    p95 = every.rungs[every.chosen].error[0]
    near = scram.tune(q, k, v, error=1.02 * p95, num_queries=400)  # within the first interval
    assert near.num_queries == 1600
    assert near.rungs[every.chosen].error == (p95, p95, p95)
    assert near.chosen == every.chosen
    assert scram.tune(q, k, v, error=50 * p95, num_queries=400).num_queries == 400


def test_too_few_queries_promise_nothing(clock):
    q, k, v = diffuse(size=40)
    plan = scram.tune(q, k, v, error=0.5, num_queries=5)
    assert plan.dense
    assert all(rung.error is None or rung.error[2] == math.inf for rung in plan.rungs[:-1])


CALLABLE = {"score": lambda q, k: (q * k).sum(-1)}


def test_the_ladder_has_what_the_call_takes():
    q = torch.zeros(1, 1, 96, 96, 8)
    names = [str(setting) for setting in ladder(q, q, radius=(1, 1))]
    assert names == [
        "1 match, windows only",
        "no search, 128 clusters + 256 keys",
        "no search, 256 clusters + 512 keys",
        "no search, 512 clusters + 1024 keys",
        "1 match, 256 clusters + 512 keys",
        "1 match, 512 clusters + 1024 keys",
        "no search, 1024 clusters + 2048 keys",
        "1 match, 1024 clusters + 2048 keys",
        "no search, 1024 clusters + 4096 keys",
        "no search, 1024 clusters + 6144 keys",
        "4 matches, 1024 clusters + 2048 keys",
    ]
    drawn = ladder(q, q, radius=(1, 1), causal=True)
    assert [str(x) for x in drawn][1:3] == ["1 match, 128 drawn keys", "1 match, 512 drawn keys"]
    windows = [f"{n} match{'es' * (n > 1)}, windows only" for n in (1, 4, 16)]
    assert [str(x) for x in ladder(q, q, radius=(0, 1), **CALLABLE)] == windows
    assert ladder(q, q, radius=(0, 1))[0].radius == (0, 1)
    assert ladder(q, q, radius=(2, 2))[0].radius == 2
    small = ladder(q, q[:, :, :20, :20], radius=(1, 1))
    assert [(x.tail.count, x.tail.keys) for x in small if x.tail] == [TAILS[0]]
    last = ladder(q, q, radius=(1, 1))[-1]
    assert last.search == scram.Search(matches=4, separation=2, sweeps=FEW, seed=0)
    assert last.tail.seed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"key_mask": torch.arange(24 * 24).reshape(1, 24, 24) % 3 > 0},
        {"key_mask": torch.arange(2 * 24 * 24).reshape(1, 2, 24, 24) % 5 > 1},
        {"score": "l2", "scale": 0.05},
        {"score": "cosine", "scale": 4.0, "radius": (0, 2)},
        CALLABLE,
        {"extra": (torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 16))},
    ],
    ids=["causal", "mask", "mask of heads", "l2", "cosine", "callable", "extra"],
)
def test_every_kind_of_call(how, clock):
    """Grouped heads; what was measured is what a call of the plan gives."""
    # Only the reference scores by a function, slowly: one match keeps its budget, more visit more keys than there are.
    size, error = (16, 1.0) if how is CALLABLE else (24, 0.2)
    q, k, v = diffuse(size=size)
    plan = scram.tune(q, k, v, error=error, **how)
    given = {name: how[name] for name in ("key_mask", "extra") if name in how}
    rung = plan.rungs[plan.chosen]
    found = plan.check(q, k, v, **given)
    assert found
    if not plan.dense:
        assert found.errors.worst[0] == pytest.approx(rung.error[0], rel=1e-4)
        assert float(found.errors.output.max()) == pytest.approx(rung.output_error, rel=1e-4)
    assert plan(q, k, v, **given).isfinite().all()
    assert len([rung for rung in plan.rungs if rung.seconds is not None]) >= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, clock):
    q, k, v = (x.to(dtype) for x in diffuse(size=32))
    plan = scram.tune(q, k, v, error=0.1)
    assert not plan.dense
    assert p95_of_all(plan, q, k, v) <= 0.1
    assert str(dtype).removeprefix("torch.") in plan.tensors
    assert plan(q, k, v).dtype == dtype


def test_autocast_is_followed(clock):
    q, k, v = diffuse(size=24)
    with torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" in scram.tune(q, k, v).tensors


@pytest.mark.parametrize(("grid", "keys"), [((1,), (1,)), ((1, 1), (3, 2)), ((2, 3, 2), (2, 3, 2)), ((20, 3), (7, 9))])
def test_tiny_and_cross_grids(grid, keys, clock):
    q, k, v = torch.randn(1, 2, *grid, 4), torch.randn(1, 2, *keys, 4), torch.randn(1, 2, *keys, 3)
    for error in (0.1, 1e9):
        plan = scram.tune(q, k, v, error=error)
        assert plan(q, k, v).shape == (1, 2, *grid, 3)
        assert p95_of_all(plan, q, k, v) <= error


def test_rows_without_a_key_do_not_count(clock):
    q, k, v = (torch.cat([x, x]) for x in diffuse())
    mask = torch.ones(2, 24, 24, dtype=torch.bool)
    mask[1] = False
    plan = scram.tune(q, k, v, error=0.2, key_mask=mask)
    assert (plan(q, k, v, key_mask=mask)[1] == 0).all()
    assert plan.rungs[plan.chosen].error[2] <= 0.2
    alone = scram.tune(q[:1], k[:1], v[:1], error=0.2)
    assert plan.rungs[0].error == pytest.approx(alone.rungs[0].error, rel=1e-4)
    empty = scram.tune(q, k, v, key_mask=mask & False)
    assert (empty(q, k, v, key_mask=mask & False) == 0).all()


def test_the_worst_head_decides(clock):
    q, k, v = coherent(sharpness=25, noise=0.02)
    both = [torch.cat([x, y], 1) for x, y in ((q, q / 50), (k, k), (v, v))]
    assert scram.tune(q, k, v, scale=1.0).setting.tail is None
    plan = scram.tune(*both, scale=1.0)
    assert plan.dense or plan.setting.tail is not None


def test_values_of_zero(clock):
    q, k, v = diffuse()
    assert scram.tune(q, k, 0 * v, error=0.01).setting == Setting(scram.Search(seed=0))


def test_a_large_dense_call_is_timed_on_a_part(clock, monkeypatch):
    q, k, v = diffuse()
    monkeypatch.setattr(baseline, "DENSE_PAIRS", {"cpu": 2 * 576 * 300})
    plan = scram.tune(q, k, v)
    assert plan.rungs[-1].seconds == pytest.approx(100 * 576 / 300)
    assert plan.rungs[-1].note == "time from 300 of 576 queries"
    monkeypatch.setattr(baseline, "DENSE_PAIRS", {"cpu": 10})
    large = diffuse(size=40)
    causal = scram.tune(*large, causal=True, key_mask=torch.ones(1, 40, 40, dtype=torch.bool))
    assert causal.rungs[-1].seconds == pytest.approx(100 * (1600 / 1024) ** 2)  # a smaller problem, with all its keys
    assert scram.tune(q, k, v, key_mask=torch.ones(1, 2, 24, 24, dtype=torch.bool)).rungs[-1].seconds == pytest.approx(
        225
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"error": -1.0}, r"error must be in \[0, inf\), got -1.0; 0.05 is 5 %"),
        ({"error": math.nan}, "error must be in"),
        ({"error": "5 %"}, "error must be a float, got str"),
        ({"num_queries": 0}, "num_queries must be at least 1"),
        ({"impl": "best"}, "impl must be one of"),
        ({"radius": -1}, "radius must be at least 0"),
        ({"is_causal": True}, "no argument is_causal; use causal="),
        ({"search": scram.Search()}, r"tune\(\) has no argument search"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"key_mask": torch.zeros(1, 12, 12)}, "a float mask is a bias: pass its factors"),
    ],
)
def test_wrong_use_is_refused(how, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scram.tune(*coherent(size=12), **how)


def test_what_is_not_finite_or_empty_is_refused(clock):
    q = torch.randn(1, 1, 8, 8, 4)
    bad = q.clone()
    bad[0, 0, 3, 3, 1] = torch.nan
    for given in ((bad, q, q), (q, bad, q), (q, q, bad)):
        with pytest.raises(ValueError, match="must be finite, 1 of its 256 values"):
            scram.tune(*given)
    with pytest.raises(ValueError, match="q must hold at least one query"):
        scram.tune(q[:0], q[:0], q[:0])
    mask = torch.ones(1, 8, 8, dtype=torch.bool)
    mask[0, 3, 3] = False
    plan = scram.tune(q, bad, q, key_mask=mask, error=1e9)
    assert plan(q, bad, q, key_mask=mask).isfinite().all()
