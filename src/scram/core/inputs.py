"""What every stage of a call reads: prepared tensors and options, and which part of a larger call they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines import EngineSpec
from ..options import Weight, Window
from ..results import Attended
from ..settings import Score
from ..spec.noise import draw_seed
from . import calls, ops
from .calls import ScoreFunction


class Shard(NamedTuple):
    """Which part of a larger call a call is. Noise is that of the larger one."""

    rows: Tensor | None  # int64 [B, H], the numbers of the rows of q in the larger call; None: b * H + head
    draw_seed: Callable[[], Tensor]  # a seed, int64 [], the same for all parts


WHOLE = Shard(None, draw_seed)


class Inputs(NamedTuple):
    """Tensors and options of a call. Features are prepared for the score, in a dtype that the engine takes."""

    engine: EngineSpec  # of every stage but the search
    q: Tensor  # [B, H, *G, E]
    k: Tensor  # [B, Hk, *G', E]
    v: Tensor  # [B, Hk, *G', F]
    k_extra: Tensor | None  # [B, Hk, X, E]
    v_extra: Tensor | None  # [B, Hk, X, F]
    key_mask: Tensor | None  # bool [B, *G'] or [B, H, *G']
    radius: tuple[int, ...]  # of windows, one per axis
    causal: bool
    scale: float
    score: Score
    weight: Weight
    dropout_p: float
    window: Window
    shard: Shard
    dtype: torch.dtype  # of the output: that of the values as they were given

    @property
    def rows(self) -> Tensor | None:
        return self.shard.rows

    @property
    def score_function(self) -> ScoreFunction | None:
        """A callable score. Scores with a name are dot products of the prepared features."""
        return self.score if callable(self.score) else None

    @property
    def num_extra(self) -> int:
        return 0 if self.k_extra is None else self.k_extra.shape[2]

    def level(self) -> Inputs:
        """Features as wide as the values: for what multiplies both by one unit."""
        dtype = self.v.dtype
        if self.q.dtype.itemsize >= dtype.itemsize:
            return self
        k_extra = None if self.k_extra is None else self.k_extra.to(dtype)
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), k_extra=k_extra)

    def rounded(self, out: Tensor) -> Tensor:
        """An output in the dtype of the values that were given."""
        return out.to(self.dtype)

    def draw_dropout_seed(self) -> Tensor | None:
        return self.shard.draw_seed() if self.dropout_p else None

    def attend_call(
        self, index: Tensor | None, label: Tensor | None = None, routes: Tensor | None = None
    ) -> calls.AttendCall:
        """The call over the windows around the matches and the extra keys.

        Args:
            index: int32 [B, H, *G, kappa]; None: no windows.
            label: int32 [B, Hc, *G'], the clusters of the keys, beside routes.
            routes: int32 [B, H, T, W]; keys of clusters that a tile routes are left out of the windows.
        """
        inputs = self if self.window == "query" else self.level()
        if index is None:
            inputs = inputs._replace(radius=(0,) * (self.q.ndim - 3))
            index = torch.full((*self.q.shape[:-1], 1), -1, dtype=torch.int32, device=self.q.device)
        return calls.AttendCall(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            index=index,
            key_mask=self.key_mask,
            k_extra=inputs.k_extra,
            v_extra=self.v_extra,
            label=label,
            routes=routes,
            dropout_seed=self.draw_dropout_seed(),
            rows=self.rows,
            radius=inputs.radius,
            causal=self.causal,
            scale=self.scale,
            weight=self.weight,
            dropout_p=self.dropout_p,
            window=self.window,
            score=self.score_function,
        )

    def attend_windows(
        self, index: Tensor | None, label: Tensor | None = None, routes: Tensor | None = None
    ) -> Attended:
        """Attention over the windows and the extra keys, as `attend_call` has them."""
        return ops.attend(self.engine, self.attend_call(index, label, routes))
