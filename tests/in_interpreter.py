"""What tests in Triton's interpreter share. TRITON_INTERPRET is read when triton is imported: they have a process of
their own, which engines/gpu/test_interpreter.py starts."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

LEAST_QUERIES = 128  # of a program
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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


def _record(patch, names):
    """Until the patch ends, the names of the kernels that run are appended."""
    from scram.engines.gpu import launch

    call = launch.Kernel.__call__

    def record(self, *arguments):
        names.append(self.kernel.fn.__name__)
        call(self, *arguments)

    patch.setattr(launch.Kernel, "__call__", record)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ran. On a device some go another way."""
    if not INTERPRETED:
        pytest.skip("launches are seen in Triton's interpreter only")
    names = []
    _record(monkeypatch, names)
    return names


@pytest.fixture(autouse=True, scope="session")
def _all_launched(request):
    """Writes the names of all kernels that ran to the file that --launched-to names."""
    file = request.config.getoption("--launched-to")
    names = []
    with pytest.MonkeyPatch.context() as patch:
        if file:
            _record(patch, names)
        yield
    if file:
        Path(file).write_text(json.dumps(sorted(set(names))))
