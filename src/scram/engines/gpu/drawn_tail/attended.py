"""What tiles of queries attend in their windows, in Triton: which shared keys, and how many keys for every query."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import DrawnTailCall
from ..attend.cells import cell_list, cells_of, keys_at, lower_bound
from ..primitives import Block, MatchWindows, divide, lane_query, points, tile_at, tile_block
from ..runtime.launch import Kernel, cached, kinds
from .shared_keys import BLOCK_K, SharedKeys


class TileAttended(NamedTuple):
    """What the cells of every tile hold, as kernels take it."""

    shared: Tensor  # int8 [tiles, m], 1 for a shared key that is in the cells of a tile; m are whole blocks
    count: Tensor  # int32 [B, H, *G], |S_i|


def tile_attended(call: DrawnTailCall, windows: MatchWindows, shared: SharedKeys) -> TileAttended:
    index = windows.index
    geo = windows.geo
    cells = cells_of(index, geo, call.radius)
    tiles = len(cells.count)
    padded = shared.logs.shape[1]
    block = tile_block(len(geo.q))
    attended = TileAttended(
        torch.empty((tiles, padded), dtype=torch.int8, device=index.device),
        torch.empty(index.shape[:-1], dtype=torch.int32, device=index.device),
    )
    given = kinds(index, shared.places, windows.masked.mask)
    kernel = _kernel(tiles, cells.size, block, call.causal, given)
    kernel(attended, cells, windows.masked, geo, shared.places, padded)
    return attended


@cached
def _kernel(programs: int, size: int, block: Block, causal: bool, given: tuple[Any, ...]) -> Kernel:
    sizes = {"BLOCK_K": 64, "BLOCK_C": BLOCK_K, "EVEN": 64 % size == 0, "B": block}
    flags = {**sizes, "CAUSAL": causal, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(tile_attended_kernel, programs, flags)


@triton.jit
def tile_attended_kernel(
    attended,
    cells,
    masked,
    geo,
    places,
    padded,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    B: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Program: tile. `places` int32 [rows, rank + 1, padded]: coordinates and names of the shared keys."""
    tile = tl.program_id(0)
    sides = cells.sides
    row, corner = tile_at(tile, geo, B)
    query, exists = lane_query(corner, geo, B)
    listed = cell_list(tile, row, cells, masked)
    count = query * 0  # [BQ]
    for begin in range(0, listed.end, BLOCK_K):
        key = keys_at(begin, listed, sides, masked, geo, BLOCK_K, EVEN, 2)  # [BK]
        ok = (key >= 0)[None, :] & exists[:, None]  # [BQ, BK]
        if CAUSAL:
            ok = ok & (key[None, :] <= query[:, None])
        count += tl.sum(ok.to(tl.int32), 1)
    tl.store(attended.count + row * points(geo.q).to(tl.int64) + query, count, mask=exists)

    name_row = places + (row.to(tl.int64) * (len(geo.k) + 1) + len(geo.k)) * padded
    for start in range(0, padded, BLOCK_C):
        at = start + tl.arange(0, BLOCK_C)  # [BC]
        rest = tl.load(name_row + at)  # [BC]
        cell = at * 0  # [BC], the first key of the cell of a shared key
        stride = 1
        for a in tl.static_range(len(geo.k) - 1, -1, -1):
            up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
            place = rest - up * geo.k[a]
            cell += place // sides[a] * sides[a] * stride
            rest = up
            stride = stride * geo.k[a]
        number = lower_bound(listed.first, listed.number, cell)  # [BC]
        is_listed = tl.load(listed.first + number, mask=number < listed.number, other=-1) == cell
        tl.store(attended.shared + tile.to(tl.int64) * padded + at, is_listed.to(tl.int8))
