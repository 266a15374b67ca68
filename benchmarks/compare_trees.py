"""The two source trees that compare.py compares: a process for each, their names, and where results are stored."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TREES = ("base", "new")


class Worker:
    """A process that runs `compare_worker` on one tree; it starts again after a crash."""

    def __init__(self, tree: Path, threads: int, limit: float, **environment: str) -> None:
        self.limit, self.errors = limit, tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        path = os.pathsep.join([str(tree.resolve()), str(HERE), os.environ.get("PYTHONPATH", "")])
        self.environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, **environment, "PYTHONPATH": path}
        code = f"import compare_worker; compare_worker.serve({str(tree)!r}, {threads})"
        self.command = [sys.executable, "-c", code]
        self.process: subprocess.Popen[bytes] | None = None

    def send(self, name: str, *arguments: Any) -> None:
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=self.environment
            )
        assert self.process.stdin is not None
        try:
            pickle.dump((name, arguments), self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` says why

    def receive(self) -> tuple[str, Any]:
        """("ok", result), ("error", words) or, if the process died or hung, ("crash", words)."""
        assert self.process is not None
        assert self.process.stdout is not None
        why = f"no answer in {self.limit:.0f} s"
        if select.select([self.process.stdout], [], [], self.limit)[0]:
            try:
                status, result = pickle.load(self.process.stdout)
                if status == "error" and "CUDA" in result:
                    self.close()  # such an error may leave the device unusable to its process
                return status, result
            except (EOFError, pickle.UnpicklingError):
                why = f"exit code {self.process.wait()}"
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 600))
        tail = self.errors.read().decode(errors="replace").strip().splitlines()[-4:]
        self.close()
        return "crash", " / ".join([why, *tail])

    def ask(self, name: str, *arguments: Any) -> Any:
        """The result alone; RuntimeError where there is none."""
        self.send(name, *arguments)
        status, result = self.receive()
        if status != "ok":
            raise RuntimeError(f"{status}: {result}")
        return result

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def tracked(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """A bar on a terminal where rich is installed, else a line now and then."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        track = None  # type: ignore[assignment]
    if track is not None and sys.stderr.isatty():
        yield from track(items, what, total, console=Console(stderr=True))
        return
    begun = said = time.monotonic()
    for count, item in enumerate(items):
        if count in (0, total - 1) or time.monotonic() > said + 10:
            said = time.monotonic()
            say(f"{what}: {count + 1} of {total}, {said - begun:.0f} s")
        yield item


def describe(tree: Path) -> str:
    """The commit of a tree, with a mark when its files differ from it; "unknown" outside a repository."""
    git = ["git", "-C", str(tree)]
    try:
        # A repository around a copy of the sources is not theirs.
        subprocess.run([*git, "ls-files", "--error-unmatch", "scram/__init__.py"], capture_output=True, check=True)
        name = [*git, "describe", "--always", "--dirty", "--abbrev=9"]
        return subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def in_turn(count: int) -> Iterator[tuple[str, ...]]:
    """base new, new base, ...: neither is always the first."""
    return (TREES[:: 1 - 2 * (number % 2)] for number in range(count))


def store(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1, default=float) + "\n")
