"""Attention of whole tiles in Triton: the queries of a tile attend the cells that their windows touch, together.

A program walks the cells of its tile, some keys at a time: scores by a matrix product, a running softmax, values by
another. What is legal for no query of the tile is zero before it is multiplied. Under causal order a key is legal for
some: what is not finite is left out of the product of the values, and counted beside it.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...schedule import LANES
from .block_sizes import TILE_FORWARD, TILE_FORWARD_EXACT, tile_pieces
from .cells import cells_of, keys_at, rows_at
from .grid import lane_query, points, tile_at, tile_shape, tiles
from .launch import Kernel, on_device
from .noise import absorb, row_state
from .shared_keys import LN2, finite, product, stages
from .tile_pairs import dots, in_powers, pairs_of, powers_of
from .windows import SETTINGS, Flags, weigh, window_arguments, window_flags

CELL = ("s0", "s1", "s2", "s3", "room")


def tile_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    k_extra: Tensor | None,
    v_extra: Tensor | None,
    seed: Tensor | None,
    *,
    radius: tuple[int, ...],
    causal: bool,
    scale: float,
    weight: str,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """q [B, H, *G, E], k [B, Hk, *G', E], v [B, Hk, *G', F], index [B, H, *G, kappa] -> out [B, H, *G, F], lse."""
    out = v.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if lse.numel() == 0:
        return out, lse
    arguments, variant = window_arguments(
        q, k, v, index, key_mask, k_extra, v_extra, seed, radius, causal, scale, weight, dropout_p
    )
    with on_device(q):
        cells = cells_of(q, k, arguments[3], radius)
        _kernel(*variant, cells.size)(*arguments, *cells.arguments, out, lse)
    return out, lse


@lru_cache(maxsize=256)
def _kernel(
    q_shape: tuple[int, ...], v_shape: tuple[int, ...], flags: Flags, given: tuple[Any, ...], size: int
) -> Kernel:
    block = tile_flags(q_shape, v_shape, flags, given, size, TILE_FORWARD, TILE_FORWARD_EXACT)
    return Kernel(tile_attend_kernel, tile_count(q_shape) * block["FPIECES"], block)


def tile_count(q_shape: tuple[int, ...]) -> int:
    return q_shape[0] * q_shape[1] * tiles(q_shape[2:-1], tile_shape(LANES, len(q_shape) - 3))


def tile_flags(
    q_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    flags: Flags,
    given: tuple[Any, ...],
    size: int,
    half: tuple[int, int, int],
    exact: tuple[int, int, int],
) -> dict[str, Any]:
    """The flags of a kernel over cells: `half` or `exact` are its keys per product, warps and stages at most."""
    (device, dtype, _), value_dtype = given[0], given[2][1]
    narrow = dtype.itemsize == value_dtype.itemsize == 2 and flags[1] == "softmax"
    keys, warps, most = half if narrow else exact
    pieces = tile_pieces(q_shape[-1], v_shape[-1], narrow)
    row = pieces["W"] * dtype.itemsize + pieces["FW"] * value_dtype.itemsize
    whole = {name: value for name, value in window_flags(q_shape, v_shape, flags).items() if name != "SEVERAL"}
    whole |= {"TILE": tile_shape(LANES, len(q_shape) - 3), "LANES": LANES, "BN": keys, "EVEN": keys % size == 0}
    whole |= {"NARROW": narrow, "COPIES": 2 if 32 * warps > keys else 1}
    ahead = stages(device, most, keys * row, LANES * row)
    return {**whole, **pieces, "num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=[*SETTINGS, *CELL])
def tile_attend_kernel(
    q, k, v, index, mask, k_extra, v_extra, SEED, low, high, mask_heads, group, kappa, extras, threshold,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale, keep,
    s0, s1, s2, s3, room, cells, count, out, lse,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr,
    DROPOUT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    COPIES: tl.constexpr, NARROW: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """Program (tile, piece of the values)."""
    QG, KG, MAGIC, SIDE = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (s0, s1, s2, s3)
    piece, tile = tl.program_id(0) % FPIECES, tl.program_id(0) // FPIECES
    row, corner = tile_at(tile, QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys, size = points(QG, RANK).to(tl.int64), points(KG, RANK), points(SIDE, RANK)
    source, mask_row = (row // group).to(tl.int64), (row // mask_heads).to(tl.int64)
    k_row, v_row, q_row = k + source * keys * E, v + source * keys * F, q + row * queries * E
    noise = absorb(row_state(SEED, low, high, row), query)
    mine = rows_at(q_row, query, valid, 0, E, W, WEIGHT)

    COUNT: tl.constexpr = WEIGHT != "softmax" or CAUSAL or mask is not None  # else a cell has a key for everyone
    top = tl.full([LANES], -float("inf"), tl.float32)
    total, seen = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    mixed = tl.zeros([LANES, FW], tl.float32)
    spoiled = mixed
    mine_cells, last = cells + tile.to(tl.int64) * room, tl.load(count + tile) * size
    if not COUNT:
        seen += last
    for begin in range(0, last, BN):
        key = keys_at(
            begin, mine_cells, last, mask, mask_row, keys, KG, MAGIC, SIDE, size, RANK, BN, EVEN, COPIES
        )  # fmt: skip
        there = key >= 0
        ok = pairs_of(key, there, query, CAUSAL)
        top, total, seen, mixed, spoiled = mix_block(
            mine, q_row, query, valid, k_row, v_row, key, there, key, ok, piece, top, total, seen, mixed, spoiled,
            noise, threshold, keep, scale, E, F, CAUSAL, WEIGHT, DROPOUT, NARROW, COUNT, LANES, BN, W, PIECES, FW,
        )  # fmt: skip
    if k_extra is not None:
        for begin in range(0, extras, BN):
            x = begin + tl.arange(0, BN)
            top, total, seen, mixed, spoiled = mix_block(
                mine, q_row, query, valid, k_extra + source * extras * E, v_extra + source * extras * F, x, x < extras,
                keys + x, (x < extras)[None, :], piece, top, total, seen, mixed, spoiled,
                noise, threshold, keep, scale, E, F, CAUSAL, WEIGHT, DROPOUT, NARROW, True, LANES, BN, W, PIECES, FW,
            )  # fmt: skip

    if WEIGHT == "softmax":
        whole = tl.where(seen > 0, total, 1.0)
        top = tl.where(top == -float("inf"), 0.0, top)
        norm = tl.where(seen > 0, tl.log(whole) + (top * LN2 if NARROW else top), -float("inf"))
    else:
        whole = tl.maximum(seen, 1.0)
        norm = tl.where(seen > 0, tl.log(whole), -float("inf"))
    if piece == 0:
        tl.store(lse + row * queries + query, norm, mask=valid)
    answer = mixed / whole[:, None]
    if CAUSAL:
        answer = tl.where(spoiled > 0, float("nan"), answer)
    f = piece * FW + tl.arange(0, FW)[None, :]
    to = out + row * queries * F + query.to(tl.int64)[:, None] * F + f
    tl.store(to, answer.to(out.dtype.element_ty), mask=valid[:, None] & (f < F))


@triton.jit
def mix_block(
    mine, q_row, query, valid, k_row, v_row, at, there, name, ok, piece, top, total, seen, mixed, spoiled,
    noise, threshold, keep, scale,
    E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, WEIGHT: tl.constexpr, DROPOUT: tl.constexpr,
    NARROW: tl.constexpr, COUNT: tl.constexpr, LANES: tl.constexpr, BN: tl.constexpr, W: tl.constexpr,
    PIECES: tl.constexpr, FW: tl.constexpr,
):  # fmt: skip
    """BN more keys: the running maximum, normaliser, number of keys and weighted sum of values of each query."""
    s, _ = dots(mine, q_row, query, valid, k_row, at, there, 0, E, W, PIECES, WEIGHT, LANES, BN)
    if WEIGHT == "softmax":
        s, each = tl.where(ok, s, -float("inf")), in_powers(scale, NARROW)
        higher = tl.maximum(top, tl.max(s, 1) * each)
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
        shrink, p = powers_of(top, safe, NARROW), powers_of(s * each, safe[:, None], NARROW)
        total, top = total * shrink + tl.sum(p, 1), higher
        mixed *= shrink[:, None]
    else:
        p = weigh(s * scale, ok, WEIGHT)
    if COUNT:
        seen += tl.sum(tl.where(ok, 1.0, 0.0), 1)
    if DROPOUT:
        p = tl.where(absorb(noise[:, None], name[None, :]) >= threshold.to(tl.uint32), p * keep, 0.0)
    value = rows_at(v_row, at, there, piece, F, FW, WEIGHT)
    if CAUSAL:  # a weight of 0 lets no NaN of a later key through
        bad = ~(tl.abs(value.to(tl.float32)) < float("inf"))
        held = tl.where(ok & valid[:, None], 1.0, 0.0).to(value.dtype)
        spoiled = product(held, tl.where(bad, 1.0, 0.0).to(value.dtype), spoiled)
        value = finite(value)
    mixed = product(p.to(value.dtype), value, mixed)
    return top, total, seen, mixed, spoiled
