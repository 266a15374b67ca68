"""Distances of patches, both ways, beside dense ones."""

import torch

from scram.images.patches import unfold
from scram.images.similarity import two_way
from scram.images.synthesis import Settings


def test_distances_are_those_of_the_nearest_patches():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(10, 12, 1, generator=generator), torch.rand(9, 14, 1, generator=generator)
    far = torch.cdist(unfold(a, 3).flatten(0, 1), unfold(b, 3).flatten(0, 1)) / 3
    want = far.amin(1).mean(), far.amin(0).mean()
    torch.testing.assert_close(torch.tensor(two_way(a, b, Settings(patch=3))), torch.stack(want), rtol=1e-3, atol=1e-4)


def test_a_part_is_near_to_the_whole_but_does_not_show_it():
    picture = torch.rand(30, 40, 3, generator=torch.Generator().manual_seed(0))
    there, back = two_way(picture[:, :20], picture, Settings(patch=5))
    assert there < 1e-4
    assert back > 0.05
