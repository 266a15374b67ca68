"""Results as JSON: each row is written when it is measured, with the machine, the versions and the commit."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from scram.cli.provenance import commit
from scram.cli.provenance import machine as machine_of

RESULTS = Path(__file__).parent / "results"
PAUSE = 0.6  # seconds


def machine() -> dict[str, Any]:
    """What was measured on, with the GPU where there is one."""
    return machine_of("cuda" if torch.cuda.is_available() else "cpu")


class Store:
    """A JSON file of rows; a row of the same name replaces the old one."""

    def __init__(self, name: str, folder: Path = RESULTS) -> None:
        self.path = folder / f"{name}.json"
        self.data = json.loads(self.path.read_text()) if self.path.exists() else {}

    def put(self, name: str, measured: str | None = None, /, **row: Any) -> None:
        """`measured` names the commit where git is not there to ask."""
        stamp = {"date": date.today().isoformat(), "commit": measured or commit(), "machine": machine()}
        self.data[name] = {**row, **stamp}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def alternate(calls: dict[str, Callable[[], Any]], repeats: dict[str, int]) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn so that a noisy minute hits them all; one untimed call each first.

    A pause between two contenders: torch's threads go on spinning for a while after their work is done.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = min(repeats.values())
    for _ in range(rounds):
        for name, call in calls.items():
            if len(calls) > 1:
                time.sleep(PAUSE)
            if not times[name] and repeats[name] > 3:
                call()
            for _ in range(repeats[name] // rounds):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median and spread in milliseconds."""
    middle = statistics.median(times)
    return {"median_ms": 1e3 * middle, "least_ms": 1e3 * min(times), "most_ms": 1e3 * max(times)}
