"""A picture in another format: rows and columns that show little give way, what stands out keeps its shape."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_extents, check_finite, check_floats, widened
from .saliency import saliency

STRIPS = 48  # of rows and of columns, each scaled as a whole
LEAST = 0.3  # no strip is scaled by less than this part of what plain resizing, or the source's size, would give it
SMOOTH = 0.02  # weight of differences between neighboring strips beside that of shapes
BASE = 0.02  # importance of what does not stand out at all


@torch.no_grad()
def retarget(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """A picture in another height and width in which what stands out keeps its shape, as far as there is room.

    Strips of rows and of columns are scaled, each as a whole: straight lines along them stay straight, nothing is cut
    out, doubled or folded.

    Args:
        picture: floats [H, W, C], values 0..1.
        size: (height, width) of the result.

    Returns:
        The picture [height, width, C], values in the range of the source's.

    >>> retarget(torch.rand(32, 40, 3), (32, 30)).shape
    torch.Size([32, 30, 3])
    """
    size = check_extents(size)
    check_floats(picture)
    check_finite(picture)
    check_extents(tuple(picture.shape[:2]), "picture")
    given = picture.dtype
    picture = widened(picture)
    lowest, highest = picture.aminmax()
    for axis, scales in enumerate(strips(saliency(picture), (picture.shape[0], picture.shape[1]), size)):
        picture = _stretched(picture, scales, size[axis], axis)
    return picture.clamp(lowest, highest).to(given)


def strips(importance: Tensor, old: tuple[int, int], new: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """How each strip of rows and of columns is scaled, two vectors, for what is important, 0..1 [h, w].

    The sum over all cells of (importance * (scale of its rows - scale of its columns))^2 is least, with a small weight
    on differences of neighbors: a cell of equal scales keeps its shape. Strips at the lower bound are fixed there, and
    the others solved again.
    """
    rows, columns = (min(STRIPS, seen, extent) for seen, extent in zip(importance.shape, old, strict=True))
    cells = F.adaptive_avg_pool2d(importance[None, None].double(), (rows, columns))[0, 0]
    weight = (cells.square() + BASE**2).cpu()
    matrix = torch.cat((weight.sum(1), weight.sum(0))).diag()
    matrix[:rows, rows:] = -weight
    matrix[rows:, :rows] = -weight.mT
    matrix = matrix / (weight.mean() * math.sqrt(rows * columns))
    for first, count in ((0, rows), (rows, columns)):
        step = torch.eye(count, dtype=torch.float64, device="cpu").diff(dim=0)
        matrix[first : first + count, first : first + count] += SMOOTH * count * step.mT @ step
    means = torch.tensor([new[axis] / old[axis] for axis in (0, 1)], dtype=torch.float64, device="cpu")
    mean_of = torch.zeros(2, rows + columns, dtype=torch.float64, device="cpu")
    mean_of[0, :rows] = 1 / rows
    mean_of[1, rows:] = 1 / columns
    least = LEAST * (mean_of > 0).double().mT @ means.clamp(max=1)
    scales = _least_squares(matrix, mean_of, means, least)
    return scales[:rows].to(importance), scales[rows:].to(importance)


def shape_error(importance: Tensor, rows: Tensor, columns: Tensor) -> float:
    """By how much the shape of what stands out changes: exp of the mean |log(row scale / column scale)|, less 1.

    Args:
        importance: 0..1 [h, w].
        rows, columns: scales of the strips, as `strips` gives them; one number each for a picture that is resized.
    """
    cells = F.adaptive_avg_pool2d(importance[None, None], (len(rows), len(columns)))[0, 0].square()
    change = (rows[:, None] / columns).log().abs()
    return math.expm1(float((cells * change).sum() / cells.sum().clamp(min=1e-12)))


def _least_squares(matrix: Tensor, mean_of: Tensor, means: Tensor, least: Tensor) -> Tensor:
    """x [n] of the least x' matrix x [n, n] with mean_of x = means, [m, n] and [m], and x >= least [n]."""
    fixed = torch.zeros(len(least), dtype=torch.bool, device=least.device)
    x = least.clone()
    while True:
        free = ~fixed
        count = int(free.sum())
        system = torch.zeros(count + len(means), count + len(means), dtype=x.dtype, device=x.device)
        system[:count, :count] = matrix[free][:, free] + 1e-9 * torch.eye(count, dtype=x.dtype, device=x.device)
        system[:count, count:] = mean_of[:, free].mT
        system[count:, :count] = mean_of[:, free]
        right = torch.cat((-matrix[free][:, fixed] @ least[fixed], means - mean_of[:, fixed] @ least[fixed]))
        x[free] = torch.linalg.solve(system, right)[:count]
        low = free & (x < least)
        if not bool(low.any()):
            return x
        fixed |= low
        x[low] = least[low]


def _stretched(picture: Tensor, scales: Tensor, extent: int, axis: int) -> Tensor:
    """A picture [H, W, C] whose strips along an axis, of equal extents, are scaled; `extent` pixels in the end.

    Each new pixel takes the old ones around its middle by a cubic kernel, as wide as the pixel covers.
    """
    old = picture.shape[axis]
    ends = F.pad(scales.double().cumsum(0), (1, 0))
    ends = ends * (extent / ends[-1])
    borders = torch.linspace(0, old, len(ends), dtype=torch.float64, device=picture.device)
    at = torch.arange(extent + 1, dtype=torch.float64, device=picture.device)
    strip = (torch.searchsorted(ends, at, right=True) - 1).clamp(0, len(scales) - 1)
    share = (at - ends[strip]) / (ends[strip + 1] - ends[strip])
    source = borders[strip] + share * (borders[strip + 1] - borders[strip])
    middle = (source[1:] + source[:-1]) / 2
    covered = source.diff().clamp(min=1)
    reach = math.ceil(2 * float(covered.max()))
    total = picture.new_zeros(())
    sum_of_weights = picture.new_zeros(())
    across = [1, 1, 1]
    across[axis] = extent
    for tap in range(-reach, reach + 1):
        place = middle.floor().long() + tap
        inside = (place >= 0) & (place < old)
        weight = torch.where(inside, _cubic(((place + 0.5 - middle) / covered).abs()), 0).to(picture).view(across)
        total = total + weight * picture.index_select(axis, place.clamp(0, old - 1))
        sum_of_weights = sum_of_weights + weight
    return total / sum_of_weights


def _cubic(x: Tensor) -> Tensor:
    """The cubic kernel of Keys with a = -1/2 at distances [n] >= 0."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))
