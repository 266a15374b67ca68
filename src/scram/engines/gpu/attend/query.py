"""Algorithm 2 in Triton: the windows around a query's matches, their weights and the mix of their values in one pass.

A query walks its windows key by key; the queries of a tile are neighbours, whose windows overlap and share cache lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....calls import AttendCall
from ....types import Attended
from ..attend import windows as win
from ..primitives import dot, features, points, put
from ..runtime.block_sizes import attend_tile
from ..runtime.launch import Kernel, cached, on_device


def attend(call: AttendCall) -> Attended:
    made = win.empty_attended(call)
    if made.lse.numel():
        windows, variant = win.windows_of(call)
        with on_device(call.q):
            _kernel(variant)(windows, made)
    return made


@cached
def _kernel(variant: win.Variant) -> Kernel:
    block = attend_tile(variant.rank, variant.widths, variant.dtypes)
    return Kernel(attend_kernel, variant.programs(block["B"]), {"MODE": variant.mode, **block})


class Mixed(NamedTuple):
    """What the queries of a program have of the keys so far, in a kernel."""

    top: Any  # [BLOCK_Q], largest score
    total: Any  # [BLOCK_Q], sum of exp(score - top)
    count: Any  # [BLOCK_Q], how many keys
    sums: Any  # of weighted values, in pieces


@triton.jit
def attend_kernel(w, made, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    row, start, here, mine, noise = win.program_queries(w, B, ROW)
    source, keys = (row // w.group).to(tl.int64), points(w.geo.k)
    k_row, v_row = w.k + source * keys * ROW.E, w.v + source * keys * VROW.E

    top, nothing = tl.full([B.BLOCK_Q], -float("inf"), tl.float32), tl.zeros([B.BLOCK_Q], tl.float32)
    mixed = Mixed(top, nothing, nothing, win.zeros(B.BLOCK_Q, VROW))
    for e in range(w.kappa):
        match, offset = win.match_of(e, here.exists, here, w), win.first_offset(w.reach)
        for _step in range(win.window_size(w.reach)):
            key, ok, offset = win.next_key(match, e, offset, here, w, MODE)
            mixed = mix(mixed, mine, k_row, v_row, key, ok, key, noise, w, MODE, ROW, VROW)
    if w.k_extra is not None:
        k_row, v_row = w.k_extra + source * w.extras * ROW.E, w.v_extra + source * w.extras * VROW.E
        for x in range(w.extras):
            at = here.query * 0 + x
            mixed = mix(mixed, mine, k_row, v_row, at, here.exists, keys + at, noise, w, MODE, ROW, VROW)

    some = mixed.count > 0
    whole = tl.where(some, mixed.total if MODE.WEIGHT == "softmax" else mixed.count, 1.0)
    norm = tl.log(whole)
    if MODE.WEIGHT == "softmax":
        norm += tl.where(mixed.top == -float("inf"), 0.0, mixed.top)
    tl.store(made.lse + start + here.query, tl.where(some, norm, -float("inf")), mask=here.exists)
    shares = ()
    for n in tl.static_range(len(mixed.sums)):
        shares += (mixed.sums[n] / whole[:, None],)
    put(made.out + start * VROW.E, here.query, shares, here.exists, VROW)


@triton.jit
def mix(mixed, mine, k_row, v_row, at, ok, name, noise, w, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """One more key per query, row `at` of keys and values where `ok`; dropout knows it as `name`."""
    s = dot(mine, features(k_row, at, ok, ROW)) * w.scale
    value = features(v_row, at, ok, VROW)
    top, total, shrink = mixed.top, mixed.total, tl.full(s.shape, 1.0, tl.float32)
    if MODE.WEIGHT == "softmax":
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, s)
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
        shrink = tl.exp(top - safe)
        p = tl.exp(s - safe)
        total = total * shrink + p
        top = higher
    else:
        p = win.weigh(s, ok, MODE.WEIGHT)
    p = win.dropped(p, name, noise, w, MODE.DROPOUT)
    sums = ()
    for n in tl.static_range(len(value)):
        sums += (mixed.sums[n] * shrink[:, None] + p[:, None] * value[n],)
    return Mixed(top, total, mixed.count + tl.where(ok, 1.0, 0.0), sums)
