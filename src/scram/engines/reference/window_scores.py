"""Scores of the keys of one box per query. Autograd differentiates it, recomputing chunk by chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import WindowScores, WindowScoresCall
from ...spec.grid import coordinates, flat, grid_of, inside, key_row, rows
from ...spec.scoring import accumulator
from .chunks import in_chunks

CHUNK_ELEMENTS = 1 << 22  # of gathered keys at a time


def window_scores(call: WindowScoresCall) -> WindowScores:
    q = call.q
    key_grid = grid_of(call.k)
    queries = math.prod(grid_of(q))
    keys = math.prod(key_grid)
    corner = call.corner.reshape(-1, len(key_grid)).long()  # [P, rank]
    offset = coordinates(torch.arange(math.prod(call.sides), device=q.device), call.sides)

    def points(at: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor]:
        row = (at // queries).unsqueeze(-1)  # [C, 1]
        source = key_row(row, call.q.shape[1], call.k.shape[1])
        place = [corner[at, axis].unsqueeze(-1) + step for axis, step in enumerate(offset)]  # each [C, S]
        on_grid = inside(place, key_grid)
        key = torch.where(on_grid, flat(place, key_grid), 0)
        # What is off the grid is zeroed before it is multiplied: 0 * NaN is NaN, forward and backward.
        gathered = torch.where(on_grid.unsqueeze(-1), k[source * keys + key], 0)  # [C, S, E]
        return (torch.where(on_grid, call.scale * (q[at].unsqueeze(1) * gathered).sum(-1), 0),)

    wide = accumulator(q.dtype)
    tensors = tuple(rows(x).flatten(0, 1).to(wide) for x in (q, call.k))
    size = max(1, CHUNK_ELEMENTS // (math.prod(call.sides) * q.shape[-1]))
    (scores,) = in_chunks(points, len(corner), size, tensors)
    return WindowScores(scores.reshape(*q.shape[:-1], scores.shape[-1]))
