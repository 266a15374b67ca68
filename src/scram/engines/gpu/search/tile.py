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

from ....calls import Found, SearchCall
from ....schedule import KINDS, MOVES, STOP, TILE_QUERIES, offers, tile_shape, widest
from ..noise import absorb, below, row_state, seed_argument
from ..primitives import (
    Block,
    Geometry,
    divide,
    features,
    geometry,
    lane_place,
    lane_query,
    points,
    tile_at,
    tile_count,
    tiles,
)
from ..runtime.block_sizes import OFFER_WARPS, score_tile, search_tile
from ..runtime.launch import Kernel, cached, kinds, on_device
from ..runtime.layout import halves
from ..search.candidates import (
    Rules,
    along,
    around,
    at_axis,
    coordinate,
    legal_argument,
    legal_draw,
    near_start,
    score_of,
    starts_argument,
)
from ..search.query import start_kernel
from ..search.top_matches import NO_KEY, arrange, enter_offer, kept_matches, store_matches

GOSSIP, RANDOM = (tl.constexpr(KINDS[kind]) for kind in ("gossip", "random"))  # others move a neighbour's key


def tile_search(call: SearchCall) -> Found:
    q, k, matches, sweeps, warm = call.q.contiguous(), call.k.contiguous(), call.matches, call.sweeps, call.warm
    device, q_shape, k_shape = q.device, q.shape, k.shape
    index = torch.empty((*q_shape[:-1], matches), dtype=torch.int32, device=device)
    found = Found(index, torch.empty(index.shape, dtype=torch.float32, device=device))
    if index.numel() == 0:
        return found

    legal, seed = legal_argument(q, k, call.causal, call.key_mask), seed_argument(call.seed, call.rows)
    starts, radius = starts_argument(call), widest(k_shape[2:-1], call.reach, call.random)
    if warm is not None:
        warm = warm.contiguous()
    given = kinds(q, k, seed.pointer, legal.mask, warm, seed.rows, starts.index)
    plan = _plan(q_shape, k_shape, matches, call.causal, call.separation > 0, given)
    separation, group = min(call.separation, 2**31 - 1), q_shape[1] // k_shape[1]
    rows, queries = q_shape[0] * q_shape[1], index.numel() // (q_shape[0] * q_shape[1] * matches)

    with on_device(q):
        entries, kept = (1, 0) if warm is None else (min(matches, warm.shape[-1]), warm.shape[-1])
        planes = found if matches == 1 else _planes(found, entries)
        for entry in range(entries):
            field, best = found if matches == 1 else (planes.index[entry], planes.score[entry])
            limits = (seed, legal, starts, group, separation, plan.geo, entry)
            plan.start(q, k, planes.index, best, *limits, field, warm, kept, True, None, 0)
        if matches > 1:
            plan.arrange(*planes, *found, rows, queries, entries, matches)
        if sweeps:
            way = (call.jumps, call.propagate, call.gossip, len(plan.geo.k), radius)
            tables = _tables(min(sweeps, 2), way, device)
            most = plan.tiles * max(length for _, length in tables) * TILE_QUERIES
            room = torch.empty(most + rows * (sweeps + 1), dtype=torch.int32, device=device)
            offered, took = room, room[most:]
            offer = plan.offer.bind(index, offered, took, seed, legal, starts, sweeps, matches, plan.geo)
            scored = (q, k) if q.dtype.itemsize == 2 else (halves(q), halves(k))
            common = (starts, group, sweeps, matches, separation, plan.geo)
            score = plan.score.bind(*scored, *found, offered, took, *common)
            for sweep in range(1, sweeps + 1):
                table, length = tables[(sweep - 1) % len(tables)]
                offer(table, sweep, length)
                score(sweep, length)
        if q.dtype == torch.float32:  # halves lose some digits
            planes = found if matches == 1 else _planes(found, matches)
            plan.exact(q, k, index, *planes, group, matches, plan.geo)
            if matches > 1:
                plan.arrange(*planes, *found, rows, queries, matches, matches)
    return found


class Plan(NamedTuple):
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
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], matches: int, causal: bool, separated: bool,
    given: tuple[Any, ...],
) -> Plan:  # fmt: skip
    """The plan for tensors of these shapes and kinds: q, k, seed, mask, warm, rows, starts."""
    query_grid, key_grid, width = tuple(q_shape[2:-1]), tuple(k_shape[2:-1]), q_shape[-1]
    rows, dtype, holes = q_shape[0] * q_shape[1], given[0][1], given[3] is not None or given[6] is not None
    block = search_tile(len(key_grid), width, dtype)
    programs, tile = rows * tiles(query_grid, block["B"].TILE), tile_shape(len(key_grid))
    count = rows * tiles(query_grid, tile)
    # Without mask and reach every query has a match: there are no holes.
    flags = {"CAUSAL": causal, "HOLES": holes, "STOP": STOP, "B": Block(tile, TILE_QUERIES)}
    offer = {**flags, "SEVERAL": matches > 1, "num_warps": OFFER_WARPS, "enable_fp_fusion": True}
    return Plan(
        Kernel(start_kernel, programs, {"RULES": Rules(causal, separated, matches > 1), "KE": width, **block}),
        arrange(math.prod(q_shape[:-1]), by_key=True),
        Kernel(offer_kernel, count, offer),
        Kernel(score_offers_kernel, count, {**flags, **score_tile(width, dtype, matches, separated)}),
        Kernel(exact_kernel, programs, block),
        count,
        geometry(query_grid, key_grid),
    )


@cached
def _tables(sweeps: int, way: tuple[Any, ...], device: torch.device) -> list[tuple[Tensor, int]]:
    """For odd and for even sweeps the table [offers, 3] of kind, reach and draw, on the device, and its length.

    `way`: what `schedule.offers` takes after the sweep.
    """
    every = []
    for sweep in range(1, sweeps + 1):
        made = offers(sweep, *way)
        # Past every grid a neighbour is not there: no step overflows 32 bits.
        reaches = {kind: 2**30 if move else 2**30 // TILE_QUERIES for kind, move in MOVES.items()}
        rows = [(KINDS[one.kind], min(one.reach, reaches.get(one.kind, one.reach)), one.draw) for one in made]
        every.append((torch.tensor(rows or [(0, 0, 0)], dtype=torch.int32).to(device), len(rows)))
    return every


def _planes(found: Found, count: int) -> Found:
    """Room for `count` keys and scores per query, [count, P] each."""
    points = found.index.numel() // found.index.shape[-1]
    return Found(found.index.new_empty((count, points)), found.score.new_empty((count, points)))


@triton.jit
def going(took, row, sweep, sweeps, queries, STOP: tl.constexpr):
    """Whether enough queries of the row took a key in the sweep before."""
    count = tl.load(took + row.to(tl.int64) * (sweeps + 1) + sweep - 1).to(tl.int64)
    return (sweep == 1) | (count * STOP >= queries)


@triton.jit
def offer_kernel(
    state, offered, took, seed, legal, starts, sweeps, kappa, geo, table, sweep, length,
    CAUSAL: tl.constexpr, SEVERAL: tl.constexpr, HOLES: tl.constexpr, B: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """What the queries of a tile offer in a sweep, [offers, BLOCK_Q]. A query off the grid does as the first one."""
    number = tl.program_id(0)
    row, corner = tile_at(number, geo, B)
    lane, exists = lane_query(corner, geo, B)
    queries, keys = points(geo.q), points(geo.k)
    query, diagonal = lane * 0, lane * 0
    for a in tl.static_range(len(corner)):
        query = query * geo.q[a] + corner[a]
        diagonal += tl.where(exists, lane_place(corner, a, B), corner[a])
    query = tl.where(exists, lane, query)
    mask_row = (row // legal.heads).to(tl.int64)
    matches = state + row.to(tl.int64) * queries * kappa
    draws = absorb(absorb(absorb(row_state(seed, row), query), query * 0), sweep)
    out = offered + number.to(tl.int64) * length * B.BLOCK_Q + tl.arange(0, B.BLOCK_Q)
    goes = going(took, row, sweep, sweeps, queries, STOP)
    first = number % tile_count(geo, B) == 0  # one tile clears the count of the row: all of them would queue
    tl.store(took + row.to(tl.int64) * (sweeps + 1) + sweep, 0, mask=first)
    best, entry = tl.load(matches + query.to(tl.int64) * kappa), query * 0
    own = best
    for n in range(tl.where(goes, length, 0)):
        kind, reach, draw = tl.load(table + 3 * n), tl.load(table + 3 * n + 1), tl.load(table + 3 * n + 2)
        if SEVERAL:
            entry = (query + n + sweep) % tl.where(sweep > 1, kappa, 1)
            own = tl.load(matches + query.to(tl.int64) * kappa + entry)
        if kind == GOSSIP:
            source = below(absorb(draws, draw), queries)
            found = tl.load(matches + source.to(tl.int64) * kappa + entry)
        elif kind == RANDOM:
            found = around(draws, draw, own, reach, starts, geo)
            if SEVERAL or HOLES:
                if starts.index is None:
                    fresh, some = legal_draw(absorb(draws, draw + len(corner)), query, legal, mask_row, keys, CAUSAL)
                    fresh = tl.where(some, fresh, -1)
                else:
                    fresh = near_start(draws, draw, row.to(tl.int64) * queries + query, entry, query >= 0, starts, geo)
                found = tl.where(own >= 0, found, fresh)
        else:
            direction = (diagonal + sweep + draw) % (2 * len(corner))
            axis = direction // 2
            far = tl.where(kind != 0, reach, reach * at_axis(axis, B.TILE))
            step = tl.where(direction % 2 == 0, -far, far)
            here, extent, key_extent, up, down = along(axis, corner, geo, B)
            here = tl.where(exists, here, at_axis(axis, corner))
            there = (here + step).to(tl.uint32) < extent.to(tl.uint32)
            source = tl.where(there, query + step * up, 0)
            found = tl.load(matches + source.to(tl.int64) * kappa + entry, mask=there, other=-1)
            at = coordinate(tl.maximum(found, 0), axis, geo)
            moved = (found >= 0) & ((at + kind * step).to(tl.uint32) < key_extent.to(tl.uint32))
            found = tl.where(moved, found + kind * step * down, -1)
        if legal.mask is not None:
            allowed = tl.load(legal.mask + mask_row * keys + tl.maximum(found, 0), mask=found >= 0, other=0)
            found = tl.where(allowed != 0, found, -1)
        tl.store(out + n * B.BLOCK_Q, tl.where(found >= 0, found, tl.where(own >= 0, own, best)))


@triton.jit
def score_offers_kernel(
    q, k, state, score, offered, took, starts, group, sweeps, kappa, separation, geo, sweep, length,
    CAUSAL: tl.constexpr, HOLES: tl.constexpr, STOP: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr,
    HALVES: tl.constexpr, PLACES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Every query of a tile scores what all its queries offer, BLOCK_Q keys at a time, and keeps its best.

    A row is E features, or the two HALVES of each.
    """
    number = tl.program_id(0)
    row, corner = tile_at(number, geo, B)
    query, valid = lane_query(corner, geo, B)
    queries, keys = points(geo.q), points(geo.k)
    point = row.to(tl.int64) * queries + query
    k_row = k + (row // group).to(tl.int64) * keys * (HALVES * ROW.E)
    e = tl.arange(0, ROW.W)
    q_rows = q + point[:, None] * (HALVES * ROW.E) + e[None, :]
    mine = piece(q_rows, valid[:, None] & (e < ROW.E)[None, :], WIDEN)
    rest = piece(q_rows + (HALVES - 1) * ROW.E, valid[:, None] & (e < ROW.E)[None, :], WIDEN)
    list_of = offered + number.to(tl.int64) * length * B.BLOCK_Q
    total = tl.where(going(took, row, sweep, sweeps, queries, STOP), length * B.BLOCK_Q, 0)
    reach = tl.cast(separation, tl.uint32)
    there = valid if PLACES.COLUMNS == 1 else valid[:, None]
    changed = there & ~there
    if PLACES.COLUMNS == 1:
        key = tl.load(state + point, mask=valid, other=-1)
        best = tl.load(score + point, mask=valid, other=float("inf"))
    else:
        kept, its, spots = kept_matches(state, score, point, valid, kappa, geo, PLACES)

    for begin in range(0, total, B.BLOCK_Q):
        lane = begin + tl.arange(0, B.BLOCK_Q)
        new = tl.load(list_of + lane)
        k_rows = k_row + tl.maximum(new, 0).to(tl.int64)[None, :] * (HALVES * ROW.E) + e[:, None]
        s = products(q_rows, k_rows, mine, rest, valid, ROW, HALVES, WIDEN)
        if HOLES:
            s = tl.where((new >= 0)[None, :], s, -float("inf"))
        if CAUSAL:
            s = tl.where(new[None, :] <= query[:, None], s, -float("inf"))
        if starts.index is not None:
            s = tl.where(reached(tl.maximum(new, 0), point, valid, starts, geo), s, -float("inf"))
        # Most offers hold nothing new: then it does not matter which key it is.
        if PLACES.COLUMNS == 1:
            top = tl.max(s, axis=1)
            better = top > best
            if tl.max(better.to(tl.int32), axis=0) > 0:
                which = tl.load(list_of + lane)  # anew: nothing of it stays in registers meanwhile
                key = tl.where(better, tl.min(tl.where(s == top[:, None], which[None, :], NO_KEY), axis=1), key)
                best = tl.where(better, top, best)
                changed = changed | better
        else:
            kept, its, spots, changed = enter_offer(kept, its, spots, changed, s, new, reach, geo, PLACES)

    if total > 0:
        if PLACES.COLUMNS == 1:
            tl.store(state + point, key, mask=valid)
            tl.store(score + point, best, mask=valid)
        else:
            store_matches(state, score, point, valid, kappa, kept, its)
        tl.atomic_add(took + row.to(tl.int64) * (sweeps + 1) + sweep, tl.sum((changed & there).to(tl.int32)))


@triton.jit
def reached(new, point, valid, starts, geo):
    """Whether each key is near enough to a start of each query, [BLOCK_Q, BLOCK_Q]."""
    some = (point[:, None] < 0) & (new < 0)[None, :]
    for n in range(starts.count):
        start, key = tl.load(starts.index + point * starts.count + n, mask=valid, other=0), new
        close = (point[:, None] >= 0) & (new >= 0)[None, :]
        for a in tl.static_range(len(geo.k) - 1, -1, -1):
            start_up = divide(start, geo.magic[a]) if a > 0 else start * 0
            key_up = divide(key, geo.magic[a]) if a > 0 else key * 0
            apart = (start - start_up * geo.k[a])[:, None] - (key - key_up * geo.k[a])[None, :]
            close = close & (tl.abs(apart) <= starts.reach[a])
            start, key = start_up, key_up
        some = some | close
    return some


@triton.jit
def products(q_rows, k_rows, mine, rest, valid, ROW: tl.constexpr, HALVES: tl.constexpr, WIDEN: tl.constexpr):
    """Scores [BLOCK_Q, BLOCK_Q] of queries and keys. `mine` and `rest` are the halves of the queries' first pieces."""
    e = tl.arange(0, ROW.W)
    if ROW.PIECES == 1:
        theirs = piece(k_rows, (e < ROW.E)[:, None], WIDEN)
        s = tl.dot(mine, theirs)
        if HALVES == 2:
            low = piece(k_rows + ROW.E, (e < ROW.E)[:, None], WIDEN)
            small = tl.dot(rest, theirs, tl.dot(mine, low, tl.dot(rest, low)))
    else:
        s = tl.zeros([mine.shape[0], k_rows.shape[1]], tl.float32)
        small = s
        for p in range(ROW.PIECES):
            part = e + p * ROW.W < ROW.E
            ours = piece(q_rows + p * ROW.W, valid[:, None] & part[None, :], WIDEN)
            theirs = piece(k_rows + p * ROW.W, part[:, None], WIDEN)
            s = tl.dot(ours, theirs, s)
            if HALVES == 2:
                low = piece(k_rows + p * ROW.W + ROW.E, part[:, None], WIDEN)
                rest = piece(q_rows + p * ROW.W + ROW.E, valid[:, None] & part[None, :], WIDEN)
                small = tl.dot(rest, theirs, tl.dot(ours, low, tl.dot(rest, low, small)))
    if HALVES == 2:
        s = tl.where(tl.abs(s) < float("inf"), s + small, s)  # zero times infinity is none of ours
    return s


@triton.jit
def piece(rows, exists, WIDEN: tl.constexpr):
    x = tl.load(rows, mask=exists, other=0.0)
    return x.to(tl.float32) if WIDEN else x


@triton.jit
def exact_kernel(q, k, index, index_out, score_out, group, kappa, geo, B: tl.constexpr, ROW: tl.constexpr):
    """The scores of the matches [P, kappa] anew, in float32 without the matrix unit, to planes [kappa, P]."""
    row, corner = tile_at(tl.program_id(0), geo, B)
    query, valid = lane_query(corner, geo, B)
    queries, keys = points(geo.q).to(tl.int64), points(geo.k)
    point = row * queries + query
    k_row = k + (row // group).to(tl.int64) * keys * ROW.E
    mine = features(q + row * queries * ROW.E, query, valid, ROW)
    plane = queries * (tl.num_programs(0) // tile_count(geo, B))
    for c in range(kappa):
        key = tl.load(index + point * kappa + c, mask=valid, other=-1)
        s = score_of(mine, k_row, tl.maximum(key, 0), key >= 0, ROW)
        tl.store(index_out + c * plane + point, key, mask=valid)
        tl.store(score_out + c * plane + point, tl.where(key >= 0, s, -float("inf")), mask=valid)
