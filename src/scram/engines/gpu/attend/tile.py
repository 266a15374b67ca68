"""Attention of whole tiles in Triton: the queries of a tile attend the cells that their windows touch, together.

A program walks the cells of its tile, some keys at a time: scores by a matrix product, a running softmax, values by
another. What is allowed for no query of the tile is zero before it is multiplied. Under causal order a key is allowed
for some: what is not finite is left out of the product of the values, and counted beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....core.calls import AttendCall
from ....results import Attended
from ..primitives import LN2, dropped, finite, is_finite, product, softmax_step, store_piece
from ..runtime.block_sizes import TILE_FORWARD, TILE_FORWARD_EXACT
from ..runtime.launch import Kernel, cached, on_device
from .cells import cell_list, cells_of
from .tile_pairs import dots, keys_from, load_operand, power_scale, tile_flags, tile_queries
from .windows import Variant, empty_attended, inputs_of, weigh


def tile_attend(call: AttendCall) -> Attended:
    result = empty_attended(call)
    if result.lse.numel():
        inputs, variant = inputs_of(call)
        with on_device(call.q):
            cells = cells_of(inputs.windows.index, inputs.windows.geo, call.radius)
            _kernel(variant, cells.size)(inputs, cells, result)
    return result


@cached
def _kernel(variant: Variant, size: int) -> Kernel:
    flags = tile_flags(variant, size, TILE_FORWARD, TILE_FORWARD_EXACT, backward=False)
    return Kernel(tile_attend_kernel, variant.programs(flags["B"]) * flags["CONFIG"].PARTS, flags)


class Running(NamedTuple):
    """What the queries of a tile have of the keys so far, in a kernel."""

    running_max: Any  # [BQ], largest score
    running_sum: Any  # [BQ], sum of exp(score - running_max)
    count: Any  # [BQ], how many keys
    acc: Any  # [BQ, F], weighted values
    spoiled: Any  # [BQ, F], how many values are not finite


@triton.jit
def tile_attend_kernel(inputs, cells, result, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (tile, piece of the values)."""
    piece = tl.program_id(0) % CONFIG.PARTS
    tile = tl.program_id(0) // CONFIG.PARTS
    queries = tile_queries(tile, 0, inputs, CONFIG, B, E)
    listed = cell_list(tile, queries.row, cells, inputs.windows.masked)
    key_row = (queries.row // inputs.group).to(tl.int64)

    # Else a cell has a key for everyone.
    COUNT: tl.constexpr = CONFIG.WEIGHT != "softmax" or CONFIG.CAUSAL or inputs.windows.masked.mask is not None
    WALKS: tl.constexpr = 1 if inputs.k_extra is None else 2
    running_max = tl.full([B.BLOCK_Q], -float("inf"), tl.float32)  # [BQ]
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    acc = tl.zeros([B.BLOCK_Q, F.BLOCK], tl.float32)  # [BQ, F]
    state = Running(running_max, zero, zero if COUNT else zero + listed.end, acc, acc)
    for EXTRA in tl.static_range(WALKS):
        for begin in range(0, inputs.extras if EXTRA else listed.end, CONFIG.BLOCK_K):
            keys = keys_from(begin, listed, key_row, queries.query, inputs, cells, EXTRA, CONFIG, E, F)
            state = attend_block(state, queries, keys, piece, inputs, COUNT or EXTRA, CONFIG, B, E, F)

    has_keys = state.count > 0  # [BQ]
    if CONFIG.WEIGHT == "softmax":
        norm = tl.where(has_keys, state.running_sum, 1.0)  # [BQ]
        base = tl.where(state.running_max == -float("inf"), 0.0, state.running_max)
        lse = tl.log(norm) + (base * LN2 if CONFIG.NARROW else base)
    else:
        norm = tl.maximum(state.count, 1.0)
        lse = tl.log(norm)
    if piece == 0:
        place = result.lse + queries.start + queries.query
        tl.store(place, tl.where(has_keys, lse, -float("inf")), mask=queries.exists)
    out = state.acc / norm[:, None]  # [BQ, F]
    if CONFIG.CAUSAL:
        out = tl.where(state.spoiled > 0, float("nan"), out)
    out_row = result.out + queries.start * F.SIZE
    store_piece(out_row, queries.query, queries.exists, piece, out, CONFIG.PARTS, False, F)


@triton.jit
def attend_block(
    state,
    queries,
    keys,
    piece,
    inputs,
    COUNT: tl.constexpr,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """BLOCK_K more keys; COUNT: they are counted."""
    s, _ = dots(queries.q_block, queries.q_row, queries, keys.k_row, keys, 0, CONFIG, B, E)  # [BQ, BK]
    running_max, running_sum, count, acc, spoiled = state
    if CONFIG.WEIGHT == "softmax":
        s = tl.where(keys.ok, s, -float("inf"))
        scale = power_scale(inputs.scale, CONFIG.NARROW)
        POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
        running_max, rescale, p = softmax_step(running_max, s, scale, POWER, True, 1)
        running_sum = running_sum * rescale + tl.sum(p, 1)
        acc *= rescale[:, None]
    else:
        p = weigh(s * inputs.scale, keys.ok, CONFIG.WEIGHT)  # [BQ, BK]
    if COUNT:
        count += tl.sum(tl.where(keys.ok, 1.0, 0.0), 1)
    p = dropped(p, keys.name[None, :], queries.noise[:, None], inputs.dropout, CONFIG.DROPOUT)
    v_block = load_operand(keys.v_row, keys.at, keys.exists, piece, F, CONFIG.WEIGHT)  # [BK, F]
    if CONFIG.CAUSAL:  # a weight of 0 lets no NaN of a later key through
        bad = ~is_finite(v_block)  # [BK, F]
        attended = tl.where(keys.ok & queries.exists[:, None], 1.0, 0.0).to(v_block.dtype)  # [BQ, BK]
        spoiled = product(attended, tl.where(bad, 1.0, 0.0).to(v_block.dtype), spoiled)
        v_block = finite(v_block)
    return Running(running_max, running_sum, count, product(p.to(v_block.dtype), v_block, acc), spoiled)
