"""Threads of the CPU engine: as many as torch has, safe after a fork and from several Python threads."""

import importlib.metadata
import threading

import numba
import numpy as np
import pytest
import torch

import scram
from scram._compat.numba import turn
from scram.engines.cpu.threads import TASKS_PER_THREAD, parallel, quota, running, threads, turns, usable_cores
from support.photos import stereo
from support.processes import run_python

pytestmark = pytest.mark.slow

QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"  # files of version 1
SETTINGS = scram.Search(matches=2, seed=5, sweeps=3)


FOUR_THREADS = """
        import threading
        q = torch.randn(1, 1, 48, 48, 8, requires_grad=True)
        def look(): return scram.attention(q, q, q, search=scram.Search(seed=1), impl="numba")
        right, found = look(), []
        def work():
            for _ in range(5):
                out = look()
                torch.autograd.grad(out.sum(), q)
                found.append(bool((out == right).all()))
        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        print(len(found), all(found))
        """


def test_a_forked_child_can_search_after_its_parent_did_and_four_threads_can_call_at_once():
    printed = run_python(
        """
        import multiprocessing, torch, scram
        torch.manual_seed(0)
        scram.check_first_call(False)
        few = torch.randn(1, 1, 32, 32, 8)
        how = {"search": scram.Search(seed=1), "tail": None, "impl": "numba"}
        def forked(): return scram.attention(few, few, few, **how).sum().item()
        before = forked()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.apply_async(forked).get(60) == before)
        print(forked() == before)
        """
        + FOUR_THREADS,
        NUMBA_THREADING_LAYER="default",
    )
    assert printed.split() == ["True", "True", "20", "True"]


def test_workqueue_serves_a_child_forked_while_another_thread_searches_and_four_threads_at_once():
    """It runs behind a lock, which that thread holds and nobody in the child would release."""
    printed = run_python(
        """
        import os, signal, threading, time, torch, scram, warnings
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads
        q, few = torch.randn(1, 1, 200, 200, 8), torch.randn(1, 1, 4, 4, 8)
        def search(x): scram.search(x, x, search=scram.Search(seed=1), impl="numba")
        search(few)
        worker = threading.Thread(target=lambda: [search(q) for _ in range(6)])
        worker.start()
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            torch.set_num_threads(1)
            search(few)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        worker.join()
        """
        + FOUR_THREADS,
        NUMBA_THREADING_LAYER="workqueue",
    )
    assert printed.split() == ["0", "20", "True"]


@pytest.mark.skipif(not list(importlib.metadata.distributions(name="tbb")), reason="needs tbb")
def test_tbb_is_found_when_it_is_asked_for():
    code = """
        import numba
        from scram.engines.cpu import threads
        threads._start()
        print(numba.threading_layer())
        """
    assert run_python(code, NUMBA_THREADING_LAYER="tbb").strip() == "tbb"


def test_threads_follow_torch():
    before = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            with threads() as tasks:
                assert running() == min(wanted, usable_cores())
                assert tasks == TASKS_PER_THREAD * running()
                assert numba.get_num_threads() == running()
        assert running() == 1
    finally:
        torch.set_num_threads(before)


def test_there_are_no_more_threads_than_cores_that_the_process_may_use():
    code = """
        import os, torch
        torch.set_num_threads(8)
        from scram.engines.cpu.threads import running, threads, usable_cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        with threads():
            print(usable_cores(), running())
        """
    assert run_python(code).split() == ["1", "1"]


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "50000 100000", "a/b/cpu.max": "300000 100000"}, 0.5),
        ("0::/elsewhere", {"cpu.max": "200000 100000"}, 2.0),  # a container sees its own group at the root
        (
            "3:cpuset:/x\n2:cpu,cpuacct:/x",
            {"cpu/x/cpu.cfs_quota_us": "250000", "cpu/x/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, np.inf),
        ("0::/", {"cpu.max": "what"}, np.inf),
        ("nothing", {}, np.inf),
        (None, {}, np.inf),
    ],
)
def test_the_quota_of_control_groups_is_the_least_of_a_group_and_those_above(tmp_path, membership, files, cores):
    of = tmp_path / "membership"
    if membership is not None:
        of.write_text(membership)
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert quota(of, tmp_path / "root") == cores


def test_a_quota_leaves_at_least_one_core(monkeypatch):
    monkeypatch.setattr("scram.engines.cpu.threads._quota", lambda: 0.2)
    assert usable_cores() == 1


@parallel
def _first_waits(task, tasks, counter, waited):
    """Task 0 waits until all others have counted; it counts too whenever it looks."""
    if task > 0:
        turn(counter, task, tasks)
        return
    for looks in range(1 << 27):
        if turn(counter, task, tasks) - looks == tasks - 1:
            waited[0] = 1
            return


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_tasks_are_handed_out_one_by_one_so_that_one_that_is_late_delays_no_other():
    before = torch.get_num_threads()
    waited = np.zeros(1, np.int64)
    try:
        torch.set_num_threads(2)
        with threads() as tasks:
            _first_waits(tasks, turns(1), waited)
    finally:
        torch.set_num_threads(before)
    assert waited[0] == 1


def test_no_operator_of_torch_between_kernels_starts_threads_of_its_own(monkeypatch):
    """Beside other programs each of its parallel regions would wait for a core."""
    seen = []
    contiguous = torch.Tensor.contiguous

    def looking(x, *arguments, **named):
        seen.append(torch.get_num_threads())
        return contiguous(x, *arguments, **named)

    before = torch.get_num_threads()
    q, k, v = (torch.randn(1, 16, 16, 2, 8).movedim(3, 1).requires_grad_() for _ in range(3))
    monkeypatch.setattr(torch.Tensor, "contiguous", looking)
    try:
        torch.set_num_threads(2)
        for tail in (scram.Clusters(count=16, keys=16, seed=0), scram.DrawnKeys(16, seed=0), None):
            out = scram.attention(q, k, v, search=SETTINGS, tail=tail, impl="numba")
            torch.autograd.grad(out.sum(), (q, k, v))
        scram.estimate(q, k, v, scram.search(q, k, search=SETTINGS), method=scram.Snis(8, seed=0), impl="numba")
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_a_thread_that_waits_does_not_change_the_answer():
    q, k = stereo(32)
    alone = scram.search(q, k, search=SETTINGS, impl="numba")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        both = scram.search(q, k, search=SETTINGS, impl="numba")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone.index, both.index)


def test_an_interrupted_call_leaves_the_engine_usable():
    q, k = stereo(32)
    right = scram.search(q, k, search=SETTINGS, impl="numba")
    failed = []

    def bad():
        try:
            scram.search(q, k[:, :, :1, :1, :0], impl="numba")
        except ValueError as error:
            failed.append(error)

    worker = threading.Thread(target=bad)
    worker.start()
    worker.join()
    assert failed
    assert torch.equal(scram.search(q, k, search=SETTINGS, impl="numba").index, right.index)
