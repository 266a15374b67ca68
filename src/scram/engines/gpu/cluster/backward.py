"""Gradients through the means and the slope of clusters, in Triton.

dk = d_center / size + (v - value) d_slope^T / number, and dv likewise: what a cluster has in common is made once for
each, and its keys add their own product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import ClusterCall, ClusterGrads
from ....spec.grid import grid_of
from ..primitives import for_product, load_piece, product, store_piece
from ..runtime.block_sizes import SPREAD, SPREAD_EXACT, SPREAD_WAVES, multiprocessors, shares, tile_pieces
from ..runtime.launch import Kernel, cached, kinds, on_device

TABLE_CLUSTERS = 16
CHUNK = tl.constexpr(256)  # clusters that are looked at at a time


class Upstream(NamedTuple):
    """What the gradients are made from, and the clusters."""

    sizes: Tensor  # int32 [R, C]
    k: Tensor  # float32 [R, C, E], centers
    v: Tensor  # float32 [R, C, F]
    d_k: Tensor  # float32 [R, C, E]
    d_v: Tensor  # float32 [R, C, F]
    d_slope: Tensor  # float32 [R, E, F]
    clusters: int  # C


class Tables(NamedTuple):
    """What the keys of a cluster have in common."""

    k: Tensor  # float32 [R, C, E]
    v: Tensor  # float32 [R, C, F]
    factors: Tensor  # float32 [R, 2], what d_slope is divided by, and its part of one key


class SpreadConfig(NamedTuple):
    """What the kernels here are compiled for."""

    BLOCK: int  # keys or clusters
    PARTS: int  # programs that share the width
    NARROW: bool  # keys and values of 16 bits: so is d_slope, in units of its largest number


class _Plan(NamedTuple):
    table: Kernel
    spread: Kernel
    splits: int


def cluster_backward(
    call: ClusterCall,
    centers: Tensor,
    values: Tensor,
    sizes: Tensor,
    label: Tensor,
    grad_centers: Tensor,
    grad_values: Tensor,
    grad_slope: Tensor,
) -> ClusterGrads:
    """A key has 1 / size of the gradient of its cluster, and its part of the slope; one in no cluster has none."""
    k = call.k.contiguous()
    v = call.v.contiguous()
    grads = ClusterGrads(torch.empty_like(k), torch.empty_like(v))
    if label.numel():
        above = Upstream(
            sizes=sizes.contiguous(),
            k=centers.contiguous(),
            v=values.contiguous(),
            d_k=grad_centers.contiguous(),
            d_v=grad_values.contiguous(),
            d_slope=grad_slope.contiguous(),
            clusters=call.clusters,
        )
        factors = centers.new_empty(math.prod(k.shape[:2]), 2)
        tables = Tables(torch.empty_like(above.k), torch.empty_like(above.v), factors)
        with on_device(k):
            plan = _plan(k.shape, v.shape, call.clusters, kinds(k, v, above, tables))
            plan.table(above, tables, k, v)
            plan.spread(above, tables, k, v, label.contiguous(), grads, math.prod(grid_of(k)), plan.splits)
    return grads


@cached
def _plan(k_shape: torch.Size, v_shape: torch.Size, count: int, given: tuple[Any, ...]) -> _Plan:
    (device, dtype, _), (_, value_dtype, _), *_ = given
    rows = k_shape[0] * k_shape[1]
    keys = math.prod(k_shape[2:-1])
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    pieces = tile_pieces(k_shape[-1], v_shape[-1], narrow)
    parts = max(pieces["E"].PIECES, pieces["F"].PIECES)
    block, warps = SPREAD if narrow else SPREAD_EXACT
    splits = shares(2 * multiprocessors(device), rows * parts, SPREAD_WAVES, -(-keys // block))
    plain = {"num_stages": 1, "enable_fp_fusion": True}
    table = {"CONFIG": SpreadConfig(TABLE_CLUSTERS, parts, narrow), **pieces, **plain, "num_warps": 8}
    spread = {"CONFIG": SpreadConfig(block, parts, narrow), **pieces, **plain, "num_warps": warps}
    return _Plan(
        Kernel(table_kernel, rows * -(-count // TABLE_CLUSTERS) * parts, table),
        Kernel(spread_kernel, rows * splits * parts, spread),
        splits,
    )


@triton.jit
def slope_piece(d_slope, row, piece, value_piece, unit, dtype: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """d_slope / unit, as products take it: [E, F]."""
    e = (piece * E.BLOCK + tl.arange(0, E.BLOCK))[:, None]  # [E, 1]
    f = (value_piece * F.BLOCK + tl.arange(0, F.BLOCK))[None, :]  # [1, F]
    x = tl.load(d_slope + (row * E.SIZE + e) * F.SIZE + f, mask=(e < E.SIZE) & (f < F.SIZE), other=0.0)  # [E, F]
    return (x / unit).to(dtype)


@triton.jit
def table_kernel(above, tables, k, v, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row, block of clusters, piece of the width). d_slope is rounded as for the keys: then what rounding left
    of it is multiplied by what keys are away from centers only."""
    blocks = (above.clusters + CONFIG.BLOCK - 1) // CONFIG.BLOCK
    part = tl.program_id(0) % CONFIG.PARTS
    rest = tl.program_id(0) // CONFIG.PARTS
    row = (rest // blocks).to(tl.int64)
    at = rest % blocks * CONFIG.BLOCK + tl.arange(0, CONFIG.BLOCK)  # [BC]
    piece = tl.minimum(part, E.PIECES - 1)  # of the narrower the last piece comes up again
    value_piece = tl.minimum(part, F.PIECES - 1)
    unit = 0.0
    if CONFIG.NARROW:
        for m in tl.static_range(tl.constexpr(E.PIECES)):
            for n in tl.static_range(tl.constexpr(F.PIECES)):
                x = slope_piece(above.d_slope, row, m, n, 1.0, tl.float32, E, F)  # [E, F]
                unit = tl.maximum(unit, tl.max(tl.max(tl.abs(x), 1), 0))
    unit = tl.where(unit > 0, unit, 1.0)
    labelled = tl.zeros([CHUNK], tl.int32)  # [CHUNK]
    for begin in range(0, above.clusters, CHUNK):
        c = begin + tl.arange(0, CHUNK)  # [CHUNK]
        labelled += tl.load(above.sizes + row * above.clusters + c, mask=c < above.clusters, other=0)
    factor = unit / tl.maximum(tl.sum(labelled, 0), 1).to(tl.float32)
    tl.store(tables.factors + row * 2, unit)
    tl.store(tables.factors + row * 2 + 1, factor)
    exists = at < above.clusters  # [BC]
    slot = row * above.clusters + at  # [BC]
    size = tl.maximum(tl.load(above.sizes + slot, mask=exists, other=1), 1).to(tl.float32)[:, None]  # [BC, 1]
    by_values = tl.zeros([CONFIG.BLOCK, E.BLOCK], tl.float32)  # [BC, E]
    for n in tl.static_range(tl.constexpr(F.PIECES)):
        value = load_piece(above.v, slot, exists, n, F)  # [BC, F]
        d_slope = slope_piece(above.d_slope, row, piece, n, unit, v.dtype.element_ty, E, F).to(tl.float32)  # [E, F]
        by_values = product(value, tl.trans(d_slope), by_values)
    d_center = load_piece(above.d_k, slot, exists, piece, E)  # [BC, E]
    store_piece(tables.k, slot, exists, piece, d_center / size - factor * by_values, CONFIG.PARTS, False, E)
    by_keys = tl.zeros([CONFIG.BLOCK, F.BLOCK], tl.float32)  # [BC, F]
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        center = load_piece(above.k, slot, exists, n, E)  # [BC, E]
        d_slope = slope_piece(above.d_slope, row, n, value_piece, unit, k.dtype.element_ty, E, F).to(tl.float32)
        by_keys = product(center, d_slope, by_keys)
    d_value = load_piece(above.d_v, slot, exists, value_piece, F)  # [BC, F]
    store_piece(tables.v, slot, exists, value_piece, d_value / size - factor * by_keys, CONFIG.PARTS, False, F)


@triton.jit
def own_slope(above, row, piece, value_piece, unit, k, v, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """The parts of d_slope that keys and values of a piece are multiplied by: for dk, [F, E], and for dv, [E, F]."""
    for_k = slope_piece(above.d_slope, row, piece, value_piece, unit, v.dtype.element_ty, E, F)  # [E, F]
    for_v = slope_piece(above.d_slope, row, piece, value_piece, unit, k.dtype.element_ty, E, F)  # [E, F]
    if not CONFIG.NARROW:
        for_k = for_k.to(tl.float32)
        for_v = for_v.to(tl.float32)
    return tl.trans(for_product(for_k)), for_product(for_v)


@triton.jit
def spread_kernel(
    above,
    tables,
    k,
    v,
    label,
    grads,
    keys,
    splits,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program (row, split of the keys, piece of the width)."""
    part = tl.program_id(0) % CONFIG.PARTS
    rest = tl.program_id(0) // CONFIG.PARTS
    split = rest % splits
    row = (rest // splits).to(tl.int64)
    piece = tl.minimum(part, E.PIECES - 1)
    value_piece = tl.minimum(part, F.PIECES - 1)
    unit = tl.load(tables.factors + row * 2)
    factor = tl.load(tables.factors + row * 2 + 1)
    each = (keys + CONFIG.BLOCK * splits - 1) // (CONFIG.BLOCK * splits) * CONFIG.BLOCK
    first = split * each
    last = tl.minimum(first + each, keys)
    for_k, for_v = own_slope(above, row, piece, value_piece, unit, k, v, CONFIG, E, F)
    for begin in range(first, last, CONFIG.BLOCK):
        at = begin + tl.arange(0, CONFIG.BLOCK)  # [BK]
        inside = at < last  # [BK]
        key = row * keys + at  # [BK]
        name = tl.load(label + key, mask=inside, other=-1)  # [BK]
        has_cluster = name >= 0
        slot = row * above.clusters + name  # [BK]
        by_values = tl.zeros([CONFIG.BLOCK, E.BLOCK], tl.float32)  # [BK, E]
        for n in tl.static_range(tl.constexpr(F.PIECES)):
            if F.PIECES > 1:
                for_k, _ = own_slope(above, row, piece, n, unit, k, v, CONFIG, E, F)
            v_block = load_piece(v, key, has_cluster, n, F)  # [BK, F]
            by_values = product(v_block if CONFIG.NARROW else v_block.to(tl.float32), for_k, by_values)
        by_keys = tl.zeros([CONFIG.BLOCK, F.BLOCK], tl.float32)  # [BK, F]
        for n in tl.static_range(tl.constexpr(E.PIECES)):
            if E.PIECES > 1:
                _, for_v = own_slope(above, row, n, value_piece, unit, k, v, CONFIG, E, F)
            k_block = load_piece(k, key, has_cluster, n, E)  # [BK, E]
            by_keys = product(k_block if CONFIG.NARROW else k_block.to(tl.float32), for_v, by_keys)
        dk = load_piece(tables.k, slot, has_cluster, piece, E) + factor * by_values  # [BK, E]
        dv = load_piece(tables.v, slot, has_cluster, value_piece, F) + factor * by_keys  # [BK, F]
        store_piece(grads.k, key, inside, piece, dk, CONFIG.PARTS, False, E)
        store_piece(grads.v, key, inside, value_piece, dv, CONFIG.PARTS, False, F)
