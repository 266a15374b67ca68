"""Gradients of keys and values of attended tiles with repeatable bits: every cell collects from the tiles that list it.

The tiles that list a cell stand together, in order, in a list sorted by cell. No atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import AttendGrads
from ....grid import flat
from ..attend import tile_pairs as pairs
from ..attend.cells import Cells, key_of, place_of
from ..attend.query_collect import Upstream
from ..attend.windows import Variant, Windows, unmasked
from ..primitives import points
from ..runtime.block_sizes import TILE_COLLECT, TILE_COLLECT_EXACT
from ..runtime.launch import Kernel


class Lists(NamedTuple):
    """Which tiles list a cell: order[begin[c]:end[c]] // room for cell c of all key rows."""

    order: Tensor  # int64 [tiles * room]
    every: Tensor  # int64 [cells], the first key of each among those of all rows
    begin: Tensor  # int64 [cells]
    end: Tensor  # int64 [cells]


def collect(windows: Windows, variant: Variant, cells: Cells, above: Upstream, grads: AttendGrads) -> None:
    """Fill the gradients of k and v, float32 and zero before."""
    dk, key_grid = grads.k, windows.geo.k
    device, key_rows, keys = dk.device, dk.shape[0] * dk.shape[1], dk[0, 0, ..., 0].numel()
    steps = [torch.arange(0, extent, side, device=device) for extent, side in zip(key_grid, cells.sides, strict=True)]
    corner = flat([c.flatten() for c in torch.meshgrid(*steps, indexing="ij")], key_grid)
    every = (corner + keys * torch.arange(key_rows, device=device).unsqueeze(1)).flatten()
    tiles = len(cells.count)
    source = torch.arange(tiles, device=device) // (tiles // key_rows)
    there = torch.arange(cells.room, device=device) < cells.count.unsqueeze(1)
    names = torch.where(there, cells.first + keys * source.unsqueeze(1), key_rows * keys).flatten()
    names, order = names.sort(stable=True)
    lists = Lists(order, every, *(torch.searchsorted(names, every, right=right) for right in (False, True)))
    flags = pairs.tile_flags(variant, cells.size, TILE_COLLECT, TILE_COLLECT_EXACT)
    blocks = triton.cdiv(cells.size, flags["MODE"].BLOCK_K)
    kernel = Kernel(tile_collect_kernel, len(every) * blocks * flags["MODE"].PARTS, flags)
    kernel(windows, cells, above, grads, lists)


@triton.jit
def tile_collect_kernel(
    w, cells, above, grads, lists, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """Program (cell of a key row, BLOCK_K of its keys, piece of their width)."""
    all_keys, size = points(w.geo.k), points(cells.sides)
    piece, blocks = tl.program_id(0) % MODE.PARTS, (size + MODE.BLOCK_K - 1) // MODE.BLOCK_K
    cell = tl.program_id(0) // MODE.PARTS // blocks
    number = tl.program_id(0) // MODE.PARTS % blocks * MODE.BLOCK_K + tl.arange(0, MODE.BLOCK_K)
    first = tl.load(lists.every + cell)
    source, base = first // all_keys, (first % all_keys).to(tl.int32)
    key, own = key_of(base + number * 0, place_of(number, cells.sides), number < size, w.geo)
    k_sum, v_sum = tl.zeros([MODE.BLOCK_K, ROW.W], tl.float32), tl.zeros([MODE.BLOCK_K, VROW.W], tl.float32)
    GUARD: tl.constexpr = MODE.CAUSAL or w.masked.mask is not None
    for t in range(tl.load(lists.begin + cell), tl.load(lists.end + cell)):
        tile = (tl.load(lists.order + t) // cells.room).to(tl.int32)
        here = pairs.tile_queries(tile, piece, w, MODE, B, ROW)
        up = pairs.tile_grads(here, piece, above, MODE, VROW)
        point, valid, before = here.start + here.query, here.exists, source * all_keys
        there = unmasked(key, own, (here.row // w.masked.heads).to(tl.int64), w)
        ok = pairs.pairs_of(key, there, here.query, MODE)
        keys = pairs.Keys(w.k + before * ROW.E, w.v + before * VROW.E, key, there, key, ok)
        inv_sum = tl.load(above.sums + point * 3, mask=valid, other=0.0)
        delta = tl.load(above.sums + point * 3 + 1, mask=valid, other=0.0)
        slope_bound = tl.load(above.sums + point * 3 + 2, mask=valid, other=0.0)
        fp16_scale = pairs.fp16_scale_of(slope_bound, w.scale, MODE.FP16_SCALE)
        s, dp, _ = pairs.pair_dots(here, up, keys, piece, MODE, B, ROW, VROW)
        p, ds = pairs.slopes(s, dp, inv_sum, delta, fp16_scale, here, up, keys, w, MODE, GUARD)
        k_sum, v_sum = pairs.key_grads(p, ds, fp16_scale, ok, here, up, k_sum, v_sum, MODE, GUARD)
    pairs.put_piece(grads.k + source * all_keys * ROW.E, key, own, piece, k_sum, MODE.PARTS, False, ROW)
    pairs.put_piece(grads.v + source * all_keys * VROW.E, key, own, piece, v_sum, MODE.PARTS, False, VROW)
