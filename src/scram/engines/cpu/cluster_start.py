"""Where clustering on a CPU starts (`spec.clustering.Start`): a sample of each row of keys, and how it is measured."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..._compat.numba import turn
from ...core.calls import ClusterCall
from ...spec.clustering import SAMPLED_KEYS, SAMPLED_QUERIES, START_EVEN, START_MOST, START_QUERIES, VALUE_WEIGHT
from ...spec.scoring import accumulator
from .compiled import compiled
from .layout import Array, aligned, array, row_states, whole_lanes
from .noise import absorb, below
from .products import add_columns, multiply
from .threads import parallel, turns
from .vectors import exp

BLOCK = 64  # keys or queries that are taken together
PARTS = 8  # of a row of keys: each has sums of its own
DRAW, SPREAD, METRIC = range(3)  # passes


class Start(NamedTuple):
    """Samples of all rows, and where distances are measured. W is the wider of E and F, padded."""

    k: Array  # [R*S, E], keys of the sample; 0 for one that is not finite
    v: Array  # [R*S, F]
    place: Array  # int32 [R, S], which they are; -1 for one that is not finite
    clock: Array  # [R, S], when a key rings: those that do first are where clusters start
    sums: Array  # [R, blocks, E + F], of the sample
    mean: Array  # [R, E + F]
    squares: Array  # [R, PARTS + 1, W, W], sums of squares and products of parts of the keys; last the metric
    numbers: Array  # [R, PARTS + 1], sums of squares of values of these parts; last what values weigh

    @property
    def size(self) -> int:
        """S, keys of the sample of a row."""
        return int(self.place.shape[1])


class Source(NamedTuple):
    """What the samples are drawn from."""

    q: Array  # [R * queries, E]
    k: Array  # [R*M, E]
    v: Array  # [R*M, F]
    states: Array  # uint32 [R], the hash after the seed and the row
    total: Array  # int64 [R], usable keys
    usable: Array  # int32 [R, M], which they are, ascending; without rows: all
    every: Array  # int32 [S], 0, 1, .., or as many as a block has
    queries: int  # that read a row of keys, of all heads
    scale: float


class StartScratch(NamedTuple):
    """Of each worker."""

    lines: Array  # [workers, 2 * BLOCK, W]
    columns: Array  # [workers, E + 2, START_QUERIES]
    paid: Array  # [workers, S, START_QUERIES]


def started(call: ClusterCall, k: Array, v: Array, usable: Array | None, workers: int) -> Start:
    """From keys [R*M, E], values [R*M, F] and which of them are usable, bool [R, M]; None: all that are finite."""
    number = call.k.shape[0] * call.k.shape[1]
    keys = len(k) // number
    size = min(keys, max(SAMPLED_KEYS, call.clusters))
    dtype = k.dtype
    width = k.shape[1]
    both = width + v.shape[1]
    wide = whole_lanes(max(width, v.shape[1]))
    total = np.full(number, keys, np.int64)
    listed = np.zeros((0, 0), np.int32)
    if usable is not None:
        total = usable.sum(1)
        listed = np.zeros((number, keys), np.int32)
        for row in range(number):
            listed[row, : total[row]] = np.flatnonzero(usable[row])
    q = array(call.q.to(accumulator(call.v.dtype)))
    source = Source(
        q=q,
        k=k,
        v=v,
        states=states_of(call),
        total=total,
        usable=listed,
        every=np.arange(max(size, BLOCK), dtype=np.int32),
        queries=len(q) // number,
        scale=call.scale,
    )
    begun = Start(
        k=np.empty((number * size, width), dtype),
        v=np.empty((number * size, v.shape[1]), dtype),
        place=np.empty((number, size), np.int32),
        clock=np.empty((number, size), dtype),
        sums=np.empty((number, -(-size // BLOCK), both), dtype),
        mean=np.empty((number, both), dtype),
        squares=aligned((number, PARTS + 1, wide, wide), dtype, zeros=True),
        numbers=np.empty((number, PARTS + 1), dtype),
    )
    scratch = StartScratch(
        lines=aligned((workers, 2 * BLOCK, wide), dtype, zeros=True),
        columns=aligned((workers, width + 2, START_QUERIES), dtype, zeros=True),
        paid=aligned((workers, size, START_QUERIES), dtype),
    )
    _pass(workers, turns(workers), DRAW, source, begun, scratch)
    begun.mean[:] = begun.sums.sum(1) / dtype.type(size)
    _pass(workers, turns(workers), SPREAD, source, begun, scratch)
    _pass(workers, turns(workers), METRIC, source, begun, scratch)
    return begun


def states_of(call: ClusterCall) -> Array:
    """The hash after the seed and the number of the first row of queries that reads each row of keys: uint32 [R]."""
    result: Array = row_states(call.seed, call.q, call.rows)[:: call.q.shape[1] // call.k.shape[1]].copy()
    return result


def first_keys(start: Start, clusters: int) -> Array:
    """Keys of the sample at which clusters start: int32 [R, C]."""
    new = start.place != np.roll(start.place, 1, 1)  # a key of several parts, where keys are few, counts once
    clock = np.where(new & (start.place >= 0), start.clock, np.inf)  # [R, S]
    first = np.argpartition(clock, clusters - 1, 1)[:, :clusters]
    return np.take_along_axis(first, np.take_along_axis(clock, first, 1).argsort(1), 1)


@parallel
def _pass(worker, workers, turns, which, source, start, scratch):
    """The items of a pass whose turn it is."""
    number = len(source.total)
    blocks = start.sums.shape[1]
    lines = scratch.lines[worker]  # [2 * BLOCK, W]
    items = number
    if which == DRAW:
        items = number * blocks
    if which == SPREAD:
        items = number * (PARTS + 1)
    while True:
        item = turn(turns, worker, workers)
        if item >= items:
            break
        if which == DRAW:
            _draw(source, start, item // blocks, item % blocks)
        elif which == METRIC:
            _metric(source, start, item, lines)
        elif item < number:  # the longest first
            _pay(source, start, item, lines[0], scratch.columns[worker], scratch.paid[worker])
        else:
            _covariance(source, start, (item - number) // PARTS, (item - number) % PARTS, lines)


@compiled
def _place_in(state, draw, part, number, total):
    """One of `total` places, drawn from part `part` of `number` equal ones (`clustering.strides`)."""
    first = part * total // number
    end = (part + 1) * total // number
    return first + below(absorb(absorb(state, draw), part), max(end - first, 1))


@compiled
def rings(state, n):
    """The time at which a clock of rate 1 rings (`clustering.drawn`)."""
    bits = absorb(state, n)
    return -math.log((np.float32(bits) + np.float32(0.5)) / np.float32(2**32))


@compiled
def _draw(source, start, row, block):
    """A block of the sample: which keys, their vectors, 0 where one is not finite, and the sums of those."""
    size = start.place.shape[1]
    width = source.k.shape[1]
    value_width = source.v.shape[1]
    keys = len(source.k) // len(source.total)
    state = source.states[row]
    sums = start.sums[row, block]  # [E + F]
    for e in range(width + value_width):
        sums[e] = 0
    for s in range(block * BLOCK, min(block * BLOCK + BLOCK, size)):
        place = _place_in(state, 0, s, size, source.total[row])
        if len(source.usable):
            place = np.int64(source.usable[row, place])
        k_from = source.k[row * keys + place]  # [E]
        v_from = source.v[row * keys + place]  # [F]
        k = start.k[row * size + s]  # [E]
        v = start.v[row * size + s]  # [F]
        total = sums.dtype.type(0)
        for e in range(width):
            total += k_from[e]
        for f in range(value_width):
            total += v_from[f]
        finite = abs(total) < np.inf  # or too large to add
        start.place[row, s] = place if finite else -1
        start.clock[row, s] = rings(absorb(state, 1), s)
        for e in range(width):
            k[e] = k_from[e] if finite else 0
            sums[e] += k[e]
        for f in range(value_width):
            v[f] = v_from[f] if finite else 0
            sums[width + f] += v[f]


@compiled
def _query(source, row, part, line):
    """Write a drawn query, times scale; 0 where it is not finite."""
    known = min(SAMPLED_QUERIES, source.queries)
    point = row * source.queries + _place_in(source.states[row], 2, part, known, source.queries)
    check = line.dtype.type(0)
    for e in range(source.q.shape[1]):
        line[e] = source.scale * source.q[point, e]
        check += 0 * line[e]
    if check != 0:
        for e in range(source.q.shape[1]):
            line[e] = 0


@compiled
def _pay(source, start, row, line, columns, paid):
    """Clocks get the rate `clustering.attention_paid` of each key of the sample."""
    number = paid.dtype.type
    size = len(paid)
    width = source.q.shape[1]
    known = min(SAMPLED_QUERIES, source.queries)
    count = min(START_QUERIES, known)
    top = columns[width]  # [START_QUERIES]
    total = columns[width + 1]  # [START_QUERIES]
    none = np.int64(0)  # a constant would be compiled for itself
    for n in range(count):
        _query(source, row, _place_in(source.states[row], 3, n, count, known), line)
        for e in range(width):
            columns[e, n] = line[e]
    multiply(start.k, row * size, source.every, none, size, columns, none, paid, none)
    for n in range(START_QUERIES):
        top[n] = number(-np.inf)
        total[n] = number(0)
    for s in range(size):
        for n in range(START_QUERIES):
            top[n] = max(top[n], paid[s, n])
    for s in range(size):
        for n in range(START_QUERIES):
            paid[s, n] = exp(paid[s, n] - top[n])
            total[n] += paid[s, n]
    for n in range(START_QUERIES):
        total[n] = number(1) / total[n] if n < count else number(0)
    for s in range(size):
        rate = number(0)
        for n in range(START_QUERIES):
            rate += min(paid[s, n] * total[n], number(START_MOST))
        start.clock[row, s] /= rate / max(count, 1) + START_EVEN / size


@compiled
def _covariance(source, start, row, part, apart):
    """Sums of squares and products over one part of the sample, around its means."""
    size = start.place.shape[1]
    width = start.k.shape[1]
    mean = start.mean[row]  # [E + F]
    total = mean.dtype.type(0)
    end = size * (part + 1) // PARTS
    none = np.int64(0)  # a constant would be compiled for itself
    for first in range(size * part // PARTS, end, BLOCK):
        number = min(BLOCK, end - first)
        for p in range(number):
            k = start.k[row * size + first + p]  # [E]
            v = start.v[row * size + first + p]  # [F]
            for e in range(width):
                apart[p, e] = k[e] - mean[e]
            for f in range(len(v)):
                d = v[f] - mean[width + f]
                total += d * d
        add_columns(apart, none, source.every, none, number, apart, none, start.squares[row, part], none)
    start.numbers[row, part] = total


@compiled
def _metric(source, start, row, lines):
    """The metric of a row, and what values weigh."""
    number = lines.dtype.type
    wide = lines.shape[1]
    size = start.place.shape[1]
    width = source.q.shape[1]
    known = min(SAMPLED_QUERIES, source.queries)
    covariance = start.squares[row, 0]  # [W, W]
    metric = start.squares[row, PARTS]  # [W, W]
    none = np.int64(0)  # a constant would be compiled for itself
    variance = number(0)
    for part in range(PARTS):
        variance += start.numbers[row, part]
        for e in range(width):
            for f in range(width):
                if part > 0:
                    covariance[e, f] += start.squares[row, part, e, f]
    for e in range(width):
        for f in range(width):
            covariance[e, f] /= size
    for first in range(0, known, BLOCK):
        count = min(BLOCK, known - first)
        for p in range(count):
            _query(source, row, first + p, lines[p])
        multiply(lines, none, source.every, none, count, covariance, none, lines, none + BLOCK)
        for p in range(count):
            spread = number(1)
            for e in range(wide):
                spread += lines[p, e] * lines[BLOCK + p, e]
            weight = 1 / math.sqrt(max(spread, number(1)))
            for e in range(wide):
                lines[p, e] *= weight
        add_columns(lines, none, source.every, none, count, lines, none, metric, none)
    spread = number(0)
    for e in range(width):
        for f in range(width):
            metric[e, f] /= max(known, 1)
            spread += metric[e, f] * covariance[e, f]
    variance /= size
    share = VALUE_WEIGHT * spread if spread > 0 else 1.0  # values alone where all scores are equal
    start.numbers[row, PARTS] = share / variance if variance > 0 else 0.0
    if not start.numbers[row, PARTS] < math.inf:  # rounded as stored: values near the least number have no part
        start.numbers[row, PARTS] = 0.0
