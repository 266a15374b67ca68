"""What a sample of queries tells of all queries: means and quantiles with intervals."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate from the sampled queries and its interval for all of them, each [B, H]."""

    value: Tensor
    low: Tensor
    high: Tensor

    def cell(self, *at: int) -> str:
        """One cell of a table: the value and the interval of a batch and head.

        >>> Interval(torch.tensor([[0.5]]), torch.tensor([[0.25]]), torch.tensor([[1.0]])).cell(0, 0)
        '0.500 [0.250, 1.000]'
        """
        value, low, high = (float(x[at]) for x in self)
        digits = 3 if not 10 <= high < math.inf else 1
        return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    def widened(self, share: Tensor) -> Interval:
        """By a share [B, H] of the value on either side, in quadrature: for values over a number that is estimated too.

        >>> one = torch.ones(1, 1)
        >>> Interval(one, one - 0.3, one + 0.4).widened(0.3 * one).high
        tensor([[1.5000]])
        """
        spread = (self.value * share).nan_to_num(nan=0.0, posinf=torch.inf)
        low = self.value - torch.hypot(self.value - self.low, spread)
        high = self.value + torch.hypot(self.high - self.value, spread)
        low, high = (torch.where(x.isnan(), end, x) for x, end in ((low, self.low), (high, self.high)))  # inf - inf
        return Interval(self.value, low.clamp(min=0), high)


def normal(confidence: float) -> float:
    """How many standard deviations a normal interval reaches to either side.

    >>> round(normal(0.95), 2)
    1.96
    """
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64, device="cpu")))


def shared(times: int, confidence: float = CONFIDENCE) -> float:
    """The confidence of each of `times` intervals that hold all together with `confidence` (Bonferroni).

    >>> shared(5)
    0.99
    """
    return 1 - (1 - confidence) / max(times, 1)


def mean(x: Tensor, points: int, confidence: float = CONFIDENCE) -> Interval:
    """The mean of shares in 0..1.

    Wilson's interval with the variance that was seen, then moved out by what one more query of share 0 or 1 would move
    the mean: where nearly all shares are near 1, the few that are not may be missing from a sample.

    Args:
        x: shares of the sampled queries [B, H, n]; NaN is left out.
        points: queries in all.
    """
    some = x.isfinite()
    n = some.sum(-1).clamp(min=1).to(x.dtype)
    middle = torch.where(some.any(-1), torch.where(some, x, 0).sum(-1) / n, torch.nan)
    variance = torch.where(some, (x - middle.unsqueeze(-1)).square(), 0).sum(-1) / (n - 1).clamp(min=1)
    most = middle * (1 - middle)  # of a share that is 0 or 1, which the interval was made for
    ratio = torch.where((variance > 0) & (most > 0), variance / most.clamp(min=1e-12), 1).clamp(max=1)
    rest = max(1 - x.shape[-1] / points, 0.0)  # a sample of everything leaves nothing open
    z2 = normal(confidence) ** 2 * ratio * rest / n
    center = (middle + z2 / 2) / (1 + z2)
    half = (z2 * most + z2.square() / 4).sqrt() / (1 + z2)
    low = (center - half - rest * middle / (n + 1)).minimum(middle)
    high = (center + half + rest * (1 - middle) / (n + 1)).maximum(middle)
    return Interval(middle, low.clamp(min=0), high.clamp(max=1))


def root_share(squares: Tensor, points: int, confidence: float = CONFIDENCE) -> Tensor:
    """By what share of itself the root of a mean square may be off: half the width of its interval over it, [B, H].

    Args:
        squares: of the sampled queries [B, H, n]; NaN is left out.
        points: queries in all.
    """
    some = ~squares.isnan()
    n = some.sum(-1).clamp(min=1)
    middle = torch.where(some, squares, 0).sum(-1) / n
    variance = torch.where(some, (squares - middle.unsqueeze(-1)).square(), 0).sum(-1) / (n - 1).clamp(min=1)
    rest = max(1 - squares.shape[-1] / points, 0.0)  # a sample of everything leaves nothing open
    share = normal(confidence) * (variance * rest / n).sqrt() / (2 * middle)
    return torch.where(middle > 0, share, 0)


def quantile(x: Tensor, share: float, points: int, confidence: float = CONFIDENCE) -> Interval:
    """A quantile of numbers >= 0, between the order statistics that enclose it.

    Where the sample is too small for that, the interval reaches to 0 or to infinity.

    Args:
        x: numbers of the sampled queries [B, H, n], drawn without repetition; NaN is left out.
        share: which quantile, in 0..1.
        points: queries in all.
    """
    some = ~x.isnan()
    ordered = torch.where(some, x, torch.inf).sort(-1).values
    value = _interpolated(ordered, some.sum(-1), share)
    if x.shape[-1] >= points:
        return Interval(value, value, value)
    ends = torch.tensor([0.0, torch.inf], dtype=x.dtype, device=x.device).expand(*x.shape[:-1], 2)
    padded = torch.cat([ends[..., :1], ordered, ends[..., 1:]], -1)
    counts = some.sum(-1).flatten().tolist()
    at = [ranks(n, share, points - x.shape[-1] + n, confidence) if n else (-1, -1) for n in counts]
    rank = torch.tensor(at, dtype=torch.int64, device=x.device).reshape(*x.shape[:-1], 2)
    bounds = torch.where(some.any(-1, keepdim=True), padded.gather(-1, rank + 1), torch.nan)  # [B, H, 2]
    return Interval(value, bounds[..., 0].minimum(value), bounds[..., 1].maximum(value))


def _interpolated(ordered: Tensor, count: Tensor, share: float) -> Tensor:
    """As torch.nanquantile, which refuses more than 2**24 numbers: of the first `count` [B, H] of [B, H, n]."""
    place = share * (count - 1).clamp(min=0).double()
    below = place.floor().long()
    above = torch.minimum(below + 1, (count - 1).clamp(min=0))
    low, high = (ordered.gather(-1, at.unsqueeze(-1)).squeeze(-1) for at in (below, above))
    between = torch.where(low == high, low, low + (place - below).to(low.dtype) * (high - low))
    return torch.where(count > 0, between, torch.nan)


@lru_cache(maxsize=1024)
def ranks(n: int, share: float, points: int, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """Order statistics of n of `points` queries, from 0, that miss a quantile of all on either side seldom enough.

    Each side is missed with half of 1 - confidence at most, by the hypergeometric law. -1 and n where none does.

    >>> ranks(512, 0.5, 10**9), ranks(512, 0.95, 10**9), ranks(512, 0.95, 1024), ranks(512, 0.95, 512)
    ((233, 278), (475, 496), (478, 493), (485, 486))
    >>> ranks(20, 0.95, 10**9)
    (16, 20)
    """
    place = share * (points - 1)
    below = math.floor(place)
    above = math.ceil(place)
    miss = (1 - confidence) / 2
    first = int((_below(n, below + 1, points) <= miss).sum()) - 1
    last = int((_below(n, above, points) < 1 - miss).sum())
    return first, last


def _below(n: int, low: int, points: int) -> Tensor:
    """P(at most j of n drawn are among the lowest `low` of `points`) for j = 0..n, float64."""
    counts = torch.arange(n + 1, dtype=torch.float64, device="cpu")

    def ways(total: int | float, chosen: Tensor) -> Tensor:
        """Log of the number of ways to choose; -inf for none."""
        rest = total - chosen
        possible = rest >= 0
        whole = torch.tensor(float(total), dtype=torch.float64, device="cpu")
        rest = rest.clamp(min=0)
        return torch.where(
            possible, torch.lgamma(whole + 1) - torch.lgamma(chosen + 1) - torch.lgamma(rest + 1), -torch.inf
        )

    law = ways(low, counts) + ways(points - low, n - counts)
    return (law - law.logsumexp(0)).exp().cumsum(0)


def queries_needed(share: float, times: int, spread: float = 0.025) -> int:
    """Queries for an interval, shared over `times`, whose upper end is at most the quantile of `share` + `spread`.

    >>> queries_needed(0.95, 8)
    512
    """
    n = 64
    while ranks(n, share, 10**9, shared(times))[1] > (share + spread) * n:
        n *= 2
    return n


def sum_of_squares(x: Tensor) -> Tensor:
    """Over the last axis, float64 where the device has it: squares of float32 leave its range at 1e19 and at 1e-23.

    >>> sum_of_squares(torch.full((2, 3), 1e-25)).sqrt() / 1e-25
    tensor([1.7321, 1.7321], dtype=torch.float64)
    """
    wide = x if x.device.type == "mps" else x.double()
    return wide.square().sum(-1)
