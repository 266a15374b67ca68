"""What the editing commands share: alpha in and out, and what is shown of it."""

import torch

from scram.cli.edits import channels_of, shown, with_channels
from scram.images.reading import Picture


def test_colors_are_multiplied_with_alpha_and_come_back():
    picture = Picture(torch.rand(5, 6, 3), torch.rand(5, 6, 1).clamp(min=0.1), bits=16)
    channels = channels_of(picture)
    torch.testing.assert_close(channels[..., :3], picture.pixels * picture.alpha)
    back = with_channels(picture, channels)
    torch.testing.assert_close(back.pixels, picture.pixels)
    torch.testing.assert_close(back.alpha, picture.alpha)
    assert back.bits == 16


def test_without_alpha_channels_are_the_pixels():
    picture = Picture(torch.rand(4, 4, 1))
    assert channels_of(picture) is picture.pixels
    assert float(with_channels(picture, picture.pixels + 5).pixels.max()) == 1


def test_what_is_transparent_shows_squares():
    alpha = torch.ones(20, 20, 1)
    alpha[:, 10:] = 0
    seen = shown(Picture(torch.full((20, 20, 3), 0.9), alpha))
    assert bool((seen[:, :10] == 0.9).all())
    assert set(seen[:, 10:].unique().tolist()) == {0.25, 0.75}
