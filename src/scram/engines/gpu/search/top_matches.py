"""Several matches of a query in Triton, kept jointly: what enters, what goes, and their order.

They are tuples of SLOTS [BLOCK_Q, COLUMNS]: two threads hold the matches of a query, and exchange four times per offer.
[BLOCK_Q] would be held twice over, by as many threads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..primitives import divide
from ..runtime.launch import Kernel, cached

NO_KEY = tl.constexpr(2**31 - 1)  # behind every key
EMPTY = tl.constexpr(2**31 - 33)  # and so are these: places of a tuple without a match, each its own


class Places(NamedTuple):
    """The places for the matches of a query, known when compiling."""

    SLOTS: int
    COLUMNS: int
    PADDED: bool  # there are more places than matches
    SEPARATED: bool  # matches keep others at a distance, not only from themselves
    WINDOWS: int  # of the keys of an offer


@cached
def arrange(points: int, by_key: bool) -> Kernel:
    return Kernel(arrange_kernel, triton.cdiv(points, 256), {"BY_KEY": by_key, "BLOCK": 256, "enable_fp_fusion": True})


@triton.jit
def place_of(c, COLUMNS: tl.constexpr):
    """The places of slot c, [1, COLUMNS]."""
    return c * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def kept_matches(state, score, point, valid, kappa, geo, PLACES: tl.constexpr):
    """The matches of every query as tuples of SLOTS: keys, scores, coordinates. A place has one key or none, its own.

    Places beyond kappa hold what nothing beats and nothing is near.
    """
    kept, its, spots = (), (), ()
    for c in tl.static_range(PLACES.SLOTS):
        place = place_of(c, PLACES.COLUMNS)
        at, here = point[:, None] * kappa + place, valid[:, None] & (place < kappa)
        key = tl.load(state + at, mask=here, other=-1)
        kept += (tl.where(key < 0, EMPTY + place, key),)
        its += (tl.load(score + at, mask=here, other=float("inf")),)
        spots += (spot_of(key, geo, PLACES.SEPARATED),)
    return kept, its, spots


@triton.jit
def spot_of(key, geo, SEPARATED: tl.constexpr):
    """What tells how far keys are apart: their coordinates, or the keys where only equal ones are too near."""
    spot = ()
    rest = tl.maximum(key, 0)
    if SEPARATED:
        for a in tl.static_range(len(geo.k) - 1, 0, -1):
            up = divide(rest, geo.magic[a])
            spot += (rest - up * geo.k[a],)
            rest = up
    return spot + (rest,)  # noqa: RUF005 - Triton knows no unpacking


@triton.jit
def by_window(x, WINDOWS: tl.constexpr):
    """[BLOCK_Q, BLOCK_Q] -> [BLOCK_Q, pairs, WINDOWS, 2]; in layout each thread has a window whole."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // WINDOWS // 2, WINDOWS, 2])


@triton.jit
def first_keys(s, bests, new, WINDOWS: tl.constexpr):
    """The keys [BLOCK_Q] of these scores, of equal ones the lowest, by windows."""
    keys = by_window(tl.broadcast_to(new[None, :], s.shape), WINDOWS)
    best = tl.where(by_window(s, WINDOWS) == bests[:, None, :, None], keys, NO_KEY)
    return quarters(tl.min(tl.min(best, axis=3), axis=1))


@triton.jit
def quarters(x):
    """[BLOCK_Q, 4] -> its columns."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def least(its):
    """The worst score of every query, [BLOCK_Q, 1]."""
    worst = its[0]
    for c in tl.static_range(1, len(its)):
        worst = tl.minimum(worst, its[c])
    return tl.min(worst, axis=1)[:, None]


@triton.jit
def enter(kept, its, spots, new, s, reach, geo, PLACES: tl.constexpr):
    """Let the best key of a window in where it beats the worst match and no better one is near; near ones go."""
    new, s = new[:, None], s[:, None]
    spot = spot_of(new, geo, PLACES.SEPARATED)
    close, refused = (), s != s
    for c in tl.static_range(PLACES.SLOTS):
        near = (spot[0] - spots[c][0]).to(tl.uint32) + reach <= 2 * reach
        for a in tl.static_range(1, len(spot)):
            near = near & ((spot[a] - spots[c][a]).to(tl.uint32) + reach <= 2 * reach)
        if PLACES.PADDED:  # an empty place may seem near: there is nothing better in it, and nothing to lose
            near = near & (kept[c] < EMPTY)
        close += (near,)
        refused = refused | (near & (its[c] >= s))
    takes = (s > least(its)) & (tl.max(refused.to(tl.int32), axis=1)[:, None] == 0)
    left, left_its = (), ()
    for c in tl.static_range(PLACES.SLOTS):
        gone = close[c] & takes
        left += (tl.where(gone, EMPTY + place_of(c, PLACES.COLUMNS), kept[c]),)
        left_its += (tl.where(gone, -float("inf"), its[c]),)
    lowest = tl.minimum(s, least(left_its))
    # Into an empty place, else into that of the worst, of equal ones the highest key.
    last = new * 0 - 1
    for c in tl.static_range(PLACES.SLOTS):
        last = tl.maximum(last, tl.where(left_its[c] == lowest, left[c], -1))
    last = tl.max(last, axis=1)[:, None]
    kept, its, to = (), (), spots
    spots = ()
    for c in tl.static_range(PLACES.SLOTS):
        here = takes & (left[c] == last)
        kept += (tl.where(here, new, left[c]),)
        its += (tl.where(here, s, left_its[c]),)
        own = ()
        for a in tl.static_range(len(spot)):
            own += (tl.where(here, spot[a], to[c][a]),)
        spots += (own,)
    return kept, its, spots, takes


@triton.jit
def enter_offer(kept, its, spots, changed, s, new, reach, geo, PLACES: tl.constexpr):
    """Let in the best key of each window of an offer with scores s; `changed`: which queries took one."""
    bests = tl.max(tl.max(by_window(s, PLACES.WINDOWS), axis=3), axis=1)  # [BLOCK_Q, WINDOWS]
    tops = quarters(bests)
    top = tl.maximum(tl.maximum(tops[0], tops[1]), tl.maximum(tops[2], tops[3]))
    hope = top[:, None] > least(its)
    if tl.max(hope.to(tl.int32)) > 0:
        firsts = first_keys(s, bests, new, PLACES.WINDOWS)
        for w in range(PLACES.WINDOWS):
            top, first = tops[0], firsts[0]
            for n in tl.static_range(1, len(tops)):
                top, first = tl.where(w == n, tops[n], top), tl.where(w == n, firsts[n], first)
            kept, its, spots, takes = enter(kept, its, spots, first, top, reach, geo, PLACES)
            changed = changed | takes
    return kept, its, spots, changed


@triton.jit
def store_matches(state, score, point, valid, kappa, kept, its):
    """Store the matches best first, equal scores by key; an empty place has the lowest score and the highest key."""
    scores = ()
    for c in tl.static_range(len(kept)):
        scores += (tl.where(kept[c] < EMPTY, its[c], -float("inf")),)
    for c in tl.static_range(len(kept)):
        ahead = kept[c] * 0
        for d in tl.static_range(len(kept)):
            other, its = scores[d][:, None, :], scores[c][:, :, None]
            before = (other > its) | ((other == its) & (kept[d][:, None, :] < kept[c][:, :, None]))
            ahead += tl.sum(before.to(tl.int32), axis=2)
        at, here = point[:, None] * kappa + ahead, valid[:, None] & (ahead < kappa)
        tl.store(state + at, tl.where(kept[c] < EMPTY, kept[c], -1), mask=here)
        tl.store(score + at, scores[c], mask=here)


@triton.jit
def precedes(key, score, place, other, its, c, BY_KEY: tl.constexpr):
    """Whether a match stands before the other, which is at place c: by score, then by key or by place; -1 last."""
    tie = key < other if BY_KEY else place < c
    ahead = (score > its) | ((score == its) & tie)
    return ((key >= 0) & (ahead | (other < 0))) | ((key < 0) & (other < 0) & (place < c))


@triton.jit
def arrange_kernel(
    index, score, index_out, score_out, rows, queries, count, kappa, BY_KEY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[count, P] -> [P, kappa] best first, equal scores by key or in the order given, -1 last and beyond count."""
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = tl.cast(rows, tl.int64) * queries
    valid = point < plane
    for e in range(count):
        key = tl.load(index + e * plane + point, mask=valid, other=-1)
        s = tl.load(score + e * plane + point, mask=valid, other=0.0)
        place = point * kappa
        for f in range(count):
            rival = tl.load(index + f * plane + point, mask=valid, other=-1)
            theirs = tl.load(score + f * plane + point, mask=valid, other=0.0)
            place += precedes(rival, theirs, key * 0 + f, key, s, e, BY_KEY).to(tl.int32)
        tl.store(index_out + place, key, mask=valid)
        tl.store(score_out + place, s, mask=valid)
    for e in range(count, kappa):
        tl.store(index_out + point * kappa + e, point.to(tl.int32) * 0 - 1, mask=valid)
        tl.store(score_out + point * kappa + e, (point * 0).to(tl.float32) - float("inf"), mask=valid)
