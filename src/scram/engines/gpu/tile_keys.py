"""Gradients of keys and values of attended tiles with repeatable bits: every cell collects from the tiles that list it.

The tiles that list a cell stand together, in order, in a list sorted by cell. No atomics.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grid import flat
from .block_sizes import TILE_COLLECT, TILE_COLLECT_EXACT
from .cells import Cells, key_of, place_of, rows_at
from .grid import lane_query, points, tile_at
from .launch import Kernel
from .noise import absorb, row_state
from .tile_attend import CELL, tile_flags
from .tile_pairs import dots, owed, own_pieces, pairs_of, put_owed, slopes, unit_of
from .windows import SETTINGS


def backward_flags(*given: Any) -> dict[str, Any]:
    """`tile_flags`, how many programs share the widths, and whether slopes are float16."""
    flags, dtype = tile_flags(*given), given[3][0][1]
    return {**flags, "PARTS": max(flags["PIECES"], flags["FPIECES"]), "LIFT": flags["NARROW"] and dtype == torch.half}


def collect(
    arguments: tuple[Any, ...],
    variant: tuple[Any, ...],
    cells: Cells,
    above: tuple[Tensor, Tensor, Tensor],
    sums: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill dk and dv, float32 and zero before. `sums` [B, H, *G, 3] is what the queries found."""
    key_grid, device, key_rows = tuple(dk.shape[2:-1]), dk.device, dk.shape[0] * dk.shape[1]
    keys = dk[0, 0, ..., 0].numel()
    steps = [torch.arange(0, extent, side, device=device) for extent, side in zip(key_grid, cells.sides, strict=False)]
    corner = flat([c.flatten() for c in torch.meshgrid(*steps, indexing="ij")], key_grid)
    every = (corner + keys * torch.arange(key_rows, device=device).unsqueeze(1)).flatten()
    tiles = len(cells.count)
    source = torch.arange(tiles, device=device) // (tiles // key_rows)
    there = torch.arange(cells.room, device=device) < cells.count.unsqueeze(1)
    names = torch.where(there, cells.first + keys * source.unsqueeze(1), key_rows * keys).flatten()
    names, order = names.sort(stable=True)
    begin, end = (torch.searchsorted(names, every, right=right) for right in (False, True))
    q_shape, v_shape, flags, given = variant
    block = backward_flags(q_shape, v_shape, flags, given, cells.size, TILE_COLLECT, TILE_COLLECT_EXACT)
    blocks = triton.cdiv(cells.size, block["BN"])
    grad_out, _, lse = above
    kernel = Kernel(tile_collect_kernel, len(every) * blocks * block["PARTS"], block)
    kernel(*arguments, *cells.arguments, grad_out, lse, sums, dk, dv, order, every, begin, end)


@triton.jit(do_not_specialize=[*SETTINGS, *CELL])
def tile_collect_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    s0, s1, s2, s3, room, cells, count, grad_out, lse, sums, dk, dv, order, every, begin, end,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    COPIES: tl.constexpr, NARROW: tl.constexpr, LIFT: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program (cell of a key row, BN of its keys, piece of their width).

    order[begin:end] // room are the tiles that list the cell.
    """
    QG, KG, MAGIC, SIDE = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (s0, s1, s2, s3)
    queries, keys, size = points(QG, RANK).to(tl.int64), points(KG, RANK), points(SIDE, RANK)
    piece, blocks = tl.program_id(0) % PARTS, (size + BN - 1) // BN
    cell, number = tl.program_id(0) // PARTS // blocks, tl.program_id(0) // PARTS % blocks * BN + tl.arange(0, BN)
    first = tl.load(every + cell)
    source, base = first // keys, (first % keys).to(tl.int32)
    key, own = key_of(base + number * 0, place_of(number, SIDE, RANK), number < size, KG, MAGIC, RANK)
    k_row, v_row = k + source * keys * E, v + source * keys * F
    k_sum, v_sum = tl.zeros([BN, W], tl.float32), tl.zeros([BN, FW], tl.float32)
    e_piece, f_piece = own_pieces(piece, PIECES, FPIECES)
    GUARD: tl.constexpr = CAUSAL or mask is not None
    for t in range(tl.load(begin + cell), tl.load(end + cell)):
        row, corner = tile_at((tl.load(order + t) // room).to(tl.int32), QG, RANK, TILE)
        query, valid = lane_query(corner, QG, RANK, TILE, LANES)
        there, point = own, row * queries + query
        if mask is not None:
            there = own & (tl.load(mask + (row // mask_heads).to(tl.int64) * keys + key, mask=own, other=0) != 0)
        ok = pairs_of(key, there, query, CAUSAL)
        q_row, wish_row = q + row * queries * E, grad_out + row * queries * F
        mine = rows_at(q_row, query, valid, e_piece, E, W, WEIGHT)
        wish = rows_at(wish_row, query, valid, f_piece, F, FW, WEIGHT)
        norm = tl.load(lse + point, mask=valid, other=float("inf"))
        over = tl.load(sums + point * 3, mask=valid, other=0.0)
        shift = tl.load(sums + point * 3 + 1, mask=valid, other=0.0)
        unit = unit_of(tl.load(sums + point * 3 + 2, mask=valid, other=0.0), scale, LIFT)
        noise = absorb(row_state(SEED, low, high, row), query)
        s, _ = dots(mine, q_row, query, valid, k_row, key, there, e_piece, E, W, PIECES, WEIGHT, LANES, BN)
        dp, _ = dots(wish, wish_row, query, valid, v_row, key, there, f_piece, F, FW, FPIECES, WEIGHT, LANES, BN)
        p, ds = slopes(
            s, dp, ok, norm, over, shift, key, noise, threshold, keep, scale, unit, WEIGHT, DROPOUT, NARROW, GUARD
        )  # fmt: skip
        k_sum, v_sum = owed(p, ds, unit, ok, mine, wish, k_sum, v_sum, NARROW, LIFT, GUARD)
    put_owed(dk + source * keys * E, key, own, piece, k_sum, E, W, PARTS, False)
    put_owed(dv + source * keys * F, key, own, piece, v_sum, F, FW, PARTS, False)
