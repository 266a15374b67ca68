"""Pictures at other sizes and angles: their points come from where they say."""

import pytest
import torch
import torch.nn.functional as F

from scram.images.resample import halved, own_places, turned


def smooth(height, width):
    noise = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    return F.avg_pool2d(noise, 9, 1, 4, count_include_pad=False)[0].movedim(0, -1)


@pytest.mark.parametrize("scale", [0.5, 1, 1.5])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270, 30, -75])
def test_points_come_from_where_they_say(scale, degrees):
    picture = smooth(60, 84)
    posed = turned(picture, scale, degrees)
    origin = posed.origin(own_places(*posed.picture.shape[:2]))
    extent = torch.tensor([60, 84])
    grid = ((2 * origin + 1) / extent - 1).flip(-1)[None]
    there = F.grid_sample(picture.movedim(-1, 0)[None], grid, align_corners=False)[0].movedim(0, -1)
    deep = ((origin > 3) & (origin < extent - 4)).all(-1)
    assert float(deep.float().mean()) > 0.3
    assert float((there - posed.picture)[deep].abs().mean()) < 0.01
    outside = ((origin < -0.51) | (origin > extent - 0.49)).any(-1)
    if degrees % 90:
        assert not posed.inside[outside].any()
        assert posed.inside[deep].all()
        assert not posed.picture[outside].any()
    else:
        assert posed.inside is None
        assert not outside.any()


def test_counter_clockwise():
    picture = torch.zeros(5, 5, 1)
    picture[2, 4] = 1  # to the right
    assert turned(picture, 1, 90).picture[0, 2] == 1  # comes to lie above


def test_halved():
    picture = torch.arange(12.0).reshape(3, 4, 1)
    assert halved(picture)[0, 0, 0] == (0 + 1 + 4 + 5) / 4
    assert halved(picture).shape == (2, 2, 1)
