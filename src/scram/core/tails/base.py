"""The protocol of a tail, what its methods are given, and the tail that is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engines import EngineSpec
from ...options import Weight
from ...results import Attended
from ...settings import Score
from .. import calls, ops
from ..calls import ScoreFunction
from ..twice import twice

if TYPE_CHECKING:
    from .clusters import Codebook

ALL = Fraction(1)


class Shard(NamedTuple):
    """Which part of a larger call a call is. Noise is that of the larger one."""

    rows: Tensor | None  # int64 [B, H], the numbers of the rows of q in the larger call; None: b * H + head
    draw_seed: Callable[[], Tensor]  # a seed, int64 [], the same for all parts


def draw_seed() -> Tensor:
    """A fresh seed from torch's default CPU generator: `torch.manual_seed` governs it, no device waits for it."""
    return torch.randint(2**63 - 1, (), device="cpu")  # whatever torch.set_default_device says


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

    def twice(self) -> tuple[Inputs, Inputs]:
        """For two stages, whose gradients are added on the calling thread where an engine has threads of its own."""
        if not self.engine.wide_inputs or not torch.is_grad_enabled():
            return self, self
        if not (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad):
            return self, self
        return tuple(self._replace(q=q, k=k, v=v) for q, k, v in twice(self.q, self.k, self.v))  # type: ignore[return-value]

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
        inputs = self
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
            score=self.score_function,
        )

    def attend_windows(
        self, index: Tensor | None, label: Tensor | None = None, routes: Tensor | None = None
    ) -> Attended:
        """Attention over the windows and the extra keys, as `attend_call` has them."""
        return ops.attend(self.engine, self.attend_call(index, label, routes))


class Joined(Protocol):
    """What a tail returns: at least an output and its normalizer. Other fields are diagnostics."""

    @property
    def out(self) -> Tensor: ...  # [B, H, *G, F]
    @property
    def lse(self) -> Tensor: ...  # [B, H, *G]


class Kind(NamedTuple):
    """The options of a call that decide whether it can have a tail."""

    weight: Weight
    causal: bool
    score: Score
    extra: bool  # whether it has extra keys
    dropout_p: float


class MadeFor(NamedTuple):
    """The options of a call that a tail which holds tensors was made for."""

    radius: tuple[int, ...]
    scale: float
    score: Score
    key_mask: Tensor | None


class Tail:
    """What stands for the keys outside a query's windows.

    A subclass is a frozen dataclass of settings with these methods. `resolve` calls `check`; `pipeline.run` calls
    `prepare` once and then `join` of what it returned.
    """

    seed_tensor: Tensor | None = None  # None: the seed of the search, or a new one
    reports: ClassVar[tuple[str, ...]] = ("lse",)  # fields of `Estimate` that it has besides `out`
    unit: ClassVar[str] = "samples each"
    joins_windows: ClassVar[bool] = True  # whether queries attend their windows exactly
    needs_all_queries: ClassVar[bool] = False  # of a key head, to be prepared
    tuned_sizes: ClassVar[tuple[int, ...]] = ()  # numbers of samples that `tune` tries: few, some and many
    stands_alone: ClassVar[bool] = False  # whether a call can have it without a search and windows
    orders_alone: ClassVar[bool] = False  # whether it does so wherever a call has causal order
    keys: int = 0  # that a tile of queries attends one by one, besides the windows, at most
    variable: ClassVar[str] = ""  # what stands for it in a line of code; "" where its settings do

    @property
    def samples(self) -> int:
        """Drawn keys or clusters: what `visited` counts before it is cut to the number of keys."""
        return 0

    @property
    def codebook(self) -> Codebook | None:
        """The clusters that it holds."""
        return None

    def resized(self, samples: int) -> Tail:
        """The tail with so many samples; only where `tuned_sizes` are."""
        raise NotImplementedError

    def in_order(self, positions: int) -> Tail:
        """The tail of a call under causal order, on a grid of so many positions."""
        return self

    def check(self, kind: Kind) -> None:
        """Raise where a call cannot have this tail."""
        if kind.weight != "softmax":
            raise ValueError(f"{type(self).__name__} needs weight='softmax', got {kind.weight!r}; use tail=None")

    def check_tensors(self, name: str, q: Tensor, k: Tensor, v: Tensor | None, call: MadeFor) -> None:
        """Raise where a tail that holds tensors was made for others; `name` is that of the argument."""

    def prepare(self, inputs: Inputs, seed: Tensor | None, warm: Any = None) -> Tail:
        """The tail with what it computes once for all queries.

        Args:
            inputs: the call.
            seed: int64 [], that of the search; None where there is none.
            warm: what an earlier call prepared, to start from.
        """
        return self

    def route(self, inputs: Inputs) -> calls.Routed | None:
        """The clusters whose keys each tile of queries attends one by one; None: of none."""
        return None

    def start(self, inputs: Inputs, routes: Tensor) -> Tensor:
        """The best routed key of each query, int32 [B, H, *G, 1]: where a search starts. Only where it has routes."""
        raise NotImplementedError

    def join(self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None) -> Joined:
        """Attention over the windows around the matches, and all other keys.

        Args:
            inputs: the call.
            index: int32 [B, H, *G, kappa]; None: no windows, where the tail stands alone.
            seed: int64 [], that of the search; None where there was none.
            routes: int32 [B, H, T, W], what `route` chose.
        """
        raise NotImplementedError

    def visited(self, queries: int, keys: int) -> int:
        """Keys that a query visits by it, at most."""
        return min(self.samples, keys)

    def describe(self) -> str:
        """The tail in a few words."""
        raise NotImplementedError

    def of_part(self, seed: int | Tensor | None, share: Fraction = ALL) -> Tail:
        """The tail of a call on a part of the keys, with that seed; `share` of all keys are in it."""
        return self

    def own_seed(self, inputs: Inputs, seed: Tensor | None) -> Tensor:
        """Its own seed, else that of the search, else a new one."""
        if self.seed_tensor is not None:
            return self.seed_tensor
        return inputs.shard.draw_seed() if seed is None else seed


@dataclass(frozen=True)
class NoTail(Tail):
    """Keys outside the windows count nothing: the paper's sparse attention."""

    def check(self, kind: Kind) -> None:
        """Every call can have none."""

    def join(self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None) -> Joined:
        assert index is not None
        return inputs.attend_windows(index)

    def describe(self) -> str:
        return "windows only"


NO_TAIL = NoTail()


def as_tail(value: Any, default: Tail, *, windows: bool = True) -> Tail:
    """The tail of an argument: "auto" is `default`, None no tail. `windows`: only tails that attend windows."""
    if value is None:
        return NO_TAIL
    if isinstance(value, str) and value == "auto":
        return default
    if not isinstance(value, Tail) or (windows and not value.joins_windows):
        names = ", ".join(f"scram.{name}" for name, kind in tails_by_name().items() if kind.joins_windows)
        raise TypeError(f"tail must be None, 'auto' or one of {names}, got {type(value).__name__} {value!r}")
    return value


def tails_by_name() -> dict[str, type[Tail]]:
    """Every tail of the package that users make, by the name of its class, whether it was used before or not."""
    for file in iter_modules(import_module(__package__).__path__):
        import_module(f"{__package__}.{file.name}")

    def below(kind: type[Tail]) -> list[type[Tail]]:
        return [x for one in kind.__subclasses__() for x in (one, *below(one))]

    return {kind.__name__: kind for kind in sorted(below(Tail), key=lambda x: x.__name__) if _is_public(kind)}


def _is_public(kind: type[Tail]) -> bool:
    """Whether it is the package's, no base class of others, and not the tail that is none."""
    own = kind.__module__.startswith(f"{__package__}.")
    return own and kind is not NoTail and kind.describe is not Tail.describe
