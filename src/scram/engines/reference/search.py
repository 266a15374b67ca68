"""Algorithm 1 of the paper and its extensions: for every query, its best keys anywhere in the grid.

Works on *points*: point = row*N + query, so that batches, heads and queries are one axis P, taken in chunks C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...grid import LegalKeys, coordinates, flat, grid_of, inside, key_row, rows, within
from ...noise import below, noise
from ...scoring import accumulator, pair_score
from ...types import Matches, Score, Search

CHUNK_ELEMENTS = 1 << 21  # of gathered keys at a time


def search(
    q: Tensor,
    k: Tensor,
    settings: Search,
    *,
    seed: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    score: Score,
    warm: Matches | None,
) -> Matches:
    """q [B, H, *G, E], k [B, Hk, *G', E], both prepared for `score` -> Matches of kappa keys per query."""
    problem = Problem(q, k, seed, causal, key_mask, score)
    keys: list[Tensor] = []
    scores: list[Tensor] = []
    for run in range(settings.matches):
        start = None if warm is None or run >= warm.index.shape[-1] else warm.index[..., run].flatten().long()
        key, best = _run(problem, settings, run, start, keys)
        keys.append(key)
        scores.append(best)
    index, found = _best_first(torch.stack(keys, -1), torch.stack(scores, -1))
    shape = (*q.shape[:-1], settings.matches)
    return Matches(index.to(torch.int32).reshape(shape), found.float().reshape(shape), problem.key_grid)


def _best_first(index: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """[P, kappa] each, sorted by score, equal scores in run order, -1 last."""
    by_score = score.argsort(dim=-1, descending=True, stable=True)
    some_first = (index.gather(-1, by_score) >= 0).int().argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, some_first)
    return index.gather(-1, order), score.gather(-1, order)


def _run(
    problem: Problem, settings: Search, run: int, start: Tensor | None, earlier: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """One search for one more key per point, farther than the separation from every earlier one: key [P], best [P]."""
    nothing = torch.full((problem.points,), -1, device=problem.q.device)
    key, best = nothing, torch.full(nothing.shape, -torch.inf, dtype=problem.wide, device=nothing.device)
    for sweep in range(settings.sweeps + 1):
        before, chunks = key, []
        for at in problem.chunks():
            points = _Points(problem, at, run, sweep, before, best, earlier, settings.separation)
            if sweep == 0:
                points.start(start)
            else:
                for jump in settings.jumps:
                    points.propagate(before, jump, settings.propagate)
                points.gossip(before, settings.gossip)
                points.random_search(first_draw=settings.gossip)
            chunks.append((points.key, points.best))
        if chunks:
            key, best = torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])
    return key, best


class Problem:
    """What stays the same during a search."""

    def __init__(self, q: Tensor, k: Tensor, seed: Tensor, causal: bool, key_mask: Tensor | None, score: Score) -> None:
        self.query_grid, self.key_grid = grid_of(q), grid_of(k)
        self.queries, self.keys = math.prod(self.query_grid), math.prod(self.key_grid)
        self.heads, self.key_heads = q.shape[1], k.shape[1]
        self.q, self.k = rows(q).flatten(0, 1), rows(k).flatten(0, 1)
        self.points, self.wide = self.q.shape[0], accumulator(q.dtype)
        self.legal = LegalKeys.of(q, k, causal, key_mask)
        self.seed, self.score = seed, score
        every = torch.arange(self.points, device=q.device)
        self.row, self.query = every // self.queries, every % self.queries

    def chunks(self) -> Iterator[Tensor]:
        size = max(1, CHUNK_ELEMENTS // self.q.shape[-1])
        for begin in range(0, self.points, size):
            yield torch.arange(begin, min(begin + size, self.points), device=self.q.device)


class _Points:
    """A chunk of points in one sweep, with the best key so far of each: key [C], best [C]."""

    def __init__(
        self,
        problem: Problem,
        at: Tensor,
        run: int,
        sweep: int,
        key: Tensor,
        best: Tensor,
        earlier: list[Tensor],
        separation: int,
    ) -> None:
        self.problem, self.sweep, self.separation = problem, sweep, separation
        self.row, self.query = at // problem.queries, at % problem.queries
        self.place = coordinates(self.query, problem.query_grid)
        self.q, self.key, self.best = problem.q[at], key[at], best[at]
        self.key_row = key_row(self.row, problem.heads, problem.key_heads)
        self.earlier = [match[at] for match in earlier]
        self.choices = problem.legal.total(self.row, self.query)
        self.counters = (self.row, self.query, run, sweep)

    def below(self, draw: int, n: Tensor | int) -> Tensor:
        return below(noise(self.problem.seed, *self.counters, draw), n)

    def legal(self, key: Tensor, exists: Tensor) -> Tensor:
        """Whether `key` (any value where it does not exist) may be taken in this run."""
        safe = key.clamp(0, self.problem.keys - 1)
        ok = exists & (key == safe) & self.problem.legal.allows(self.row, self.query, safe)
        place = coordinates(safe, self.problem.key_grid)
        for match in self.earlier:
            near = within(place, coordinates(match, self.problem.key_grid), self.separation)
            ok = ok & ~(near & (match >= 0))
        return ok

    def score(self, key: Tensor) -> Tensor:
        found = pair_score(self.q, self.problem.k[self.key_row * self.problem.keys + key], self.problem.score)
        return torch.where(found.isnan(), -torch.inf, found)

    def offer(self, key: Tensor, exists: Tensor) -> None:
        """Take the candidate where it is legal and strictly better."""
        safe = key.clamp(0, self.problem.keys - 1)
        score = self.score(safe)
        better = (score > self.best) & self.legal(key, exists)
        self.key, self.best = torch.where(better, safe, self.key), torch.where(better, score, self.best)

    def fresh(self, draw: int) -> tuple[Tensor, Tensor]:
        """A key drawn from the legal ones, and whether there is any."""
        some = self.choices > 0
        return self.problem.legal.nth(self.row, self.below(draw, self.choices)), some

    def start(self, warm: Tensor | None) -> None:
        """A legal start is kept whatever its score."""
        key, exists = self.fresh(0)
        if warm is not None:
            given = warm[self.row * self.problem.queries + self.query]
            usable = self.legal(given, given >= 0)
            key, exists = torch.where(usable, given, key), usable | exists
        taken = self.legal(key, exists)
        self.key = torch.where(taken, key, -1)
        self.best = torch.where(taken, self.score(key.clamp(0)), -torch.inf)

    def propagate(self, before: Tensor, jump: int, how: str) -> None:
        """The matches that the neighbours `jump` away had before this sweep: moved along, or as they are."""
        shift = how in ("shift", "both") or (how == "turns" and self.sweep % 2 == 1)
        stay = how in ("stay", "both") or (how == "turns" and self.sweep % 2 == 0)
        grid = self.problem.query_grid
        for axis in range(len(grid)):
            for step in (-jump, jump):
                there = [place + step * (a == axis) for a, place in enumerate(self.place)]
                exists = inside(there, grid)
                neighbour = torch.where(exists, flat(there, grid), 0)
                key = before[self.row * self.problem.queries + neighbour]
                exists = exists & (key >= 0)
                if shift:
                    moved = [at - step * (a == axis) for a, at in enumerate(coordinates(key, self.problem.key_grid))]
                    on_grid = inside(moved, self.problem.key_grid)
                    self.offer(flat(moved, self.problem.key_grid), exists & on_grid)
                if stay:
                    self.offer(key, exists)

    def gossip(self, before: Tensor, count: int) -> None:
        """The matches of queries drawn from the whole row."""
        for draw in range(count):
            other = self.below(draw, self.problem.queries)
            key = before[self.row * self.problem.queries + other]
            self.offer(key, key >= 0)

    def random_search(self, first_draw: int) -> None:
        """One key from ever smaller boxes around the best so far, cut at the border; a fresh one while keyless."""
        grid = self.problem.key_grid
        rank, reach, draw = len(grid), max(grid), first_draw
        while reach >= 1:
            near = []
            for axis, centre in enumerate(coordinates(self.key.clamp(0), grid)):
                low, high = (centre - reach).clamp(min=0), (centre + reach).clamp(max=grid[axis] - 1)
                near.append(low + self.below(draw + axis, high - low + 1))
            keyless = self.key < 0
            fresh, some = self.fresh(draw + rank)
            self.offer(torch.where(keyless, fresh, flat(near, grid)), ~keyless | some)
            reach, draw = reach // 2, draw + rank + 1
