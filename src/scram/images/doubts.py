"""Where a filled hole looks like nothing else in its picture: inpainting's own measure of its failures."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import widened
from .patches import Features, unfold, whole
from .pyramid import resize, scaled
from .structure import parts

PATCH = 7
SEEN = 96  # pixels of the shorter side at which patches are compared: fine grain is not looked at
COVERED = 0.25  # of a small pixel that makes it one of the hole
FEWEST = 20  # patches of a part that is judged: thin holes are not
SHARE = 0.9  # of the patches of a part are as near to a known patch as is told
LIMIT = 0.095  # of the distance: chosen on scikit-image's photographs


@dataclass(frozen=True)
class Doubt:
    """A connected part of a hole whose patches are unlike all known ones.

    Args:
        box: top, left, bottom, right in pixels of the picture.
        distance: to the nearest known patches, root mean square of colors 0..1; nine of ten patches are nearer.
    """

    box: tuple[int, int, int, int]
    distance: float


@torch.no_grad()
def doubts(filled: Tensor, hole: Tensor, limit: float = LIMIT) -> list[Doubt]:
    """The parts of a hole that were filled with what the rest of the picture does not show, the worst first.

    A smear between two colors, or a piece that does not continue its surroundings, has patches that no known part
    resembles. A wrong but possible content (skin in place of a mouth) has not.

    Args:
        filled: floats [H, W, C], values 0..1; from any method.
        hole: bool [H, W], what was filled.
        limit: distance from which a part is doubtful.

    >>> picture = torch.linspace(0, 24, 96).sin().expand(64, 96).unsqueeze(-1) / 2 + 0.5
    >>> hole = torch.zeros(64, 96, dtype=torch.bool)
    >>> hole[20:44, 30:60] = True
    >>> doubts(picture, hole), len(doubts(torch.where(hole[..., None], 0.5, picture), hole))
    ([], 1)
    """
    size = (hole.shape[0], hole.shape[1])
    small_size = scaled(size, min(1.0, SEEN / min(size)))
    small = resize(widened(filled), small_size)
    covered = F.interpolate(hole.to(small)[None, None], small_size, mode="area")[0, 0] > COVERED
    if min(small_size) < PATCH or not bool(covered.any()):
        return []
    allowed = whole(~covered, PATCH)
    if not bool(allowed.any()):
        return []
    features = Features.fit(unfold(small, PATCH), PATCH, 24)(small)[0, 0] / (PATCH * small.shape[-1] ** 0.5)
    keys = features[allowed]
    part = parts(covered)
    rim = PATCH // 2
    centers = part[rim : small_size[0] - rim, rim : small_size[1] - rim]
    scale = (size[0] / small_size[0], size[1] / small_size[1])
    found = []
    for number in range(int(part.max()) + 1):
        patches = features[centers == number]
        if len(patches) < FEWEST:
            continue
        nearest = torch.cat([torch.cdist(some, keys).amin(1) for some in patches.split(512)])
        distance = float(nearest.quantile(SHARE))
        if distance > limit:
            rows, columns = ((part == number).any(axis).nonzero()[:, 0] for axis in (1, 0))
            box = (
                round(int(rows[0]) * scale[0]),
                round(int(columns[0]) * scale[1]),
                round((int(rows[-1]) + 1) * scale[0]),
                round((int(columns[-1]) + 1) * scale[1]),
            )
            found.append(Doubt(box, distance))
    return sorted(found, key=lambda doubt: -doubt.distance)
