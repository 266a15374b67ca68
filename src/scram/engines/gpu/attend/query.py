"""Algorithm 2 in Triton: the windows around a query's matches, their weights and the mix of their values in one pass.

A query walks its windows key by key; the queries of a tile are neighbors, whose windows overlap and share cache lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....core.calls import AttendCall
from ....results import Attended
from ..primitives import (
    dot,
    dropped,
    first_offset,
    load_float32,
    match_of,
    points,
    softmax_step,
    store_pieces,
    window_size,
    zero_pieces,
)
from ..runtime.block_sizes import attend_tile
from ..runtime.launch import Kernel, cached, on_device
from .windows import Variant, empty_attended, inputs_of, next_key, program_queries, weigh


def attend(call: AttendCall) -> Attended:
    result = empty_attended(call)
    if result.lse.numel():
        inputs, variant = inputs_of(call)
        with on_device(call.q):
            _kernel(variant)(inputs, result)
    return result


@cached
def _kernel(variant: Variant) -> Kernel:
    block = attend_tile(variant.rank, variant.widths, variant.dtypes)
    return Kernel(attend_kernel, variant.programs(block["B"]), {"CONFIG": variant.config, **block})


class Running(NamedTuple):
    """What the queries of a program have of the keys so far, in a kernel."""

    running_max: Any  # [BQ], largest score
    running_sum: Any  # [BQ], sum of exp(score - running_max)
    count: Any  # [BQ], how many keys
    acc: Any  # [BQ, F], weighted values, in pieces


@triton.jit
def attend_kernel(inputs, result, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program: tile of queries."""
    windows = inputs.windows
    row, start, query_block, q_block, noise = program_queries(inputs, B, E)
    exists = query_block.exists  # [BQ]
    key_row = (row // inputs.group).to(tl.int64)
    keys = points(windows.geo.k)
    k_row = inputs.k + key_row * keys * E.SIZE
    v_row = inputs.v + key_row * keys * F.SIZE

    running_max = tl.full([B.BLOCK_Q], -float("inf"), tl.float32)  # [BQ]
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    state = Running(running_max, zero, zero, zero_pieces(B.BLOCK_Q, F))
    for e in range(windows.kappa):
        match = match_of(e, exists, query_block, windows)  # [BQ]
        offset = first_offset(windows.reach)
        for _step in range(window_size(windows.reach)):
            key, ok, offset = next_key(match, e, offset, query_block, windows, CONFIG)
            state = attend_key(state, q_block, k_row, v_row, key, ok, key, noise, inputs, CONFIG, E, F)
    if inputs.k_extra is not None:
        k_row = inputs.k_extra + key_row * inputs.extras * E.SIZE
        v_row = inputs.v_extra + key_row * inputs.extras * F.SIZE
        for n in range(inputs.extras):
            at = query_block.query * 0 + n  # [BQ]
            state = attend_key(state, q_block, k_row, v_row, at, exists, keys + at, noise, inputs, CONFIG, E, F)

    has_keys = state.count > 0  # [BQ]
    norm = tl.where(has_keys, state.running_sum if CONFIG.WEIGHT == "softmax" else state.count, 1.0)  # [BQ]
    lse = tl.log(norm)
    if CONFIG.WEIGHT == "softmax":
        lse += tl.where(state.running_max == -float("inf"), 0.0, state.running_max)
    tl.store(result.lse + start + query_block.query, tl.where(has_keys, lse, -float("inf")), mask=exists)
    out = ()
    for n in tl.static_range(len(state.acc)):
        out += (state.acc[n] / norm[:, None],)  # [BQ, F]
    store_pieces(result.out + start * F.SIZE, query_block.query, out, exists, F)


@triton.jit
def attend_key(
    state, q_block, k_row, v_row, at, ok, name, noise, inputs, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr
):
    """One more key per query, vector `at` of keys and values where `ok`; dropout knows it as `name`."""
    s = dot(q_block, load_float32(k_row, at, ok, E)) * inputs.scale  # [BQ]
    v_block = load_float32(v_row, at, ok, F)  # [BQ, F]
    running_max = state.running_max
    running_sum = state.running_sum
    rescale = tl.full(s.shape, 1.0, tl.float32)  # [BQ]
    if CONFIG.WEIGHT == "softmax":
        s = tl.where(ok, s, -float("inf"))
        running_max, rescale, p = softmax_step(running_max, s, None, "exp", True, None)
        running_sum = running_sum * rescale + p
    else:
        p = weigh(s, ok, CONFIG.WEIGHT)  # [BQ]
    p = dropped(p, name, noise, inputs.dropout, CONFIG.DROPOUT)
    acc = ()
    for n in tl.static_range(len(v_block)):
        acc += (state.acc[n] * rescale[:, None] + p[:, None] * v_block[n],)
    return Running(running_max, running_sum, state.count + tl.where(ok, 1.0, 0.0), acc)
