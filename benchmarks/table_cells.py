"""What all tables share: stored results, rows of a table, and how figures are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


RESULTS = ROOT / "benchmarks" / "results"


BY = "\N{MULTIPLICATION SIGN}"
NOT_MEASURED = "Not measured yet."  # in place of a table


def load(name: str) -> dict[str, Any]:
    """The rows of a file of results; none where there is no such file yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shown(name: str) -> str:
    """A set of tensors as pages name it; results keep the names that they were stored under.

    >>> shown("unnormalised 8"), shown("un-normalised 256x256")
    ('un-normalized 8', 'un-normalized 256x256')
    """
    return re.sub(r"un-?normalised", "un-normalized", name)


def table(head: Iterable[str], *lines: Iterable[str]) -> str:
    names = list(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *map(list, lines)))


def time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{float(f'{seconds:.3g}'):g} s"


def share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value < 1 else f"{value:.3g}"


def digits(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}".removeprefix("0") for value in values)


def mebibytes(held: int) -> str:
    return f"{held / 2**20:.0f} MiB"
