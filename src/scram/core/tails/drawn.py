"""Keys drawn for all others: a tail with a variance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from torch import Tensor

from .. import calls, checks, ops
from .base import ALL, Inputs, Tail


@dataclass(frozen=True)
class DrawnKeys(Tail):
    """The windows around the matches exactly, and all other keys estimated from a draw that a head's queries share.

    Because they share it, their errors go together: averaging over queries does not make the error smaller, and over
    one draw an interval may hold the truth for clearly more or fewer queries than it says. Over draws it is right.
    Under causal order the draw reads no mask: keys drawn that are masked are lost.

    Args:
        samples: keys drawn per head, on top of those in the windows; as many as there are keys: exact attention.
        stratified: one key from each cell of a regular partition of the grid, at most `samples` cells, in place of keys
            drawn anywhere; better where scores and values are smooth over the grid. Its variance is reported as if the
            keys had been drawn anywhere, which is too large rather than too small.
        seed: an int or a 0-d int64 tensor; None takes that of the search, or draws one from torch's default generator.

    >>> DrawnKeys(samples=256, seed=0).stratified
    False
    """

    samples: int = 512
    stratified: bool = False
    seed: int | Tensor | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("lse", "variance")
    tuned_sizes: ClassVar[tuple[int, ...]] = (128, 512, 2048)

    def __post_init__(self) -> None:
        checks.whole_fields(self, samples=1)
        checks.flag("stratified", self.stratified)
        object.__setattr__(self, "seed_tensor", checks.seed(self.seed))

    def resized(self, samples: int) -> DrawnKeys:
        return replace(self, samples=samples)

    def join(
        self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None
    ) -> calls.DrawnTail:
        """The windows first, then the keys that the queries of a row share. Both have one seed of dropout."""
        assert index is not None
        inputs = inputs.level()
        own_seed = self.own_seed(inputs, seed)
        windows_call = inputs.attend_call(index)
        windows = ops.attend(inputs.engine, windows_call)
        call = calls.DrawnTailCall(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            index=index,
            key_mask=inputs.key_mask,
            near_out=windows.out,
            near_lse=windows.lse,
            seed=own_seed,
            dropout_seed=windows_call.dropout_seed,
            rows=inputs.shard.rows,
            samples=self.samples,
            stratified=self.stratified,
            radius=inputs.radius,
            causal=inputs.causal,
            scale=inputs.scale,
            dropout_p=inputs.dropout_p,
            score=inputs.score_function(),
        )
        return ops.drawn_tail(inputs.engine, call)

    def of_part(self, seed: int | Tensor | None, share: Fraction = ALL) -> DrawnKeys:
        samples = max(1, math.ceil(self.samples * share))
        return replace(self, samples=samples, seed=seed)

    def describe(self) -> str:
        return f"{self.samples} drawn keys"
