"""A denoising loop over a film's latents, random weights: time of whole steps and error by step, beside torch's SDPA.

    python benchmarks/latents.py run                       # 16 x 64 x 64 tokens, 20 steps, on a GPU; some minutes
    python benchmarks/latents.py run --size 4 12 16 --heads 2 --layers 2 --steps 4   # on a CPU
    python benchmarks/latents.py table

The model is a transformer of the shape of Wan 1.3B (12 heads of 128, RMS norms of q and k), with fewer layers. Its
attention is tuned once, at step 1 of a first run that is not timed; runs with the same noise are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import table_cells
import torch
import torch.nn.functional as F
from store import RESULTS, Store
from torch import Tensor, nn

from scram.integrations.layers import Plans
from scram.integrations.sdpa import Replacement
from scram.integrations.steps import Steps

CHANNELS = 16
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and a perceptron of tokens [B, N, C]."""

    def __init__(self, heads: int, width: int, sharpness: float) -> None:
        super().__init__()
        self.heads = heads
        self.gain = sharpness**0.5
        channels = heads * width
        self.norms = nn.ModuleList(nn.LayerNorm(channels, elementwise_affine=False) for _ in range(2))
        self.project = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.perceptron = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU("tanh"), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(one, one.shape[-1:]) * self.gain for one in (q, k))
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Denoiser(nn.Module):
    """Velocity of latents [B, C, T, H, W] at a time in [0, 1].

    Args:
        size: frames, rows and columns of tokens.
        heads, width: of attention.
        layers: how many.
        sharpness: standard deviation of the scores of unrelated tokens.
    """

    def __init__(self, size: tuple[int, int, int], heads: int, width: int, layers: int, sharpness: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(patch_size=(1, 1, 1), in_channels=CHANNELS)
        channels = heads * width
        self.enter = nn.Linear(CHANNELS, channels)
        self.time = nn.Linear(1, channels)
        self.places = nn.Parameter(0.3 * smooth(channels, size).flatten(1).T.contiguous())  # [N, C]
        self.blocks = nn.ModuleList(Block(heads, width, sharpness) for _ in range(layers))
        self.leave = nn.Linear(channels, CHANNELS)

    def forward(self, hidden_states: Tensor, timestep: Tensor, attention: Attention) -> Tensor:
        x = self.enter(hidden_states.flatten(2).mT) + self.places + self.time(timestep.reshape(1, 1, 1))
        for block in self.blocks:
            x = block(x, attention)
        return self.leave(x).mT.reshape(hidden_states.shape)


def smooth(channels: int, size: tuple[int, int, int]) -> Tensor:
    """Random fields [C, T, H, W] that vary slowly, with variance 1."""
    coarse = torch.randn(1, channels, *(max(2, -(-n // 4)) for n in size))
    field = F.interpolate(coarse, size=size, mode="trilinear", align_corners=True)[0]
    return field / field.std()


def denoise(model: Denoiser, noise: Tensor, steps: int, attention: Attention) -> tuple[list[Tensor], list[float]]:
    """The latents behind each step, and the seconds of each."""
    x = noise
    times = torch.linspace(1, 0, steps + 1).tolist()
    found, seconds = [], []
    for now, then in pairwise(times):
        begin = clock(noise.device)
        timestep = torch.tensor(now, dtype=noise.dtype, device=noise.device)
        x = x + (then - now) * model(x, timestep, attention)
        seconds.append(clock(noise.device) - begin)
        found.append(x.cpu())
    return found, seconds


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    store = Store("latents", options.results)
    for sharpness in options.sharpness:
        torch.manual_seed(0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = tuple(options.size)
        model = Denoiser(size, options.heads, options.width, options.layers, sharpness).eval().to(device, dtype)
        film = smooth(CHANNELS, size)
        noise = (0.7 * film + 0.7 * torch.randn(CHANNELS, *size)).unsqueeze(0).to(device, dtype)
        name = f"{'x'.join(map(str, size))}, scores {sharpness:g}"
        shape = {"size": list(size), "heads": options.heads, "width": options.width, "layers": options.layers}
        row = {**shape, "sharpness": sharpness, "steps": options.steps, "dtype": str(dtype).removeprefix("torch.")}
        denoise(model, noise, min(2, options.steps), F.scaled_dot_product_attention)
        dense, seconds = denoise(model, noise, options.steps, F.scaled_dot_product_attention)
        store.put(f"{name}, torch SDPA", options.commit, **row, seconds=seconds)
        print(f"{name}, torch SDPA: {1e3 * middle(seconds):.1f} ms a step", flush=True)
        for error in options.errors:
            plans = None
            for keep in (False, True):
                way = f"{name}, SCRAM, {error:.0%}, {'state kept' if keep else 'no state kept'}"
                made, plans = with_scram(model, noise, dense, options.steps, error, keep, plans)
                store.put(way, options.commit, **row, **made)
                print(f"{way}: {1e3 * middle(made['seconds']):.1f} ms a step, first run {made['tuning_seconds']:.1f} s")
                print(f"  {made['settings']}")
                print("  error by step:", " ".join(f"{x:.4f}" for x in made["errors"]), flush=True)


def with_scram(
    model: Denoiser, noise: Tensor, dense: list[Tensor], steps: int, error: float, keep: bool, plans: Plans | None
) -> tuple[dict[str, Any], Plans]:
    """A row of a loop with SCRAM, and the plans of its layers; errors are those of the latents behind each step."""
    replacement = Replacement("auto", error=error, plans=plans, steps=Steps(1, keep))
    begin = clock(noise.device)
    denoise(model, noise, min(3, steps), replacement.attention)  # tunes, and compiles kernels
    first = clock(noise.device) - begin
    replacement.steps.detach()
    latents, seconds = denoise(model, noise, steps, replacement.attention)
    plans = replacement.report.plans
    row = {
        "error": error,
        "tuning_seconds": first,
        "settings": [str(plan.setting) for plan in plans.values()],
        "seconds": seconds,
        "errors": [off(one, two) for one, two in zip(latents, dense, strict=True)],
    }
    return row, plans


def off(x: Tensor, exact: Tensor) -> float:
    return float((x.float() - exact.float()).norm() / exact.float().norm())


def middle(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def table() -> str:
    """docs/your_model: a step of the loop, and how far its latents are from those of dense attention."""
    head = ("tokens", "scores", "attention", "a step", "times faster", "first run", "error after 5 steps", "10", "20")
    rows = table_cells.load("latents")
    lines = []
    for name, row in rows.items():
        size, scores, way = name.split(", ", 2)
        dense = middle(rows[f"{size}, {scores}, torch SDPA"]["seconds"][1:])
        step = middle(row["seconds"][1:])
        errors = row.get("errors", [])
        shown = [f"{errors[n - 1]:.4f}" if len(errors) >= n else "" for n in (5, 10, 20)]
        first = table_cells.time(row["tuning_seconds"]) if errors else ""
        if "error" in row:
            way = f"SCRAM, {100 * row['error']:g} %, {way.rsplit(', ', 1)[1]}"
        faster = f"{dense / step:.2f}" if "error" in row else ""
        cells = way, table_cells.time(step), faster, first, *shown
        lines.append((size.replace("x", table_cells.BY), scores.removeprefix("scores "), *cells))
    return table_cells.table(head, *lines) if lines else table_cells.NOT_MEASURED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--size", type=int, nargs=3, default=[16, 64, 64], help="frames, rows and columns of tokens")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sharpness", type=float, nargs="+", default=[2.0, 3.0], help="deviation of the scores")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder")
    parser.add_argument("--commit", help="where git is not there to ask")
    options = parser.parse_args()
    if options.what == "run":
        run(options)
    else:
        print(table())


if __name__ == "__main__":
    main()
