"""Inpainting: exact where it can be, known pixels kept, holes of every kind, and nothing read from them."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import skimage.data
import torch

from scram.images import inpaint
from scram.images.inpainting import SHARP, THIN, WIDE, activity, irregular, suited, surroundings
from scram.images.smooth import smooth_fill
from scram.images.synthesis import Settings

QUICK = Settings(iterations=2)
NO_LAST_STEP = replace(WIDE, finish=None)


def stripes(height=48, width=64, channels=3):
    line = torch.arange(height)[:, None] * 0.5 + torch.arange(width) * 0.8
    return torch.stack([(line + shift).sin() / 2 + 0.5 for shift in range(channels)], -1)


def box(height, width, *boxes):
    hole = torch.zeros(height, width, dtype=torch.bool)
    for top, left, bottom, right in boxes:
        hole[top:bottom, left:right] = True
    return hole


@pytest.mark.parametrize(
    "boxes",
    [[(14, 20, 30, 40)], [(0, 0, 14, 16)], [(34, 10, 48, 30)], [(5, 5, 15, 15), (30, 40, 42, 64)], [(20, 0, 24, 64)]],
    ids=["inside", "corner", "border", "two", "across"],
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_holes_in_a_pattern_are_filled_with_it(boxes, channels):
    picture, hole = stripes(channels=channels), box(48, 64, *boxes)
    filled = inpaint(torch.where(hole.unsqueeze(-1), torch.nan, picture), hole)
    assert torch.equal(filled[~hole], picture[~hole])
    error = float((filled - picture)[hole].square().mean().sqrt())
    smooth = float((smooth_fill(picture, hole, 1) - picture)[hole].square().mean().sqrt())
    assert error < 0.12
    assert error < 0.5 * smooth


def test_the_same_seed_repeats():
    generator = torch.Generator().manual_seed(0)
    picture, hole = torch.rand(80, 70, 1, generator=generator), box(80, 70, (20, 20, 50, 50))
    first, again = (inpaint(picture, hole, QUICK) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, inpaint(picture, hole, Settings(iterations=2, seed=1)))


def test_votes_come_from_outside_the_hole():
    """Left half dark, right half bright: a hole in the dark is filled with dark, whatever lay in it."""
    picture, hole = torch.zeros(40, 60, 1), box(40, 60, (10, 5, 25, 20))
    picture[:, 30:] = 1
    picture[hole] = 1
    assert float(inpaint(picture, hole, QUICK)[hole].max()) < 0.1


def test_no_hole_and_nearly_nothing_but_a_hole():
    picture = stripes(20, 20, 1)
    assert torch.equal(inpaint(picture, box(20, 20)), picture)
    nearly = ~box(20, 20, (0, 0, 2, 2))
    filled = inpaint(picture, nearly)
    assert bool(filled.isfinite().all())
    assert torch.equal(filled[~nearly], picture[~nearly])


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 5), (9, 40)], ids=str)
def test_tiny_pictures(size):
    picture, hole = torch.rand(*size, 3), torch.zeros(size, dtype=torch.bool)
    hole[0, -1] = size != (1, 1)
    filled = inpaint(picture, hole)
    assert bool(filled.isfinite().all())
    assert torch.equal(filled[~hole], picture[~hole])


def test_thin_and_wide_holes_have_their_settings():
    picture = torch.linspace(0, 1, 100).expand(100, 100).unsqueeze(-1)
    assert suited(picture, box(100, 100, (10, 10, 12, 90))) is THIN
    assert suited(picture, box(100, 100, (10, 10, 60, 60))) is WIDE


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grass", True), ("gravel", True), ("brick", False), ("coins", False), ("astronaut", False), ("moon", False)],
)
def test_grass_and_gravel_are_irregular_textures(name, expected):
    picture = torch.from_numpy(np.atleast_3d(getattr(skimage.data, name)())).float()[100:260, 100:260] / 255
    hole = box(160, 160, (50, 50, 110, 110))
    assert irregular(torch.where(hole.unsqueeze(-1), 0, picture), hole, 7) is expected
    assert (suited(picture, hole) is SHARP) is expected


def test_a_hole_in_nothing_known_or_in_one_color_is_no_texture():
    assert not irregular(torch.ones(20, 20, 3), ~box(20, 20, (0, 0, 1, 1)), 7)
    assert not irregular(torch.ones(40, 40, 3), box(40, 40, (10, 10, 30, 30)), 7)


@pytest.mark.slow
def test_grass_is_filled_with_grass_as_rough_as_around():
    grass = torch.from_numpy(skimage.data.grass()[:160, :160, None]).float() / 255
    hole = box(160, 160, (40, 40, 104, 104))

    def roughness(settings):
        filled = inpaint(grass, hole, settings)
        assert torch.equal(filled[~hole], grass[~hole])
        return float(filled[41:103, 41:103].diff(dim=1).abs().mean())

    around = float(grass.diff(dim=1).abs().mean())
    assert 0.8 * around < roughness(None) < 1.1 * around
    assert roughness(WIDE) < 0.65 * around


@pytest.mark.slow
def test_the_last_step_is_for_wide_holes_and_keeps_a_pattern():
    picture = stripes()
    wide, thin = box(48, 64, (14, 20, 40, 50)), box(48, 64, (14, 20, 16, 50))
    errors = [float((inpaint(picture, wide, how) - picture).abs().max()) for how in (NO_LAST_STEP, WIDE)]
    assert errors[0] != errors[1]
    assert max(errors) < 0.1
    assert torch.equal(inpaint(picture, thin, NO_LAST_STEP), inpaint(picture, thin, WIDE))


def test_activity_is_the_mean_difference_of_known_neighbors():
    picture = torch.arange(20.0).expand(16, 20).unsqueeze(-1) * 0.1
    hole = box(16, 20, (4, 4, 8, 8))
    picture = torch.where(hole.unsqueeze(-1), 50.0, picture)
    rough = activity(picture, hole, 5)
    torch.testing.assert_close(rough[..., 1], torch.full((16, 20), 0.1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rough[..., 0], torch.zeros(16, 20), rtol=0, atol=1e-5)


def test_progress_rises_to_one():
    told = []
    inpaint(stripes(), box(48, 64, (14, 20, 40, 50)), QUICK, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1)


def test_bad_input():
    picture = stripes()
    with pytest.raises(ValueError, match="floats"):
        inpaint(picture[..., 0], box(48, 64))
    with pytest.raises(ValueError, match="hole must be bool"):
        inpaint(picture, box(48, 64).float())
    with pytest.raises(ValueError, match="hole must be bool"):
        inpaint(picture, box(64, 48))
    with pytest.raises(ValueError, match="whole picture"):
        inpaint(picture, ~box(48, 64))


def test_no_channel_leaves_its_range():
    for seed in range(4):
        picture = torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1
        filled = inpaint(picture, box(8, 8, (0, 0, 1, 1)))
        known = picture.flatten(0, 1)[1:]
        assert bool((filled >= known.amin(0)).all())
        assert bool((filled <= known.amax(0)).all())


def test_of_a_large_picture_the_part_around_the_hole_is_looked_at(monkeypatch):
    module = importlib.import_module("scram.images.inpainting")
    picture, hole = torch.rand(300, 400, 1), box(300, 400, (10, 200, 20, 230))
    assert surroundings(hole) == (slice(0, 300), slice(0, 400))
    monkeypatch.setattr(module, "LARGE", 4000)
    part = surroundings(hole)
    assert part == (slice(0, 84), slice(136, 294))
    filled = inpaint(picture, hole)
    assert torch.equal(filled[~hole], picture[~hole])
    # But for the range of the known pixels, which that of the whole picture is.
    torch.testing.assert_close(filled[part], inpaint(picture[part], hole[part]), rtol=0, atol=1e-2)
