"""A part of the graph whose backward pass fails on all ranks where it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .mesh import Ranks


def guarded(ranks: Ranks, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """run(*tensors), where all ranks raise what one raises: here, and in the backward pass, which all ranks run."""
    with ranks.together():
        plain = ranks.size == 1 or not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors)
        out: Tensor = run(*tensors) if plain else _Guarded.apply(ranks, run, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Guarded(torch.autograd.Function):
    """Keeps the graph of `run` for itself: torch would leave other ranks waiting where its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.ranks = ranks
        ctx.given = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            ctx.out = run(*ctx.given)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = [x for x in ctx.given if x.requires_grad]
        grads: tuple[Tensor | None, ...] = ()
        with ctx.ranks.together():
            grads = torch.autograd.grad(ctx.out, needed, grad, retain_graph=True, allow_unused=True)
        left = iter(grads)
        return None, None, *[next(left) if x.requires_grad else None for x in ctx.given]
