"""What a float `attn_mask` means on a grid: keys that are masked, and a bias as factors. Where it has none, why not."""

from __future__ import annotations

import math
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..bias import Bias, low_rank, of_offsets
from ..spec.grid import coordinates

MOST_RANK = 64  # features that q and k may get: beyond, they would cost more than they save
MOST_OFF_GRID = 16  # keys off the grid with a bias of their own, a feature each
REMEMBERED = 64  # masks
ERROR = 0.01  # of factors, where a call has no budget
SHARE = 0.25  # of a budget that factors may take
CHUNK_ELEMENTS = 1 << 23  # of pairs at a time
GRADIENTS = "a float bias that needs gradients; pass factors of it to scram.attention(bias=...)"
COMPILED = "a float bias, which compiled code cannot look at"
BETWEEN_QUERIES = "a mask that differs between queries"
BETWEEN_BATCH = "a float bias that differs between the entries of a batch"
BETWEEN_HEADS = "a mask of tokens off the grid that differs between heads"
OFF_GRID = f"a float bias of more than {MOST_OFF_GRID} tokens off the grid"


class GridMask(NamedTuple):
    """Of a call on a grid. Keys off the grid have a bias too, where they have any: `b_extra`."""

    key_mask: Tensor | None = None  # bool [B or 1, H or 1, *G'], True = may be attended; None: all
    off: Tensor | None = None  # bool [B or 1, X], the same of keys off the grid
    bias: Bias | None = None
    b_extra: Tensor | None = None  # [1, 1, X, r]


class FloatMasks:
    """Reads float masks, and remembers what they were: equal ones are factored once.

    A mask is known again by its products with a vector of random numbers, which cost one pass over it.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], list[tuple[Tensor, GridMask | str]]] = OrderedDict()
        self._lock = Lock()
        self._last: tuple[ReferenceType[Tensor], int, tuple[Any, ...], GridMask | str] | None = None

    def read(
        self,
        mask: Tensor,
        grid: tuple[int, ...],
        key_grid: tuple[int, ...],
        before: int = 0,
        after: int = 0,
        error: float | None = None,
    ) -> GridMask | str:
        """What it means, or why the call is left to torch.

        Args:
            mask: float [B or 1, H or 1, N or 1, M or 1], as torch adds it to logits.
            grid, key_grid: extents.
            before, after: tokens off the grid, among queries and among keys.
            error: the budget of the call; None: of `ERROR`.
        """
        if torch.compiler.is_compiling():
            return COMPILED
        if mask.requires_grad and torch.is_grad_enabled():
            return GRADIENTS
        kind = (tuple(mask.shape), mask.dtype, mask.device, grid, key_grid, before, after, error)
        version = None if mask.is_inference() else mask._version
        if self._last is not None and version is not None:
            known, then, what, found = self._last
            if known() is mask and then == version and what == kind:
                return found
        with torch.no_grad(), self._lock:
            found = self._found(mask, kind)
        if version is not None:
            self._last = (ref(mask), version, kind, found)
        return found

    def clear(self) -> None:
        """Forget every mask."""
        with self._lock:
            self._known.clear()
            self._last = None

    def _found(self, mask: Tensor, kind: tuple[Any, ...]) -> GridMask | str:
        mark = _fingerprint(mask)
        alike = self._known.setdefault(kind, [])
        self._known.move_to_end(kind)
        for other, found in alike:
            if torch.equal(other, mark):
                return found
        grid, key_grid, before, after, error = kind[3:]
        keys = math.prod(key_grid) + before + after
        found = _read(mask.expand(-1, -1, -1, keys), grid, key_grid, before, after, _share(error))
        alike.append((mark, found))
        while sum(map(len, self._known.values())) > REMEMBERED:
            first = next(iter(self._known))
            self._known[first].pop(0)
            if not self._known[first]:
                del self._known[first]
        return found


def _share(error: float | None) -> float:
    return ERROR if error is None else SHARE * error


def _fingerprint(mask: Tensor) -> Tensor:
    """Float32 [B, H, N], which another mask hardly has: its rows times random numbers."""
    generator = torch.Generator().manual_seed(0)
    weights = (
        torch.rand(mask.shape[-1], generator=generator, dtype=torch.float32, device="cpu").add(0.5).to(mask.device)
    )
    least = torch.finfo(torch.float16).min
    return mask.float().clamp(min=least) @ weights


def _read(
    mask: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...], before: int, after: int, error: float
) -> GridMask | str:
    """The meaning of a mask [B or 1, H or 1, N or 1, M]."""
    queries, keys = math.prod(grid), math.prod(key_grid)
    if mask.isnan().any() or (mask == torch.inf).any():
        return "a float mask that holds NaN or infinity"
    rows = mask if mask.shape[2] == 1 else mask[:, :, before : before + queries]
    hidden = rows <= torch.finfo(mask.dtype).min / 2
    if not torch.equal(hidden, hidden[:, :, :1].expand_as(hidden)):
        return BETWEEN_QUERIES
    shown = ~hidden[:, :, 0]  # [B or 1, H or 1, M]
    added = torch.where(hidden, 0, rows).float()
    on_grid = slice(before, before + keys)
    off = [n for n in range(before + keys + after) if not before <= n < before + keys]
    shown_off = shown[..., off]
    if not torch.equal(shown_off, shown_off[:, :1].expand_as(shown_off)):
        return BETWEEN_HEADS
    if len(off) > MOST_OFF_GRID and added[..., off].any():
        return OFF_GRID
    mask_off = None if shown_off.all() else shown_off[:, 0]
    own = shown[..., on_grid]
    key_mask = None if own.all() else own.reshape(*own.shape[:2], *key_grid)
    if not added.any():
        return GridMask(key_mask, mask_off)
    if not torch.equal(added, added[:1].expand_as(added)):
        return BETWEEN_BATCH
    extra = added[:1, :, :, off]  # [1, H or 1, N or 1, X]
    bias = _factored(added[0, :, :, on_grid], own.all(0).all(0), grid, key_grid, error)
    if isinstance(bias, str):
        return bias
    if not extra.any():
        return GridMask(key_mask, mask_off, bias)
    a = extra.expand(1, -1, queries, -1).reshape(1, extra.shape[1], *grid, len(off))
    heads = max(a.shape[1], bias.a.shape[1])
    a = torch.cat([bias.a.expand(1, heads, *bias.a.shape[2:]), a.expand(1, heads, *a.shape[2:])], -1)
    b = torch.cat([bias.b, bias.b.new_zeros(*bias.b.shape[:-1], len(off))], -1)
    eye = torch.eye(len(off), dtype=a.dtype, device=a.device)
    b_extra = torch.cat([eye.new_zeros(len(off), bias.rank), eye], -1)[None, None]
    return GridMask(key_mask, mask_off, Bias(a, b, bias.error), b_extra)


def _factored(
    added: Tensor, shown: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...], error: float
) -> Bias | str:
    """Factors of what is added to the logits [H or 1, N or 1, M] of keys that are shown, bool [M]."""
    heads, queries, _ = added.shape
    if queries == 1:  # the same for all queries
        a = added.new_ones(1, 1, *grid, 1)
        return Bias(a, added.reshape(1, heads, *key_grid, 1))
    table = _table_of(added, shown, grid, key_grid, error / 8)
    most = max(1, min(MOST_RANK, *(n // 2 for n in added.shape[1:])))
    if table is not None:
        bias = of_offsets(table, grid, key_grid, error=error, most=most)
    else:
        bias = low_rank(added, grid, key_grid, error=error, most=most)
    if bias.error > error:
        return f"a float bias that {bias.rank} features leave {bias.error:.2g} off, more than {error:.2g}"
    return bias


def _table_of(
    added: Tensor, shown: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...], tolerance: float
) -> Tensor | None:
    """The table [H, *S] of a bias [H, N, M] that depends on the offset of query and key alone; None of any other."""
    device = added.device
    offsets = [torch.arange(1 - m, n, device=device) for n, m in zip(grid, key_grid, strict=True)]
    first = torch.cartesian_prod(*offsets).reshape(-1, len(grid))  # [S, rank]
    query = _flat(first.clamp(min=0), grid)
    key = _flat((-first).clamp(min=0), key_grid)
    sizes = tuple(len(x) for x in offsets)
    table = added[:, query, key]  # [H, S]
    query_place = torch.stack(coordinates(torch.arange(math.prod(grid), device=device), grid), -1)
    key_place = torch.stack(coordinates(torch.arange(math.prod(key_grid), device=device), key_grid), -1)
    last = torch.tensor(key_grid, dtype=torch.int64, device=device) - 1
    step = max(1, CHUNK_ELEMENTS // (added.shape[0] * added.shape[2]))
    for begin in range(0, added.shape[1], step):
        some = slice(begin, begin + step)
        offset = _flat(query_place[some, None] - key_place + last, sizes)  # [n, M]
        if ((table[:, offset] - added[:, some]).abs() * shown > tolerance).any():
            return None
    return table.reshape(-1, *sizes)


def _flat(place: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Row-major numbers of points [..., rank] of a grid."""
    number = torch.zeros_like(place[..., 0])
    for axis, extent in enumerate(grid):
        number = number * extent + place[..., axis]
    return number
