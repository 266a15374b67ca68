"""The keys that the queries of a row share, in Triton: drawn, and laid side by side.

What every query of a row needs of a shared key is computed once: its features and values in whole blocks, its
coordinates, the log of how many keys it represents. A place without a key has the log of 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import DrawnTailCall
from ....spec.draws import by_heads, shared_tail, unmasked_later
from ....spec.grid import AllowedKeys, grid_of
from ..noise import absorb, row_state, seed_argument
from ..primitives import divide, finite, geometry, load_piece, mask_argument, points
from ..runtime.block_sizes import tile_pieces
from ..runtime.launch import Kernel

BLOCK_K = 64  # shared keys of a block
MOST_APART = tl.constexpr(240.0)  # of measured values under causal order, so that float16 holds their squares


class SharedKeys(NamedTuple):
    """The shared keys of all rows, as kernels take them. m, E, F are whole blocks."""

    k: Tensor  # [rows, m, E]
    v: Tensor  # [rows, m, F]
    places: Tensor  # int32 [rows, rank + 1, m], coordinates and name
    logs: Tensor  # float32 [rows, m], log of how many keys each represents
    # For the variance, else None: values measured from `middle` in its units and their squares, and what they are
    # measured from, the mean of a few values, and in, the largest distance; under causal order from the first, in units
    # of its size.
    away: Tensor | None  # [2, rows, m, F]
    middle: Tensor | None  # float32 [2, rows, F]
    drawn: int  # how many of the m are drawn


class SharedRow(NamedTuple):
    """The shared keys of a row, in a kernel: pointers, and m."""

    k: Any
    v: Any
    places: Any
    logs: Any
    padded: Any


def draw_names(call: DrawnTailCall) -> tuple[Tensor, Tensor]:
    """names and represents [B, H, m] of `draws.shared_tail`; the latter [B, H, 0] unless stratified."""
    q = call.q
    rows = q.shape[0] * q.shape[1]
    keys = math.prod(grid_of(call.k))
    order = torch.empty((rows, keys), dtype=torch.int64, device=q.device)
    if order.numel():
        flags = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
        kernel = Kernel(draw_order_kernel, -(-rows * keys // 1024), flags)
        mask = mask_argument(q, call.k, None if call.causal else call.key_mask)
        kernel(order, mask, seed_argument(call.seed, call.rows), rows, keys)
    unmasked = unmasked_later(AllowedKeys.of(q, call.k, call.causal, call.key_mask))
    settings = (call.samples, call.stratified, unmasked)
    # Under causal order the first of them comes before all others: the variance measures values from it.
    names, represents = shared_tail(order, grid_of(call.k), *settings, ascending=call.causal)
    return by_heads(q, names, represents)


@triton.jit
def draw_order_kernel(order, masked, seed, rows, keys, BLOCK: tl.constexpr):
    """`draws.ranked_keys`: numbers in whose order the keys of a row are drawn."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    exists = slot < tl.cast(rows, tl.int64) * keys
    row = (slot // keys).to(tl.int32)  # [BLOCK]
    key = (slot % keys).to(tl.int32)  # [BLOCK]
    number = (absorb(row_state(seed, row), key).to(tl.int64) << 31) | key.to(tl.int64)
    if masked.mask is not None:
        ok = tl.load(masked.mask + (row // masked.group).to(tl.int64) * keys + key, mask=exists, other=0) != 0
        number = tl.where(ok, number, 0x7FFFFFFFFFFFFFFF)
    tl.store(order + slot, number, mask=exists)


def side_by_side(call: DrawnTailCall, names: Tensor, represents: Tensor, spread: bool) -> SharedKeys:
    """The shared keys of the names [B, H, m], each for `represents` keys if not empty; `spread`: for the variance."""
    q = call.q
    k = call.k
    v = call.v
    rows, drawn = names.flatten(0, 1).shape
    widths = tile_pieces(k.shape[-1], v.shape[-1], False)
    blocks = -(-drawn // BLOCK_K)
    padded = blocks * BLOCK_K
    width = widths["E"].BLOCK * widths["E"].PIECES
    value_width = widths["F"].BLOCK * widths["F"].PIECES

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    # A variance needs few digits. Those of bfloat16 were too few where one key has most of the weight: 2 % off.
    away_dtype = torch.float32 if v.dtype == torch.float32 else torch.float16
    shared = SharedKeys(
        empty(rows, padded, width, dtype=k.dtype),
        empty(rows, padded, value_width, dtype=v.dtype),
        empty(rows, k.ndim - 2, padded, dtype=torch.int32),
        empty(rows, padded, dtype=torch.float32),
        empty(2, rows, padded, value_width, dtype=away_dtype) if spread else None,
        empty(2, rows, value_width, dtype=torch.float32) if spread else None,
        drawn,
    )
    flags = {"CAUSAL": call.causal, "BLOCK_K": BLOCK_K, **widths, "num_warps": 4, "enable_fp_fusion": True}
    given = (k.contiguous(), v.contiguous(), names, represents if represents.numel() else None)
    kernel = Kernel(gather_kernel, rows * blocks, flags)
    kernel(*given, q.shape[1] // k.shape[1], geometry(grid_of(q), grid_of(k)), shared)
    return shared


@triton.jit
def gather_kernel(
    k,
    v,
    names,
    represents,
    group,
    geo,
    shared,
    CAUSAL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (row, block of keys) of `side_by_side`."""
    keys = points(geo.k)
    drawn = shared.drawn
    blocks = (drawn + BLOCK_K - 1) // BLOCK_K
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    padded = blocks * BLOCK_K
    k_row = k + row // group * keys * E.SIZE
    v_row = v + row // group * keys * F.SIZE
    at = block * BLOCK_K + tl.arange(0, BLOCK_K)  # [BK]
    name = tl.load(names + row * drawn + at, mask=at < drawn, other=keys)  # [BK]
    exists = name < keys  # [BK]
    name = tl.where(exists, name, 0)
    slot = row * padded + at  # [BK]
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        k_place = shared.k + slot[:, None] * (E.BLOCK * E.PIECES) + e[None, :]  # [BK, E]
        tl.store(k_place, load_piece(k_row, name, exists, n, E))
    log = tl.zeros([BLOCK_K], tl.float32)  # [BK]
    if represents is not None:
        log = tl.log(tl.load(represents + row * drawn + at, mask=exists, other=1.0))
    tl.store(shared.logs + slot, tl.where(exists, log, -float("inf")))
    place = shared.places + row * (len(geo.k) + 1) * padded + at  # [BK]
    tl.store(place + len(geo.k) * padded, name)
    rest = name
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        tl.store(place + a * padded, rest - up * geo.k[a])
        rest = up

    few = tl.arange(0, BLOCK_K)  # [BK]
    first = tl.load(names + row * drawn + few, mask=few < drawn, other=keys)  # [BK]
    is_first = first < keys  # [BK]
    first = tl.where(is_first, first, 0)
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        f = n * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        v_block = load_piece(v_row, name, exists, n, F)  # [BK, F]
        v_place = slot[:, None] * (F.BLOCK * F.PIECES) + f[None, :]  # [BK, F]
        tl.store(shared.v + v_place, v_block)
        if shared.away is not None:
            first_v = finite(load_piece(v_row, first, is_first, n, F)).to(tl.float32)  # [BK, F]
            if CAUSAL:  # from the first of all, which later ones do not change
                middle = tl.sum(tl.where((few == 0)[:, None], first_v, 0.0), 0)  # [F]
                unit = tl.zeros([F.BLOCK], tl.float32) + 4 * tl.max(tl.abs(middle), 0)  # [F]
            else:
                middle = tl.sum(first_v, 0) / tl.maximum(tl.sum(is_first.to(tl.float32), 0), 1.0)  # [F]
                unit = tl.zeros([F.BLOCK], tl.float32)  # [F]
                for start in range(0, drawn, BLOCK_K):
                    other = tl.load(names + row * drawn + start + few, mask=start + few < drawn, other=keys)  # [BK]
                    other_v = finite(load_piece(v_row, tl.where(other < keys, other, 0), other < keys, n, F))
                    far = tl.where((other < keys)[:, None], tl.abs(other_v.to(tl.float32) - middle[None, :]), 0.0)
                    unit = tl.maximum(unit, tl.max(far, 0))
            unit = tl.where(unit > 0, unit, 1.0)
            if block == 0:
                tl.store(shared.middle + row * (F.BLOCK * F.PIECES) + f, middle)
                rows = tl.num_programs(0) // blocks
                tl.store(shared.middle + (rows + row) * (F.BLOCK * F.PIECES) + f, unit)
            if CAUSAL:  # as the products of the values themselves have it
                v_block = finite(v_block)
            apart = (v_block.to(tl.float32) - middle[None, :]) / unit[None, :]  # [BK, F]
            if CAUSAL:
                apart = tl.minimum(tl.maximum(apart, -MOST_APART), MOST_APART)
            apart = apart.to(shared.away.dtype.element_ty)
            all_values = (tl.num_programs(0) * BLOCK_K).to(tl.int64) * (F.BLOCK * F.PIECES)
            tl.store(shared.away + v_place, apart)
            squared = apart.to(tl.float32) * apart.to(tl.float32)  # [BK, F]
            tl.store(shared.away + all_values + v_place, squared.to(shared.away.dtype.element_ty))


@triton.jit
def shared_row(row, shared, geo, BLOCK_K: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """The shared keys of a row."""
    padded = (shared.drawn + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    return SharedRow(
        shared.k + row * padded * (E.BLOCK * E.PIECES),
        shared.v + row * padded * (F.BLOCK * F.PIECES),
        shared.places + row * (len(geo.k) + 1) * padded,
        shared.logs + row * padded,
        padded,
    )
