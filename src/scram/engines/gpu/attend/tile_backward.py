"""The gradient of attention of whole tiles in Triton, through out and through lse.

Meaning and names are those of `attend_backward`; pairs come in blocks, and the sums of gradients are matrix products.
Tiles add the gradients of keys and values by float32 atomics. With deterministic algorithms, in `tile_keys`, cells
collect them in a fixed order instead.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....calls import AttendCall, AttendGrads
from ..attend import tile_pairs as pairs
from ..attend.cells import cells_of
from ..attend.query_backward import empty_grads, rounded_grads, upstream
from ..attend.tile_collect import collect
from ..attend.windows import Variant, windows_of
from ..drawn_tail.shared_keys import finite
from ..primitives import points
from ..runtime.block_sizes import TILE_BACKWARD, TILE_BACKWARD_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device


def tile_attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    """out, grad_out [B, H, *G, F], lse, grad_lse [B, H, *G] -> gradients in the dtypes of their tensors."""
    windows, variant = windows_of(call)
    above = upstream(lse, grad_out, grad_lse, 3)
    grads = empty_grads(call, above, variant.programs(pairs.tile_block(variant.rank)))
    if grads.q.numel():
        with on_device(grads.q):
            cells = cells_of(windows.index, windows.geo, call.radius)
            _kernel(variant, cells.size, kinds(*above))(windows, cells, above, grads)
            if above.sums is not None:
                collect(windows, variant, cells, above, grads)
    return rounded_grads(call, grads)


@cached
def _kernel(variant: Variant, size: int, above: tuple[Any, ...]) -> Kernel:
    flags = pairs.tile_flags(variant, size, TILE_BACKWARD, TILE_BACKWARD_EXACT)
    return Kernel(tile_backward_kernel, variant.programs(flags["B"]) * flags["MODE"].PARTS, flags)


@triton.jit
def tile_backward_kernel(
    w, cells, above, grads, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """Program (tile, piece of the features and of the values)."""
    piece, tile = tl.program_id(0) % MODE.PARTS, tl.program_id(0) // MODE.PARTS
    here = pairs.tile_queries(tile, piece, w, MODE, B, ROW)
    up = pairs.tile_grads(here, piece, above, MODE, VROW)
    point, valid, listed = here.start + here.query, here.exists, pairs.listed_keys(tile, here.row, w, cells)
    WALKS: tl.constexpr = 1 if w.k_extra is None else 2

    delta, inv_sum = tl.zeros([B.BLOCK_Q], tl.float32), tl.zeros([B.BLOCK_Q], tl.float32)
    slope_bound = delta
    if MODE.WEIGHT == "softmax":
        total = tl.zeros([B.BLOCK_Q], tl.float32)
        for EXTRA in tl.static_range(WALKS):
            for begin in range(0, w.extras if EXTRA else listed.end, MODE.BLOCK_K):
                keys = pairs.keys_from(begin, listed, here.query, w, cells, EXTRA, MODE, ROW, VROW)
                s, dp, _ = pairs.pair_dots(here, up, keys, piece, MODE, B, ROW, VROW)
                total, delta, slope_bound = pairs.summed(total, delta, slope_bound, s, dp, here, up, keys, w, MODE)
        inv_sum = 1 / tl.where(total == 0, 1.0, total)
        delta = delta * inv_sum - tl.load(above.grad_lse + point, mask=valid, other=0.0)
        slope_bound = slope_bound * inv_sum + tl.abs(delta)
    if above.sums is not None:  # noqa: SIM102 - what is known to the compiler apart
        if piece == 0:
            tl.store(above.sums + point * 3, inv_sum, mask=valid)
            tl.store(above.sums + point * 3 + 1, delta, mask=valid)
            tl.store(above.sums + point * 3 + 2, slope_bound, mask=valid)

    fp16_scale = pairs.fp16_scale_of(slope_bound, w.scale, MODE.FP16_SCALE)
    dq = tl.zeros([B.BLOCK_Q, ROW.W], tl.float32)
    for EXTRA in tl.static_range(WALKS):
        for begin in range(0, w.extras if EXTRA else listed.end, MODE.BLOCK_K):
            keys = pairs.keys_from(begin, listed, here.query, w, cells, EXTRA, MODE, ROW, VROW)
            s, dp, theirs = pairs.pair_dots(here, up, keys, piece, MODE, B, ROW, VROW)
            p, ds = pairs.slopes(s, dp, inv_sum, delta, fp16_scale, here, up, keys, w, MODE, MODE.CAUSAL)
            # Under causal order a slope may be 0 where a key is not finite; where it is not, the slope is NaN.
            dq = pairs.fine_product(ds, finite(theirs) if MODE.CAUSAL else theirs, dq, MODE.NARROW)
            if EXTRA or above.sums is None:
                k_sum, v_sum = tl.zeros([MODE.BLOCK_K, ROW.W], tl.float32), tl.zeros([MODE.BLOCK_K, VROW.W], tl.float32)
                k_sum, v_sum = pairs.key_grads(p, ds, fp16_scale, keys.ok, here, up, k_sum, v_sum, MODE, MODE.CAUSAL)
                if EXTRA:
                    slot = (listed.source if above.sums is None else tile.to(tl.int64)) * w.extras
                    to_k, to_v = grads.k_extra + slot * ROW.E, grads.v_extra + slot * VROW.E
                else:
                    slot = listed.source * points(w.geo.k)
                    to_k, to_v = grads.k + slot * ROW.E, grads.v + slot * VROW.E
                pairs.put_piece(to_k, keys.at, keys.there, piece, k_sum, MODE.PARTS, above.sums is None, ROW)
                pairs.put_piece(to_v, keys.at, keys.there, piece, v_sum, MODE.PARTS, above.sums is None, VROW)
    pairs.put_piece(grads.q + here.start * ROW.E, here.query, valid, piece, dq / fp16_scale, MODE.PARTS, False, ROW)
