"""Tiles in Numba are those of `spec.schedule`, and keys of routed clusters those of their bits."""

import numba
import numpy as np
import pytest
import torch

from scram.engines.cpu import tiles
from scram.engines.cpu.layout import Routing
from scram.spec.bits import packed
from scram.spec.schedule import members, tile_of

GRIDS = [(1,), (64,), (130,), (8, 8), (9, 17), (3, 40), (5, 4, 9), (2, 3, 5, 7)]


@numba.njit
def member(grids, tile, queries):
    return tiles.members(grids, tile, queries)


@numba.njit
def one_tile(grids, query):
    return tiles.tile_of(grids, query)


@numba.njit
def many_tiles(grids, begin, size, result, query, place):
    tiles.tiles_of(grids, begin, size, result, query, place)


@numba.njit
def routed(words, sizes, order, keys, begin, end):
    return tiles.routed_keys(words, 0, 0, sizes, 0, order, keys, begin, end)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_members_and_tiles_are_those_of_the_specification(grid):
    grids = Routing.of(torch.zeros(1, 1, *grid, 2), None, None).grids
    queries = np.empty(64, np.int32)
    for tile, expected in enumerate(members(grid, torch.device("cpu"))):
        number = member(grids, tile, queries)
        assert queries[:number].tolist() == expected[expected >= 0].tolist()
    every = np.arange(np.prod(grid), dtype=np.int32)
    expected = tile_of(torch.from_numpy(every), grid).tolist()
    assert [one_tile(grids, query) for query in every] == expected
    for begin in (0, len(every) // 3):
        made = np.empty(len(every) - begin, np.int32)
        many_tiles(grids, begin, len(made), made, np.empty_like(made), np.empty_like(made))
        assert made.tolist() == expected[begin:]


def test_keys_of_the_clusters_whose_bits_are_set():
    chosen = torch.zeros(64, dtype=torch.bool)
    chosen[[1, 31, 32, 39]] = True
    sizes = np.ones((1, 40), np.int32)
    sizes[0, 1], sizes[0, 5], sizes[0, 39] = 3, 0, 4
    order = np.arange(100, 160, dtype=np.int32)[None]
    expected = [101, 102, 103, 132, 133, 140, 141, 142, 143]
    keys = np.zeros(20, np.int32)
    words = packed(chosen).numpy().reshape(1, 1, 2)
    assert routed(words, sizes, order, keys, 2, 20) == 9
    assert keys.tolist() == [0, 0, *expected, *[0] * 9]
    assert routed(words, sizes, order, keys, 2, 6) == 4  # as many as fit
    assert routed(words, sizes, order[:, :42], keys, 0, 20) == 7  # as many as there are
    assert routed(words[..., :0], sizes, order, keys, 0, 20) == 0
