"""SPEC in plain Python: sets, loops and ints. Slow, and written without looking at the library's own code."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import cache

import torch

from support.cases import Case, Tensors

WORD = 1 << 32
VECTORS = [  # of the noise: seed, counters, bits
    (0, (), 2685500393),
    (0, (0,), 14768737),
    (1, (0,), 1059457021),
    (0, (0, 0, 0, 0, 0), 3062336776),
    (7, (1, 2, 3, 4, 5), 4142002953),
    (-1, (0, 1), 3480778224),
    (2**63 - 1, (3, 65535, 0, 8, 40), 2339114107),
    (0x123456789ABCDEF0, (2**31 - 1, 2**32 - 1), 2838911792),
]


def noise(seed, *counters):
    """32 bits from (seed, counters), in Python ints."""
    state = 0
    for word in (seed, seed >> 32, *counters):
        x = ((state ^ (word % WORD)) + 0x9E3779B9) % WORD
        x = ((x ^ x >> 16) * 0x7FEB352D) % WORD
        x = ((x ^ x >> 15) * 0x846CA68B) % WORD
        state = x ^ x >> 16
    return state


@cache
def points(grid):
    """Every point of a grid in row-major order."""
    return tuple(itertools.product(*map(range, grid)))


def flat(place, grid):
    """The row-major index of a point, None off the grid."""
    if any(not 0 <= c < extent for c, extent in zip(place, grid, strict=True)):
        return None
    index = 0
    for c, extent in zip(place, grid, strict=True):
        index = index * extent + c
    return index


def distance(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def key_head(case: Case, row: int) -> tuple[int, int]:
    """Batch and key head that serve a row."""
    key_heads = case.key_heads or case.heads
    return row // case.heads, (row % case.heads) // (case.heads // key_heads)


def allowed(case: Case, tensors: Tensors, row: int) -> list[int]:
    """The unmasked keys of a row, ascending."""
    if tensors.key_mask is None:
        return list(range(case.keys))
    batch, head = divmod(row, case.heads)
    mask = tensors.key_mask[batch] if case.mask == "batch" else tensors.key_mask[batch, head]
    return [j for j, ok in enumerate(mask.flatten().tolist()) if ok]


def scores(case: Case, tensors: Tensors, row: int) -> list[list[int]]:
    """The exact integer scores [N][M] of a row."""
    batch, head = key_head(case, row)
    q = tensors.q[batch, row % case.heads].reshape(-1, case.width).int().tolist()
    k = tensors.k[batch, head].reshape(-1, case.width).int().tolist()
    if case.score == "l2":
        return [[-sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for b in k] for a in q]
    return [[sum(x * y for x, y in zip(a, b, strict=True)) for b in k] for a in q]


def starts(case: Case, tensors: Tensors, row: int) -> list[list[int]]:
    """Of every query the keys that its matches must be near, by their numbers; without a reach none."""
    if case.reach is None:
        return [[] for _ in points(case.grid)]
    own = []
    for place in points(case.grid):
        middle = [(c + Fraction(1, 2)) / n for c, n in zip(place, case.grid, strict=True)]
        own.append(flat([math.floor(x * m) for x, m in zip(middle, case.keys_grid, strict=True)], case.keys_grid))
    if not case.warm:
        return [[j] for j in own]
    batch, head = divmod(row, case.heads)
    given = tensors.warm.index[batch, head].reshape(len(own), -1).tolist()
    made = []
    for j, keys in zip(own, given, strict=True):
        there = [key for key in keys if 0 <= key < case.keys]
        made.append([key if 0 <= key < case.keys else (there or [j])[0] for key in keys])
    return made


def box(case: Case, center: int, radius: int | None) -> list[range]:
    """The keys around a key by axis, cut at the border and by the reach; a radius of None: by the reach alone."""
    ranges = []
    for axis, (c, extent) in enumerate(zip(points(case.keys_grid)[center], case.keys_grid, strict=True)):
        limits = [r for r in (radius, reaches(case)[axis]) if r is not None]
        ranges.append(range(max(c - min(limits), 0), min(c + min(limits), extent - 1) + 1))
    return ranges


def reaches(case: Case) -> tuple[int | None, ...]:
    return case.reach if isinstance(case.reach, tuple) else (case.reach,) * len(case.grid)


def reached(case: Case, near: list[int]) -> set[int]:
    """The keys that are near enough to one of the starts."""
    if case.reach is None:
        return set(range(case.keys))
    return {flat(place, case.keys_grid) for start in near for place in itertools.product(*box(case, start, None))}


def radii(case: Case) -> list[int]:
    """Of random search."""
    r, made = max(case.keys_grid), []
    if case.reach is not None:
        r = min(r, max(reaches(case)))
    while r >= 1 and case.random:
        made.append(r)
        r //= 2
    return made


def search(case: Case, tensors: Tensors, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and score [B, H, *G, kappa] of integer-valued features."""
    rows = [_search_row(case, tensors, row, seed) for row in range(case.batch * case.heads)]
    shape = (case.batch, case.heads, *case.grid, case.kappa)
    index = torch.tensor([[[j for j, _ in found] for found in row] for row in rows], dtype=torch.int32)
    score = torch.tensor([[[s for _, s in found] for found in row] for row in rows], dtype=torch.float32)
    return index.reshape(shape), score.reshape(shape)


def _search_row(case: Case, tensors: Tensors, row: int, seed: int):
    queries = len(points(case.grid))
    score, keys = scores(case, tensors, row), allowed(case, tensors, row)
    found = [[] for _ in range(queries)]  # (key, score) in run order
    for run in range(case.kappa):
        warm = [None] * queries
        if run < case.warm:
            batch, head = divmod(row, case.heads)
            warm = tensors.warm.index[batch, head].reshape(queries, -1)[:, run].tolist()
        earlier = [[j for j, _ in f if j >= 0] for f in found]
        state = _run(case, row, run, seed, score, keys, earlier, warm, starts(case, tensors, row))
        for i in range(queries):
            j = state[i]
            found[i].append((-1, -math.inf) if j is None else (j, score[i][j]))
    return [sorted(f, key=lambda one: (one[0] < 0, -one[1])) for f in found]


def _run(case: Case, row, run, seed, score, keys, earlier, warm, near):
    places, key_places = points(case.grid), points(case.keys_grid)
    rank = len(case.grid)
    own = [[j for j in keys if not case.causal or j <= i] for i in range(len(places))]
    open_to = [{*own[i]} & reached(case, near[i]) for i in range(len(places))]

    def below(n, i, sweep, draw):
        return noise(seed, row, i, run, sweep, draw) * n // WORD

    def legal(i, j):
        return j in open_to[i] and all(distance(key_places[j], key_places[e]) > case.separation for e in earlier[i])

    def in_box(i, sides, sweep, draw):
        return flat([s[below(len(s), i, sweep, draw + axis)] for axis, s in enumerate(sides)], case.keys_grid)

    def fresh(i, sweep, draw, first):
        if case.reach is not None:
            return in_box(i, box(case, near[i][run % len(near[i])], None), sweep, first)
        return own[i][below(len(own[i]), i, sweep, draw)] if own[i] else None

    state = []
    for i in range(len(places)):
        start = warm[i] if warm[i] is not None and warm[i] >= 0 and legal(i, warm[i]) else fresh(i, 0, 0, 0)
        state.append(start if start is not None and legal(i, start) else None)
    for sweep in range(1, case.sweeps + 1):
        shift = case.propagate in ("shift", "both") or (case.propagate == "turns" and sweep % 2 == 1)
        stay = case.propagate in ("stay", "both") or (case.propagate == "turns" and sweep % 2 == 0)
        before = list(state)
        for i, place in enumerate(places):
            best = state[i]

            def take(j, i=i):
                nonlocal best
                if j is not None and legal(i, j) and (best is None or score[i][j] > score[i][best]):
                    best = j

            for jump, axis, sign in itertools.product(case.jumps, range(rank), (-1,) if case.causal else (-1, 1)):
                step = [sign * jump * (a == axis) for a in range(rank)]
                p = flat([c + s for c, s in zip(place, step, strict=True)], case.grid)
                if p is None or before[p] is None:
                    continue
                if shift:
                    moved = [c - s for c, s in zip(key_places[before[p]], step, strict=True)]
                    take(flat(moved, case.keys_grid))
                if stay:
                    take(before[p])
            for g in range(case.gossip):
                take(before[below(i + 1 if case.causal else len(places), i, sweep, g)])
            for number, radius in enumerate(radii(case)):
                draw = case.gossip + number * (rank + 1)
                if best is None:
                    take(fresh(i, sweep, draw + rank, draw))
                else:
                    take(in_box(i, box(case, best, radius), sweep, draw))
            state[i] = best
    return state


def windows(case: Case, tensors: Tensors, index: torch.Tensor) -> torch.Tensor:
    """S_i as a table: bool [B*H, N, M], from match indices [B, H, *G, kappa]."""
    radius = (case.radius,) * len(case.grid) if isinstance(case.radius, int) else case.radius
    rows = []
    for row, matches in enumerate(index.reshape(-1, len(points(case.grid)), index.shape[-1]).tolist()):
        keys = set(allowed(case, tensors, row))
        rows.append([])
        for i, mine in enumerate(matches):
            near = set().union(*(around(case.keys_grid, match, radius) for match in mine if 0 <= match < case.keys))
            rows[-1].append([j in near and j in keys and (not case.causal or j <= i) for j in range(case.keys)])
    return torch.tensor(rows, dtype=torch.bool).reshape(-1, len(points(case.grid)), case.keys)


@cache
def around(grid: tuple[int, ...], match: int, radius: tuple[int, ...]) -> set[int]:
    """The keys of the window around a match."""
    box = [range(c - b, c + b + 1) for c, b in zip(points(grid)[match], radius, strict=True)]
    return {flat(place, grid) for place in itertools.product(*box)} - {None}


def attend(case: Case, tensors: Tensors, leaves: list[torch.Tensor], dropout_seed: int = 0):
    """out and lse of the case by a dense table of scores, differentiable in the leaves q, k, v and extra."""
    q, k, v, *extra = leaves
    some = windows(case, tensors, tensors.matches.index)
    outs, lses = [], []
    for row in range(case.batch * case.heads):
        batch, head = key_head(case, row)
        own_q = q[batch, row % case.heads].reshape(-1, case.width)
        keys, values = k[batch, head].reshape(-1, case.width), v[batch, head].reshape(-1, case.value_width)
        table = some[row]
        if extra:
            keys, values = torch.cat([keys, extra[0][batch, head]]), torch.cat([values, extra[1][batch, head]])
            table = torch.cat([table, torch.ones(len(table), case.extra, dtype=torch.bool)], 1)
        scale = case.width**-0.5 if (case.score, case.weight) == ("dot", "softmax") else 1.0
        p, lse = weigh(scale * pairwise(own_q, keys, case.score), table, case.weight)
        if case.dropout_p:
            limit = int(case.dropout_p * WORD)
            keep = [
                [noise(dropout_seed, row, i, j) >= limit for j in range(table.shape[1])] for i in range(table.shape[0])
            ]
            p = p * torch.tensor(keep) / (1 - case.dropout_p)
        outs.append(p @ values)
        lses.append(lse)
    shape = (case.batch, case.heads, *case.grid)
    if not outs:
        return torch.zeros(*shape, case.value_width, dtype=q.dtype), torch.zeros(shape, dtype=q.dtype)
    return torch.stack(outs).reshape(*shape, -1), torch.stack(lses).reshape(shape)


def pairwise(q: torch.Tensor, k: torch.Tensor, score: str) -> torch.Tensor:
    """[N, E] and [M, E] -> [N, M], each score as its definition says."""
    if score == "cosine":
        return (q @ k.T) / (q.norm(dim=-1)[:, None] * k.norm(dim=-1)[None])
    if score == "l2":
        return -(q[:, None] - k[None]).square().sum(-1)
    return q @ k.T


def weigh(a: torch.Tensor, some: torch.Tensor, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
    """f / C over the keys in the table [N, M], and log C."""
    empty = ~some.any(-1)
    top = a.detach().amax(-1) if weight == "softmax" else torch.zeros_like(a[:, 0])  # large scores have no exp
    f = {"softmax": (a - top[:, None]).exp(), "relu": a.clamp(min=0), "mean": a}[weight]
    f = torch.where(some, f, 0)
    c = f.sum(-1) if weight == "softmax" else some.sum(-1).to(a)
    c = torch.where(empty, 1, c)
    return f / c[:, None], torch.where(empty, -torch.inf, c.log() + top)
