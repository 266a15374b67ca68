"""Doubts about a filled hole: what looks like nothing else is told, with its place; what fits is not."""

import pytest
import torch

from scram.images.doubts import LIMIT, doubts


def stripes(height=96, width=128):
    line = torch.arange(height)[:, None] * 0.3 + torch.arange(width) * 0.5
    return torch.stack([(line + shift).sin() / 2 + 0.5 for shift in range(3)], -1)


def box(height, width, *boxes):
    hole = torch.zeros(height, width, dtype=torch.bool)
    for top, left, bottom, right in boxes:
        hole[top:bottom, left:right] = True
    return hole


def test_what_fits_is_not_doubtful_and_a_smear_is():
    picture, hole = stripes(), box(96, 128, (10, 10, 40, 40), (50, 60, 90, 110))
    assert doubts(picture, hole) == []
    smeared = picture.clone()
    smeared[50:90, 60:110] = picture.mean((0, 1))
    (only,) = doubts(smeared, hole)
    assert only.box == (50, 60, 90, 110)
    assert only.distance > LIMIT


def test_the_worst_comes_first():
    picture, hole = stripes(), box(96, 128, (10, 10, 40, 40), (50, 60, 90, 110))
    picture[10:40, 10:40] = 0.5
    picture[50:90, 60:110] = torch.rand(40, 50, 3, generator=torch.Generator().manual_seed(0)).round()
    first, second = doubts(picture, hole)
    assert first.box == (50, 60, 90, 110)
    assert first.distance > second.distance


def test_places_are_those_of_the_large_picture():
    picture, hole = stripes(384, 400), box(384, 400, (100, 120, 220, 300))
    picture[100:220, 120:300] = torch.rand(12, 18, 3).repeat_interleave(10, 0).repeat_interleave(10, 1)
    (only,) = doubts(picture, hole)
    for got, want in zip(only.box, (100, 120, 220, 300), strict=True):
        assert abs(got - want) <= 4


@pytest.mark.parametrize("size", [(1, 1), (5, 40), (30, 30)], ids=str)
def test_small_pictures_and_thin_holes_are_not_judged(size):
    hole = torch.zeros(size, dtype=torch.bool)
    hole[0, 0] = True
    assert doubts(torch.rand(*size, 3), hole) == []
    assert doubts(torch.rand(*size, 3), torch.zeros(size, dtype=torch.bool)) == []
