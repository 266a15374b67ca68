"""What stands out in a picture: patches that few others resemble, and those rather near by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .patches import Features, unfold
from .pyramid import resize, scaled

PATCH = 7
SEEN = 96  # pixels of the shorter side at which it is looked for
SCALES = 1.0, 0.5
KEYS = 2500  # patches that each is compared with
ALIKE = 32  # the most similar of them count
DISTANCE = 3.0  # a patch that far away, in longer sides, counts for 1 / (1 + this)
SPREAD = 9  # pixels: objects stand out, not their edges alone


def saliency(picture: Tensor) -> Tensor:
    """How far each point of a picture [H, W, C] stands out, 0..1 [h, w], at a size of at most `SEEN` pixels.

    The mean distance of its patch to the most similar others, each over 1 + 3 * how far away it lies.

    >>> picture = torch.full((40, 60, 3), 0.5)
    >>> picture[10:20, 10:20] = torch.rand(10, 10, 3)
    >>> shown = saliency(picture)
    >>> bool(shown[10:20, 10:20].mean() > 3 * shown[:, 30:].mean())
    True
    """
    height, width = picture.shape[:2]
    size = scaled((height, width), min(1.0, SEEN / min(height, width)))
    small = resize(picture, size)
    total = small.new_zeros(size)
    for scale in SCALES:
        own = scaled(size, scale)
        if min(own) > PATCH // 2:
            total = total + resize(_rarity(resize(small, own)).unsqueeze(-1), size)[..., 0]
    total = total / total.flatten().quantile(0.99).clamp(min=1e-3)
    side = max(1, min(SPREAD, min(size) // 2 * 2 - 1))
    spread = F.pad(total[None, None], [side // 2] * 4, mode="replicate")
    return F.avg_pool2d(spread, side, 1)[0, 0].clamp(0, 1)


def _rarity(picture: Tensor) -> Tensor:
    """The mean distance of the patch at each point of a picture [H, W, C] to the patches most like it [H, W]."""
    height, width = picture.shape[:2]
    padded = F.pad(picture.movedim(-1, 0)[None], [PATCH // 2] * 4, mode="reflect")[0].movedim(0, -1)
    features = Features.fit(unfold(padded, PATCH), PATCH, 24)(padded)[0, 0]  # [H, W, E]
    rows, columns = (torch.arange(n, device=picture.device, dtype=picture.dtype) for n in (height, width))
    place = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1) / max(height, width)
    step = max(1, round((height * width / KEYS) ** 0.5))
    keys, key_place = (x[::step, ::step].flatten(0, 1) for x in (features, place))
    alike = min(ALIKE, len(keys))
    means = []
    queries, own = features.flatten(0, 1), place.flatten(0, 1)
    for first in range(0, len(queries), 2048):
        some = slice(first, first + 2048)
        distance = torch.cdist(queries[some], keys) / (1 + DISTANCE * torch.cdist(own[some], key_place))
        means.append(distance.topk(alike, largest=False).values.mean(1))
    return torch.cat(means).reshape(height, width)
