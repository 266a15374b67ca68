"""Digits on a canvas: pictures, targets of tokens, boxes that were found, and how precise they are."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import unit

KEPT = 60  # boxes of a picture


class Objects(NamedTuple):
    """What is on a canvas: boxes [n, most, 4] as left, top, right, bottom in pixels, classes [n, most], -1: none."""

    boxes: Tensor
    classes: Tensor


class Found(NamedTuple):
    """Boxes [n, KEPT, 4], classes and scores [n, KEPT]; a score of 0 is none."""

    boxes: Tensor
    classes: Tensor
    scores: Tensor


def canvases(
    digits: tuple[Tensor, Tensor], pieces: Tensor, count: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Objects]:
    """Pictures [count, size, size, 1] with digits of 16 to 48 pixels, and with pieces of digits that are none."""
    device = pieces.device
    random = {"generator": generator, "device": device}
    most = len(digits[0]) // count
    sides = 16 + 32 * torch.rand(count, most, **random) ** 2
    corners = torch.rand(count, most, 2, **random) * (size - sides.unsqueeze(-1))
    boxes = torch.cat([corners, corners + sides.unsqueeze(-1)], -1)
    shown = torch.rand(count, most, **random) < 0.75
    shown &= overlap(boxes, boxes).tril(-1).amax(-1) < 0.05  # none over one drawn before it
    side = digits[0].shape[1]
    pictures = digits[0].squeeze(-1).float().view(count, most, side, side)
    canvas = _pasted(pictures * shown[..., None, None], boxes, size)
    few = len(pieces) // count
    rows, columns = torch.randint(side // 5, side - side // 5, (2, len(pieces), 1), **random)
    line = torch.arange(side, device=device)
    piece = ((line - rows).abs() < side // 7).unsqueeze(-1) & ((line - columns).abs() < side // 7).unsqueeze(-2)
    cut = (pieces.squeeze(-1) * piece).float().view(count, few, side, side)
    sides = 20 + 24 * torch.rand(count, few, 1, **random)
    corners = torch.rand(count, few, 2, **random) * (size - sides)
    canvas = torch.maximum(canvas, _pasted(cut, torch.cat([corners, corners + sides], -1), size))
    canvas = canvas + 15 * torch.randn(canvas.shape, **random)
    classes = torch.where(shown, digits[1].view(count, most), -1)
    return unit(canvas).unsqueeze(-1), Objects(boxes, classes)


def _pasted(pictures: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Pictures [n, m, side, side] into their boxes [n, m, 4] -> [n, size, size], the brightest counts."""
    n, m = pictures.shape[:2]
    middle = (boxes[..., :2] + boxes[..., 2:]) / size - 1
    scale = (boxes[..., 2:] - boxes[..., :2]) / size
    theta = torch.zeros(n, m, 2, 3, device=boxes.device)
    theta[..., 0, 0], theta[..., 1, 1] = 1 / scale[..., 0], 1 / scale[..., 1]
    theta[..., 2] = -middle / scale
    grids = F.affine_grid(theta.flatten(0, 1), [n * m, 1, size, size], align_corners=False)
    pasted = F.grid_sample(pictures.flatten(0, 1).unsqueeze(1), grids, align_corners=False)
    return pasted.view(n, m, size, size).amax(1)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes [n, i, 4] and [n, j, 4] -> [n, i, j]."""
    low, high = torch.maximum(a[:, :, None, :2], b[:, None, :, :2]), torch.minimum(a[:, :, None, 2:], b[:, None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    sizes = [(x[..., 2:] - x[..., :2]).clamp(min=0).prod(-1) for x in (a, b)]
    return both / (sizes[0][:, :, None] + sizes[1][:, None, :] - both).clamp(min=1e-6)


def _centers(side: int, size: int, device: torch.device) -> Tensor:
    """The middle of each token in pixels: [side * side, 2] as x, y."""
    line = (torch.arange(side, device=device) + 0.5) * (size / side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def assigned(objects: Objects, side: int, size: int) -> tuple[Tensor, Tensor]:
    """The class of each token [n, side * side], -1 for none, and its box; tokens near the middle of a digit are its."""
    boxes, classes = objects
    points = _centers(side, size, boxes.device)
    middle, half = (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]) / 2
    away = (points[None, :, None] - middle[:, None]).abs() / half[:, None]  # [n, tokens, objects, 2]
    far = torch.where(classes[:, None] >= 0, away.amax(-1), torch.inf)
    nearest, which = far.min(-1)
    mine = torch.where(nearest < 0.4, classes.gather(1, which), -1)
    return mine, boxes.gather(1, which.unsqueeze(-1).expand(-1, -1, 4))


def decoded(out: Tensor, size: int) -> Tensor:
    """Boxes [n, tokens, 4] of the last four outputs: distances to the sides, as logarithms of 12 pixels."""
    points = _centers(out.shape[1], size, out.device)
    distance = 12 * out.flatten(1, 2)[..., 10:].clamp(max=3).exp()
    return torch.cat([points - distance[..., :2], points + distance[..., 2:]], -1)


def box_loss(out: Tensor, objects: Objects, size: int) -> Tensor:
    """Focal loss of the classes, and one less the overlap of the boxes, for each token that is a digit's."""
    classes, boxes = assigned(objects, out.shape[1], size)
    scores = out.flatten(1, 2)[..., :10]
    wanted = F.one_hot(classes.clamp(min=0), 10).to(scores) * (classes >= 0).unsqueeze(-1)
    error = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    sure = torch.where(wanted > 0, scores.sigmoid(), 1 - scores.sigmoid())
    count = (classes >= 0).sum().clamp(min=1)
    focal = (0.5 * (1 - sure) ** 2 * error).sum() / count
    found = decoded(out, size)
    low, high = torch.maximum(found[..., :2], boxes[..., :2]), torch.minimum(found[..., 2:], boxes[..., 2:])
    both = _area(high - low)
    either = sum(_area(x[..., 2:] - x[..., :2]) for x in (found, boxes)) - both
    missed = torch.where(classes >= 0, 1 - both / either.clamp(min=1e-6), 0)  # all tokens: to choose some is to wait
    return focal + missed.sum() / count


def _area(sides: Tensor) -> Tensor:
    """[.., 2] -> [..]; the gradient of `prod` waits for the device."""
    width, height = sides.clamp(min=0).unbind(-1)
    return width * height


def found_boxes(out: Tensor, size: int) -> Found:
    """The best boxes of each picture; of those over each other and of one class, the best alone."""
    scores, classes = out.flatten(1, 2)[..., :10].sigmoid().max(-1)
    kept = min(4 * KEPT, scores.shape[1])
    scores, which = scores.topk(kept, 1)
    classes = classes.gather(1, which)
    boxes = decoded(out, size).gather(1, which.unsqueeze(-1).expand(-1, -1, 4))
    same = (overlap(boxes, boxes) > 0.5) & (classes[:, :, None] == classes[:, None, :])
    alive = scores > 0.02
    for n in range(kept - 1):
        alive[:, n + 1 :] &= ~(same[:, n, n + 1 :] & alive[:, n : n + 1])
    scores, which = (scores * alive).topk(min(KEPT, kept), 1)
    return Found(boxes.gather(1, which.unsqueeze(-1).expand(-1, -1, 4)), classes.gather(1, which), scores)


def average_precision(parts: list[tuple[Found, Objects]], threshold: float = 0.5) -> float:
    """Mean over classes of the area under precision against recall; a box counts once, for its best overlap."""
    scores: list[list[Tensor]] = [[] for _ in range(10)]
    hits: list[list[Tensor]] = [[] for _ in range(10)]
    wanted = [0] * 10
    found, objects = (type(x[0])(*(torch.cat(y) for y in zip(*x, strict=True))) for x in zip(*parts, strict=True))
    over = overlap(found.boxes, objects.boxes)
    for c in range(10):
        there = objects.classes == c
        wanted[c] += int(there.sum())
        free, mine = there.clone(), (found.classes == c) & (found.scores > 0)
        hit = torch.zeros_like(mine)
        for n in range(mine.shape[1]):  # best scores first
            best, which = (over[:, n] * free).max(-1)
            hit[:, n] = mine[:, n] & (best >= threshold)
            free[hit[:, n], which[hit[:, n]]] = False
        scores[c].append(found.scores[mine])
        hits[c].append(hit[mine])
    areas = []
    for c in range(10):
        if wanted[c]:
            order = torch.cat(scores[c]).argsort(descending=True)
            right = torch.cat(hits[c])[order].double().cumsum(0)
            precision = right / torch.arange(1, len(right) + 1, device=right.device)
            precision = precision.flip(0).cummax(0).values.flip(0)
            recall = right / wanted[c]
            steps = torch.diff(recall, prepend=recall.new_zeros(1))
            areas.append(float((steps * precision).sum()))
    return sum(areas) / max(1, len(areas))
