"""The gradient of attention of whole tiles in Triton, through out and through lse.

Meaning and names are those of `query_backward`; pairs come in blocks, and the sums of gradients are matrix products.
Tiles add the gradients of keys and values by float32 atomics. With deterministic algorithms, in `tile_collect`, cells
collect them in a fixed order instead.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import AttendCall, AttendGrads
from ..primitives import fine_product, finite, fp16_scale_of, points, store_piece, tile_block
from ..runtime.block_sizes import TILE_BACKWARD, TILE_BACKWARD_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device
from .cells import cell_list, cells_of
from .query_backward import empty_grads, rounded_grads, upstream
from .tile_collect import collect
from .tile_pairs import add_pairs, key_grads, keys_from, pair_dots, slopes, tile_flags, tile_grads, tile_queries
from .windows import Variant, inputs_of


def tile_attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    """out, grad_out [B, H, *G, F], lse, grad_lse [B, H, *G] -> gradients in the dtypes of their tensors."""
    inputs, variant = inputs_of(call)
    above = upstream(lse, grad_out, grad_lse, 3)
    grads = empty_grads(call, above, variant.programs(tile_block(variant.rank)))
    if grads.q.numel():
        with on_device(grads.q):
            cells = cells_of(inputs.windows.index, inputs.windows.geo, call.radius)
            _kernel(variant, cells.size, kinds(*above))(inputs, cells, above, grads)
            if above.sums is not None:
                collect(inputs, variant, cells, above, grads)
    return rounded_grads(call, grads)


@cached
def _kernel(variant: Variant, size: int, above: tuple[Any, ...]) -> Kernel:
    flags = tile_flags(variant, size, TILE_BACKWARD, TILE_BACKWARD_EXACT)
    return Kernel(tile_backward_kernel, variant.programs(flags["B"]) * flags["CONFIG"].PARTS, flags)


@triton.jit
def tile_backward_kernel(
    inputs, cells, above, grads, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr
):
    """Program (tile, piece of the features and of the values)."""
    piece = tl.program_id(0) % CONFIG.PARTS
    tile = tl.program_id(0) // CONFIG.PARTS
    queries = tile_queries(tile, piece, inputs, CONFIG, B, E)
    up = tile_grads(queries, piece, above, CONFIG, F)
    point = queries.start + queries.query  # [BQ]
    exists = queries.exists  # [BQ]
    listed = cell_list(tile, queries.row, cells, inputs.windows.masked)
    key_row = (queries.row // inputs.group).to(tl.int64)
    WALKS: tl.constexpr = 1 if inputs.k_extra is None else 2

    delta = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    inv_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    slope_bound = delta  # [BQ]
    if CONFIG.WEIGHT == "softmax":
        p_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
        for EXTRA in tl.static_range(WALKS):
            for begin in range(0, inputs.extras if EXTRA else listed.end, CONFIG.BLOCK_K):
                keys = keys_from(begin, listed, key_row, queries.query, inputs, cells, EXTRA, CONFIG, E, F)
                s, dp, _ = pair_dots(queries, up, keys, piece, CONFIG, B, E, F)  # [BQ, BK]
                p_sum, delta, slope_bound = add_pairs(
                    p_sum, delta, slope_bound, s, dp, queries, up, keys, inputs, CONFIG
                )
        inv_sum = 1 / tl.where(p_sum == 0, 1.0, p_sum)
        delta = delta * inv_sum - tl.load(above.grad_lse + point, mask=exists, other=0.0)
        slope_bound = slope_bound * inv_sum + tl.abs(delta)
    if above.sums is not None:  # noqa: SIM102 - what is known to the compiler apart
        if piece == 0:
            tl.store(above.sums + point * 3, inv_sum, mask=exists)
            tl.store(above.sums + point * 3 + 1, delta, mask=exists)
            tl.store(above.sums + point * 3 + 2, slope_bound, mask=exists)

    fp16_scale = fp16_scale_of(slope_bound, inputs.scale, CONFIG.FP16_SCALE)
    dq = tl.zeros([B.BLOCK_Q, E.BLOCK], tl.float32)  # [BQ, E]
    for EXTRA in tl.static_range(WALKS):
        for begin in range(0, inputs.extras if EXTRA else listed.end, CONFIG.BLOCK_K):
            keys = keys_from(begin, listed, key_row, queries.query, inputs, cells, EXTRA, CONFIG, E, F)
            s, dp, k_block = pair_dots(queries, up, keys, piece, CONFIG, B, E, F)  # [BQ, BK], k_block [BK, E]
            p, ds = slopes(s, dp, inv_sum, delta, fp16_scale, queries, up, keys, inputs, CONFIG, CONFIG.CAUSAL)
            # Under causal order a slope may be 0 where a key is not finite; where it is not, the slope is NaN.
            dq = fine_product(ds, finite(k_block) if CONFIG.CAUSAL else k_block, dq, CONFIG.NARROW)
            if EXTRA or above.sums is None:
                dk = tl.zeros([CONFIG.BLOCK_K, E.BLOCK], tl.float32)  # [BK, E]
                dv = tl.zeros([CONFIG.BLOCK_K, F.BLOCK], tl.float32)  # [BK, F]
                dk, dv = key_grads(p, ds, fp16_scale, keys.ok, queries, up, dk, dv, CONFIG, CONFIG.CAUSAL)
                if EXTRA:
                    slot = (key_row if above.sums is None else tile.to(tl.int64)) * inputs.extras
                    dk_row = grads.k_extra + slot * E.SIZE
                    dv_row = grads.v_extra + slot * F.SIZE
                else:
                    slot = key_row * points(inputs.windows.geo.k)
                    dk_row = grads.k + slot * E.SIZE
                    dv_row = grads.v + slot * F.SIZE
                store_piece(dk_row, keys.at, keys.exists, piece, dk, CONFIG.PARTS, above.sums is None, E)
                store_piece(dv_row, keys.at, keys.exists, piece, dv, CONFIG.PARTS, above.sums is None, F)
    dq_row = grads.q + queries.start * E.SIZE
    store_piece(dq_row, queries.query, exists, piece, dq / fp16_scale, CONFIG.PARTS, False, E)
