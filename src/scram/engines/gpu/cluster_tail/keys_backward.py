"""Gradients of the keys and values that tiles route, in Triton: each key collects from the tiles that attend it.

The keys of a cluster stand together in `order` and are attended by the same tiles, of which there is a list. A program
has a block of keys of one cluster in registers and goes through a share of the list. All tiles may route one cluster:
what is beyond a first share is summed in further shares, by programs of their own, and added in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import ClusterTailCall
from ..primitives import add_scaled, for_product, load_piece, load_pieces, points, power, store_pieces, zero_pieces
from ..runtime.block_sizes import KEYS_COLLECT, KEYS_COLLECT_EXACT, KEYS_COLLECT_NARROW
from ..runtime.launch import Kernel, cached, kinds
from .pairs import Totals, Upstream, add_pairs, load_totals, row_products
from .table import Inputs, is_narrow, load_queries, score_unit, tail_flags, tail_queries

FURTHER = 2048  # shares at most beyond the first of each block of keys
LEAST_SHARE = 16  # tiles of a share
TILES = 256  # tiles that a program looks through at a time


class Lists(NamedTuple):
    """Who routes what. Clusters are numbered in rows of `width`: 32 * words, and one of the keys in no cluster."""

    order: Tensor  # int32 [rows of clusters, M]
    tiles: Tensor  # int32 [rows, 32 * words, tiles of a row], those that route each cluster
    number: Tensor  # int32 [rows, width], how many
    begins: Tensor  # int32 [rows, width], first key of each cluster in `order`
    sizes: Tensor  # int32 [rows, width]
    block_begins: Tensor  # int32 [rows, width], first block of each cluster
    owner: Tensor  # int64 [rows, blocks], the cluster of each block; `width` for none
    share: Tensor  # int64 [], tiles of a share
    further: Tensor  # int64 [rows, width], how many further shares the blocks of a cluster have
    further_ends: Tensor  # int64 [rows * width], running sums
    further_owner: Tensor  # int64 [further shares], the row and cluster of each; rows * width for none
    k_parts: Tensor  # float32 [further shares, BLOCK_C, E], what they sum
    v_parts: Tensor  # float32 [further shares, BLOCK_C, F]
    rows: int  # of clusters
    width: int
    blocks: int  # of keys of a row, at most
    row_tiles: int  # tiles that share a row of clusters


def keys_backward(call: ClusterTailCall, inputs: Inputs, above: Upstream, totals: Totals) -> tuple[Tensor, Tensor]:
    assert call.k is not None
    assert call.v is not None
    half = KEYS_COLLECT_NARROW if is_narrow(call) else KEYS_COLLECT
    flags = tail_flags(call, half, KEYS_COLLECT_EXACT)
    flags = {**flags, "CONFIG": flags["CONFIG"]._replace(BITS=0, SEVERAL=False)}  # routed keys are whole
    own = call.sizes.shape[1] == call.k.shape[1]  # a key is in one row of clusters alone
    heads = call.sizes.shape[:2]
    shapes = [(*heads, *x.shape[2:]) for x in (call.k, call.v)]
    dtypes = [x.dtype if own else torch.float32 for x in (call.k, call.v)]
    grads = [torch.empty(shape, dtype=dtype, device=call.q.device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    lists = lists_of(call, flags["CONFIG"].BLOCK_C)
    given = kinds(*inputs, *above, *lists, *grads)
    if len(lists.further_owner):
        further = _kernel(len(lists.further_owner), False, tuple(flags.items()), given)
        further(inputs, above, totals, lists, *grads)
    every = _kernel(lists.owner.numel(), True, tuple(flags.items()), given)
    every(inputs, above, totals, lists, *grads)
    dk, dv = (
        grad if own else grad.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
        for grad, x in zip(grads, (call.k, call.v), strict=True)
    )
    return dk, dv


def lists_of(call: ClusterTailCall, block: int) -> Lists:
    """`block`: keys of a block. All on the device: nothing waits for it."""
    assert call.order is not None
    assert call.routes is not None
    device = call.q.device
    words = call.routes.shape[-1]
    rows = call.sizes.shape[0] * call.sizes.shape[1]
    keys = call.order.shape[-1]
    width = 32 * words + 1
    row_tiles = call.routes[..., 0].numel() // rows
    sizes = torch.zeros((rows, width), dtype=torch.int32, device=device)
    sizes[:, : call.sizes.shape[-1]] = call.sizes.flatten(0, 1)
    sizes[:, -1] = keys - sizes.sum(1)
    tiles = torch.empty((rows, width - 1, row_tiles), dtype=torch.int32, device=device)
    number = torch.zeros((rows, width), dtype=torch.int32, device=device)
    routes = call.routes.contiguous()
    _tiles(rows * words, kinds(routes, tiles, number))(routes, tiles, number, row_tiles, words)
    each = (sizes + (block - 1)) // block  # blocks of a cluster
    block_ends = each.cumsum(1, dtype=torch.int32)
    blocks = keys // block + min(keys, width)
    every = torch.arange(blocks, dtype=torch.int32, device=device).repeat(rows, 1)
    owner = torch.searchsorted(block_ends, every, right=True)
    pairs = number.long() * each  # [rows, width]
    most = min(FURTHER, rows * blocks * (-(-row_tiles // LEAST_SHARE) - 1))  # further shares
    share = (-(-pairs.sum() // max(most, 1))).clamp(min=LEAST_SHARE)
    further = (-(-number // share) - 1).clamp(min=0) * each
    further_ends = further.flatten().cumsum(0)
    slots = torch.arange(most, device=device)
    widths = call.q.shape[-1], call.values.shape[-1]
    k_parts, v_parts = (torch.empty((most, block, x), dtype=torch.float32, device=device) for x in widths)
    return Lists(
        order=call.order.contiguous(),
        tiles=tiles,
        number=number,
        begins=sizes.cumsum(1, dtype=torch.int32) - sizes,
        sizes=sizes,
        block_begins=block_ends - each,
        owner=owner,
        share=share,
        further=further,
        further_ends=further_ends,
        further_owner=torch.searchsorted(further_ends, slots, right=True),
        k_parts=k_parts,
        v_parts=v_parts,
        rows=rows,
        width=width,
        blocks=blocks,
        row_tiles=row_tiles,
    )


@cached
def _tiles(programs: int, given: tuple[object, ...]) -> Kernel:
    return Kernel(routing_tiles_kernel, programs, {"BLOCK": TILES, "num_warps": 4, "enable_fp_fusion": True})


@cached
def _kernel(programs: int, first: bool, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(tail_keys_kernel, programs, {**dict(flags), "FIRST": first})


@triton.jit
def routing_tiles_kernel(routes, tiles, number, row_tiles, words, BLOCK: tl.constexpr):
    """The tiles that route each cluster, ascending. Program (row of clusters, word)."""
    row = (tl.program_id(0) // words).to(tl.int64)
    word = tl.program_id(0) % words
    bit = tl.arange(0, 32)  # [32]
    filled = bit * 0  # [32]
    cluster = word * 32 + bit  # [32]
    place = tiles + (row * words * 32 + cluster)[:, None] * row_tiles  # [32, 1]
    for begin in range(0, row_tiles, BLOCK):
        at = begin + tl.arange(0, BLOCK)  # [BLOCK]
        bits = tl.load(routes + (row * row_tiles + at) * words + word, mask=at < row_tiles, other=0)  # [BLOCK]
        routed = (bits[None, :] >> bit[:, None]) & 1  # [32, BLOCK]
        before = filled[:, None] + tl.cumsum(routed, 1) - routed  # [32, BLOCK]
        tile = at[None, :] + bit[:, None] * 0 + (row * row_tiles).to(tl.int32)  # [32, BLOCK]
        tl.store(place + before, tile, mask=routed != 0)
        filled += tl.sum(routed, 1)
    tl.store(number + row * (words * 32 + 1) + cluster, filled)


@triton.jit
def key_block(number, lists, CONFIG: tl.constexpr, FIRST: tl.constexpr):
    """The block of keys of a program: its row of clusters, place among all clusters, blocks of the cluster, number
    among them, and which share of the tiles is the program's; and whether it has one."""
    if FIRST:
        cluster = tl.load(lists.owner + number)
        exists = cluster < lists.width
        source = number // lists.blocks
        in_row = source * lists.width + tl.minimum(cluster, lists.width - 1)
        block = number % lists.blocks - tl.load(lists.block_begins + in_row)
        each = (tl.load(lists.sizes + in_row) + CONFIG.BLOCK_C - 1) // CONFIG.BLOCK_C
        turn = block * 0
    else:
        owner = tl.load(lists.further_owner + number)
        every = tl.cast(lists.rows, tl.int64) * lists.width
        exists = owner < every
        in_row = tl.minimum(owner, every - 1)
        source = in_row // lists.width
        each = (tl.load(lists.sizes + in_row) + CONFIG.BLOCK_C - 1) // CONFIG.BLOCK_C
        within = number - tl.load(lists.further_ends + in_row) + tl.load(lists.further + in_row)
        each = tl.maximum(each, 1)
        block = within % each
        turn = within // each + 1
    return source, in_row, each, block, turn, exists


@triton.jit
def tail_keys_kernel(
    inputs,
    above,
    totals,
    lists,
    dk,
    dv,
    CONFIG: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One share of the tiles that attend a block of keys: a further one, or the FIRST, and then the sum of all.

    Program: further share, or (row of clusters, block).
    """
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    number = tl.program_id(0).to(tl.int64)
    keys = points(inputs.windows.geo.k)
    source, in_row, each, block, turn, exists = key_block(number, lists, CONFIG, FIRST)
    lane = tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    at = block * CONFIG.BLOCK_C + lane  # [BC]
    ok = at < tl.where(exists, tl.load(lists.sizes + in_row), 0)  # [BC]
    key = tl.load(lists.order + source * keys + tl.load(lists.begins + in_row) + at, mask=ok, other=0)  # [BC]
    key_row = source * inputs.group // inputs.key_group * keys
    k_block = load_keys(inputs.k + key_row * E.SIZE, key, ok, E)  # [BC, E]
    v_block = load_keys(inputs.v + key_row * F.SIZE, key, ok, F)  # [BC, F]
    dk_acc = zero_pieces(CONFIG.BLOCK_C, E)  # [BC, E]
    dv_acc = zero_pieces(CONFIG.BLOCK_C, F)  # [BC, F]
    share = tl.load(lists.share)
    tiles = tl.where(exists, tl.load(lists.number + in_row), 0)
    tile_list = lists.tiles + (in_row - source) * lists.row_tiles  # rows of it are one cluster shorter
    for n in range((turn * share).to(tl.int32), tl.minimum(tiles, (turn + 1) * share).to(tl.int32)):
        tile = tl.load(tile_list + n)
        queries = tail_queries(tile, inputs, CONFIG, B)
        q_block = load_queries(inputs.q, queries, E)  # [BQ, E]
        grad_out = load_queries(above.grad_out, queries, F)  # [BQ, F]
        base, factor, delta, _places = load_totals(tile, totals, B)  # [1, BQ]
        s = row_products(k_block, q_block, CONFIG, B) * (inputs.scale * score_unit(CONFIG))  # [BC, BQ]
        s = tl.where(ok[:, None] & (factor != 0), s, -float("inf"))
        p = power(s, base, POWER) * factor  # [BC, BQ]
        dp = row_products(v_block, grad_out, CONFIG, B)  # [BC, BQ]
        dk_acc, dv_acc = add_pairs(
            dk_acc, dv_acc, p, dp, delta, key[:, None], queries, q_block, grad_out, inputs, CONFIG
        )
    if FIRST:
        start = tl.load(lists.further_ends + in_row) - tl.load(lists.further + in_row) + block
        one = tl.full([CONFIG.BLOCK_C], 1.0, tl.float32)  # [BC]
        for t in range(tl.maximum((tiles + share - 1) // share - 1, 0).to(tl.int32)):
            slot = (start + t * each) * CONFIG.BLOCK_C + lane  # [BC]
            dk_acc = add_scaled(dk_acc, one, load_pieces(lists.k_parts, slot, ok, E))
            dv_acc = add_scaled(dv_acc, one, load_pieces(lists.v_parts, slot, ok, F))
        store_pieces(dk + source * keys * E.SIZE, key, dk_acc, ok, E)
        store_pieces(dv + source * keys * F.SIZE, key, dv_acc, ok, F)
    else:
        slot = number * CONFIG.BLOCK_C + lane  # [BC]
        store_pieces(lists.k_parts, slot, dk_acc, ok, E)
        store_pieces(lists.v_parts, slot, dv_acc, ok, F)


@triton.jit
def load_keys(base, at, exists, E: tl.constexpr):
    """All pieces of the vectors base[at] as products take them."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        pieces += (for_product(load_piece(base, at, exists, n, E)),)
    return pieces
