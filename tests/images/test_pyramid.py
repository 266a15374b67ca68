"""Levels: sizes, holes and matches from one to the next."""

import torch

from scram.images.pyramid import depth, finer, resize, scaled, scales, shrink_known
from scram.results import Matches


def test_scales_reach_the_least():
    assert scales(100, 100, 2.0) == [1.0]
    assert scales(100, 300, 2.0) == [1.0]
    levels = scales(100, 20, 1.5)
    assert levels[-1] == 1.0
    assert 20 <= 100 * levels[0] < 30
    assert scaled((3, 100), 0.1) == (1, 10)


def test_resize_keeps_flat_colors():
    torch.testing.assert_close(resize(torch.full((20, 30, 3), 0.5), (7, 11)), torch.full((7, 11, 3), 0.5))


def test_depth_is_the_distance_to_what_is_known():
    hole = torch.rand(14, 17, generator=torch.Generator().manual_seed(2)) > 0.05
    outside = (~hole).nonzero()
    for row in range(14):
        for column in range(17):
            far = (outside - torch.tensor([row, column])).abs().amax(-1).min()
            # Beyond the border there is nothing known: the border itself is no end of the hole.
            assert depth(hole)[row, column] == far


def test_a_smaller_hole_has_means_of_known_pixels():
    picture, hole = torch.full((16, 16, 1), 0.5), torch.zeros(16, 16, dtype=torch.bool)
    hole[4:9, 4:12] = True
    picture[hole] = 100
    small, missing = shrink_known(picture, hole, (8, 8))
    assert missing.any()
    torch.testing.assert_close(small[~missing], torch.full_like(small[~missing], 0.5), rtol=1e-4, atol=1e-4)


def test_matches_keep_their_offset_in_pixels():
    """A patch whose match lies 3 pixels lower and 2 to the left finds it 6 and 4 away at twice the size."""
    side = 5
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(20.0), indexing="ij")
    coords = torch.stack((rows + 3, columns - 2), -1)[None, None, ..., None, :]
    found = Matches.from_coords(coords, (16, 20))
    fine = finer(found, side, (40, 48), (40, 48))
    assert fine.key_grid == (36, 44)
    assert fine.index.shape == (1, 1, 36, 44, 1)
    own = torch.stack(torch.meshgrid(torch.arange(36.0), torch.arange(44.0), indexing="ij"), -1)
    offsets = (fine.coords()[0, 0, ..., 0, :] - own)[8:24, 10:34]
    assert torch.equal(offsets, torch.tensor([6.0, -4.0]).expand_as(offsets))
