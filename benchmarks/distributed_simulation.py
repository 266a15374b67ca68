"""`scram.distributed` over links of a given speed, beside what the cost model says of them.

    python benchmarks/distributed_simulation.py            # prints measured and modeled seconds
    python benchmarks/distributed_simulation.py --store    # and stores them

The processes are real, gloo on one CPU, and so are all tensors. A link is made slow: what is received counts as there
only after latency + bytes / bandwidth, one message of a rank after another. A rank that computes meanwhile waits only
for the rest. A visit of keys is made as long as a case says, by a pause, so that a busy machine changes little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_cost import H200, Link, Machine, all_gather, all_to_all, round_trip
from store import Store
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import scram
import scram.distributed
from scram.distributed import api, gather, heads, ring
from scram.distributed.mesh import Ranks

SIDE, WIDTH, HEADS = 12, 8, 6  # 12 rows and 6 heads: 2, 3 or 4 ranks have equal rows, 2 or 3 equal heads
CALLS = 2


@dataclass(frozen=True)
class Case:
    """Milliseconds: of one message of a rank's keys and values on the link, and of a visit at least."""

    mode: str
    ranks: int
    backward: bool
    message: float
    visit: float

    @property
    def name(self) -> str:
        passes = "forward and backward" if self.backward else "forward"
        return f"{self.mode}, {self.ranks} ranks, {passes}, keys {self.message:g} ms, visit {self.visit:g} ms"

    @property
    def machine(self) -> Machine:
        """Only its links are used."""
        size = 2 * 4 * HEADS * SIDE * SIDE // self.ranks * WIDTH  # bytes of a rank's keys and values, float32
        link = Link("link", size / (0.9e-3 * self.message), 0.1e-3 * self.message)
        return replace(H200, inside=link, between=link)


CASES = (
    Case("ring", 3, False, 300, 50),  # waits for the link
    Case("ring", 3, False, 150, 350),  # computes, and never waits
    Case("ring", 3, True, 200, 75),
    Case("ring", 3, True, 100, 400),
    Case("ring", 2, True, 250, 125),
    Case("gather", 3, True, 200, 75),
    Case("gather", 2, False, 250, 350),
    Case("heads", 2, True, 250, 75),
)


class Wire:
    """What leaves a rank: one message after another."""

    def __init__(self) -> None:
        self.free = 0.0

    def there(self, taken: float) -> float:
        """When a message that begins now and takes so long is there."""
        self.free = max(self.free, time.perf_counter()) + taken
        return self.free


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class SlowComing:
    """A message on its way."""

    def __init__(self, coming: Any, there: float) -> None:
        self.coming, self.there = coming, there

    def wait(self) -> Tensor:
        message: Tensor = self.coming.wait()
        wait_until(self.there)
        return message


def slow_ranks(machine: Machine) -> type[Ranks]:
    """Ranks whose messages take as long as the machine's links do."""
    wire = Wire()

    class SlowRanks(Ranks):
        def all_gather(self, message: Tensor) -> Tensor:
            found = super().all_gather(message)
            wait_until(wire.there(all_gather(machine, self.size, (self.size - 1) * message.nbytes)[0]))
            return found

        def reduce_scatter(self, messages: Tensor) -> Tensor:
            found = super().reduce_scatter(messages)
            wait_until(wire.there(all_gather(machine, self.size, (self.size - 1) * found.nbytes)[0]))
            return found

        def all_to_all(self, messages: Any, sizes: Any) -> list[Tensor]:
            found = super().all_to_all(messages, sizes)
            sent = sum(x.nbytes for x in messages) - messages[self.rank].nbytes
            wait_until(wire.there(all_to_all(machine, self.size, sent)[0]))
            return found

        def pass_on(self, message: Tensor) -> Any:
            return SlowComing(super().pass_on(message), wire.there(machine.inside.seconds(message.nbytes)))

    return SlowRanks


@contextmanager
def slow(case: Case, visits: list[float]) -> Iterator[None]:
    """Links as in the case; `visits` gets the seconds of each visit of keys, a pause included."""

    def paused(work: Callable[..., Any]) -> Callable[..., Any]:
        def longer(*arguments: Any) -> Any:
            start = time.perf_counter()
            found = work(*arguments)
            wait_until(start + case.visit / 1e3)
            visits.append(time.perf_counter() - start)
            return found

        return longer

    def go_round(shards: Any, here: Tensor, visit: Callable[..., Any], after: Any = None) -> Any:
        return real(shards, here, paused(visit), after)

    def guarded(ranks: Ranks, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return real_guarded(ranks, paused(run), *tensors)

    real = ring._go_round
    real_guarded = gather.guarded
    with (
        patch.object(api, "Ranks", slow_ranks(case.machine)),
        patch.object(ring, "_go_round", go_round),
        patch.object(gather, "guarded", guarded),
        patch.object(heads, "_local", paused(heads._local)),
    ):
        yield


def measured(mesh: Any, case: Case) -> dict[str, float]:
    """Seconds of a call on this rank, and of a visit in it: the fastest of some calls, after one that may compile."""
    rows = SIDE // case.ranks
    q, k, v = (torch.randn(1, HEADS, rows, SIDE, WIDTH).requires_grad_(case.backward) for _ in range(3))
    calls = []
    for _ in range(CALLS + 1):
        mine: list[float] = []
        with slow(case, mine):
            dist.barrier(mesh.get_group())
            start = time.perf_counter()
            out = scram.distributed.attention(
                q,
                k,
                v,
                mesh=mesh,
                mode=case.mode,
                search=scram.Search(sweeps=0, jumps=(), seed=0),
                radius=0,
                tail=None,
                impl="reference",
            )
            if case.backward:
                out.sum().backward()
            seconds = time.perf_counter() - start
        calls.append((seconds, statistics.mean(mine)))
    return dict(zip(("seconds", "visit"), min(calls[1:]), strict=True))


def modeled(case: Case, visit: float) -> float:
    """What the model says of a case, from the seconds of a visit."""
    machine, others = case.machine, case.ranks - 1
    size = 2 * 4 * HEADS * SIDE * SIDE // case.ranks * WIDTH  # float32: gradients are as long as keys
    if case.mode == "ring":
        step = machine.inside.seconds(size)
        back = round_trip(case.ranks, visit, step, step) if case.backward else 0.0
        return round_trip(case.ranks, visit, step) + back
    passes = 1 + case.backward
    if case.mode == "gather":
        return visit + all_gather(machine, case.ranks, passes * others * size, passes)[0]
    return visit + all_to_all(machine, case.ranks, passes * 2 * size * others / case.ranks, 4 * passes)[0]


def work(rank: int, size: int, folder: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    torch.save([measured(mesh, case) for case in cases], f"{folder}/{rank}")
    dist.destroy_process_group()


def simulate(cases: tuple[Case, ...] = CASES) -> dict[str, dict[str, float]]:
    """Seconds of every case, measured and modeled."""
    found = {}
    for size in sorted({case.ranks for case in cases}):
        some = [case for case in cases if case.ranks == size]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (size, folder, some), size)  # type: ignore[no-untyped-call]
            said = [torch.load(Path(folder) / str(rank)) for rank in range(size)]
        for case, *ranks in zip(some, *said, strict=True):
            seconds, visit = (max(one[key] for one in ranks) for key in ("seconds", "visit"))
            found[case.name] = {
                "seconds": seconds,
                "visit": visit,
                "keys": case.message / 1e3,
                "model": modeled(case, visit),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="store what is printed under results/")
    arguments = parser.parse_args()
    for name, row in simulate().items():
        print(f"{name}: {row['seconds']:.3f} s, model {row['model']:.3f} s ({row['model'] / row['seconds'] - 1:+.1%})")
        if arguments.store:
            Store("distributed_simulation").put(name, **row)


if __name__ == "__main__":
    main()
