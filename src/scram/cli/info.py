"""`scram info`: versions, threads, GPU, and which implementations run here."""

import json
import os
import platform
from typing import Any

import torch
import typer
from rich.table import Table

from .. import __version__, dispatch
from .console import console
from .provenance import installed

PACKAGES = ("torch", "numpy", "numba", "triton")


def run(as_json: bool) -> None:
    """Print what `gather` finds, as JSON or as two tables."""
    found = gather()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    facts = Table(show_header=False, box=None)
    for name, value in found.items():
        if name != "implementations":
            facts.add_row(name, str(value))
    implementations = Table("implementation", "tensors on", "runs", "why not")
    for one in found["implementations"]:
        implementations.add_row(
            one["name"], one["device"], "no" if one["reasons"] else "yes", "\n".join(one["reasons"])
        )
    screen = console()
    screen.print(facts)
    screen.print(implementations)


def gather() -> dict[str, Any]:
    """Everything `scram info` prints."""
    gpu = torch.cuda.is_available()
    return {
        "scram": __version__,
        "python": platform.python_version(),
        **dict.fromkeys(PACKAGES, "not installed"),
        **installed(PACKAGES),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if gpu else "none",
        "implementations": [
            {"name": name, "device": device, "reasons": reasons}
            for device in (["cpu", "cuda"] if gpu else ["cpu"])
            for name, reasons in dispatch.implementations(device)
        ],
    }
