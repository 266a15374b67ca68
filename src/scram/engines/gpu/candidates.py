"""Candidates of a search in Triton: whom a query asks, which keys it may take, what they score."""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from .grid import divide, dot, features, lane_place, near
from .noise import absorb, below


@triton.jit
def neighbour(
    n, axis, corner, QG, KG, JUMPS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Propagation number n: jump, the lanes' places on its axis, the axis's extents and strides of queries and keys."""
    jump = n * 0
    for j in tl.static_range(len(JUMPS)):
        jump = tl.where(n // RANK == j, JUMPS[j], jump)
    here, extent, key_extent = lane_place(corner, 0, RANK, TILE, LANES), QG[0], KG[0]
    up, down = n * 0 + 1, n * 0 + 1
    for a in tl.static_range(1, RANK):
        here = tl.where(axis == a, lane_place(corner, a, RANK, TILE, LANES), here)
        extent, key_extent = tl.where(axis == a, QG[a], extent), tl.where(axis == a, KG[a], key_extent)
        up, down = tl.where(axis < a, up * QG[a], up), tl.where(axis < a, down * KG[a], down)
    return jump, here, extent, key_extent, up, down


@triton.jit
def coordinate(key, axis, KG, MAGIC, RANK: tl.constexpr):
    """The coordinate of flat keys on an axis known at run time."""
    rest, at = key, key
    for a in tl.static_range(RANK - 1, 0, -1):
        up = divide(rest, MAGIC[a])
        at = tl.where(axis == a, rest - up * KG[a], at)
        rest = up
    return tl.where(axis == 0, rest, at)


@triton.jit
def around(draws, draw, key, reach, KG, MAGIC, RANK: tl.constexpr):
    """A key drawn from the box of radius `reach` around `key`, cut at the border."""
    rest, flat, stride = tl.maximum(key, 0), key * 0, 1
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(rest, MAGIC[a]) if a > 0 else rest * 0
        at = rest - up * KG[a]
        low = tl.maximum(at - reach, 0)
        high = at + tl.minimum(reach, KG[a] - 1 - at)
        flat += (low + below(absorb(draws, draw + a), high - low + 1)) * stride
        rest, stride = up, stride * KG[a]
    return flat


@triton.jit
def legal_draw(bits, query, limits, order, count, CAUSAL: tl.constexpr):
    """A key drawn from the legal ones of each query, and whether there is any."""
    mask_row, keys = limits[1], limits[2]
    last = query if CAUSAL else query * 0 + (keys - 1)
    if count is None:
        choices = last + 1
        key = below(bits, choices)
    else:
        choices = tl.load(count + mask_row * keys + last).to(tl.int32)
        key = tl.load(order + mask_row * keys + below(bits, choices), mask=choices > 0, other=0).to(tl.int32)
    return key, choices > 0


@triton.jit
def allowed(
    key, ok, query, point, limits, KG, MAGIC,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, SEPARATED: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """Where `ok` also holds whether `key`, on the grid, may be taken: mask, order, distance to earlier matches."""
    mask, mask_row, keys, earlier, plane, run, separation = limits
    if CAUSAL:
        ok = ok & (key <= query)
    if mask is not None:
        ok = ok & (tl.load(mask + mask_row * keys + key, mask=ok, other=0) != 0)
    if EARLIER:
        # Most candidates lose in every lane, then no earlier match is read.
        for e in range(tl.where(tl.max(ok.to(tl.int32), axis=0) > 0, run, 0)):
            match = tl.load(earlier + e * plane + point, mask=ok, other=-1)
            if SEPARATED:
                reach = (separation, separation, separation, separation)
                close = (match >= 0) & near(key, tl.maximum(match, 0), reach, KG, MAGIC, RANK)
            else:
                close = match == key
            ok = ok & ~close
    return ok


@triton.jit
def score_of(mine, k_row, key, wanted, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr):
    """The score of one key per lane, NaN as -inf; keys that are not wanted are not read."""
    s = dot(mine, features(k_row, key, wanted, E, W, PIECES), PIECES)
    return tl.where(s == s, s, -float("inf"))


@triton.jit
def offer(
    candidate, exists, had, key, best, mine, k_row, query, point, limits, KG, MAGIC,
    RANK: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, SEPARATED: tl.constexpr, EARLIER: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Read one candidate and take it where it is legal and strictly better."""
    wanted, s = weigh(candidate, exists, had, mine, k_row, query, E, CAUSAL, W, PIECES)
    return take(candidate, wanted, s, key, best, query, point, limits, KG, MAGIC, RANK, CAUSAL, SEPARATED, EARLIER)


@triton.jit
def weigh(
    candidate, exists, had, mine, k_row, query, E: tl.constexpr, CAUSAL: tl.constexpr, W: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Where a candidate can win, and its score there. `had`, a key held before, cannot win: it is not read.

    `had` may be older than the best so far: then no read waits for the one before it.
    """
    wanted = exists & (candidate != had)
    if CAUSAL:
        wanted = wanted & (candidate <= query)
    return wanted, dot(mine, features(k_row, candidate, wanted, E, W, PIECES), PIECES)


@triton.jit
def take(
    candidate, wanted, s, key, best, query, point, limits, KG, MAGIC,
    RANK: tl.constexpr, CAUSAL: tl.constexpr, SEPARATED: tl.constexpr, EARLIER: tl.constexpr,
):  # fmt: skip
    """Key and score after a candidate of score s."""
    better = wanted & (s > best)  # NaN is not
    better = allowed(candidate, better, query, point, limits, KG, MAGIC, RANK, CAUSAL, SEPARATED, EARLIER)
    return tl.where(better, candidate, key), tl.where(better, s, best)
