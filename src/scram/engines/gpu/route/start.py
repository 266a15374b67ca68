"""The best of the keys that a tile routes, for each of its queries, in Triton: a start of a search."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import Found, RoutedStartCall
from ....spec.grid import grid_of
from ....spec.schedule import TILE_QUERIES
from ..cluster_tail.table import BLOCK_BYTES
from ..primitives import (
    Geometry,
    geometry,
    lane_query,
    load_pieces,
    points,
    product,
    tile_at,
    tile_block,
    tiles,
)
from ..runtime.block_sizes import ROUTED_START, ROUTED_START_EXACT, stages, tile_pieces
from ..runtime.launch import Flags, Kernel, cached, kinds, on_device
from .lists import RoutedKeys, load_listed, routed_keys

NO_KEY = tl.constexpr(0x7FFFFFFF)


class Inputs(NamedTuple):
    """A RoutedStartCall as the kernel takes it."""

    q: Tensor  # [B, H, *G, E]
    k: Tensor  # [B, Hk, *G', E]
    listed: RoutedKeys
    geo: Geometry
    group: int  # rows of queries that share a row of keys


def routed_start(call: RoutedStartCall) -> Found:
    q = call.q.contiguous()
    k = call.k.contiguous()
    shape = (*q.shape[:-1], 1)
    starts = Found(
        torch.empty(shape, dtype=torch.int32, device=q.device), torch.empty(shape, dtype=torch.float32, device=q.device)
    )
    if not starts.index.numel():
        return starts
    flags = _flags(q.ndim - 3, q.shape[-1], q.dtype, q.device)
    with on_device(q):
        inputs = Inputs(
            q=q,
            k=k,
            listed=routed_keys(call.routes, call.order, call.sizes, call.keys),
            geo=geometry(grid_of(q), grid_of(k)),
            group=q.shape[1] // k.shape[1],
        )
        programs = q.shape[0] * q.shape[1] * tiles(grid_of(q), flags["B"].TILE)
        _kernel(programs, tuple(flags.items()), kinds(*inputs))(inputs, starts)
    return starts


@cached
def _flags(rank: int, width: int, dtype: torch.dtype, device: torch.device) -> Flags:
    narrow = dtype.itemsize == 2
    block, warps, most = ROUTED_START if narrow else ROUTED_START_EXACT
    features = tile_pieces(width, width, narrow)["E"]
    each = features.BLOCK * features.PIECES * dtype.itemsize
    while block > 16 and block * each > BLOCK_BYTES:
        block //= 2
    options = {"num_warps": warps, "num_stages": stages(device, most, block * each, TILE_QUERIES * each)}
    return {"BLOCK_K": block, "B": tile_block(rank), "E": features, **options, "enable_fp_fusion": True}


@cached
def _kernel(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(routed_start_kernel, programs, dict(flags))


@triton.jit
def routed_start_kernel(inputs, starts, BLOCK_K: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """Program: tile."""
    tile = tl.program_id(0).to(tl.int64)
    row, corner = tile_at(tl.program_id(0), inputs.geo, B)
    query, exists = lane_query(corner, inputs.geo, B)
    start = row * points(inputs.geo.q).to(tl.int64)
    q_block = load_pieces(inputs.q + start * E.SIZE, query, exists, E)  # [BQ, E]
    k_row = inputs.k + (row // inputs.group).to(tl.int64) * points(inputs.geo.k) * E.SIZE
    lane = tl.arange(0, BLOCK_K)  # [BK]
    best = tl.full([B.BLOCK_Q, BLOCK_K], -float("inf"), tl.float32)  # [BQ, BK], of each lane: threads need not meet
    best_key = tl.full([B.BLOCK_Q, BLOCK_K], NO_KEY, tl.int32)  # [BQ, BK]
    for begin in range(0, tl.load(inputs.listed.number + tile), BLOCK_K):
        key = tl.load(inputs.listed.keys + tile * inputs.listed.most + begin + lane)  # [BK], behind the end one of them
        s = tl.zeros([B.BLOCK_Q, BLOCK_K], tl.float32)  # [BQ, BK]
        for n in tl.static_range(len(q_block)):
            s = product(q_block[n], tl.trans(load_listed(k_row, key, n, E)), s)
        better = (s > best) | ((s == best) & (key[None, :] < best_key))  # [BQ, BK], a NaN is none
        best_key = tl.where(better, key[None, :], best_key)
        best = tl.where(better, s, best)
    most = tl.max(best, 1)  # [BQ]
    lowest = tl.min(tl.where(best == most[:, None], best_key, NO_KEY), 1)  # [BQ]
    point = start + query  # [BQ]
    tl.store(starts.index + point, tl.where(most > -float("inf"), lowest, -1), mask=exists)
    tl.store(starts.score + point, most, mask=exists)
