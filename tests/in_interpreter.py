"""What tests in Triton's interpreter share. TRITON_INTERPRET is read when triton is imported, so each of their files
runs itself in a process of its own."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest

LEAST_QUERIES = 128  # of a program
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
starts = pytest.mark.skipif(INTERPRETED, reason="already there")


def passes_in_the_interpreter(file):
    """Every test of the file but the one that asks passes there, and none is skipped; returns how many."""
    pytest.importorskip("triton")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", file]
    done = subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"^(\d+) passed, 1 skipped in", done.stdout, re.MULTILINE)
    assert passed, done.stdout[-500:]
    return int(passed[1])


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The interpreter patches triton.language at every call of a device function; once per launch is enough."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    from scram.engines.gpu import block_sizes, launch

    patch, run = interpreter._patch_lang, interpreter.InterpretedFunction.run
    done = set()

    def patch_once(fn):
        if id(fn.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(fn.__globals__))
        return patch(fn)

    def run_anew(self, *args, **kwargs):
        done.clear()
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run_anew)
    # Large blocks: the interpreter's time goes by programs, not by queries.
    block = block_sizes._block
    monkeypatch.setattr(block_sizes, "_block", lambda rank, queries: block(rank, max(queries, LEAST_QUERIES)))
    launch.clear_caches()
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ran."""
    from scram.engines.gpu import launch

    names = []
    call = launch.Kernel.__call__

    def record(self, *arguments):
        names.append(self.kernel.fn.__name__)
        call(self, *arguments)

    monkeypatch.setattr(launch.Kernel, "__call__", record)
    return names
