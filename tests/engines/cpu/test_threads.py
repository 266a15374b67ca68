"""Threads of the CPU engine: as many as torch has, safe after a fork and from several Python threads."""

import importlib.metadata
import os
import threading

import numba
import pytest
import torch

import scram
from scram.engines.cpu.threads import TASKS_PER_THREAD, threads
from support.photos import stereo
from support.processes import run_python

pytestmark = pytest.mark.slow

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
        import numba, torch, scram
        q = torch.randn(1, 1, 8, 8, 8)
        scram.search(q, q, impl="numba")
        print(numba.threading_layer())
        """
    assert run_python(code, NUMBA_THREADING_LAYER="tbb").strip() == "tbb"


def test_threads_follow_torch():
    before = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            with threads() as tasks:
                assert numba.get_num_threads() == min(wanted, os.cpu_count())
                assert tasks == TASKS_PER_THREAD * numba.get_num_threads()
    finally:
        torch.set_num_threads(before)


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
