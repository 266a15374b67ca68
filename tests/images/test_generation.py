"""Generated pictures: patches of the source, another for every seed, the same for the same."""

import numpy as np
import pytest
import skimage.data
import torch

from scram.images import generate
from scram.images.generation import MOST_UNEVEN, unevenness
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


def photograph(name):
    return torch.from_numpy(np.atleast_3d(getattr(skimage.data, name)())).float() / 255


@pytest.mark.parametrize("name", ["brick", "grass", "gravel", "coins", "hubble_deep_field"])
def test_textures_are_even(name):
    assert unevenness(photograph(name)) < 0.75 * MOST_UNEVEN


@pytest.mark.parametrize("name", ["astronaut", "camera", "chelsea", "coffee", "rocket", "moon"])
def test_scenes_are_refused_unless_asked_for(name):
    picture = photograph(name)[:400, :400]
    assert unevenness(picture) > MOST_UNEVEN
    with pytest.raises(ValueError, match=r"must be a texture, got a scene: .* scenes=True"):
        generate(picture)
    small = picture[::4, ::4]
    assert generate(small, (30, 40), QUICK, scenes=True).shape[:2] == (30, 40)


def test_unevenness_is_of_edges_alone():
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(160, 200, 3, generator=generator)
    plain = unevenness(noise)
    assert plain < MOST_UNEVEN
    half = noise.clone()
    half[:, :100] = half[:, :100] * 0.1  # as rough nowhere as elsewhere
    assert unevenness(half) > 2 * MOST_UNEVEN
    assert unevenness(torch.full((80, 80, 1), 0.5)) == 0


def test_small_pictures_are_not_judged():
    assert unevenness(torch.rand(63, 200, 3)) is None
    assert unevenness(torch.rand(64, 200, 3)) is not None
