"""The clustered tail in Triton: a tile of queries meets the clusters in blocks, as matrix products.

The keys of each cluster in a query's windows are counted first; each cluster's size is less by their number.
A running softmax over the clusters is joined with the attention over the windows before anything is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ....calls import ClusterTailCall
from ....types import Attended
from ..attend.tile_pairs import fine_product, put_piece
from ..attend.windows import dropped
from ..cluster_tail.table import chunks, cluster_scores, own_rows, table_rows, tail_flags, tail_of, tail_queries
from ..drawn_tail.shared_keys import LN2, LOWEST, joined, powers, product
from ..runtime.block_sizes import CLUSTER_TAIL, CLUSTER_TAIL_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device


def cluster_tail(call: ClusterTailCall) -> Attended:
    made = Attended(
        torch.empty_like(call.head_out, memory_format=torch.contiguous_format),
        torch.empty_like(call.head_lse, memory_format=torch.contiguous_format),
    )
    if made.lse.numel():
        flags = tail_flags(call, CLUSTER_TAIL, CLUSTER_TAIL_EXACT)
        with on_device(call.q):
            for tail, tiles in chunks(call, tail_of(call, flags), flags):
                _kernel(tiles * flags["MODE"].PARTS, tuple(flags.items()), kinds(*tail))(tail, made)
    return made


@cached
def _kernel(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(cluster_tail_kernel, programs, dict(flags))


@triton.jit
def cluster_tail_kernel(t, made, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """Program (tile, piece of the values)."""
    piece, tile = tl.program_id(0) % MODE.PARTS, t.first + tl.program_id(0) // MODE.PARTS
    here = tail_queries(tile, t, MODE, B)
    mine, point = own_rows(t.q, here, ROW), here.start + here.query
    top, whole = tl.full([B.BLOCK_Q], LOWEST, tl.float32), tl.zeros([B.BLOCK_Q], tl.float32)
    mixed = tl.zeros([B.BLOCK_Q, VROW.W], tl.float32)
    for start in range(0, t.table.padded, MODE.BLOCK_C):
        at, slot, s, share = cluster_scores(start, mine, here, t, MODE, B, ROW)
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, p = powers(top, higher), powers(s, higher[:, None]) * share
        top, whole = higher, whole * shrink + tl.sum(p, 1)
        p = dropped(p, (t.first_name + at)[None, :], here.noise[:, None], t, MODE.DROPOUT)
        value = table_rows(t.table.v, slot, piece, VROW)
        mixed = fine_product(p, value, mixed * shrink[:, None], MODE.NARROW and MODE.GAINS)
        if MODE.GAINS and t.table.v_rest is not None:
            mixed = product(p.to(value.dtype), table_rows(t.table.v_rest, slot, piece, VROW), mixed)

    head = tl.load(t.head_lse + point, mask=here.exists, other=-float("inf")).to(tl.float32)
    some = here.exists & ~(whole == 0)
    factor, share, top, norm = joined(top, whole, some, tl.zeros([B.BLOCK_Q], tl.float32), head)
    f = piece * VROW.W + tl.arange(0, VROW.W)
    inside = here.exists[:, None] & (f < VROW.E)[None, :]
    theirs = tl.load(t.head_out + point[:, None] * VROW.E + f[None, :], mask=inside, other=0.0).to(tl.float32)
    answer = tl.where(some[:, None], mixed * factor[:, None], 0.0)
    answer += tl.where((share == 0.0)[:, None], 0.0, share[:, None] * theirs)
    put_piece(made.out + here.start * VROW.E, here.query, here.exists, piece, answer, MODE.PARTS, False, VROW)
    if piece == 0:
        # Exactly the head's where no cluster has anything left.
        tl.store(made.lse + point, tl.where(some, top + norm * LN2, head), mask=here.exists)
