"""Non-local means: it removes noise, and is the textbook's where a window holds everything."""

import numpy as np
import pytest
import torch

import scram.images
from scram.images.denoising import Basis, Settings, denoise_picture, estimate_noise, fold, unfold


def noisy_ramp(channels, sigma):
    line = torch.linspace(0, 1, 48)
    picture = torch.stack([(line[:, None] + 0.3 * n * line[None]) % 0.8 for n in range(channels)], -1)
    return picture, picture + sigma * torch.randn(picture.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sigma", [0.1, None], ids=["given", "estimated"])
@pytest.mark.parametrize("channels", [1, 3])
def test_denoise_removes_noise(channels, sigma):
    picture, noisy = noisy_ramp(channels, 0.1)
    clean = scram.images.denoise(noisy, sigma)
    assert clean.shape == picture.shape
    assert (clean - picture).square().mean() < 0.3 * (noisy - picture).square().mean()


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_noise_is_estimated(sigma):
    assert estimate_noise(noisy_ramp(3, sigma)[1]) == pytest.approx(sigma, rel=0.12)


def test_a_window_of_everything_is_textbook_non_local_means():
    """With one window over the whole picture the means are those of the dense formula, each patch weighed as a twin."""
    noisy = noisy_ramp(1, 0.1)[1][:20, :20]
    settings = Settings(patch=3, width=9, strength=1.0, matches=1, radius=20)
    basis = Basis.fit(noisy, 0.1, settings.patch, settings.width)
    features, left = basis(noisy), basis.left
    x = features[0, 0].flatten(0, 1).double()
    weights = torch.exp(-torch.cdist(x, x).square() / (0.01 * left))
    weights.fill_diagonal_(np.exp(-2.0))
    total = weights.sum(1, keepdim=True)
    mean = (weights / total) @ unfold(noisy, 3).flatten(0, 1).double()
    trust = (total / np.exp(-2.0)).sqrt().float().reshape(20, 20, 1)
    want = fold(mean.float().reshape(20, 20, 9), trust, noisy.shape, 3)
    torch.testing.assert_close(denoise_picture(noisy, 0.1, settings), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("picture", "sigma", "message"),
    [
        (torch.rand(20, 20), 0.1, r"must be a tensor of floats \[H, W, 1\] or \[H, W, 3\].*torch.float32 \(20, 20\)"),
        (torch.rand(8, 20, 3), 0.1, "a 20 x 8 picture is too small; both sides must be 16 or more"),
        (torch.zeros(20, 20, 3), None, "the estimated noise is 0: nothing to remove"),
        (torch.rand(20, 20, 3), 0.0, "sigma must be positive and finite, got 0.0"),
    ],
    ids=["axes", "tiny", "clean", "sigma"],
)
def test_errors(picture, sigma, message):
    with pytest.raises(ValueError, match=message):
        scram.images.denoise(picture, sigma)


@pytest.mark.parametrize("sigma", [1e-3, 4e-4, 1e-5, 1e-8])
def test_hardly_any_noise_leaves_the_picture(sigma):
    """Weights are rounded more than they fall: the picture still stays, and stays finite."""
    ramp = torch.linspace(0, 1, 48).expand(40, 48).unsqueeze(-1).clone()
    ramp[10:20, 10:20] = 0.7
    clean = scram.images.denoise(ramp, sigma)
    torch.testing.assert_close(clean, ramp, rtol=0, atol=0.02)
