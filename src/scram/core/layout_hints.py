"""Warnings for tensors that are probably in another layout: each once, with the line of code that mends it.

The shapes alone cannot prove it, so the criteria are narrow. With q [B, H, *G, E]:
- 32 heads or more, and more heads than points of the grid: tokens or channels stand where the heads belong.
- 24 heads or more, as many as the first of two extents, and a last extent of 16 at most: [B, h, w, heads, E].
- Two or more extents and a width over 256 that equals the last extent and exceeds the first: [B, H, E, h, w].
- One extent of 64 points or more, the same for k, that is a square or 1, 2 or 5 more: flattened tokens of a picture.
A sequence of 4096 samples is a square too: `warnings.filterwarnings("ignore", category=LayoutWarning)` is the way out.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Sequence

import torch

PREFIXES = (0, 1, 2, 5)  # none; a class token; a distillation token too; a class token and four registers
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = tuple(folder + os.sep for folder in (_PACKAGE, os.path.dirname(torch.__file__)))


class LayoutWarning(UserWarning):
    """A tensor is probably in another layout than the function reads."""


def warn_about_layout(q_shape: Sequence[int], k_shape: Sequence[int]) -> None:
    """Warn where q [B, H, *G, E] and k [B, Hk, *G', E] are probably in another layout; silent while torch compiles."""
    if _is_new(q_shape, k_shape):
        _warn(_attention_hint(tuple(q_shape[1:]), tuple(k_shape[1:])))


def warn_about_tokens(query_shape: Sequence[int], key_shape: Sequence[int]) -> None:
    """The same for a module's query [B, *G, C] and key [B, *G', C]."""
    if _is_new("module", query_shape, key_shape):
        _warn(_module_hint(tuple(query_shape[1:]), tuple(key_shape[1:])))


def clear() -> None:
    """Forget what was seen: each warning comes again."""
    _seen.clear()


_seen: set[tuple[object, ...]] = set()


def _is_new(*shapes: Sequence[int] | str) -> bool:
    """Whether they come for the first time; not while torch compiles, and not with symbolic extents."""
    try:
        if torch.compiler.is_compiling() or shapes in _seen:
            return False
    except TypeError:  # a symbolic extent has no hash
        return False
    if len(_seen) >= 4096:  # shapes without end
        clear()
    _seen.add(shapes)
    return True


def _warn(hint: str) -> None:
    """Each hint once: another batch has the same."""
    if hint and _is_new(hint):
        warn_caller(f"{hint}. To keep it as it is, ignore the category scram.LayoutWarning", LayoutWarning)


def warn_caller(message: str, category: type[Warning]) -> None:
    """A warning that names the line outside of this package and of torch."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level += 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _attention_hint(q: tuple[int, ...], k: tuple[int, ...]) -> str:
    """The hint for [H, *G, E] and [Hk, *G', E], "" for none."""
    heads, *grid, width = q
    points = math.prod(grid)
    shape = f"q [B, {', '.join(map(str, q))}]"
    if heads >= 32 and heads > points:
        flattened = _flattened(heads)
        grid_of = (
            ".unflatten(2, (height, width))"
            if flattened is None or flattened[0]
            else f".unflatten(2, {flattened[1:] * 2})"
        )
        mend = f"q.transpose(1, 2){grid_of} for [B, N, heads, E]" if len(grid) == 1 else "q.movedim(-2, 1) to move them"
        mend += ", q.movedim(1, -1).unsqueeze(1) for channels first"
        return f"{shape} has more heads, {heads}, than its grid has points, {points}: is it [B, H, *G, E]? Use {mend}"
    if len(grid) == 2 and heads >= 24 and heads == grid[0] and grid[1] <= 16:
        return f"{shape} looks like [B, h, w, heads, E], not [B, H, *G, E]; use q.movedim(-2, 1)"
    if len(grid) > 1 and width > 256 and width == grid[-1] > grid[0]:
        return f"{shape} looks like [B, H, E, h, w], not [B, H, *G, E]; use q.movedim(2, -1)"
    flattened = _flattened(points) if len(grid) == 1 and k[1:-1] == q[1:-1] else None
    if flattened is None:
        return ""
    prefix, side = flattened
    mend = f"q.unflatten(2, ({side}, {side})), k and v too"
    if prefix:
        first = f"[:, :, :{prefix}]"
        mend = f"q[:, :, {prefix}:]{mend[1:]}; prefix tokens: pass them as extra=(k{first}, v{first})"
    return _read_as_line(shape, points, prefix, side, mend)


def _module_hint(query: tuple[int, ...], key: tuple[int, ...]) -> str:
    """The hint for [*G, C] and [*G', C], "" for none."""
    flattened = _flattened(query[0]) if len(query) == 2 and key[:-1] == query[:-1] else None
    if flattened is None:
        return ""
    prefix, side = flattened
    mend = f"x.unflatten(1, ({side}, {side}))"
    if prefix:
        mend = f"layer(x[:, {prefix}:]{mend[1:]}, tokens=x[:, :{prefix}])"
    return _read_as_line(f"query [B, {', '.join(map(str, query))}]", query[0], prefix, side, mend)


def _read_as_line(shape: str, points: int, prefix: int, side: int, mend: str) -> str:
    picture = f"{prefix} + {side} x {side}" if prefix else f"{side} x {side}"
    return f"{shape} is read as a 1-D grid, and {points} looks like {picture} flattened tokens; use {mend}"


def _flattened(points: int) -> tuple[int, int] | None:
    """prefix and side of a square picture of so many tokens.

    >>> _flattened(576), _flattened(577), _flattened(600), _flattened(49)
    ((0, 24), (1, 24), None, None)
    """
    sides = {prefix: math.isqrt(points - prefix) for prefix in PREFIXES if points >= 64}
    return next(((prefix, side) for prefix, side in sides.items() if side * side + prefix == points), None)
