"""SPEC in plain Python: sets, loops and ints. Slow, and written without looking at the library's own code."""

from __future__ import annotations

import itertools
import math

import torch

from cases import Case, Tensors

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


def points(grid):
    """Every point of a grid in row-major order."""
    return list(itertools.product(*map(range, grid)))


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
        state = _run(case, row, run, seed, score, keys, [[j for j, _ in f if j >= 0] for f in found], warm)
        for i in range(queries):
            j = state[i]
            found[i].append((-1, -math.inf) if j is None else (j, score[i][j]))
    return [sorted(f, key=lambda one: (one[0] < 0, -one[1])) for f in found]


def _run(case: Case, row, run, seed, score, keys, earlier, warm):
    places, key_places = points(case.grid), points(case.keys_grid)
    rank, radii = len(case.grid), []
    r = max(case.keys_grid)
    while r >= 1:
        radii.append(r)
        r //= 2

    def own(i):
        return [j for j in keys if not case.causal or j <= i]

    def below(n, i, sweep, draw):
        return noise(seed, row, i, run, sweep, draw) * n // WORD

    def legal(i, j):
        return j in own(i) and all(distance(key_places[j], key_places[e]) > case.separation for e in earlier[i])

    def fresh(i, sweep, draw):
        choices = own(i)
        return choices[below(len(choices), i, sweep, draw)] if choices else None

    state = []
    for i in range(len(places)):
        start = warm[i] if warm[i] is not None and warm[i] >= 0 and legal(i, warm[i]) else fresh(i, 0, 0)
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

            for jump, axis, sign in itertools.product(case.jumps, range(rank), (-1, 1)):
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
                take(before[below(len(places), i, sweep, g)])
            for number, reach in enumerate(radii):
                draw = case.gossip + number * (rank + 1)
                if best is None:
                    take(fresh(i, sweep, draw + rank))
                    continue
                near = []
                for axis, (c, extent) in enumerate(zip(key_places[best], case.keys_grid, strict=True)):
                    low, high = max(c - reach, 0), min(c + reach, extent - 1)
                    near.append(low + below(high - low + 1, i, sweep, draw + axis))
                take(flat(near, case.keys_grid))
            state[i] = best
    return state


def windows(case: Case, tensors: Tensors, index: torch.Tensor) -> torch.Tensor:
    """S_i as a table: bool [B*H, N, M], from match indices [B, H, *G, kappa]."""
    radius = (case.radius,) * len(case.grid) if isinstance(case.radius, int) else case.radius
    places, key_places = points(case.grid), points(case.keys_grid)
    table = torch.zeros(case.batch * case.heads, len(places), len(key_places), dtype=torch.bool)
    index = index.reshape(case.batch * case.heads, len(places), index.shape[-1])
    for row in range(len(table)):
        keys = set(allowed(case, tensors, row))
        for i in range(len(places)):
            for match in index[row, i].tolist():
                if not 0 <= match < len(key_places):
                    continue
                box = [range(c - b, c + b + 1) for c, b in zip(key_places[match], radius, strict=True)]
                for place in itertools.product(*box):
                    j = flat(place, case.keys_grid)
                    if j is not None and j in keys and (not case.causal or j <= i):
                        table[row, i, j] = True
    return table


def tile_windows(case: Case, tensors: Tensors, index: torch.Tensor) -> torch.Tensor:
    """S_i under window="tile": the legal keys of all cells that hold a key of a window of a query of i's tile."""
    rank = len(case.grid)
    radius = (case.radius,) * rank if isinstance(case.radius, int) else case.radius
    side = [max(1, 2 * min(b, extent - 1)) for b, extent in zip(radius, case.keys_grid, strict=True)]
    tile = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (2, 2, 4, 4)}[rank]

    def cell(place):
        return tuple(c // s for c, s in zip(place, side, strict=True))

    places, key_places = points(case.grid), points(case.keys_grid)
    own = [tuple(c // s for c, s in zip(place, tile, strict=True)) for place in places]
    index = index.reshape(case.batch * case.heads, len(places), index.shape[-1])
    table = torch.zeros(case.batch * case.heads, len(places), len(key_places), dtype=torch.bool)
    for row in range(len(table)):
        seen = {}
        for i in range(len(places)):
            for match in index[row, i].tolist():
                if 0 <= match < len(key_places):
                    box = [
                        range(max(c - b, 0), min(c + b + 1, extent))
                        for c, b, extent in zip(key_places[match], radius, case.keys_grid, strict=True)
                    ]
                    seen.setdefault(own[i], set()).update(map(cell, itertools.product(*box)))
        for i in range(len(places)):
            for j in allowed(case, tensors, row):
                if cell(key_places[j]) in seen.get(own[i], ()) and (not case.causal or j <= i):
                    table[row, i, j] = True
    return table


def attend(case: Case, tensors: Tensors, leaves: list[torch.Tensor], dropout_seed: int = 0):
    """out and lse of the case by a dense table of scores, differentiable in the leaves q, k, v and extra."""
    q, k, v, *extra = leaves
    some = {"query": windows, "tile": tile_windows}[case.window](case, tensors, tensors.matches.index)
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
