"""Tiles of a grid: cut, put back, summed with their rims."""

import pytest
import torch

from scram.images.tiles import Tiles


def wanted(height, width):
    return torch.rand(height, width, generator=torch.Generator().manual_seed(1)) > 0.9


@pytest.mark.parametrize("shift", [0, 3])
def test_cut_and_put_are_inverse_where_tiles_are(shift):
    some, x = wanted(13, 18), torch.arange(13 * 18 * 2).reshape(13, 18, 2)
    tiles = Tiles.of(some, 6, shift)
    back = tiles.put(tiles.cut(x), -1)
    assert torch.equal(back[some], x[some])
    taken = (back != -1).all(-1)
    assert torch.equal(back[taken], x[taken])
    for row in range(13):
        for column in range(18):
            top, left = ((n + shift) // 6 * 6 - shift for n in (row, column))
            near = some[max(top, 0) : top + 6, max(left, 0) : left + 6]
            assert taken[row, column] == near.any()


def test_one_tile_is_the_grid():
    x = torch.rand(5, 7, 3)
    tiles = Tiles.whole((5, 7), x.device)
    assert torch.equal(tiles.cut(x)[0], x)
    assert torch.equal(tiles.put(x[None], 0), x)


@pytest.mark.parametrize("shift", [0, 2])
def test_rims_are_added(shift):
    some, rim = wanted(9, 10), 2
    tiles = Tiles.of(some, 4, shift)
    x = torch.rand(len(tiles.wanted), 3, 4 + rim, 4 + rim, dtype=torch.float64)
    want = torch.zeros(3, 40, 40, dtype=torch.float64)
    for tile, number in zip(x, tiles.wanted.tolist(), strict=True):
        row, column = number // tiles.counts[1] * 4, number % tiles.counts[1] * 4
        want[:, row : row + 4 + rim, column : column + 4 + rim] += tile
    torch.testing.assert_close(tiles.add(x, rim), want[:, shift : shift + 9 + rim, shift : shift + 10 + rim])
