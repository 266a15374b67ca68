"""Time and peak memory of a call."""

import math
from pathlib import Path
from time import sleep

import pytest
import torch

from scram.quality import timing


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_sees_what_a_call_holds():
    found, _ = timing.clock(lambda: torch.ones(8 << 20).mul_(2).sum(), "cpu")  # 32 MiB
    assert 24 << 20 < found.peak_bytes < 80 << 20
    assert 0 < found.seconds < 10


def test_without_proc_there_is_no_figure():
    assert timing.memory_status("VmRSS", "/no/such/file") is None
    assert (timing.memory_status("Name", __file__), timing.memory_status("no such field")) == (None, None)


def test_the_first_call_is_left_out_and_a_long_one_made_once():
    made = []

    def call():
        made.append(0.06 if not made else 0.001)
        sleep(made[-1])
        return torch.tensor(len(made))

    found, out = timing.clock(call, "cpu")
    assert out == 1
    assert found.calls == len(made) - 1 >= 3
    assert 0.001 <= found.least <= found.seconds <= found.most
    assert found.seconds < 0.03
    made.clear()
    found, _ = timing.clock(call, "cpu", once=0.02)
    assert (found.calls, len(made)) == (1, 1)
    assert found.seconds >= 0.06


class FakeTime:
    """A clock that calls move: each takes the next of `seconds`, then the last of them again and again."""

    def __init__(self, monkeypatch, *seconds):
        self.now, self.seconds, self.made = 0.0, seconds, 0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def __call__(self):
        self.now += self.seconds[min(self.made, len(self.seconds) - 1)]
        self.made += 1
        return torch.tensor(self.made)


@pytest.mark.parametrize(
    ("seconds", "limit", "believed", "steady", "calls"),
    [
        ((1.0, 1.1), math.inf, 1.0, True, 2),
        ((9.0, 1.0, 1.0), math.inf, 1.0, True, 3),  # the first compiled
        ((1.0, 0.1, 1.0, 1.0), math.inf, 1.0, False, 5),  # a single run is no proof
        ((9.0, 6.0), 1.0, 6.0, True, 2),  # too slow, whatever a third run says
        ((9.0, 1.5, 1.4), 1.0, 1.4, True, 3),  # here it counts
    ],
)
def test_a_time_is_believed_when_a_second_run_agrees(monkeypatch, seconds, limit, believed, steady, calls):
    call = FakeTime(monkeypatch, *seconds)
    found, out = timing.believed(call, "cpu", limit)
    assert (call.made, out) == (calls, calls)
    assert found == (pytest.approx(believed), steady)


class FakeMachine:
    """A clock of calls that take `factor` times as long as on a quiet machine, and get `share` of two cores."""

    def __init__(self, monkeypatch):
        self.now, self.cpu, self.factor, self.share = 0.0, 0.0, 1.0, 1.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing, "process_time", lambda: self.cpu)
        monkeypatch.setattr(timing, "usable_cores", lambda: 2)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    def call(self, seconds):
        def made():
            self.now += seconds * self.factor
            self.cpu += 2 * seconds * self.factor * self.share

        return made


def test_beside_a_yardstick_a_busy_minute_counts_for_little(monkeypatch):
    machine = FakeMachine(monkeypatch)
    beside = timing.Yardstick(machine.call(0.01), "cpu")
    assert timing.believed(machine.call(0.05), "cpu", beside=beside)[0] == (pytest.approx(0.05), True)
    machine.factor = 3.0
    assert timing.believed(machine.call(0.05), "cpu", beside=beside)[0] == (pytest.approx(0.05), True)
    assert timing.believed(machine.call(0.05), "cpu")[0] == (pytest.approx(0.15), True)


def test_a_clock_beside_a_yardstick_tells_quiet_times_and_cpu_time(monkeypatch):
    machine = FakeMachine(monkeypatch)
    beside = timing.Yardstick(machine.call(0.01), "cpu")
    machine.factor = 3.0
    for yardstick, seconds in ((beside, 0.05), (None, 0.15)):
        found, _ = timing.clock(machine.call(0.05), "cpu", beside=yardstick)
        assert found.seconds == pytest.approx(seconds)
        assert found.cpu_seconds == pytest.approx(0.3)  # of two cores


def test_a_yardstick_too_short_to_see_changes_no_time(monkeypatch):
    machine = FakeMachine(monkeypatch)
    beside = timing.Yardstick(machine.call(0.001), "cpu")
    machine.factor = 3.0
    assert timing.clock(machine.call(0.05), "cpu", beside=beside)[0].seconds == pytest.approx(0.15)


@pytest.mark.parametrize(("seconds", "share", "busy"), [(0.01, 0.5, True), (0.01, 0.9, False), (0.001, 0.5, False)])
def test_a_machine_is_busy_where_threads_wait_for_cores(monkeypatch, seconds, share, busy):
    machine = FakeMachine(monkeypatch)
    machine.share = share
    assert timing.Yardstick(machine.call(seconds), "cpu").busy == busy


def test_on_a_busy_machine_the_median_of_several_runs_counts(monkeypatch):
    machine = FakeMachine(monkeypatch)
    machine.share = 0.5
    beside = timing.Yardstick(machine.call(0.01), "cpu")
    times = iter((0.05, 0.05, 0.09, 0.07, 0.06))
    found, _ = timing.believed(lambda: machine.call(next(times))(), "cpu", beside=beside)
    assert found == (pytest.approx(0.06), False)


@pytest.mark.parametrize(
    ("seconds", "steady"),
    [
        ((1.0, 0.02), True),
        ((1.0, 0.015, 0.015, 0.015, 0.05, 0.015), True),  # one slow call of many
        ((1.0, 0.2, 0.2, 0.3), False),
        ((1.0, 0.02, 0.03, 0.02, 0.03, 0.02, 0.03, 0.02, 0.03), False),
        ((1.0, 0.1, 0.14, 0.18), False),
    ],
)
def test_times_that_differ_by_more_than_a_third_are_not_steady(monkeypatch, seconds, steady):
    found, _ = timing.clock(FakeTime(monkeypatch, *seconds), "cpu", once=10.0)
    assert found.steady == steady


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_every_accelerator_is_waited_for(monkeypatch, kind):
    waited = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append(str(device)))
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {"allocated_bytes.all.peak": 350})
    out, _ = timing.timed(lambda: list(waited), torch.device(kind, 1))
    assert out == [f"{kind}:1"]
    assert waited == [f"{kind}:1"] * 2
    assert timing.clock(lambda: 1, kind)[0].peak_bytes == 250
    waited.clear()
    timing.timed(lambda: 1, "cpu")
    assert not waited


def test_an_accelerator_that_keeps_no_peak(monkeypatch):
    def none(device):
        raise RuntimeError("no statistics")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", none)
    monkeypatch.setattr(torch.accelerator, "memory_stats", none)
    assert timing.clock(lambda: 1, "mps")[0].peak_bytes is None
