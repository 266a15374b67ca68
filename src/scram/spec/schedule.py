"""Tiles of queries, and what neighbors and tiles offer in a sweep of a search: one meaning for every engine.

Tiles are compact blocks of 64 queries, smaller at the borders of the grid; numbered in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..options import Method
from ..settings import MOST_IN_TILES, Search
from .grid import coordinates, flat, inside

# A neighbor `step` points away on an axis offers its key moved by this many steps along that axis.
MOVES = {"shift": -1, "stay": 0}
# What a neighbor offers in even and in odd sweeps.
PROPAGATE = {
    "shift": (("shift",), ("shift",)),
    "stay": (("stay",), ("stay",)),
    "both": (("shift", "stay"), ("shift", "stay")),
    "turns": (("stay",), ("shift",)),
}

TILE_QUERIES = 64  # queries of a tile
LANE_GROUPS = 4  # that the lanes of an offer form where queries keep several matches
KINDS = {**MOVES, "gossip": 100, "random": 101}  # of offers, as kernels number them: neighbors by their move
STOP = 256  # a row stops when fewer than one query in this many took a key in a sweep


@dataclass(frozen=True)
class Offer:
    """One key from each query of a tile.

    kind: "shift", the match of a neighbor `reach` points away, moved along; "stay", that of one `reach` tiles away as
        it is; "gossip", that of a drawn query; "random", a key at most `reach` from the query's own match.
    draw: the number of its first draw; for "shift" and "stay" the number of the jump.
    """

    kind: str
    reach: int
    draw: int


def moves(propagate: str, sweep: int) -> tuple[int, ...]:
    """How the keys that a neighbor offers in a sweep are moved, in their order.

    >>> moves("both", 1), moves("turns", 1), moves("turns", 2)
    ((-1, 0), (-1,), (0,))
    """
    return tuple(MOVES[kind] for kind in PROPAGATE[propagate][sweep % 2])


def signs(causal: bool) -> tuple[int, ...]:
    """On which sides of an axis a query reads neighbors; under causal order only those that come before it.

    >>> signs(False), signs(True)
    ((-1, 1), (-1,))
    """
    return (-1,) if causal else (-1, 1)


def widest(key_grid: tuple[int, ...], reach: tuple[int, ...], random: bool) -> int:
    """The largest radius of random search, halved down to 1; 0: there is none.

    >>> widest((64, 48), (), True), widest((64, 48), (4, 9), True), widest((64, 48), (), False)
    (64, 9, 0)
    """
    return min(max(key_grid), max(reach, default=max(key_grid))) if random else 0


def method_of(search: Search, q: Tensor, causal: bool) -> Method:
    """The method of a search, with "auto" replaced by what is best for queries like q [..., E], as measured.

    That is "tile" where matrix units pay off: on CUDA, 16 features of 16 bits or more, 32 of 32 bits, and up to 32
    matches. Under causal order it is "query": the queries of a tile share their candidates.

    >>> method_of(Search(), torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16), causal=False)
    'query'
    """
    if causal:
        return "query"
    if search.method != "auto":
        return search.method
    least = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32}.get(q.dtype)
    units = q.device.type == "cuda" and least is not None and q.shape[-1] >= least
    return "tile" if units and search.matches <= MOST_IN_TILES else "query"


def tile_shape(rank: int) -> tuple[int, ...]:
    """The extents of a tile of 64 queries, near-cubic, wider on the last axes.

    >>> [tile_shape(rank) for rank in (1, 2, 3, 4)]
    [(64,), (8, 8), (4, 4, 4), (2, 2, 4, 4)]
    """
    bits = TILE_QUERIES.bit_length() - 1
    return tuple(1 << (bits + axis) // rank for axis in range(rank))


def tiles_across(grid: Sequence[int]) -> tuple[int, ...]:
    """Tiles along each axis.

    >>> tiles_across((3, 9))
    (1, 2)
    """
    return tuple(-(-extent // side) for extent, side in zip(grid, tile_shape(len(grid)), strict=True))


def tile_count(grid: Sequence[int]) -> int:
    """Tiles of a grid; none where it is empty."""
    return math.prod(tiles_across(grid))


def members(grid: Sequence[int], device: torch.device) -> Tensor:
    """The queries of every tile [tiles, TILE_QUERIES], -1 where it sticks out of the grid.

    >>> members((3, 9), torch.device("cpu"))[1, :9].tolist()
    [8, -1, -1, -1, -1, -1, -1, -1, 17]
    """
    shape = tile_shape(len(grid))
    across = tiles_across(grid)
    corner = [c.unsqueeze(1) for c in coordinates(torch.arange(math.prod(across), device=device), across)]
    lane = coordinates(torch.arange(TILE_QUERIES, device=device), shape)
    place = [at * side + of for at, side, of in zip(corner, shape, lane, strict=True)]
    return torch.where(inside(place, grid), flat(place, grid), -1)


def tile_of(query: Tensor, grid: Sequence[int]) -> Tensor:
    """The tile of each query, flat row-major indices of any shape.

    >>> tile_of(torch.tensor([0, 7, 8, 17]), (3, 9)).tolist()
    [0, 0, 1, 1]
    """
    shape = tile_shape(len(grid))
    place = [at // side for at, side in zip(coordinates(query, grid), shape, strict=True)]
    return flat(place, tiles_across(grid))


def lane_groups(matches: int) -> list[list[int]]:
    """The lanes of each group of an offer: all of them for one match, else every fourth pair.

    >>> [lanes[:4] for lanes in lane_groups(2)]
    [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    """
    count = 1 if matches == 1 else LANE_GROUPS
    return [[lane for lane in range(TILE_QUERIES) if lane // 2 % count == group] for group in range(count)]


def offers(sweep: int, jumps: tuple[int, ...], propagate: str, gossip: int, rank: int, radius: int) -> Iterator[Offer]:
    """The offers of sweep 1, 2, .. in their order; `radius`: of random search, the largest.

    >>> [f"{o.kind} {o.reach}" for o in offers(2, (8, 1), "turns", 1, 2, 9)]
    ['stay 8', 'stay 1', 'gossip 0', 'random 4', 'random 1']
    """
    for number, jump in enumerate(jumps):
        for kind in PROPAGATE[propagate][sweep % 2]:
            yield Offer(kind, jump, number)
    for draw in range(gossip):
        yield Offer("gossip", 0, draw)
    for number in range(1 - sweep % 2, radius.bit_length(), 2):  # every second radius, the others next time
        yield Offer("random", radius >> number, gossip + number * (rank + 1))
