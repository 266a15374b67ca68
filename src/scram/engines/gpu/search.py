"""Algorithm 1 in Triton: one launch draws the starts of a run, one makes each sweep, one sorts the runs.

The state of a query is one int32. A key >= 0 was taken in the last sweep; ~key is a key that is older; NOTHING is none.
A neighbour whose key is older has offered it to this query before, where it either won or could not: it is not asked
again. That changes no answer and saves most of the reads once a field settles. State is double-buffered by sweep.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grid import LegalKeys
from .block_sizes import search_tile
from .candidates import allowed, around, coordinate, legal_draw, neighbour, offer, score_of, take, weigh
from .grid import GEOMETRY, features, geometry, lane_query, points, tile_at, tiles
from .launch import Kernel, kinds, on_device
from .layout import pad, sort_kernel
from .noise import absorb, below, row_state, seed_arguments

NOTHING = tl.constexpr(-(2**31))
PLANES = ("best_out", "best_io", "state_in", "state_out")  # one number per lane, aligned or not
SETTINGS = ("low", "high", "mask_heads", "group", "run", "separation", "final", *GEOMETRY)


def search(
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
    q_shape, k_shape = q.shape, k.shape
    plane, shape = q_shape[:-1], (*q_shape[:-1], matches)
    planes = shape if matches == 1 else (matches, *plane)
    index, score = q.new_empty(planes, dtype=torch.int32), q.new_empty(planes, dtype=torch.float32)
    if index.numel() == 0:
        return index.reshape(shape), score.reshape(shape)

    mask = order = count = None
    mask_heads, kept = 1, 0
    if key_mask is not None:
        legal = LegalKeys.of(q, k, causal, key_mask.contiguous())
        assert legal.order is not None
        mask, order, count, mask_heads = legal.mask, legal.order.contiguous(), legal.count, legal.heads_per_row
    if warm is not None:
        warm, kept = warm.contiguous(), warm.shape[-1]
    pointer, low, high = seed_arguments(seed)
    given = kinds(q, k, pointer, mask, warm)
    plan = _plan(q_shape, k_shape, False, causal, False, propagate, jumps, given)
    keys, wide = k, None
    if plan.width > k_shape[-1]:
        keys = wide = k.new_empty((*k_shape[:-1], plan.width))
    limits = (pointer, low, high, mask, order, count, mask_heads, q_shape[1] // k_shape[1], min(separation, 2**31 - 1))

    # A device at rest waits for the first launch: what that does not need is made after it.
    other = index.new_empty(plane) if sweeps % 2 else None
    with on_device(q):
        for run in range(matches):
            if run == 1:
                plan = _plan(q_shape, k_shape, True, causal, separation > 0, propagate, jumps, given)
            field, best = (index, score) if matches == 1 else (index[run], score[run])
            common = (index, best, *limits, *plan.extents, run)
            key_rows = k_shape[0] * k_shape[1] if run == 0 else 0  # padded once
            plan.start(q, k, *common, other if sweeps % 2 else field, warm, kept, sweeps == 0, wide, key_rows)
            other = index.new_empty(plane) if other is None else other
            state = (other, field) if sweeps % 2 else (field, other)
            if sweeps:
                even = plan.even.bind(q, keys, *common)
                by_turn = (even, even if plan.odd is plan.even else plan.odd.bind(q, keys, *common))
            for sweep in range(1, sweeps + 1):
                to = sweep % 2
                by_turn[to](state[1 - to], state[to], sweep, gossip, plan.radii, sweep == sweeps)
        if matches == 1:
            return index, score
        sorted_index, sorted_score = index.new_empty(shape), score.new_empty(shape)
        rows, plane_size = shape[0] * shape[1], index.numel() // matches
        sorts = Kernel(sort_kernel, triton.cdiv(plane_size, 256), {"BLOCK": 256, "enable_fp_fusion": True})
        sorts(index, score, sorted_index, sorted_score, rows, plane_size // rows, matches)
    return sorted_index, sorted_score


class Plan(NamedTuple):
    """What the runs launch, the sweeps' kernels by even and odd, and the numbers that the shapes give."""

    start: Kernel
    even: Kernel
    odd: Kernel
    width: int  # of the keys, padded
    extents: tuple[int, ...]
    radii: int


@lru_cache(maxsize=256)
def _plan(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    earlier: bool,
    causal: bool,
    separated: bool,
    propagate: str,
    jumps: tuple[int, ...],
    given: tuple[Any, ...],
) -> Plan:
    """The plan for tensors of these shapes and kinds: q, k, seed, mask, warm; of a run without or with earlier ones."""
    query_grid, key_grid, width = tuple(q_shape[2:-1]), tuple(k_shape[2:-1]), q_shape[-1]
    rows, dtype, masked = q_shape[0] * q_shape[1], given[0][1], given[3] is not None
    wide = triton.next_power_of_2(width)
    if wide * dtype.itemsize > 32:
        wide = width  # else one aligned load for several
    flags: dict[str, Any] = {"RANK": len(key_grid), "E": width, "KE": wide, "CAUSAL": causal}
    flags |= {"SEPARATED": separated, "EARLIER": earlier}
    block = search_tile(len(key_grid), width, dtype, earlier)
    start = Kernel(start_kernel, rows * tiles(query_grid, block["TILE"]), {**flags, **block})
    block = search_tile(len(key_grid), wide, dtype, earlier)
    # A jump past every grid asks nobody; without it no step overflows 32 bits.
    asked = tuple(jump for jump in jumps if jump < max(2**30, *query_grid))
    flags |= {"KEYLESS": earlier or masked, **block, "JUMPS": asked, "TURNS": propagate == "turns"}
    programs = rows * tiles(query_grid, block["TILE"])
    if propagate == "turns":
        even = Kernel(sweep_kernel, programs, {**flags, "SHIFT": False, "STAY": True})
        odd = Kernel(sweep_kernel, programs, {**flags, "SHIFT": True, "STAY": False})
    else:
        offers = {"SHIFT": propagate != "stay", "STAY": propagate != "shift"}
        even = odd = Kernel(sweep_kernel, programs, {**flags, **offers})
    return Plan(start, even, odd, wide, geometry(query_grid, key_grid), max(key_grid).bit_length())


@triton.jit(do_not_specialize=[*SETTINGS, "kept", "padded_rows"], do_not_specialize_on_alignment=PLANES)
def start_kernel(
    q, k, earlier, best_out, SEED, low, high, mask, order, count, mask_heads, group, separation,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, run,
    state_out, warm, kept, final, wide, padded_rows,
    RANK: tl.constexpr, E: tl.constexpr, KE: tl.constexpr, CAUSAL: tl.constexpr, SEPARATED: tl.constexpr,
    EARLIER: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Sweep 0: a warm key where it is legal, else a draw; kept whatever its score. Pads the keys besides."""
    if wide is not None:
        pad(k, wide, padded_rows.to(tl.int64) * points((k0, k1, k2, k3), RANK), E, KE, LANES * KE)
    QG, KG, MAGIC = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3)
    row, corner = tile_at(tl.program_id(0), QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys = points(QG, RANK).to(tl.int64), points(KG, RANK)
    plane = queries * (tl.num_programs(0) // tile_count(QG, RANK, TILE))
    point = row * queries + query
    limits = (mask, (row // mask_heads).to(tl.int64), keys, earlier, plane, run, separation)
    zero = query * 0
    draws = absorb(absorb(absorb(row_state(SEED, low, high, row), query), run), zero)
    key, ok = legal_draw(absorb(draws, zero), tl.where(valid, query, 0), limits, order, count, CAUSAL)
    if warm is not None:
        given = tl.load(warm + point * kept + run, mask=valid & (zero + run < kept), other=-1)
        usable = (given >= 0) & (given < keys)
        usable = allowed(given, usable, query, point, limits, KG, MAGIC, RANK, CAUSAL, SEPARATED, EARLIER)
        key, ok = tl.where(usable, given, key), usable | ok
    ok = allowed(key, ok & valid, query, point, limits, KG, MAGIC, RANK, CAUSAL, SEPARATED, EARLIER)
    k_row = k + (row // group).to(tl.int64) * keys * E
    mine = features(q + row * queries * E, query, ok, E, W, PIECES)
    best = tl.where(ok, score_of(mine, k_row, key, ok, E, W, PIECES), -float("inf"))
    tl.store(state_out + point, tl.where(ok, key, tl.where(final != 0, -1, NOTHING)), mask=valid)
    tl.store(best_out + point, best, mask=valid)


@triton.jit(do_not_specialize=[*SETTINGS, "sweep", "gossip", "radii"], do_not_specialize_on_alignment=PLANES)
def sweep_kernel(
    q, k, earlier, best_io, SEED, low, high, mask, order, count, mask_heads, group, separation,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, run,
    state_in, state_out, sweep, gossip, radii, final,
    RANK: tl.constexpr, E: tl.constexpr, KE: tl.constexpr, CAUSAL: tl.constexpr, SEPARATED: tl.constexpr,
    EARLIER: tl.constexpr, KEYLESS: tl.constexpr, JUMPS: tl.constexpr, SHIFT: tl.constexpr, STAY: tl.constexpr,
    TURNS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One sweep: propagate, gossip, random search, each candidate taken where it is legal and strictly better."""
    QG, KG, MAGIC = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3)
    row, corner = tile_at(tl.program_id(0), QG, RANK, TILE)
    query, valid = lane_query(corner, QG, RANK, TILE, LANES)
    queries, keys = points(QG, RANK).to(tl.int64), points(KG, RANK)
    plane = queries * (tl.num_programs(0) // tile_count(QG, RANK, TILE))
    point = row * queries + query
    limits = (mask, (row // mask_heads).to(tl.int64), keys, earlier, plane, run, separation)
    k_row = k + (row // group).to(tl.int64) * keys * KE
    mine = features(q + row * queries * E, query, valid, E, W, PIECES)

    key = decoded(tl.load(state_in + point, mask=valid, other=NOTHING))
    had, old = key, key
    if TURNS:
        # A key is old to the neighbours when it was there at the last sweep of the same kind, two before.
        old = tl.where(sweep > 1, decoded(tl.load(state_out + point, mask=valid, other=NOTHING)), -1)
    best = tl.load(best_io + point, mask=valid, other=float("inf"))

    for n in range(len(JUMPS) * RANK):
        axis = n % RANK
        jump, here, extent, key_extent, up, down = neighbour(n, axis, corner, QG, KG, JUMPS, RANK, TILE, LANES)
        candidates, exist, wanted, scores = (), (), (), ()
        for side in tl.static_range(2):
            step = jump * (2 * side - 1)
            there = (here + step).to(tl.uint32) < extent.to(tl.uint32)
            found = tl.load(state_in + point + step * up, mask=valid & there, other=NOTHING)
            fresh = found >= 0
            if SHIFT:
                at = coordinate(found, axis, KG, MAGIC, RANK)
                candidates += (found - step * down,)
                exist += (fresh & ((at - step).to(tl.uint32) < key_extent.to(tl.uint32)),)
            if STAY:
                candidates += (found,)
                exist += (fresh,)
            if not EARLIER:
                for c in tl.static_range(len(candidates)):
                    key, best = offer(
                        candidates[c], exist[c], had, key, best, mine, k_row, query, point, limits, KG, MAGIC,
                        RANK, KE, CAUSAL, SEPARATED, EARLIER, W, PIECES,
                    )  # fmt: skip
                candidates, exist = (), ()
        # To look up earlier matches is to wait: what both sides offer is read before one of it is taken.
        for c in tl.static_range(len(candidates)):
            worth, s = weigh(candidates[c], exist[c], had, mine, k_row, query, KE, CAUSAL, W, PIECES)
            wanted += (worth,)
            scores += (s,)
        for c in tl.static_range(len(candidates)):
            key, best = take(
                candidates[c], wanted[c], scores[c], key, best, query, point, limits, KG, MAGIC,
                RANK, CAUSAL, SEPARATED, EARLIER,
            )  # fmt: skip

    draws = absorb(absorb(absorb(row_state(SEED, low, high, row), query), run), sweep)
    for g in range(gossip):
        other = below(absorb(draws, gossip * 0 + g), queries)
        heard = decoded(tl.load(state_in + row * queries + other, mask=valid, other=NOTHING))
        key, best = offer(
            heard, heard >= 0, had, key, best, mine, k_row, query, point, limits, KG, MAGIC,
            RANK, KE, CAUSAL, SEPARATED, EARLIER, W, PIECES,
        )  # fmt: skip

    reach = tl.maximum(tl.maximum(k0, k1), tl.maximum(k2, k3))
    keyless = tl.max((valid & (key < 0)).to(tl.int32), axis=0) if KEYLESS else 0
    for n in range(radii):
        draw = gossip + n * (RANK + 1)
        candidate, exists = around(draws, draw, key, reach, KG, MAGIC, RANK), valid
        if KEYLESS:  # noqa: SIM102 - known when compiling, unlike the next
            if keyless > 0:
                some_query = tl.where(valid, query, 0)
                drawn, some = legal_draw(absorb(draws, draw + RANK), some_query, limits, order, count, CAUSAL)
                exists = valid & ((key >= 0) | some)
                candidate = tl.where(key < 0, drawn, candidate)
        key, best = offer(
            candidate, exists, key, key, best, mine, k_row, query, point, limits, KG, MAGIC,
            RANK, KE, CAUSAL, SEPARATED, EARLIER, W, PIECES,
        )  # fmt: skip
        reach = reach >> 1

    # A keyless query is ~-1 = 0 nowhere: NOTHING, or -1 in what is returned.
    coded = tl.where(key < 0, NOTHING, tl.where(key != old, key, ~key))
    tl.store(state_out + point, tl.where(final != 0, key, coded), mask=valid)
    tl.store(best_io + point, best, mask=valid)


@triton.jit
def decoded(state):
    """The key of a state, -1 for none."""
    return tl.where(state == NOTHING, -1, tl.where(state < 0, ~state, state))


@triton.jit
def tile_count(QG, RANK: tl.constexpr, TILE: tl.constexpr):
    n = (QG[0] + TILE[0] - 1) // TILE[0]
    for a in tl.static_range(1, RANK):
        n = n * ((QG[a] + TILE[a] - 1) // TILE[a])
    return n
