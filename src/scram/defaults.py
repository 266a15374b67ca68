"""What `scram.attention(q, k, v)` does when nothing else is said: dense attention where cheaper, else a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .codebook import Codebook
from .cost import keys_visited
from .estimators import Clusters, Estimator, Hybrid
from .options import Weight
from .types import Score, Search

SEARCH, CLUSTERS, HYBRID = Search(), Clusters(), Hybrid()


class DeviceCost(NamedTuple):
    """What dense attention and a search with clusters take on a device."""

    least: float  # us that a search takes however small the grid is: the host's time
    row: float  # us of each row
    query: float  # ns of each query, besides
    feature: float  # ns of each query and feature of key and value, besides
    pair: float  # ps of each query and key of dense attention
    pair_feature: float  # ps of each query, key and feature, besides


# By device and whether numbers have 16 bits. CPU: 2 cores, float32, 24 to 128 points a side, E = 16 to 64, 1 to 8
# heads; both grow alike with fewer cores. CUDA: H200, bfloat16, 256 to 1024 points a side, E = 64 and 128, beside
# cuDNN; 32 bits are not measured but taken for eight times as slow. docs/measurements.md, section 13, has the figures.
COSTS = {
    ("cpu", False): DeviceCost(0, 4000, 1000, 17, 250, 10.9),
    ("cpu", True): DeviceCost(0, 4000, 1000, 17, 250, 10.9),
    ("cuda", True): DeviceCost(1600, 0, 1.5, 0.037, 0, 0.004),
    ("cuda", False): DeviceCost(1600, 0, 3, 0.074, 0, 0.032),
}


def dense_is_cheaper(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether dense attention takes less time than a search with clusters, by what was measured for such tensors."""
    cost = COSTS.get((q.device.type, q.dtype.itemsize == 2))
    if cost is None:
        return True  # a device without an engine of its own: the reference is far slower than torch
    rows, queries, keys = q.shape[0] * q.shape[1], q.shape[2:-1].numel(), k.shape[2:-1].numel()
    width = q.shape[-1] + v.shape[-1]
    dense = rows * queries * keys * (cost.pair + cost.pair_feature * width) * 1e-6
    searched = rows * (cost.row + queries * (cost.query + cost.feature * width) * 1e-3)
    return bool(dense <= max(cost.least, searched))


def goes_dense(q: Tensor, k: Tensor, v: Tensor, weight: Weight, score: Score) -> bool:
    """Whether a call of which nothing is said is dense attention: torch has it, and it is cheaper."""
    return weight == "softmax" and not callable(score) and dense_is_cheaper(q, k, v)


def default_tail(weight: Weight, causal: bool, score: Score) -> Clusters | Hybrid | None:
    """Clusters for softmax, under causal order keys drawn; no tail for other weights and callable scores."""
    if weight != "softmax" or callable(score):
        return None
    return HYBRID if causal else CLUSTERS


@dataclass(frozen=True)
class Explanation:
    """What a call of `scram.attention` would run, why, and what it costs. Prints itself.

    Args:
        dense: whether it is dense attention.
        engine: the implementation that runs it.
        search, radius, tail: the settings in force; None where it is dense, or where there is no tail.
        reasons: why, in words.
        scores: keys visited per query, at most; `dense_scores`: by dense attention.
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
            f"{self.scores} keys visited per query, {self.dense_scores} by dense attention; "
            f"{self.memory / 2**20:.1f} MiB beyond inputs and outputs"
        )
        return "\n  ".join(lines)


def explanation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: bool,
    automatic: bool,
    engine: str,
    search: Search,
    radius: tuple[int, ...],
    tail: Estimator | Codebook | None,
    score: Score,
) -> Explanation:
    """The explanation of a call that was planned so."""
    keys = k.shape[2:-1].numel()
    queries = q.shape[:-1].numel()
    size = " x ".join(map(str, q.shape[2:-1]))
    if dense:
        why = f"on {q.device.type} the grid {size} with width {q.shape[-1]} is too small for a search to be faster"
        if all(device != q.device.type for device, _ in COSTS):
            why = f"{q.device.type} has no engine that is faster than torch"
        return Explanation(True, "torch", None, None, None, (why,), keys, keys, 0)
    reasons = ["search, tail, warm or impl was given"]
    if automatic:
        only_softmax = "torch's attention has softmax and scores by name only"
        reasons = [only_softmax if dense_is_cheaper(q, k, v) else f"for the grid {size} a search is cheaper"]
    if tail is None:
        reasons.append("no tail: keys outside the windows count nothing")
    memory = queries * search.matches * 8 * 2 + (0 if tail is None else k.shape[:-1].numel() * 4)
    scores = keys_visited(q, k, search, radius, tail, score).tail
    return Explanation(False, engine, search, radius, tail, tuple(reasons), scores, keys, memory)
