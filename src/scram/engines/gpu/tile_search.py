"""Tile search in Triton: in each sweep one launch writes what the queries offer, one weighs it by matrix products.

State is [P, kappa], best first, and is read by others only while offers are made: one buffer serves. Offers are
[tiles, offers, LANES] keys, -1 for none.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grid import LegalKeys
from ...schedule import KINDS, LANES, STOP, WINDOWS, offers
from .block_sizes import OFFER_WARPS, search_tile, weigh_tile
from .candidates import around, coordinate, legal_draw, score_of
from .grid import GEOMETRY, features, geometry, lane_place, lane_query, points, tile_at, tile_shape, tiles
from .launch import Kernel, kinds, on_device
from .layout import halves
from .noise import absorb, below, row_state, seed_arguments
from .search import start_kernel, tile_count
from .top_matches import (
    NO_KEY,
    arrange_kernel,
    enter,
    first_keys,
    kept_matches,
    least,
    quarters,
    store_matches,
    window_bests,
)

SHIFT, GOSSIP, RANDOM = (tl.constexpr(KINDS[kind]) for kind in ("shift", "gossip", "random"))


def tile_search(
    q: Tensor,
    k: Tensor,
    seed: Tensor,
    key_mask: Tensor | None,
    warm: Tensor | None,
    *,
    matches: int,
    separation: int,
    sweeps: int,
    jumps: tuple[int, ...],
    propagate: str,
    gossip: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """q [B, H, *G, E], k [B, Hk, *G', E], warm int32 [B, H, *G, any] -> index int32, score f32 [B, H, *G, kappa]."""
    q, k = q.contiguous(), k.contiguous()
    device, q_shape, k_shape = q.device, q.shape, k.shape
    index = torch.empty((*q_shape[:-1], matches), dtype=torch.int32, device=device)
    score = torch.empty(index.shape, dtype=torch.float32, device=device)
    if index.numel() == 0:
        return index, score

    lists: tuple[Any, ...] = (None, None, None, 1)
    if key_mask is not None:
        legal = LegalKeys.of(q, k, causal, key_mask.contiguous())
        assert legal.order is not None
        lists = (legal.mask, legal.order.contiguous(), legal.count, legal.heads_per_row)
    if warm is not None:
        warm = warm.contiguous()
    seeds, given = seed_arguments(seed), kinds(q, k, seed_arguments(seed)[0], lists[0], warm)
    plan = _plan(q_shape, k_shape, matches, causal, separation > 0, given)
    separation, group = min(separation, 2**31 - 1), q_shape[1] // k_shape[1]
    rows, queries = q_shape[0] * q_shape[1], index.numel() // (q_shape[0] * q_shape[1] * matches)

    with on_device(q):
        entries = 1 if warm is None else min(matches, warm.shape[-1])
        planes = (index, score) if matches == 1 else _planes(index, score, entries)
        for entry in range(entries):
            field, best = (index, score) if matches == 1 else (planes[0][entry], planes[1][entry])
            limits = (*seeds, *lists, group, separation, *plan.extents, entry)
            plan.start(q, k, planes[0], best, *limits, field, warm, 0 if warm is None else warm.shape[-1], 1, None, 0)
        if matches > 1:
            plan.arrange(*planes, index, score, rows, queries, entries, matches)
        if sweeps:
            tables = _tables(min(sweeps, 2), jumps, propagate, gossip, tuple(k_shape[2:-1]), device)
            most = max(length for _, length in tables)
            room = torch.empty(plan.tiles * most * LANES + rows * (sweeps + 1), dtype=torch.int32, device=device)
            offered, took = room, room[plan.tiles * most * LANES :]
            offer = plan.offer.bind(index, offered, took, *seeds, *lists, sweeps, matches, *plan.extents)
            weighed = (q, k) if q.dtype.itemsize == 2 else (halves(q), halves(k))
            weigh = plan.weigh.bind(
                *weighed, index, score, offered, took, group, sweeps, matches, separation, *plan.extents
            )
            for sweep in range(1, sweeps + 1):
                table, length = tables[(sweep - 1) % len(tables)]
                offer(table, sweep, length)
                weigh(sweep, length)
        if q.dtype == torch.float32:  # halves lose some digits
            planes = (index, score) if matches == 1 else _planes(index, score, matches)
            plan.exact(q, k, index, *planes, group, matches, *plan.extents)
            if matches > 1:
                plan.arrange(*planes, index, score, rows, queries, matches, matches)
    return index, score


class Plan(NamedTuple):
    """The kernels of a search, how many tiles there are, and the numbers that the shapes give."""

    start: Kernel
    arrange: Kernel
    offer: Kernel
    weigh: Kernel
    exact: Kernel
    tiles: int
    extents: tuple[int, ...]


@lru_cache(maxsize=256)
def _plan(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    matches: int,
    causal: bool,
    separated: bool,
    given: tuple[Any, ...],
) -> Plan:
    """The plan for tensors of these shapes and kinds: q, k, seed, mask, warm."""
    query_grid, key_grid, width = tuple(q_shape[2:-1]), tuple(k_shape[2:-1]), q_shape[-1]
    rows, dtype, masked = q_shape[0] * q_shape[1], given[0][1], given[3] is not None
    block = search_tile(len(key_grid), width, dtype)
    programs, tile = rows * tiles(query_grid, block["TILE"]), tile_shape(LANES, len(key_grid))
    count = rows * tiles(query_grid, tile)
    flags: dict[str, Any] = {"RANK": len(key_grid), "E": width}
    limits = {"CAUSAL": causal, "SEPARATED": separated}
    holes = masked  # else every query has a match
    lanes = {"TILE": tile, "LANES": LANES, "STOP": STOP}
    fused = {"enable_fp_fusion": True}
    return Plan(
        Kernel(start_kernel, programs, {**flags, "KE": width, **limits, "EARLIER": matches > 1, **block}),
        Kernel(arrange_kernel, triton.cdiv(math.prod(q_shape[:-1]), 256), {"BLOCK": 256, **fused}),
        Kernel(
            offer_kernel,
            count,
            {"RANK": len(key_grid), "CAUSAL": causal, "SEVERAL": matches > 1, "HOLES": holes, **lanes, **fused}
            | {"num_warps": OFFER_WARPS},
        ),
        Kernel(
            weigh_kernel,
            count,
            {**flags, **limits, **lanes, "HOLES": holes, "WINDOWS": WINDOWS, **weigh_tile(width, dtype, matches)},
        ),
        Kernel(exact_kernel, programs, {**flags, **block}),
        count,
        geometry(query_grid, key_grid),
    )


@lru_cache(maxsize=256)
def _tables(
    sweeps: int, jumps: tuple[int, ...], propagate: str, gossip: int, key_grid: tuple[int, ...], device: torch.device
) -> list[tuple[Tensor, int]]:
    """For odd and for even sweeps the table [offers, 3] of kind, reach and draw, on the device, and its length."""
    every = []
    for sweep in range(1, sweeps + 1):
        made = offers(sweep, jumps, propagate, gossip, key_grid)
        # Past every grid a neighbour is not there: no step overflows 32 bits.
        reaches = {"shift": 2**30, "stay": 2**30 // LANES}
        rows = [(KINDS[one.kind], min(one.reach, reaches.get(one.kind, one.reach)), one.draw) for one in made]
        every.append((torch.tensor(rows or [(0, 0, 0)], dtype=torch.int32).to(device), len(rows)))
    return every


def _planes(index: Tensor, score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Room for `count` keys and scores per query, [count, P] each."""
    points = index.numel() // index.shape[-1]
    return index.new_empty((count, points)), score.new_empty((count, points))


@triton.jit
def going(took, row, sweep, sweeps, queries, STOP: tl.constexpr):
    """Whether enough queries of the row took a key in the sweep before."""
    count = tl.load(took + row.to(tl.int64) * (sweeps + 1) + sweep - 1).to(tl.int64)
    return (sweep == 1) | (count * STOP >= queries)


@triton.jit(do_not_specialize=["low", "high", "mask_heads", "sweep", "sweeps", "length", "kappa", *GEOMETRY])
def offer_kernel(
    state, offered, took, SEED, low, high, mask, order, count, mask_heads, sweeps, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, table, sweep, length,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, SEVERAL: tl.constexpr, HOLES: tl.constexpr, TILE: tl.constexpr,
    LANES: tl.constexpr, STOP: tl.constexpr,
):  # fmt: skip
    """What the queries of a tile offer in a sweep, [offers, LANES]. A lane off the grid does as the first one."""
    QG, KG, MAGIC = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3)
    number = tl.program_id(0)
    row, corner = tile_at(number, QG, RANK, TILE)
    lane, exists = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys = points(QG, RANK), points(KG, RANK)
    query, diagonal = lane * 0, lane * 0
    for a in tl.static_range(RANK):
        query = query * QG[a] + corner[a]
        diagonal += tl.where(exists, lane_place(corner, a, RANK, TILE, LANES), corner[a])
    query = tl.where(exists, lane, query)
    mask_row = (row // mask_heads).to(tl.int64)
    limits = (mask, mask_row, keys)
    matches = state + row.to(tl.int64) * queries * kappa
    draws = absorb(absorb(absorb(row_state(SEED, low, high, row), query), query * 0), sweep)
    out = offered + number.to(tl.int64) * length * LANES + tl.arange(0, LANES)
    goes = going(took, row, sweep, sweeps, queries, STOP)
    first = number % tile_count(QG, RANK, TILE) == 0  # one tile clears the count of the row: all of them would queue
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
            found = around(draws, draw, own, reach, KG, MAGIC, RANK)
            if SEVERAL or HOLES:
                fresh, some = legal_draw(absorb(draws, draw + RANK), query, limits, order, count, CAUSAL)
                found = tl.where(own >= 0, found, tl.where(some, fresh, -1))
        else:
            direction = (diagonal + sweep + draw) % (2 * RANK)
            axis = direction // 2
            far = tl.where(kind == SHIFT, reach, reach * side_of(axis, RANK, TILE))
            step = tl.where(direction % 2 == 0, -far, far)
            here, extent, key_extent, up, down = along(axis, corner, QG, KG, RANK, TILE, LANES)
            here = tl.where(exists, here, corner_of(axis, corner, RANK))
            there = (here + step).to(tl.uint32) < extent.to(tl.uint32)
            source = tl.where(there, query + step * up, 0)
            found = tl.load(matches + source.to(tl.int64) * kappa + entry, mask=there, other=-1)
            at = coordinate(tl.maximum(found, 0), axis, KG, MAGIC, RANK)
            moved = (found >= 0) & ((at - step).to(tl.uint32) < key_extent.to(tl.uint32))
            found = tl.where(kind == SHIFT, tl.where(moved, found - step * down, -1), found)
        if mask is not None:
            allowed = tl.load(mask + mask_row * keys + tl.maximum(found, 0), mask=found >= 0, other=0)
            found = tl.where(allowed != 0, found, -1)
        tl.store(out + n * LANES, tl.where(found >= 0, found, tl.where(own >= 0, own, best)))


@triton.jit
def corner_of(axis, corner, RANK: tl.constexpr):
    """The tile's corner on each lane's own axis."""
    at = axis * 0 + corner[0]
    for a in tl.static_range(1, RANK):
        at = tl.where(axis == a, corner[a], at)
    return at


@triton.jit
def side_of(axis, RANK: tl.constexpr, TILE: tl.constexpr):
    """The tile's extent on each lane's own axis."""
    side = axis * 0 + TILE[0]
    for a in tl.static_range(1, RANK):
        side = tl.where(axis == a, TILE[a], side)
    return side


@triton.jit
def along(axis, corner, QG, KG, RANK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr):
    """For each lane's own axis: its place there, the axis's extents and strides of queries and keys."""
    here, extent, key_extent = lane_place(corner, 0, RANK, TILE, LANES), axis * 0 + QG[0], axis * 0 + KG[0]
    up, down = axis * 0 + 1, axis * 0 + 1
    for a in tl.static_range(1, RANK):
        here = tl.where(axis == a, lane_place(corner, a, RANK, TILE, LANES), here)
        extent, key_extent = tl.where(axis == a, QG[a], extent), tl.where(axis == a, KG[a], key_extent)
        up, down = tl.where(axis < a, up * QG[a], up), tl.where(axis < a, down * KG[a], down)
    return here, extent, key_extent, up, down


@triton.jit(do_not_specialize=["group", "sweep", "sweeps", "length", "kappa", "separation", *GEOMETRY])
def weigh_kernel(
    q, k, state, score, offered, took, group, sweeps, kappa, separation,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, sweep, length,
    RANK: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, SEPARATED: tl.constexpr, TILE: tl.constexpr,
    LANES: tl.constexpr, HOLES: tl.constexpr, STOP: tl.constexpr, BE: tl.constexpr, PIECES: tl.constexpr,
    HALVES: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, WINDOWS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Every query of a tile scores what all its queries offer, LANES keys at a time, and keeps its best.

    A row is E features, or the two HALVES of each.
    """
    QG, KG, MAGIC = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3)
    number = tl.program_id(0)
    row, corner = tile_at(number, QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys = points(QG, RANK), points(KG, RANK)
    point = row.to(tl.int64) * queries + query
    k_row = k + (row // group).to(tl.int64) * keys * (HALVES * E)
    q_rows = q + point[:, None] * (HALVES * E) + tl.arange(0, BE)[None, :]
    e = tl.arange(0, BE)
    mine = piece(q_rows, valid[:, None] & (e < E)[None, :], WIDEN)
    rest = piece(q_rows + (HALVES - 1) * E, valid[:, None] & (e < E)[None, :], WIDEN)
    list_of = offered + number.to(tl.int64) * length * LANES
    total = tl.where(going(took, row, sweep, sweeps, queries, STOP), length * LANES, 0)
    reach = separation.to(tl.uint32)
    there = valid if COLUMNS == 1 else valid[:, None]
    changed = there & ~there
    if COLUMNS == 1:
        key = tl.load(state + point, mask=valid, other=-1)
        best = tl.load(score + point, mask=valid, other=float("inf"))
    else:
        kept, its, spots = kept_matches(state, score, point, valid, kappa, KG, MAGIC, RANK, SEPARATED, SLOTS, COLUMNS)

    for begin in range(0, total, LANES):
        lane = begin + tl.arange(0, LANES)
        new = tl.load(list_of + lane)
        k_rows = k_row + tl.maximum(new, 0).to(tl.int64)[None, :] * (HALVES * E) + e[:, None]
        if PIECES == 1:
            theirs = piece(k_rows, (e < E)[:, None], WIDEN)
            s = tl.dot(mine, theirs)
            if HALVES == 2:
                low = piece(k_rows + E, (e < E)[:, None], WIDEN)
                small = tl.dot(rest, theirs, tl.dot(mine, low, tl.dot(rest, low)))
        else:
            s = tl.zeros([LANES, LANES], tl.float32)
            small = s
            for p in range(PIECES):
                part = e + p * BE < E
                ours = piece(q_rows + p * BE, valid[:, None] & part[None, :], WIDEN)
                theirs = piece(k_rows + p * BE, part[:, None], WIDEN)
                s = tl.dot(ours, theirs, s)
                if HALVES == 2:
                    low = piece(k_rows + p * BE + E, part[:, None], WIDEN)
                    rest = piece(q_rows + p * BE + E, valid[:, None] & part[None, :], WIDEN)
                    small = tl.dot(rest, theirs, tl.dot(ours, low, tl.dot(rest, low, small)))
        if HALVES == 2:
            s = tl.where(tl.abs(s) < float("inf"), s + small, s)  # zero times infinity is none of ours
        if HOLES:
            s = tl.where((new >= 0)[None, :], s, -float("inf"))
        if CAUSAL:
            s = tl.where(new[None, :] <= query[:, None], s, -float("inf"))
        # Most offers hold nothing new: then nobody asks which key it is.
        if COLUMNS == 1:
            top = tl.max(s, axis=1)
            better = top > best
            if tl.max(better.to(tl.int32), axis=0) > 0:
                which = tl.load(list_of + lane)  # anew: nothing of it stays in registers meanwhile
                key = tl.where(better, tl.min(tl.where(s == top[:, None], which[None, :], NO_KEY), axis=1), key)
                best = tl.where(better, top, best)
                changed = changed | better
        else:
            bests = window_bests(s, LANES, WINDOWS)
            tops = quarters(bests, LANES)
            top = tl.maximum(tl.maximum(tops[0], tops[1]), tl.maximum(tops[2], tops[3]))
            hope = top[:, None] > least(its, SLOTS)
            if tl.max(hope.to(tl.int32)) > 0:
                firsts = first_keys(s, bests, new, LANES, WINDOWS)
                for w in range(WINDOWS):
                    top, first = tops[0], firsts[0]
                    for n in tl.static_range(1, WINDOWS):
                        top, first = tl.where(w == n, tops[n], top), tl.where(w == n, firsts[n], first)
                    kept, its, spots, takes = enter(
                        kept, its, spots, first, top, reach, KG, MAGIC, RANK, SEPARATED, PADDED, SLOTS, COLUMNS
                    )
                    changed = changed | takes

    if total > 0:
        if COLUMNS == 1:
            tl.store(state + point, key, mask=valid)
            tl.store(score + point, best, mask=valid)
        else:
            store_matches(state, score, point, valid, kappa, kept, its, SLOTS)
        tl.atomic_add(took + row.to(tl.int64) * (sweeps + 1) + sweep, tl.sum((changed & there).to(tl.int32)))


@triton.jit
def piece(rows, exists, WIDEN: tl.constexpr):
    x = tl.load(rows, mask=exists, other=0.0)
    return x.to(tl.float32) if WIDEN else x


@triton.jit(do_not_specialize=["group", "kappa", *GEOMETRY])
def exact_kernel(
    q, k, index, index_out, score_out, group, kappa, q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3,
    RANK: tl.constexpr, E: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The scores of the matches [P, kappa] anew, in float32 without the matrix unit, to planes [kappa, P]."""
    QG, KG = (q0, q1, q2, q3), (k0, k1, k2, k3)
    row, corner = tile_at(tl.program_id(0), QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys = points(QG, RANK).to(tl.int64), points(KG, RANK)
    point = row * queries + query
    k_row = k + (row // group).to(tl.int64) * keys * E
    mine = features(q + row * queries * E, query, valid, E, W, PIECES)
    plane = queries * (tl.num_programs(0) // tile_count(QG, RANK, TILE))
    for c in range(kappa):
        key = tl.load(index + point * kappa + c, mask=valid, other=-1)
        s = score_of(mine, k_row, tl.maximum(key, 0), key >= 0, E, W, PIECES)
        tl.store(index_out + c * plane + point, key, mask=valid)
        tl.store(score_out + c * plane + point, tl.where(key >= 0, s, -float("inf")), mask=valid)
