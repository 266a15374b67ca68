"""Tile search in Triton: in each sweep one launch writes what the queries offer, one scores it by matrix products.

State is [P, kappa], best first, and is read by others only while offers are made: one buffer serves. Offers are
[tiles, offers, TILE_QUERIES] keys, -1 for none.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import Found, SearchCall
from ....spec.schedule import KINDS, MOVES, STOP, TILE_QUERIES, offers, tile_shape, widest
from ..noise import absorb, below, row_state, seed_argument
from ..primitives import (
    Block,
    Geometry,
    divide,
    geometry,
    lane_place,
    lane_query,
    load_float32,
    points,
    tile_at,
    tile_count,
    tiles,
)
from ..runtime.block_sizes import OFFER_WARPS, score_tile, search_tile
from ..runtime.launch import Kernel, cached, kinds, on_device
from ..runtime.layout import halves
from .candidates import (
    Rules,
    allowed_argument,
    along,
    around,
    at_axis,
    coordinate,
    draw_allowed,
    near_start,
    score_of,
    starts_argument,
)
from .query import start_kernel
from .top_matches import NO_KEY, arrange, enter_offer, load_matches, store_matches

GOSSIP = tl.constexpr(KINDS["gossip"])  # kinds but these two move a neighbor's key
RANDOM = tl.constexpr(KINDS["random"])


def tile_search(call: SearchCall) -> Found:
    q = call.q.contiguous()
    k = call.k.contiguous()
    matches = call.matches
    sweeps = call.sweeps
    warm = call.warm
    q_shape = q.shape
    k_shape = k.shape
    device = q.device
    index = torch.empty((*q_shape[:-1], matches), dtype=torch.int32, device=device)
    result = Found(index, torch.empty(index.shape, dtype=torch.float32, device=device))
    if index.numel() == 0:
        return result

    allowed = allowed_argument(q, k, False, call.key_mask)
    seed = seed_argument(call.seed, call.rows)
    starts = starts_argument(call)
    radius = widest(k_shape[2:-1], call.reach, call.random)
    if warm is not None:
        warm = warm.contiguous()
    given = kinds(q, k, seed.pointer, allowed.mask, warm, seed.rows, starts.index)
    plan = _plan(q_shape, k_shape, matches, call.separation > 0, given)
    separation = min(call.separation, 2**31 - 1)
    group = q_shape[1] // k_shape[1]
    rows = q_shape[0] * q_shape[1]
    queries = index.numel() // (rows * matches)

    with on_device(q):
        entries, kept = (1, 0) if warm is None else (min(matches, warm.shape[-1]), warm.shape[-1])
        planes = result if matches == 1 else _planes(result, entries)
        for entry in range(entries):
            field, best = result if matches == 1 else (planes.index[entry], planes.score[entry])
            limits = (seed, allowed, starts, group, separation, plan.geo, entry)
            plan.start(q, k, planes.index, best, *limits, field, warm, kept, True, None, 0)
        if matches > 1:
            plan.arrange(*planes, *result, rows, queries, entries, matches)
        if sweeps:
            settings = (call.jumps, call.propagate, call.gossip, len(plan.geo.k), radius)
            tables = _tables(min(sweeps, 2), settings, device)
            most = plan.tiles * max(length for _, length in tables) * TILE_QUERIES
            room = torch.empty(most + rows * (sweeps + 1), dtype=torch.int32, device=device)
            offered = room
            took = room[most:]
            offer = plan.offer.bind(index, offered, took, seed, allowed, starts, sweeps, matches, plan.geo)
            scored = (q, k) if q.dtype.itemsize == 2 else (halves(q), halves(k))
            common = (starts, group, sweeps, matches, separation, plan.geo)
            score = plan.score.bind(*scored, *result, offered, took, *common)
            for sweep in range(1, sweeps + 1):
                table, length = tables[(sweep - 1) % len(tables)]
                offer(table, sweep, length)
                score(sweep, length)
        if q.dtype == torch.float32:  # halves lose some digits
            planes = result if matches == 1 else _planes(result, matches)
            plan.exact(q, k, index, *planes, group, matches, plan.geo)
            if matches > 1:
                plan.arrange(*planes, *result, rows, queries, matches, matches)
    return result


class TileKernels(NamedTuple):
    """The kernels of a search, how many tiles there are, and the numbers that the shapes give."""

    start: Kernel
    arrange: Kernel
    offer: Kernel
    score: Kernel
    exact: Kernel
    tiles: int
    geo: Geometry


@cached
def _plan(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    matches: int,
    separated: bool,
    given: tuple[Any, ...],
) -> TileKernels:
    """The plan for tensors of these shapes and kinds: q, k, seed, mask, warm, rows, starts."""
    query_grid = tuple(q_shape[2:-1])
    key_grid = tuple(k_shape[2:-1])
    width = q_shape[-1]
    rows = q_shape[0] * q_shape[1]
    dtype = given[0][1]
    holes = given[3] is not None or given[6] is not None
    block = search_tile(len(key_grid), width, dtype)
    programs = rows * tiles(query_grid, block["B"].TILE)
    tile = tile_shape(len(key_grid))
    count = rows * tiles(query_grid, tile)
    # Without mask and reach every query has a match: there are no holes.
    flags = {"HOLES": holes, "STOP": STOP, "B": Block(tile, TILE_QUERIES)}
    offer = {**flags, "SEVERAL": matches > 1, "num_warps": OFFER_WARPS, "enable_fp_fusion": True}
    return TileKernels(
        Kernel(start_kernel, programs, {"RULES": Rules(False, separated, matches > 1), "PADDED": width, **block}),
        arrange(math.prod(q_shape[:-1]), by_key=True),
        Kernel(offer_kernel, count, offer),
        Kernel(score_offers_kernel, count, {**flags, **score_tile(width, dtype, matches, separated)}),
        Kernel(exact_kernel, programs, block),
        count,
        geometry(query_grid, key_grid),
    )


@cached
def _tables(sweeps: int, settings: tuple[Any, ...], device: torch.device) -> list[tuple[Tensor, int]]:
    """For odd and for even sweeps the table [offers, 3] of kind, reach and draw, on the device, and its length.

    `settings`: what `schedule.offers` takes after the sweep.
    """
    tables = []
    for sweep in range(1, sweeps + 1):
        # Past every grid a neighbor is not there: no step overflows 32 bits.
        reaches = {kind: 2**30 if move else 2**30 // TILE_QUERIES for kind, move in MOVES.items()}
        lines = [
            (KINDS[one.kind], min(one.reach, reaches.get(one.kind, one.reach)), one.draw)
            for one in offers(sweep, *settings)
        ]
        tables.append((torch.tensor(lines or [(0, 0, 0)], dtype=torch.int32, device=device), len(lines)))
    return tables


def _planes(result: Found, count: int) -> Found:
    """Room for `count` keys and scores per query, [count, P] each."""
    points = result.index.numel() // result.index.shape[-1]
    return Found(result.index.new_empty((count, points)), result.score.new_empty((count, points)))


@triton.jit
def going(took, row, sweep, sweeps, queries, STOP: tl.constexpr):
    """Whether enough queries of the row took a key in the sweep before."""
    count = tl.load(took + row.to(tl.int64) * (sweeps + 1) + sweep - 1).to(tl.int64)
    return (sweep == 1) | (count * STOP >= queries)


@triton.jit
def offer_kernel(
    state,
    offered,
    took,
    seed,
    allowed,
    starts,
    sweeps,
    kappa,
    geo,
    table,
    sweep,
    length,
    SEVERAL: tl.constexpr,
    HOLES: tl.constexpr,
    B: tl.constexpr,
    STOP: tl.constexpr,
):
    """What the queries of a tile offer in a sweep, [offers, BQ]. A query off the grid does as the first one."""
    number = tl.program_id(0)
    row, corner = tile_at(number, geo, B)
    lane, exists = lane_query(corner, geo, B)
    queries = points(geo.q)
    keys = points(geo.k)
    query = lane * 0  # [BQ]
    diagonal = lane * 0  # [BQ]
    for a in tl.static_range(len(corner)):
        query = query * geo.q[a] + corner[a]
        diagonal += tl.where(exists, lane_place(corner, a, B), corner[a])
    query = tl.where(exists, lane, query)
    mask_row = (row // allowed.group).to(tl.int64)
    matches = state + row.to(tl.int64) * queries * kappa
    draws = absorb(absorb(absorb(row_state(seed, row), query), query * 0), sweep)  # [BQ]
    out = offered + number.to(tl.int64) * length * B.BLOCK_Q + tl.arange(0, B.BLOCK_Q)  # [BQ]
    goes = going(took, row, sweep, sweeps, queries, STOP)
    first = number % tile_count(geo, B) == 0  # one tile clears the count of the row: all of them would queue
    tl.store(took + row.to(tl.int64) * (sweeps + 1) + sweep, 0, mask=first)
    best = tl.load(matches + query.to(tl.int64) * kappa)  # [BQ]
    entry = query * 0  # [BQ]
    own = best  # [BQ]
    for n in range(tl.where(goes, length, 0)):
        kind = tl.load(table + 3 * n)
        reach = tl.load(table + 3 * n + 1)
        draw = tl.load(table + 3 * n + 2)
        if SEVERAL:
            entry = (query + n + sweep) % tl.where(sweep > 1, kappa, 1)
            own = tl.load(matches + query.to(tl.int64) * kappa + entry)  # [BQ]
        if kind == GOSSIP:
            source = below(absorb(draws, draw), queries)  # [BQ]
            key = tl.load(matches + source.to(tl.int64) * kappa + entry)  # [BQ]
        elif kind == RANDOM:
            key = around(draws, draw, own, reach, starts, geo)  # [BQ]
            if SEVERAL or HOLES:
                if starts.index is None:
                    bits = absorb(draws, draw + len(corner))
                    fresh, any_key = draw_allowed(bits, query, allowed, mask_row, keys, False)
                    fresh = tl.where(any_key, fresh, -1)
                else:
                    point = row.to(tl.int64) * queries + query  # [BQ]
                    fresh = near_start(draws, draw, point, entry, query >= 0, starts, geo)
                key = tl.where(own >= 0, key, fresh)
        else:
            direction = (diagonal + sweep + draw) % (2 * len(corner))  # [BQ]
            axis = direction // 2
            far = tl.where(kind != 0, reach, reach * at_axis(axis, B.TILE))
            step = tl.where(direction % 2 == 0, -far, far)
            place, extent, key_extent, q_stride, k_stride = along(axis, corner, geo, B)
            place = tl.where(exists, place, at_axis(axis, corner))
            on_grid = (place + step).to(tl.uint32) < extent.to(tl.uint32)  # [BQ]
            source = tl.where(on_grid, query + step * q_stride, 0)
            key = tl.load(matches + source.to(tl.int64) * kappa + entry, mask=on_grid, other=-1)  # [BQ]
            key_place = coordinate(tl.maximum(key, 0), axis, geo)
            moved = (key >= 0) & ((key_place + kind * step).to(tl.uint32) < key_extent.to(tl.uint32))
            key = tl.where(moved, key + kind * step * k_stride, -1)
        if allowed.mask is not None:
            unmasked = tl.load(allowed.mask + mask_row * keys + tl.maximum(key, 0), mask=key >= 0, other=0)  # [BQ]
            key = tl.where(unmasked != 0, key, -1)
        tl.store(out + n * B.BLOCK_Q, tl.where(key >= 0, key, tl.where(own >= 0, own, best)))


@triton.jit
def score_offers_kernel(
    q,
    k,
    state,
    score,
    offered,
    took,
    starts,
    group,
    sweeps,
    kappa,
    separation,
    geo,
    sweep,
    length,
    HOLES: tl.constexpr,
    STOP: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    HALVES: tl.constexpr,
    PLACES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Every query of a tile scores what all its queries offer, BQ keys at a time, and keeps its best.

    A vector is E.SIZE features, or the two HALVES of each.
    """
    number = tl.program_id(0)
    row, corner = tile_at(number, geo, B)
    query, exists = lane_query(corner, geo, B)
    queries = points(geo.q)
    keys = points(geo.k)
    point = row.to(tl.int64) * queries + query  # [BQ]
    k_row = k + (row // group).to(tl.int64) * keys * (HALVES * E.SIZE)
    e = tl.arange(0, E.BLOCK)  # [E]
    q_place = q + point[:, None] * (HALVES * E.SIZE) + e[None, :]  # [BQ, E]
    q_block = load_part(q_place, exists[:, None] & (e < E.SIZE)[None, :], WIDEN)  # [BQ, E]
    q_low = load_part(q_place + (HALVES - 1) * E.SIZE, exists[:, None] & (e < E.SIZE)[None, :], WIDEN)  # [BQ, E]
    offer_list = offered + number.to(tl.int64) * length * B.BLOCK_Q
    total = tl.where(going(took, row, sweep, sweeps, queries, STOP), length * B.BLOCK_Q, 0)
    reach = tl.cast(separation, tl.uint32)
    counted = exists if PLACES.COLUMNS == 1 else exists[:, None]  # [BQ] or [BQ, 1]
    changed = counted & ~counted
    if PLACES.COLUMNS == 1:
        key = tl.load(state + point, mask=exists, other=-1)  # [BQ]
        best = tl.load(score + point, mask=exists, other=float("inf"))  # [BQ]
    else:
        kept, kept_scores, spots = load_matches(state, score, point, exists, kappa, geo, PLACES)

    for begin in range(0, total, B.BLOCK_Q):
        lane = begin + tl.arange(0, B.BLOCK_Q)  # [BQ]
        new = tl.load(offer_list + lane)  # [BQ]
        k_place = k_row + tl.maximum(new, 0).to(tl.int64)[None, :] * (HALVES * E.SIZE) + e[:, None]  # [E, BQ]
        s = offer_scores(q_place, k_place, q_block, q_low, exists, E, HALVES, WIDEN)  # [BQ, BQ]
        if HOLES:
            s = tl.where((new >= 0)[None, :], s, -float("inf"))
        if starts.index is not None:
            s = tl.where(reached(tl.maximum(new, 0), point, exists, starts, geo), s, -float("inf"))
        # Most offers hold nothing new: then it does not matter which key it is.
        if PLACES.COLUMNS == 1:
            top = tl.max(s, axis=1)  # [BQ]
            better = top > best
            if tl.max(better.to(tl.int32), axis=0) > 0:
                which = tl.load(offer_list + lane)  # anew: nothing of it stays in registers meanwhile
                key = tl.where(better, tl.min(tl.where(s == top[:, None], which[None, :], NO_KEY), axis=1), key)
                best = tl.where(better, top, best)
                changed = changed | better
        else:
            kept, kept_scores, spots, changed = enter_offer(
                kept, kept_scores, spots, changed, s, new, reach, geo, PLACES
            )

    if total > 0:
        if PLACES.COLUMNS == 1:
            tl.store(state + point, key, mask=exists)
            tl.store(score + point, best, mask=exists)
        else:
            store_matches(state, score, point, exists, kappa, kept, kept_scores)
        tl.atomic_add(took + row.to(tl.int64) * (sweeps + 1) + sweep, tl.sum((changed & counted).to(tl.int32)))


@triton.jit
def reached(new, point, exists, starts, geo):
    """Whether each key is near enough to a start of each query, [BQ, BQ]."""
    ok = (point[:, None] < 0) & (new < 0)[None, :]
    for n in range(starts.count):
        start = tl.load(starts.index + point * starts.count + n, mask=exists, other=0)  # [BQ]
        key = new  # [BQ]
        close = (point[:, None] >= 0) & (new >= 0)[None, :]
        for a in tl.static_range(len(geo.k) - 1, -1, -1):
            start_rest = divide(start, geo.magic[a]) if a > 0 else start * 0
            key_rest = divide(key, geo.magic[a]) if a > 0 else key * 0
            apart = (start - start_rest * geo.k[a])[:, None] - (key - key_rest * geo.k[a])[None, :]
            close = close & (tl.abs(apart) <= starts.reach[a])
            start = start_rest
            key = key_rest
        ok = ok | close
    return ok


@triton.jit
def offer_scores(q_place, k_place, q_block, q_low, exists, E: tl.constexpr, HALVES: tl.constexpr, WIDEN: tl.constexpr):
    """Scores [BQ, BQ] of queries and keys. `q_block` and `q_low` are the halves of the queries' first pieces."""
    e = tl.arange(0, E.BLOCK)  # [E]
    if E.PIECES == 1:
        k_block = load_part(k_place, (e < E.SIZE)[:, None], WIDEN)  # [E, BQ]
        s = tl.dot(q_block, k_block)  # [BQ, BQ]
        if HALVES == 2:
            k_low = load_part(k_place + E.SIZE, (e < E.SIZE)[:, None], WIDEN)  # [E, BQ]
            small = tl.dot(q_low, k_block, tl.dot(q_block, k_low, tl.dot(q_low, k_low)))  # [BQ, BQ]
    else:
        s = tl.zeros([q_block.shape[0], k_place.shape[1]], tl.float32)  # [BQ, BQ]
        small = s
        for p in range(E.PIECES):
            inside = e + p * E.BLOCK < E.SIZE  # [E]
            q_piece = load_part(q_place + p * E.BLOCK, exists[:, None] & inside[None, :], WIDEN)  # [BQ, E]
            k_block = load_part(k_place + p * E.BLOCK, inside[:, None], WIDEN)  # [E, BQ]
            s = tl.dot(q_piece, k_block, s)
            if HALVES == 2:
                k_low = load_part(k_place + p * E.BLOCK + E.SIZE, inside[:, None], WIDEN)  # [E, BQ]
                q_low = load_part(q_place + p * E.BLOCK + E.SIZE, exists[:, None] & inside[None, :], WIDEN)
                small = tl.dot(q_low, k_block, tl.dot(q_piece, k_low, tl.dot(q_low, k_low, small)))
    if HALVES == 2:
        s = tl.where(tl.abs(s) < float("inf"), s + small, s)  # zero times infinity is none of ours
    return s


@triton.jit
def load_part(place, exists, WIDEN: tl.constexpr):
    x = tl.load(place, mask=exists, other=0.0)
    return x.to(tl.float32) if WIDEN else x


@triton.jit
def exact_kernel(q, k, index, index_out, score_out, group, kappa, geo, B: tl.constexpr, E: tl.constexpr):
    """The scores of the matches [P, kappa] anew, in float32 without the matrix unit, to planes [kappa, P]."""
    row, corner = tile_at(tl.program_id(0), geo, B)
    query, exists = lane_query(corner, geo, B)
    queries = points(geo.q).to(tl.int64)
    keys = points(geo.k)
    point = row * queries + query  # [BQ]
    k_row = k + (row // group).to(tl.int64) * keys * E.SIZE
    q_block = load_float32(q + row * queries * E.SIZE, query, exists, E)  # [BQ, E]
    plane = queries * (tl.num_programs(0) // tile_count(geo, B))
    for c in range(kappa):
        key = tl.load(index + point * kappa + c, mask=exists, other=-1)  # [BQ]
        s = score_of(q_block, k_row, tl.maximum(key, 0), key >= 0, E)  # [BQ]
        tl.store(index_out + c * plane + point, key, mask=exists)
        tl.store(score_out + c * plane + point, tl.where(key >= 0, s, -float("inf")), mask=exists)
