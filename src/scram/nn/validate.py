"""The modules' own user-facing errors; the rest are in `scram.core.checks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.checks import MAX_RANK, whole
from ..core.checks import _tensor as tensor
from ..core.tails.base import NO_TAIL, Kind, as_tail


def layout(embed_dim: Any, num_heads: Any, batch_first: Any) -> None:
    """Whole heads, and batches first."""
    if whole("embed_dim", embed_dim, 1) % whole("num_heads", num_heads, 1):
        raise ValueError(f"num_heads must divide embed_dim, got {num_heads} heads and {embed_dim} channels")
    if batch_first is not True:
        raise ValueError(f"batch_first must be True: inputs are [B, *G, C], got {batch_first!r}; use x.movedim(0, -2)")


def tail(value: Any, search: Any, kind: Kind) -> None:
    """As in `scram.attention`, and the estimators that sample for every query too."""
    chosen = as_tail(value, NO_TAIL, windows=False)
    if search is None and chosen.samples and not chosen.stands_alone:
        raise ValueError("a tail starts from matches: give search='auto', or tail=None to be dense")
    chosen.check(kind)


def channels_last(name: str, x: Any, width: int) -> None:
    """[B, *G, width] with a grid of rank 1 to 4."""
    tensor(name, x, "[B, *G, C]")
    if not 1 <= x.ndim - 2 <= MAX_RANK:
        want = f"[B, *G, C] with a grid of rank 1 to {MAX_RANK}"
        raise ValueError(f"{name} must be {want}, got {tuple(x.shape)}; add the batch axis?")
    if x.shape[-1] != width:
        hint = "; for channels first use x.movedim(1, -1)" if x.shape[1] == width else ""
        raise ValueError(f"{name} must be [B, *G, C], channels last, with C = {width}, got {tuple(x.shape)}{hint}")


def channels_first(x: Any, width: int, rank: int) -> None:
    """[B, width, *G]."""
    tensor("x", x, "[B, C, *G]")
    if x.ndim != rank + 2 or x.shape[1] != width:
        hint = "; for channels last use x.movedim(-1, 1)" if x.ndim == rank + 2 and x.shape[-1] == width else ""
        want = f"[B, C, *G], channels first, with C = {width} and a grid of rank {rank}"
        raise ValueError(f"x must be {want}, got {tuple(x.shape)}{hint}")


def tokens(x: Any, batch: int, width: int, value_width: int | None = None) -> None:
    """[B, X, width]; as keys and as values at once where value_width is given."""
    tensor("tokens", x, "[B, X, C]")
    if x.ndim != 3 or x.shape[0] != batch or x.shape[-1] != width:
        raise ValueError(f"tokens must be [B, X, C] = ({batch}, X, {width}), got {tuple(x.shape)}")
    if value_width not in (None, width):
        raise ValueError(f"tokens are keys and values at once, so kdim must equal vdim, got {width} and {value_width}")


def padding(ignored: Any, key_mask: Any, key: Tensor) -> Any:
    """key_mask, less what `ignored` [B, *G'] leaves out: True means the opposite there."""
    if ignored is None:
        return key_mask
    tensor("key_padding_mask", ignored, "[B, *G']")
    if ignored.dtype != torch.bool:
        hint = "a float mask is a bias: pass its factors as bias="
        raise TypeError(f"key_padding_mask must be bool (True = is left out), got {ignored.dtype}; {hint}")
    if ignored.shape != key.shape[:-1]:
        raise ValueError(f"key_padding_mask must be [B, *G'] = {tuple(key.shape[:-1])}, got {tuple(ignored.shape)}")
    if key_mask is None:
        return ~ignored
    tensor("key_mask", key_mask, "[B, *G']")
    if key_mask.dtype != torch.bool or key_mask.ndim not in (ignored.ndim, ignored.ndim + 1):
        return key_mask  # refused with its own message where it is used
    return key_mask & ~(ignored if key_mask.ndim == ignored.ndim else ignored.unsqueeze(1))
