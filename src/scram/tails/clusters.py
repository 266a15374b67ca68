"""Clusters of keys for all keys outside the windows: the settings that make a `Codebook`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _compat, calls, errors, ops
from ..codebook import Codebook, check_clusters, check_warm
from ..fitting import fitted
from ..inputs import Inputs
from .base import ALL, Joined, Kind, Tail


@dataclass(frozen=True)
class Clusters(Tail):
    """The windows around the matches exactly, and all other keys by clusters of keys with their mean key and value.

    Right from diffuse to sharp attention, and without variance: the same clusters give the same answer.

    Args:
        count: clusters of each key head; as many as there are keys: exact attention.
        steps: of k-means, on a sample of the keys.
        fit: R, number of queries of each head that are computed densely to adjust the weight and the value of every
            cluster, and as many again to choose how strongly and to report the error; 0: no fit. For inference.
        seed: an int or a 0-d int64 tensor; None takes that of the search, or draws one.

    >>> Clusters(count=128, seed=0).steps
    1
    """

    count: int = 256
    steps: int = 1
    fit: int = 0
    seed: int | Tensor | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("lse",)
    unit: ClassVar[str] = "clusters"
    needs_all_queries: ClassVar[bool] = True
    tuned_sizes: ClassVar[tuple[int, ...]] = (64, 256, 1024)
    tuned_fit: ClassVar[int] = 256

    def __post_init__(self) -> None:
        errors.whole_fields(self, count=1, steps=0, fit=0)
        if 0 < self.fit < 8:
            raise ValueError(f"fit must be 0 or at least 8 queries, got {self.fit}; 256 is a good choice")
        object.__setattr__(self, "seed_tensor", errors.seed(self.seed))

    @property
    def samples(self) -> int:
        return self.count

    def resized(self, samples: int, fit: int = 0) -> Clusters:
        return replace(self, count=samples, fit=fit)

    def check(self, kind: Kind) -> None:
        check_clusters(kind)

    def prepare(self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, warm: Any = None) -> Codebook:
        """Clusters of every key head; of every query head where their masks differ, or where they are fitted."""
        inputs = inputs.level()
        own_seed = self.own_seed(inputs, seed)
        k = inputs.k
        v = inputs.v
        mask = inputs.key_mask
        group = inputs.q.shape[1] // k.shape[1]
        if group > 1 and mask is not None and mask.ndim == k.ndim - 1:
            k = k.repeat_interleave(group, 1)
            v = v.repeat_interleave(group, 1)
        if warm is not None:
            check_warm(inputs.q, inputs.k, inputs.v, self.count, warm)
        call = calls.ClusterCall(
            q=inputs.q,
            k=k,
            v=v,
            key_mask=mask,
            warm_centres=None if warm is None else _of_heads(warm.centres, k.shape[1]),
            warm_values=None if warm is None else _of_heads(warm.values, k.shape[1]),
            seed=own_seed,
            rows=inputs.rows,
            count=self.count,
            steps=self.steps if warm is None else min(self.steps, 1),
            scale=inputs.scale,
        )
        clustered = ops.cluster(inputs.engine, call)
        book = Codebook(*clustered, score=str(inputs.score), scale=inputs.scale, key_mask=mask)
        if not self.fit:
            return book
        if torch.compiler.is_compiling() or _compat.transforms_active():
            raise errors.fit_is_eager()
        if index is None:
            raise ValueError(
                "clusters.fit needs matches= and radius=, those of the attend call that the clusters are for"
            )
        return fitted(
            book,
            inputs.q,
            inputs.k,
            inputs.v,
            index,
            radius=inputs.radius,
            fit=self.fit,
            seed=own_seed,
            numbers=inputs.rows,
        )

    def join(self, inputs: Inputs, index: Tensor, seed: Tensor | None) -> Joined:
        return self.prepare(inputs, index, seed).join(inputs, index, seed)

    def visited(self, queries: int, keys: int) -> int:
        """The queries that a fit computes densely are spread over all."""
        fit = -(-2 * self.fit * keys // queries)
        return min(self.count, keys) + fit

    def of_part(self, seed: int | Tensor | None, share: Fraction = ALL) -> Clusters:
        return replace(self, seed=seed)

    def describe(self) -> str:
        return f"{self.count} clusters{', fitted' if self.fit else ''}"


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Clusters [B, Hc, C, width] for so many heads: of a group the first, or one for each of it."""
    if x.shape[1] > heads:
        return x[:, :: x.shape[1] // heads]
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] < heads else x
