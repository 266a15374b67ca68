"""What `scram.attention(q, k, v)` does when nothing else is said: dense attention where cheaper, else a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .codebook import Codebook
from .estimators import Clusters, Estimator, Hybrid
from .types import Score, Search

SEARCH, CLUSTERS, HYBRID = Search(), Clusters(), Hybrid()


class Cost(NamedTuple):
    """Microseconds of a call: what it takes however small it is, and picoseconds per pair of features."""

    fixed: float
    pair: float  # of dense attention: per (query, key, feature)
    query: float  # of a search with clusters, nanoseconds per query and row
    feature: float  # and nanoseconds per query, row and feature


# Measured; only the ratio of the two counts. CPU: 2 cores, float32. CUDA: H200, 16 bits and 32 bits.
COSTS = {
    ("cpu", False): Cost(0.0, 8.0, 2200.0, 30.0),
    ("cpu", True): Cost(0.0, 8.0, 2200.0, 30.0),
    ("cuda", True): Cost(400.0, 0.0035, 1.0, 0.025),
    ("cuda", False): Cost(400.0, 0.02, 1.5, 0.05),
}


def dense_is_cheaper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether dense attention takes less time than a search with clusters, by what was measured for such tensors."""
    cost = COSTS.get((q.device.type, q.dtype.itemsize == 2))
    if cost is None:
        return True  # a device without an engine of its own: the reference is far slower than torch
    rows, queries, keys = q.shape[0] * q.shape[1], q.shape[2:-1].numel(), k.shape[2:-1].numel()
    width = q.shape[-1] + v.shape[-1]
    dense = rows * queries * keys * width * cost.pair * 1e-6
    searched = cost.fixed + rows * queries * (cost.query + width * cost.feature) * 1e-3
    return bool(dense <= searched)


def default_tail(weight: str, causal: bool, score: Score, dropout_p: float, window: str) -> Estimator | None:
    """Clusters for softmax; under causal order keys drawn, which takes neither dropout nor tiles; else no tail."""
    if weight != "softmax" or callable(score):
        return None
    if causal:
        return None if dropout_p or window != "query" else HYBRID
    return CLUSTERS


@dataclass(frozen=True)
class Explanation:
    """What a call of `scram.attention` would run, why, and what it costs. Prints itself.

    Args:
        dense: whether it is dense attention.
        engine: the implementation that runs it.
        search, radius, tail: the settings in force; None where it is dense, or where there is no tail.
        reasons: why, in words.
        scores: scores that a query computes, about; `dense_scores`: with every key.
        memory: bytes beyond inputs and outputs, about.
    """

    dense: bool
    engine: str
    search: Search | None
    radius: tuple[int, ...] | None
    tail: Estimator | Codebook | None
    reasons: tuple[str, ...]
    scores: int
    dense_scores: int
    memory: int

    def __str__(self) -> str:
        what = "dense attention" if self.dense else "search + windows" + (f" + {self.tail}" if self.tail else "")
        lines = [f"{what}, by {self.engine}", *self.reasons]
        if self.search is not None:
            lines.append(f"{self.search}, radius {self.radius}")
        lines.append(
            f"{self.scores} scores a query, {self.dense_scores} with every key; "
            f"{self.memory / 2**20:.1f} MiB beyond inputs and outputs"
        )
        return "\n  ".join(lines)


def explanation(
    q: Tensor,
    k: Tensor,
    dense: bool,
    automatic: bool,
    engine: str,
    search: Search,
    radius: tuple[int, ...],
    tail: Estimator | Codebook | None,
) -> Explanation:
    """The explanation of a call that was planned so."""
    keys = k.shape[2:-1].numel()
    queries = q.shape[:-1].numel()
    size = " x ".join(map(str, q.shape[2:-1]))
    if dense:
        small = f"on {q.device.type} the grid {size} with width {q.shape[-1]} is too small for a search to be faster"
        return Explanation(True, "torch", None, None, None, (small,), keys, keys, 0)
    reasons = [f"for the grid {size} a search is cheaper" if automatic else "search, tail, warm or impl was given"]
    if tail is None:
        reasons.append("no tail: keys outside the windows count nothing")
    window = torch.Size([2 * b + 1 for b in radius]).numel()
    moves = len(search.jumps) * 2 * len(radius) * (2 if search.propagate == "both" else 1)
    searched = search.sweeps * (moves + search.gossip + max(k.shape[2:-1]).bit_length()) * search.matches
    count = tail.sizes.shape[-1] if isinstance(tail, Codebook) else 0 if tail is None else min(tail.samples, keys)
    memory = queries * search.matches * 8 * 2 + (0 if tail is None else k.shape[:-1].numel() * 4)
    scores = searched + search.matches * window + count
    return Explanation(False, engine, search, radius, tail, tuple(reasons), scores, keys, memory)
