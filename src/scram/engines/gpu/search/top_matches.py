"""Several matches of a query in Triton, kept jointly: what enters, what goes, and their order.

They are tuples of SLOTS [BQ, COLUMNS]: two threads hold the matches of a query, and exchange four times per offer.
[BQ] would be held twice over, by as many threads. PLACES are `block_sizes.Places`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import divide
from ..runtime.launch import Kernel, cached

NO_KEY = tl.constexpr(2**31 - 1)  # behind every key
EMPTY = tl.constexpr(2**31 - 33)  # and so are these: places of a tuple without a match, each its own


@cached
def arrange(points: int, by_key: bool) -> Kernel:
    return Kernel(arrange_kernel, triton.cdiv(points, 256), {"BY_KEY": by_key, "BLOCK": 256, "enable_fp_fusion": True})


@triton.jit
def slot_places(c, COLUMNS: tl.constexpr):
    """The places of slot c, [1, COLUMNS]."""
    return c * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def load_matches(state, score, point, exists, kappa, geo, PLACES: tl.constexpr):
    """The matches of every query as tuples of SLOTS [BQ, COLUMNS]: keys, scores, coordinates.

    A place has one key or none, its own. Places beyond kappa hold what nothing beats and nothing is near.
    """
    keys = ()
    scores = ()
    spots = ()
    for c in tl.static_range(PLACES.SLOTS):
        place = slot_places(c, PLACES.COLUMNS)  # [1, COLUMNS]
        at = point[:, None] * kappa + place  # [BQ, COLUMNS]
        inside = exists[:, None] & (place < kappa)
        key = tl.load(state + at, mask=inside, other=-1)  # [BQ, COLUMNS]
        keys += (tl.where(key < 0, EMPTY + place, key),)
        scores += (tl.load(score + at, mask=inside, other=float("inf")),)
        spots += (spot_of(key, geo, PLACES.SEPARATED),)
    return keys, scores, spots


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
def by_lane_group(x, LANE_GROUPS: tl.constexpr):
    """[BQ, BQ] -> [BQ, pairs, LANE_GROUPS, 2]; in layout each thread has a group whole."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANE_GROUPS // 2, LANE_GROUPS, 2])


@triton.jit
def first_keys(s, bests, new, LANE_GROUPS: tl.constexpr):
    """The keys [BQ] of these scores, of equal ones the lowest, by groups of lanes."""
    keys = by_lane_group(tl.broadcast_to(new[None, :], s.shape), LANE_GROUPS)
    best = tl.where(by_lane_group(s, LANE_GROUPS) == bests[:, None, :, None], keys, NO_KEY)
    return columns_of(tl.min(tl.min(best, axis=3), axis=1))


@triton.jit
def columns_of(x):
    """[BQ, 4] -> its columns [BQ]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def least(scores):
    """The worst score of every query, [BQ, 1]."""
    worst = scores[0]  # [BQ, COLUMNS]
    for c in tl.static_range(1, len(scores)):
        worst = tl.minimum(worst, scores[c])
    return tl.min(worst, axis=1)[:, None]


@triton.jit
def enter(keys, scores, spots, new, s, reach, geo, PLACES: tl.constexpr):
    """Let the best key [BQ] of a group in where it beats the worst match and no better one is near; near ones go."""
    new = new[:, None]  # [BQ, 1]
    s = s[:, None]  # [BQ, 1]
    spot = spot_of(new, geo, PLACES.SEPARATED)
    close = ()
    refused = s != s
    for c in tl.static_range(PLACES.SLOTS):
        near = (spot[0] - spots[c][0]).to(tl.uint32) + reach <= 2 * reach  # [BQ, COLUMNS]
        for a in tl.static_range(1, len(spot)):
            near = near & ((spot[a] - spots[c][a]).to(tl.uint32) + reach <= 2 * reach)
        if PLACES.PADDED:  # an empty place may seem near: there is nothing better in it, and nothing to lose
            near = near & (keys[c] < EMPTY)
        close += (near,)
        refused = refused | (near & (scores[c] >= s))
    takes = (s > least(scores)) & (tl.max(refused.to(tl.int32), axis=1)[:, None] == 0)  # [BQ, 1]
    left_keys = ()
    left_scores = ()
    for c in tl.static_range(PLACES.SLOTS):
        gone = close[c] & takes  # [BQ, COLUMNS]
        left_keys += (tl.where(gone, EMPTY + slot_places(c, PLACES.COLUMNS), keys[c]),)
        left_scores += (tl.where(gone, -float("inf"), scores[c]),)
    lowest = tl.minimum(s, least(left_scores))  # [BQ, 1]
    # Into an empty place, else into that of the worst, of equal ones the highest key.
    last = new * 0 - 1
    for c in tl.static_range(PLACES.SLOTS):
        last = tl.maximum(last, tl.where(left_scores[c] == lowest, left_keys[c], -1))
    last = tl.max(last, axis=1)[:, None]  # [BQ, 1]
    keys = ()
    scores = ()
    moved = ()
    for c in tl.static_range(PLACES.SLOTS):
        replaced = takes & (left_keys[c] == last)  # [BQ, COLUMNS]
        keys += (tl.where(replaced, new, left_keys[c]),)
        scores += (tl.where(replaced, s, left_scores[c]),)
        new_spot = ()
        for a in tl.static_range(len(spot)):
            new_spot += (tl.where(replaced, spot[a], spots[c][a]),)
        moved += (new_spot,)
    return keys, scores, moved, takes


@triton.jit
def enter_offer(keys, scores, spots, changed, s, new, reach, geo, PLACES: tl.constexpr):
    """Let in the best key of each group of lanes with scores s [BQ, BQ]; `changed`: which queries took one."""
    bests = tl.max(tl.max(by_lane_group(s, PLACES.LANE_GROUPS), axis=3), axis=1)  # [BQ, LANE_GROUPS]
    tops = columns_of(bests)
    top = tl.maximum(tl.maximum(tops[0], tops[1]), tl.maximum(tops[2], tops[3]))  # [BQ]
    hope = top[:, None] > least(scores)  # [BQ, 1]
    if tl.max(hope.to(tl.int32)) > 0:
        firsts = first_keys(s, bests, new, PLACES.LANE_GROUPS)
        for w in range(PLACES.LANE_GROUPS):
            top = tops[0]
            first = firsts[0]
            for n in tl.static_range(1, len(tops)):
                top = tl.where(w == n, tops[n], top)
                first = tl.where(w == n, firsts[n], first)
            keys, scores, spots, takes = enter(keys, scores, spots, first, top, reach, geo, PLACES)
            changed = changed | takes
    return keys, scores, spots, changed


@triton.jit
def store_matches(state, score, point, exists, kappa, keys, scores):
    """Store the matches best first, equal scores by key; an empty place has the lowest score and the highest key."""
    final_scores = ()
    for c in tl.static_range(len(keys)):
        final_scores += (tl.where(keys[c] < EMPTY, scores[c], -float("inf")),)
    for c in tl.static_range(len(keys)):
        ahead = keys[c] * 0  # [BQ, COLUMNS]
        for d in tl.static_range(len(keys)):
            other = final_scores[d][:, None, :]  # [BQ, 1, COLUMNS]
            own = final_scores[c][:, :, None]  # [BQ, COLUMNS, 1]
            before = (other > own) | ((other == own) & (keys[d][:, None, :] < keys[c][:, :, None]))
            ahead += tl.sum(before.to(tl.int32), axis=2)
        at = point[:, None] * kappa + ahead  # [BQ, COLUMNS]
        inside = exists[:, None] & (ahead < kappa)
        tl.store(state + at, tl.where(keys[c] < EMPTY, keys[c], -1), mask=inside)
        tl.store(score + at, final_scores[c], mask=inside)


@triton.jit
def precedes(key, score, place, other_key, other_score, c, BY_KEY: tl.constexpr):
    """Whether a match stands before the other, which is at place c: by score, then by key or by place; -1 last."""
    tie = key < other_key if BY_KEY else place < c
    ahead = (score > other_score) | ((score == other_score) & tie)
    return ((key >= 0) & (ahead | (other_key < 0))) | ((key < 0) & (other_key < 0) & (place < c))


@triton.jit
def arrange_kernel(
    index, score, index_out, score_out, rows, queries, count, kappa, BY_KEY: tl.constexpr, BLOCK: tl.constexpr
):
    """[count, P] -> [P, kappa] best first, equal scores by key or in the order given, -1 last and beyond count."""
    point = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    plane = tl.cast(rows, tl.int64) * queries
    exists = point < plane
    for e in range(count):
        key = tl.load(index + e * plane + point, mask=exists, other=-1)  # [BLOCK]
        s = tl.load(score + e * plane + point, mask=exists, other=0.0)  # [BLOCK]
        place = point * kappa
        for f in range(count):
            rival = tl.load(index + f * plane + point, mask=exists, other=-1)  # [BLOCK]
            rival_score = tl.load(score + f * plane + point, mask=exists, other=0.0)  # [BLOCK]
            place += precedes(rival, rival_score, key * 0 + f, key, s, e, BY_KEY).to(tl.int32)
        tl.store(index_out + place, key, mask=exists)
        tl.store(score_out + place, s, mask=exists)
    for e in range(count, kappa):
        tl.store(index_out + point * kappa + e, point.to(tl.int32) * 0 - 1, mask=exists)
        tl.store(score_out + point * kappa + e, (point * 0).to(tl.float32) - float("inf"), mask=exists)
