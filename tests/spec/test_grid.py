"""Geometry of grids: against loops over every point."""

import itertools

import pytest
import torch

from scram.spec import grid
from scram.spec.grid import AllowedKeys

GRIDS = [(7,), (3, 5), (2, 1, 4), (2, 3, 1, 2)]


@pytest.mark.parametrize("extents", GRIDS, ids=str)
def test_flat_indices_and_coordinates_are_row_major(extents):
    points = list(itertools.product(*map(range, extents)))
    index = torch.arange(len(points))
    coords = grid.coordinates(index, extents)
    assert list(zip(*(axis.tolist() for axis in coords), strict=True)) == points
    assert torch.equal(grid.flat(coords, extents), index)


def test_inside_and_within():
    coords = [torch.tensor([-1, 0, 2, 1]), torch.tensor([0, 3, 0, 4])]
    assert grid.inside(coords, (2, 4)).tolist() == [False, True, False, False]
    origin = [torch.zeros(4, dtype=torch.int64)] * 2
    assert grid.within(coords, origin, 2).tolist() == [True, False, True, False]
    assert grid.within(coords, origin, (1, 3)).tolist() == [True, True, False, False]


def test_a_window_is_every_offset_once():
    offsets = list(zip(*(axis.tolist() for axis in grid.window((1, 0, 2), torch.device("cpu"))), strict=True))
    assert offsets == list(itertools.product((-1, 0, 1), (0,), (-2, -1, 0, 1, 2)))


def test_grouped_heads_read_the_key_head_of_their_group():
    rows = grid.key_row(torch.arange(2 * 6), heads=6, key_heads=2)
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "batch", "head"])
def test_allowed_keys_are_those_of_a_loop(mask, causal):
    q = torch.zeros(2, 3, 3, 4, 1)
    shape = (2, 3, 4) if mask == "batch" else (2, 3, 3, 4)
    given = None if mask == "none" else torch.rand(shape) < 0.5
    allowed = AllowedKeys.of(q, q, causal, given)
    for row, query in itertools.product(range(6), range(12)):
        head = torch.ones(12, dtype=torch.bool)
        if given is not None:
            head = (given[row // 3] if mask == "batch" else given[row // 3, row % 3]).flatten()
        keys = [key for key in range(12) if head[key] and (key <= query or not causal)]
        at = torch.tensor(row), torch.tensor(query)
        assert [key for key in range(12) if allowed.allows(*at, torch.tensor(key))] == keys
        assert allowed.total(*at) == len(keys)
        assert [int(allowed.nth(at[0], torch.tensor(n))) for n in range(len(keys))] == keys
