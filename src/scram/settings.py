"""Settings that users pass in: how to search. Those of tails are in `core.tails`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .core import checks
from .options import METHODS, PROPAGATES, STARTS, Method, Propagate, ScoreName, Start

Score = ScoreName | Callable[[Tensor, Tensor], Tensor]
MOST_IN_TILES = 32  # matches that a tile keeps on a GPU, where registers hold them


@dataclass(frozen=True)
class Search:
    """Settings of a search. Validated when made; `dataclasses.replace` makes a changed copy.

    Args:
        method: "query" (the paper's Algorithm 1 with its extensions: every query has candidates of its own), "tile"
            (tiles of queries share their candidates and score them by matrix products; not under causal order), or
            "auto", the faster one for the tensors at hand.
        matches: kappa, number of keys to find for each query.
        separation: L, matches of one query are farther apart than this (Chebyshev distance on the key grid);
            0 means distinct keys, the paper's top-kappa_max; more is its top-kappa_mode.
        sweeps: T, number of iterations. In each, every query tries its neighbors' matches and keys around its own.
        jumps: distances to the neighbors that are read, in this order. A tile reads unmoved matches that many tiles
            away.
        propagate: what a neighbor offers: "shift" its match moved by the distance between the two queries
            (the paper), "stay" its match itself, "both", or "turns" (shift in odd sweeps, stay in even ones).
        gossip: number of queries drawn anywhere in the grid whose match is tried too, per sweep; under causal order
            earlier ones alone are drawn, and read as neighbors.
        seed: an int or a 0-d int64 tensor; None draws one from torch's default generator.
        reach: how far a match may lie, per axis on the key grid, from one of the matches that a search starts from
            (`warm`), or from the query's own place where it has none; an int or one per axis, None: anywhere. The own
            place on a key grid of other extents is that of `Matches.identity`. Windows may stretch farther.
        random: whether keys drawn around a query's match are tried too; without them sweeps only compare what the
            queries have found.
        start: where a query without warm matches starts: "drawn", at a key drawn anywhere; "routed", at the best key of
            the clusters that its tile attends one by one (`Clusters(keys=...)`), for its first match; "auto", routed
            where there are such clusters and no `reach`.

    >>> Search(matches=4, separation=2, seed=0).sweeps
    5
    >>> Search.paper() == Search("query", matches=1, sweeps=8, propagate="shift", gossip=0, start="drawn")
    True
    """

    method: Method = "auto"
    matches: int = 1
    separation: int = 0
    sweeps: int = 5
    jumps: tuple[int, ...] = (8, 4, 2, 1)
    propagate: Propagate = "both"
    gossip: int = 8
    seed: int | Tensor | None = None
    reach: int | tuple[int, ...] | None = None
    random: bool = True
    start: Start = "auto"
    # Engines read this one: torch.compile takes an int for a constant and would recompile for each seed.
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.one_of("method", self.method, METHODS)
        checks.whole_fields(self, matches=1, sweeps=0, gossip=0)
        farthest = 2**31  # that keys can be apart
        object.__setattr__(self, "separation", min(checks.whole("separation", self.separation, 0), farthest))
        object.__setattr__(self, "jumps", checks.jumps(self.jumps))
        checks.one_of("propagate", self.propagate, PROPAGATES)
        if self.reach is not None:
            rank = len(self.reach) if isinstance(self.reach, Sequence) else 1
            reach = checks.radius(self.reach, rank, "reach")
            object.__setattr__(self, "reach", reach if isinstance(self.reach, Sequence) else reach[0])
        checks.flag("random", self.random)
        checks.one_of("start", self.start, STARTS)
        object.__setattr__(self, "seed_tensor", checks.seed(self.seed))

    @staticmethod
    def paper(matches: int = 1, separation: int = 0, seed: int | Tensor | None = None) -> Search:
        """Algorithm 1 as printed: drawn starts, shifted matches of the neighbors only, no gossip, 8 sweeps."""
        return Search(
            "query",
            matches,
            separation,
            sweeps=8,
            jumps=(8, 4, 2, 1),
            propagate="shift",
            gossip=0,
            seed=seed,
            start="drawn",
        )


checks.SEARCH_FIELDS.update(Search.__dataclass_fields__)
