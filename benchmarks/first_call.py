"""A call that measures itself: what that costs, and where it warns. `python benchmarks/first_call.py --data FOLDER`.

Cost: of a call of the default and of its measurement of itself, in time of the processor with one thread; and of calls
under torch.compile, where nothing is measured. Warnings: the default on noise, on features of photographs and on all
tensors of trained models in FOLDER (benchmarks/trained.py), beside the error over 1024 queries.
Results: results/first_call.json.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sets import stereo
from store import Store
from torch import Tensor
from trained import STORED, photo_sets, trained_sets

import scram
from scram.core import first_call

ROUNDS = 9
NUM_QUERIES = 1024  # compared, where there are as many
SILENT, WARNED = 0.15, 0.35  # below and beyond these errors it must be silent, and warn
NOISE = {
    "randn 96x96": (1, 96, 32, 1.0),
    "randn 96x96, q and k doubled": (1, 96, 32, 2.0),
    "randn 128x128": (2, 128, 64, 1.0),
}


def in_turn(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of the processor of each call; one that is not counted first."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            if number:
                times[name].append(time.process_time() - begin)
    return times


def cost(store: Store, size: int) -> None:
    """What a call takes, and what of that is its measurement of itself: medians over the rounds."""
    q, k = stereo(size)
    measure, seconds = first_call.measure, []

    def timed(*given: Any) -> None:
        begin = time.process_time()
        measure(*given)
        seconds.append(time.process_time() - begin)

    def call() -> None:
        first_call.clear()
        scram.attention(q, k, k, search=scram.Search(sweeps=2, seed=0))

    first_call.measure = timed
    try:
        times = in_turn({"measuring": call})["measuring"]
    finally:
        first_call.measure = measure
    assert len(seconds) == ROUNDS + 1
    own = median(seconds[1:])
    plain = median(whole - part for whole, part in zip(times, seconds[1:], strict=True))
    row = {"call_ms": 1e3 * plain, "measuring_ms": 1e3 * own, "share": own / plain}
    store.put(f"cost {size}x{size}", threads=torch.get_num_threads(), width=q.shape[-1], rounds=ROUNDS, **row)
    Console().print(f"{size}x{size}: {1e3 * own:.1f} ms beside {1e3 * plain:.0f} ms, {own / plain:.1%}")


def compiled_cost(store: Store) -> None:
    """A compiled call with the measurement switched on and off, in turn: the graph holds nothing of it."""
    q, k = stereo(128)
    settings = {"search": scram.Search(sweeps=2, seed=0)}
    compiled = torch.compile(lambda q, k: scram.attention(q, k, k, **settings), backend="aot_eager", fullgraph=True)

    def call(enabled: bool) -> None:
        scram.check_first_call(enabled)
        first_call.clear()
        compiled(q, k)
        assert not first_call.known_kinds

    times = in_turn({"off": lambda: call(False), "on": lambda: call(True)})
    scram.check_first_call(True)
    medians = {f"{name}_ms": 1e3 * median(found) for name, found in times.items()}
    store.put("cost compiled 128x128", threads=torch.get_num_threads(), rounds=ROUNDS, **medians)
    Console().print(f"compiled: {medians['off_ms']:.1f} ms without, {medians['on_ms']:.1f} ms with")


def all_sets(folder: Path) -> dict[str, tuple[str, tuple[Tensor, Tensor, Tensor, float]]]:
    """Kind and tensors of every set, by name."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, (heads, size, width, factor) in NOISE.items():
        q, k, v = torch.randn(3, 1, heads, size, size, width, generator=generator).unbind()
        found[name] = "noise", (factor * q, factor * k, v, width**-0.5)
    found |= {name: ("photograph", one) for name, one in photo_sets().items()}
    return found | {name: ("trained", one) for name, one in trained_sets(folder).items()}


def warned(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, float | None]:
    """What the default returns, and the error that it warned of; None where it was silent."""
    first_call.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = scram.attention(q, k, v, search=scram.Search(sweeps=2, seed=0), scale=scale)
        again = scram.attention(q, k, v, search=scram.Search(sweeps=2, seed=0), scale=scale)
    assert torch.equal(out, again)
    said = [str(x.message) for x in found if x.category is scram.AccuracyWarning]
    assert len(said) <= 1, "a kind of call warns once"
    return out, float(said[0].split("about ")[1].split("%")[0]) / 100 if said else None


def warnings_of_all(store: Store, folder: Path) -> None:
    """The default on every set: its error, and whether it warned."""
    table = Table("tensors", "error of the worst head", "it said")
    broken = []
    for name, (kind, (q, k, v, scale)) in all_sets(folder).items():
        out, said = warned(q, k, v, scale)
        attended = scram.Attended(out, out[..., 0])
        errors = scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=NUM_QUERIES)
        error = float(errors.max())
        store.put(
            f"warning {name}",
            kind=kind,
            grid=list(q.shape[2:-1]),
            heads=q.shape[1],
            scale=scale,
            error=error,
            said=said,
        )
        table.add_row(name, f"{error:.3f}", "nothing" if said is None else f"{said:.2f}")
        if (error >= WARNED and said is None) or (error <= SILENT and said is not None):
            broken.append(name)
    Console(width=120).print(table)
    Console().print("not as promised:", ", ".join(broken) or "none")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=STORED, help="tensors of benchmarks/trained.py (default: %(default)s)"
    )
    parser.add_argument("--only", choices=["cost", "warnings"], help="this part only")
    given = parser.parse_args()
    results = Store("first_call")
    torch.set_num_threads(1)
    with torch.no_grad():
        if given.only != "warnings":
            cost(results, 256)
            compiled_cost(results)
        if given.only != "cost":
            warnings_of_all(results, given.data)
