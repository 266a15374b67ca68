"""Exact attention of a sample of queries, and how far off any output is: the measure of `tune`, `trust` and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import statistics
from ..core.dense import attend_extra, dense_attention
from ..core.exact import exact_attention, merge
from ..core.statistics import Interval
from ..settings import Score
from ..spec.grid import grid_of
from ..spec.scoring import accumulator
from . import measure

SHARE = 0.95  # of the queries, for which an error is promised


class Errors(NamedTuple):
    """How far off outputs are, of every batch and head.

    Args:
        output: the output error, ||out - exact|| / ||exact|| over all sampled queries [B, H]: a point value, which few
            queries carry.
        p95: the 95th percentile over queries of |out - exact| / RMS |exact| of the head, with its interval; NaN where
            no query has an allowed key.
        median: the median, likewise.
    """

    output: Tensor
    p95: Interval
    median: Interval

    def keeps(self, error: float) -> bool:
        """Whether the upper end of the 95th percentile is at most `error` in every head."""
        return not bool((self.p95.high > error).any())

    @staticmethod
    def of(square: Tensor, size: Tensor, points: int, confidence: float = statistics.CONFIDENCE) -> Errors:
        """From |out - exact|^2 and |exact|^2 of the sampled queries [B, H, n], of `points` in all; NaN is left out.

        Infinite is what is not finite in `square`.
        """
        counts = ~size.isnan()
        count = counts.sum(-1)
        rms = (torch.where(counts, size, 0).sum(-1) / count).unsqueeze(-1)
        share = torch.where(square == 0, 0, (square / rms).nan_to_num(nan=torch.inf, posinf=torch.inf)).sqrt().float()
        share = torch.where(counts, share, torch.nan)
        output = torch.where(counts, share, 0).square().sum(-1).div(count).sqrt()
        size_share = statistics.root_share(size, points, confidence)  # the root mean square is of the sample too
        p95, median = (statistics.quantile(share, x, points, confidence).widened(size_share) for x in (SHARE, 0.5))
        return Errors(output, p95, median)

    @property
    def worst(self) -> tuple[float, float, float]:
        """The 95th percentile of the head with the highest upper end: value, low, high."""
        flat = [x.flatten().nan_to_num(nan=0.0, posinf=math.inf) for x in self.p95]
        at = int(flat[2].argmax())
        return float(flat[0][at]), float(flat[1][at]), float(flat[2][at])


@dataclass(frozen=True, eq=False)
class Truth:
    """Exact attention of a seeded sample of queries.

    Args:
        queries: int64 [n], flat indices of the sampled queries, the same for every head.
        out: exact outputs [B, H, n, F], float32 or float64.
        lse: [B, H, n], log of the normalizer; -inf for a query without an allowed key, which is left out. 0 where torch
            computed the outputs: it does not return it.
        points: queries of a head in all.

    >>> q = torch.randn(1, 2, 16, 16, 8)
    >>> truth = Truth.of(q, q, q, num_queries=100)
    >>> truth.errors(scram.exact_attention(q, q, q).out).keeps(1e-4)
    True
    """

    queries: Tensor
    out: Tensor
    lse: Tensor
    points: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        score: Score = "dot",
        extra: tuple[Tensor, Tensor] | None = None,
        extra_mask: Tensor | None = None,
        num_queries: int | None = None,
        seed: int = 0,
        with_lse: bool = False,
    ) -> Truth:
        """Of `num_queries` queries, None for all; q [B, H, *G, E], k [B, Hk, *G', E], v [B, Hk, *G', F].

        The other arguments are those of `attention`; `with_lse` takes somewhat longer.
        """
        wanted = measure.sample_queries(q, num_queries, seed)
        wide = accumulator(q.dtype)
        q, k, v = (x.to(wide) for x in (q, k, v))
        if extra is not None:
            extra = extra[0].to(wide), extra[1].to(wide)
        plain = not causal and key_mask is None and isinstance(score, str) and q.shape[1] == k.shape[1]
        if plain and not with_lse:
            # By torch: faster, and it never holds the scores of all pairs.
            some = q.flatten(2, -2)[:, :, wanted]  # [B, H, n, E]
            keys, values = k.flatten(2, -2), v.flatten(2, -2)
            out = dense_attention(some, keys, values, scale=scale, score=score, extra=extra, extra_mask=extra_mask)
            return Truth(wanted, out, torch.zeros_like(out[..., 0]), math.prod(grid_of(q)))
        attended = exact_attention(q, k, v, causal=causal, key_mask=key_mask, scale=scale, score=score, queries=wanted)
        if extra is not None:
            attended = merge(
                attended, attend_extra(q.flatten(2, -2)[:, :, wanted], extra, extra_mask, scale=scale, score=score)
            )
        return Truth(wanted, attended.out, attended.lse, math.prod(grid_of(q)))

    def square(self, out: Tensor) -> Tensor:
        """|out - exact|^2 of the sampled queries [B, H, n], of an output [B, H, *G, F]."""
        return statistics.sum_of_squares(out.flatten(2, -2)[:, :, self.queries].to(self.out.dtype) - self.out)

    @property
    def size(self) -> Tensor:
        """|exact|^2 of the sampled queries [B, H, n]; NaN for a query without an allowed key."""
        return torch.where(self.lse > -torch.inf, statistics.sum_of_squares(self.out), torch.nan)

    def errors(self, out: Tensor, confidence: float = statistics.CONFIDENCE) -> Errors:
        """Of an output [B, H, *G, F]; what is not finite where the truth is, is infinitely far off."""
        return Errors.of(self.square(out), self.size, self.points, confidence)
