"""What a result was made with: machine, versions, commit, date. Needs torch alone, so it runs anywhere."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__

PACKAGES = ("torch", "triton", "numba", "faiss-cpu", "pynndescent", "natten")


def made_with(device: str) -> dict[str, Any]:
    """What a result is stored with."""
    return {"machine": machine(device), "commit": commit(), "date": date.today().isoformat()}


def machine(device: str) -> dict[str, Any]:
    """What was measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":")[1].strip() if models else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": {"scram": __version__, "python": platform.python_version(), **installed(PACKAGES)},
    }


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def commit() -> str:
    """The commit of the sources, with a mark when they differ from it; "installed" outside a repository."""
    this_file = Path(__file__)

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", this_file.parent, *words], capture_output=True, text=True, check=True
        ).stdout

    try:
        git("ls-files", "--error-unmatch", this_file.name)  # a repository around an installation is not ours
        return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(git("status", "--porcelain", "--", ".."))
    except (OSError, subprocess.CalledProcessError):
        return "installed"
