"""Quality and memory of the distributed attention, on processes of this machine (gloo, one thread each).

    python benchmarks/distributed_quality.py errors --data FOLDER   # without FOLDER the trained set is left out
    python benchmarks/distributed_quality.py recalls --data FOLDER
    python benchmarks/distributed_quality.py memory

`errors` and `recalls`: relative output error, and recall@1 of the search, of one process and of 2 and 4 ranks, on
photo features of 128 x 128 points (E = 64, v = k) at several scales of the scores, and on features of GMFlow in FOLDER.
Rows less than 8 from a border of a shard are told apart from all others; of one process the same rows are taken.
`no halo`: without the exchange of rows. All queries count for recall, every seventh for the error. `memory`: how much
the largest resident size of a rank grows over a call, above what it was before its inputs were made. Results:
results/distributed_quality.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import sets
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from store import Store
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import scram
import scram.distributed

RANKS, SEEDS, BORDER, SIZE = (2, 4), 2, 8, 128
WAYS: dict[str, dict[str, Any]] = {
    "gather": {"mode": "gather"},
    "gather, no halo": {"mode": "gather", "halo": 0},
    "ring": {"mode": "ring"},
}
TAIL = scram.Clusters()
PHOTOS = {"stereo": (1, 8, 32, 100), "projected": (1 / 8, 1, 8, 32), "unnormalised": (1 / 8, 1, 8)}


def problems(folder: Path | None, size: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor, float]]:
    """Name, q, k, v and scale."""
    for name, scales in PHOTOS.items():
        q, k = (x.contiguous() for x in getattr(sets, name)(size))
        for scale in scales:
            yield f"{name} {scale:g}", q, k, k, float(scale)
    if folder is not None:
        q, k, v = (x.contiguous() for x in sets.gmflow(folder))
        yield "gmflow", q, k, v, q.shape[-1] ** -0.5


def shares(rows: int, ranks: int) -> list[int]:
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def at_border(rows: int, ranks: int) -> Tensor:
    """Which rows are less than BORDER from a border of a shard, bool [rows]."""
    near = torch.zeros(rows, dtype=torch.bool)
    for rank in range(1, ranks):
        at = sum(shares(rows, ranks)[:rank])
        near[max(at - BORDER, 0) : at + BORDER] = True
    return near


class Truth:
    """Exact attention of every seventh query, and the best key of each."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.rows, self.width = self.grid = list(q.shape[2:4])
        self.some = torch.arange(0, self.rows * self.width, 7)
        self.out = scram.exact_attention(q, k, v, scale=scale, queries=self.some).out.reshape(len(self.some), -1)
        flat, keys = q.flatten(2, 3)[0, 0], k.flatten(2, 3)[0, 0]
        self.best = torch.cat([(part @ keys.T).max(-1).values for part in flat.split(2048)])

    def errors(self, out: Tensor, ranks: int) -> dict[str, float]:
        gap = (out.flatten(2, 3)[0, 0, self.some] - self.out).norm(dim=-1) / self.out.norm(dim=-1)
        near = at_border(self.rows, ranks)[self.some // self.width]
        return {
            "error": float(gap.mean()),
            "error_border": float(gap[near].mean()),
            "error_inner": float(gap[~near].mean()),
        }

    def recalls(self, score: Tensor, ranks: int) -> dict[str, float]:
        """A match as good as the best key counts."""
        good = (score[0, 0].flatten() >= self.best - 1e-5 * self.best.abs()).float()
        good = good.reshape(self.rows, self.width).mean(1)
        near = at_border(self.rows, ranks)
        return {
            "recall": float(good.mean()),
            "recall_border": float(good[near].mean()),
            "recall_inner": float(good[~near].mean()),
        }


def on_ranks(size: int, job: Any, *arguments: Any) -> list[Any]:
    """What job(mesh, *arguments) returns on each rank."""
    folder = Path(tempfile.mkdtemp())
    mp.spawn(_serve, (size, str(folder), job, arguments), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _serve(rank: int, size: int, folder: str, job: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    torch.save(job(init_device_mesh("cpu", (size,)), *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def outputs(mesh: DeviceMesh, folder: Path | None, size: int, only: str, seeds: int) -> list[tuple[str, str, Tensor]]:
    """Set, way and out of this rank's rows, seed after seed."""
    rank, found = mesh.get_local_rank(), []
    for name, *tensors, scale in problems(folder, size):
        if only in name:
            q, k, v = (x.split(shares(x.shape[2], mesh.size()), 2)[rank].contiguous() for x in tensors)
            for way, how in WAYS.items():
                for seed in range(seeds):
                    call = {"search": scram.Search(seed=seed), "tail": TAIL, "scale": scale}
                    out = scram.distributed.attention(q, k, v, mesh=mesh, **call, **how)
                    found.append((name, way, out))
    return found


def errors(store: Store, folder: Path | None, only: str, size: int = SIZE, seeds: int = SEEDS) -> None:
    truths = {name: Truth(q, k, v, s) for name, q, k, v, s in problems(folder, size) if only in name}
    plain: list[tuple[str, Tensor]] = []
    for name, q, k, v, scale in problems(folder, size):
        for seed in range(seeds if only in name else 0):
            search = scram.Search(seed=seed)
            plain.append((name, scram.attention(q, k, v, search=search, tail=TAIL, scale=scale)))
    for ranks in RANKS:
        rows: dict[tuple[str, str], list[dict[str, float]]] = {}
        for parts in zip(*on_ranks(ranks, outputs, folder, size, only, seeds), strict=True):
            name, way, _ = parts[0]
            out = torch.cat([part[2] for part in parts], 2)
            rows.setdefault((name, way), []).append(truths[name].errors(out, ranks))
        for name, out in plain:
            rows.setdefault((name, "one process"), []).append(truths[name].errors(out, ranks))
        for (name, way), each in rows.items():
            put(store, f"{name}, {way}, {ranks}", each, set=name, way=way, ranks=ranks, grid=truths[name].grid)


def put(store: Store, name: str, each: list[dict[str, float]], **row: Any) -> None:
    store.put(name, seeds=len(each), **row, **{figure: fmean(one[figure] for one in each) for figure in each[0]})


def found_keys(mesh: DeviceMesh, folder: Path | None, size: int, seeds: int) -> list[tuple[str, str, Tensor]]:
    """Set, way, and the score of the match of this rank's queries [1, 1, rows, *]; scales do not change them."""
    rank, found = mesh.get_local_rank(), []
    for name, q, k, *_ in distinct(folder, size):
        q, k = (x.split(shares(x.shape[2], mesh.size()), 2)[rank].contiguous() for x in (q, k))
        for way, how in WAYS.items():
            for seed in range(seeds if how["mode"] == "gather" else 0):
                search = scram.Search(seed=seed)
                # Windows of one key, with k for values: what comes back is the key itself.
                key = scram.distributed.attention(q, k, k, mesh=mesh, search=search, radius=0, tail=None, **how)
                found.append((name, way, (q * key).sum(-1)))
    return found


def distinct(folder: Path | None, size: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor, float]]:
    """Each set once."""
    return iter({name.split()[0]: (name.split()[0], *rest) for name, *rest in problems(folder, size)}.values())


def recalls(store: Store, folder: Path | None, size: int = SIZE, seeds: int = SEEDS) -> None:
    truths = {name: Truth(q, k, v, scale) for name, q, k, v, scale in distinct(folder, size)}
    for ranks in RANKS:
        rows: dict[tuple[str, str], list[dict[str, float]]] = {}
        for parts in zip(*on_ranks(ranks, found_keys, folder, size, seeds), strict=True):
            name, way, _ = parts[0]
            score = torch.cat([part[2] for part in parts], 2)
            rows.setdefault((name, way), []).append(truths[name].recalls(score, ranks))
        for name, q, k, *_ in distinct(folder, size):
            for seed in range(seeds):
                score = scram.search(q, k, search=scram.Search(seed=seed)).score[..., 0]
                rows.setdefault((name, "one process"), []).append(truths[name].recalls(score, ranks))
        for (name, way), each in rows.items():
            put(store, f"recall {name}, {way}, {ranks}", each, set=name, way=way, ranks=ranks, grid=truths[name].grid)


def grown(mesh: DeviceMesh, mode: str, size: int, width: int, backward: bool) -> int:
    """Bytes by which the largest resident size grows over a call, inputs included."""

    def call(points: int) -> None:
        shape = (1, 1, shares(points, mesh.size())[mesh.get_local_rank()], points, width)
        make = torch.Generator().manual_seed(mesh.get_local_rank())
        q, k, v = (torch.randn(shape, generator=make).requires_grad_(backward) for _ in range(3))
        search = scram.Search(sweeps=1, gossip=1, seed=0)  # takes as much memory as more would
        out = scram.distributed.attention(q, k, v, mesh=mesh, mode=mode, search=search)
        if backward:
            out.sum().backward()

    call(128)  # compiles, and fills what is made once
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident size is the present one
    before = resident("VmRSS")
    call(size)
    return resident("VmHWM") - before


def resident(name: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index(f"{name}:") + 1])


def memory(store: Store, size: int, width: int = 64) -> None:
    for backward in (False, True):
        for ranks in (1, 2, 4, 8):
            most = max(on_ranks(ranks, grown, "ring", size, width, backward))
            inputs = 3 * 4 * width * size * shares(size, ranks)[0]
            row = {"mode": "ring", "ranks": ranks, "grid": [size, size], "width": width, "backward": backward}
            store.put(f"memory ring {ranks} {backward}", set="memory", mebibytes=most / 2**20, inputs=inputs, **row)
            print(ranks, backward, f"{most / 2**20:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one, two = (commands.add_parser(name) for name in ("errors", "recalls"))
    for command in (one, two):
        command.add_argument("--data", type=Path, help="folder with the trained tensors")
    one.add_argument("--only", default="", help="sets whose name holds this")
    commands.add_parser("memory").add_argument("--size", type=int, default=384)
    asked = parser.parse_args()
    store = Store("distributed_quality")
    if asked.command == "errors":
        errors(store, asked.data, asked.only)
    elif asked.command == "recalls":
        recalls(store, asked.data)
    else:
        memory(store, asked.size)


if __name__ == "__main__":
    main()
