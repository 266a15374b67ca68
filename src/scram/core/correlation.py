"""Scores of every query around given places on a pyramid of keys: the lookup of RAFT, without its volume."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engines import EngineSpec, dispatch
from ..options import Impl
from ..spec.grid import grid_of
from ..spec.scoring import accumulator
from . import checks, ops
from .calls import WindowScoresCall
from .checks import explains
from .precision import ignores_autocast

FARTHEST = 2.0**29  # places are cut to this: no grid is as wide, and the corner of a box stays an int32


@explains
@ignores_autocast
def correlation(q: Tensor, k: Tensor, coords: Tensor, radius: int, *, levels: int = 4, impl: Impl = "auto") -> Tensor:
    """For every query its scores in a window around a place of its own, on every level of a pyramid of keys.

    It computes what RAFT and its relatives look up in a correlation volume, in linear memory: the volume of N x M
    scores is never made. Level 0 holds the keys; each further level the means of 2 keys along every axis, a rest at the
    end left out. On level l the window lies around coords / 2^l. Between keys scores are interpolated linearly; a place
    off the grid has the score 0. Scores are divided by sqrt(E).

    Differentiable in q, k and coords, once and in reverse mode. Under autocast it keeps the dtypes of its arguments.

    Args:
        q: queries [B, H, *G, E].
        k: keys [B, Hk, *G', E]; Hk divides H, the grids have equal rank and may differ in size.
        coords: float32 or float64 [B, H, *G, rank], a place on the key grid for every query, in the order of the axes
            of the grid: row, column. RAFT has (x, y): use `coords.flip(-1)`, or `scram.nn.CorrelationLookup`.
        radius: b, the window holds 2b+1 places along every axis, at distance 1 on each level.
        levels: of the pyramid; the grid of the last one must have a key.
        impl: "auto" or the name of an implementation; a name never falls back to another.

    Returns:
        float32 (float64 for float64) [B, H, *G, levels * (2b+1)^rank]: level after level, in each the step along the
        first axis changes fastest, as in RAFT.

    >>> import scram
    >>> k = torch.arange(16.0).reshape(1, 1, 4, 4, 1)
    >>> coords = torch.tensor([1.5, 2.0]).expand(1, 1, 4, 4, 2)
    >>> scram.correlation(torch.ones_like(k), k, coords, radius=0, levels=2)[0, 0, 0, 0]
    tensor([ 8.0000, 10.5000])
    """
    checks.queries_keys(q, k)
    checks.count("radius", radius)
    checks.whole("levels", levels, 1)
    checks.places(q, coords)
    return lookup(q, pyramid(k, levels), coords, radius, impl)


def pyramid(k: Tensor, levels: int) -> list[Tensor]:
    """The keys [B, Hk, *G', E] and `levels` - 1 times the means of 2 along every axis, in the dtype of the keys."""
    least = min(grid_of(k))
    if least >> (levels - 1) < 1:
        raise ValueError(
            f"levels must be at most {least.bit_length()} for a key grid of {grid_of(k)}, got {levels}: "
            "each level halves the grid"
        )
    means = [k]
    mean = k.to(accumulator(k.dtype))
    for _ in range(levels - 1):
        for axis in range(2, k.ndim - 1):
            pairs = mean.shape[axis] // 2
            even = mean.narrow(axis, 0, 2 * pairs)
            mean = even.reshape(*mean.shape[:axis], pairs, 2, *mean.shape[axis + 1 :]).mean(axis + 1)
        means.append(mean.to(k.dtype))
    return means


def lookup(q: Tensor, levels: Sequence[Tensor], coords: Tensor, radius: int, impl: Impl = "auto") -> Tensor:
    """`correlation` of a pyramid that was made before."""
    spec = dispatch.choose(impl, q.device, q.dtype)
    return torch.cat([_level(q, k, coords / 2**n, radius, spec) for n, k in enumerate(levels)], -1)


def box_scores(q: Tensor, k: Tensor, corner: Tensor, sides: tuple[int, ...]) -> Tensor:
    """The scores of the keys of one box per query, [B, H, *G, prod(sides)], row-major; 0 off the grid.

    Args:
        q, k: [B, H, *G, E], [B, Hk, *G', E].
        corner: int64 [B, H, *G, rank], the first place of each box.
        sides: of all boxes, one per axis.
    """
    spec = dispatch.choose("auto", q.device, q.dtype)
    return ops.window_scores(spec, WindowScoresCall(q, k, corner.int().contiguous(), sides, 1.0)).scores


def _level(q: Tensor, k: Tensor, coords: Tensor, radius: int, spec: EngineSpec) -> Tensor:
    """[B, H, *G, (2b+1)^rank]: the scores at whole places around each window, then between them axis by axis."""
    rank = coords.shape[-1]
    near = coords.clamp(-FARTHEST, FARTHEST)
    below = near.detach().floor()
    corner = (below.nan_to_num(0) - radius).to(torch.int32)
    sides = (2 * radius + 2,) * rank
    (scores,) = ops.window_scores(spec, WindowScoresCall(q, k, corner, sides, q.shape[-1] ** -0.5))
    box = scores.reshape(*scores.shape[:-1], *sides)  # [B, H, *G, *sides]
    share = (near - below).to(scores.dtype)  # [B, H, *G, rank]
    for axis in range(rank):
        n = box.ndim - rank + axis
        weight = share[(..., axis, *[None] * rank)]
        box = torch.lerp(box.narrow(n, 0, 2 * radius + 1), box.narrow(n, 1, 2 * radius + 1), weight)
    first = box.ndim - rank
    lookup: Tensor = box.permute(*range(first), *reversed(range(first, box.ndim))).flatten(first)
    return lookup
