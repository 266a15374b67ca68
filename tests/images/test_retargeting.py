"""Retargeting: patches of the source, all of them, in another size."""

import pytest
import torch

from scram.images import retarget
from scram.images.pyramid import resize
from scram.images.similarity import two_way
from scram.images.synthesis import Settings

QUICK = Settings(iterations=2)


def scene():
    """Stripes of one width, which a resized picture would make narrower, and a disc."""
    rows, columns = torch.meshgrid(torch.arange(48), torch.arange(72), indexing="ij")
    gray = (columns * 0.8).sin() / 2 + 0.5
    disc = (rows - 24) ** 2 + (columns - 20) ** 2 < 100
    return torch.stack((torch.where(disc, 1.0, gray), gray), -1)


@pytest.mark.parametrize("size", [(48, 48), (48, 96), (36, 72)], ids=str)
def test_patches_are_nearer_to_the_source_than_those_of_a_resized_picture(size):
    picture = scene()
    made = retarget(picture, size, QUICK)
    assert made.shape == (*size, 2)
    for ours, theirs in zip(two_way(made, picture, QUICK), two_way(resize(picture, size), picture, QUICK), strict=True):
        assert ours < theirs


def test_the_same_size_gives_the_picture_back():
    assert float((retarget(scene(), (48, 72), QUICK) - scene()).abs().mean()) < 1e-3


def test_the_same_seed_repeats():
    first, again = (retarget(scene(), (48, 60), QUICK) for _ in range(2))
    assert torch.equal(first, again)
