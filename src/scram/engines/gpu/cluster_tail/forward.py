"""The clustered tail in Triton: a tile of queries meets the clusters in blocks, as matrix products.

The keys of each cluster in a query's windows are counted first; each cluster's size is less by their number.
A running softmax over the clusters is joined with the attention over the windows before anything is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....core.calls import ClusterTailCall
from ....results import Attended
from ..primitives import LN2, LOWEST, dropped, fine_product, join_lse, product, softmax_step, store_piece
from ..runtime.block_sizes import CLUSTER_TAIL, CLUSTER_TAIL_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device
from .table import chunks, cluster_scores, inputs_of, load_queries, load_table, tail_flags, tail_queries


def cluster_tail(call: ClusterTailCall) -> Attended:
    result = Attended(
        torch.empty_like(call.near_out, memory_format=torch.contiguous_format),
        torch.empty_like(call.near_lse, memory_format=torch.contiguous_format),
    )
    if result.lse.numel():
        flags = tail_flags(call, CLUSTER_TAIL, CLUSTER_TAIL_EXACT)
        with on_device(call.q):
            for inputs, tiles in chunks(call, inputs_of(call, flags), flags):
                kernel = _kernel(tiles * flags["CONFIG"].PARTS, tuple(flags.items()), kinds(*inputs))
                kernel(inputs, result)
    return result


@cached
def _kernel(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(cluster_tail_kernel, programs, dict(flags))


@triton.jit
def cluster_tail_kernel(inputs, result, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (tile, piece of the values)."""
    piece = tl.program_id(0) % CONFIG.PARTS
    tile = inputs.first + tl.program_id(0) // CONFIG.PARTS
    queries = tail_queries(tile, inputs, CONFIG, B)
    query = queries.block.query  # [BQ]
    exists = queries.block.exists  # [BQ]
    q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
    point = queries.start + query  # [BQ]
    running_max = tl.full([B.BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    running_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    acc = tl.zeros([B.BLOCK_Q, F.BLOCK], tl.float32)  # [BQ, F]
    for start in range(0, inputs.table.padded, CONFIG.BLOCK_C):
        at, slot, s, share = cluster_scores(start, q_block, queries, inputs, CONFIG, B, E)
        running_max, rescale, p = softmax_step(running_max, s, None, "powers", False, 1)
        p = p * share  # [BQ, BC]
        running_sum = running_sum * rescale + tl.sum(p, 1)
        p = dropped(p, (inputs.first_name + at)[None, :], queries.noise[:, None], inputs.dropout, CONFIG.DROPOUT)
        v_block = load_table(inputs.table.v, slot, piece, F)  # [BC, F]
        acc = fine_product(p, v_block, acc * rescale[:, None], CONFIG.NARROW and CONFIG.GAINS)
        if CONFIG.GAINS and inputs.table.v_rest is not None:
            acc = product(p.to(v_block.dtype), load_table(inputs.table.v_rest, slot, piece, F), acc)

    near_lse = tl.load(inputs.near_lse + point, mask=exists, other=-float("inf")).to(tl.float32)  # [BQ]
    has_keys = exists & ~(running_sum == 0)  # [BQ]
    zero = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    factor, near_factor, base, norm = join_lse(running_max, running_sum, has_keys, zero, near_lse)
    f = piece * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
    inside = exists[:, None] & (f < F.SIZE)[None, :]  # [BQ, F]
    near_out = tl.load(inputs.near_out + point[:, None] * F.SIZE + f[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.where(has_keys[:, None], acc * factor[:, None], 0.0)  # [BQ, F]
    out += tl.where((near_factor == 0.0)[:, None], 0.0, near_factor[:, None] * near_out)
    store_piece(result.out + queries.start * F.SIZE, query, exists, piece, out, CONFIG.PARTS, False, F)
    if piece == 0:
        # Exactly near_lse where no cluster has anything left.
        tl.store(result.lse + point, tl.where(has_keys, base + norm * LN2, near_lse), mask=exists)
