"""`scram info`: versions, threads, GPU, which implementations run here, caches, and what is not installed."""

import json
import os
import platform
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from rich.table import Table

from .. import __version__
from ..engines import dispatch
from .console import Numbers, console
from .provenance import installed

PACKAGES = ("torch", "numpy", "numba", "triton")
# Packages that some parts need: the module, what needs it, what installs it.
OPTIONAL = (
    ("triton", "attention on NVIDIA GPUs", "triton"),
    ("tbb", "Numba's safest threads: after a fork, and under several Python threads", "tbb"),
    ("av", "films", "'scram-attention[video]'"),
    ("skimage", "its photographs, in commands and benchmarks", "'scram-attention[bench]'"),
    ("cv2", "`scram bench` and `scram denoise`: rivals", "'scram-attention[bench]'"),
    ("faiss", "`scram bench`: a rival", "'scram-attention[bench]'"),
    ("pynndescent", "`scram bench`: a rival", "'scram-attention[bench]'"),
    ("transformers", "scram.register_transformers", "'scram-attention[transformers]'"),
    ("diffusers", "the example of a diffusion model", "'scram-attention[diffusers]'"),
)


def run(as_json: bool) -> None:
    """Print what is found, as JSON or as tables."""
    gpu = torch.cuda.is_available()
    facts = {
        "scram": __version__,
        "python": platform.python_version(),
        **dict.fromkeys(PACKAGES, "not installed"),
        **installed(PACKAGES),
        "torch": torch.__version__,  # with its build, "+cpu"
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else "none",
    }
    implementations: list[Numbers] = [
        {"name": name, "device": device, "reasons": reasons}
        for device in ("cpu", "cuda")[: 1 + gpu]
        for name, reasons in dispatch.implementations(device)
    ]
    missing = [
        {"package": package, "needed for": use, "install": f"pip install {name}"}
        for package, use, name in OPTIONAL
        if not _is_there(package)
    ]
    kept = caches()
    if as_json:
        report = {**facts, "implementations": implementations, "caches": kept, "missing": missing}
        typer.echo(json.dumps(report, indent=2))
        return
    upper = Table(show_header=False, box=None)
    for name, value in facts.items():
        upper.add_row(name, str(value))
    lower = Table("implementation", "tensors on", "runs", "why not")
    for one in implementations:
        reasons = "\n".join(one["reasons"])
        lower.add_row(one["name"], one["device"], "no" if reasons else "yes", reasons)
    folders = Table("compiled code of", "is kept in", "state")
    for one in kept:
        folders.add_row(one["name"], one["folder"], one["state"])
    optional = Table("not installed", "needed for", "install")
    for absent in missing:
        optional.add_row(*absent.values())
    for table in (upper, lower, folders, *([optional] if missing else [])):
        console().print(table)


def caches() -> list[Numbers]:
    """Where compiled code is kept between processes, and whether it can be: nothing is made or written."""
    numba = str(Path(__file__).parent.parent / "engines" / "cpu" / "__pycache__")
    triton = str(Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")
    places = {"numba": ("NUMBA_CACHE_DIR", numba), "triton": ("TRITON_CACHE_DIR", triton)}
    folders: list[Numbers] = []
    for name, (variable, default) in places.items():
        if _is_there(name):
            folder = os.environ.get(variable) or default
            folders.append({"name": name, "folder": folder, "state": _state(Path(folder), variable)})
    return folders


def _state(folder: Path, variable: str) -> str:
    """Whether files can be written into a folder, or into the one that it will be made in; the files' size."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return f"cannot be written; name another folder in {variable}"
    if existing is not folder:
        return "empty: kernels are compiled at the first call"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 2**20:.0f} MiB"


def _is_there(package: str) -> bool:
    """Whether a package is installed; of tbb, which is no module, its files."""
    return find_spec(package) is not None or package in installed((package,))
