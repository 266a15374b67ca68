"""What is the CPU engine's own: threads, forks, the compiler's cache, chunks, memory, and the work it saves."""

import importlib.metadata
import inspect
import math
import os
import subprocess
import sys
import textwrap
import threading
import tracemalloc

import numba
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import scram
from cases import CASES, gradients, make_tensors, run_attend
from photos import stereo
from scram._compat import numba as _numba_compat
from scram._compat import numba_cache
from scram.calls import SearchCall
from scram.engines.cpu import attend_backward
from scram.engines.cpu.search import counted_search
from scram.engines.cpu.threads import threads
from scram.engines.cpu.vectors import coordinates, dot, exp, narrow_dots

SETTINGS = scram.Search(matches=2, seed=5, sweeps=3)


def run_python(code, **environment):
    """Run a program of its own; its output, or a failure with what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_can_search_after_its_parent_did():
    printed = run_python(
        """
        import multiprocessing, torch, scram
        torch.manual_seed(0)
        q = torch.randn(1, 1, 32, 32, 8)
        def look(): return scram.attention(q, q, q, search=scram.Search(seed=1), impl="numba").sum().item()
        before = look()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.apply_async(look).get(60) == before)
        print(look() == before)
        """
    )
    assert printed.split() == ["True", "True"]


def test_a_child_forked_while_another_thread_searches_can_search():
    """workqueue runs behind a lock, which that thread holds and nobody in the child would release."""
    printed = run_python(
        """
        import os, signal, threading, time, torch, scram, warnings
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads
        q, few = torch.randn(1, 1, 200, 200, 8), torch.randn(1, 1, 4, 4, 8)
        def look(x): scram.search(x, x, search=scram.Search(seed=1), impl="numba")
        look(few)
        worker = threading.Thread(target=lambda: [look(q) for _ in range(6)])
        worker.start()
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            torch.set_num_threads(1)
            look(few)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        worker.join()
        """,
        NUMBA_THREADING_LAYER="workqueue",
    )
    assert printed.split() == ["0"]


@pytest.mark.skipif(not list(importlib.metadata.distributions(name="tbb")), reason="needs tbb")
def test_tbb_is_found_when_it_is_asked_for():
    code = """
        import numba, torch, scram
        q = torch.randn(1, 1, 8, 8, 8)
        scram.search(q, q, impl="numba")
        print(numba.threading_layer())
        """
    assert run_python(code, NUMBA_THREADING_LAYER="tbb").strip() == "tbb"


@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_four_threads_can_call_at_once(layer):
    printed = run_python(
        """
        import threading, torch, scram
        torch.manual_seed(0)
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
        """,
        NUMBA_THREADING_LAYER=layer,
    )
    assert printed.split() == ["20", "True"]


def test_threads_follow_torch():
    before = torch.get_num_threads()
    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            with threads() as count:
                assert count == min(wanted, os.cpu_count())
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


def test_compiled_code_is_kept_on_disk(tmp_path):
    code = """
        import time, torch, scram
        q = torch.randn(1, 1, 16, 8)
        start = time.perf_counter()
        scram.attention(q, q, q, impl="numba")
        print(time.perf_counter() - start)
        """
    cold, warm = (float(run_python(code, NUMBA_CACHE_DIR=str(tmp_path))) for _ in range(2))
    assert list(tmp_path.rglob("*.nbc"))
    assert warm < cold / 3


def test_the_cache_on_disk_knows_all_sources(monkeypatch, tmp_path):
    """Numba looks at the file of the function that is cached only, not at those of what it calls."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def compiled_anew():
        def one(x):
            return x + 1

        function = numba_cache.cached(one)
        function(1)
        return sum(function.stats.cache_misses.values())

    assert [compiled_anew(), compiled_anew()] == [1, 0]
    monkeypatch.setattr(numba_cache, "SOURCES", "edited")
    assert [compiled_anew(), compiled_anew()] == [1, 0]


def test_compiling_is_said_once_and_loading_is_not(tmp_path):
    code = """
        import logging, sys, torch, scram
        from scram._compat import numba as _numba_compat
        sys.stderr.isatty = lambda: True
        logging.basicConfig(level=LEVEL, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
        q = torch.randn(1, 1, 16, 8)
        for _ in range(2): scram.search(q, q, search=scram.Search(matches=2), impl="numba")
        sys.stdout.flush()
        """
    run = [sys.executable, "-W", "error", "-c"]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def output(level):
        program = textwrap.dedent(code.replace("LEVEL", level))
        done = subprocess.run([*run, program], env=environment, capture_output=True, text=True, timeout=240, check=True)
        return done.stdout.splitlines(), done.stderr.splitlines()

    said, to_terminal = output("logging.WARNING")
    assert not said
    assert len(to_terminal) == 1
    assert to_terminal[0].startswith("scram: compiling the CPU kernels (search) for float32, rank 1; this happens once")
    assert output("logging.WARNING") == ([], [])  # loaded from the disk
    for path in tmp_path.rglob("*.nbi"):
        path.unlink()
    said, to_terminal = output("logging.INFO")
    assert len(said) == 2  # sweeps, and the sort of several matches
    assert said[0].startswith("scram INFO compiling the CPU kernels (search) for float32, rank 1")
    assert not to_terminal


def test_the_private_parts_of_numba_are_what_they_were():
    assert _numba_compat.PRIVATE


FALLBACK = """
    import sys, torch, numba, numba.core.codegen
    sys.modules["numba.core.codegen"] = None
    import scram
    from scram._compat import numba as _numba_compat
    assert not _numba_compat.PRIVATE
    """


def results():
    """Searches of integer features, attention and its gradients, in Numba."""
    found = []
    for width in (3, 6):
        torch.manual_seed(3)
        q, k = (torch.randint(-4, 5, (1, 2, 90, width)).float() for _ in range(2))
        matches = scram.search(q, k, search=scram.Search(matches=2, sweeps=2, seed=1), impl="numba")
        leaves = [x.requires_grad_() for x in (q, k, torch.randn(1, 2, 90, 5))]
        out, lse = scram.attend(*leaves, matches, scale=0.1, dropout_p=0.2, impl="numba")
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        found += [matches.index, matches.score, out.detach(), lse.detach(), *grads]
    return found


@pytest.mark.timeout(600)
def test_without_the_private_parts_of_numba_the_results_are_the_same(tmp_path):
    code = textwrap.dedent(FALLBACK) + textwrap.dedent(inspect.getsource(results))
    code += f"torch.save(results(), {str(tmp_path / 'results.pt')!r})"
    run_python(code, NUMBA_OPT="1")  # what it computes, not how fast
    for n, (ours, theirs) in enumerate(zip(results(), torch.load(tmp_path / "results.pt"), strict=True)):
        if n % 7 < 2:  # matches and their scores
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_without_a_folder_for_the_cache_it_compiles_in_memory(monkeypatch):
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert numba_cache.cached(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize("name", ["all at once", "dropout", "extra", "rank 3", "bfloat16"])
def test_gradients_are_the_same_bits_in_any_chunks_and_threads(name, monkeypatch):
    case = next(case for case in CASES if case.name == name)
    tensors = make_tensors(case)

    def grads():
        leaves = tensors.leaves(case.dtype)
        return gradients(run_attend(case, tensors, leaves, "numba", dropout_seed=3), leaves)

    once, before = grads(), torch.get_num_threads()
    monkeypatch.setattr(attend_backward, "CHUNK_PAIRS", 100)
    try:
        torch.set_num_threads(2)
        for ours, theirs in zip(grads(), once, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        torch.set_num_threads(before)


def test_memory_of_the_forward_is_linear_in_the_matches():
    q = torch.randn(1, 1, 256, 256, 4)
    settings = scram.Search(matches=4, sweeps=1, seed=0)
    scram.attention(q, q, q, search=settings, impl="numba")
    tracemalloc.start()
    out = scram.attention(q, q, q, search=settings, impl="numba")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - out.numel() * 4 <= 64 * 256 * 256 * 4


def test_scores_are_counted_and_few():
    """At most one score for each candidate of Algorithm 1, whose number grows with the log of the extent."""
    paper = scram.Search.paper()
    settings = {name: getattr(paper, name) for name in ("matches", "separation", "jumps", "propagate", "gossip")}
    for size, radii in ((16, 5), (32, 6), (64, 7)):
        q, k = stereo(size)
        call = SearchCall(q, k, torch.tensor(0), None, None, "query", **settings, sweeps=8, causal=False)
        count = counted_search(call)[1]
        random_search = 8 * radii * size**2
        assert 0.8 * random_search < count < size**2 * (1 + 8 * (16 + radii))


def test_runs_end_when_every_key_is_a_match(monkeypatch):
    module, calls = sys.modules[counted_search.__module__], []
    sweep = module._sweep

    def counting(*arguments):
        calls.append(1)
        sweep(*arguments)

    monkeypatch.setattr(module, "_sweep", counting)
    q, k = torch.randn(1, 1, 20, 4), torch.randn(1, 1, 3, 4)
    found = scram.search(q, k, search=scram.Search(matches=50, sweeps=6, seed=0), impl="numba").index
    assert (found[..., :3].sort(-1).values == torch.arange(3)).all()
    assert (found[..., 3:] == -1).all()
    assert len(calls) < 10 * 7


def test_sixteen_bit_tensors_are_widened_once():
    q, k, v = (torch.randn(1, 1, 40, 40, 8, dtype=torch.bfloat16) for _ in range(3))
    with torch.profiler.profile(record_shapes=True) as profile:
        scram.attention(q, k, v, search=SETTINGS, impl="numba")
    copies = [event for event in profile.events() if event.name == "aten::_to_copy"]
    whole = [event for event in copies if math.prod(event.input_shapes[0]) == q.numel()]
    assert len(whole) == 4  # q, k and v to float32, out back


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


def three():
    return [x.requires_grad_() for x in torch.randn(3, 1, 2, 6, 6, 4, dtype=torch.float64).unbind()]


def test_a_graph_of_the_gradient_can_be_made_but_not_differentiated():
    leaves = three()
    out = scram.attention(*leaves, search=SETTINGS, impl="numba")
    plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    grads = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    for ours, theirs in zip(grads, plain, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(NotImplementedError, match=r"impl='numba' has no second derivative; use impl='reference'"):
        torch.autograd.grad(grads[0].sum(), leaves)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own forward mode
def test_forward_mode_is_refused_not_zero():
    q, k, v = (x.detach() for x in three())
    found = scram.search(q, k, search=SETTINGS)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        scram.attend(forward_ad.make_dual(q, q), k, v, found, impl="numba")


def test_matches_of_inference_mode_serve_training():
    q, k, v = three()
    with torch.inference_mode():
        found = scram.search(q, k, search=SETTINGS, impl="numba")
    scram.attend(q, k, v, found, impl="numba").out.sum().backward()
    assert q.grad.abs().sum() > 0


def test_coordinates_are_exact_up_to_the_largest_grid():
    @numba.njit
    def fill(*arguments):
        coordinates(*arguments)

    random = np.random.default_rng(0)
    for extent, stride in ((2**31 - 1, 1), (46341, 46340), (9, 49), (1, 1), (1, 2**31 - 1), (65536, 32767)):
        last = extent * stride - 1
        index = np.r_[0, last, random.integers(0, last + 1, 500), random.integers(0, extent, 500) * stride]
        index = np.r_[index, np.maximum(index - 1, 0)].astype(np.int32)
        got = np.empty_like(index)
        fill(index, extent, stride, got, len(index))
        assert (got == index // stride % extent).all(), (extent, stride)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_narrow_rows_give_the_same_bits_one_by_one_and_many_at_a_time(dtype):
    @numba.njit
    def each(a, i, b, j, keys, result):
        for p in range(len(keys)):
            result[p] = dot(a, i + p, b, j + keys[p])

    @numba.njit
    def many(a, i, b, j, keys, result):
        narrow_dots(a, i, b, j, keys, result, len(keys))

    random = np.random.default_rng(0)
    a, b = (random.standard_normal((90, 4)).astype(dtype) for _ in range(2))
    for size in (0, 1, 15, 16, 17, 70):
        keys = random.integers(0, 80, size).astype(np.int32)
        one, all_, true = np.empty(size, dtype), np.empty(size, dtype), (a[5 : 5 + size] * b[10 + keys]).sum(1)
        each(a, 5, b, 10, keys, one)
        many(a, 5, b, 10, keys, all_)
        assert (one == all_).all()
        np.testing.assert_allclose(one, true, rtol=0, atol=20 * np.finfo(dtype).eps)


def test_exp_is_right_to_the_last_bits():
    @numba.njit
    def values(x):
        return np.array([exp(one) for one in x])

    x = np.r_[np.linspace(-86.9, 0, 20001), -np.logspace(-9, 0, 1000)].astype(np.float32)
    assert np.abs(values(x) / np.exp(x.astype(np.float64)) - 1).max() < 1.2e-7  # one unit of float32
    small, none, unknown = values(np.array([-1000, -np.inf, np.nan], np.float32))
    assert small == 0
    assert none == 0
    assert np.isnan(unknown)
