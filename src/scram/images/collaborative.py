"""Collaborative filtering: groups of similar blocks are shrunk in a transform of the group, twice.

First the noisy blocks, by a threshold. Then blocks that are similar in that estimate, by a Wiener filter that takes its
squared coefficients for the signal. All groups overlap; a pixel is a mean over the groups that hold it, by weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.correlation import box_scores
from .pca import principal_axes

SIDE = 8  # of a block
PIXELS = SIDE**2
STRIP_BYTES = 1 << 28  # of scores and coefficients that are in memory at once, about
CHUNK_NUMBERS = 1 << 18  # of groups that are taken together: they stay in the second cache
GPU_CHUNK_NUMBERS = 1 << 25
SCORE_NUMBERS = 1 << 20  # of scores that are made together


@dataclass(frozen=True)
class Pass:
    """How groups are made and shrunk; lengths in pixels, distances squared and for each pixel, values in 0..1.

    The first color axis is the mean of the colors, the others differences: those hold less, and are shrunk more.
    """

    step: int  # from one reference block to the next
    group: int  # blocks at most, a power of two
    radius: int  # of the window around the reference block
    width: int  # features of a block
    farthest: float  # distance of a block from its reference at most, beside that of the noise
    noise: float  # and the share of the expected distance of two noisy twins, 2 sigma^2, that is added to it
    shrink: tuple[float, float]  # of the first color axis and of the others: threshold or noise of the filter, in sigma


# Chosen on parts of 256 x 256 of scikit-image's camera, astronaut and coffee.
FIRST = Pass(3, 16, 16, 64, 0.0154, 1.6, (2.9, 3.2))
SECOND = Pass(2, 32, 12, 24, 0.0123, 0.0, (0.9, 1.1))


def collaborative(noisy: Tensor, sigma: float) -> Tensor:
    """A picture [H, W, C] without its white noise."""
    axes = opponent(noisy)
    picture = noisy @ axes.T  # [H, W, C]
    basic = Sums.like(picture)
    add_groups([picture], None, 0, sigma, FIRST, [basic])
    result = Sums.like(picture)
    add_groups([picture], [basic.mean()], 0, sigma, SECOND, [result])
    clean: Tensor = result.mean() @ axes
    return clean


def opponent(picture: Tensor) -> Tensor:
    """Orthonormal axes of colors [C, C], so that noise stays white; the mean of the colors is the first."""
    if picture.shape[-1] == 1:
        return picture.new_ones(1, 1)
    rows = picture.new_tensor([[1, 1, 1], [1, 0, -1], [1, -2, 1]])
    return F.normalize(rows)


class Sums:
    """Blocks added up with their weights, for each pixel."""

    def __init__(self, values: Tensor, weights: Tensor) -> None:
        self.values = values  # [H, W, C]
        self.weights = weights  # [H, W, C]

    @classmethod
    def like(cls, picture: Tensor) -> Sums:
        return cls(torch.zeros_like(picture), torch.zeros_like(picture))

    def mean(self) -> Tensor:
        return self.values / self.weights


def add_groups(
    noisy: Sequence[Tensor],
    guides: Sequence[Tensor] | None,
    own: int,
    sigma: float,
    how: Pass,
    sums: Sequence[Sums],
    centers: Sequence[Tensor] | None = None,
    reach: int = 0,
) -> None:
    """Group the blocks of frame `own` with blocks like them in all frames, shrink each group, and add it to `sums`.

    Args:
        noisy: frames [H, W, C], in the axes of `opponent`.
        guides: estimates of them, in which similar blocks are found and which the filter takes for the signal; None:
            the first pass, by a threshold.
        own: the frame whose blocks the groups are made for.
        sigma: of the noise.
        how: of the pass.
        sums: of each frame.
        centers: int64 [h, w, 2] for each frame, where to look for what lies at each place of frame `own`; None for one
            frame.
        reach: radius of the windows in the other frames.
    """
    picture = noisy[own]
    width, channels = picture.shape[1:]
    line = spline(picture) if guides is None else cosine(picture)
    forward = torch.kron(line, line)  # [64, 64]
    back = torch.linalg.inv(forward.double()).to(picture.dtype)
    # What is compared with the noise is divided by it, for each color axis: then one number serves all.
    unit = sigma * picture.new_tensor([how.shrink[0], *[how.shrink[1]] * (channels - 1)])  # [C]
    taper = _taper(picture)  # [64]
    most = GPU_CHUNK_NUMBERS if picture.is_cuda else CHUNK_NUMBERS
    for top, bottom, groups in _groups(guides or noisy, own, sigma, how, centers, reach, channels):
        lines = bottom - top + SIDE - 1

        def coefficients(frames: Sequence[Tensor], top: int = top, lines: int = lines) -> Tensor:
            planes = torch.stack([x[top : top + lines] / unit for x in frames]).movedim(-1, 1)  # [frames, C, lines, W]
            made = F.conv2d(planes.flatten(0, 1).unsqueeze(1), forward.reshape(-1, 1, SIDE, SIDE))
            made = made.reshape(len(frames), channels, PIXELS, -1)
            return made.permute(0, 3, 1, 2).reshape(-1, channels * PIXELS)  # [keys, C * 64]

        blocks = coefficients(noisy)
        signal = None if guides is None else coefficients(guides)
        values = torch.zeros_like(blocks)
        weights = blocks.new_zeros(len(blocks), channels)
        for index in groups:  # int64 [n, size]
            size = index.shape[1]
            mix = haar(size, picture)
            for part in torch.split(index, max(1, most // (size * channels * PIXELS))):
                key = part.T.flatten()  # one product serves all groups: their blocks lie side by side
                shape = (size, len(part), channels, PIXELS)
                y = (mix @ blocks.index_select(0, key).reshape(size, -1)).reshape(shape)
                if signal is None:
                    gain = y.abs().sub_(1).sign_().clamp_(min=0)  # far quicker than to compare
                else:
                    energy = (mix @ signal.index_select(0, key).reshape(size, -1)).square_().reshape(shape)
                    gain = energy.div_(energy + 1)
                y.mul_(gain)
                weight = 1 / gain.square_().sum((0, 3)).clamp(min=1)  # [n, C]
                made = (mix.T @ y.reshape(size, -1)).reshape(shape).mul_(weight.unsqueeze(-1))
                values.index_add_(0, key, made.reshape(len(key), -1))
                weights.index_add_(0, key, weight.repeat(size, 1))
        pixels = (values.reshape(-1, PIXELS) @ back.T).reshape(-1, channels, PIXELS) * taper  # [keys, C, 64]
        shares = weights.unsqueeze(-1) * taper
        for n, parts in enumerate(zip(pixels.chunk(len(noisy)), shares.chunk(len(noisy)), strict=True)):
            value, weight = (F.fold(x.permute(1, 2, 0), (lines, width), SIDE)[:, 0].movedim(0, -1) for x in parts)
            sums[n].values[top : top + lines] += value * unit  # [lines, W, C]
            sums[n].weights[top : top + lines] += weight


def _groups(
    guides: Sequence[Tensor],
    own: int,
    sigma: float,
    how: Pass,
    centers: Sequence[Tensor] | None,
    reach: int,
    channels: int,
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Strip by strip: its first line of blocks, the one after the last, and groups by their size.

    A group is a row of an int64 tensor [n, size]: blocks, numbered row-major within the strip of all frames, the
    nearest first. Sizes are powers of two.
    """
    keys = _features(guides, own, how.width)  # each [1, 1, h, w, width + 1]
    height, width = keys[own].shape[2:4]
    rows, columns = (_places(n, how.step, keys[own].device) for n in (height, width))
    radii = [how.radius if n == own else reach for n in range(len(guides))]
    boxes = [(min(2 * r + 1, height), min(2 * r + 1, width)) for r in radii]
    numbers = len(columns) * sum(h * w for h, w in boxes)  # scores of a line of groups
    numbers += 4 * how.step * len(guides) * width * PIXELS * channels
    lines = max(1, STRIP_BYTES // (4 * numbers))
    farthest = PIXELS * (how.farthest + how.noise * 2 * sigma**2)
    each = max(1, SCORE_NUMBERS // (len(columns) * sum(h * w for h, w in boxes)))  # lines of groups scored at a time
    size = 1 << min(how.group, sum(h * w for h, w in boxes)).bit_length() - 1
    for strip in torch.split(rows, lines):
        found = []
        for some in torch.split(strip, each):
            q = keys[own][0, 0, some][:, columns]  # [n, m, width + 1]
            square = -q[..., -1:]
            q = torch.cat([2 * q[..., :-1], torch.ones_like(square)], -1)
            place = torch.stack(torch.meshgrid(some, columns, indexing="ij"), -1)  # [n, m, 2]
            scores = []
            corners = []
            for n, (key, radius, box) in enumerate(zip(keys, radii, boxes, strict=True)):
                center = place if centers is None or n == own else centers[n][place[..., 0], place[..., 1]]
                limit = place.new_tensor([height - box[0], width - box[1]])
                corner = torch.minimum((center - radius).clamp(min=0), limit)
                score = box_scores(q[None, None], key, corner[None, None], box)[0, 0]  # [n, m, places]
                if n == own:  # the block itself comes first, also among others that are equal
                    offset = (place - corner)[..., :1] * box[1] + (place - corner)[..., 1:]
                    score.scatter_(-1, offset, torch.inf)
                scores.append(score)
                corners.append(corner)
            near, best = (scores[0] if len(scores) == 1 else torch.cat(scores, -1)).topk(size, -1)  # [n, m, size]
            count = (near - square >= -farthest).sum(-1).clamp(min=1)  # [n, m]
            found.append((best.flatten(0, 1), count.flatten(), torch.stack(corners, 2).flatten(0, 1)))
        best, count, corner = (torch.cat(parts) for parts in zip(*found, strict=True))  # corner: [n * m, frames, 2]
        extents = corner.new_tensor(boxes)  # [frames, 2]
        top = int(corner[..., 0].min())
        bottom = int((corner[..., 0] + extents[:, 0]).max())
        index = torch.zeros_like(best)
        begin = 0
        for n, box in enumerate(boxes):
            inside = best - begin
            row = corner[:, n, :1] + inside.div(box[1], rounding_mode="floor") - top
            column = corner[:, n, 1:] + inside % box[1]
            here = (inside >= 0) & (inside < box[0] * box[1])
            index = torch.where(here, (n * (bottom - top) + row) * width + column, index)
            begin += box[0] * box[1]
        sizes = [(count >= 2**n) & (count < 2 ** (n + 1)) for n in range(size.bit_length())]
        yield top, bottom, [index[ok, : 2**n] for n, ok in enumerate(sizes) if bool(ok.any())]


def _features(guides: Sequence[Tensor], own: int, width: int) -> list[Tensor]:
    """Of every block of each frame its principal components and minus their square, [1, 1, h, w, width + 1].

    Of the mean of the colors alone, and without an offset: none changes a distance.
    """
    planes = torch.stack([guide[..., 0] for guide in guides]).unsqueeze(1)  # [frames, 1, H, W]
    sample = F.unfold(planes[own : own + 1], SIDE, stride=3)[0].T.double()
    mean, _, axes = principal_axes(sample)
    kernel = axes[:, -width:].T.to(planes.dtype)
    found = F.conv2d(planes, kernel.reshape(-1, 1, SIDE, SIDE), -kernel @ mean.to(planes.dtype)).movedim(1, -1)
    found = torch.cat([found, -found.square().sum(-1, keepdim=True)], -1).contiguous()
    return [one[None, None] for one in found]


def _places(extent: int, step: int, device: torch.device) -> Tensor:
    """Every step-th place and the last one."""
    return torch.arange(0, extent - 1 + step, step, device=device).clamp(max=extent - 1)


def cosine(like: Tensor) -> Tensor:
    """The orthonormal cosine transform of a line of a block [8, 8], one function a row."""
    n = torch.arange(SIDE, dtype=torch.float64)
    made = torch.cos(math.pi * (n + 0.5) * n[:, None] / SIDE) * math.sqrt(2 / SIDE)
    made[0] /= math.sqrt(2)
    return made.to(like)


def spline(like: Tensor) -> Tensor:
    """A biorthogonal spline wavelet transform of a line of a block [8, 8], one function a row, each of unit length.

    Details are differences of two neighbors; means are taken by ten taps, so that a ramp is told by few numbers.
    """
    low = torch.tensor([3.0, -3, -22, 22, 128, 128, 22, -22, -3, 3], dtype=torch.float64)
    made = torch.eye(SIDE, dtype=torch.float64)
    n = SIDE
    while n > 1:
        half = n // 2
        level = torch.zeros(n, n, dtype=torch.float64)
        for i in range(half):
            for tap in range(len(low)):
                level[i, (2 * i + tap - 4) % n] += low[tap] / 128
            level[half + i, 2 * i] = 1
            level[half + i, 2 * i + 1] = -1
        made = torch.cat([level @ made[:n], made[n:]])
        n = half
    return F.normalize(made).to(like)


def haar(size: int, like: Tensor) -> Tensor:
    """The orthonormal Haar transform [size, size] of a power of two, one function a row."""
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < size:
        means = made.repeat_interleave(2, 1)
        steps = torch.kron(torch.eye(len(made), dtype=torch.float64), made.new_tensor([[1, -1]]))
        made = torch.cat([means, steps]) / math.sqrt(2)
    return made.to(like)


def _taper(like: Tensor) -> Tensor:
    """How much each pixel of a block counts [64]: a Kaiser window, so that no edge of a block shows."""
    line = torch.kaiser_window(SIDE, periodic=False, beta=2.0, dtype=like.dtype, device=like.device)
    return torch.outer(line, line).flatten()
