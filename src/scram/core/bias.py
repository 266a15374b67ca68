"""An additive bias <a_i, b_j> of attention: features that widen queries and keys, so that every stage sees it.

    scale <q_i, k_j> + <a_i, b_j> = scale <[q_i, a_i / scale], [k_j, b_j]>

Beside q and k of 16 bits a and b keep 16 bits more: each becomes two numbers, a = a' + a", and of the four products all
but a" b" count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Weight
from ..settings import Score
from ..spec.scoring import accumulator, default_scale
from . import checks
from .dtensors import is_dtensor


@dataclass(frozen=True, eq=False)
class Bias:
    """Factors of an additive bias: query i and key j get <a_i, b_j> besides their score: `attention(bias=)`.

    Args:
        a: [B or 1, H or 1, *G, r].
        b: [B or 1, Hk or 1, *G', r]; or with H heads: keys are expanded, each query head has its own clusters.
        error: what the factors are off, root mean square over all pairs, in the unit of logits: attention's weights are
            off by that share. 0: exact.
        causal: whether it holds for keys up to the query alone; calls without causal order refuse it.
    """

    a: Tensor
    b: Tensor
    error: float = 0.0
    causal: bool = False

    @property
    def rank(self) -> int:
        """How many features it adds to queries and keys."""
        return self.a.shape[-1]

    def to(self, *target: Any) -> Bias:
        """The same factors on another device, or in another dtype."""
        return Bias(self.a.to(*target), self.b.to(*target), self.error, self.causal)

    def __repr__(self) -> str:
        order = ", causal" if self.causal else ""
        return f"Bias(a {list(self.a.shape)}, b {list(self.b.shape)}, rank {self.rank}, error {self.error:.2g}{order})"


Pair = tuple[Tensor, Tensor]
Extra = Pair | tuple[Tensor, Tensor, Tensor]  # keys and values off the grid, and the b of these keys


class Widened(NamedTuple):
    """A call without a bias that means the same."""

    q: Tensor  # [B, H, *G, E + r]
    k: Tensor  # [B, Hk, *G', E + r]; Hk = H where b has as many heads
    v: Tensor | None  # [B, Hk, *G', F]
    extra: Pair | None
    scale: float


def widened(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    bias: Bias | Pair,
    *,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    causal: bool = False,
    extra: Extra | None = None,
) -> Widened:
    """q [B, H, *G, E] and k [B, Hk, *G', E] with the features of a bias, and what must fit them."""
    checks.queries_keys(q, k)
    checks.scale(scale)
    if v is not None:
        checks.values(q, k, v)
    if not isinstance(score, str) or score != "dot":
        name = f"{score!r}" if isinstance(score, str) else "a callable"
        raise ValueError(f"bias needs score='dot', got {name}; add it to a callable score yourself")
    if any(is_dtensor(x) for x in (q, k)):
        raise TypeError("bias takes no DTensors; widen q and k by its factors on each rank")
    a, b = _factors(q, k, bias, causal)
    group = q.shape[1] // k.shape[1]
    expands = group > 1 and b.shape[1] == q.shape[1]
    of_extra: Tensor | None = None
    pair: Pair | None = None
    if extra is not None:
        if v is not None:
            checks.extra(q, k, v, extra[:2] if isinstance(extra, (tuple, list)) and len(extra) == 3 else extra)
        pair = (extra[0], extra[1])
        of_extra = None if len(extra) == 2 else _of_extra(extra[2], b, k, pair[0], q)
    if expands:
        k = k.repeat_interleave(group, 1)
        v = None if v is None else v.repeat_interleave(group, 1)
        pair = None if pair is None else (pair[0].repeat_interleave(group, 1), pair[1].repeat_interleave(group, 1))
    factor = default_scale(scale, q.shape[-1], score, weight)
    wide = accumulator(q.dtype)
    a, b = a.to(wide) / factor, b.to(wide)
    if q.dtype == torch.float16:
        even = _even(a, b)
        a, b = a * even, b / even
        of_extra = None if of_extra is None else of_extra.to(wide) / even
    if pair is not None:
        if of_extra is None:
            of_extra = b.new_zeros(1, 1, pair[0].shape[2], b.shape[-1])
        pair = (_joined(pair[0], _key_features(of_extra.to(wide), q.dtype)), pair[1])
    query = _joined(q, _query_features(a, q.dtype))
    return Widened(query, _joined(k, _key_features(b, q.dtype)), v, pair, factor)


def width_of(bias: Bias | Pair, dtype: torch.dtype) -> int:
    """How many features a bias adds to queries of that dtype."""
    rank: int = pair_of(bias)[0].shape[-1]
    return rank * (3 if dtype.itemsize == 2 else 1)


def pair_of(bias: Any) -> Pair:
    """a and b."""
    if isinstance(bias, Bias):
        return bias.a, bias.b
    if not isinstance(bias, (tuple, list)) or len(bias) != 2:
        raise TypeError(
            f"bias must be a scram.bias.Bias or a pair (a, b), got {type(bias).__name__}; scram.bias.relative factors "
            "a table of offsets"
        )
    return bias[0], bias[1]


def _factors(q: Tensor, k: Tensor, bias: Any, causal: bool) -> Pair:
    """a and b, of the shapes that they must have."""
    a, b = pair_of(bias)
    if isinstance(bias, Bias) and bias.causal and not causal:
        raise ValueError("bias holds for causal order alone, got causal=False; pass causal=True, or another bias")
    heads = (q.shape[1], k.shape[1], 1)
    _check("a", a, q, (q.shape[1], 1), tuple(q.shape[2:-1]), "*G")
    _check("b", b, q, heads, tuple(k.shape[2:-1]), "*G'")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a and b of bias must share their last axis, got {a.shape[-1]} and {b.shape[-1]}")
    return a, b


def _of_extra(x: Any, b: Tensor, k: Tensor, k_extra: Tensor, q: Tensor) -> Tensor:
    """The b of extra keys, of the shape that it must have."""
    heads = (b.shape[1], 1) if b.shape[1] > 1 else (k.shape[1], 1)
    _check("b_extra", x, q, heads, (k_extra.shape[2],), "X")
    if x.shape[-1] != b.shape[-1]:
        raise ValueError(f"b_extra must have the last axis of b, {b.shape[-1]}, got {x.shape[-1]}")
    checked: Tensor = x
    return checked


def _check(name: str, x: Any, q: Tensor, heads: tuple[int, ...], grid: tuple[int, ...], axes: str) -> None:
    """x is [B or 1, one of `heads`, *grid, r], beside q."""
    checks.instance(name, x, Tensor, f"tensor [B, H, {axes}, r]")
    fits = x.ndim == len(grid) + 3 and x.shape[0] in (q.shape[0], 1) and x.shape[1] in heads
    if not fits or tuple(x.shape[2:-1]) != grid or x.shape[-1] < 1:
        among = " or ".join(map(str, sorted(set(heads))))
        raise ValueError(
            f"{name} of bias must be [B, H, {axes}, r] with B = {q.shape[0]} or 1, H = {among} and {axes} = {grid}, "
            f"got {tuple(x.shape)}"
        )
    if x.dtype not in (q.dtype, torch.float32):
        raise TypeError(
            f"{name} of bias must be float32 or have q's dtype {q.dtype}, got {x.dtype}; use {name}.float()"
        )
    if x.device != q.device:
        raise ValueError(f"{name} of bias must be on q's device {q.device}, got {x.device}; use {name}.to(q.device)")


def _joined(x: Tensor, more: Tensor) -> Tensor:
    """[B, H, *G, E] and [B or 1, H or 1, *G, r] -> [B, H, *G, E + r]."""
    return torch.cat([x, more.expand(*x.shape[:-1], -1)], -1)


def _query_features(a: Tensor, dtype: torch.dtype) -> Tensor:
    """[a', a', a"] for 16 bits, else a; a gradient reaches a once."""
    if dtype.itemsize > 2:
        return a
    high, low = _halves(a, dtype)
    return torch.cat([high, high, low], -1)


def _key_features(b: Tensor, dtype: torch.dtype) -> Tensor:
    """[b', b", b'] for 16 bits, else b."""
    if dtype.itemsize > 2:
        return b
    high, low = _halves(b, dtype)
    return torch.cat([high, low, high], -1)


def _halves(x: Tensor, dtype: torch.dtype) -> Pair:
    """x as the sum of two numbers of 16 bits; the second one is a constant to autograd."""
    high = x.to(dtype)
    return high, (x - high.to(x.dtype)).detach().to(dtype)


def _even(a: Tensor, b: Tensor) -> Tensor:
    """Powers of two [r] that make the largest a and b of each feature alike: float16 holds no number above 65504."""
    if not a.numel() or not b.numel():
        return a.new_ones(a.shape[-1])

    def top(x: Tensor) -> Tensor:
        most = x.detach().abs().nan_to_num(0.0, 0.0, 0.0).flatten(0, -2).amax(0)
        return torch.where(most > 0, most, 1.0).log2()

    return ((top(b) - top(a)) / 2).round().exp2()
