"""A plan of a busy machine is timed again in a quiet moment, once, by calls that keep plans."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.quality import again, kept
from scram.quality import plan as planning
from scram.quality.timing import Believed

DENSE = scram.Rung(scram.Setting(), 256, 1.0, (0.0, 0.0, 0.0), 0.0, True)
WINDOWS = scram.Rung(scram.Setting(scram.Search(seed=0)), 9, 2.0, (0.01, 0.01, 0.01), 0.01, True)
PLAN = scram.Plan(
    error=0.1,
    rungs=(WINDOWS, DENSE),
    chosen=1,
    causal=False,
    scale=None,
    score="dot",
    impl="auto",
    num_queries=256,
    queries=256,
    seed=0,
    confidence=0.99,
    tensors="q",
    busy=True,
)


class Machine:
    """What is seen of the machine: whether it is busy, how long dense attention takes, and what was timed."""

    def __init__(self):
        self.busy = False
        self.looks = 0
        self.timed = 0
        self.now = 100.0

    def yardstick(self, *tensors, **how):
        self.looks += 1
        return self

    def believed(self, call, device, beside):
        self.timed += 1
        return Believed(0.5 if isinstance(call.func, scram.Plan) else 3.0, True), call()


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    monkeypatch.setattr(again, "yardstick", found.yardstick)
    monkeypatch.setattr(planning, "yardstick", found.yardstick)
    monkeypatch.setattr(planning, "believed", found.believed)
    monkeypatch.setattr(again, "monotonic", lambda: found.now)
    monkeypatch.setattr(again, "_next_look", 0.0)
    scram.clear_plans()
    yield found
    scram.clear_plans()


def tensors(**how):
    return torch.randn(3, 1, 1, 16, 16, 8, **how).unbind()


def test_in_a_quiet_moment_new_times_choose(machine):
    found = again.in_a_quiet_moment(PLAN, *tensors())
    assert (found.chosen, found.busy) == (0, False)
    assert [rung.seconds for rung in found.rungs] == [0.5, 3.0]
    assert again.in_a_quiet_moment(found, *tensors()) is found
    assert machine.timed == 2


def test_a_busy_machine_is_looked_at_now_and_then(machine):
    machine.busy = True
    for _ in range(3):
        assert again.in_a_quiet_moment(PLAN, *tensors()) is PLAN
    assert (machine.looks, machine.timed) == (1, 0)
    machine.busy = False
    assert again.in_a_quiet_moment(PLAN, *tensors()) is PLAN
    machine.now += again.PAUSE
    assert not again.in_a_quiet_moment(PLAN, *tensors()).busy


def test_what_is_measured_on_a_machine_that_became_busy_is_measured_again(machine, monkeypatch):
    def gets_busy(*arguments, **how):
        machine.busy = True
        return machine.__class__.believed(machine, *arguments, **how)

    monkeypatch.setattr(planning, "believed", gets_busy)
    found = again.in_a_quiet_moment(PLAN, *tensors())
    assert (found.chosen, found.busy) == (0, True)
    assert again.in_a_quiet_moment(found, *tensors()) is found  # after a pause


def test_nothing_is_measured_where_it_cannot_be(machine):
    q, k, v = tensors()
    assert again.in_a_quiet_moment(PLAN, *tensors(device="meta")) is PLAN
    found = torch.func.vmap(lambda x: x * (again.in_a_quiet_moment(PLAN, x, k, v) is PLAN))(q.unsqueeze(0))
    assert torch.equal(found[0], q)
    compiled = torch.compile(lambda x: x + int(again.in_a_quiet_moment(PLAN, x, k, v) is PLAN), backend="eager")
    assert torch.equal(compiled(q), q + 1)
    with again._lock:  # another thread measures
        assert again.in_a_quiet_moment(PLAN, q, k, v) is PLAN
    assert machine.looks == 0


def test_gradients_and_generators_are_left_alone(machine):
    q, k, v = (x.requires_grad_() for x in tensors())
    before = torch.get_rng_state()
    again.in_a_quiet_moment(PLAN, q, k, v)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    scram.attention(q, k, v).sum().backward()


def test_threads_measure_once(machine):
    start = threading.Barrier(4)
    found = []

    def use(q, k, v):
        start.wait()
        found.append(scram.attention(q, k, v, error=0.1))

    q, k, v = tensors()
    kept.kept_plan(q, k, v, kept.Request(), 0.1)
    (kind,) = kept._plans
    kept._plans[kind] = PLAN
    machine.timed = 0
    threads = [threading.Thread(target=use, args=(q, k, v)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert machine.timed == 2
    assert not kept._plans[kind].busy


def test_calls_with_a_budget_use_the_plan_that_was_measured_again(machine):
    q, k, v = tensors()
    kept.kept_plan(q, k, v, kept.Request(), 0.1)
    (kind,) = kept._plans
    kept._plans[kind] = PLAN
    out = scram.attention(q, k, v, error=0.1)
    assert torch.equal(out, replace(PLAN, chosen=0)(q, k, v))
    assert kept._plans[kind].chosen == 0


class Layer(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_a_patched_model_uses_the_plan_that_was_measured_again(machine):
    model = torch.nn.Sequential(Layer()).eval()
    x = torch.randn(1, 1, 256, 8)
    plans = scram.Plans({"0": PLAN})
    with torch.no_grad(), scram.patch_sdpa(grid=(16, 16), min_tokens=0, error=0.1, plans=plans, model=model) as report:
        model(x)
    assert report.plans["0"].chosen == 0
    assert not report.plans["0"].busy
    assert machine.timed == 2
