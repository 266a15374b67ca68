"""Collaborative filtering: groups of similar blocks are shrunk in a transform of the group, twice.

First the noisy blocks, by a threshold. Then blocks that are similar in that estimate, by a Wiener filter that takes its
squared coefficients for the signal. All groups overlap; a pixel is a mean over the groups that hold it, by weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.calls import BlockGroups
from ..spec.blocks import SIDE
from .groups import add_groups
from .pca import principal_axes


@dataclass(frozen=True)
class Pass:
    """How groups are made and shrunk; lengths in pixels.

    The first color axis is the mean of the colors, the others differences: those hold less, and are shrunk more.
    """

    step: int  # from one reference block to the next
    group: int  # blocks, a power of two; fewer where a window holds fewer
    flat: int  # where all of so many are alike; a power of two
    radius: int  # of the window around the reference block
    width: int  # features of a block
    shrink: tuple[float, float]  # of the first color axis and of the others: threshold or noise of the filter, in sigma
    colors: float  # how much differences of colors count in distances, beside their mean


# Chosen on parts of nine photographs that docs/denoise.md names.
FIRST = Pass(3, 16, 16, 16, 32, (2.9, 3.2), 0.0)
SECOND = Pass(2, 32, 128, 20, 16, (0.8, 0.9), 0.5)
ALIKE = 0.1  # squared distance of blocks that are alike, for each pixel, in units of the noise squared


def collaborative(noisy: Tensor, sigma: float) -> Tensor:
    """A picture [H, W, C] without its white noise."""
    axes = opponent(noisy)
    picture = (noisy @ axes.T).movedim(-1, 0)[None].contiguous()  # [1, C, H, W]
    guide = None
    for how in (FIRST, SECOND):
        sums = Sums.like(picture)
        sums.add(picture, guide, 0, sigma, how)
        guide = sums.mean()
    assert guide is not None
    clean: Tensor = guide[0].movedim(0, -1) @ axes
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
        self.values = values  # [frames, C, H, W]
        self.weights = weights  # [frames, C, H, W]

    @classmethod
    def like(cls, frames: Tensor) -> Sums:
        return cls(torch.zeros_like(frames), torch.zeros_like(frames))

    def mean(self) -> Tensor:
        return self.values / self.weights

    def add(
        self,
        noisy: Tensor,
        guides: Tensor | None,
        own: int,
        sigma: float,
        how: Pass,
        centers: Tensor | None = None,
        reach: int = 0,
    ) -> None:
        """Group the blocks of frame `own` with blocks like them in all frames, shrink each group, and add it.

        Args:
            noisy: frames [frames, C, H, W], in the axes of `opponent`.
            guides: estimates of them [frames, C, H, W], in which similar blocks are found and which the filter takes
                for the signal; None: the first pass, by a threshold.
            own: the frame whose blocks the groups are made for.
            sigma: of the noise.
            how: of the pass.
            centers: int64 [frames, H, W, 2], where to look for what lies at each place of frame `own`; None for one
                frame.
            reach: radius of the windows in the other frames.
        """
        frames, channels, height, width = noisy.shape
        rows, columns = (_places(n - SIDE + 1, how.step, noisy.device) for n in (height, width))
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)  # [n, m, 2]
        if centers is None:
            around = places.expand(frames, -1, -1, -1)
        else:
            around = centers[:, rows][:, :, columns]
            around[own] = places
        call = BlockGroups(
            noisy=noisy,
            guides=guides,
            features=_features(noisy if guides is None else guides, own, how),
            own=own,
            rows=rows,
            columns=columns,
            centers=around.int().contiguous(),
            radii=tuple(how.radius if n == own else reach for n in range(frames)),
            group=how.flat,
            least=how.group,
            alike=ALIKE * SIDE**2 * sigma**2,
            limits=sigma * noisy.new_tensor([how.shrink[0], *[how.shrink[1]] * (channels - 1)]),
            taper=_taper(noisy),
            values=self.values,
            weights=self.weights,
        )
        add_groups(call)


def _features(guides: Tensor, own: int, how: Pass) -> Tensor:
    """Of every block of each frame its principal components [frames, h, w, width], without an offset.

    Of the mean of the colors, and of their differences where they count.
    """
    planes = guides[:, :1] if how.colors == 0 else torch.cat([guides[:, :1], how.colors * guides[:, 1:]], 1)
    sample = F.unfold(planes[own : own + 1], SIDE, stride=3)[0].T.double()
    mean, _, axes = principal_axes(sample)
    kernel = axes[:, -how.width :].T.to(planes.dtype)
    shaped = kernel.reshape(-1, planes.shape[1], SIDE, SIDE)
    return F.conv2d(planes, shaped, -kernel @ mean.to(planes.dtype)).movedim(1, -1).contiguous()


def _places(extent: int, step: int, device: torch.device) -> Tensor:
    """Every step-th place and the last one."""
    return torch.arange(0, extent - 1 + step, step, dtype=torch.int64, device=device).clamp(max=extent - 1)


def _taper(like: Tensor) -> Tensor:
    """How much each pixel of a block counts [64]: a Kaiser window, so that no edge of a block shows."""
    line = torch.kaiser_window(SIDE, periodic=False, beta=2.0, dtype=like.dtype, device=like.device)
    return torch.outer(line, line).flatten()
