"""Algorithm 1 in Triton: one launch draws the starts of a run, one makes each sweep, one sorts the runs.

The state of a query is one int32. A key >= 0 was taken in the last sweep; ~key is a key that is older; NOTHING is none.
A neighbor whose key is older has offered it to this query before, where it either won or could not: it is not read
again. That changes no answer and saves most of the reads once a field settles. State is double-buffered by sweep.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ....core.calls import Found, SearchCall
from ....spec.schedule import moves, widest
from ..noise import absorb, below, row_state, seed_argument
from ..primitives import Geometry, dot, geometry, lane_query, load_float32, points, tile_at, tile_count, tiles
from ..runtime.block_sizes import search_tile
from ..runtime.launch import Kernel, cached, kinds, on_device
from ..runtime.layout import pad
from .candidates import (
    Limits,
    Rules,
    allowed_argument,
    along,
    around,
    coordinate,
    draw_allowed,
    legal,
    near_start,
    score_of,
    starts_argument,
)
from .top_matches import arrange

NOTHING = tl.constexpr(-(2**31))
PLANES = ("best_out", "best_io", "state_in", "state_out")  # one number per query, aligned or not


class SweepQueries(NamedTuple):
    """The queries of a program, in a kernel."""

    query: Any  # int32 [BQ], flat
    point: Any  # int64 [BQ], place in a plane of all queries
    q_block: Any  # [BQ, E], in pieces
    k_row: Any  # pointer to the keys of their row


class Radii(NamedTuple):
    """Of random search."""

    number: int
    largest: int


class Propagation(NamedTuple):
    """What neighbors offer in a sweep, known when compiling."""

    JUMPS: tuple[int, ...]
    MOVES: tuple[int, ...]  # how many steps their match is moved
    TURNS: bool  # even and odd sweeps move it differently


def search(call: SearchCall) -> Found:
    q = call.q.contiguous()
    k = call.k.contiguous()
    matches = call.matches
    sweeps = call.sweeps
    warm = call.warm
    q_shape = q.shape
    k_shape = k.shape
    plane = q_shape[:-1]
    shape = (*plane, matches)
    planes = shape if matches == 1 else (matches, *plane)
    index = q.new_empty(planes, dtype=torch.int32)
    score = q.new_empty(planes, dtype=torch.float32)
    if index.numel() == 0:
        return Found(index.reshape(shape), score.reshape(shape))

    allowed = allowed_argument(q, k, call.causal, call.key_mask)
    seed = seed_argument(call.seed, call.rows)
    starts = starts_argument(call)
    largest = widest(k_shape[2:-1], call.reach, call.random)
    radii = Radii(largest.bit_length(), largest)
    kept = 0
    if warm is not None:
        warm = warm.contiguous()
        kept = warm.shape[-1]
    given = kinds(q, k, seed.pointer, allowed.mask, warm, seed.rows, starts.index)
    plan = _plan(q_shape, k_shape, Rules(call.causal, False, False), call.propagate, call.jumps, given)
    keys = k
    wide = None
    if plan.width > k_shape[-1]:
        wide = k.new_empty((*k_shape[:-1], plan.width))
        keys = wide
    group = q_shape[1] // k_shape[1]
    limits = (seed, allowed, starts, group, min(call.separation, 2**31 - 1), plan.geo)

    # A device at rest waits for the first launch: what that does not need is made after it.
    other = index.new_empty(plane) if sweeps % 2 else None
    with on_device(q):
        for run in range(matches):
            if run == 1:
                rules = Rules(call.causal, call.separation > 0, True)
                plan = _plan(q_shape, k_shape, rules, call.propagate, call.jumps, given)
            field, best = (index, score) if matches == 1 else (index[run], score[run])
            common = (index, best, *limits, run)
            key_rows = k_shape[0] * k_shape[1] if run == 0 else 0  # padded once
            plan.start(q, k, *common, other if sweeps % 2 else field, warm, kept, sweeps == 0, wide, key_rows)
            other = index.new_empty(plane) if other is None else other
            state = (other, field) if sweeps % 2 else (field, other)
            if sweeps:
                same = (q, keys, *common, call.gossip, radii)
                even = plan.even.bind(*same)
                by_turn = (even, even if plan.odd is plan.even else plan.odd.bind(*same))
            for sweep in range(1, sweeps + 1):
                turn = sweep % 2
                by_turn[turn](state[1 - turn], state[turn], sweep, sweep == sweeps)
        if matches == 1:
            return Found(index, score)
        result = Found(index.new_empty(shape), score.new_empty(shape))
        rows = shape[0] * shape[1]
        plane_size = index.numel() // matches
        arrange(plane_size, by_key=False)(index, score, *result, rows, plane_size // rows, matches, matches)
    return result


class QueryKernels(NamedTuple):
    """What the runs launch, the sweeps' kernels by even and odd, and the numbers that the shapes give."""

    start: Kernel
    even: Kernel
    odd: Kernel
    width: int  # of the keys, padded
    geo: Geometry


@cached
def _plan(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    rules: Rules,
    propagate: str,
    jumps: tuple[int, ...],
    given: tuple[Any, ...],
) -> QueryKernels:
    """The plan of a run for tensors of these shapes and kinds: q, k, seed, mask, warm, rows, starts."""
    query_grid = tuple(q_shape[2:-1])
    key_grid = tuple(k_shape[2:-1])
    width = q_shape[-1]
    rows = q_shape[0] * q_shape[1]
    dtype = given[0][1]
    holes = given[3] is not None or given[6] is not None
    wide = triton.next_power_of_2(width)
    if wide * dtype.itemsize > 32:
        wide = width  # else one aligned load for several
    flags = {"RULES": rules, **search_tile(len(key_grid), width, dtype, rules.EARLIER)}
    start = Kernel(start_kernel, rows * tiles(query_grid, flags["B"].TILE), {**flags, "PADDED": wide})
    flags |= search_tile(len(key_grid), wide, dtype, rules.EARLIER)
    flags |= {"KE": flags["E"], "E": flags["E"]._replace(SIZE=width), "KEYLESS": rules.EARLIER or holes}
    programs = rows * tiles(query_grid, flags["B"].TILE)
    # A jump past every grid reads nobody; without it no step overflows 32 bits.
    near = tuple(jump for jump in jumps if jump < max(2**30, *query_grid))

    by_turn = [moves(propagate, sweep) for sweep in (0, 1)]
    even, odd = (Propagation(near, moved, by_turn[0] != by_turn[1]) for moved in by_turn)
    sweeps = {moved: Kernel(sweep_kernel, programs, {**flags, "FROM": moved}) for moved in (even, odd)}
    return QueryKernels(start, sweeps[even], sweeps[odd], wide, geometry(query_grid, key_grid))


@triton.jit(do_not_specialize_on_alignment=PLANES)
def start_kernel(
    q,
    k,
    earlier,
    best_out,
    seed,
    allowed,
    starts,
    group,
    separation,
    geo,
    run,
    state_out,
    warm,
    kept,
    final,
    wide,
    padded_rows,
    RULES: tl.constexpr,
    PADDED: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
):
    """Sweep 0: a warm key where it is legal, else a draw; kept whatever its score. Pads the keys besides."""
    if wide is not None:
        pad(k, wide, tl.cast(padded_rows, tl.int64) * points(geo.k), E.SIZE, PADDED, B.BLOCK_Q * PADDED)
    row, corner = tile_at(tl.program_id(0), geo, B)
    query, exists = lane_query(corner, geo, B)
    queries = points(geo.q).to(tl.int64)
    keys = points(geo.k)
    point = row * queries + query  # [BQ]
    plane = queries * (tl.num_programs(0) // tile_count(geo, B))
    limits = Limits(allowed, (row // allowed.group).to(tl.int64), keys, earlier, plane, run, separation, starts)
    zero = query * 0  # [BQ]
    draws = absorb(absorb(absorb(row_state(seed, row), query), run), zero)  # [BQ]
    some_query = tl.where(exists, query, 0)
    if starts.index is None:
        key, ok = draw_allowed(absorb(draws, zero), some_query, allowed, limits.mask_row, keys, RULES.CAUSAL)
    else:
        key = near_start(draws, 0, point, run, exists, starts, geo)  # [BQ]
        ok = exists
    if warm is not None:
        given = tl.load(warm + point * kept + run, mask=exists & (zero + run < kept), other=-1)  # [BQ]
        usable = legal(given, (given >= 0) & (given < keys), query, point, limits, geo, RULES)  # [BQ]
        key = tl.where(usable, given, key)
        ok = usable | ok
    ok = legal(key, ok & exists, query, point, limits, geo, RULES)
    k_row = k + tl.cast(row // group, tl.int64) * keys * E.SIZE
    q_block = load_float32(q + row * queries * E.SIZE, query, ok, E)  # [BQ, E]
    best = tl.where(ok, score_of(q_block, k_row, key, ok, E), -float("inf"))  # [BQ]
    tl.store(state_out + point, tl.where(ok, key, tl.where(final != 0, -1, NOTHING)), mask=exists)
    tl.store(best_out + point, best, mask=exists)


@triton.jit(do_not_specialize_on_alignment=PLANES)
def sweep_kernel(
    q,
    k,
    earlier,
    best_io,
    seed,
    allowed,
    starts,
    group,
    separation,
    geo,
    run,
    gossip,
    radii,
    state_in,
    state_out,
    sweep,
    final,
    RULES: tl.constexpr,
    FROM: tl.constexpr,
    KEYLESS: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    KE: tl.constexpr,
):
    """One sweep: propagate, gossip, random search, each candidate taken where it is legal and strictly better."""
    row, corner = tile_at(tl.program_id(0), geo, B)
    query, exists = lane_query(corner, geo, B)
    queries = points(geo.q).to(tl.int64)
    keys = points(geo.k)
    point = row * queries + query  # [BQ]
    plane = queries * (tl.num_programs(0) // tile_count(geo, B))
    limits = Limits(allowed, (row // allowed.group).to(tl.int64), keys, earlier, plane, run, separation, starts)
    k_row = k + tl.cast(row // group, tl.int64) * keys * KE.SIZE
    q_block = load_float32(q + row * queries * E.SIZE, query, exists, E)  # [BQ, E]
    query_block = SweepQueries(query, point, q_block, k_row)

    key = decoded(tl.load(state_in + point, mask=exists, other=NOTHING))  # [BQ]
    had = key  # [BQ], at the start of the sweep
    old = key  # [BQ], what the neighbors know
    if FROM.TURNS:
        # A key is old to the neighbors when it was there at the last sweep of the same kind, two before.
        old = tl.where(sweep > 1, decoded(tl.load(state_out + point, mask=exists, other=NOTHING)), -1)
    best = tl.load(best_io + point, mask=exists, other=float("inf"))  # [BQ]
    key, best = propagated(key, best, state_in, corner, exists, query_block, limits, geo, RULES, FROM, B, KE)

    draws = absorb(absorb(absorb(row_state(seed, row), query), run), sweep)  # [BQ]
    others = query.to(tl.int64) + 1 if RULES.CAUSAL else queries
    for g in range(gossip):
        other = below(absorb(draws, g), others)  # [BQ]
        heard = decoded(tl.load(state_in + row * queries + other, mask=exists, other=NOTHING))  # [BQ]
        key, best = offer(heard, heard >= 0, had, key, best, query_block, limits, geo, RULES, KE)

    radius = tl.cast(radii.largest, tl.int32)
    keyless = tl.max((exists & (key < 0)).to(tl.int32), axis=0) if KEYLESS else 0
    for n in range(radii.number):
        draw = gossip + n * (len(geo.k) + 1)
        candidate = around(draws, draw, key, radius, starts, geo)  # [BQ]
        usable = exists
        if KEYLESS:  # noqa: SIM102 - known when compiling, unlike the next
            if keyless > 0:
                if starts.index is None:
                    bits = absorb(draws, draw + len(geo.k))
                    some_query = tl.where(exists, query, 0)
                    drawn, any_key = draw_allowed(bits, some_query, allowed, limits.mask_row, keys, RULES.CAUSAL)
                    usable = exists & ((key >= 0) | any_key)
                else:
                    drawn = near_start(draws, draw, point, run, exists, starts, geo)  # [BQ]
                candidate = tl.where(key < 0, drawn, candidate)
        key, best = offer(candidate, usable, key, key, best, query_block, limits, geo, RULES, KE)
        radius = radius >> 1

    # A keyless query is ~-1 = 0 nowhere: NOTHING, or -1 in what is returned.
    coded = tl.where(key < 0, NOTHING, tl.where(key != old, key, ~key))
    tl.store(state_out + point, tl.where(final != 0, key, coded), mask=exists)
    tl.store(best_io + point, best, mask=exists)


@triton.jit
def propagated(
    key,
    best,
    state_in,
    corner,
    exists,
    query_block,
    limits,
    geo,
    RULES: tl.constexpr,
    FROM: tl.constexpr,
    B: tl.constexpr,
    KE: tl.constexpr,
):
    """Keys and scores [BQ] after what neighbors offer."""
    had = key
    for n in range(len(FROM.JUMPS) * len(geo.q)):
        axis = n % len(geo.q)
        jump = n * 0
        for j in tl.static_range(len(FROM.JUMPS)):
            jump = tl.where(n // len(geo.q) == j, FROM.JUMPS[j], jump)
        place, extent, key_extent, q_stride, k_stride = along(axis, corner, geo, B)
        candidates = ()
        usable = ()
        wanted = ()
        scores = ()
        for side in tl.static_range(1 if RULES.CAUSAL else 2):
            step = jump * (2 * side - 1)
            on_grid = (place + step).to(tl.uint32) < extent.to(tl.uint32)  # [BQ]
            neighbor = state_in + query_block.point + step * q_stride  # [BQ]
            match = tl.load(neighbor, mask=exists & on_grid, other=NOTHING)  # [BQ]
            fresh = match >= 0
            for m in tl.static_range(len(FROM.MOVES)):
                back = step * -FROM.MOVES[m]  # to subtract: with a sum the compiler spills a register
                candidates += (match - back * k_stride,)
                if FROM.MOVES[m] == 0:
                    usable += (fresh,)
                else:
                    key_place = coordinate(match, axis, geo) - back
                    usable += (fresh & (key_place.to(tl.uint32) < key_extent.to(tl.uint32)),)
            if not RULES.EARLIER:
                for c in tl.static_range(len(candidates)):
                    key, best = offer(candidates[c], usable[c], had, key, best, query_block, limits, geo, RULES, KE)
                candidates = ()
                usable = ()
        # To look up earlier matches is to wait: what both sides offer is read before one of it is taken.
        for c in tl.static_range(len(candidates)):
            worth, s = score_candidate(candidates[c], usable[c], had, query_block, RULES, KE)
            wanted += (worth,)
            scores += (s,)
        for c in tl.static_range(len(candidates)):
            key, best = take(candidates[c], wanted[c], scores[c], key, best, query_block, limits, geo, RULES)
    return key, best


@triton.jit
def offer(candidate, usable, had, key, best, query_block, limits, geo, RULES: tl.constexpr, KE: tl.constexpr):
    """Read one candidate [BQ] and take it where it is legal and strictly better."""
    wanted, s = score_candidate(candidate, usable, had, query_block, RULES, KE)
    return take(candidate, wanted, s, key, best, query_block, limits, geo, RULES)


@triton.jit
def score_candidate(candidate, usable, had, query_block, RULES: tl.constexpr, KE: tl.constexpr):
    """Where a candidate [BQ] can win, and its score there. `had`, a key held before, cannot win: it is not read.

    `had` may be older than the best so far: then no read waits for the one before it.
    """
    wanted = usable & (candidate != had)
    if RULES.CAUSAL:
        wanted = wanted & (candidate <= query_block.query)
    return wanted, dot(query_block.q_block, load_float32(query_block.k_row, candidate, wanted, KE))


@triton.jit
def take(candidate, wanted, s, key, best, query_block, limits, geo, RULES: tl.constexpr):
    """Key and score [BQ] after a candidate of score s."""
    better = wanted & (s > best)  # NaN is not
    better = legal(candidate, better, query_block.query, query_block.point, limits, geo, RULES)
    return tl.where(better, candidate, key), tl.where(better, s, best)


@triton.jit
def decoded(state):
    """The key of a state, -1 for none."""
    return tl.where(state == NOTHING, -1, tl.where(state < 0, ~state, state))
