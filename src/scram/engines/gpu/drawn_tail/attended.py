"""What the heads of tiles hold, in Triton: which keys that a row shares, and how many legal keys for every query."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import DrawnTailCall
from ....schedule import TILE_QUERIES
from ..attend.cells import Cells, cells_of, keys_at, lower_bound
from ..cluster_tail.table import Listing, ListMode
from ..drawn_tail.shared_keys import BLOCK_K, SharedKeys
from ..primitives import Block, Geometry, KeyMask, divide, lane_query, points, tile_at, tile_shape
from ..runtime.launch import Kernel, cached, kinds


class TileHeads(NamedTuple):
    """The cells of every tile, and what they hold, as kernels take it."""

    attended: Tensor  # int8 [tiles, m], 1 for a shared key that is in the cells of a tile; m are whole blocks
    sizes: Tensor  # int32 [B, H, *G], |S_i|
    cells: Cells
    masked: KeyMask
    geo: Geometry


def tile_heads(call: DrawnTailCall, index: Tensor, shared: SharedKeys, masked: KeyMask, geo: Geometry) -> TileHeads:
    """index int32 [B, H, *G, kappa], contiguous."""
    cells, block = cells_of(index, geo, call.radius), Block(tile_shape(TILE_QUERIES, len(geo.q)), TILE_QUERIES)
    attended = torch.empty((len(cells.count), shared.logs.shape[1]), dtype=torch.int8, device=index.device)
    sizes = torch.empty(index.shape[:-1], dtype=torch.int32, device=index.device)
    heads = TileHeads(attended, sizes, cells, masked, geo)
    kernel = _kernel(len(cells.count), cells.size, block, call.causal, kinds(index, shared.places, masked.mask))
    kernel(heads, shared.places, attended.shape[1])
    return heads


@cached
def _kernel(programs: int, size: int, block: Block, causal: bool, given: tuple[Any, ...]) -> Kernel:
    mode = ListMode(64, BLOCK_K, 64 % size == 0, 2)
    flags = {"MODE": mode, "B": block, "CAUSAL": causal, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(tile_heads_kernel, programs, flags)


@triton.jit
def tile_heads_kernel(h, places, padded, MODE: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr):
    """Program: tile. `places` int32 [rows, rank + 1, padded]: coordinates and names of the shared keys."""
    tile, geo, sides = tl.program_id(0), h.geo, h.cells.sides
    row, corner = tile_at(tile, geo, B)
    query, exists = lane_query(corner, geo, B)
    first, number = h.cells.first + tile.to(tl.int64) * h.cells.room, tl.load(h.cells.count + tile)

    listed = Listing(first, number * points(sides), (row // h.masked.heads).to(tl.int64))
    found = query * 0
    for begin in range(0, listed.end, MODE.BLOCK_K):
        key = keys_at(begin, listed, sides, h, MODE)
        ok = (key >= 0)[None, :] & exists[:, None]
        if CAUSAL:
            ok = ok & (key[None, :] <= query[:, None])
        found += tl.sum(ok.to(tl.int32), 1)
    tl.store(h.sizes + row * points(geo.q).to(tl.int64) + query, found, mask=exists)

    name_row = places + (row.to(tl.int64) * (len(geo.k) + 1) + len(geo.k)) * padded
    for start in range(0, padded, MODE.BLOCK_C):
        at = start + tl.arange(0, MODE.BLOCK_C)
        rest, cell, stride = tl.load(name_row + at), at * 0, 1
        for a in tl.static_range(len(geo.k) - 1, -1, -1):
            up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
            place = rest - up * geo.k[a]
            cell += place // sides[a] * sides[a] * stride
            rest, stride = up, stride * geo.k[a]
        there = lower_bound(first, number, cell)
        held = tl.load(first + there, mask=there < number, other=-1) == cell
        tl.store(h.attended + tile.to(tl.int64) * padded + at, held.to(tl.int8))
