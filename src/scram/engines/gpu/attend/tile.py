"""Attention of whole tiles in Triton: the queries of a tile attend the cells that their windows touch, together.

A program walks the cells of its tile, some keys at a time: scores by a matrix product, a running softmax, values by
another. What is legal for no query of the tile is zero before it is multiplied. Under causal order a key is legal for
some: what is not finite is left out of the product of the values, and counted beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....calls import AttendCall
from ....types import Attended
from ..attend.cells import cells_of, rows_at
from ..attend.tile_pairs import dots, in_powers, keys_from, listed_keys, powers_of, put_piece, tile_flags, tile_queries
from ..attend.windows import Variant, dropped, empty_attended, weigh, windows_of
from ..drawn_tail.shared_keys import LN2, finite, product
from ..runtime.block_sizes import TILE_FORWARD, TILE_FORWARD_EXACT
from ..runtime.launch import Kernel, cached, on_device


def tile_attend(call: AttendCall) -> Attended:
    made = empty_attended(call)
    if made.lse.numel():
        windows, variant = windows_of(call)
        with on_device(call.q):
            cells = cells_of(windows.index, windows.geo, call.radius)
            _kernel(variant, cells.size)(windows, cells, made)
    return made


@cached
def _kernel(variant: Variant, size: int) -> Kernel:
    flags = tile_flags(variant, size, TILE_FORWARD, TILE_FORWARD_EXACT, backward=False)
    return Kernel(tile_attend_kernel, variant.programs(flags["B"]) * flags["MODE"].PARTS, flags)


class Mixed(NamedTuple):
    """What the queries of a tile have of the keys so far, in a kernel."""

    top: Any  # [BLOCK_Q], largest score
    total: Any  # [BLOCK_Q], sum of exp(score - top)
    count: Any  # [BLOCK_Q], how many keys
    sums: Any  # [BLOCK_Q, VW], of weighted values
    spoiled: Any  # [BLOCK_Q, VW], how many values are not finite


@triton.jit
def tile_attend_kernel(w, cells, made, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """Program (tile, piece of the values)."""
    piece, tile = tl.program_id(0) % MODE.PARTS, tl.program_id(0) // MODE.PARTS
    here = tile_queries(tile, 0, w, MODE, B, ROW)
    listed = listed_keys(tile, here.row, w, cells)

    # Else a cell has a key for everyone.
    COUNT: tl.constexpr = MODE.WEIGHT != "softmax" or MODE.CAUSAL or w.masked.mask is not None
    WALKS: tl.constexpr = 1 if w.k_extra is None else 2
    top, nothing = tl.full([B.BLOCK_Q], -float("inf"), tl.float32), tl.zeros([B.BLOCK_Q], tl.float32)
    sums = tl.zeros([B.BLOCK_Q, VROW.W], tl.float32)
    mixed = Mixed(top, nothing, nothing if COUNT else nothing + listed.end, sums, sums)
    for EXTRA in tl.static_range(WALKS):
        for begin in range(0, w.extras if EXTRA else listed.end, MODE.BLOCK_K):
            keys = keys_from(begin, listed, here.query, w, cells, EXTRA, MODE, ROW, VROW)
            mixed = mix_block(mixed, here, keys, piece, w, COUNT or EXTRA, MODE, B, ROW, VROW)

    some = mixed.count > 0
    if MODE.WEIGHT == "softmax":
        whole = tl.where(some, mixed.total, 1.0)
        top = tl.where(mixed.top == -float("inf"), 0.0, mixed.top)
        norm = tl.log(whole) + (top * LN2 if MODE.NARROW else top)
    else:
        whole = tl.maximum(mixed.count, 1.0)
        norm = tl.log(whole)
    if piece == 0:
        tl.store(made.lse + here.start + here.query, tl.where(some, norm, -float("inf")), mask=here.exists)
    answer = mixed.sums / whole[:, None]
    if MODE.CAUSAL:
        answer = tl.where(mixed.spoiled > 0, float("nan"), answer)
    put_piece(made.out + here.start * VROW.E, here.query, here.exists, piece, answer, MODE.PARTS, False, VROW)


@triton.jit
def mix_block(
    mixed, here, keys, piece, w, COUNT: tl.constexpr, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    """BLOCK_K more keys; COUNT: they are counted."""
    s, _ = dots(here.mine, here.q_row, here, keys.k_row, keys, 0, MODE, B, ROW)
    top, total, count, sums, spoiled = mixed
    if MODE.WEIGHT == "softmax":
        s, each = tl.where(keys.ok, s, -float("inf")), in_powers(w.scale, MODE.NARROW)
        higher = tl.maximum(top, tl.max(s, 1) * each)
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
        shrink, p = powers_of(top, safe, MODE.NARROW), powers_of(s * each, safe[:, None], MODE.NARROW)
        total, top = total * shrink + tl.sum(p, 1), higher
        sums *= shrink[:, None]
    else:
        p = weigh(s * w.scale, keys.ok, MODE.WEIGHT)
    if COUNT:
        count += tl.sum(tl.where(keys.ok, 1.0, 0.0), 1)
    p = dropped(p, keys.name[None, :], here.noise[:, None], w, MODE.DROPOUT)
    value = rows_at(keys.v_row, keys.at, keys.there, piece, VROW, MODE.WEIGHT)
    if MODE.CAUSAL:  # a weight of 0 lets no NaN of a later key through
        bad = ~(tl.abs(value.to(tl.float32)) < float("inf"))
        held = tl.where(keys.ok & here.exists[:, None], 1.0, 0.0).to(value.dtype)
        spoiled = product(held, tl.where(bad, 1.0, 0.0).to(value.dtype), spoiled)
        value = finite(value)
    return Mixed(top, total, count, product(p.to(value.dtype), value, sums), spoiled)
