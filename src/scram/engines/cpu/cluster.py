"""Clustering on a CPU: the nearest center of every key, and the sums of each cluster, for a block of keys at a time.

Everything of a block is done by one thread, the matrix products too: keys lie along the vector units, centers one below
the other. Keys are cut into parts by their number alone, so that sums have the same bits on any number of threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.calls import ClusterCall, Clustered
from ...spec import clustering
from ...spec.grid import rows
from ...spec.scoring import accumulator
from .cluster_tail import block_size
from .compiled import compiled, parallel
from .layout import Array
from .threads import threads
from .vectors import add_product

MOST_PARTS = 16  # of the keys: each has scratch, whose first touch takes as long as a tenth of the work


class Keys(NamedTuple):
    """Keys of one row, and where their clusters are written."""

    k: Array  # [S, E]
    v: Array  # [S, F]
    usable: Array  # bool [S], or empty: all
    label: Array  # int32 [S]
    score: Array  # [S], of the linear form with the nearest center


class Forms(NamedTuple):
    """`clustering.LinearForms` as arrays."""

    a: Array  # [C, E]
    b: Array  # [C, F]
    bias: Array  # [C]


class Parts(NamedTuple):
    """Scratch and sums of each part of the keys."""

    k: Array  # [parts, C, E]
    v: Array  # [parts, C, F]
    number: Array  # int64 [parts, C]
    forms: Array  # [parts, C, size]
    columns: Array  # [parts, E + F, size]


@torch.no_grad()
def cluster(call: ClusterCall) -> Clustered:
    k = call.k
    v = call.v
    count = call.clusters
    wide = accumulator(v.dtype)
    keys = math.prod(k.shape[2:-1])
    key_rows = k.shape[0] * k.shape[1]
    if count >= keys or not key_rows:
        return clustering.cluster(call)
    k_rows = rows(k).to(wide).contiguous()  # [B*Hk, M, E]
    v_rows = rows(v).to(wide).contiguous()  # [B*Hk, M, F]
    all_usable = None if call.key_mask is None else clustering.usable_keys(call, k_rows, v_rows)  # [B*Hk, M]
    label = torch.empty(key_rows, keys, dtype=torch.int32, device="cpu")
    clusters = []
    for row in range(key_rows):
        usable = None if all_usable is None else all_usable[row]
        start = clustering.Start.of(call, row, k_rows[row], v_rows[row], usable)
        centers = start.centers
        values = start.values
        sizes = torch.ones(count, dtype=torch.int64, device="cpu")
        for step in range(call.steps):
            forms = start.space.forms(centers, values, sizes)
            score, centers, values, sizes = _assign(forms, start.k, start.v, None, None)
            if not sizes.all():
                centers, values, sizes = start.placed_anew(call, step, score, centers, values, sizes)
        forms = start.space.forms(centers, values, sizes)
        clusters.append(_assign(forms, k_rows[row], v_rows[row], usable, label[row])[1:])
    centers, values, sizes = (
        torch.stack(part).reshape(*k.shape[:2], *part[0].shape) for part in zip(*clusters, strict=True)
    )
    return Clustered(centers, values, sizes.to(torch.int32), label.reshape(k.shape[:-1]))


def _assign(
    forms: clustering.LinearForms, k: Tensor, v: Tensor, usable: Tensor | None, label: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write the label of each key; its score [S], and mean keys, mean values and sizes of the clusters."""
    number = len(k)
    dtype = k.numpy().dtype
    arrays = Forms(*(x.contiguous().numpy() for x in forms))
    count = len(arrays.bias)
    size = block_size(count)
    label = torch.empty(number, dtype=torch.int32, device="cpu") if label is None else label
    keys = Keys(
        k=k.contiguous().numpy(),
        v=v.contiguous().numpy(),
        usable=np.empty(0, bool) if usable is None else usable.numpy(),
        label=label.numpy(),
        score=np.empty(number, dtype),
    )
    parts = max(1, min(MOST_PARTS, -(-number // size)))
    sums = Parts(
        k=np.zeros((parts, count, k.shape[1]), dtype),
        v=np.zeros((parts, count, v.shape[1]), dtype),
        number=np.zeros((parts, count), np.int64),
        forms=np.empty((parts, count, size), dtype),
        columns=np.empty((parts, k.shape[1] + v.shape[1], size), dtype),
    )
    with threads():
        _assign_parts(parts, keys, arrays, sums)
    sizes = torch.from_numpy(sums.number.sum(0))  # [C]
    each = sizes.clamp(min=1).unsqueeze(-1)
    centers, values = (torch.from_numpy(x.sum(0)) / each for x in (sums.k, sums.v))  # [C, E], [C, F]
    return torch.from_numpy(keys.score), centers, values, sizes


@parallel
def _assign_parts(part, parts, keys, forms, sums):
    """The keys of one part, a block at a time."""
    size = sums.forms.shape[2]
    width = keys.k.shape[1]
    blocks = -(-len(keys.k) // size)
    scores = sums.forms[part]  # [C, size]
    columns = sums.columns[part]  # [E + F, size]
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        first = block * size
        number = min(size, len(keys.k) - first)
        for p in range(number):
            for e in range(width):
                columns[e, p] = keys.k[first + p, e]
            for f in range(keys.v.shape[1]):
                columns[width + f, p] = keys.v[first + p, f]
        for c in range(len(scores)):
            scores[c] = forms.bias[c]
        add_product(forms.a, columns[:width], scores, number)
        add_product(forms.b, columns[width:], scores, number)
        _nearest(keys, first, number, scores)
        for p in range(number):
            c = keys.label[first + p]
            if c >= 0:
                sums.number[part, c] += 1
                for e in range(width):
                    sums.k[part, c, e] += keys.k[first + p, e]
                for f in range(keys.v.shape[1]):
                    sums.v[part, c, f] += keys.v[first + p, f]


@compiled
def _nearest(keys, first, number, scores):
    """The largest of each column, the first where they are equal; -1 for a key that is not usable or not finite."""
    best = keys.score[first : first + number]  # [number]
    which = keys.label[first : first + number]  # [number]
    for p in range(number):
        best[p] = scores[0, p]
        which[p] = 0
    for c in range(1, len(scores)):
        for p in range(number):
            higher = scores[c, p] > best[p]
            best[p] = scores[c, p] if higher else best[p]
            which[p] = c if higher else which[p]
    for p in range(number):
        usable = len(keys.usable) == 0 or keys.usable[first + p]
        if not (usable and abs(best[p]) < np.inf):
            which[p] = -1
