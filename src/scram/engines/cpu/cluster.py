"""Clustering on a CPU (`spec.clustering`): a few parallel passes over all rows of keys, each over blocks of them.

Everything of a block is done by one thread, the matrix products too: keys lie along the vector units, centers one below
the other. Means are taken over keys in the order of their clusters, and what is cut into parts is cut by the shapes
alone: sums have the same bits on any number of threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._compat.numba import LANES, keep_highest, turn
from ...core.calls import ClusterCall, Clustered
from ...spec import clustering
from ...spec.grid import rows
from ...spec.noise import noise
from ...spec.scoring import accumulator
from .cluster_start import BLOCK, PARTS, Start, first_keys, started
from .compiled import compiled
from .layout import Array, aligned, array
from .products import add_columns, multiply, to_columns
from .threads import in_one_pool, parallel, threads, turns, workers_of

FORMS, NEAREST, SORT, MOMENTS = range(4)  # passes
LEAST_FAR = 1e-6  # of the mean spread: nearer keys count as lying at their center


class Keys(NamedTuple):
    """Keys and values of all rows, and their clusters."""

    k: Array  # [R*S, E]
    v: Array  # [R*S, F]
    label: Array  # int32 [R, S]
    score: Array  # [R, S], of the linear form with the nearest center
    order: Array  # int32 [R, S + C], the keys by cluster; after S those where empty clusters are placed
    begin: Array  # int32 [R, C], where the keys of each cluster begin in `order`
    number: Array  # int32 [R, C], how many there are

    @staticmethod
    def of(k: Array, v: Array, rows: int, clusters: int) -> Keys:
        size = len(k) // rows
        return Keys(
            k=k,
            v=v,
            label=np.empty((rows, size), np.int32),
            score=np.empty((rows, size), k.dtype),
            order=np.empty((rows, size + clusters), np.int32),
            begin=np.empty((rows, clusters), np.int32),
            number=np.empty((rows, clusters), np.int32),
        )


class Centers(NamedTuple):
    """Clusters of all rows. W as in `Start`."""

    centers: Array  # [R*C, E]
    values: Array  # [R*C, F]
    forms: Array  # [R*C, E + F + 1], `clustering.LinearForms`, the bias last
    mean: Array  # [R, E + F], as in Start
    numbers: Array  # [R, PARTS + 1], as in Start
    squares: Array  # [R, PARTS + 1, W, W], as in Start; then sums of products of keys and values for the slope
    variance: Array  # [R, PARTS, E], sums of squares
    spreads: Array  # [R, C], sums of squared distances
    every: Array  # int32, 0, 1, ..


class Scratch(NamedTuple):
    """Of each worker."""

    lanes: Array  # [workers, E + F + 1 + C, BLOCK], keys and values as columns, scores
    best: Array  # [workers, 2, BLOCK], the highest score of each key, and the number of its cluster
    lines: Array  # [workers, 2 * n + 1, W], of n keys or clusters


@in_one_pool
@torch.no_grad()
def cluster(call: ClusterCall) -> Clustered:
    k = call.k
    v = call.v
    count = call.clusters
    wide = accumulator(v.dtype)
    number = k.shape[0] * k.shape[1]
    if count >= math.prod(k.shape[2:-1]) or not number:
        return clustering.cluster(call)
    usable = None if call.key_mask is None else clustering.usable_keys(call, rows(k), rows(v)).numpy()  # [R, M]
    keys = Keys.of(array(k.to(wide)), array(v.to(wide)), number, count)
    with threads() as tasks:
        workers = workers_of(tasks, number * max(PARTS, -(-keys.label.shape[1] // BLOCK)))
        start = started(call, keys.k, keys.v, usable, workers)
        centers = _centers(call, start)
        sample = Keys.of(start.k, start.v, number, count)
        sample.number[:] = 1
        sample.begin[:] = centers.every[:count]
        scratch = _scratch(centers, workers)
        if call.warm_centers is not None and call.warm_values is not None:
            centers.centers[:] = array(call.warm_centers)
            centers.values[:] = array(call.warm_values)
        else:
            sample.order[:, :count] = first_keys(start, count)
        known = call.warm_centers is not None
        for step in range(call.steps):
            _pass(workers, turns(workers), FORMS, known, sample, centers, scratch)
            _pass(workers, turns(workers), NEAREST, known, sample, centers, scratch)
            _pass(workers, turns(workers), SORT, known, sample, centers, scratch)
            _place_anew(call, step, sample, centers)
            known = False
        _pass(workers, turns(workers), FORMS, known, sample, centers, scratch)
        _pass(workers, turns(workers), NEAREST, known, keys, centers, scratch)
        if usable is not None:
            keys.label[~usable] = -1
        _pass(workers, turns(workers), SORT, known, keys, centers, scratch)
        _pass(workers, turns(workers), MOMENTS, known, keys, centers, scratch)
    return _clustered(call, keys, centers)


def _centers(call: ClusterCall, start: Start) -> Centers:
    number = len(start.mean)
    count = call.clusters
    dtype = start.k.dtype
    width = start.k.shape[1]
    return Centers(
        centers=np.empty((number * count, width), dtype),
        values=np.empty((number * count, start.v.shape[1]), dtype),
        forms=np.empty((number * count, start.mean.shape[1] + 1), dtype),
        mean=start.mean,
        numbers=start.numbers,
        squares=start.squares,
        variance=np.zeros((number, PARTS, width), dtype),
        spreads=np.empty((number, count), dtype),
        every=np.arange(max(count, BLOCK), dtype=np.int32),
    )


def _scratch(centers: Centers, workers: int) -> Scratch:
    dtype = centers.forms.dtype
    clusters = centers.spreads.shape[1]
    some = max(BLOCK, -(-clusters // PARTS))
    return Scratch(
        lanes=aligned((workers, centers.forms.shape[1] + clusters, BLOCK), dtype),
        best=aligned((workers, 2, BLOCK), dtype),
        lines=aligned((workers, 2 * some + 1, centers.squares.shape[3]), dtype),
    )


def _place_anew(call: ClusterCall, step: int, sample: Keys, centers: Centers) -> None:
    """Empty clusters start at keys far from their centers, as in `clustering.Start.placed_anew`. It is rare."""
    size = sample.label.shape[1]
    width = sample.k.shape[1]
    for row in np.flatnonzero((sample.number == 0).any(1)).tolist():
        mean = torch.from_numpy(centers.mean[row])
        metric = torch.from_numpy(centers.squares[row, PARTS, :width, :width])
        weight = torch.from_numpy(centers.numbers[row, PARTS:])
        space = clustering.Space(metric, weight, mean[:width], mean[width:])
        own = slice(row * size, (row + 1) * size)
        spread = space.spread(torch.from_numpy(sample.k[own]), torch.from_numpy(sample.v[own]))  # [S]
        distance = (spread - 2 * torch.from_numpy(sample.score[row])).clamp(min=0)  # [S]
        far = distance > LEAST_FAR * spread.mean()
        bits = noise(call.seed, clustering.noise_row(call, row), 4 + step, torch.arange(size, device="cpu"))
        place = clustering.drawn(bits, torch.where(far, distance, 0))
        empty = np.flatnonzero(sample.number[row] == 0)[: int(far.sum())]
        sample.order[row, size : size + len(empty)] = place[: len(empty)].numpy()
        sample.begin[row, empty] = size + np.arange(len(empty))
        sample.number[row, empty] = 1


def _clustered(call: ClusterCall, keys: Keys, centers: Centers) -> Clustered:
    heads = call.k.shape[:2]
    width = keys.k.shape[1]
    dtype = keys.k.dtype
    number = np.maximum(keys.number.sum(1), 1).astype(dtype)  # [R]
    slope = centers.squares[:, :PARTS, :width, : keys.v.shape[1]].sum(1) / number[:, None, None]
    mean = centers.spreads.sum(1) / number  # [R]
    spreads = centers.spreads / np.maximum(keys.number, 1) / np.where(mean > 0, mean, 1)[:, None]

    def by_head(x: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, x.dtype)).reshape(*heads, *x.shape[1:])

    return Clustered(
        centers=by_head(centers.centers.reshape(*keys.number.shape, width)),
        values=by_head(centers.values.reshape(*keys.number.shape, keys.v.shape[1])),
        slope=by_head(slope),
        sizes=by_head(keys.number),
        label=torch.from_numpy(keys.label).reshape(call.k.shape[:-1]),
        order=by_head(keys.order[:, : keys.label.shape[1]]),
        variance=by_head(centers.variance.sum(1) / number[:, None]),
        spreads=by_head(spreads.astype(dtype)),
    )


@parallel
def _pass(worker, workers, turns, kind, known, keys, centers, scratch):
    """The items of a pass whose turn it is; `known`: centers and values are there."""
    number, size = keys.label.shape
    blocks = -(-size // BLOCK)
    lanes = scratch.lanes[worker]  # [E + F + 1 + C, BLOCK]
    best = scratch.best[worker, 0]  # [BLOCK]
    which = scratch.best[worker, 1]  # [BLOCK]
    lines = scratch.lines[worker]  # [2 * n + 1, W]
    items = number * PARTS
    if kind == NEAREST:
        items = number * blocks
    if kind == SORT:
        items = number
    while True:
        item = turn(turns, worker, workers)
        if item >= items:
            break
        if kind == NEAREST:
            _nearest(keys, centers, item // blocks, item % blocks * BLOCK, lanes, best, which)
        elif kind == SORT:
            _sort(keys, item)
        elif kind == FORMS:
            _forms(keys, centers, item // PARTS, item % PARTS, known, lines)
        else:
            _moments(keys, centers, item // PARTS, item % PARTS, lines)


@compiled
def _mean(x, first, order, begin, number, mean):
    """The mean of the rows first + order[n] of x, number from `begin` on; 0 where there are none."""
    for e in range(len(mean)):
        mean[e] = 0
    for n in range(begin, begin + number):
        one = x[first + order[n]]
        for e in range(len(mean)):
            mean[e] += one[e]
    each = mean.dtype.type(max(number, 1))
    for e in range(len(mean)):
        mean[e] /= each


@compiled
def _forms(keys, centers, row, part, known, lines):
    """Means and linear forms of some clusters of a row."""
    count = keys.begin.shape[1]
    size = keys.label.shape[1]
    width = keys.k.shape[1]
    wide = lines.shape[1]
    first = count * part // PARTS
    number = count * (part + 1) // PARTS - first
    mean = centers.mean[row]  # [E + F]
    order = keys.order[row]  # [S + C]
    none = np.int64(0)  # a constant would be compiled for itself
    for i in range(number):
        c = first + i
        center = centers.centers[row * count + c]  # [E]
        if not known:
            begin = keys.begin[row, c]
            _mean(keys.k, row * size, order, begin, keys.number[row, c], center)
            _mean(keys.v, row * size, order, begin, keys.number[row, c], centers.values[row * count + c])
        for e in range(wide):
            lines[i, e] = center[e] - mean[e] if e < width else 0
    multiply(lines, none, centers.every, none, number, centers.squares[row, PARTS], none, lines, number)
    for i in range(number):
        form = centers.forms[row * count + first + i]  # [E + F + 1]
        value = centers.values[row * count + first + i]  # [F]
        bias = form.dtype.type(0)
        for e in range(width):
            a = lines[number + i, e]
            form[e] = a
            bias -= a * (mean[e] + lines[i, e] / 2)
        for f in range(len(value)):
            away = value[f] - mean[width + f]
            b = centers.numbers[row, PARTS] * away
            form[width + f] = b
            bias -= b * (mean[width + f] + away / 2)
        form[len(form) - 1] = bias if keys.number[row, first + i] > 0 else -np.inf


@compiled
def _nearest(keys, centers, row, first, lanes, best, which):
    """The cluster of each key of a block, the lower one where scores are equal; -1 for one that is not finite."""
    size = keys.label.shape[1]
    width = keys.k.shape[1]
    depth = centers.forms.shape[1]
    count = keys.begin.shape[1]
    number = min(BLOCK, size - first)
    none = np.int64(0)  # a constant would be compiled for itself
    to_columns(keys.k, row * size + first, centers.every, none, number, lanes, none)
    to_columns(keys.v, row * size + first, centers.every, none, number, lanes, width)
    for p in range(BLOCK):
        lanes[depth - 1, p] = 1
    multiply(centers.forms, row * count, centers.every, none, count, lanes, none, lanes, depth)
    for p in range(BLOCK):
        best[p] = lanes[depth, p]
        which[p] = 0
    for c in range(1, count):
        name = best.dtype.type(c)
        for p in range(0, BLOCK, LANES):
            keep_highest(lanes, (depth + c) * BLOCK + p, name, best, which, p)
    for p in range(number):
        keys.score[row, first + p] = best[p]
        keys.label[row, first + p] = np.int32(which[p]) if abs(best[p]) < np.inf else -1


@compiled
def _sort(keys, row):
    """The keys of a row by their clusters, those without one last."""
    label = keys.label[row]  # [S]
    order = keys.order[row]  # [S + C]
    begin = keys.begin[row]  # [C]
    number = keys.number[row]  # [C]
    for c in range(len(number)):
        number[c] = 0
    for s in range(len(label)):
        if label[s] >= 0:
            number[label[s]] += 1
    at = 0
    for c in range(len(number)):
        begin[c] = at
        at += number[c]
    for s in range(len(label)):
        c = label[s]
        if c >= 0:
            order[begin[c]] = s
            begin[c] += 1
        else:
            order[at] = s
            at += 1
    for c in range(len(number)):
        begin[c] -= number[c]


@compiled
def _moments(keys, centers, row, part, lines):
    """Means of some clusters of a row, and the sums of what their keys are apart from these."""
    count = keys.begin.shape[1]
    size = keys.label.shape[1]
    width = keys.k.shape[1]
    metric = lines[2 * BLOCK]  # [W], its diagonal
    products = centers.squares[row, part]  # [W, W]
    variance = centers.variance[row, part]  # [E]
    order = keys.order[row]  # [S + C]
    none = np.int64(0)  # a constant would be compiled for itself
    filled = 0
    for e in range(lines.shape[1]):
        metric[e] = centers.squares[row, PARTS, e, e]
        for f in range(lines.shape[1]):
            products[e, f] = 0
        for p in range(2 * BLOCK):
            lines[p, e] = 0
    for c in range(count * part // PARTS, count * (part + 1) // PARTS):
        center = centers.centers[row * count + c]  # [E]
        value = centers.values[row * count + c]  # [F]
        begin = keys.begin[row, c]
        _mean(keys.k, row * size, order, begin, keys.number[row, c], center)
        _mean(keys.v, row * size, order, begin, keys.number[row, c], value)
        total = center.dtype.type(0)
        for n in range(begin, begin + keys.number[row, c]):
            k = keys.k[row * size + order[n]]  # [E]
            v = keys.v[row * size + order[n]]  # [F]
            for e in range(width):
                d = k[e] - center[e]
                lines[filled, e] = d
                variance[e] += d * d
                total += metric[e] * (d * d)
            for f in range(len(v)):
                lines[BLOCK + filled, f] = v[f] - value[f]
            filled += 1
            if filled == BLOCK:
                add_columns(lines, none, centers.every, none, filled, lines, none + BLOCK, products, none)
                filled = 0
        centers.spreads[row, c] = total
    add_columns(lines, none, centers.every, none, filled, lines, none + BLOCK, products, none)
