"""Clusters of keys for all keys outside the windows: the settings that make a `Codebook`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from torch import Tensor

from ...settings import Score
from ...spec.clustering import metric_of
from .. import calls, checks, ops
from ..inputs import Inputs
from .base import ALL, Joined, Kind, Tail
from .codebook import Codebook, check_clusters, check_warm


@dataclass(frozen=True)
class Clusters(Tail):
    """Keys of the clusters that matter most to a tile of 64 queries one by one, all others by their clusters.

    A cluster stands for its keys with their mean key, mean value and number. Each tile attends exactly, besides the
    windows, all keys of the clusters whose mean would be most wrong for it (routed keys). Right from diffuse to sharp
    attention, and without variance: the same clusters give the same answer.

    Args:
        count: clusters of each key head; as many as there are keys: exact attention.
        keys: that a tile attends one by one, at most; 0: none.
        first_order: whether a cluster's mean value is corrected by how values go with scores inside clusters.
        second_order: whether a cluster's weight is raised by how far the scores of its keys are apart.
        steps: of k-means, on a sample of the keys.
        seed: an int or a 0-d int64 tensor; None takes that of the search, or draws one.

    >>> Clusters(count=128, seed=0).keys
    512
    """

    count: int = 256
    keys: int = 512
    first_order: bool = True
    second_order: bool = True
    steps: int = 1
    seed: int | Tensor | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("lse",)
    unit: ClassVar[str] = "clusters"
    needs_all_queries: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = True
    tuned_sizes: ClassVar[tuple[int, ...]] = (64, 256, 1024)

    def __post_init__(self) -> None:
        checks.whole_fields(self, count=1, keys=0, steps=0)
        checks.flag("first_order", self.first_order)
        checks.flag("second_order", self.second_order)
        object.__setattr__(self, "seed_tensor", checks.seed(self.seed))

    @property
    def samples(self) -> int:
        return self.count

    def resized(self, samples: int) -> Clusters:
        return replace(self, count=samples)

    def check(self, kind: Kind) -> None:
        check_clusters(kind)

    def _call(self, inputs: Inputs, seed: Tensor | None, warm: Any) -> calls.ClusterCall:
        """Of keys of every key head; of every query head where their masks differ."""
        inputs = inputs.level()
        k = inputs.k
        v = inputs.v
        mask = inputs.key_mask
        group = inputs.q.shape[1] // k.shape[1]
        if group > 1 and mask is not None and mask.ndim == k.ndim - 1:
            k = k.repeat_interleave(group, 1)
            v = v.repeat_interleave(group, 1)
        if warm is not None:
            check_warm(inputs.q, inputs.k, inputs.v, self.count, warm)
        return calls.ClusterCall(
            q=inputs.q,
            k=k,
            v=v,
            key_mask=mask,
            warm_centers=None if warm is None else _of_heads(warm.centers, k.shape[1]),
            warm_values=None if warm is None else _of_heads(warm.values, k.shape[1]),
            seed=self.own_seed(inputs, seed),
            rows=inputs.rows,
            count=self.count,
            steps=self.steps if warm is None else min(self.steps, 1),
            scale=inputs.scale,
        )

    def metric(self, inputs: Inputs) -> Tensor:
        """What the squared distance of a score counts on each axis of the keys, [B, Hc, E]; it needs a seed."""
        return metric_of(self._call(inputs, None, None))

    def prepare(self, inputs: Inputs, seed: Tensor | None, warm: Any = None) -> Codebook:
        """Clusters of every key head; of every query head where their masks differ."""
        clustered = ops.cluster(inputs.engine, self._call(inputs, seed, warm))
        return Codebook(
            centers=clustered.centers,
            values=clustered.values,
            sizes=clustered.sizes,
            label=clustered.label,
            variance=clustered.variance,
            spreads=clustered.spreads,
            slope=clustered.slope if self.first_order else None,
            order=clustered.order,
            key_mask=inputs.key_mask,
            score=str(inputs.score),
            scale=inputs.scale,
            keys=self.keys,
            second_order=self.raises_weights(inputs.score),
        )

    def raises_weights(self, score: Score) -> bool:
        """Whether the second order is in force for a score."""
        # The features of "l2" hold |k|^2, which goes with k: their variances say too much of the scores.
        return self.second_order and score != "l2"

    def join(self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None) -> Joined:
        return self.prepare(inputs, seed).join(inputs, index, seed, routes)

    def visited(self, queries: int, keys: int) -> int:
        return min(self.count + self.keys, keys)

    def of_part(self, seed: int | Tensor | None, share: Fraction = ALL) -> Clusters:
        # Parts of one grid hold the same content again, so that each needs more than its share of both.
        root = math.sqrt(share)
        return replace(self, seed=seed, count=max(1, round(self.count * root)), keys=round(self.keys * root))

    def describe(self) -> str:
        return f"{self.count} clusters{f' + {self.keys} keys' if self.keys else ''}"


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Clusters [B, Hc, C, width] for so many heads: of a group the first, or one for each of it."""
    if x.shape[1] > heads:
        return x[:, :: x.shape[1] // heads]
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] < heads else x
