"""Algorithm 1 of the paper and its extensions: for every query, its best keys anywhere in the grid.

Works on *points*: point = row*N + query, so that batches, heads and queries are one axis P, taken in chunks C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...core.calls import Found, SearchCall
from ...spec.grid import AllowedKeys, coordinates, flat, grid_of, inside, key_row, rows, within
from ...spec.noise import below, noise, numbered
from ...spec.schedule import moves, signs, widest
from ...spec.scoring import accumulator, pair_score

CHUNK_ELEMENTS = 1 << 21  # of gathered keys at a time


def search(call: SearchCall) -> Found:
    """One run per match, each farther than the separation from the earlier ones."""
    space = SearchSpace(call)
    keys: list[Tensor] = []
    scores: list[Tensor] = []
    for run in range(call.matches):
        start = None if call.warm is None or run >= call.warm.shape[-1] else call.warm[..., run].flatten().long()
        key, best = _run(space, run, start, keys)
        keys.append(key)
        scores.append(best)
    index, score = _best_first(torch.stack(keys, -1), torch.stack(scores, -1))
    shape = (*call.q.shape[:-1], call.matches)
    return Found(index.to(torch.int32).reshape(shape), score.float().reshape(shape))


def _best_first(index: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """[P, kappa] each, sorted by score, equal scores in run order, -1 last."""
    by_score = score.argsort(dim=-1, descending=True, stable=True)
    some_first = (index.gather(-1, by_score) >= 0).int().argsort(dim=-1, descending=True, stable=True)
    order = by_score.gather(-1, some_first)
    return index.gather(-1, order), score.gather(-1, order)


def _run(space: SearchSpace, run: int, start: Tensor | None, earlier: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One search for one more key per point, farther than the separation from every earlier one: key [P], best [P]."""
    call = space.call
    nothing = torch.full((space.points,), -1, dtype=torch.int64, device=space.q.device)
    key = nothing
    best = torch.full(nothing.shape, -torch.inf, dtype=space.wide, device=nothing.device)
    for sweep in range(call.sweeps + 1):
        before = key
        chunks = []
        for at in space.chunks():
            points = _Points(space, at, run, sweep, before, best, earlier)
            if sweep == 0:
                points.start(start)
            else:
                for jump in call.jumps:
                    points.propagate(before, jump)
                points.gossip(before)
                points.random_search()
            chunks.append((points.key, points.best))
        if chunks:
            key = torch.cat([c[0] for c in chunks])
            best = torch.cat([c[1] for c in chunks])
    return key, best


class SearchSpace:
    """What stays the same during a search: queries and keys as flat points, and which keys are allowed."""

    def __init__(self, call: SearchCall) -> None:
        q = call.q
        k = call.k
        self.call = call
        self.query_grid = grid_of(q)
        self.key_grid = grid_of(k)
        self.queries = math.prod(self.query_grid)
        self.keys = math.prod(self.key_grid)
        self.heads = q.shape[1]
        self.key_heads = k.shape[1]
        self.q = rows(q).flatten(0, 1)  # [P, E]
        self.k = rows(k).flatten(0, 1)  # [B*Hk*M, E]
        self.points = self.q.shape[0]
        self.wide = accumulator(q.dtype)
        self.allowed = AllowedKeys.of(q, k, call.causal, call.key_mask)
        every = torch.arange(self.points, device=q.device)
        self.row = every // self.queries  # [P]
        self.query = every % self.queries  # [P]
        self.number = numbered(self.row, call.rows)
        self.starts = None if call.starts is None else call.starts.reshape(self.points, call.starts.shape[-1]).long()
        self.radius = widest(self.key_grid, call.reach, call.random)

    def reached(self, at: Tensor, key: Tensor) -> Tensor:
        """Whether keys on the grid are near enough to a start of the points `at`. Both broadcast."""
        if self.starts is None:
            return torch.ones_like(key, dtype=torch.bool)
        place = [c.unsqueeze(-1) for c in coordinates(key, self.key_grid)]
        return within(place, coordinates(self.starts[at], self.key_grid), self.call.reach).any(-1)

    def around(self, center: Tensor, radius: int, drawn: Callable[[int, Tensor], Tensor]) -> Tensor:
        """A key from the box around another, cut at the border and to the reach; drawn(axis, n) is below n."""
        place = []
        for axis, (at, extent) in enumerate(zip(coordinates(center, self.key_grid), self.key_grid, strict=True)):
            far = min(radius, self.call.reach[axis]) if self.call.reach else radius
            low = (at - far).clamp(min=0)
            high = (at + far).clamp(max=extent - 1)
            place.append(low + drawn(axis, high - low + 1))
        return flat(place, self.key_grid)

    def chunks(self) -> Iterator[Tensor]:
        size = max(1, CHUNK_ELEMENTS // self.q.shape[-1])
        for begin in range(0, self.points, size):
            yield torch.arange(begin, min(begin + size, self.points), device=self.q.device)


class _Points:
    """A chunk of points in one sweep, with the best key so far of each: key [C], best [C]."""

    def __init__(
        self,
        space: SearchSpace,
        at: Tensor,
        run: int,
        sweep: int,
        key: Tensor,
        best: Tensor,
        earlier: list[Tensor],
    ) -> None:
        self.space = space
        self.sweep = sweep
        self.at = at
        self.run = run
        self.row = at // space.queries
        self.query = at % space.queries
        self.place = coordinates(self.query, space.query_grid)
        self.q = space.q[at]  # [C, E]
        self.key = key[at]
        self.best = best[at]
        self.key_row = key_row(self.row, space.heads, space.key_heads)
        self.earlier = [match[at] for match in earlier]  # [C] each
        self.choices = space.allowed.total(self.row, self.query)
        self.counters = (space.number[at], self.query, run, sweep)

    def below(self, draw: int, n: Tensor | int) -> Tensor:
        return below(noise(self.space.call.seed, *self.counters, draw), n)

    def near(self, key: Tensor, radius: int, first: int) -> Tensor:
        """A key around each point's `key`; axis a is draw first + a."""
        return self.space.around(key, radius, lambda axis, n: self.below(first + axis, n))

    def legal(self, key: Tensor, exists: Tensor) -> Tensor:
        """Whether `key` (any value where it does not exist) may be taken in this run."""
        safe = key.clamp(0, self.space.keys - 1)
        ok = exists & (key == safe) & self.space.allowed.allows(self.row, self.query, safe)
        ok = ok & self.space.reached(self.at, safe)
        place = coordinates(safe, self.space.key_grid)
        for match in self.earlier:
            near = within(place, coordinates(match, self.space.key_grid), self.space.call.separation)
            ok = ok & ~(near & (match >= 0))
        return ok

    def score(self, key: Tensor) -> Tensor:
        score = pair_score(self.q, self.space.k[self.key_row * self.space.keys + key], self.space.call.score)
        return torch.where(score.isnan(), -torch.inf, score)

    def offer(self, key: Tensor, exists: Tensor) -> None:
        """Take the candidate where it is legal and strictly better."""
        safe = key.clamp(0, self.space.keys - 1)
        score = self.score(safe)
        better = (score > self.best) & self.legal(key, exists)
        self.key = torch.where(better, safe, self.key)
        self.best = torch.where(better, score, self.best)

    def fresh(self, draw: int, first: int) -> tuple[Tensor, Tensor]:
        """A key drawn from the allowed ones, and whether there is any; from `first` on, one near the point's start."""
        starts = self.space.starts
        if starts is not None:
            start = starts[self.at, self.run % starts.shape[1]]
            key = self.near(start, max(self.space.key_grid), first)
            return key, torch.ones_like(key, dtype=torch.bool)
        some = self.choices > 0
        return self.space.allowed.nth(self.row, self.below(draw, self.choices)), some

    def start(self, warm: Tensor | None) -> None:
        """A legal start is kept whatever its score."""
        key, exists = self.fresh(0, 0)
        if warm is not None:
            warm_key = warm[self.row * self.space.queries + self.query]
            usable = self.legal(warm_key, warm_key >= 0)
            key = torch.where(usable, warm_key, key)
            exists = usable | exists
        taken = self.legal(key, exists)
        self.key = torch.where(taken, key, -1)
        self.best = torch.where(taken, self.score(key.clamp(0)), -torch.inf)

    def propagate(self, before: Tensor, jump: int) -> None:
        """The matches that the neighbors `jump` away had before this sweep: moved along, or as they are."""
        grid = self.space.query_grid
        for axis in range(len(grid)):
            for sign in signs(self.space.call.causal):
                step = sign * jump
                target = [place + step * (a == axis) for a, place in enumerate(self.place)]
                exists = inside(target, grid)
                neighbor = torch.where(exists, flat(target, grid), 0)
                key = before[self.row * self.space.queries + neighbor]
                exists = exists & (key >= 0)
                for move in moves(self.space.call.propagate, self.sweep):
                    place = coordinates(key, self.space.key_grid)
                    moved = [at + move * step * (a == axis) for a, at in enumerate(place)]
                    self.offer(flat(moved, self.space.key_grid), exists & inside(moved, self.space.key_grid))

    def gossip(self, before: Tensor) -> None:
        """The matches of queries drawn from the whole row, under causal order from those up to each query."""
        choices = self.query + 1 if self.space.call.causal else self.space.queries
        for draw in range(self.space.call.gossip):
            other = self.below(draw, choices)
            key = before[self.row * self.space.queries + other]
            self.offer(key, key >= 0)

    def random_search(self) -> None:
        """One key from ever smaller boxes around the best so far, cut at the border; a fresh one while keyless."""
        rank = len(self.space.key_grid)
        radius = self.space.radius
        first = self.space.call.gossip
        while radius >= 1:
            near = self.near(self.key.clamp(0), radius, first)
            keyless = self.key < 0
            fresh, some = self.fresh(first + rank, first)
            self.offer(torch.where(keyless, fresh, near), ~keyless | some)
            radius = radius // 2
            first = first + rank + 1
