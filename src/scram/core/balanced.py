"""Some matches for all of them: drawn by certainty, thinned where many were drawn."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec.grid import Grid

CANDIDATES = 4  # are drawn for each match that is taken
HELD = 16  # candidates in a window, where they lie evenly
FLOOR = 0.25  # of the mean density; fewer candidates in a window do not count as fewer: they may be stray


def balanced(certainty: Tensor, n: int, seed: int) -> Tensor:
    """Which queries are taken, int64 [R, n] of certainty [R, *G]; -1 where a row has too few above 0.

    Candidates are drawn without replacement, each with a chance that grows with its certainty. Of these, n are drawn
    with the inverse of how many lie around them.

    >>> balanced(torch.tensor([[0.0, 1.0, 0.0, 0.5]]), 3, seed=0).sort().values
    tensor([[-1,  1,  3]])
    """
    grid: Grid = tuple(certainty.shape[1:])
    weight = certainty.detach().flatten(1).float()  # [R, N]
    generator = torch.Generator(device="cpu").manual_seed(seed)  # the same matches on every device
    first = _drawn(weight, CANDIDATES * n, generator)
    there = first >= 0
    marks = torch.zeros_like(weight).scatter_add_(1, first.clamp(min=0), there.to(weight.dtype))
    density = _around(marks.reshape(-1, *grid), n).flatten(1)
    density = density + FLOOR * marks.mean(1, keepdim=True)
    thinned = torch.where(there, 1 / density.gather(1, first.clamp(min=0)), 0)
    second = _drawn(thinned, n, generator)
    taken = torch.where(second >= 0, first.gather(1, second.clamp(min=0)), -1)
    return F.pad(taken, (0, n - taken.shape[1]), value=-1)


def _drawn(weight: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Numbers of at most n columns of each row, without replacement by weight [R, N]; -1 where it is 0."""
    # The first arrivals of a race whose runners wait exponentially long, at the rate of their weights.
    noise = torch.empty(weight.shape, dtype=torch.float32, device="cpu").exponential_(generator=generator)
    arrival = torch.where(weight > 0, noise.to(weight.device) / weight, torch.inf)
    times, order = arrival.topk(min(n, weight.shape[1]), dim=1, largest=False)
    return torch.where(times.isfinite(), order, -1)


def _around(marks: Tensor, n: int) -> Tensor:
    """The mean of marks [R, *G] in windows that hold some `HELD` candidates, axis by axis."""
    grid = marks.shape[1:]
    side = (HELD / CANDIDATES * math.prod(grid) / max(n, 1)) ** (1 / len(grid))
    for axis, extent in enumerate(grid, 1):
        radius = min(max(1, round(side / 2)), extent - 1)
        if radius:
            last = marks.movedim(axis, -1)
            mean = F.avg_pool1d(last.reshape(-1, 1, extent), 2 * radius + 1, 1, radius, count_include_pad=False)
            marks = mean.reshape(last.shape).movedim(-1, axis)
    return marks
