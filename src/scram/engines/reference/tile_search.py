"""Tile search: every query of a tile scores the offers of all its queries, a group of keys at a time.

Works on points as `search` does; a tile is a row of TILE_QUERIES points, -1 where it sticks out of the query grid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.calls import Found, SearchCall
from ...spec.grid import coordinates, flat, inside, key_row, within
from ...spec.noise import below, noise
from ...spec.schedule import MOVES, STOP, TILE_QUERIES, Offer, lane_groups, members, offers, tile_shape
from ...spec.scoring import pair_score
from .search import CHUNK_ELEMENTS, SearchSpace


def tile_search(call: SearchCall) -> Found:
    """All matches of a query in one run; a row stops when few of its queries still improve."""
    space = SearchSpace(call)
    state = _start(space)
    going = torch.ones(space.points, 1, dtype=torch.bool, device=call.q.device)
    for sweep in range(1, call.sweeps + 1):
        schedule = offers(sweep, call.jumps, call.propagate, call.gossip, len(space.key_grid), space.radius)
        table = [_offered(space, offer, sweep, number, state.key) for number, offer in enumerate(schedule)]
        after, took = _score_offers(space, state, table)
        state = _State(torch.where(going, after.key, state.key), torch.where(going, after.score, state.score))
        count = took.reshape(-1, space.queries).sum(1, keepdim=True)
        enough = (count * STOP >= space.queries).expand(-1, space.queries).reshape(-1, 1)
        going = going & enough
    shape = (*call.q.shape[:-1], call.matches)
    return Found(state.key.to(torch.int32).reshape(shape), state.score.float().reshape(shape))


class _State:
    """key, score [..., kappa] of some queries: best first, equal scores by key, -1 last."""

    def __init__(self, key: Tensor, score: Tensor) -> None:
        order = torch.where(key < 0, torch.iinfo(torch.int64).max, key).argsort(dim=-1, stable=True)
        order = order.gather(-1, score.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        order = order.gather(-1, (key.gather(-1, order) < 0).int().argsort(dim=-1, stable=True))
        self.key = key.gather(-1, order)
        self.score = score.gather(-1, order)


def _start(space: SearchSpace) -> _State:
    """Sweep 0: one draw per query, or its warm keys where they are legal; kept whatever their scores."""
    call = space.call
    row = space.row
    query = space.query
    # The rank of an empty batch cannot be inferred from its size.
    warm = None if call.warm is None else call.warm.reshape(space.points, call.warm.shape[-1]).long()
    entries = 1 if warm is None else min(call.matches, warm.shape[1])
    key = torch.full((space.points, call.matches), -1, dtype=torch.int64, device=row.device)
    choices = space.allowed.total(row, query)
    for entry in range(entries):

        def drawn(draw: int, n: Tensor, entry: int = entry) -> Tensor:
            return below(noise(call.seed, space.number, query, entry, 0, draw), n)

        if space.starts is None:
            start = torch.where(choices > 0, space.allowed.nth(row, drawn(0, choices)), -1)
        else:
            start = space.around(space.starts[:, entry % space.starts.shape[1]], max(space.key_grid), drawn)
        if warm is not None:
            usable = _apart(space, warm[:, entry], key, call.separation)
            start = torch.where(usable, warm[:, entry], start)
        key[:, entry] = torch.where(_apart(space, start, key, call.separation), start, -1)
    score = torch.full(key.shape, -torch.inf, dtype=space.wide, device=key.device)
    for entry in range(entries):
        for at in space.chunks():
            source = key_row(row[at], space.heads, space.key_heads) * space.keys + key[at, entry].clamp(min=0)
            new = pair_score(space.q[at], space.k[source], space.call.score)  # [C]
            score[at, entry] = torch.where((key[at, entry] < 0) | new.isnan(), -torch.inf, new)
    return _State(key, score)


def _apart(space: SearchSpace, key: Tensor, others: Tensor, separation: int) -> Tensor:
    """Whether each point may take its key [P] (any value) beside the `others` [P, kappa] that it has."""
    safe = key.clamp(0, space.keys - 1)
    ok = (key == safe) & space.allowed.allows(space.row, space.query, safe)
    ok = ok & space.reached(torch.arange(space.points, device=key.device), safe)
    return ok & ~_near(space, safe.unsqueeze(1), others, separation).any(1)


def _near(space: SearchSpace, key: Tensor, other: Tensor, separation: int) -> Tensor:
    """Which keys are at most the separation apart; -1 is far from everything. Broadcasts."""
    a = coordinates(key.clamp(min=0), space.key_grid)
    b = coordinates(other.clamp(min=0), space.key_grid)
    return within(a, b, separation) & (key >= 0) & (other >= 0)


def _offered(space: SearchSpace, offer: Offer, sweep: int, number: int, key: Tensor) -> Tensor:
    """One key from every point, -1 for none: [P], from the matches [P, kappa] at the start of the sweep."""
    row = space.row
    query = space.query
    grid = space.query_grid
    key_grid = space.key_grid
    rank = len(space.key_grid)
    place = coordinates(query, grid)
    # Each offer of a query shows another of its matches; in the first sweep there is but one.
    entry = (query + number + sweep) % (key.shape[1] if sweep > 1 else 1)

    def drawn(draw: int, n: Tensor | int) -> Tensor:
        return below(noise(space.call.seed, space.number, query, 0, sweep, draw), n)

    def match_of(other: Tensor) -> Tensor:
        return key[row * space.queries + other, entry]

    if offer.kind == "gossip":
        offered = match_of(drawn(offer.draw, space.queries))
    elif offer.kind == "random":
        own = match_of(query)
        near = space.around(own.clamp(min=0), offer.reach, lambda axis, n: drawn(offer.draw + axis, n))
        if space.starts is None:
            choices = space.allowed.total(row, query)
            fresh = torch.where(choices > 0, space.allowed.nth(row, drawn(offer.draw + rank, choices)), -1)
        else:
            start = space.starts.gather(1, entry.unsqueeze(1) % space.starts.shape[1]).squeeze(1)
            fresh = space.around(start, max(key_grid), lambda axis, n: drawn(offer.draw + axis, n))
        offered = torch.where(own < 0, fresh, near)
    else:
        direction = (torch.stack(place).sum(0) + sweep + offer.draw) % (2 * rank)
        sign = direction % 2 * 2 - 1
        # Every query of a tile knows the keys of the others: what stays comes from other tiles.
        reach = [offer.reach * (1 if MOVES[offer.kind] else side) for side in tile_shape(rank)]
        steps = [torch.where(direction // 2 == axis, sign * reach[axis], 0) for axis in range(rank)]
        target = [at + step for at, step in zip(place, steps, strict=True)]
        exists = inside(target, grid)
        offered = torch.where(exists, match_of(torch.where(exists, flat(target, grid), 0)), -1)
        place = coordinates(offered.clamp(min=0), key_grid)
        moved = [at + MOVES[offer.kind] * step for at, step in zip(place, steps, strict=True)]
        offered = torch.where((offered >= 0) & inside(moved, key_grid), flat(moved, key_grid), -1)
    unmasked = space.allowed.allows(row, query, offered.clamp(min=0))
    # Whoever finds nothing shows what it has.
    own = torch.where(match_of(query) < 0, key[:, 0], match_of(query))
    return torch.where((offered >= 0) & unmasked, offered, own)


def _tiles(space: SearchSpace, elements: int) -> Iterator[Tensor]:
    """Points of tiles [C, TILE_QUERIES], -1 off the query grid, some tiles of one row at a time."""
    member = members(space.query_grid, space.q.device)
    step = max(1, CHUNK_ELEMENTS // elements)
    for row in range(space.points // space.queries):
        for begin in range(0, len(member), step):
            queries = member[begin : begin + step]
            yield torch.where(queries < 0, -1, row * space.queries + queries)


def _score_offers(space: SearchSpace, state: _State, table: list[Tensor]) -> tuple[_State, Tensor]:
    """Every query of every tile sees the offers of the sweep; the state after it and who took a key [P]."""
    # What lies off the grid is written to one more point: no nonzero(), which would wait
    key = torch.cat([state.key, state.key[:1]])
    score = torch.cat([state.score, state.score[:1]])
    took = torch.zeros(len(key), dtype=torch.bool, device=key.device)
    for at in _tiles(space, TILE_QUERIES * (space.q.shape[-1] + TILE_QUERIES)):
        exists = at >= 0
        safe = torch.where(exists, at, at[:, :1])  # off the grid: as the first
        tile = _Tile(space, safe, _State(state.key[safe], state.score[safe]))
        for offer in table:
            for lanes in lane_groups(space.call.matches):
                tile.take_best(offer[safe[:, lanes]])
        to = torch.where(exists, at, space.points)
        key[to] = tile.state.key
        score[to] = tile.state.score
        took[to] = tile.took
    return _State(key[:-1], score[:-1]), took[:-1]


class _Tile:
    """Some tiles of one row in a sweep: `state` of [C, TILE_QUERIES] queries and which of them `took` a key."""

    def __init__(self, space: SearchSpace, at: Tensor, state: _State) -> None:
        self.space = space
        self.state = state
        self.at = at
        self.query = at % space.queries
        self.q = space.q[at]
        self.first_key = key_row(at[:1, :1] // space.queries, space.heads, space.key_heads) * space.keys
        self.took = torch.zeros_like(at, dtype=torch.bool)

    def scores(self, keys: Tensor) -> Tensor:
        """[C, K] -> [C, TILE_QUERIES, K]."""
        k = self.space.k[self.first_key + keys.clamp(min=0)]
        if callable(self.space.call.score):
            score = pair_score(self.q.unsqueeze(2), k.unsqueeze(1), self.space.call.score)
        else:
            score = self.q.to(self.space.wide) @ k.to(self.space.wide).transpose(1, 2)
        return torch.where(score.isnan(), -torch.inf, score)

    def take_best(self, keys: Tensor) -> None:
        """Every query considers its best key of one group [C, K], of equal ones the lowest."""
        keys = keys.sort(-1).values
        score = self.scores(keys)  # [C, TILE_QUERIES, K]
        legal = (keys >= 0).unsqueeze(1)
        legal = legal & self.space.reached(self.at.unsqueeze(-1), keys.clamp(min=0).unsqueeze(1))
        best, first = torch.where(legal, score, -torch.inf).max(-1)
        new = keys.unsqueeze(1).expand_as(score).gather(-1, first.unsqueeze(-1))
        # [C, TILE_QUERIES, kappa]
        close = _near(self.space, self.state.key, new, self.space.call.separation)
        refused = (close & (self.state.score >= best.unsqueeze(-1))).any(-1)
        takes = (best > self.state.score[..., -1]) & ~refused  # the last is -inf while there is room
        gone = close & takes.unsqueeze(-1)
        key = torch.where(gone, -1, self.state.key)
        kept = torch.where(gone, -torch.inf, self.state.score)
        new = torch.where(takes.unsqueeze(-1), new, -1)
        best = torch.where(takes, best, -torch.inf).unsqueeze(-1)
        joined = _State(torch.cat([key, new], -1), torch.cat([kept, best], -1))
        self.state = _State(joined.key[..., :-1], joined.score[..., :-1])
        self.took = self.took | takes
