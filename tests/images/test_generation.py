"""Generated pictures: patches of the source, another for every seed, the same for the same."""

import pytest
import torch

from scram.images import generate
from scram.images.similarity import two_way
from scram.images.synthesis import Settings

QUICK = Settings(iterations=2)


def texture():
    generator = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.avg_pool2d(torch.rand(1, 1, 50, 50, generator=generator), 3, 1)
    return (smooth[0, 0] > 0.5).float().unsqueeze(-1)


def test_patches_are_those_of_the_source():
    picture = texture()
    made = generate(picture, (48, 60), QUICK)
    assert made.shape == (48, 60, 1)
    shuffled = picture.flatten()[torch.randperm(48 * 48, generator=torch.Generator().manual_seed(1))].reshape(48, 48, 1)
    assert two_way(made, picture, QUICK)[0] < 0.7 * two_way(shuffled, picture, QUICK)[0]


def test_seeds_differ_and_repeat():
    picture = texture()
    first, again, other = (generate(picture, None, Settings(iterations=2, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert float((first - other).abs().mean()) > 0.05


def test_no_variety_gives_the_picture_back():
    picture = texture()
    assert float((generate(picture, None, QUICK, variety=0.0) - picture).abs().mean()) < 0.05


def test_variety_is_checked():
    with pytest.raises(ValueError, match="variety"):
        generate(texture(), None, QUICK, variety=-1.0)
