"""`scram info`: versions, threads, GPU, and which implementations run here."""

import json
import os
import platform

import torch
import typer
from rich.table import Table

from .. import __version__
from ..engines import dispatch
from .console import Numbers, console
from .provenance import installed

PACKAGES = ("torch", "numpy", "numba", "triton")


def run(as_json: bool) -> None:
    """Print what is found, as JSON or as two tables."""
    gpu = torch.cuda.is_available()
    facts = {
        "scram": __version__,
        "python": platform.python_version(),
        **dict.fromkeys(PACKAGES, "not installed"),
        **installed(PACKAGES),
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
    if as_json:
        typer.echo(json.dumps({**facts, "implementations": implementations}, indent=2))
        return
    upper = Table(show_header=False, box=None)
    for name, value in facts.items():
        upper.add_row(name, str(value))
    lower = Table("implementation", "tensors on", "runs", "why not")
    for one in implementations:
        reasons = "\n".join(one["reasons"])
        lower.add_row(one["name"], one["device"], "no" if reasons else "yes", reasons)
    for table in (upper, lower):
        console().print(table)
