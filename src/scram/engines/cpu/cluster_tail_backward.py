"""Gradients of the clustered tail on a CPU: the same on every run and any number of threads.

The queries that read a row of clusters are cut into parts, by the shapes alone. Each part has its own sums for centers
and values; in the end the sums are added in their order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.calls import ClusterTailCall, ClusterTailGrads
from .cluster_tail import SHARE, TOTAL, ClusterTailArrays, Scratch, block_size, drop, fewer, take, weigh
from .compiled import compiled, inlined, parallel
from .layout import Array, Block, array, flat, like
from .threads import threads
from .vectors import add_guarded_product, add_product

PARTS = 64  # of all rows together, where their sums are small
PART_BLOCKS = 4  # at least
ALL_SUMS = 1 << 23


class Gradients(NamedTuple):
    """What is read and what is written. `parts` cut the points that read a row of clusters."""

    out: Array  # [P, F]
    lse: Array  # [P]
    values: Array  # [Rc, C, F], of the call
    turned_centers: Array  # [Rc, E, C], of the call
    finite: bool  # all centers
    to_q: Array  # [P, E]
    to_near_out: Array  # [P, F]
    to_near_lse: Array  # [P]
    to_centers: Array  # [Rc, parts, C, E]
    to_values: Array  # [Rc, parts, C, F]
    slopes: Array  # [tasks, C, size], scratch
    d_out: Array  # [tasks, F, size], scratch
    d_q: Array  # [tasks, E, size], scratch
    means: Array  # [tasks, 2, size], scratch: <d_out, near_out>, and the mean of all slopes


def cluster_tail_backward(
    call: ClusterTailCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> ClusterTailGrads:
    """Gradients of q, centers, values, near_out, near_lse from those of out and lse."""
    arrays = ClusterTailArrays.of(call)
    wide = call.centers.dtype
    rows, clusters, width = arrays.centers.shape
    values = np.ascontiguousarray(arrays.values.swapaxes(1, 2))  # [Rc, C, F]
    value_width = values.shape[2]
    size = block_size(clusters)
    blocks = len(arrays.q) // size
    each_part = rows * clusters * (width + value_width)
    parts = min(blocks // max(PART_BLOCKS * rows, 1), PARTS // max(rows, 1), ALL_SUMS // max(each_part, 1))
    parts = max(1, parts)
    dtype = values.dtype
    with threads() as tasks:
        tasks = fewer(tasks, blocks, 2 * clusters * size)
        grads = Gradients(
            out=array(grad_out.to(wide)),
            lse=flat(grad_lse.to(wide)),
            values=values,
            turned_centers=np.ascontiguousarray(arrays.centers.swapaxes(1, 2)),
            finite=bool(call.centers.isfinite().all()),
            to_q=np.empty_like(arrays.q),
            to_near_out=np.empty_like(arrays.near_out),
            to_near_lse=np.empty_like(arrays.near_lse),
            to_centers=np.zeros((rows, parts, clusters, width), dtype),
            to_values=np.zeros((rows, parts, clusters, value_width), dtype),
            slopes=np.empty((tasks, clusters, size), dtype),
            d_out=np.empty((tasks, value_width, size), dtype),
            d_q=np.empty((tasks, width, size), dtype),
            means=np.empty((tasks, 2, size), dtype),
        )
        _parts(tasks, arrays, Scratch.of(arrays, tasks, size), grads)
    return ClusterTailGrads(
        like(grads.to_q, call.q),
        like(_added(grads.to_centers), call.centers),
        like(_added(grads.to_values), call.values),
        like(grads.to_near_out, call.near_out),
        like(grads.to_near_lse, call.near_lse),
    )


def _added(parts: Array) -> Array:
    """[Rc, parts, C, width] -> [Rc, C, width], part after part."""
    total = torch.from_numpy(parts[:, 0])
    for n in range(1, parts.shape[1]):
        total += torch.from_numpy(parts[:, n])
    result: Array = total.numpy()
    return result


@parallel
def _parts(task, tasks, arrays, scratch, grads):
    """Some parts, one after the other, block by block."""
    geometry = arrays.geometry
    most = scratch.left.shape[2]
    rows = grads.to_centers.shape[0]
    parts = grads.to_centers.shape[1]
    group = len(geometry.key_rows) // max(rows, 1)  # rows of queries that read a row of clusters: neighbors
    in_row = -(-geometry.queries // most)
    for number in range(rows * parts * task // tasks, rows * parts * (task + 1) // tasks):
        row = number // parts
        part = number % parts
        for n in range(group * in_row * part // parts, group * in_row * (part + 1) // parts):
            q_row = row * group + n // in_row
            begin = n % in_row * most
            first = q_row * geometry.queries + begin
            size = min(most, geometry.queries - begin)
            block = Block(q_row, begin, first, row * geometry.keys, size)
            weigh(arrays, block, scratch, task)
            _slopes(arrays, block, scratch.weights[task], scratch.sums[task], grads, task, row)
            _to_queries(arrays, block, scratch.sums[task], grads, task, row)
            _to_clusters(grads.slopes[task], arrays.q[first : first + size], grads.to_centers[row, part])
            if arrays.threshold:
                drop(arrays, block, scratch.weights[task])
            _to_clusters(scratch.weights[task], grads.out[first : first + size], grads.to_values[row, part])


@inlined
def _slopes(arrays, block, weights, sums, grads, task, row):
    """Weights add up to 1 with the windows' share; slopes are d loss / d <q, center>."""
    slopes = grads.slopes[task]  # [C, size]
    d_out = grads.d_out[task]  # [F, size]
    size = block.size
    number = weights.dtype.type
    total = sums[TOTAL]  # [size]
    share = sums[SHARE]  # [size]
    to_near = grads.means[task, 0]  # [size]
    mean = grads.means[task, 1]  # [size]
    zero = number(0)
    scale = number(arrays.scale)
    take(grads.out, block, d_out)
    slopes[:] = 0
    add_product(grads.values[row], d_out, slopes, size)
    if arrays.threshold:
        drop(arrays, block, slopes)
    for p in range(size):
        point = block.first + p
        to_near[p] = zero
        if arrays.near_lse[point] != -np.inf:
            for f in range(grads.out.shape[1]):
                to_near[p] += grads.out[point, f] * arrays.near_out[point, f]
        total[p] = number(1) / total[p] if total[p] != 0 else zero
        share[p] *= total[p]
        mean[p] = share[p] * to_near[p]
    for c in range(len(weights)):
        for p in range(size):
            weights[c, p] *= total[p]
            mean[p] += weights[c, p] * slopes[c, p] if weights[c, p] != 0 else zero
    for p in range(size):
        mean[p] -= grads.lse[block.first + p]
    for c in range(len(weights)):
        for p in range(size):
            slope = scale * (weights[c, p] * (slopes[c, p] - mean[p]))
            slopes[c, p] = slope if weights[c, p] != 0 else zero  # what has no weight may have a NaN in its value


@inlined
def _to_queries(arrays, block, sums, grads, task, row):
    """Gradients of q and of the windows' out and lse."""
    d_q = grads.d_q[task]  # [E, size]
    share = sums[SHARE]
    to_near = grads.means[task, 0]
    mean = grads.means[task, 1]
    d_q[:] = 0
    if grads.finite:
        add_product(grads.turned_centers[row], grads.slopes[task], d_q, block.size)
    else:
        add_guarded_product(grads.turned_centers[row], grads.slopes[task], d_q, block.size, False)
    for p in range(block.size):
        point = block.first + p
        attends = arrays.near_lse[point] != -np.inf  # any key of its windows
        for e in range(len(d_q)):
            grads.to_q[point, e] = d_q[e, p]
        for f in range(grads.out.shape[1]):
            grads.to_near_out[point, f] = share[p] * grads.out[point, f] if attends else 0
        grads.to_near_lse[point] = share[p] * (to_near[p] - mean[p]) if attends else 0


@compiled
def _to_clusters(weights, x, sums):
    """sums [C, width] += weights [C, at least size] @ x [size, width]"""
    check = x.dtype.type(0)
    for p in range(len(x)):
        for e in range(x.shape[1]):
            check += 0 * x[p, e]
    if check == 0:
        add_product(weights, x, sums, x.shape[1])
    else:  # NaN: not all are finite
        add_guarded_product(weights, x, sums, x.shape[1], True)
