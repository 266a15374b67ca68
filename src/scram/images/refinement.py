"""Matches finer than a pixel: a flow that is affine around every pixel, moved to where the colors fit best."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .resample import own_places

STRAY = 6  # radius of the first median, which takes stray matches to those around them; of every second pixel
SMALL = 2  # radius of the later ones
FIT = 4  # radius of the windows in which the flow is affine
COLORS = 5  # radius of the windows in which colors are compared
ROUNDS = 3
NEAR = 0.5  # pixels; a flow that differs so much from the median counts a quarter in the fit
EDGE = 0.75  # pixels; a fit that differs more from the median is not taken: an edge of a surface
LEAST = 0.02  # certainty that every match has here
DAMPING = 1e-4  # of the normal equations of colors
RIDGE = 1e-3  # of those of affine flow
STEP = 1.0  # pixels that a round moves a match at most
SLOPE = (1 / 12, -8 / 12, 0.0, 8 / 12, -1 / 12)  # a derivative over five points
STRIP = 1 << 22  # values of a tensor that medians sort at once


def refined(a: Tensor, b: Tensor, place: Tensor, certainty: Tensor) -> Tensor:
    """Places in B that agree with their neighbors and fit the colors: (row, column) [H, W, 2].

    A weighted median takes stray matches to where those around them lie. Every round then moves all matches by a step
    of Lucas and Kanade: B is warped by the flow itself, so slopes and turns do not blur what is compared. Differences
    of brightness that a whole neighborhood shares do not count. Between rounds the flow becomes locally affine.

    Args:
        a, b: [H, W, C] and [H', W', C].
        place: (row, column) in B of each pixel of A [H, W, 2], finite.
        certainty: [H, W], 0..1, the weights of all means and medians.
    """
    own = own_places(*place.shape[:2]).to(place.device)
    weight = certainty + LEAST
    flow = weighted_median(place - own, weight, STRAY, 2)
    flow = _affine(flow, weight)
    picture = b.movedim(-1, 0)[None]  # [1, C, H', W']
    whole = torch.cat((picture, _slope(picture, 2), _slope(picture, 3)), 1)  # [1, 3 C, H', W']
    for _ in range(ROUNDS):
        flow = flow + _step(a.movedim(-1, 0), whole, own + flow, weight)
        flow = _affine(flow, weight)
    limit = torch.tensor(b.shape[:2], dtype=place.dtype, device=place.device) - 1
    return (own + flow).clamp(min=0).minimum(limit)


def weighted_median(x: Tensor, weight: Tensor, radius: int, step: int = 1) -> Tensor:
    """The median of each channel of x [H, W, C] in square windows, of every `step`-th point, by weights [H, W] above 0.

    >>> weighted_median(torch.tensor([[[1.0], [9.0], [2.0]]]), torch.tensor([[1.0, 1.0, 1.0]]), 1)[0, 1]
    tensor([2.])
    """
    height, width, channels = x.shape
    side = 2 * radius + 1
    points = F.pad(x.movedim(-1, 0)[None], [radius] * 4, mode="replicate")[0]  # [C, H + 2 r, W + 2 r]
    weights = F.pad(weight, [radius] * 4)  # [H + 2 r, W + 2 r]
    out = torch.empty_like(x)
    count = len(range(0, side, step)) ** 2
    lines = max(1, STRIP // (count * width))

    def windows(part: Tensor) -> Tensor:
        """[h + 2 r, W + 2 r] -> [h, W, count]."""
        return part.unfold(0, side, 1).unfold(1, side, 1)[..., ::step, ::step].flatten(2)

    for top in range(0, height, lines):
        part = slice(top, min(top + lines, height) + 2 * radius)
        near = windows(weights[part])
        for channel in range(channels):
            values, order = windows(points[channel, part]).sort(-1)  # [h, W, count]
            passed = near.gather(-1, order).cumsum(-1)
            middle = (passed < passed[..., -1:] / 2).sum(-1, keepdim=True)
            out[top : top + lines, :, channel] = values.gather(-1, middle.clamp(max=count - 1))[..., 0]
    return out


def _affine(flow: Tensor, weight: Tensor) -> Tensor:
    """At each pixel the affine function that fits the flow [H, W, 2] around it best, or at edges a median."""
    median = weighted_median(flow, weight, SMALL)
    stray = ((flow - median) / NEAR).square().sum(-1)
    weight = weight / (1 + stray).square()  # [H, W]
    maps = torch.cat((weight[None], weight * flow.movedim(-1, 0)))[:, None]  # [3, 1, H, W]
    at = torch.arange(-FIT, FIT + 1, dtype=flow.dtype, device=flow.device) / FIT
    powers = torch.stack((torch.ones_like(at), at, at.square()))[:, None]  # [3, 1, side]
    down = F.conv2d(maps, powers.unsqueeze(-1), padding=(FIT, 0))  # [3, 3, H, W]
    sums = F.conv2d(down.flatten(0, 1)[:, None], powers.unsqueeze(-2), padding=(0, FIT))
    sums = sums.reshape(3, 3, *sums.shape[1:])
    one, ys, xs = sums[:, 0, 0], sums[:, 1, 0], sums[:, 0, 1]  # [3, H, W] each: of the weight and of both channels
    total, y, x = one[0], ys[0], xs[0]
    yy, yx, xx = sums[0, 2, 0] + RIDGE * total, sums[0, 1, 1], sums[0, 0, 2] + RIDGE * total
    # The first row of the inverse: of the fit only its value in the middle is needed.
    row = yy * xx - yx * yx, x * yx - y * xx, y * yx - x * yy
    fit = (row[0] * one + row[1] * ys + row[2] * xs)[1:] / (row[0] * total + row[1] * y + row[2] * x)
    fit = fit.movedim(0, -1)
    smooth = (fit - median).norm(dim=-1, keepdim=True) <= EDGE
    return torch.where(smooth, fit, median)


def _step(a: Tensor, b: Tensor, place: Tensor, weight: Tensor) -> Tensor:
    """How far the matches of a [C, H, W] move in b [1, 3 C, H', W'], which holds colors and slopes: [H, W, 2]."""
    extent = torch.tensor(b.shape[2:], dtype=place.dtype, device=place.device)
    grid = ((2 * place + 1) / extent - 1).flip(-1)[None]
    colors, down, right = F.grid_sample(b, grid, mode="bicubic", padding_mode="border", align_corners=False)[0].chunk(3)
    weight = weight * ((place >= 0) & (place <= extent - 1)).all(-1)  # [H, W]
    missing = a - colors
    around = _blurred(torch.cat((missing * weight, weight[None])), 2 * COLORS)
    missing = missing - around[:-1] / (around[-1] + 1e-6)
    products = ((down, down), (down, right), (right, right), (down, missing), (right, missing))
    sums = torch.stack([(one * other).sum(0) for one, other in products])  # [5, H, W]
    mean = _blurred(torch.cat((sums * weight, weight[None])), COLORS)
    yy, yx, xx, y, x = mean[:-1] / (mean[-1] + 1e-6)
    yy, xx = yy + DAMPING, xx + DAMPING
    move = torch.stack((xx * y - yx * x, yy * x - yx * y), -1) / (yy * xx - yx * yx).unsqueeze(-1)
    length: Tensor = move.norm(dim=-1, keepdim=True)
    shorter: Tensor = move * (STEP / length.clamp(min=STEP))
    return shorter


def _blurred(x: Tensor, radius: int) -> Tensor:
    """Means of x [C, H, W] by a Gaussian of half the radius; 0 beyond the border."""
    at = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device)
    kernel = torch.exp(-2 * (at / radius).square())[None, None]  # [1, 1, side]
    kernel = kernel / kernel.sum()
    down = F.conv2d(x[:, None], kernel.unsqueeze(-1), padding=(radius, 0))
    return F.conv2d(down, kernel.unsqueeze(-2), padding=(0, radius))[:, 0]


def _slope(x: Tensor, axis: int) -> Tensor:
    """The derivative of x [1, C, H, W] along axis 2 or 3."""
    last = x.movedim(axis, -1)  # [1, C, ., n]
    kernel = x.new_tensor(SLOPE)[None, None]
    flat = F.pad(last.reshape(-1, 1, last.shape[-1]), (2, 2), mode="replicate")
    return F.conv1d(flat, kernel).reshape(last.shape).movedim(-1, axis)
