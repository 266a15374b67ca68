"""Keys visited per query: one formula for `explain`, `tune` and `trust`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..settings import Score, Search
from ..spec.grid import grid_of
from ..spec.schedule import TILE_QUERIES, method_of, moves, offers, signs, widest
from ..spec.scoring import prepare_query
from . import checks
from .tails.base import Tail


class Cost(NamedTuple):
    """Keys visited per query, at most: by search and windows, with the tail (one per cluster), by dense attention."""

    sparse: int
    tail: int
    dense: int


def keys_visited(
    q: Tensor,
    k: Tensor,
    search: Search | None,
    radius: Sequence[int],
    tail: Tail,
    score: Score = "dot",
    causal: bool = False,
    matches: int | None = None,
) -> Cost:
    """By the formulas of DESIGN, sections 8 and 14.

    Args:
        q, k: [B, H, *G, E], [B, Hk, *G', E]; only their shapes, dtype and device count.
        search: None: no search and no windows.
        radius: one per axis.
        matches: found per query, where they are not those of `search`.

    >>> q = torch.zeros(1, 1, 64, 64, 32)
    >>> keys_visited(q, q, Search(), (1, 1), scram.Clusters(count=256, keys=512))
    Cost(sparse=245, tail=1013, dense=4096)
    """
    grid = grid_of(k)
    keys = math.prod(grid)
    rest = tail.visited(math.prod(grid_of(q)), keys)
    if search is None:
        return Cost(0, rest, keys)
    kappa = matches or search.matches
    reach = () if search.reach is None else checks.radius(search.reach, len(grid), "reach")
    radius_of_draws = widest(grid, reach, search.random)
    rank = len(grid)
    if method_of(search, prepare_query(q[:0], score), causal) == "tile":
        way = (search.jumps, search.propagate, search.gossip, rank, radius_of_draws)
        offers_by_sweep = [offers(n + 1, *way) for n in range(search.sweeps)]
        # A query scores what all queries of its tile offer.
        looked = kappa + TILE_QUERIES * sum(len(list(sweep)) for sweep in offers_by_sweep)
    else:
        offered = len(moves(search.propagate, 1)) * len(signs(causal)) * rank * len(search.jumps)
        looked = kappa * (1 + search.sweeps * (offered + search.gossip + radius_of_draws.bit_length()))
    window = kappa * math.prod(min(2 * b + 1, extent) for b, extent in zip(radius, grid, strict=True))
    window = min(window, keys)  # a key in several windows counts once
    return Cost(looked + window, looked + window + rest, keys)
