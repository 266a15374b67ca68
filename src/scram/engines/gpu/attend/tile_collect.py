"""Gradients of keys and values of attended tiles with repeatable bits: every cell collects from the tiles that list it.

The tiles that list a cell stand together, in order, in a list sorted by cell. No atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import AttendGrads
from ....spec.grid import flat
from ..primitives import fp16_scale_of, points, store_piece, unmasked
from ..runtime.block_sizes import TILE_COLLECT, TILE_COLLECT_EXACT
from ..runtime.launch import Kernel
from .cells import Cells, cell_key, cell_place
from .tile_pairs import TileKeys, allowed_pairs, key_grads, pair_dots, slopes, tile_flags, tile_grads, tile_queries
from .windows import Inputs, Upstream, Variant


class Lists(NamedTuple):
    """Which tiles list a cell: order[begin[c]:end[c]] // room for cell c of all key rows."""

    order: Tensor  # int64 [tiles * room]
    first: Tensor  # int64 [cells], the first key of each among those of all rows
    begin: Tensor  # int64 [cells]
    end: Tensor  # int64 [cells]


def collect(inputs: Inputs, variant: Variant, cells: Cells, above: Upstream, grads: AttendGrads) -> None:
    """Fill the gradients of k and v, float32 and zero before."""
    dk = grads.k
    device = dk.device
    key_grid = inputs.windows.geo.k
    key_rows = dk.shape[0] * dk.shape[1]
    keys = dk[0, 0, ..., 0].numel()
    steps = [torch.arange(0, extent, side, device=device) for extent, side in zip(key_grid, cells.sides, strict=True)]
    corner = flat([c.flatten() for c in torch.meshgrid(*steps, indexing="ij")], key_grid)
    first = (corner + keys * torch.arange(key_rows, device=device).unsqueeze(1)).flatten()
    tiles = len(cells.count)
    key_row = torch.arange(tiles, device=device) // (tiles // key_rows)
    exists = torch.arange(cells.room, device=device) < cells.count.unsqueeze(1)
    names = torch.where(exists, cells.first + keys * key_row.unsqueeze(1), key_rows * keys).flatten()
    names, order = names.sort(stable=True)
    lists = Lists(order, first, *(torch.searchsorted(names, first, right=right) for right in (False, True)))
    flags = tile_flags(variant, cells.size, TILE_COLLECT, TILE_COLLECT_EXACT)
    blocks = triton.cdiv(cells.size, flags["CONFIG"].BLOCK_K)
    kernel = Kernel(tile_collect_kernel, len(first) * blocks * flags["CONFIG"].PARTS, flags)
    kernel(inputs, cells, above, grads, lists)


@triton.jit
def tile_collect_kernel(
    inputs, cells, above, grads, lists, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr
):
    """Program (cell of a key row, BLOCK_K of its keys, piece of their width)."""
    windows = inputs.windows
    keys_of_row = points(windows.geo.k)
    size = points(cells.sides)
    piece = tl.program_id(0) % CONFIG.PARTS
    blocks = (size + CONFIG.BLOCK_K - 1) // CONFIG.BLOCK_K
    cell = tl.program_id(0) // CONFIG.PARTS // blocks
    number = tl.program_id(0) // CONFIG.PARTS % blocks * CONFIG.BLOCK_K + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    first = tl.load(lists.first + cell)
    key_row = first // keys_of_row
    first_key = (first % keys_of_row).to(tl.int32)
    key, on_grid = cell_key(first_key + number * 0, cell_place(number, cells.sides), number < size, windows.geo)
    dk = tl.zeros([CONFIG.BLOCK_K, E.BLOCK], tl.float32)  # [BK, E]
    dv = tl.zeros([CONFIG.BLOCK_K, F.BLOCK], tl.float32)  # [BK, F]
    GUARD: tl.constexpr = CONFIG.CAUSAL or windows.masked.mask is not None
    for t in range(tl.load(lists.begin + cell), tl.load(lists.end + cell)):
        tile = (tl.load(lists.order + t) // cells.room).to(tl.int32)
        queries = tile_queries(tile, piece, inputs, CONFIG, B, E)
        up = tile_grads(queries, piece, above, CONFIG, F)
        point = queries.start + queries.query  # [BQ]
        start = key_row * keys_of_row
        mask_row = (queries.row // windows.masked.group).to(tl.int64)
        exists = unmasked(key, on_grid, mask_row, windows.masked, windows.geo)  # [BK]
        ok = allowed_pairs(key, exists, queries.query, CONFIG.CAUSAL)  # [1 or BQ, BK]
        keys = TileKeys(inputs.k + start * E.SIZE, inputs.v + start * F.SIZE, key, exists, key, ok)
        inv_sum = tl.load(above.sums + point * 3, mask=queries.exists, other=0.0)  # [BQ]
        delta = tl.load(above.sums + point * 3 + 1, mask=queries.exists, other=0.0)  # [BQ]
        slope_bound = tl.load(above.sums + point * 3 + 2, mask=queries.exists, other=0.0)  # [BQ]
        fp16_scale = fp16_scale_of(slope_bound, inputs.scale, CONFIG.FP16_SCALE)
        s, dp, _ = pair_dots(queries, up, keys, piece, CONFIG, B, E, F)  # [BQ, BK]
        p, ds = slopes(s, dp, inv_sum, delta, fp16_scale, queries, up, keys, inputs, CONFIG, GUARD)
        dk, dv = key_grads(p, ds, fp16_scale, ok, queries, up, dk, dv, CONFIG, GUARD)
    start = key_row * keys_of_row
    store_piece(grads.k + start * E.SIZE, key, on_grid, piece, dk, CONFIG.PARTS, False, E)
    store_piece(grads.v + start * F.SIZE, key, on_grid, piece, dv, CONFIG.PARTS, False, F)
