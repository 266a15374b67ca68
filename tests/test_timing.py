"""Time and peak memory of a call."""

from pathlib import Path
from time import sleep

import pytest
import torch

from scram import timing


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
