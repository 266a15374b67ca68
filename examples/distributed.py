"""One large picture on many processes: each reads its rows, and attends to the keys of all.

    torchrun --nproc-per-node 4 examples/distributed.py               # 8192 x 8192 points
    torchrun --nproc-per-node 2 examples/distributed.py --size 1024
    python examples/distributed.py --size 512                         # one process

The picture is a mosaic: tiles are photographs of scikit-image, each in the color that a large photograph has there.
The keys are the same tiles in another known order, with noise, so that with two processes the right key of every query
is on the other one. Queries and keys are patches of 7 x 7 pixels, projected to a few numbers; values are colors.
Attention by squared distance (non-local means) paints the mosaic anew with the noisy colors of the other picture.

No process holds the picture: each makes its rows of the keys, block by block, and its queries band by band. Every
process prints its time, its memory and what it sent; the error is that of some queries against exact attention over
all keys, joined by `scram.merge`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import scram
import scram.distributed
from scram.cli.provenance import made_with

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "camera")
TILES = 8  # of a side
PATCH, HALO = 7, 3  # pixels
NOISE = 0.02  # of the keys' pixels, which are 0..1
BLOCK = 128  # rows that are made at once
PREVIEW = 512  # pixels of a side
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Row = dict[str, Any]


class Mosaic:
    """The two pictures [3, size, size] in 0..1, of which any rows can be made; the same on every process."""

    def __init__(self, size: int) -> None:
        self.tiles = min(TILES, size // 16)
        if size < 32 or size % self.tiles:
            raise ValueError(f"size must be a multiple of {TILES}, 32 at least, got {size}")
        self.size, self.side = size, size // self.tiles
        self.photographs = torch.stack([photograph(name, self.side) for name in PHOTOGRAPHS])
        self.tint = photograph(PHOTOGRAPHS[0], self.tiles)

    def rows(self, begin: int, end: int, moved: bool = False) -> Tensor:
        """Rows of the queries' picture, or of the keys', [3, end - begin, size]; beyond the picture its last row."""
        return torch.stack([self._row(min(max(n, 0), self.size - 1), moved) for n in range(begin, end)], 1)

    def _row(self, number: int, moved: bool) -> Tensor:
        """[3, size]."""
        down, across = number // self.side, torch.arange(self.tiles)
        if moved:  # where the tiles of this row come from
            down = (down - self.tiles // 2) % self.tiles
            across = (across - 3 * down - 1) % self.tiles
        pixels = self.photographs[(7 * down + 3 * across) % len(PHOTOGRAPHS), :, number % self.side]
        tint = self.tint[:, down, across].T.unsqueeze(-1)
        row = (0.5 * pixels + 0.5 * tint).movedim(1, 0).reshape(3, self.size)
        if moved:
            row = row + NOISE * torch.randn(row.shape, generator=torch.Generator().manual_seed(number))
        return row

    def basis(self, width: int) -> tuple[Tensor, Tensor]:
        """Filters [width, 3, 7, 7] of the main directions of patches, and what they make of the mean patch [width]."""
        starts = range(0, self.size - PATCH + 1, max((self.size - PATCH) // 16, 1))
        strips = torch.stack([self.rows(n, n + PATCH) for n in starts])
        patches = F.unfold(strips, PATCH, stride=(1, max(self.size // 1024, 1))).movedim(1, -1).flatten(0, 1).double()
        mean = patches.mean(0)
        vectors = torch.linalg.eigh((patches - mean).T @ (patches - mean)).eigenvectors[:, -width:]
        return vectors.T.reshape(width, 3, PATCH, PATCH).float(), (mean @ vectors).float()


def photograph(name: str, side: int) -> Tensor:
    """[3, side, side] in 0..1."""
    import skimage.data

    picture = torch.from_numpy(getattr(skimage.data, name)().copy()).float() / 255
    picture = picture.unsqueeze(-1).expand(-1, -1, 3) if picture.ndim == 2 else picture
    return F.interpolate(picture.movedim(-1, 0)[None], (side, side), mode="bilinear", antialias=True)[0]


def share(size: int, rank: int, ranks: int, step: int = 1) -> tuple[int, int]:
    """The first row of a process and the row after its last one, multiples of `step`."""
    blocks = size // step
    return step * (blocks * rank // ranks), step * (blocks * (rank + 1) // ranks)


def features(
    mosaic: Mosaic,
    rows: tuple[int, int],
    moved: bool,
    basis: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    device: str,
    advance: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Of some rows of a picture, block by block: patches [1, 1, n, size, width], and colors [1, 1, n, size, 3]."""
    filters, mean = (x.to(device) for x in basis)
    count = rows[1] - rows[0]
    found = torch.empty(1, 1, count, mosaic.size, len(mean), dtype=dtype, device=device)
    colors = torch.empty(1, 1, count, mosaic.size, 3, dtype=dtype, device=device)
    for begin in range(*rows, BLOCK):
        end = min(begin + BLOCK, rows[1])
        block = mosaic.rows(begin - HALO, end + HALO, moved).to(device)
        there = slice(begin - rows[0], end - rows[0])
        colors[0, 0, there] = block[:, HALO:-HALO].movedim(0, -1)
        made = F.conv2d(F.pad(block[None], (HALO, HALO, 0, 0), mode="replicate"), filters)[0]
        found[0, 0, there] = made.movedim(0, -1) - mean
        advance(end - begin)
    return found, colors


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float, mesh: DeviceMesh) -> Tensor:
    """Attention of queries [n, E], the same on every process, over the keys of all processes: [n, 3]."""
    points = q.float()[None, None, :, None]
    total = None
    for begin in range(0, k.shape[2], BLOCK):  # a block of keys at a time
        keys, values = (x[:, :, begin : begin + BLOCK].float() for x in (k, v))
        part = scram.exact_attention(points, keys, values, score="l2", scale=scale)
        total = part if total is None else scram.merge(total, part)
    mine = None if total is None else scram.Attended(*(x.cpu() for x in total))
    parts = [part for part in gathered(mine, mesh) if part is not None]
    whole: scram.Attended = parts[0]
    for part in parts[1:]:
        whole = scram.merge(whole, part)
    return whole.out.flatten(0, 3)


def gathered(value: Any, mesh: DeviceMesh) -> list[Any]:
    """A small value of every process."""
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, value, group=mesh.get_group())
    return everyone


def spread(x: Tensor, count: int) -> Tensor:
    """Some points of [1, 1, n, m, E], at equal distances: [count, E] or fewer, on the CPU."""
    points = x[0, 0].flatten(0, 1)
    return points[:: max(len(points) // count, 1)][:count].float().cpu()


def peak_memory(device: str) -> int:
    """Bytes: the largest resident size of this process, or what it held on its GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@torch.no_grad()
def run(given: argparse.Namespace, mesh: DeviceMesh, progress: Progress) -> tuple[Row, Tensor]:
    """What this process measured, and its rows of the preview [rows, 3 * columns, 3]: queries, result, keys."""
    rank, ranks, device = mesh.get_local_rank(), mesh.size(), mesh.device_type
    mosaic, shrink = Mosaic(given.size), max(given.size // PREVIEW, 1)
    rows, basis, dtype = share(given.size, rank, ranks, shrink), mosaic.basis(given.width), DTYPES[given.dtype]
    row = Row(rank=rank, rows=rows[1] - rows[0], bytes_before=peak_memory(device))
    task, clock = progress.add_task("reading keys", total=row["rows"]), Clock(device)
    k, v = features(mosaic, rows, True, basis, dtype, device, lambda n: progress.advance(task, n))
    row["read_seconds"] = clock.lap()
    most = max(b - a for a, b in (share(given.size, n, ranks, shrink) for n in range(ranks)))
    starts = range(0, most, height := shrink * -(-given.band // shrink))
    task = progress.add_task(f"attention of {given.size} x {given.size} points", total=len(starts))
    scale, each = 0.5 / NOISE**2 / given.width, -(-given.queries // len(starts))
    painted, points, ours, squares, row["seconds"] = [], [], [], 0.0, 0.0
    with scram.distributed.traffic() as counted:
        for number, start in enumerate(starts):  # as many calls on every process, of no queries where it has no more
            band = min(rows[0] + start, rows[1]), min(rows[0] + start + height, rows[1])
            q, wanted = features(mosaic, band, False, basis, dtype, device, lambda _: None)
            # Tiles move as a whole, so that moved matches of neighbors are the ones to try.
            search = scram.Search(sweeps=given.sweeps, jumps=(16, 4, 1), propagate="shift", gossip=1, seed=number)
            row["read_seconds"] += clock.lap()
            out = scram.distributed.attention(
                q, k, v, mesh=mesh, mode=given.mode, search=search, radius=1, tail=None, score="l2", scale=scale
            )
            row["seconds"] += clock.lap()
            squares += sum(float((a - b).float().square().sum()) for a, b in zip(out[0, 0], wanted[0, 0], strict=True))
            painted.append(torch.cat([shrunk(wanted, shrink), shrunk(out, shrink)], 1))
            points.append(spread(q, each))
            ours.append(spread(out, each))
            progress.advance(task)
            clock.lap()
    row |= {"peak_bytes": peak_memory(device), "sent_bytes": counted.sent}
    task = progress.add_task("exact attention of some queries", total=1)
    told = gathered((torch.cat(points), torch.cat(ours), squares), mesh)
    queries, answers = (torch.cat([one[n] for one in told]) for n in (0, 1))
    truth = exact(queries.to(device), k, v, scale, mesh)
    row["queries"] = len(queries)
    # Colors have a large mean, which any keys would give: errors are those of the rest.
    row["output_error"] = float((answers - truth).norm() / (truth - truth.mean(0)).norm())
    row["near_exact"] = float(((answers - truth).norm(dim=-1) < NOISE).float().mean())
    row["painted_error"] = float((sum(one[2] for one in told) / (3 * given.size**2)) ** 0.5)
    progress.advance(task)
    return row, torch.cat([torch.cat(painted), shrunk(v, shrink)], 1)


class Clock:
    """Seconds since the last lap; a GPU is waited for."""

    def __init__(self, device: str) -> None:
        self.device, self.last = device, time.perf_counter()

    def lap(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        before, self.last = self.last, time.perf_counter()
        return self.last - before


def shrunk(colors: Tensor, factor: int) -> Tensor:
    """[1, 1, n, m, 3] -> means of squares of pixels, [n / factor, m / factor, 3], on the CPU."""
    parts = torch.split(colors[0, 0], max(BLOCK // factor, 1) * factor)
    means = [F.avg_pool2d(part.movedim(-1, 0).float()[None], factor)[0] for part in parts if len(part)]
    return torch.cat(means, 1).movedim(0, -1).cpu() if means else torch.zeros(0, colors.shape[3] // factor, 3)


@contextmanager
def processes(device: str) -> Iterator[DeviceMesh]:
    """The processes that torchrun started, or this one alone; the group ends with the block, after an error too."""
    backend = "nccl" if device == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    else:
        store: Any = getattr(dist, "HashStore")()  # noqa: B009, torch's types do not have it
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def shown(given: argparse.Namespace, rows: list[Row]) -> str:
    """Figures of all processes, in words."""
    lines = [f"{given.size} x {given.size} points, {len(rows)} processes, mode {given.mode}, {given.dtype}"]
    for row in rows:
        lines.append(
            f"rank {row['rank']}: {row['rows']} rows; read in {row['read_seconds']:.1f} s, attention "
            f"{row['seconds']:.1f} s; peak memory {row['peak_bytes'] / 1e9:.2f} GB, of which "
            f"{row['bytes_before'] / 1e9:.2f} before; sent {row['sent_bytes'] / 1e9:.3f} GB"
        )
    first = rows[0]
    lines.append(
        f"error against exact attention {first['output_error']:.4f} on {first['queries']} queries, "
        f"{100 * first['near_exact']:.0f} % of them within the noise; colors {first['painted_error']:.4f} from the "
        f"picture, noise {NOISE}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="points of a side (default: %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="numbers that describe a patch (default: %(default)s)")
    parser.add_argument("--sweeps", type=int, default=4, help="of the search (default: %(default)s)")
    parser.add_argument("--mode", choices=("gather", "ring"), default="ring", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16", help="(default: %(default)s)")
    parser.add_argument(
        "--queries", type=int, default=32, help="of each process, computed exactly (default: %(default)s)"
    )
    parser.add_argument("--band", type=int, default=1024, help="rows of queries of a call (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("scram-distributed.png"), help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, help="a JSON file to which figures are added (default: none)")
    given = parser.parse_args(arguments)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with processes(given.device) as mesh:
        with Progress(*columns, disable=mesh.get_local_rank() != 0) as progress:
            row, preview = run(given, mesh, progress)
        everyone = gathered((row, preview), mesh)
        if mesh.get_local_rank() == 0:
            report(given, [row for row, _ in everyone], torch.cat([picture for _, picture in everyone]))


def report(given: argparse.Namespace, rows: list[Row], preview: Tensor) -> None:
    """Print the figures, draw the preview, and store figures where that is wanted."""
    from PIL import Image

    print(shown(given, rows), flush=True)
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * preview.clamp(0, 1)).round().byte().numpy()).save(given.picture)
    if given.results is not None:
        stored = json.loads(given.results.read_text()) if given.results.exists() else {}
        settings = {
            name: getattr(given, name) for name in ("size", "width", "sweeps", "band", "mode", "dtype", "queries")
        }
        key = f"{given.size} {given.mode} {len(rows)} {given.dtype} {given.device}"
        stored[key] = {**settings, "ranks": rows, **made_with(given.device)}
        given.results.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
