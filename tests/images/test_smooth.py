"""Smooth fills: exact on surfaces that have no energy, equal to a dense solution, silent about what is in the hole."""

import pytest
import torch

from scram.images.smooth import pull_push, smooth_fill


def dense_solution(picture, hole, order):
    """The least energy by a dense solve over all pixels of a grid with free borders."""
    height, width = hole.shape
    count = height * width
    laplacian = torch.zeros(count, count, dtype=torch.float64)
    for row in range(height):
        for column in range(width):
            for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                if 0 <= row + down < height and 0 <= column + right < width:
                    here, there = row * width + column, (row + down) * width + column + right
                    laplacian[here, here] -= 1
                    laplacian[here, there] += 1
    energy = -laplacian if order == 1 else laplacian @ laplacian
    inside, x = hole.flatten(), picture.double().flatten(0, 1)
    right = -energy[inside][:, ~inside] @ x[~inside]
    solved = x.clone()
    solved[inside] = torch.linalg.solve(energy[inside][:, inside], right)
    return solved.reshape(picture.shape)


@pytest.mark.parametrize("order", [1, 2])
def test_smooth_fill_is_the_least_energy(order):
    generator = torch.Generator().manual_seed(0)
    picture = torch.rand(9, 11, 2, generator=generator, dtype=torch.float64)
    hole = torch.zeros(9, 11, dtype=torch.bool)
    hole[3:6, 4:8] = hole[0:2, 0] = True
    want = dense_solution(picture, hole, order)
    got = smooth_fill(torch.where(hole.unsqueeze(-1), 0, picture), hole, order, steps=400)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


def test_nothing_is_read_from_the_hole():
    picture = torch.rand(8, 8, 1)
    hole = torch.zeros(8, 8, dtype=torch.bool)
    hole[2:5, 3:6] = True
    other = torch.where(hole.unsqueeze(-1), 5.0, picture)
    torch.testing.assert_close(smooth_fill(picture, hole), smooth_fill(other, hole))


def test_pull_push_fills_everything_with_what_is_known():
    picture = torch.full((17, 30, 3), 0.25)
    hole = torch.ones(17, 30, dtype=torch.bool)
    hole[16, 29] = False
    torch.testing.assert_close(pull_push(torch.where(hole.unsqueeze(-1), 9.0, picture), hole), picture)
