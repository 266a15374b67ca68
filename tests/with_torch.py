"""Programs that start where torch is imported already: forks of one process, so that torch is imported once for all."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

# In a program: as if torch were not imported yet. The next import of it finds the one that is there.
WITHOUT_TORCH = """
import importlib.util, sys
class Hidden:
    torch = sys.modules.pop("torch")
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "torch" else None
    def create_module(self, spec):
        return self.torch
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Hidden())
"""


def printed(code, before=""):
    """What a program of its own prints; it begins with `before`."""
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / name) for name in ("out", "err")]
        process = _process()
        process.stdin.write(json.dumps([before + textwrap.dedent(code), *names]) + "\n")
        process.stdin.flush()
        ended = process.stdout.readline()
        out, err = (Path(name).read_text(encoding="utf-8") for name in names)
    assert ended == "0\n", err
    return out.strip()


@functools.cache
def _process():
    """It has imported torch and nothing of scram."""
    command = [sys.executable, __file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def _serve():
    sys.path.pop(0)  # the folder of the tests
    import torch  # noqa: F401

    for line in sys.stdin:
        code, *names = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(code, names)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(code, names):
    failed = 1
    try:
        for number, name in enumerate(names, 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)


if __name__ == "__main__":
    _serve()
