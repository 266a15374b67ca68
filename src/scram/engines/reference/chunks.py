"""The reference in parts: what it gathers is never in memory at once, nor kept for the backward pass.

Transforms of `torch.func` keep it: they allow no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._compat import recomputed


def in_chunks(
    run: Callable[..., tuple[Tensor, ...]], count: int, size: int, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The results of run(at, *tensors) for at = 0 ... count - 1, `size` of them at a time, recomputed for gradients."""
    chunks: list[Any] = []
    for begin in range(0, max(count, 1), size):  # once for an empty batch too: its gradients are empty, not missing
        at = torch.arange(begin, min(begin + size, count), device=tensors[0].device)
        again = torch.is_grad_enabled() and count > size
        chunks.append(recomputed(run, at, *tensors) if again else run(at, *tensors))
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))
