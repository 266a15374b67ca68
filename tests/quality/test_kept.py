"""attention(error=): each kind of call is tuned once, and its plan kept."""

import threading

import pytest
import torch

import scram
from scram.core.resolve import Request
from scram.quality import kept
from scram.quality.kept import kept_plan

GRID = (12, 16)


@pytest.fixture(autouse=True)
def _forgotten():
    scram.clear_plans()
    yield
    scram.clear_plans()


@pytest.fixture
def tuned(monkeypatch):
    """Counts what is tuned; the first rung of the ladder, or dense attention, is the plan."""
    calls = []
    tune = kept.tune

    def counted(q, k, v, **how):
        calls.append(how)
        return tune(q, k, v, num_queries=16, **how)

    monkeypatch.setattr(kept, "tune", counted)
    return calls


def tensors(heads=1, grid=GRID, dtype=torch.float32):
    return torch.randn(3, 1, heads, *grid, 8).to(dtype).unbind()


def test_a_kind_is_tuned_once_and_keeps_its_budget(tuned):
    q, k, v = tensors()
    out = scram.attention(q, k, v, error=0.05)
    exact = scram.exact_attention(q, k, v).out
    assert (out - exact).norm() < 0.05 * exact.norm()
    scram.attention(*tensors(), error=0.05)
    assert [how["error"] for how in tuned] == [0.05]


def test_what_runs_is_the_plan(tuned, monkeypatch):
    q, k, v = tensors()
    scram.attention(q, k, v, error=0.1)
    (plan,) = kept._plans.values()
    chosen = scram.Setting(scram.Search(sweeps=1, seed=0), scram.Clusters(count=9, keys=0, seed=0))
    monkeypatch.setattr(type(plan), "setting", chosen)
    out, lse = scram.attention(q, k, v, error=0.1, return_lse=True)
    ours = scram.attention(q, k, v, search=chosen.search, tail=chosen.tail, return_lse=True)
    assert torch.equal(out, ours.out)
    assert torch.equal(lse, ours.lse)


@pytest.mark.parametrize(
    "change",
    [
        {"error": 0.2},
        {"causal": True},
        {"scale": 0.5},
        {"score": "l2"},
        {"radius": 2},
        {"key_mask": torch.ones(1, *GRID, dtype=torch.bool)},
        {"extra": (torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))},
        {"impl": "reference"},
        {"dtype": torch.float64},
        {"grid": (12, 12)},
        {"heads": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_kind_is_tuned_too(tuned, change):
    shape = {name: change[name] for name in change if name in ("dtype", "grid", "heads")}
    how = {"error": 0.1} | {name: x for name, x in change.items() if name not in shape}
    scram.attention(*tensors(), error=0.1)
    for _ in range(2):
        scram.attention(*tensors(**shape), **how)
    assert len(tuned) == 2


def test_autocast_is_another_kind(tuned):
    scram.attention(*tensors(), error=0.1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert scram.attention(*tensors(), error=0.1).dtype == torch.bfloat16
    assert len(tuned) == 2


def test_forgotten_plans_are_tuned_again(tuned):
    for _ in range(2):
        scram.attention(*tensors(), error=0.1)
        scram.clear_plans()
    assert len(tuned) == 2


def test_gradients_and_dropout_pass(tuned):
    q, k, v = (x.requires_grad_() for x in tensors())
    scram.attention(q, k, v, error=0.1, dropout_p=0.2).sum().backward()
    assert all(x.grad is not None for x in (q, k, v))


def test_plans_are_not_kept_without_end(tuned, monkeypatch):
    monkeypatch.setattr(kept, "MOST_PLANS", 1)
    for heads in (1, 2):
        scram.attention(*tensors(heads), error=0.1)
    assert len(kept._plans) == 1


def test_threads_tune_once(tuned):
    q, k, v = tensors()
    threads = [threading.Thread(target=scram.attention, args=(q, k, v), kwargs={"error": 0.1}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(tuned) == 1


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"search": scram.Search()}, ValueError, "error chooses search and tail; leave search out"),
        ({"search": None}, ValueError, "leave search out"),
        ({"tail": None}, ValueError, "leave tail out"),
        ({"weight": "mean"}, ValueError, "error needs weight='softmax', got 'mean'"),
        ({"error": -1}, ValueError, r"error must be in \[0, inf\), got -1"),
        ({"error": "small"}, TypeError, "error must be"),
        ({"error": float("nan")}, ValueError, "error must be"),
    ],
    ids=str,
)
def test_what_a_plan_chooses_is_not_said(how, kind, message):
    with pytest.raises(kind, match=message):
        scram.attention(*tensors(), **{"error": 0.1, **how})


def test_warm_matches_are_refused():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="leave warm out, or leave error out"):
        scram.attention(q, k, v, error=0.1, warm=scram.search(q, k))


def test_it_is_not_compiled():
    with pytest.raises(Exception, match=r"which torch.compile cannot trace: before, make plan = scram.tune"):
        torch.compile(lambda *x: scram.attention(*x, error=0.1), backend="eager", fullgraph=True)(*tensors())


def test_a_plan_is_found_without_tuning(tuned):
    q, k, v = tensors()
    assert kept_plan(q, k, v, Request(), 0.1) is kept_plan(q, k, v, Request(), 0.1)
