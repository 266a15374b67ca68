"""Section 14 of DESIGN in plain Python: tiles as lists of queries, lane groups as sets of keys."""

from __future__ import annotations

import math

import torch

from support.cases import Case, Tensors
from support.plain import WORD, allowed, box, distance, flat, noise, points, radii, reached, scores, starts

SIDES = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (2, 2, 4, 4)}


def tile_search(case: Case, tensors: Tensors, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and score [B, H, *G, kappa] of integer-valued features."""
    rows = [_row(case, tensors, row, seed) for row in range(case.batch * case.heads)]
    shape = (case.batch, case.heads, *case.grid, case.kappa)
    index = torch.tensor([[[j for j, _ in found] for found in row] for row in rows], dtype=torch.int32)
    score = torch.tensor([[[s for _, s in found] for found in row] for row in rows], dtype=torch.float32)
    return index.reshape(shape), score.reshape(shape)


def tiles(grid):
    """The queries of each tile."""
    sides = SIDES[len(grid)]
    groups = {}
    for i, place in enumerate(points(grid)):
        groups.setdefault(tuple(c // side for c, side in zip(place, sides, strict=True)), []).append(i)
    return list(groups.values())


def _row(case: Case, tensors: Tensors, row: int, seed: int):
    places, key_places = points(case.grid), points(case.keys_grid)
    rank, close = len(case.grid), starts(case, tensors, row)
    score, keys = scores(case, tensors, row), allowed(case, tensors, row)
    near_to = [reached(case, near) for near in close]

    def drawn(n, i, run, sweep, draw):
        return noise(seed, row, i, run, sweep, draw) * n // WORD

    def in_box(i, run, sides, sweep, draw):
        return flat([s[drawn(len(s), i, run, sweep, draw + axis)] for axis, s in enumerate(sides)], case.keys_grid)

    def fresh(i, run, sweep, draw, first, entry):
        if case.reach is not None:
            return in_box(i, run, box(case, close[i][entry % len(close[i])], None), sweep, first)
        return keys[drawn(len(keys), i, run, sweep, draw)] if keys else None

    def near(j, m):
        return distance(key_places[j], key_places[m]) <= case.separation

    def best_first(i, some):
        return sorted(some, key=lambda j: (-score[i][j], j))

    def enters(i, j):
        s = score[i][j]
        if any(near(j, m) and score[i][m] >= s for m in kept[i]):
            return False
        if len(kept[i]) == case.kappa and s <= score[i][kept[i][-1]]:
            return False
        kept[i] = best_first(i, [*(m for m in kept[i] if not near(m, j)), j])[: case.kappa]
        return True

    kept = []
    for i in range(len(places)):
        mine = []
        for run in range(min(case.warm, case.kappa) or 1):
            start = fresh(i, run, 0, 0, 0, run)
            if case.warm:
                batch, head = divmod(row, case.heads)
                given = int(tensors.warm.index[batch, head].reshape(len(places), -1)[i, run])
                there = given in keys and given in near_to[i]
                if there and not any(near(given, m) for m in mine):
                    start = given
            if start in keys and not any(near(start, m) for m in mine):
                mine.append(start)
        kept.append(best_first(i, mine))

    for sweep in range(1, case.sweeps + 1):
        before = [list(mine) for mine in kept]
        kinds = []
        for number, jump in enumerate(case.jumps):
            if case.propagate in ("shift", "both") or (case.propagate == "turns" and sweep % 2):
                kinds.append(("shift", number, jump))
            if case.propagate in ("stay", "both") or (case.propagate == "turns" and sweep % 2 == 0):
                kinds.append(("stay", number, jump))
        kinds += [("gossip", g, 0) for g in range(case.gossip)]
        kinds += [("random", n, radius) for n, radius in enumerate(radii(case)) if n % 2 != sweep % 2]

        def offer(i, place_in_sweep, kind, number, reach, before=before, sweep=sweep):
            found, own = sought(i, place_in_sweep, kind, number, reach, before, sweep)
            if found in keys or not before[i]:
                return found if found in keys else None
            return before[i][0] if own is None else own

        def sought(i, place_in_sweep, kind, number, reach, before, sweep):
            entry = (i + place_in_sweep + sweep) % case.kappa if sweep > 1 else 0

            def match_of(p):
                return before[p][entry] if entry < len(before[p]) else None

            if kind == "gossip":
                return match_of(drawn(len(places), i, 0, sweep, number)), match_of(i)
            if kind == "random":
                first = case.gossip + number * (rank + 1)
                m = match_of(i)
                if m is None:
                    return fresh(i, 0, sweep, first + rank, first, entry), None
                return in_box(i, 0, box(case, m, reach), sweep, first), m
            axis, side = divmod((sum(places[i]) + sweep + number) % (2 * rank), 2)
            far = reach if kind == "shift" else reach * SIDES[rank][axis]
            step = [(2 * side - 1) * far * (a == axis) for a in range(rank)]
            p = flat([c + s for c, s in zip(places[i], step, strict=True)], case.grid)
            m = None if p is None else match_of(p)
            if m is None or kind == "stay":
                return m, match_of(i)
            return flat([c - s for c, s in zip(key_places[m], step, strict=True)], case.keys_grid), match_of(i)

        took = set()
        for tile in tiles(case.grid):
            lanes = {}  # the place of each query in its tile; where a tile sticks out the first query speaks
            for i in tile:
                place = [c % side for c, side in zip(places[i], SIDES[rank], strict=True)]
                lanes[flat(place, SIDES[rank])] = i
            for n, kind in enumerate(kinds):
                offers = {i: offer(i, n, *kind) for i in tile}
                offered = {lane: offers[lanes.get(lane, lanes[0])] for lane in range(64)}
                for part in range(4 if case.kappa > 1 else 1):
                    group = [j for lane, j in offered.items() if case.kappa == 1 or lane % 8 // 2 == part]
                    group = {j for j in group if j is not None}
                    for i in tile:
                        legal = [j for j in group if j in near_to[i]]
                        if legal and enters(i, max(legal, key=lambda j, i=i: (score[i][j], -j))):
                            took.add(i)
        if len(took) * 256 < len(places):
            break
    none = [(-1, -math.inf)] * case.kappa
    return [([(j, score[i][j]) for j in mine] + none)[: case.kappa] for i, mine in enumerate(kept)]
