"""Which clusters a tile of queries attends key by key, in Triton: the rule of `scram.spec.routing`.

The queries of a tile meet all centers twice, as matrix products: for the sum of each query's weights, and for the sum
over queries of the squares of the weights, with the clusters as rows. A second kernel chooses by falling importance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import RouteCall, Routed
from ....spec.grid import grid_of
from ....spec.routing import EVEN, MOST_SPREAD
from ....spec.schedule import TILE_QUERIES
from ..cluster_tail.table import BLOCK_BYTES, TABLE_BLOCK, Table, load_table, table_of, used_of
from ..primitives import (
    LOG2E,
    LOWEST,
    Geometry,
    for_product,
    geometry,
    lane_query,
    load_piece,
    points,
    power,
    product,
    softmax_step,
    tile_at,
    tile_block,
    tiles,
)
from ..runtime.block_sizes import ROUTE, ROUTE_EXACT, stages, tile_pieces
from ..runtime.launch import Flags, Kernel, cached, kinds, on_device

EVEN_IMPORTANCE = tl.constexpr(EVEN)
SPREAD = tl.constexpr(MOST_SPREAD)
CHOICE_NUMBERS = 1024  # clusters that a warp looks through; more have more warps


class Inputs(NamedTuple):
    """A RouteCall as kernels take it."""

    q: Tensor  # [B, H, *G, E]
    table: Table  # without values
    variance: Tensor  # float32 [B, Hc, E]
    geo: Geometry
    group: int  # rows of queries that share a row of clusters
    scale: float


class RouteConfig(NamedTuple):
    """What the kernel of the importance is compiled for."""

    NARROW: bool  # features of 16 bits; scores are over log 2 then
    BLOCK_C: int  # clusters per product


def route(call: RouteCall) -> Routed:
    q = call.q.contiguous()
    flags = _flags(q.ndim - 3, q.shape[-1], q.dtype, q.device)
    tiles_of_row = tiles(grid_of(q), flags["B"].TILE)
    shape = (*q.shape[:2], tiles_of_row)
    routes = torch.empty((*shape, call.words), dtype=torch.int32, device=q.device)
    number = torch.empty(shape, dtype=torch.int32, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    count = call.sizes.shape[-1]
    if not number.numel() or not count:
        return Routed(routes.zero_(), number.zero_(), lse.fill_(-torch.inf))
    with on_device(q):
        features = flags["E"]
        narrow = flags["CONFIG"].NARROW
        table = table_of(
            centers=call.centers,
            values=None,
            slope=None,
            sizes=call.sizes,
            spreads=call.spreads,
            features=features,
            value_features=features,
            narrow=narrow,
            dtypes=(q.dtype, q.dtype),
        )
        group = q.shape[1] // call.sizes.shape[1]
        inputs = Inputs(q, table, call.variance.contiguous(), geometry(grid_of(q), (1,)), group, call.scale)
        importance = torch.empty((number.numel(), table.padded), dtype=torch.float32, device=q.device)
        _importance(number.numel(), tuple(flags.items()), kinds(*inputs))(inputs, importance, lse)
        sizes = call.sizes.contiguous()
        choose = _choice(number.numel(), count, call.words, kinds(importance, sizes, routes))
        choose(importance, sizes, routes, number, table.padded, count, call.words, group * tiles_of_row, call.keys)
    return Routed(routes, number, lse)


@cached
def _flags(rank: int, width: int, dtype: torch.dtype, device: torch.device) -> Flags:
    narrow = dtype.itemsize == 2
    block, warps, most = ROUTE if narrow else ROUTE_EXACT
    features = tile_pieces(width, width, narrow)["E"]
    each = features.BLOCK * features.PIECES * dtype.itemsize
    block = min(block, TABLE_BLOCK)
    while block > 16 and block * each > BLOCK_BYTES:
        block //= 2
    most -= narrow and each > 128  # what a stage takes of wide vectors is better another program's
    ahead = stages(device, most, block * each, TILE_QUERIES * each)
    config = RouteConfig(NARROW=narrow, BLOCK_C=block)
    options = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
    return {"CONFIG": config, "B": tile_block(rank), "E": features, **options}


@cached
def _importance(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(importance_kernel, programs, dict(flags))


@cached
def _choice(programs: int, count: int, words: int, given: tuple[object, ...]) -> Kernel:
    block = triton.next_power_of_2(count)
    warps = min(8, max(1, block // CHOICE_NUMBERS))
    flags = {"BLOCK_C": block, "BLOCK_W": triton.next_power_of_2(words)}
    return Kernel(choice_kernel, programs, {**flags, "num_warps": warps, "enable_fp_fusion": True})


@triton.jit
def load_queries(base, query, ok, E: tl.constexpr):
    """Vectors of the queries as all their pieces [BQ, E], as products take them; zeros where not `ok`."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(E.PIECES)):
        pieces += (for_product(load_piece(base, query, ok, n, E)),)
    return pieces


@triton.jit
def mean_spread(q_block, number, source, inputs, E: tl.constexpr):
    """scale^2 sum_e u_e^2 variance_e, u the mean of `number` queries."""
    total = number * 0.0
    for n in tl.static_range(len(q_block)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        variance = tl.load(inputs.variance + source * E.SIZE + e, mask=e < E.SIZE, other=0.0)  # [E]
        mean = tl.sum(q_block[n].to(tl.float32), 0) / number  # [E]
        total += tl.sum(mean * mean * variance, 0)
    return total * (inputs.scale * inputs.scale)


@triton.jit
def importance_kernel(inputs, importance, all_lse, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr):
    """Program: tile."""
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    table = inputs.table
    tile = tl.program_id(0)
    row, corner = tile_at(tile, inputs.geo, B)
    query, exists = lane_query(corner, inputs.geo, B)
    source = (row // inputs.group).to(tl.int64)
    q_row = inputs.q + row * points(inputs.geo.q).to(tl.int64) * E.SIZE
    q_block = load_queries(q_row, query, exists, E)  # [BQ, E]
    scale = inputs.scale
    if CONFIG.NARROW:
        scale = inputs.scale * LOG2E
    lane = tl.arange(0, CONFIG.BLOCK_C)  # [BC]

    used = used_of(table, source)
    running_max = tl.full([B.BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    running_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    for start in range(0, used, CONFIG.BLOCK_C):
        slot = source * table.padded + start + lane  # [BC]
        s = tl.zeros([B.BLOCK_Q, CONFIG.BLOCK_C], tl.float32)  # [BQ, BC]
        for n in tl.static_range(len(q_block)):
            s = product(q_block[n], tl.trans(load_table(table.k, slot, n, E)), s)
        s = s * scale + tl.load(table.logs + slot)[None, :]
        running_max, rescale, p = softmax_step(running_max, s, None, POWER, False, 1)
        running_sum = running_sum * rescale + tl.sum(p, 1)
    counts = exists & (running_sum > 0)  # [BQ], of a query that is not finite it is NaN or 0
    some = tl.where(counts, running_sum, 1.0)  # [BQ]
    lse = running_max + (tl.log2(some) if CONFIG.NARROW else tl.log(some))  # [BQ]
    natural = lse / LOG2E if CONFIG.NARROW else lse  # [BQ]
    point = row * points(inputs.geo.q).to(tl.int64) + query  # [BQ]
    tl.store(all_lse + point, tl.where(counts, natural, -float("inf")), mask=exists)
    lse = tl.where(counts, lse, float("inf"))[None, :]  # [1, BQ]

    # Read again, without those: held all the while, they would take the registers of other programs.
    q_block = load_queries(q_row, query, counts, E)  # [BQ, E]
    number = tl.maximum(tl.sum(counts.to(tl.float32), 0), 1.0)
    spread = mean_spread(q_block, number, source, inputs, E)
    for start in range(0, used, CONFIG.BLOCK_C):
        slot = source * table.padded + start + lane  # [BC]
        s = tl.zeros([CONFIG.BLOCK_C, B.BLOCK_Q], tl.float32)  # [BC, BQ]
        for n in tl.static_range(len(q_block)):
            s = product(load_table(table.k, slot, n, E), tl.trans(q_block[n]), s)
        a = power(s * scale + tl.load(table.logs + slot)[:, None], lse, POWER)  # [BC, BQ]
        weight = tl.sqrt(tl.sum(a * a, 1) / number)  # [BC]
        error = tl.exp(tl.minimum(spread * tl.load(table.spreads + slot), SPREAD)) - 1 + EVEN_IMPORTANCE  # [BC]
        each = weight * error * tl.load(table.shares + slot)  # [BC]
        tl.store(importance + tile.to(tl.int64) * table.padded + start + lane, each)


@triton.jit
def choice_kernel(
    importance,
    sizes,
    routes,
    number,
    padded,
    count,
    words,
    group,
    keys,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The clusters of a tile by falling importance, while their keys fit. Program: tile; `group` share their sizes."""
    tile = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_C)  # [BC]
    w = tl.arange(0, BLOCK_W)  # [W]
    each = tl.load(importance + tile * padded + at, mask=at < count, other=0.0)  # [BC]
    size = tl.load(sizes + tile // group * count + at, mask=at < count, other=0)  # [BC]
    left = tl.cast(keys, tl.int32)
    each = tl.where((each > 0) & (size > 0) & (size <= left), each, 0.0)  # a NaN is none
    chosen = w * 0  # [W]
    best, cluster = tl.max(each, 0, return_indices=True)
    while best > 0:
        chosen |= tl.where(w == cluster // 32, 1 << (cluster & 31), 0)
        left -= tl.sum(tl.where(at == cluster, size, 0), 0)
        each = tl.where((at == cluster) | (size > left), 0.0, each)
        best, cluster = tl.max(each, 0, return_indices=True)
    tl.store(routes + tile * words + w, chosen, mask=w < words)
    tl.store(number + tile, keys - left)
