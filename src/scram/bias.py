"""Additive biases of attention as factors: tables of offsets, decomposed ones, and biases that are linear in place.

`attention(..., bias=bias)` adds <a_i, b_j> to the logit of query i and key j. A bias that a model keeps as a table, or
as one number for each pair, has such factors, few of them where it is smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .core import checks
from .core.bias import Bias

__all__ = ["Bias", "decomposed", "linear", "relative"]
SMALL = 768  # up to so many queries or keys the matrix of all pairs is decomposed as it is
STEPS = 3  # of subspace iteration, where it is larger
SPARE = 8  # directions beyond those that are wanted
ERROR = 0.01


def relative(
    table: Tensor,
    grid: Sequence[int],
    key_grid: Sequence[int] | None = None,
    *,
    rank: int | None = None,
    error: float = ERROR,
) -> Bias:
    """Factors of a table of offsets: what Swin, BEiT, TinyViT (MobileSAM) and T5 add to their logits.

    The fewest features whose error is within `error`, by a singular value decomposition; the result says what it is.
    No pair of a large grid is held: there it is found by products with the table. The factors are constants; to train a
    bias, train factors.

    Args:
        table: [H, *S]. Axis a has either an entry for each offset query - key, S_a = G_a + G'_a - 1, from -(G'_a - 1)
            up; or one for each distance |query - key|, S_a = max(G_a, G'_a).
        grid: extents G of the query grid.
        key_grid: extents G' of the key grid; None: the same.
        rank: how many features; None: as many as `error` needs.
        error: root mean square of what is off, over all pairs, in the worst head, in the unit of logits. Weights of
            attention are then off by about that share.

    Returns:
        Bias with a [1, H, *G, r] and b [1, H, *G', r], float32 on the table's device (float64 for float64).

    >>> table = torch.arange(-3.0, 4).square().neg().expand(2, 7)  # -(i - j)^2 on four points
    >>> relative(table, (4,), rank=2)
    Bias(a [1, 2, 4, 2], b [1, 2, 4, 2], rank 2, error 0.35)
    """
    extents, key_extents = _grids(grid, key_grid)
    checks.instance("table", table, Tensor, "tensor [H, *S]")
    if not table.is_floating_point() or table.ndim != len(extents) + 1 or not table.numel():
        raise ValueError(
            f"table must be a float tensor [H, *S] with {len(extents)} axes of offsets, got {table.dtype} "
            f"{tuple(table.shape)}; move the axis of heads to the front"
        )
    checks.finite(table=table)
    checks.real("error", error, 0.0, math.inf, "[0, inf)")
    if rank is not None:
        rank = checks.whole("rank", rank, 1)
    return of_offsets(table, extents, key_extents, rank=rank, error=error)


def decomposed(*parts: Tensor) -> Bias:
    """A bias that is a sum over axes of what a query adds to each coordinate of a key: SAM's, exact and differentiable.

    Args:
        parts: one for each axis of the key grid, [B or 1, H or 1, *G, G'_a]: what the query adds to keys whose
            coordinate on axis a is n. SAM's are rel_h and rel_w.

    Returns:
        Bias with a [B, H, *G, sum of G'] and b [1, 1, *G', sum of G'].

    >>> rel_h, rel_w = torch.randn(2, 1, 2, 4, 4, 4).unbind()
    >>> bias = decomposed(rel_h, rel_w)
    >>> pairs = torch.einsum("bhyxr,bhijr->bhyxij", bias.a, bias.b.expand(1, 2, 4, 4, 8))
    >>> bool(torch.equal(pairs, rel_h[..., None] + rel_w[..., None, :]))
    True
    """
    if not parts:
        raise TypeError("decomposed needs a tensor for each axis of the key grid, got none")
    first = parts[0]
    for n, part in enumerate(parts):
        checks.instance(f"parts[{n}]", part, Tensor, "tensor [B, H, *G, G'_a]")
        if part.ndim != len(parts) + 3 or part.shape[:-1] != first.shape[:-1]:
            raise ValueError(
                f"parts[{n}] must be [B, H, *G, G'_a] with {len(parts)} axes of the grid, one tensor for each, and fit "
                f"parts[0] {tuple(first.shape)}, got {tuple(part.shape)}"
            )
    key_grid = [part.shape[-1] for part in parts]
    ones = [
        torch.eye(extent, dtype=first.dtype, device=first.device)
        .reshape([1] * axis + [extent] + [1] * (len(key_grid) - axis - 1) + [extent])
        .expand(*key_grid, extent)
        for axis, extent in enumerate(key_grid)
    ]
    return Bias(torch.cat(parts, -1), torch.cat(ones, -1)[None, None])


def linear(slopes: Tensor, grid: Sequence[int], *, causal: bool) -> Bias:
    """ALiBi: -slope (i - j) for query i and key j in row-major order; exact, for keys up to the query.

    Args:
        slopes: [H], one of each head.
        grid: extents of the grid of queries and keys.
        causal: whether the order is causal. Otherwise the bias is -slope |i - j|, which no few factors describe: it
            raises.

    Returns:
        Bias with a [1, H, *G, 2] and b [1, 1, *G, 2]; calls without causal order refuse it.

    >>> bias = linear(torch.tensor([0.5, 0.25]), (4,), causal=True)
    >>> (bias.a @ bias.b.mT)[0, :, 3]
    tensor([[-1.5000, -1.0000, -0.5000,  0.0000],
            [-0.7500, -0.5000, -0.2500,  0.0000]])
    """
    extents, _ = _grids(grid, None)
    checks.instance("slopes", slopes, Tensor, "tensor [H]")
    if slopes.ndim != 1 or not slopes.is_floating_point() or not slopes.numel():
        raise ValueError(f"slopes must be a float tensor [H], got {slopes.dtype} {tuple(slopes.shape)}")
    if not checks.flag("causal", causal):
        raise ValueError(
            "linear needs causal order: -slope |i - j| has no few factors; pass it as a table to scram.bias.relative, "
            "whose result says how far off it is"
        )
    place = torch.arange(math.prod(extents), dtype=slopes.dtype, device=slopes.device)
    each = slopes.unsqueeze(-1).expand(-1, len(place))
    a = torch.stack([each, -each * place], -1)  # [H, N, 2]
    b = torch.stack([place, torch.ones_like(place)], -1)  # [N, 2]
    return Bias(a.reshape(1, -1, *extents, 2), b.reshape(1, 1, *extents, 2), causal=True)


def of_offsets(
    table: Tensor,
    grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    *,
    rank: int | None = None,
    error: float = ERROR,
    most: int | None = None,
) -> Bias:
    """`relative` of a table that was checked; at most `most` features, whatever their error."""
    full = _by_offset(table.detach().double(), grid, key_grid)
    by_head = [_of_table(one, grid, key_grid, rank, error, most) for one in full]
    return _joined(by_head, grid, key_grid, torch.float64 if table.dtype == torch.float64 else torch.float32)


def low_rank(
    pairs: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...], *, error: float = ERROR, most: int
) -> Bias:
    """Factors of the bias [H, N, M] of all pairs: at most `most` features, as few as `error` needs."""
    by_head = []
    for one in pairs.double():
        start = _directions(one.shape[1], min(most + SPARE, *one.shape), one)
        left, values, right = _subspace(partial(torch.matmul, one), partial(torch.matmul, one.mT), start)
        rest = (one.square().sum() - values.square().sum()).clamp(min=0)
        by_head.append(_fewest(left, values, right, rest, None, error, most))
    return _joined(by_head, grid, key_grid, torch.float32)


Factors = tuple[Tensor, Tensor, float]  # a [N, r] and b [M, r] of one head, and their root mean square error


def _joined(by_head: list[Factors], grid: tuple[int, ...], key_grid: tuple[int, ...], dtype: torch.dtype) -> Bias:
    """The factors of all heads, as wide as the widest."""
    width = max(left.shape[-1] for left, _, _ in by_head)
    a, b = (
        torch.stack([torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in factors])
        for factors in ([left for left, _, _ in by_head], [right for _, right, _ in by_head])
    )
    return Bias(
        a.reshape(1, -1, *grid, width).to(dtype),
        b.reshape(1, -1, *key_grid, width).to(dtype),
        max(off for _, _, off in by_head),
    )


def _grids(grid: Any, key_grid: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    extents = checks.grid(grid)
    key_extents = extents if key_grid is None else checks.grid(key_grid, "key_grid")
    if len(extents) != len(key_extents):
        raise ValueError(f"grid and key_grid must have the same rank, got {extents} and {key_extents}")
    return extents, key_extents


def _by_offset(table: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...]) -> Tensor:
    """A table [H, *S] with an entry for each offset on every axis, S_a = G_a + G'_a - 1."""
    for axis, (queries, keys) in enumerate(zip(grid, key_grid, strict=True), start=1):
        offsets = torch.arange(1 - keys, queries, device=table.device)
        if table.shape[axis] == len(offsets):
            continue
        if table.shape[axis] != max(queries, keys):
            raise ValueError(
                f"axis {axis} of table must have {len(offsets)} offsets or {max(queries, keys)} distances for grids of "
                f"{queries} queries and {keys} keys, got {table.shape[axis]}"
            )
        table = table.index_select(axis, offsets.abs())
    return table


def _product(table: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """x [M, n] -> the bias of all pairs [N, M] times x, by a Fourier transform; `table` [*S] is by offset."""
    sizes = tuple(table.shape)
    axes = list(range(len(sizes)))
    spectrum = torch.fft.rfftn(table.roll([1 - n for n in key_grid], axes), dim=axes).unsqueeze(-1)

    def times(x: Tensor) -> Tensor:
        padded = x.new_zeros(*sizes, x.shape[-1])
        padded[tuple(slice(n) for n in key_grid)] = x.reshape(*key_grid, -1)
        product: Tensor = torch.fft.irfftn(torch.fft.rfftn(padded, dim=axes) * spectrum, s=sizes, dim=axes)
        return product[tuple(slice(n) for n in grid)].reshape(-1, x.shape[-1])

    return times


def _of_table(
    table: Tensor,
    grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    rank: int | None,
    error: float,
    most: int | None,
) -> Factors:
    """Of one head's table [*S] by offset."""
    if min(math.prod(grid), math.prod(key_grid)) <= SMALL:
        left, values, right = _small(table, grid, key_grid)
        rest = values.new_zeros(())
    else:
        left, values, right, rest = _large(table, grid, key_grid, rank, error, most)
    return _fewest(left, values, right, rest, rank, error, most)


def _fewest(
    left: Tensor, values: Tensor, right: Tensor, rest: Tensor, rank: int | None, error: float, most: int | None
) -> Factors:
    """As few of the singular vectors [N, n] and [M, n] as `error` needs; `rest` is what they leave out, squared."""
    squares = values.square()
    after = squares.flip(0).cumsum(0).flip(0) - squares + rest  # what more factors would still describe
    off = (after / (len(left) * len(right))).sqrt()
    enough = (off <= error).nonzero()
    fewest = int(enough[0]) + 1 if len(enough) else len(values)
    width = min(fewest if rank is None else rank, len(values), len(values) if most is None else most)
    root = values[:width].sqrt()
    return left[:, :width] * root, right[:, :width] * root, float(off[width - 1])


def _small(table: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of the matrix of all pairs, made by its shorter side."""
    shorter = min(math.prod(grid), math.prod(key_grid))
    eye = torch.eye(shorter, dtype=table.dtype, device=table.device)
    by_keys = math.prod(key_grid) == shorter
    matrix = _product(table, grid, key_grid)(eye) if by_keys else _product(_turned(table), key_grid, grid)(eye).mT
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, values, right.mT


def _large(
    table: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...], rank: int | None, error: float, most: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first singular values and vectors, and the square of the rest.

    By subspace iteration with ever more directions, until what they leave out is within `error`.
    """
    forward = _product(table, grid, key_grid)
    back = _product(_turned(table), key_grid, grid)
    queries, keys = math.prod(grid), math.prod(key_grid)
    total = _square(table, grid, key_grid)
    every = min(queries, keys)
    most = every if most is None else min(most, every)
    count = min(16 if rank is None else rank, most)
    while True:
        wanted = min(count + SPARE, every)
        left, values, right = _subspace(forward, back, _directions(keys, wanted, table))
        rest = (total - values.square().sum()).clamp(min=0)
        off = ((total - values[:count].square().sum()).clamp(min=0) / (queries * keys)).sqrt()
        if rank is not None or count == most or float(off) <= error or float(values[-1]) <= 1e-7 * float(values[0]):
            return left, values, right, rest
        count = min(2 * count, most)


def _directions(keys: int, count: int, like: Tensor) -> Tensor:
    """Random directions [M, count] to start from, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(keys, count, dtype=like.dtype, generator=generator, device="cpu").to(like.device)


def _subspace(
    forward: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], start: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular vectors [N, n] and [M, n] and values of a matrix, by its products, from `start` [M, n]."""
    basis = torch.linalg.qr(forward(start))[0]
    for _ in range(STEPS):
        basis = torch.linalg.qr(forward(torch.linalg.qr(back(basis))[0]))[0]
    right, values, left = torch.linalg.svd(back(basis), full_matrices=False)
    return basis @ left.mT, values, right


def _turned(table: Tensor) -> Tensor:
    """The table [*S] with queries and keys exchanged."""
    return table.flip(list(range(table.ndim)))


def _square(table: Tensor, grid: tuple[int, ...], key_grid: tuple[int, ...]) -> Tensor:
    """The sum of the squares of all pairs, from a table [*S] by offset."""
    square = table.square()
    for axis, (queries, keys) in enumerate(zip(grid, key_grid, strict=True)):
        offsets = torch.arange(1 - keys, queries, device=table.device)
        first, last = offsets.clamp(min=0), (offsets + keys).clamp(max=queries)
        times = (last - first).to(table.dtype)  # how many pairs have the offset
        square = square * times.reshape([-1] + [1] * (table.ndim - axis - 1))
    return square.sum()
