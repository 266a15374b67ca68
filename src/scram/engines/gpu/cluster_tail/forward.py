"""The clustered tail in Triton: a tile of queries meets its routed keys and the clusters in blocks, as matrix products.

One running softmax goes over the keys of the tile's routed clusters and over all other clusters, whose sizes are less
by the keys in a query's windows. It is joined with the attention over the windows before anything is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ....core.calls import ClusterTailCall
from ....results import Attended
from ..primitives import LN2, LOWEST, dropped, join_lse, product, softmax_step, store_piece
from ..route.lists import load_listed
from ..runtime.block_sizes import CLUSTER_TAIL, CLUSTER_TAIL_EXACT, CLUSTER_TAIL_KEYS, CLUSTER_TAIL_NARROW
from ..runtime.launch import Kernel, cached, kinds, on_device
from .table import (
    chunks,
    cluster_scores,
    inputs_of,
    is_narrow,
    key_scores,
    load_queries,
    load_slope,
    load_table,
    query_spreads,
    row_of_keys,
    slope_factor,
    slope_weights,
    tail_flags,
    tail_queries,
    used_of,
)

NO_WEIGHT = tl.constexpr(1e-20)  # of clusters, beside weights of up to 1: with less there is no first-order term


def cluster_tail(call: ClusterTailCall) -> Attended:
    result = empty_tail(call)
    if result.lse.numel():
        half = CLUSTER_TAIL_NARROW if is_narrow(call) else CLUSTER_TAIL
        flags = tail_flags(call, half, CLUSTER_TAIL_EXACT, CLUSTER_TAIL_KEYS)
        with on_device(call.q):
            for inputs, tiles in chunks(call, inputs_of(call, flags), flags):
                kernel = _kernel(tiles * flags["CONFIG"].PARTS, tuple(flags.items()), kinds(*inputs))
                kernel(inputs, result)
    return result


def empty_tail(call: ClusterTailCall) -> Attended:
    shape = call.q.shape[:-1]
    out = call.q.new_empty((*shape, call.values.shape[-1]), dtype=call.out_dtype)
    return Attended(out, call.q.new_empty(shape, dtype=torch.float32))


@cached
def _kernel(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(cluster_tail_kernel, programs, dict(flags))


class Running(NamedTuple):
    """What the queries of a tile have so far, in a kernel."""

    running_max: Any  # [BQ], largest score
    running_sum: Any  # [BQ], sum of the weights
    tail_sum: Any  # [BQ], sum of those of clusters in the first-order term, after dropout
    acc: Any  # [BQ, F], weighted values


@triton.jit
def running_step(state, s, share, CONFIG: tl.constexpr):
    """Scores of some more keys or clusters: the new maximum, what sums are multiplied by, weights."""
    running_max, rescale, p = softmax_step(state.running_max, s, None, "exp2" if CONFIG.NARROW else "powers", False, 1)
    if CONFIG.BITS:
        p = p * share  # [BQ, BK]
    return running_max, rescale, p


@triton.jit
def with_slope(
    acc,
    tail_sum,
    q_block,
    spread,
    piece,
    queries,
    inputs,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """acc [BQ, F] with the first-order term of clusters of weight `tail_sum` [BQ].

    The products add to acc over that weight: another block of its size would take the registers of a program.
    """
    weight = tail_sum * slope_factor(spread, queries, inputs)  # [BQ]
    has_weight = tl.abs(weight) > NO_WEIGHT  # [BQ]
    weight = tl.where(has_weight, weight, 1.0)
    acc = acc / weight[:, None]
    for n in tl.static_range(len(q_block)):
        slope = load_slope(inputs.table.slope, queries.source, n, piece, E, F)  # [E, F]
        x = tl.where(has_weight[:, None], q_block[n], 0.0)  # [BQ, E]
        acc = product(x.to(slope.dtype), slope, acc)
    return acc * weight[:, None]


@triton.jit
def cluster_tail_kernel(inputs, result, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (tile, piece of the values)."""
    piece = tl.program_id(0) % CONFIG.PARTS
    tile = inputs.first + tl.program_id(0) // CONFIG.PARTS
    queries = tail_queries(tile, inputs, CONFIG, B)
    query = queries.block.query  # [BQ]
    exists = queries.block.exists  # [BQ]
    q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
    noise = queries.noise[:, None]  # [BQ, 1]
    spread = query_spreads(q_block, queries, inputs, E)  # [BQ]
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    acc = tl.zeros([B.BLOCK_Q, F.BLOCK], tl.float32)  # [BQ, F]
    state = Running(tl.full([B.BLOCK_Q], LOWEST, tl.float32), zero, zero, acc)
    used = used_of(inputs.table, queries.source)
    tl.assume(used > 0)  # or ptxas has every product wait for the one before
    for start in range(0, used, CONFIG.BLOCK_C):
        at, s, share = cluster_scores(start, q_block, spread, queries, inputs, CONFIG, B, E)
        running_max, rescale, p = running_step(state, s, share, CONFIG)
        running_sum = state.running_sum * rescale + tl.sum(p, 1)
        p = dropped(p, (inputs.first_name + at)[None, :], noise, inputs.dropout, CONFIG.DROPOUT)  # [BQ, BC]
        v_block = load_table(inputs.table.v, queries.slot + at, piece, F)  # [BC, F]
        acc = product(p.to(v_block.dtype), v_block, state.acc * rescale[:, None])
        tail_sum = zero  # [BQ]
        if inputs.table.slope is not None:
            own = slope_weights(queries.slot + at, inputs.table, CONFIG.BLOCK_C)  # [BC]
            tail_sum = state.tail_sum * rescale + tl.sum(p * own[None, :], 1)
        state = Running(running_max, running_sum, tail_sum, acc)
    if inputs.table.slope is not None:
        acc = with_slope(state.acc, state.tail_sum, q_block, spread, piece, queries, inputs, E, F)
        state = Running(state.running_max, state.running_sum, state.tail_sum, acc)
    if inputs.listed is not None:
        v_row = row_of_keys(inputs.v, queries, inputs, F)
        number = tl.load(inputs.listed.number + queries.tile)
        for begin in range(0, number, CONFIG.BLOCK_K):
            key, s = key_scores(begin, number, q_block, queries, inputs, CONFIG, B, E)
            running_max, rescale, p = running_step(state, s, 1.0, CONFIG)
            running_sum = state.running_sum * rescale + tl.sum(p, 1)
            p = dropped(p, key[None, :], noise, inputs.dropout, CONFIG.DROPOUT)  # [BQ, BK]
            v_block = load_listed(v_row, key, piece, F)  # [BK, F]
            acc = product(p.to(v_block.dtype), v_block, state.acc * rescale[:, None])
            state = Running(running_max, running_sum, zero, acc)

    acc = state.acc  # [BQ, F]
    base = tl.where(state.running_max == LOWEST, 0.0, state.running_max)  # [BQ]
    if CONFIG.NARROW:
        base = base * LN2
    point = queries.start + query  # [BQ]
    near_lse = tl.full([B.BLOCK_Q], -float("inf"), tl.float32)  # [BQ]
    if inputs.near_lse is not None:
        near_lse = tl.load(inputs.near_lse + point, mask=exists, other=-float("inf")).to(tl.float32)
    has_keys = exists & ~(state.running_sum == 0)  # [BQ]
    factor, near_factor, base, norm = join_lse(base, state.running_sum, has_keys, zero, near_lse)
    out = tl.where(has_keys[:, None], acc * factor[:, None], 0.0)  # [BQ, F]
    if inputs.near_out is not None:
        f = piece * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        inside = exists[:, None] & (f < F.SIZE)[None, :]  # [BQ, F]
        near_out = tl.load(inputs.near_out + point[:, None] * F.SIZE + f[None, :], mask=inside, other=0.0)
        out += tl.where((near_factor == 0.0)[:, None], 0.0, near_factor[:, None] * near_out.to(tl.float32))
    store_piece(result.out + queries.start * F.SIZE, query, exists, piece, out, CONFIG.PARTS, False, F)
    if piece == 0:
        # Exactly near_lse where no cluster has anything left.
        tl.store(result.lse + point, tl.where(has_keys, base + norm * LN2, near_lse), mask=exists)
