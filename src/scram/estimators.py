"""Settings of the estimators, and the value that they return: an output with diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import errors

LOW_ESS = 0.05  # of the samples
LOW_ACCEPTANCE = 0.1
HIGH_RHAT = 1.1
HIGH_ERROR = 0.5  # of the size of out


class Estimator:
    """Base class of the settings of an estimator: what `scram.estimate` takes as its method."""

    samples: int
    seed_tensor: Tensor | None
    reports: ClassVar[tuple[str, ...]]  # the fields of `Estimate` that it has besides `out`
    unit: ClassVar[str] = "samples each"

    def sample_settings(self) -> dict[str, Any]:
        """The fields of a SampleCall that are this estimator's own, and the bandwidth of its steps."""
        raise NotImplementedError


@dataclass(frozen=True)
class Snis(Estimator):
    """Self-normalised importance sampling: keys drawn near the matches, and anywhere; weighed by how likely they were.

    Every query draws keys of its own, so queries err independently. The estimate is consistent: its bias falls as
    1 / samples.

    Args:
        samples: keys drawn per query.
        alpha: share of the draws made near the matches, in [0, 1); the rest is uniform. 0 is uniform sampling.
        bandwidth: standard deviation, in keys, of the draws around a match, on every axis.
        seed: an int or a 0-d int64 tensor; None draws one from torch's default generator.

    >>> Snis(samples=64, alpha=0.25).bandwidth
    1.0
    """

    samples: int = 512
    alpha: float = 0.2
    bandwidth: float = 1.0
    seed: int | Tensor | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("lse", "variance", "ess")

    def __post_init__(self) -> None:
        errors.whole_fields(self, samples=1)
        errors.real("alpha", self.alpha, 0.0, 1.0, "[0, 1)", "; leave some uniform draws, or far keys are never seen")
        errors.bandwidth(self.bandwidth)
        object.__setattr__(self, "seed_tensor", errors.seed(self.seed))

    def sample_settings(self) -> dict[str, Any]:
        draws = {"alpha": float(self.alpha), "bandwidth": float(self.bandwidth)}
        return {"method": "snis", **draws, "chains_per_mode": 1, "burn_in": 0}


@dataclass(frozen=True)
class MetropolisHastings(Estimator):
    """Random walks over the keys, from the matches, that stay at a key in proportion to its attention.

    A walk explores the neighbourhood it began in. Walks that do not reach the other modes give each mode the same share
    whatever its mass: the estimate is biased between modes, which rhat above 1 shows. There is no lse, so no `extra`.

    Args:
        samples: steps per query, spread evenly over its walks.
        chains_per_mode: walks that begin at each match.
        bandwidth: standard deviation, in keys, of a step, on every axis.
        burn_in: first steps of each walk that do not count, on top of `samples`.
        seed: an int or a 0-d int64 tensor; None draws one from torch's default generator.

    >>> MetropolisHastings(samples=64).burn_in
    0
    """

    samples: int = 512
    chains_per_mode: int = 1
    bandwidth: float = 4.0
    burn_in: int = 0
    seed: int | Tensor | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("acceptance", "rhat")

    def __post_init__(self) -> None:
        errors.whole_fields(self, samples=1, chains_per_mode=1, burn_in=0)
        errors.bandwidth(self.bandwidth)
        object.__setattr__(self, "seed_tensor", errors.seed(self.seed))

    def sample_settings(self) -> dict[str, Any]:
        walks = {"chains_per_mode": self.chains_per_mode, "burn_in": self.burn_in}
        return {"method": "metropolis", "alpha": 0.0, "bandwidth": float(self.bandwidth), **walks}


@dataclass(frozen=True)
class Hybrid(Estimator):
    """The windows around the matches exactly, and all other keys estimated from a draw that a head's queries share.

    Because they share it, their errors go together: averaging over queries does not make the error smaller, and over
    one draw an interval may hold the truth for clearly more or fewer queries than it says. Over draws it is right.

    Args:
        samples: keys drawn per head, on top of those in the windows; as many as there are keys: exact attention.
        stratified: one key from each cell of a regular partition of the grid, at most `samples` cells, in place of keys
            drawn anywhere; better where scores and values are smooth over the grid. Its variance is reported as if the
            keys had been drawn anywhere, which is too large rather than too small.
        seed: an int or a 0-d int64 tensor; None draws one from torch's default generator.

    >>> Hybrid(samples=256, seed=0).stratified
    False
    """

    samples: int = 512
    stratified: bool = False
    seed: int | Tensor | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("lse", "variance")

    def __post_init__(self) -> None:
        errors.whole_fields(self, samples=1)
        errors.flag("stratified", self.stratified)
        object.__setattr__(self, "seed_tensor", errors.seed(self.seed))


@dataclass(frozen=True)
class Clusters(Estimator):
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

    def __post_init__(self) -> None:
        errors.whole_fields(self, count=1, steps=0, fit=0)
        if 0 < self.fit < 8:
            raise ValueError(f"fit must be 0 or at least 8 queries, got {self.fit}; 256 is a good choice")
        object.__setattr__(self, "seed_tensor", errors.seed(self.seed))

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.count


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimate of exact attention and what it says about its own quality; None where its method has no such figure.

    Printing it gives a summary and, in words, what is wrong with it; `warnings` holds those words. Gradients pass
    through `out` and `lse` alone.

    Args:
        out: [B, H, *G, F].
        lse: [B, H, *G], log of the estimated normaliser.
        variance: [B, H, *G, F], of each component of `out`; inf where the samples do not tell.
        ess: [B, H, *G], effective number of samples.
        acceptance: [B, H, *G], accepted steps over all steps.
        rhat: [B, H, *G], Gelman and Rubin's statistic of the score; near 1 when the walks of a query have met.
        method: the settings it was made with.

    >>> q = torch.zeros(1, 1, 8, 8, 4)
    >>> found = scram.search(q, q, search=scram.Search(seed=0))
    >>> made = scram.estimate(q, q, q, found, method=scram.Snis(samples=16, alpha=0.0, seed=0))
    >>> print(made)
    Snis estimate of 64 queries: 16 samples each
      effective samples: median 16.0, worst 16.0 (batch 0, head 0, query 0)
      standard error of out over its size: median 0.00 %, worst 0.00 % (batch 0, head 0, query 0)
      no warnings
    """

    out: Tensor
    lse: Tensor | None
    variance: Tensor | None
    ess: Tensor | None
    acceptance: Tensor | None
    rhat: Tensor | None
    method: Estimator

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the estimate, in words; empty when nothing is."""
        samples = self.method.samples
        kinds: list[tuple[Tensor | None, Callable[[Tensor], Tensor], str]] = [
            (self.out, lambda out: ~out.isfinite(),
             "{} of the outputs are NaN or infinite: so are q, k or v, or their scores"),
            (self.ess, lambda ess: ess < LOW_ESS * samples,
             f"effective samples under {LOW_ESS:.0%} of {samples} for {{}} of the queries: a few keys carry the "
             "estimate; lower alpha, widen bandwidth, or use Hybrid"),
            (self.acceptance, lambda acceptance: acceptance < LOW_ACCEPTANCE,
             f"acceptance under {LOW_ACCEPTANCE:.0%} for {{}} of the queries: their walks hardly move; lower "
             "bandwidth, or use Hybrid"),
            (self.rhat, lambda rhat: ~(rhat <= HIGH_RHAT),
             f"rhat over {HIGH_RHAT} for {{}} of the queries: their walks have not met, and the shares of the modes "
             "are biased; take more samples, or use Hybrid"),
            (self._relative_error(), lambda error: (error > HIGH_ERROR) & (error < torch.inf),
             f"standard error over {HIGH_ERROR:.0%} of the size of out for {{}} of the queries: take more samples; "
             "where out is nearly 0, that may not be needed"),
            (self.variance, lambda variance: variance == torch.inf,
             "variance unknown for {} of the outputs: too few samples count; take more"),
        ]  # fmt: skip
        shares = [(float(bad(x.detach()).float().mean()), words) for x, bad, words in kinds if x is not None]
        return [words.format(f"{share:.1%}") for share, words in shares if share > 0]  # NaN without any query

    def _relative_error(self) -> Tensor | None:
        """The standard error of each query's out over the size of out: [B, H, *G]."""
        if self.variance is None:
            return None
        size = self.out.detach().to(self.variance.dtype).square().sum(-1)
        spread = self.variance.sum(-1)
        return torch.where(spread == 0, 0, spread / size).sqrt()

    def __str__(self) -> str:
        queries = self.out.numel() // max(self.out.shape[-1], 1)
        lines = [
            f"{type(self.method).__name__} estimate of {queries} queries: {self.method.samples} {self.method.unit}"
        ]
        if queries:
            lines += _line("effective samples", self.ess, smallest=True, form="{:.1f}")
            error = self._relative_error()
            lines += _line("standard error of out over its size", error, smallest=False, form="{:.2%}")
            lines += _line("acceptance", self.acceptance, smallest=True, form="{:.1%}")
            lines += _line("rhat", self.rhat, smallest=False, form="{:.3f}")
        lines += [f"warning: {words}" for words in self.warnings] or ["no warnings"]
        return "\n  ".join(lines).replace("%", " %")

    def __repr__(self) -> str:
        return f"Estimate(out {tuple(self.out.shape)} by {self.method})"


def _line(name: str, x: Tensor | None, *, smallest: bool, form: str) -> list[str]:
    """Median and worst query of a diagnostic, or nothing where there is none."""
    if x is None:
        return []
    x = x.detach().double()
    flat = torch.where(x.isnan(), -torch.inf if smallest else torch.inf, x).flatten()
    at = int(flat.argmin() if smallest else flat.argmax())
    row, query = divmod(at, x[0, 0].numel())
    batch, head = divmod(row, x.shape[1])
    middle, worst = form.format(float(flat.median())), form.format(float(flat[at]))
    return [f"{name}: median {middle}, worst {worst} (batch {batch}, head {head}, query {query})"]
