"""What a first call needs is compiled by two processes, once; a later process finds all of it on disk."""

import atexit
import subprocess
import sys

import pytest
import torch

from scram.engines.cpu import ahead
from support.processes import run_program

KIND = ahead.Kind(2, "float32", False)


@pytest.fixture
def first(monkeypatch, tmp_path):
    """A process that knows no kind, an empty cache; the programs that are started and the stages that run."""
    started, ran = [], []

    class Program:
        def __init__(self, words, **given):
            started.append(words)

        def wait(self):
            return 0

    monkeypatch.setattr(ahead, "_known", set())
    monkeypatch.setattr(ahead, "folder_of", lambda launcher: tmp_path)
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", Program)
    monkeypatch.setattr(atexit, "register", lambda *call: None)
    forward = [(name, lambda name=name: ran.append(name)) for name in ("a", "b", "c")]
    monkeypatch.setattr(ahead, "_stages", lambda kind: (forward, [("d", lambda: ran.append("d"))]))
    return started, ran


def test_a_kind_is_compiled_once_and_not_where_all_of_it_is_on_disk(first, tmp_path):
    started, ran = first
    ahead.expect(2, torch.float32, False)
    ahead.expect(2, torch.float32, False)
    assert (len(started), ran) == (1, ["a", "b", "c"])
    assert started[0][0] == sys.executable
    (tmp_path / f"{ahead.Kind(3, 'float64', True).name}.done").touch()
    ahead.expect(3, torch.float64, True)
    assert len(started) == 1


def test_a_call_without_gradients_needs_no_more_than_one_with_them(first):
    started, _ = first
    ahead.expect(2, torch.float32, True)
    ahead.expect(2, torch.float32, False)
    assert len(started) == 1
    assert "True" in started[0][-1]


@pytest.mark.parametrize(
    ("name", "value"), [("usable_cores", lambda: 1), ("folder_of", lambda launcher: None)], ids=["one core", "no cache"]
)
def test_without_a_second_core_or_a_cache_each_stage_is_compiled_when_it_runs(first, monkeypatch, name, value):
    monkeypatch.setattr(ahead, name, value)
    ahead.expect(2, torch.float32, False)
    assert first == ([], [])


@pytest.mark.parametrize("executable", ["", None, "/opt/a program with Python inside"])
def test_no_process_is_started_where_there_is_no_python(first, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    ahead.expect(2, torch.float32, False)
    assert first == ([], [])


def test_stages_that_another_process_compiles_are_left_to_it(first, tmp_path):
    _, ran = first
    with ahead._claimed(tmp_path / f"{KIND.name}.b.lock"):
        assert ahead._claimed(tmp_path / f"{KIND.name}.b.lock") is None
        ahead.expect(2, torch.float32, False)
    assert ran == ["a", "c"]
    with ahead._claimed(tmp_path / f"{KIND.name}.b.lock") as file:
        assert file is not None


def test_the_other_process_begins_at_the_other_end_and_says_when_all_is_there(first, tmp_path):
    _, ran = first
    ahead.compile_for((2, "float32", False))
    assert ran == ["b", "c", "a"]
    assert (tmp_path / f"{KIND.name}.done").exists()
    ahead.compile_for((2, "float32", True))
    assert ran[3:] == ["b", "c", "a", "d"]


PROGRAM = """
import logging, subprocess, torch, scram
from scram.engines.cpu import ahead
others, begin = [], subprocess.Popen
subprocess.Popen = lambda *words, **given: others.append(begin(*words, **given)) or others[-1]
logging.basicConfig(level=logging.INFO, format="%(message)s")
q = torch.randn(1, 1, 24, 24, 16, requires_grad=True)
search, tail = scram.Search(seed=0), scram.Clusters(32, 64, seed=0)
out = scram.attention(q, q, q, search=search, tail=tail, impl="numba")
reference = scram.attention(q, q, q, search=search, tail=tail, impl="reference")
print(len(others), torch.allclose(out, reference, atol=1e-4))
out.sum().backward()
for other in others:
    other.wait()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_compile_all_that_a_call_needs(tmp_path):
    """Stages run on small calls, whose arrays must have the types of all calls: else a later process would compile."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "1"}  # what is kept, not how fast
    done = run_program(sys.executable, "-c", PROGRAM, environment=environment)
    assert done.stdout.split() == ["1", "True"]
    assert "compiling the CPU kernels for float32, rank 2" in done.stderr
    assert list(tmp_path.rglob("*.done"))
    count = len(list(tmp_path.rglob("*.nbc")))
    assert count >= 11
    again = run_program(sys.executable, "-c", PROGRAM, environment=environment)
    assert again.stdout.split() == ["0", "True"]
    assert "compiling" not in again.stderr
    assert len(list(tmp_path.rglob("*.nbc"))) == count


def test_the_other_process_ends_with_the_first(first, tmp_path, monkeypatch):
    _, ran = first
    parents = iter([7, 7, 1])  # at the start, before each stage
    monkeypatch.setattr(ahead.os, "getppid", lambda: next(parents))
    with pytest.raises(SystemExit):
        ahead.compile_for(KIND)
    assert ran == ["b"]
    assert not list(tmp_path.glob("*.done"))
