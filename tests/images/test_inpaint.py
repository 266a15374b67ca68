"""Inpainting: exact where it can be, known pixels kept, holes of every kind, and nothing read from them."""

import pytest
import torch

from scram.images import inpaint
from scram.images.inpaint import THIN, WIDE, activity, suited
from scram.images.smooth import smooth_fill
from scram.images.synthesis import Settings

QUICK = Settings(iterations=2)


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
)  # fmt: skip
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
    assert suited(box(100, 100, (10, 10, 12, 90))) is THIN
    assert suited(box(100, 100, (10, 10, 60, 60))) is WIDE


def test_activity_is_the_mean_difference_of_known_neighbours():
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
