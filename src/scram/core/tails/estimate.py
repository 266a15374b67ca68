"""What `estimate` returns: an output with diagnostics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Tail

LOW_ESS = 0.05  # of the samples
LOW_ACCEPTANCE = 0.1
HIGH_RHAT = 1.1
HIGH_ERROR = 0.5  # of the size of out


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimate of exact attention and what it says about its own quality; None where its method has no such figure.

    Printing it gives a summary and, in words, what is wrong with it; `warnings` holds those words. Gradients pass
    through `out` and `lse` alone.

    Args:
        out: [B, H, *G, F].
        lse: [B, H, *G], log of the estimated normalizer.
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
    method: Tail

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the estimate, in words; empty when nothing is."""
        samples = self.method.samples
        kinds: list[tuple[Tensor | None, Callable[[Tensor], Tensor], str]] = [
            (
                self.out,
                lambda out: ~out.isfinite(),
                "{} of the outputs are NaN or infinite: so are q, k or v, or their scores",
            ),
            (
                self.ess,
                lambda ess: ess < LOW_ESS * samples,
                f"effective samples under {LOW_ESS:.0%} of {samples} for {{}} of the queries: a few keys carry the "
                "estimate; lower alpha, widen bandwidth, or use DrawnKeys",
            ),
            (
                self.acceptance,
                lambda acceptance: acceptance < LOW_ACCEPTANCE,
                f"acceptance under {LOW_ACCEPTANCE:.0%} for {{}} of the queries: their walks hardly move; lower "
                "bandwidth, or use DrawnKeys",
            ),
            (
                self.rhat,
                lambda rhat: ~(rhat <= HIGH_RHAT),
                f"rhat over {HIGH_RHAT} for {{}} of the queries: their walks have not met, and the shares of the modes "
                "are biased; take more samples, or use DrawnKeys",
            ),
            (
                self._relative_error(),
                lambda error: (error > HIGH_ERROR) & (error < torch.inf),
                f"standard error over {HIGH_ERROR:.0%} of the size of out for {{}} of the queries: take more samples; "
                "where out is nearly 0, that may not be needed",
            ),
            (
                self.variance,
                lambda variance: variance == torch.inf,
                "variance unknown for {} of the outputs: too few samples count; take more",
            ),
        ]
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
    middle = form.format(float(flat.median()))
    worst = form.format(float(flat[at]))
    return [f"{name}: median {middle}, worst {worst} (batch {batch}, head {head}, query {query})"]
