"""Gradients of clustering on a CPU, given the labels: blocks of keys, each by one thread."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..._compat.numba import turn
from ...core.calls import ClusterCall, ClusterGrads
from .cluster_start import BLOCK
from .compiled import compiled
from .layout import Array, aligned, array, by_row, like, whole_lanes
from .products import multiply
from .threads import in_one_pool, parallel, threads, turns, workers_of


class Half(NamedTuple):
    """The gradient of keys, from their clusters and from the values beside them; or that of values, from keys."""

    label: Array  # int32 [R, M]
    means: Array  # [R*C, width], the part of each key in the gradient of its center
    beside: Array  # [R*M, width beside]
    centers: Array  # [R*C, width beside], of what is beside
    slope: Array  # [R, width beside, padded width], the part of each key in its gradient
    grad: Array  # [R*M, width]


@in_one_pool
def cluster_backward(
    call: ClusterCall,
    centers: Tensor,
    values: Tensor,
    sizes: Tensor,
    label: Tensor,
    grad_centers: Tensor,
    grad_values: Tensor,
    grad_slope: Tensor,
) -> ClusterGrads:
    """A key has 1 / size of the gradient of its cluster, and its part of the slope; one in no cluster has none."""
    k = array(call.k.to(centers.dtype))
    v = array(call.v.to(centers.dtype))
    number = by_row(sizes).astype(k.dtype)  # [R, C]
    slope = by_row(grad_slope) / np.maximum(number.sum(1), 1)[:, None, None]  # [R, E, F]
    each = np.maximum(number, 1).reshape(-1, 1)
    to_k = _half(label, array(grad_centers) / each, v, array(values), slope.swapaxes(1, 2))
    to_v = _half(label, array(grad_values) / each, k, array(centers), slope)
    return ClusterGrads(like(to_k, call.k), like(to_v, call.v))


def _half(label: Tensor, means: Array, beside: Array, centers: Array, slope: Array) -> Array:
    labels = by_row(label.flatten(2))
    padded = aligned((*slope.shape[:2], whole_lanes(slope.shape[2])), slope.dtype, zeros=True)
    padded[:, :, : slope.shape[2]] = slope
    half = Half(labels, means, beside, centers, padded, np.empty((labels.size, means.shape[1]), means.dtype))
    every = np.arange(BLOCK, dtype=np.int32)
    with threads() as tasks:
        workers = workers_of(tasks, len(labels) * -(-labels.shape[1] // BLOCK))
        apart = aligned((workers, BLOCK, beside.shape[1]), beside.dtype)
        product = aligned((workers, BLOCK, padded.shape[2]), beside.dtype)
        _blocks(workers, turns(workers), half, every, apart, product)
    return half.grad


@parallel
def _blocks(worker, workers, turns, half, every, all_apart, all_product):
    """The blocks of keys whose turn it is."""
    number, size = half.label.shape
    blocks = -(-size // BLOCK)
    apart = all_apart[worker]  # [BLOCK, width beside]
    product = all_product[worker]  # [BLOCK, padded width]
    while True:
        item = turn(turns, worker, workers)
        if item >= number * blocks:
            break
        row = item // blocks
        _block(half, row, item % blocks * BLOCK, every, apart, product)


@compiled
def _block(half, row, first, every, apart, product):
    """What the keys of a block are apart from their centers, times the slope, and their part of their clusters."""
    size = half.label.shape[1]
    count = len(half.means) // len(half.label)
    some = min(BLOCK, size - first)
    none = np.int64(0)  # a constant would be compiled for itself
    for p in range(some):
        name = half.label[row, first + p]
        for e in range(apart.shape[1]):
            d = half.beside[row * size + first + p, e] - half.centers[row * count + max(name, 0), e]
            apart[p, e] = d if name >= 0 else 0
    multiply(apart, none, every, none, some, half.slope[row], none, product, none)
    for p in range(some):
        name = half.label[row, first + p]
        for e in range(half.grad.shape[1]):
            g = product[p, e] + half.means[row * count + max(name, 0), e]
            half.grad[row * size + first + p, e] = g if name >= 0 else 0
