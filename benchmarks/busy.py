"""SCRAM beside other programs: `python benchmarks/busy.py [--only STAGE] [--load LOAD]`; `--table` prints the results.

`--tune`: plans that `scram.tune` chooses quiet and beside the heaviest load, and their times on a quiet machine.
`--inpaint`: a hole of four blocks in a picture of 512x512.

Every stage with one thread and with two, and torch's dense attention, in turn in one process, while burners run as
child processes that end by themselves. CPU time stands beside wall time. Results: results/busy.json,
busy_tune.json and busy_inpaint.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import inpaint
import skimage.data
import torch
import torch.nn.functional as F
from rich.progress import track
from sets import aslant, projected, stereo
from store import Store

import scram
import scram.images
from scram.core.resolve import CLUSTERS, SEARCHES

CALLS = 15  # of each stage and number of threads
SIZE = 128  # points a side
WIDTH = 64
LONGEST = 300  # seconds that a burner lives at most; it ends with its parent
SETTLE = 1.0  # seconds until burners run
ALIVE = "time.monotonic() < end and os.getppid() == {parent}"
START = "import os, time; end = time.monotonic() + {seconds}\n"
SPIN = START + f"while {ALIVE}: sum(range(10000))"
PRODUCTS = START + "import torch; torch.set_num_threads(2); x = torch.randn(512, 512)\n" + f"while {ALIVE}: x @ x"
LOADS = {  # the programs that run beside
    "quiet": (),
    "1 burner": (SPIN,),
    "3 burners": (SPIN,) * 3,
    "2 torch programs": (PRODUCTS,) * 2,
}


HEAVIEST = "2 torch programs"
TUNED = {"stereo": stereo, "projected": projected, "aslant": aslant}
TUNED_SIZE = 96  # points a side


class Times(NamedTuple):
    """Seconds of each call."""

    wall: list[float]
    cpu: list[float]  # of all threads


@contextmanager
def beside(programs: tuple[str, ...]) -> Iterator[None]:
    """Run programs beside what is inside."""
    codes = [text.format(seconds=LONGEST, parent=os.getpid()) for text in programs]
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    try:
        if children:
            time.sleep(SETTLE * (1 + len(children)))  # torch is long in starting
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def stages() -> dict[str, Callable[[], Any]]:
    """Calls by name; those of "dense" are torch's."""
    q, k = stereo(SIZE, WIDTH)
    v = k.clone()
    search = scram.Search(sweeps=SEARCHES["cpu"].sweeps, seed=0)
    clusters = scram.Clusters(count=CLUSTERS["cpu"].count, keys=CLUSTERS["cpu"].keys, seed=0)
    codebook = scram.cluster(q, k, v, clusters=clusters)
    matches = scram.search(q, k, search=search)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(0)
    x = torch.randn(1, 64, 64, 64)
    model, projections, dense = Model(), Projections(), Dense()
    pictures = [torch.from_numpy(view[:SIZE, :SIZE]).float() / 255 for view in skimage.data.stereo_motorcycle()[:2]]
    flat = [x.flatten(2, 3) for x in (q, k, v)]

    parts = [torch.randn(1, 1, 64, 64, 64).requires_grad_() for _ in range(3)]

    def attends() -> None:
        """Forward and backward of the attention of both layers."""
        for layer in model.layers:
            out = scram.attention(*parts, search=layer.search)
            torch.autograd.grad(out, parts, torch.ones_like(out))

    def both(**options: Any) -> None:
        out = scram.attention(*leaves, search=search, tail=clusters, **options)
        torch.autograd.grad(out.sum(), leaves)

    return {
        "cluster": lambda: scram.cluster(q, k, v, clusters=clusters),
        "search": lambda: scram.search(q, k, search=search),
        "windows": lambda: scram.attend(q, k, v, matches, tail=None),
        "tail": lambda: scram.attention(q, k, v, search=None, tail=codebook),
        "without search": lambda: scram.attention(q, k, v, search=None, tail=clusters),
        "default": lambda: scram.attention(q, k, v, search=search, tail=clusters),
        "default, forward + backward": both,
        "training step": lambda: model.train_on(x),
        "attention's part of it": attends,
        "torch's part of it": lambda: projections.train_on(x),
        "training step in one pool": in_one_pool(lambda: model.train_on(x)),
        "training step, dense": lambda: dense.train_on(x),
        "drawn keys": lambda: scram.attend(q, k, v, matches, tail=scram.DrawnKeys(seed=0)),
        "importance sampling": lambda: scram.estimate(q, k, v, matches, method=scram.Snis(16, seed=0)),
        "Metropolis-Hastings": lambda: scram.estimate(q, k, v, matches, method=scram.MetropolisHastings(16, seed=0)),
        "match two pictures": lambda: scram.images.match(*pictures),
        "dense": lambda: F.scaled_dot_product_attention(*flat),
    }


def in_one_pool(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with scram.single_pool():
            return call()

    return run


class Model(torch.nn.Module):
    """Two layers of attention over pictures of 64x64 points."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(scram.nn.GridAttention(64, 1, search=scram.Search(seed=0)) for _ in range(2))

    def attend(self, layer: scram.nn.GridAttention, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.attend(layer, x)
        return x

    def train_on(self, x: torch.Tensor) -> None:
        """One step without the update, x [B, *G, E]."""
        self.zero_grad()
        self(x).square().mean().backward()


class Projections(Model):
    """What is torch's own of them."""

    def attend(self, layer: scram.nn.GridAttention, x: torch.Tensor) -> torch.Tensor:
        return layer.out_proj(self.join(*F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)))

    def join(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + k + v


class Dense(Projections):
    """The same with torch's dense attention."""

    def join(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = (x.flatten(1, 2).unsqueeze(1) for x in (q, k, v))
        return F.scaled_dot_product_attention(*flat).squeeze(1).unflatten(1, q.shape[1:3])


def measured(calls: dict[str, Callable[[], Any]], count: int) -> dict[tuple[str, int], Times]:
    """Every call with each number of threads, in turn."""
    times = {(name, threads): Times([], []) for name in calls for threads in (1, 2)}
    for _ in range(count):
        for (name, threads), each in times.items():
            if "dense" in name and len(each.wall) == max(3, count // 5):
                continue  # they take longer than all others together
            torch.set_num_threads(threads)
            start, busy = time.perf_counter(), time.process_time()
            calls[name]()
            each.wall.append(time.perf_counter() - start)
            each.cpu.append(time.process_time() - busy)
    return times


def tune(store: Store, name: str, calls: int) -> None:
    """Plans for the same tensors, quiet and beside the heaviest load; their times in turn on a quiet machine."""
    torch.set_num_threads(2)
    q, k = TUNED[name](TUNED_SIZE, WIDTH)
    v = k.clone()
    plans = [scram.tune(q, k, v)]
    with beside(LOADS[HEAVIEST]):
        plans.append(scram.tune(q, k, v))
    times: list[list[float]] = [[], []]
    for _ in range(calls):
        for plan, each in zip(plans, times, strict=True):
            start = time.perf_counter()
            plan(q, k, v)
            each.append(time.perf_counter() - start)
    quiet, busy = (1e3 * median(each) for each in times)
    row = {"quiet": str(plans[0].setting), "busy": str(plans[1].setting), "says_busy": plans[1].busy}
    store.put(name, **row, ms_quiet=quiet, ms_busy=busy, ratio=busy / quiet)
    print(name, store.data[name], flush=True)


def fill(store: Store, load: str) -> None:
    """The astronaut with a hole, once beside a load: seconds, of all threads too, and PSNR in the hole."""
    torch.set_num_threads(2)
    picture, hole = inpaint.photograph("astronaut", 512), inpaint.hole("blocks", 512, 0)
    inpaint.methods("blocks")["SCRAM"](picture[:128, :128], inpaint.hole("blocks", 128, 0))  # compiles
    with beside(LOADS[load]):
        start, busy = time.perf_counter(), time.process_time()
        filled = inpaint.methods("blocks")["SCRAM"](picture, hole)
        row = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
    store.put(load, **row, psnr_db=float(inpaint.measures(filled, picture / 255, hole)[0]))
    print(load, store.data[load], flush=True)


def table(rows: dict[str, Any]) -> str:
    loads = [load for load in LOADS if any(name.startswith(f"{load}, ") for name in rows)]
    lines = [
        f"| stage | {' | '.join(loads)} |",
        f"|---|{'---|' * len(loads)}",
    ]
    for stage in dict.fromkeys(name.split(", ", 1)[1] for name in rows):
        cells = []
        for load in loads:
            row = rows.get(f"{load}, {stage}")
            cells.append("-" if row is None else f"{row['ms_1']:.3g} / {row['ms_2']:.3g} ({row['two_over_one']:.2f})")
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a stage; may be repeated")
    parser.add_argument("--load", action="append", choices=tuple(LOADS), help="beside what; may be repeated")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--tune", nargs="*", choices=tuple(TUNED), help="sets, instead of stages; all without a name")
    parser.add_argument("--inpaint", action="store_true", help="inpainting, instead of stages")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.tune is not None:
        for name in given.tune or tuple(TUNED):
            tune(Store("busy_tune"), name, given.calls)
        return
    if given.inpaint:
        for load in given.load or ("quiet", "3 burners"):
            fill(Store("busy_inpaint"), load)
        return
    store = Store("busy")
    if not given.table:
        calls = {name: call for name, call in stages().items() if not given.only or name in given.only}
        for call in calls.values():
            call()
        for load in track(given.load or tuple(LOADS), description="busy"):
            with beside(LOADS[load]):
                times = measured(calls, given.calls)
            for name in calls:
                row: dict[str, float] = {}
                for threads in (1, 2):
                    each = times[name, threads]
                    row[f"ms_{threads}"] = 1e3 * median(each.wall)
                    row[f"most_ms_{threads}"] = 1e3 * max(each.wall)
                    row[f"cpu_ms_{threads}"] = 1e3 * median(each.cpu)
                store.put(f"{load}, {name}", **row, two_over_one=row["ms_2"] / row["ms_1"])
    print(table(store.data))


if __name__ == "__main__":
    main()
