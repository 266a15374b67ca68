"""The error and the speed of any attention function on given tensors: exact on a sample of queries, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import checks, files
from ..core.checks import explains
from ..core.statistics import Interval
from ..options import JudgedLayout
from .baseline import dense_baseline, yardstick
from .tables import in_words, of_heads
from .timing import Timing, agree, clock
from .truth import Truth

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYOUTS = get_args(JudgedLayout)
LONGEST = 20.0  # seconds of dense attention; what would take longer is continued from some of the queries
ONCE = 4.0  # seconds from which a call is timed only once


@dataclass(frozen=True, eq=False)
class Judgment:
    """How far an attention function is from exact attention on a sample of queries, and its time; prints itself.

    Args:
        name: of the function.
        output_error: ||out - exact|| / ||exact|| over the sampled queries [B, H]. A point value, which few queries
            dominate.
        p95_error, median_error: 95th percentile and median over the queries of |out - exact| / RMS |exact|, where the
            RMS is that of the head. With 95 % intervals, each [B, H].
        timing: seconds and peak memory of a call. On a CPU calls are made in turn with a part of dense attention, and
            the median of their ratios counts, so that a busy minute does not decide.
        dense_seconds: seconds of torch's dense attention on the same tensors in the same run.
        dense_is_continued: whether they were continued from the time of some of the queries.
        num_queries, queries: queries looked at, and queries in all.
        steady: whether repeated times, of the function and of dense attention, differ by a third at most. Where they
            differ by more, the machine was busy and `ratio` says little.
    """

    name: str
    output_error: Tensor
    p95_error: Interval
    median_error: Interval
    timing: Timing
    dense_seconds: float
    dense_is_continued: bool
    num_queries: int
    queries: int
    steady: bool = True

    @property
    def ratio(self) -> float:
        """Time of dense attention over that of the function: above 1 the function is faster."""
        return self.dense_seconds / self.timing.seconds

    @property
    def worst(self) -> tuple[int, int]:
        """Batch and head of the largest output error."""
        at = int(self.output_error.nan_to_num(-1.0, posinf=math.inf).argmax())
        return at // self.output_error.shape[1], at % self.output_error.shape[1]

    def numbers(self) -> files.Json:
        """All of it as lists and numbers for JSON; what is not finite is None."""
        intervals = {"p95_error": self.p95_error, "median_error": self.median_error}
        return {
            "output_error": _listed(self.output_error),
            **{name: {end: _listed(x) for end, x in one._asdict().items()} for name, one in intervals.items()},
            **self.timing._asdict(),
            "dense_seconds": self.dense_seconds,
            "dense_is_continued": self.dense_is_continued,
            "ratio": self.ratio,
            "steady": self.steady,
        }

    def __str__(self) -> str:
        columns: dict[str, Interval | Tensor] = {
            "output error*": self.output_error,
            "95th percentile": self.p95_error,
            "median": self.median_error,
        }
        lines = [f"{self.name}, on {self.num_queries} of {self.queries} queries", *of_heads(columns)]
        time = self.timing
        faster = self.ratio
        spread = f"{in_words(time.seconds)} ({in_words(time.least)} to {in_words(time.most)}, calls: {time.calls})"
        spread += f", {in_words(time.cpu_seconds)} of CPU time" * bool(time.cpu_seconds)
        than = f"{faster:.3g} times faster" if faster >= 1 else f"{1 / faster:.3g} times slower"
        about = "about " if self.dense_is_continued else ""
        lines.append(f"time: {spread}; dense attention {about}{in_words(self.dense_seconds)}: {than}")
        if not self.steady:
            lines.append("repeated times differ by more than a third: the machine was busy, judge again")
        if time.peak_bytes is not None:
            lines.append(f"peak memory of a call: {time.peak_bytes / 2**20:.1f} MiB")
        return "\n".join(lines)

    __repr__ = __str__


def _listed(x: Tensor) -> list[list[float | None]]:
    return [[value if math.isfinite(value) else None for value in row] for row in x.tolist()]


@explains
@torch.no_grad()
def judge(
    function: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    name: str | None = None,
    layout: JudgedLayout = "grid",
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    num_queries: int = 512,
    seed: int = 0,
) -> Judgment:
    """Error and speed of any attention function on these tensors.

    Args:
        function: takes (q, k, v) and returns out [B, H, *G, F]; its first call may compile and is not timed.
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        name: shown in the result; None takes the function's own.
        layout: what the function takes and returns: "grid" as above, "sdpa" [B, H, N, E] as torch's own attention.
        causal, key_mask, scale: of the exact attention to compare with, as in `attention`. The function gets q, k and
            v alone: bind what else it needs, for example with functools.partial.
        num_queries: queries to look at; all of them where there are not more.
        seed: chooses them.

    Returns:
        Judgment.

    >>> import torch.nn.functional as F
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 16, 16, 8).unbind()
    >>> judgment = judge(F.scaled_dot_product_attention, q, k, v, layout="sdpa")
    >>> bool((judgment.p95_error.high < 1e-5).all())
    True
    """
    return Judge(q, k, v, causal=causal, key_mask=key_mask, scale=scale, num_queries=num_queries, seed=seed).judge(
        function, name=name, layout=layout
    )


class Judge:
    """Exact attention of a sample of queries and the time of dense attention, for one function after another.

    Arguments as in `judge`.
    """

    @torch.no_grad()
    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        num_queries: int = 512,
        seed: int = 0,
    ) -> None:
        checks.queries_keys(q, k)
        checks.some_queries(q)
        checks.values(q, k, v)
        checks.finite_but_for_masked(q, k, v, key_mask)
        self.q = q
        self.k = k
        self.v = v
        checks.whole("num_queries", num_queries, 1)
        self.truth = Truth.of(
            q, k, v, causal=causal, key_mask=key_mask, scale=scale, num_queries=num_queries, seed=seed
        )
        # Made in turn with each call on a CPU: other programs slow it down as they do that call.
        on_cpu = q.device.type == "cpu"
        self._beside = yardstick(q, k, v, causal=causal, key_mask=key_mask, scale=scale) if on_cpu else None
        self._time_dense = partial(
            dense_baseline,
            q,
            k,
            v,
            timer=partial(clock, beside=self._beside),
            longest=LONGEST,
            causal=causal,
            key_mask=key_mask,
            scale=scale,
        )
        self.dense = self._time_dense()

    @property
    def dense_seconds(self) -> float:
        """Seconds of dense attention."""
        return self.dense.seconds

    @property
    def dense_is_continued(self) -> bool:
        """Whether they were continued from the time of some of the queries."""
        return self.dense.continued

    @torch.no_grad()
    def judge(self, function: Attention, *, name: str | None = None, layout: JudgedLayout = "grid") -> Judgment:
        """As the function `judge`."""
        checks.one_of("layout", layout, LAYOUTS)
        if not callable(function):
            raise TypeError(f"function must be callable as function(q, k, v), got {type(function).__name__}")
        if function is F.scaled_dot_product_attention and layout == "grid" and self.q.ndim > 4:
            raise ValueError(
                "torch's attention takes tokens [B, H, N, E], here it would attend along rows; pass layout='sdpa'"
            )
        q, k, v = (x.clone() for x in (self.q, self.k, self.v))  # it may write into them
        want = (*q.shape[:-1], v.shape[-1])
        if layout == "sdpa":
            q, k, v = (x.flatten(2, -2) for x in (q, k, v))
        out = self._checked(function(q, k, v), want if layout == "grid" else (*q.shape[:-1], v.shape[-1]))
        timing, _ = clock(lambda: function(q, k, v), q.device.type, ONCE, self._beside)
        before = self.dense
        if before.seconds < 1:  # anew, for the machine may be busier by now
            self.dense = self._time_dense()
        steady = timing.steady and self.dense.steady and agree([before.seconds, self.dense.seconds])
        measured = self.truth.errors(out.reshape(want))
        return Judgment(
            name=name or str(getattr(function, "__qualname__", type(function).__name__)),
            median_error=measured.median,
            p95_error=measured.p95,
            output_error=measured.output,
            timing=timing,
            dense_seconds=self.dense_seconds,
            dense_is_continued=self.dense_is_continued,
            num_queries=len(self.truth.queries),
            queries=self.truth.points,
            steady=steady,
        )

    def _checked(self, out: Any, want: tuple[int, ...]) -> Tensor:
        """What the function returned, if it is finite and [B, H, *G, F]."""
        if not isinstance(out, Tensor):
            raise TypeError(f"the function must return a tensor of shape {want}, got {type(out).__name__}")
        if tuple(out.shape) != want:
            hint = "; it may need layout='sdpa'" if len(want) > 4 else "; it may need layout='grid'"
            raise ValueError(f"the function must return a tensor of shape {want}, got {tuple(out.shape)}{hint}")
        if out.device != self.q.device:
            raise ValueError(f"the function must return a tensor on {self.q.device}, got {out.device}")
        bad = int((~out.isfinite()).sum())
        if bad and bool((self.truth.lse > -torch.inf).all()):  # without a key anything may come
            raise ValueError(f"the function returned {bad} of {out.numel()} values that are NaN or infinite")
        return out
