"""Structure of a hole: lines and patterns go on across it, by the few offsets at which the picture resembles itself.

Patches of the known part find their best match that is not near. Where the picture repeats itself, many of these lie at
a few offsets: the period of bricks, the distance of two coins. They become labels: a pixel of the hole with a label
shows what lies at that offset. Min-sum belief propagation chooses labels that agree with the known pixels around the
hole and with each other. Other pictures have no such offsets, and labels would make a collage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..results import Matches
from .patches import Features, unfold, whole

PATCH = 7  # side of the patches whose matches are counted
QUERIES = 3000  # patches that look for a match, at most
NEAR = 15  # of the longer side: matches nearer than this part tell of smoothness, not of structure
OFFSETS = 48
ROUGH = 0.5  # of the mean variance of patches: what has less is smooth
REGULAR = 0.3  # of patches that are rough and whose match lies at one of the offsets, in a picture that repeats itself
BAND = 3  # pixels around a pixel of the hole whose known colors a label is compared with
GRADIENT = 2.0  # weight of differences between neighbors beside colors
UNKNOWN = 0.05  # squared difference that stands for a pixel a label has no color for
FORBIDDEN = 40.0  # cost of a label without a color
MOST = 4.0  # of a seam between two pixels
SEAM = 0.002  # of any seam: without it labels change where nothing tells them apart
TABLE = 2**25  # costs of pairs of labels, at most: large holes have fewer labels
ROUNDS = 40  # of belief propagation
DAMPING = 0.5


@dataclass(frozen=True)
class Structure:
    """What a hole of n pixels shows by offsets.

    Args:
        picture: [H, W, C], the hole filled.
        offset: of each pixel to its source, int64 [H, W, 2]; 0 outside the hole.
        cost: of the label of each pixel and half of its seams [H, W], the mean over colors of squared differences.
    """

    picture: Tensor
    offset: Tensor
    cost: Tensor

    def matches(self, side: int) -> Matches:
        """The offsets as matches of patches: where they begin, and where what they show begins; -1 outside the hole."""
        rim = side // 2
        height, width = (extent - side + 1 for extent in self.offset.shape[:2])
        offset = self.offset[rim : rim + height, rim : rim + width]
        rows, columns = (torch.arange(n, device=offset.device) for n in (height, width))
        place = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1) + offset
        size = torch.tensor((height, width), dtype=torch.int64, device=offset.device)
        fits = (offset != 0).any(-1) & (place >= 0).all(-1) & (place < size).all(-1)
        index = torch.where(fits, place[..., 0] * width + place[..., 1], -1).int()[None, None, ..., None]
        score = torch.zeros(index.shape, dtype=torch.float32, device=index.device)
        return Matches(index, score.masked_fill(index < 0, -torch.inf), (height, width))


def continued(known: Tensor, hole: Tensor, colors: int) -> Structure | None:
    """The hole, bool [H, W], of a small picture [H, W, C] filled by offsets; None if it does not repeat itself.

    The first channels, as many as `colors`, choose the offsets; all are filled.
    """
    seen = known[..., :colors]
    offsets, share = frequent_offsets(seen, hole)
    places = hole.nonzero()  # [n, 2]
    if share < REGULAR or not len(places):
        return None
    offsets = offsets[: max(1, int((TABLE / len(places)) ** 0.5))]
    labels = _Labels.of(seen, hole, offsets, places)
    chosen, cost = labels.chosen(hole)
    size = torch.tensor(hole.shape, dtype=torch.int64, device=hole.device)
    moved = places + offsets[chosen]
    fits = labels.allowed.gather(1, chosen[:, None])[:, 0]
    moved = torch.where(fits[:, None], moved, places).clamp(min=torch.zeros_like(size), max=size - 1)
    picture = known.clone()
    picture[hole] = torch.where(fits[:, None], known[moved[:, 0], moved[:, 1]], known[~hole].mean(0))
    offset = torch.zeros(*hole.shape, 2, dtype=torch.int64, device=hole.device)
    offset[hole] = moved - places
    spread = torch.zeros(hole.shape, dtype=known.dtype, device=hole.device)
    spread[hole] = cost / colors
    return Structure(picture, offset, spread)


def frequent_offsets(known: Tensor, hole: Tensor) -> tuple[Tensor, float]:
    """The offsets at which a picture [H, W, C] resembles itself outside its hole, bool [H, W]: int64 [n, 2].

    And the share of its patches that are rough and whose match lies at one of them: smooth ones match anywhere.
    """
    height, width = hole.shape
    if min(height, width) < PATCH:
        return torch.zeros(0, 2, dtype=torch.int64, device=hole.device), 0.0
    allowed = whole(~hole, PATCH)
    keys = allowed.nonzero()  # [m, 2]
    if len(keys) < 2:
        return keys[:0], 0.0
    values = unfold(known, PATCH)
    features = Features.fit(values, PATCH, 24, allowed)(known)[0, 0]
    k = features[keys[:, 0], keys[:, 1]]  # [m, E]
    least = max(height, width) / NEAR
    step = max(1, len(keys) // QUERIES)
    found = []
    for first in range(0, len(keys), 512 * step):
        some = slice(first, first + 512 * step, step)
        distance = k.square().sum(-1) - 2 * k[some] @ k.mT  # [512, m]
        far = (keys[some, None] - keys).abs().amax(-1) > least
        found.append(keys[torch.where(far, distance, torch.inf).argmin(1)] - keys[some])
    offset = torch.cat(found)
    offset = offset[offset.abs().amax(-1) > least]  # of a patch without any far one
    middle = torch.tensor([height - 1, width - 1], dtype=torch.int64, device=hole.device)
    counts = torch.zeros(2 * height - 1, 2 * width - 1, dtype=known.dtype, device=hole.device)
    one = torch.ones((), dtype=known.dtype, device=hole.device)
    for sign in (1, -1):  # what goes on to the right does so to the left
        counts.index_put_(tuple((sign * offset + middle).unbind(-1)), one, accumulate=True)
    line = torch.arange(-3, 4, dtype=known.dtype, device=hole.device)
    bell = (-line.square() / 4).exp()
    bell = bell / bell.sum()
    smooth = F.conv2d(counts[None, None], bell[None, None, :, None], padding=(3, 0))
    smooth = F.conv2d(smooth, bell[None, None, None], padding=(0, 3))
    peak = (smooth == F.max_pool2d(smooth, 9, 1, 4)) & (smooth > 0)
    heights = torch.where(peak, smooth, 0).flatten()
    best = heights.topk(min(OFFSETS, int(peak.sum()))).indices
    tops = torch.zeros_like(counts)
    tops.view(-1)[best] = 1
    around = F.max_pool2d(tops[None, None], 5, 1, 2)[0, 0]
    colors = known.shape[-1]
    patches = values[keys[::step, 0], keys[::step, 1]]
    rough = patches.reshape(len(patches), colors, -1).var(-1).mean(-1)
    place = (torch.cat(found) + middle)[rough >= ROUGH * rough.mean()]
    share = float(around[place[:, 0], place[:, 1]].sum()) / len(rough)
    return torch.stack((best // counts.shape[1], best % counts.shape[1]), -1) - middle, share


@dataclass(frozen=True)
class _Labels:
    """Costs of L labels of n pixels.

    Args:
        unary: [n, L]: how a label continues the known pixels around.
        allowed: bool [n, L]: what lies at the offset is known.
        seen: colors and differences at the offset [n, L, F].
    """

    unary: Tensor
    allowed: Tensor
    seen: Tensor

    @classmethod
    def of(cls, known: Tensor, hole: Tensor, offsets: Tensor, places: Tensor) -> _Labels:
        height, width = hole.shape
        clear = (~hole).to(known.dtype)
        described = torch.cat((known, GRADIENT * _differences(known, ~hole)), -1)
        side = 2 * BAND + 1
        unary = []
        allowed = []
        seen = []
        rows = torch.arange(height, device=hole.device)
        columns = torch.arange(width, device=hole.device)
        around = _box(clear, side)[hole]
        for down, right in offsets.tolist():
            inside = ((rows + down >= 0) & (rows + down < height))[:, None] & (
                (columns + right >= 0) & (columns + right < width)
            )
            there = inside & clear.roll((-down, -right), (0, 1)).bool()
            moved = described.roll((-down, -right), (0, 1))
            both = there * clear
            apart = (moved[..., : known.shape[-1]] - known).square().sum(-1) * both
            missing = around - _box(both, side)[hole]
            unary.append((_box(apart, side)[hole] + UNKNOWN * missing) / side)
            allowed.append(there[hole])
            seen.append(moved[hole])
        allowed_ = torch.stack(allowed, 1)
        return cls(torch.where(allowed_, torch.stack(unary, 1), FORBIDDEN), allowed_, torch.stack(seen, 1))

    def chosen(self, hole: Tensor) -> tuple[Tensor, Tensor]:
        """The labels of the pixels of the hole, bool [H, W] -> int64 [n], and their costs [n]."""
        number = torch.full(hole.shape, -1, dtype=torch.int64, device=hole.device)
        number[hole] = torch.arange(len(self.unary), device=hole.device)
        pairs = [(number[:, :-1], number[:, 1:]), (number[:-1], number[1:])]
        edges = [(a[(a >= 0) & (b >= 0)], b[(a >= 0) & (b >= 0)]) for a, b in pairs]
        tables = [self._seams(a, b) for a, b in edges]
        zero = self.unary.new_zeros(())
        messages = [[zero.expand(len(a), self.unary.shape[1])] * 2 for a, _ in edges]

        def beliefs() -> Tensor:
            summed = self.unary.clone()
            for (a, b), (to_b, to_a) in zip(edges, messages, strict=True):
                summed.index_add_(0, b, to_b).index_add_(0, a, to_a)
            return summed

        for _ in range(ROUNDS):
            for edge, ((a, b), table) in enumerate(zip(edges, tables, strict=True)):
                belief = beliefs()
                to_b, to_a = messages[edge]
                new_b = ((belief[a] - to_a)[:, :, None] + table).amin(1)
                new_a = ((belief[b] - to_b)[:, None, :] + table).amin(2)
                messages[edge] = [
                    DAMPING * old + (1 - DAMPING) * (new - new.amin(1, keepdim=True))
                    for old, new in ((to_b, new_b), (to_a, new_a))
                ]
        labels = beliefs().argmin(1)
        cost = self.unary.gather(1, labels[:, None])[:, 0]
        for (a, b), table in zip(edges, tables, strict=True):
            seam = table[torch.arange(len(a), device=a.device), labels[a], labels[b]] / 2
            cost = cost.index_add(0, a, seam).index_add(0, b, seam)
        return labels, cost

    def _seams(self, a: Tensor, b: Tensor) -> Tensor:
        """Costs [m, L, L] of labels of neighbors a and b [m]: how far what they show differs in both places."""
        total = self.unary.new_zeros(())
        unknown = torch.zeros((), dtype=torch.bool, device=a.device)
        for pixel in (a, b):
            seen = self.seen[pixel]  # [m, L, F]
            power = seen.square().sum(-1)
            total = total + (power[:, :, None] + power[:, None] - 2 * seen @ seen.mT).clamp(min=0)
            barred = ~self.allowed[pixel]
            unknown = unknown | barred[:, :, None] | barred[:, None]
        total = torch.where(unknown, MOST, total.clamp(max=MOST)) + SEAM
        return torch.where(torch.eye(total.shape[-1], dtype=torch.bool, device=a.device), 0, total)


def _differences(picture: Tensor, clear: Tensor) -> Tensor:
    """Differences to the right and lower neighbor [H, W, 2 C] of a picture [H, W, C]; 0 where one is not clear."""
    right = F.pad((picture[:, 1:] - picture[:, :-1]) * (clear[:, 1:] & clear[:, :-1])[..., None], (0, 0, 0, 1))
    down = F.pad((picture[1:] - picture[:-1]) * (clear[1:] & clear[:-1])[..., None], (0, 0, 0, 0, 0, 1))
    return torch.cat((right, down), -1)


def _box(x: Tensor, side: int) -> Tensor:
    """Sums over squares [H, W] -> [H, W]."""
    return F.avg_pool2d(x[None, None], side, 1, side // 2)[0, 0] * side * side


def parts(mask: Tensor) -> Tensor:
    """The connected parts of a mask, bool [H, W] -> int64 [H, W]: their numbers from 0, -1 outside.

    >>> parts(torch.tensor([[True, True, False, True]]))
    tensor([[ 0,  0, -1,  1]])
    """
    own = torch.arange(1, mask.numel() + 1, dtype=torch.float64, device=mask.device).reshape(mask.shape)
    number = torch.where(mask, own, 0)
    while True:
        wider = F.max_pool2d(number[None, None], 3, 1, 1)[0, 0] * mask
        if torch.equal(wider, number):
            break
        number = wider
    known = number[mask].unique()  # type: ignore[no-untyped-call]
    return torch.where(mask, torch.searchsorted(known, number), -1)
