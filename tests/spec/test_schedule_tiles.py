"""Tiles of queries: which queries each holds, and which tile holds a query."""

import math

import pytest
import torch

from scram.spec.schedule import TILE_QUERIES, members, tile_count, tile_of, tiles_across
from support.plain_routing import tile_of as plain_tile_of
from support.plain_routing import tiles

GRIDS = [(1,), (64,), (150,), (8, 8), (3, 9), (17, 1), (4, 4, 4), (5, 3, 9), (1, 1, 1), (3, 2, 5, 9), (2, 2, 4, 4)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_members_are_those_of_plain_python(grid):
    found = members(grid, CPU)
    assert found.shape == (tile_count(grid), TILE_QUERIES)
    assert [tuple(j for j in tile if j >= 0) for tile in found.tolist()] == tiles(grid)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_query_is_in_one_tile(grid):
    queries = torch.arange(math.prod(grid))
    found = members(grid, CPU)
    assert found[found >= 0].sort().values.tolist() == queries.tolist()
    assert (found[tile_of(queries, grid)] == queries.unsqueeze(1)).any(1).all()
    assert tile_of(queries, grid).tolist() == [plain_tile_of(grid, i) for i in queries.tolist()]


def test_the_place_in_a_tile_is_row_major_also_where_it_sticks_out():
    assert members((3, 9), CPU)[1, :24].tolist() == [8, *[-1] * 7, 17, *[-1] * 7, 26, *[-1] * 7]


def test_tiles_of_an_empty_grid():
    assert tile_count((0, 9)) == 0
    assert members((0, 9), CPU).shape == (0, TILE_QUERIES)
    assert tiles_across((8, 9)) == (1, 2)
