"""The correlation lookup beside others: `python benchmarks/correlation.py [FOLDER] --size 46 62`.

FOLDER is the unzipped wheel of ptlflow (Apache-2.0); of it only `models/raft/corr.py`, `models/raft/utils.py` and
`utils/correlation.py` are loaded. Its `CorrBlock` holds the volume, its `IterativeCorrBlock` looks up on demand, all
places of a window at once or, by its `chunk_size`, few at a time. `Sampled` below is the same by one `grid_sample` for
some lines of queries, and runs without FOLDER.

One call of every contender at the same places: float32, 256 features, radius 4, four levels, as in RAFT.
`largest_error`: the largest distance from float64 on a sample of queries; `gradient_error`: from the gradients of
`CorrBlock` (of `Sampled` without FOLDER) on a quarter of the size. On a CPU one thread runs, and times are CPU times.
On a GPU memory is what torch holds at most beyond the features, with what the block holds. cuDNN's `grid_sample`
refuses large batches, so it is off for all; a contender that still fails is stored with its message.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from store import Store
from torch import Tensor

from scram.core.correlation import correlation
from scram.nn import CorrelationLookup

WIDTH = 256
RADIUS = 4
LEVELS = 4
CHUNK = 2 * RADIUS + 1  # places of a window that ptlflow looks up at once
SAMPLES = 2**28  # numbers that `Sampled` holds at once
LARGEST_VOLUME = 2**33  # bytes


class Sampled:
    """RAFT's lookup on demand: keys sampled for all places of the windows of some lines, then their products."""

    def __init__(self, fmap1: Tensor, fmap2: Tensor, num_levels: int, radius: int) -> None:
        self.queries = fmap1
        self.levels = [fmap2]
        for _ in range(num_levels - 1):
            self.levels.append(F.avg_pool2d(self.levels[-1], 2))
        steps = torch.arange(-radius, radius + 1, dtype=torch.float32, device=fmap1.device)
        self.window = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).flatten(0, 1)  # (x, y), x outside

    def __call__(self, coords: Tensor) -> Tensor:
        b, width, h, w = self.queries.shape
        lines = max(1, SAMPLES // (b * width * w * len(self.window)))
        found = []
        for n, keys in enumerate(self.levels):
            place = coords.movedim(1, -1).unsqueeze(3) / 2**n + self.window  # [B, h, w, places, 2]
            last = torch.tensor(keys.shape[:-3:-1], device=keys.device) - 1
            grid = 2 * place / last - 1
            parts = []
            for top in range(0, h, lines):
                part = grid[:, top : top + lines].flatten(1, 2)  # [B, lines * w, places, 2]
                sampled = F.grid_sample(keys, part, align_corners=True)  # [B, E, lines * w, places]
                own = self.queries[:, :, top : top + lines].flatten(2)  # [B, E, lines * w]
                parts.append(torch.einsum("ben,benp->bpn", own, sampled))
            found.append(torch.cat(parts, 2).reshape(b, -1, h, w))
        return torch.cat(found, 1) / width**0.5


def load(folder: Path) -> dict[str, Any]:
    """The two classes of ptlflow, without the rest of the package and what that needs."""
    stand_ins = {"einops": {"rearrange": lambda x, _: x.transpose(1, 2).flatten(1, 2)}, "scipy": {"interpolate": None}}
    for name, parts in stand_ins.items():  # of "b c d h w -> b (d c) h w", and of what is never called
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(parts)
    for name in ("ptlflow", "ptlflow.models", "ptlflow.models.raft", "ptlflow.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    corr = importlib.import_module("ptlflow.models.raft.corr")
    on_demand = corr.IterativeCorrBlock
    return {"volume": corr.CorrBlock, "on demand": on_demand, "on demand, chunks": partial(on_demand, chunk_size=CHUNK)}


def pair(height: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features of two pictures [1, E, h, w], and places (x, y) [1, 2, h, w] a few cells from each query's own."""
    torch.manual_seed(0)
    fmap1, fmap2 = torch.randn(2, 1, WIDTH, height, width).to(device).unbind()
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    drift = torch.nn.functional.interpolate(torch.randn(1, 2, 8, 8) * 12, (height, width), mode="bicubic")
    return fmap1, fmap2, (torch.stack([x, y])[None].float() + drift).to(device)


def largest_error(found: Tensor, fmap1: Tensor, fmap2: Tensor, coords: Tensor) -> float:
    """Of 200 queries, against the reference in float64."""
    at = torch.randperm(coords[0, 0].numel(), generator=torch.Generator().manual_seed(1))[:200].to(coords.device)
    q, k = fmap1[0].flatten(1)[:, at].T.double(), fmap2[0].movedim(0, -1).double()
    place = coords[0].flatten(1)[:, at].flip(0).T.double()
    want = correlation(
        q[None, None, :, None], k[None, None], place[None, None, :, None], RADIUS, levels=LEVELS, impl="reference"
    )
    return float((found[0].flatten(1)[:, at].T - want[0, 0, :, 0]).abs().max())


def gradient_error(rival: Any, height: int, width: int, device: str) -> float:
    """Largest distance of the gradients from those of another lookup, as a share of the largest."""
    given = [x.requires_grad_() for x in pair(max(16, height // 4), max(16, width // 4), device)]
    outs = [block(*given[:2], num_levels=LEVELS, radius=RADIUS)(given[2]) for block in (rival, CorrelationLookup)]
    above = torch.randn_like(outs[0])
    both = zip(*(torch.autograd.grad((out * above).sum(), given) for out in outs), strict=True)
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in both)


def measured(make: Callable[[], Any], coords: Tensor, calls: int) -> tuple[dict[str, Any], Tensor]:
    """Milliseconds of making the block and of a call, peak memory, and what a call returned."""
    cuda = coords.is_cuda
    wait = torch.cuda.synchronize if cuda else lambda: None
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    with torch.no_grad():
        start = clock()
        block = make()
        wait()
        making = clock() - start
        found = block(coords)
        times = []
        for _ in range(calls):
            wait()
            start = clock()
            block(coords)
            wait()
            times.append(1e3 * (clock() - start))
    row = {
        "make_ms": 1e3 * making,
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
    }
    if cuda:
        row["peak_mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    return row, found


def main(folder: Path | None, height: int, width: int, device: str, calls: int, results: Path | None) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.enabled = False
    rivals = {"sampled": Sampled, **(load(folder) if folder else {})}
    fmap1, fmap2, coords = pair(height, width, device)
    row: dict[str, Any] = {"grid": [height, width], "width": WIDTH, "threads": torch.get_num_threads()}
    row["gradient_error"] = gradient_error(rivals.get("volume", Sampled), height, width, device)
    if 4 * (height * width) ** 2 > LARGEST_VOLUME:
        rivals.pop("volume", None)
    for name, block in {"SCRAM": CorrelationLookup, **rivals}.items():
        try:
            cost, found = measured(
                lambda block=block: block(fmap1, fmap2, num_levels=LEVELS, radius=RADIUS), coords, calls
            )
            row[name] = {**cost, "largest_error": largest_error(found, fmap1, fmap2, coords)}
        except RuntimeError as error:  # out of memory is one
            if name == "SCRAM":
                raise
            row[name] = {"failed": str(error).splitlines()[0]}
        found = None
        print(name, row[name], flush=True)
    print("gradients", row["gradient_error"])
    Store("correlation", *[results] if results else []).put(f"{device}, {height}x{width}", **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the unzipped wheel of ptlflow")
    parser.add_argument("--size", type=int, nargs=2, default=(270, 480), help="of the feature maps: height, width")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--results", type=Path, help="folder of the JSON")
    given = parser.parse_args()
    main(given.folder, *given.size, given.device, given.calls, given.results)
