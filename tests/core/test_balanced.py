"""Samples of matches: by certainty, each once, and spread over the grid."""

import pytest
import torch

from scram.core.balanced import balanced


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("grid", [(300,), (20, 24), (6, 7, 8), (3, 4, 5, 6)], ids=str)
def test_each_is_taken_once_and_none_that_is_uncertain(grid):
    certainty = uniform(2, *grid)
    certainty[certainty < 0.5] = 0
    taken = balanced(certainty, 40, seed=1)
    assert taken.shape == (2, 40)
    for row in range(2):
        assert len(set(taken[row].tolist())) == 40
        assert (certainty[row].flatten()[taken[row]] > 0).all()
    assert torch.equal(taken, balanced(certainty, 40, seed=1))
    assert not torch.equal(taken, balanced(certainty, 40, seed=2))


def test_where_fewer_are_certain_all_of_them_are_taken():
    certainty = torch.zeros(2, 6, 7)
    certainty[0, 2, 3] = certainty[0, 5, 6] = 0.4
    taken = balanced(certainty, 50, seed=0)
    assert taken.shape == (2, 50)
    assert sorted(taken[0].tolist())[-3:] == [-1, 2 * 7 + 3, 41]
    assert (taken[1] == -1).all()


def test_the_surer_are_drawn_more_often():
    certainty = torch.full((1, 60, 60), 0.1)
    certainty[:, :, 1::2] = 0.9  # columns in turn: the same density around both
    taken = balanced(certainty, 200, seed=0)
    assert 0.8 < float((taken % 2 == 1).float().mean()) < 0.97


def test_dense_parts_are_thinned():
    certainty = torch.full((1, 64, 64), 0.1)
    certainty[:, :, 32:] = 0.9
    by_certainty = certainty.flatten().multinomial(400, generator=torch.Generator().manual_seed(0))
    taken = balanced(certainty, 400, seed=0)[0]
    plain, thinned = (float((x % 64 < 32).float().mean()) for x in (by_certainty, taken))
    assert plain < 0.15
    assert thinned > 2 * plain
