"""Clustering on a CPU: the nearest centre of every key, and the sums of each cluster, for a block of keys at a time.

Everything of a block is done by one thread, the matrix products too: keys lie along the vector units, centres one below
the other. Keys are cut into parts by their number alone, so that sums have the same bits on any number of threads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import clustering
from ...calls import ClusterCall, Clustered
from ...grid import rows
from ...scoring import accumulator
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
    legal: Array  # bool [S], or empty: all
    label: Array  # int32 [S]
    score: Array  # [S], of the linear form with the nearest centre


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
    k, v, count = call.k, call.v, call.clusters
    wide, keys, key_rows = accumulator(v.dtype), math.prod(k.shape[2:-1]), k.shape[0] * k.shape[1]
    if count >= keys or not key_rows:
        return clustering.cluster(call)
    k_rows, v_rows = rows(k).to(wide).contiguous(), rows(v).to(wide).contiguous()
    masks = None if call.key_mask is None else clustering.legal_keys(call, k_rows, v_rows)
    label = torch.empty(key_rows, keys, dtype=torch.int32, device="cpu")
    made = []
    for row in range(key_rows):
        legal = None if masks is None else masks[row]
        start = clustering.Start.of(call, row, k_rows[row], v_rows[row], legal)
        centres, values = start.centres, start.values
        sizes = torch.ones(count, dtype=torch.int64, device="cpu")
        for step in range(call.steps):
            forms = start.space.forms(centres, values, sizes)
            score, centres, values, sizes = _assign(forms, start.k, start.v, None, None)
            if not sizes.all():
                centres, values, sizes = start.placed_anew(call, step, score, centres, values, sizes)
        forms = start.space.forms(centres, values, sizes)
        made.append(_assign(forms, k_rows[row], v_rows[row], legal, label[row])[1:])
    centres, values, sizes = (
        torch.stack(part).reshape(*k.shape[:2], *part[0].shape) for part in zip(*made, strict=True)
    )
    return Clustered(centres, values, sizes.to(torch.int32), label.reshape(k.shape[:-1]))


def _assign(
    forms: clustering.LinearForms, k: Tensor, v: Tensor, legal: Tensor | None, label: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write the label of each key; its score [S], and mean keys, mean values and sizes of the clusters."""
    number, dtype = len(k), k.numpy().dtype
    arrays = Forms(*(x.contiguous().numpy() for x in forms))
    count, size = len(arrays.bias), block_size(len(arrays.bias))
    label = torch.empty(number, dtype=torch.int32, device="cpu") if label is None else label
    keys = Keys(
        k.contiguous().numpy(), v.contiguous().numpy(), np.empty(0, bool) if legal is None else legal.numpy(),
        label.numpy(), np.empty(number, dtype),
    )  # fmt: skip
    parts = max(1, min(MOST_PARTS, -(-number // size)))
    shapes = (count, k.shape[1]), (count, v.shape[1])
    k_sum, v_sum = (np.zeros((parts, *shape), dtype) for shape in shapes)
    made = Parts(
        k_sum, v_sum, np.zeros((parts, count), np.int64),
        np.empty((parts, count, size), dtype), np.empty((parts, k.shape[1] + v.shape[1], size), dtype),
    )  # fmt: skip
    with threads():
        _assign_parts(parts, keys, arrays, made)
    sizes = torch.from_numpy(made.number.sum(0))
    each = sizes.clamp(min=1).unsqueeze(-1)
    centres, values = (torch.from_numpy(x.sum(0)) / each for x in (made.k, made.v))
    return torch.from_numpy(keys.score), centres, values, sizes


@parallel
def _assign_parts(part, parts, keys, forms, made):
    """The keys of one part, a block at a time."""
    size, width = made.forms.shape[2], keys.k.shape[1]
    blocks = -(-len(keys.k) // size)
    scores, columns = made.forms[part], made.columns[part]
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
                made.number[part, c] += 1
                for e in range(width):
                    made.k[part, c, e] += keys.k[first + p, e]
                for f in range(keys.v.shape[1]):
                    made.v[part, c, f] += keys.v[first + p, f]


@compiled
def _nearest(keys, first, number, scores):
    """The largest of each column, the first where they are equal; -1 for a key that is not legal or not finite."""
    best, which = keys.score[first : first + number], keys.label[first : first + number]
    for p in range(number):
        best[p] = scores[0, p]
        which[p] = 0
    for c in range(1, len(scores)):
        for p in range(number):
            higher = scores[c, p] > best[p]
            best[p] = scores[c, p] if higher else best[p]
            which[p] = c if higher else which[p]
    for p in range(number):
        legal = len(keys.legal) == 0 or keys.legal[first + p]
        if not (legal and abs(best[p]) < np.inf):
            which[p] = -1
