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
    a = known.features(picture)  # [1, 1, h, w, width]
    b = known.features(source)  # [1, 1, h', w', width]
    search_settings = Settings(sweeps=SWEEPS, seed=settings.seed)
    return _mean_distance(a, b, values, known.values, search_settings), _mean_distance(
        b, a, known.values, values, search_settings
    )


def _mean_distance(q: Tensor, k: Tensor, query_patches: Tensor, key_patches: Tensor, settings: Settings) -> float:
    index = nearest(q, k, settings).index[0, 0, ..., 0].long()  # [h, w]
    return float((query_patches - key_patches.flatten(0, 1)[index]).square().mean(-1).sqrt().mean())
