"""Estimators in which every query draws or walks to keys of its own; windows are not attended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from ...options import Sampler
from ...spec import draws
from ...spec.grid import AllowedKeys, grid_of
from .. import calls, checks, ops
from .base import Inputs, Kind, Tail


class SampleSettings(NamedTuple):
    """What the estimators differ in, as a `SampleCall` has it."""

    method: Sampler
    bandwidth: float  # of a step, in keys
    alpha: float = 0.0
    chains_per_mode: int = 1
    burn_in: int = 0


class Sampled(Tail):
    """Base class of the estimators that sample for every query."""

    joins_windows: ClassVar[bool] = False

    def sample_settings(self) -> SampleSettings:
        """What is this estimator's own."""
        raise NotImplementedError

    def check(self, kind: Kind) -> None:
        name = type(self).__name__
        super().check(kind)
        if kind.dropout_p:
            raise ValueError(
                f"dropout must be 0 with {name}, got {kind.dropout_p}; drop out the layer's output instead"
            )
        if kind.extra and "lse" not in self.reports:
            raise ValueError(
                f"extra must be None with {name}: it estimates no normalizer (lse), without which exact "
                "keys cannot be joined to it; use Clusters, DrawnKeys or Snis"
            )

    def join(
        self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None
    ) -> calls.Sampled:
        """Attention over keys of each query's own. Extra keys are attended exactly."""
        assert index is not None
        inputs = inputs.level()
        key_grid = grid_of(inputs.k)
        settings = self.sample_settings()
        allowed = AllowedKeys.of(inputs.q, inputs.k, inputs.causal, inputs.key_mask)
        # A walk cannot begin at a key that it may not visit; a draw near such a key may be allowed.
        modes, count = draws.modes(index, key_grid, allowed if settings.method == "metropolis" else None)
        extra_out = None
        extra_lse = None
        if inputs.k_extra is not None:
            extra_out, extra_lse = inputs.attend_windows(None)
        order = allowed.order
        if order is not None and inputs.key_mask is not None:
            order = order.reshape(*inputs.key_mask.shape[: -len(key_grid)], allowed.keys)
        call = calls.SampleCall(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            modes=modes,
            count=count,
            total=draws.allowed_counts(inputs.q, allowed),
            order=order,
            key_mask=inputs.key_mask,
            near_out=extra_out,
            near_lse=extra_lse,
            seed=self.own_seed(inputs, seed),
            table=draws.step_table(settings.bandwidth, key_grid, inputs.q.device),
            rows=inputs.shard.rows,
            samples=self.samples,
            causal=inputs.causal,
            scale=inputs.scale,
            score=inputs.score_function(),
            method=settings.method,
            alpha=settings.alpha,
            chains_per_mode=settings.chains_per_mode,
            burn_in=settings.burn_in,
        )
        return ops.sample(inputs.engine, call)


@dataclass(frozen=True)
class Snis(Sampled):
    """Self-normalized importance sampling: keys drawn near the matches, and anywhere; weighed by how likely they were.

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
        checks.whole_fields(self, samples=1)
        checks.real("alpha", self.alpha, 0.0, 1.0, "[0, 1)", "; leave some uniform draws, or far keys are never seen")
        checks.bandwidth(self.bandwidth)
        object.__setattr__(self, "seed_tensor", checks.seed(self.seed))

    def sample_settings(self) -> SampleSettings:
        return SampleSettings(method="snis", bandwidth=float(self.bandwidth), alpha=float(self.alpha))

    def describe(self) -> str:
        return f"{self.samples} keys drawn by each query"


@dataclass(frozen=True)
class MetropolisHastings(Sampled):
    """Random walks over the keys, from the matches, that stay at a key in proportion to its attention.

    A walk explores the neighborhood it began in. Walks that do not reach the other modes give each mode the same share
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
        checks.whole_fields(self, samples=1, chains_per_mode=1, burn_in=0)
        checks.bandwidth(self.bandwidth)
        object.__setattr__(self, "seed_tensor", checks.seed(self.seed))

    def sample_settings(self) -> SampleSettings:
        return SampleSettings(
            method="metropolis",
            bandwidth=float(self.bandwidth),
            chains_per_mode=self.chains_per_mode,
            burn_in=self.burn_in,
        )

    def describe(self) -> str:
        return f"walks of {self.samples} steps by each query"
