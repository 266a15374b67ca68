"""How alike two pictures are, patch by patch, both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from .patches import unfold
from .synthesis import Settings, Source, nearest

SWEEPS = 8


@torch.no_grad()
def two_way(picture: Tensor, source: Tensor, settings: Settings) -> tuple[float, float]:
    """The mean root-mean-square difference of patches to their nearest ones, from the picture and from the source.

    The first says how much of the picture [H, W, C] is not of the source [H', W', C], the second how much of the source
    is not shown.
    """
    known = Source.of(source, settings)
    values = unfold(picture, settings.patch)
    a = known.features(picture)
    b = known.features(source)
    how = Settings(sweeps=SWEEPS, seed=settings.seed)
    return _mean_distance(a, b, values, known.values, how), _mean_distance(b, a, known.values, values, how)


def _mean_distance(q: Tensor, k: Tensor, mine: Tensor, theirs: Tensor, how: Settings) -> float:
    found = nearest(q, k, how).index[0, 0, ..., 0].long()
    return float((mine - theirs.flatten(0, 1)[found]).square().mean(-1).sqrt().mean())
