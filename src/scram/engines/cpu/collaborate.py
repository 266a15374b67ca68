"""Groups of similar blocks on a CPU: found, shrunk in a transform of the group, and added up; strips run in parallel.

The sums do not depend on the number of threads: every strip of groups has sums of its own, added in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.calls import BlockGroups
from ...spec.blocks import PIXELS, SIDE, cosine, spline
from .compiled import compiled
from .layout import Array
from .threads import in_one_pool, parallel, threads

SLAB_BYTES = 1 << 27  # of the sums of strips that run together, about
LINES = 6  # lines of groups of a strip
TALL = 48  # pixels of a strip at most, so that it has few lines where groups lie far apart
HALF_ROOT = np.float32(0.5**0.5)
ONE = np.float32(1)
NAME = np.int64(2**32 - 1)


class Blocks(NamedTuple):
    """A BlockGroups as the kernels read it."""

    noisy: Array  # [frames, C, H, W]
    guide: Array  # [frames, C, H, W]
    features: Array  # [frames, h * w, D]
    rows: Array  # int64 [n], lines that groups are made for
    columns: Array  # int64 [m]
    centers: Array  # int32 [frames, n, m, 2]
    order: Array  # int64 [frames], the frame whose blocks groups are made for comes first
    radii: Array  # int64 [frames]
    group: int
    least: int
    alike: np.float32
    limits: Array  # [C]
    taper: Array  # [64]
    guided: bool


class Slabs(NamedTuple):
    """The sums of strips: of each the lines of all frames that its groups may hold, one frame after the other."""

    first: Array  # int64 [strips], line of groups
    last: Array  # int64 [strips], the line after the last
    shift: Array  # int64 [strips, frames], from a line of a frame to that of the slab
    values: Array  # [strips, C, lines, W]
    weights: Array  # [strips, C, lines, W]
    # Where the strips work:
    best: Array  # int64 [strips, group], distances and names
    member: Array  # int64 [strips, group, 3], blocks as (frame, row, column)
    y: Array  # [strips, group, 64]
    signal: Array  # [strips, group, 64]
    taper: Array  # [strips, 64]


@in_one_pool
def add_groups(call: BlockGroups) -> None:
    frames = range(len(call.noisy))
    order = [call.own, *(n for n in frames if n != call.own)]
    blocks = Blocks(
        noisy=call.noisy.numpy(),
        guide=(call.noisy if call.guides is None else call.guides).numpy(),
        features=call.features.flatten(1, 2).numpy(),
        rows=call.rows.numpy(),
        columns=call.columns.numpy(),
        centers=call.centers.numpy(),
        order=np.array(order, np.int64),
        radii=np.array(call.radii, np.int64),
        group=call.group,
        least=call.least,
        alike=np.float32(call.alike),
        limits=call.limits.numpy(),
        taper=call.taper.numpy(),
        guided=call.guides is not None,
    )
    values = call.values.numpy()
    weights = call.weights.numpy()
    channels, _, width = blocks.noisy.shape[1:]
    with threads():
        for batch in _batches(blocks, channels * width):
            low, high = _extents(blocks, batch)  # [strips, frames] each
            offset = np.cumsum(high - low, 1) - (high - low)
            lines = int((high - low).sum(1).max())
            made = np.zeros((2, len(batch), channels, lines, width), np.float32)
            first, last = np.array(batch, np.int64).T.copy()
            slabs = Slabs(
                first=first,
                last=last,
                shift=offset - low,
                values=made[0],
                weights=made[1],
                best=np.empty((len(batch), blocks.group), np.int64),
                member=np.empty((len(batch), blocks.group, 3), np.int64),
                y=np.empty((len(batch), blocks.group, PIXELS), np.float32),
                signal=np.empty((len(batch), blocks.group, PIXELS), np.float32),
                taper=np.empty((len(batch), PIXELS), np.float32),
            )
            _strips(len(batch), blocks, slabs)
            for strip in range(len(batch)):
                for n in frames:
                    begin, end = low[strip, n], high[strip, n]
                    part = slice(offset[strip, n], offset[strip, n] + end - begin)
                    values[n][:, begin:end] += slabs.values[strip, :, part]
                    weights[n][:, begin:end] += slabs.weights[strip, :, part]


def _batches(blocks: Blocks, numbers: int) -> list[list[tuple[int, int]]]:
    """Strips as (first line of groups, line after the last), as many together as `SLAB_BYTES` hold."""
    step = int(blocks.rows[1] - blocks.rows[0]) if len(blocks.rows) > 1 else 1
    lines = max(1, min(LINES, TALL // step))
    strips = [(n, min(n + lines, len(blocks.rows))) for n in range(0, len(blocks.rows), lines)]
    tall = lines * step + int((2 * blocks.radii + SIDE).max())
    most = max(1, SLAB_BYTES // (8 * numbers * tall * len(blocks.noisy)))
    return [strips[n : n + most] for n in range(0, len(strips), most)]


def _extents(blocks: Blocks, strips: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """The first line of each frame that the groups of each strip may hold, and the one after the last."""
    height = blocks.noisy.shape[2]
    most = height - SIDE + 1  # lines of blocks
    low = np.empty((len(strips), len(blocks.noisy)), np.int64)
    high = np.empty_like(low)
    for n, (first, last) in enumerate(strips):
        centers = blocks.centers[:, first:last, :, 0]  # [frames, lines, m]
        sides = np.minimum(2 * blocks.radii + 1, most)
        low[n] = np.clip(centers.min((1, 2)) - blocks.radii, 0, most - sides)
        high[n] = np.clip(centers.max((1, 2)) - blocks.radii, 0, most - sides) + sides + SIDE - 1
    return low, high


def _two_sided(matrix: Array):  # type: ignore[no-untyped-def]
    """A kernel of x -> matrix @ x @ matrix.T of the first blocks of x [blocks, 64], in place.

    Constants, written out: else the compiler takes the elements of a block one by one.
    """
    a = np.ascontiguousarray(matrix, np.float32)
    b = np.ascontiguousarray(a.T)

    @compiled
    def transform(x, size):
        for g in range(size):
            for j in range(8):
                x0, x1, x2, x3 = x[g, j], x[g, 8 + j], x[g, 16 + j], x[g, 24 + j]
                x4, x5, x6, x7 = x[g, 32 + j], x[g, 40 + j], x[g, 48 + j], x[g, 56 + j]
                y0 = a[0, 0] * x0 + a[0, 1] * x1 + a[0, 2] * x2 + a[0, 3] * x3
                y1 = a[1, 0] * x0 + a[1, 1] * x1 + a[1, 2] * x2 + a[1, 3] * x3
                y2 = a[2, 0] * x0 + a[2, 1] * x1 + a[2, 2] * x2 + a[2, 3] * x3
                y3 = a[3, 0] * x0 + a[3, 1] * x1 + a[3, 2] * x2 + a[3, 3] * x3
                y4 = a[4, 0] * x0 + a[4, 1] * x1 + a[4, 2] * x2 + a[4, 3] * x3
                y5 = a[5, 0] * x0 + a[5, 1] * x1 + a[5, 2] * x2 + a[5, 3] * x3
                y6 = a[6, 0] * x0 + a[6, 1] * x1 + a[6, 2] * x2 + a[6, 3] * x3
                y7 = a[7, 0] * x0 + a[7, 1] * x1 + a[7, 2] * x2 + a[7, 3] * x3
                x[g, j] = y0 + a[0, 4] * x4 + a[0, 5] * x5 + a[0, 6] * x6 + a[0, 7] * x7
                x[g, 8 + j] = y1 + a[1, 4] * x4 + a[1, 5] * x5 + a[1, 6] * x6 + a[1, 7] * x7
                x[g, 16 + j] = y2 + a[2, 4] * x4 + a[2, 5] * x5 + a[2, 6] * x6 + a[2, 7] * x7
                x[g, 24 + j] = y3 + a[3, 4] * x4 + a[3, 5] * x5 + a[3, 6] * x6 + a[3, 7] * x7
                x[g, 32 + j] = y4 + a[4, 4] * x4 + a[4, 5] * x5 + a[4, 6] * x6 + a[4, 7] * x7
                x[g, 40 + j] = y5 + a[5, 4] * x4 + a[5, 5] * x5 + a[5, 6] * x6 + a[5, 7] * x7
                x[g, 48 + j] = y6 + a[6, 4] * x4 + a[6, 5] * x5 + a[6, 6] * x6 + a[6, 7] * x7
                x[g, 56 + j] = y7 + a[7, 4] * x4 + a[7, 5] * x5 + a[7, 6] * x6 + a[7, 7] * x7
            for i in range(0, PIXELS, 8):
                x0, x1, x2, x3 = x[g, i], x[g, i + 1], x[g, i + 2], x[g, i + 3]
                x4, x5, x6, x7 = x[g, i + 4], x[g, i + 5], x[g, i + 6], x[g, i + 7]
                for j in range(8):
                    y = x0 * b[0, j] + x1 * b[1, j] + x2 * b[2, j] + x3 * b[3, j]
                    x[g, i + j] = y + x4 * b[4, j] + x5 * b[5, j] + x6 * b[6, j] + x7 * b[7, j]

    return transform


_cosine = _two_sided(cosine().numpy())
_cosine_back = _two_sided(cosine().T.numpy())
_spline = _two_sided(spline().numpy())
_spline_back = _two_sided(spline().inverse().numpy())


@compiled
def _haar(x, size, back):
    """The orthonormal Haar transform along the blocks of x [size, 64] in place, coefficients in an order of its own."""
    step = size // 2 if back else 1
    while 1 <= step < size:
        for g in range(0, size, 2 * step):
            for j in range(PIXELS):
                a = x[g, j]
                b = x[g + step, j]
                x[g, j] = (a + b) * HALF_ROOT
                x[g + step, j] = (a - b) * HALF_ROOT
        step = step // 2 if back else 2 * step


@compiled
def _distance(features, frame, i, other, j):
    total = np.float32(0)
    for d in range(features.shape[2]):
        difference = features[frame, i, d] - features[other, j, d]
        total += difference * difference
    return total


@compiled
def _put(best, count, most, key):
    """Put a key into the sorted first `count` of best, which holds `most`; how many there are then."""
    low = 1  # the block itself stays first
    high = count
    while low < high:
        middle = (low + high) // 2
        if best[middle] > key:
            high = middle
        else:
            low = middle + 1
    last = min(count, most - 1)
    for n in range(last, low, -1):
        best[n] = best[n - 1]
    best[low] = key
    return last + 1


@compiled
def _group(blocks, line, place, best, member):
    """The blocks nearest to one, itself first, into member [group, 3] as (frame, row, column); how many: 2^n.

    What is sorted is one number a block: the bits of its distance, which order as distances do, above its name.
    """
    height = blocks.noisy.shape[2] - SIDE + 1
    width = blocks.noisy.shape[3] - SIDE + 1
    own = blocks.order[0]
    itself = blocks.rows[line] * width + blocks.columns[place]
    best[0] = own * height * width + itself
    count = 1
    for frame in blocks.order:
        radius = blocks.radii[frame]
        high = min(2 * radius + 1, height)
        wide = min(2 * radius + 1, width)
        top = min(max(np.int64(blocks.centers[frame, line, place, 0]) - radius, 0), height - high)
        left = min(max(np.int64(blocks.centers[frame, line, place, 1]) - radius, 0), width - wide)
        for row in range(top, top + high):
            for other in range(row * width + left, row * width + left + wide):
                if frame == own and other == itself:
                    continue
                found = _distance(blocks.features, own, itself, frame, other)
                key = (np.int64(found.view(np.int32)) << 32) | (frame * height * width + other)
                if count < blocks.group or key < best[count - 1]:
                    count = _put(best, count, blocks.group, key)
    size = 1
    while 2 * size <= count:
        size *= 2
    alike = np.int64(blocks.alike.view(np.int32))
    while size > blocks.least and best[size - 1] >> 32 > alike:
        size //= 2
    for g in range(size):
        name = best[g] & NAME
        member[g, 0] = name // (height * width)
        member[g, 1] = name % (height * width) // width
        member[g, 2] = name % width  # frames are whole lines
    return size


@compiled
def _load(x, pictures, channel, member, size):
    """Blocks into the first rows of x [group, 64]. Places without a sign: others could count from the end."""
    for g in range(size):
        picture = pictures[member[g, 0], channel]
        row = np.uintp(member[g, 1])
        column = np.uintp(member[g, 2])
        for i in range(SIDE):
            for j in range(SIDE):
                x[g, SIDE * i + j] = picture[row + np.uintp(i), column + np.uintp(j)]


@compiled
def _wiener(y, signal, size, noise):
    """Shrink the coefficients y by what `signal` says is no noise; the sum of the squared factors."""
    total = np.float32(0)
    for g in range(size):
        for j in range(PIXELS):
            energy = signal[g, j] * signal[g, j]
            gain = energy / (energy + noise)
            y[g, j] *= gain
            total += gain * gain
    return total


@compiled
def _threshold(y, size, limit):
    """Set small coefficients to 0; how many are left."""
    total = np.float32(0)
    for g in range(size):
        for j in range(PIXELS):
            gain = ONE if abs(y[g, j]) > limit else np.float32(0)
            y[g, j] *= gain
            total += gain
    return total


@compiled
def _add(y, size, weights, member, slabs, strip, channel):
    values = slabs.values[strip, channel]
    totals = slabs.weights[strip, channel]
    for g in range(size):
        row = np.uintp(member[g, 1] + slabs.shift[strip, member[g, 0]])
        column = np.uintp(member[g, 2])
        for i in range(SIDE):
            line = row + np.uintp(i)
            for j in range(SIDE):
                values[line, column + np.uintp(j)] += weights[SIDE * i + j] * y[g, SIDE * i + j]
            for j in range(SIDE):
                totals[line, column + np.uintp(j)] += weights[SIDE * i + j]


@parallel
def _strips(strip, strips, blocks, slabs):
    """The groups of one strip."""
    best = slabs.best[strip]
    member = slabs.member[strip]
    y = slabs.y[strip]
    signal = slabs.signal[strip]
    taper = slabs.taper[strip]
    for line in range(slabs.first[strip], slabs.last[strip]):
        for place in range(len(blocks.columns)):
            size = _group(blocks, line, place, best, member)
            for channel in range(blocks.noisy.shape[1]):
                limit = blocks.limits[channel]
                _load(y, blocks.noisy, channel, member, size)
                _haar(y, size, False)
                if blocks.guided:
                    _load(signal, blocks.guide, channel, member, size)
                    _haar(signal, size, False)
                    _cosine(y, size)
                    _cosine(signal, size)
                    total = _wiener(y, signal, size, limit * limit)
                    _cosine_back(y, size)
                else:
                    _spline(y, size)
                    total = _threshold(y, size, limit)
                    _spline_back(y, size)
                _haar(y, size, True)
                weight = ONE / max(total, ONE)
                for j in range(PIXELS):
                    taper[j] = weight * blocks.taper[j]
                _add(y, size, taper, member, slabs, strip, channel)
