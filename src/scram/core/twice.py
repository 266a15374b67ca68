"""Tensors that two stages read: their gradients are added on the calling thread.

Autograd would add them in torch's threads, between two stages of an engine that has threads of its own. Beside other
programs each such region waits for a core, for milliseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _compat
from .ops import bypasses_dispatcher


def twice(*given: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The tensors for one stage and for another; themselves where there is no gradient or torch looks at the call."""
    differentiated = torch.is_grad_enabled() and any([x.requires_grad for x in given])  # noqa: C419 - a list is faster
    if not differentiated or not bypasses_dispatcher(given) or _compat.has_tangent(given):
        return given, given
    both = _Twice.apply(*given)  # type: ignore[no-untyped-call]
    return both[: len(given)], both[len(given) :]


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([x.view_as(x) for x in (*given, *given)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        half = len(grads) // 2
        with _compat.ONE_THREAD:
            return tuple([_sum(a, b) for a, b in zip(grads[:half], grads[half:], strict=True)])


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
