"""The Triton engine on the CPU: every test that is marked `interpreted` passes in Triton's interpreter."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scram

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[2]
GPU = Path(scram.__file__).parent / "engines" / "gpu"
PARTS = 2


def kernels():
    """The kernels of the engine: what Triton compiles and is named so."""
    for path in GPU.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            decorators = [ast.unparse(x) for x in getattr(node, "decorator_list", [])]
            if any(x.startswith("triton.jit") for x in decorators) and node.name.endswith("_kernel"):
                yield node.name


def files():
    """Those with tests for the interpreter: collecting all others takes as long as running some."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if re.search(r"\binterpreted\b|\btable\(CASES", path.read_text(encoding="utf-8")):
            yield str(path)


@pytest.mark.timeout(900)
def test_in_the_interpreter(tmp_path):
    """In processes side by side. None is skipped but in float64, and every kernel of the engine ran."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider", *files()]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    started = []
    for part in range(PARTS):
        file = tmp_path / f"{part}.json"
        options = [f"--interpreted-part={part}/{PARTS}", f"--launched-to={file}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append((subprocess.Popen([*command, *options], env=environment, **pipes), file))
    said = [process.communicate()[0] for process, _ in started]
    ran = set()
    for (process, file), output in zip(started, said, strict=True):
        assert process.returncode == 0, output[-6000:]
        assert re.search(r"^\d+ passed, (\d+ skipped, )?\d+ deselected in", output, re.MULTILINE), output[-500:]
        assert all("takes no float64" in line for line in output.splitlines() if line.startswith("SKIPPED"))
        ran |= set(json.loads(file.read_text()))
    assert ran == set(kernels())
