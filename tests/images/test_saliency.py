"""What stands out: the odd one of a pattern, not the pattern; nothing where all is alike."""

import torch

from scram.images.saliency import SEEN, saliency


def pattern(height=80, width=120):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return ((rows // 6 + columns // 6) % 2).float().unsqueeze(-1).repeat(1, 1, 3)


def test_the_odd_one_of_a_pattern():
    picture = pattern()
    picture[30:45, 60:75] = torch.tensor([1.0, 0.2, 0.0])
    shown = saliency(picture)
    assert shown.shape == (80, 120)
    assert float(shown[32:43, 62:73].mean()) > 2 * float(shown[:, :40].mean())


def test_one_color_has_nothing():
    assert float(saliency(torch.full((40, 50, 3), 0.3)).max()) < 1e-3


def test_large_pictures_are_looked_at_small():
    assert min(saliency(torch.rand(300, 250, 1)).shape) == SEEN


def test_tiny_pictures():
    for size in ((1, 1), (1, 30), (4, 4), (7, 9)):
        shown = saliency(torch.rand(*size, 3))
        assert shown.shape == size
        assert bool(shown.isfinite().all())
