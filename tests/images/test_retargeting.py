"""Retargeting: what stands out keeps its shape, the rest gives way, straight lines stay straight."""

import pytest
import torch

from scram.images import retarget
from scram.images.pyramid import resize
from scram.images.retargeting import LEAST, shape_error, strips
from scram.images.saliency import saliency


def scene(height=96, width=160):
    """A checkered disc on a smooth ground."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ground = 0.4 + 0.1 * columns / width
    disc = (rows - 48) ** 2 + (columns - 50) ** 2 < 26**2
    checks = ((rows // 5 + columns // 5) % 2).float()
    return torch.stack((torch.where(disc, checks, ground), torch.where(disc, 1 - checks, ground)), -1)


def aspect(picture):
    """Width over height of what is far from the ground."""
    disc = (picture - 0.45).abs().amax(-1) > 0.2
    down, across = (disc.any(axis).nonzero()[:, 0] for axis in (1, 0))
    return float((across[-1] - across[0] + 1) / (down[-1] - down[0] + 1))


@pytest.mark.parametrize("size", [(96, 110), (96, 220), (70, 160), (130, 160)], ids=str)
def test_a_disc_stays_round(size):
    picture = scene()
    made = retarget(picture, size)
    assert made.shape == (*size, 2)
    assert abs(aspect(made) - 1) < 0.12
    assert abs(aspect(resize(picture, size)) - 1) > 0.25


def test_strips_fill_the_size_and_none_is_squeezed_further_than_allowed():
    importance = torch.zeros(96, 160)
    importance[30:60, 20:150] = 1
    for size in ((96, 60), (96, 400), (20, 160), (48, 80)):
        rows, columns = strips(importance, (96, 160), size)
        assert float(rows.mean()) == pytest.approx(size[0] / 96, rel=1e-5)
        assert float(columns.mean()) == pytest.approx(size[1] / 160, rel=1e-5)
        for scales, ratio in ((rows, size[0] / 96), (columns, size[1] / 160)):
            assert float(scales.min()) >= LEAST * min(1, ratio) - 1e-6


def test_the_same_size_gives_the_picture_back():
    assert float((retarget(scene(), (96, 160)) - scene()).abs().max()) < 1e-5


def test_where_all_is_alike_the_picture_is_resized():
    noise = torch.rand(64, 96, 1, generator=torch.Generator().manual_seed(0))
    importance = saliency(noise)
    rows, columns = strips(torch.ones_like(importance), (64, 96), (64, 64))
    assert float((rows - 1).abs().max()) < 0.02
    assert float((columns - 2 / 3).abs().max()) < 0.02


def test_vertical_lines_stay_straight():
    picture = scene()
    picture[:, 120:124] = 0
    dark = retarget(picture, (96, 110))[..., 0] < 0.2
    line = dark[:, 70:].float()  # to the right of the disc
    assert int(line.any(0).sum()) == int(line.all(0).sum()) > 0


def test_the_error_of_shapes():
    importance = torch.zeros(20, 20)
    importance[5:10, 5:10] = 1
    one = torch.ones(20)
    assert shape_error(importance, one, one) == 0
    assert shape_error(importance, one, one / 2) == pytest.approx(1)
    kept = one / 2
    kept[5:10] = 1
    assert shape_error(importance, one, kept) == pytest.approx(0)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (40, 3), (300, 2)], ids=str)
def test_tiny_pictures(size):
    for shape in ((1, 1, 1), (2, 5, 3), (9, 3, 4)):
        picture = torch.rand(*shape)
        made = retarget(picture, size)
        assert made.shape == (*size, shape[-1])
        assert bool((made >= picture.min()).all())
        assert bool((made <= picture.max()).all())
