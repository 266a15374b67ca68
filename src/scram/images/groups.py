"""Groups of similar blocks in torch, where the kernels of a CPU do not serve: the meaning of a BlockGroups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.calls import BlockGroups
from ..core.correlation import box_scores
from ..engines import dispatch
from ..spec.blocks import PIXELS, SIDE, cosine, haar, spline

STRIP_BYTES = 1 << 28  # of scores and coefficients that are in memory at once, about
CHUNK_NUMBERS = 1 << 25  # of groups that are shrunk together
SCORE_NUMBERS = 1 << 20  # of scores that are made together


def add_groups(call: BlockGroups) -> None:
    """By the engine that serves the device."""
    if dispatch.choose("auto", call.noisy.device, call.noisy.dtype).name == "numba":
        from ..engines.cpu import collaborate

        collaborate.add_groups(call)
    else:
        add_groups_by_torch(call)


def add_groups_by_torch(call: BlockGroups) -> None:
    """Strip by strip: coefficients of all blocks at once, groups as rows of them, sums of coefficients, then pixels."""
    frames, channels, _, width = call.noisy.shape
    line = (spline() if call.guides is None else cosine()).to(call.noisy)
    forward = torch.kron(line, line)  # [64, 64]
    back = torch.linalg.inv(forward.double()).to(call.noisy)
    unit = call.limits[:, None, None]  # what is compared with the limit is divided by it: then 1 serves all channels
    for top, bottom, groups in _groups(call):
        lines = bottom - top + SIDE - 1

        def coefficients(pictures: Tensor, top: int = top, lines: int = lines) -> Tensor:
            planes = pictures[:, :, top : top + lines] / unit  # [frames, C, lines, W]
            made = F.conv2d(planes.flatten(0, 1).unsqueeze(1), forward.reshape(-1, 1, SIDE, SIDE))
            made = made.reshape(frames, channels, PIXELS, -1)
            return made.permute(0, 3, 1, 2).reshape(-1, channels * PIXELS)  # [keys, C * 64]

        blocks = coefficients(call.noisy)
        signal = None if call.guides is None else coefficients(call.guides)
        values = torch.zeros_like(blocks)
        weights = blocks.new_zeros(len(blocks), channels)
        for index in groups:  # int64 [n, size]
            size = index.shape[1]
            mix = haar(size).to(blocks)
            for part in torch.split(index, max(1, CHUNK_NUMBERS // (size * channels * PIXELS))):
                key = part.T.flatten()  # one product serves all groups: their blocks lie side by side
                shape = (size, len(part), channels, PIXELS)
                y = (mix @ blocks.index_select(0, key).reshape(size, -1)).reshape(shape)
                if signal is None:
                    gain = (y.abs() > 1).to(y.dtype)
                else:
                    energy = (mix @ signal.index_select(0, key).reshape(size, -1)).square_().reshape(shape)
                    gain = energy.div_(energy + 1)
                y.mul_(gain)
                weight = 1 / gain.square_().sum((0, 3)).clamp(min=1)  # [n, C]
                made = (mix.T @ y.reshape(size, -1)).reshape(shape).mul_(weight.unsqueeze(-1))
                values.index_add_(0, key, made.reshape(len(key), -1))
                weights.index_add_(0, key, weight.repeat(size, 1))
        pixels = (values.reshape(-1, PIXELS) @ back.T).reshape(-1, channels, PIXELS) * call.taper  # [keys, C, 64]
        shares = weights.unsqueeze(-1) * call.taper
        for n, parts in enumerate(zip(pixels.chunk(frames), shares.chunk(frames), strict=True)):
            value, weight = (F.fold(x.permute(1, 2, 0), (lines, width), SIDE)[:, 0] for x in parts)  # [C, lines, W]
            call.values[n, :, top : top + lines] += value * unit
            call.weights[n, :, top : top + lines] += weight


def _groups(call: BlockGroups) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Strip by strip: its first line of blocks, the one after the last, and groups by their size.

    A group is a row of an int64 tensor [n, size]: blocks, numbered row-major within the strip of all frames.
    """
    frames, height, width = call.features.shape[:3]
    square = call.features.square().sum(-1, keepdim=True)
    keys = torch.cat([call.features, -square], -1)[:, None, None]  # [frames, 1, 1, h, w, D + 1]
    boxes = [(min(2 * r + 1, height), min(2 * r + 1, width)) for r in call.radii]
    places = sum(h * w for h, w in boxes)
    numbers = len(call.columns) * places + 4 * frames * width * PIXELS * call.noisy.shape[1]
    lines = max(1, STRIP_BYTES // (4 * numbers))
    each = max(1, SCORE_NUMBERS // (len(call.columns) * places))  # lines of groups scored at a time
    most = 1 << min(call.group, places).bit_length() - 1
    for strip in torch.split(torch.arange(len(call.rows), device=call.rows.device), lines):
        found = []
        for some in torch.split(strip, each):
            scores, names, corners = _scored(call, keys, some, boxes)
            near, chosen = scores.topk(most, -1)  # [n, m, most]
            own = square[call.own, call.rows[some]][:, call.columns]  # [n, m, 1]
            found.append((names.gather(-1, chosen).flatten(0, 1), (own - near).flatten(0, 1), corners))
        best, distance, corners = (torch.cat(parts) for parts in zip(*found, strict=True))
        extents = corners.new_tensor([h for h, _ in boxes])  # [frames]
        top = int(corners.min())
        bottom = int((corners + extents).max())
        frame, place = best // (height * width), best % (height * width)
        index = frame * (bottom - top) * width + place - top * width
        size = torch.full_like(best[:, 0], most)
        for _ in range(most.bit_length()):
            too_far = distance.gather(1, size[:, None] - 1)[:, 0] > call.alike
            size = torch.where(too_far & (size > call.least), size // 2, size)
        yield top, bottom, [index[size == n, :n] for n in torch.unique(size).tolist()]


def _scored(
    call: BlockGroups, keys: Tensor, lines: Tensor, boxes: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some lines of groups: 2 q.k - |k|^2 of all blocks at hand and which they are [n, m, places], and the first
    line of their windows [n * m, frames]. Blocks are numbered row-major within all frames."""
    frames, height, width = call.features.shape[:3]
    q = call.features[call.own, call.rows[lines]][:, call.columns]
    q = torch.cat([2 * q, torch.ones_like(q[..., :1])], -1)[None, None]  # [1, 1, n, m, D + 1]
    scores = []
    names = []
    corners = []
    for n in [call.own, *(n for n in range(frames) if n != call.own)]:
        box = boxes[n]
        limit = lines.new_tensor([height - box[0], width - box[1]])
        center = call.centers[n, lines].long()  # [n, m, 2]
        corner = torch.minimum((center - call.radii[n]).clamp(min=0), limit)
        score = box_scores(q, keys[n], corner[None, None], box)[0, 0]  # [n, m, places]
        within = torch.arange(box[0] * box[1], device=lines.device)
        row = corner[..., :1] + within // box[1]
        column = corner[..., 1:] + within % box[1]
        if n == call.own:  # the block itself comes first, also among others that are equal
            itself = (row == call.rows[lines][:, None, None]) & (column == call.columns[:, None])
            score = score.masked_fill(itself, torch.inf)
        scores.append(score)
        names.append((n * height + row) * width + column)
        corners.append((n, corner[..., 0].flatten()))
    ordered = [corner for _, corner in sorted(corners, key=lambda both: both[0])]
    return torch.cat(scores, -1), torch.cat(names, -1), torch.stack(ordered, -1)
