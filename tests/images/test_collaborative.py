"""Collaborative filtering: its groups are those of plain loops, its transforms lose nothing, strips change nothing."""

from dataclasses import replace

import pytest
import torch

from scram.images.collaborative import ALIKE, FIRST, SECOND, Sums, collaborative, opponent
from scram.images.denoising import denoise
from scram.spec.blocks import cosine, haar, spline


def textured(channels, sigma, size=(40, 48)):
    """Stripes and a step, and the same with noise."""
    y, x = torch.meshgrid(torch.arange(float(size[0])), torch.arange(float(size[1])), indexing="ij")
    stripes = 0.5 + 0.3 * torch.sin(0.9 * x + 0.3 * y) * (x > 20)
    picture = torch.stack([(1 - 0.2 * n) * stripes for n in range(channels)], -1)
    return picture, picture + sigma * torch.randn(picture.shape, generator=torch.Generator().manual_seed(1))


def error(x, y):
    return float((x - y).square().mean())


@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_better_than_non_local_means(channels):
    picture, noisy = textured(channels, 0.1)
    clean = denoise(noisy, 0.1)
    assert clean.shape == picture.shape
    assert error(clean, picture) < 0.8 * error(denoise(noisy, 0.1, fast=True), picture)
    assert error(clean, picture) < 0.15 * error(noisy, picture)


def test_colors_lose_nothing():
    axes = opponent(torch.zeros(1, 1, 3))
    torch.testing.assert_close(axes @ axes.T, torch.eye(3))


def by_loops(noisy, guide, sigma, how):
    """One pass over a picture of one channel, as the page says it: block by block."""
    height, width = noisy.shape
    blocks = [(i, j) for i in range(height - 7) for j in range(width - 7)]
    line = spline() if guide is None else cosine()
    back = torch.linalg.inv(line)
    taper = torch.kaiser_window(8, periodic=False, beta=2.0, dtype=torch.float64)
    taper = taper[:, None] * taper
    total, weights = torch.zeros(2, height, width, dtype=torch.float64)
    of = noisy if guide is None else guide

    def cut(x, place):
        return x[place[0] : place[0] + 8, place[1] : place[1] + 8].double()

    for i in sorted({*range(0, height - 7, how.step), height - 8}):
        for j in sorted({*range(0, width - 7, how.step), width - 8}):
            sides = [min(2 * how.radius + 1, n - 7) for n in (height, width)]
            low = [
                min(max(c - how.radius, 0), n - 7 - s) for c, n, s in zip((i, j), (height, width), sides, strict=True)
            ]
            near = sorted(
                (float((cut(of, p) - cut(of, (i, j))).square().sum()), p)
                for p in blocks
                if all(a <= c < a + s for a, c, s in zip(low, p, sides, strict=True))
            )[: how.flat]
            count = 2 ** (len(near).bit_length() - 1)
            while count > how.group and near[count - 1][0] > ALIKE * 64 * sigma**2:
                count //= 2
            group = [p for _, p in near[:count]]
            mix = haar(count)

            def spectrum(x, group=group, mix=mix):
                return torch.einsum("ab,bij->aij", mix, torch.stack([line @ cut(x, p) @ line.T for p in group]))

            y = spectrum(noisy)
            limit = sigma * how.shrink[0]
            gain = (y.abs() > limit).double()
            if guide is not None:
                energy = spectrum(guide).square()
                gain = energy / (energy + limit**2)
            weight = 1 / max(1.0, float(gain.square().sum()))
            for p, block in zip(group, torch.einsum("ba,bij->aij", mix, gain * y), strict=True):
                place = (slice(p[0], p[0] + 8), slice(p[1], p[1] + 8))
                total[place] += weight * taper * (back @ block @ back.T)
                weights[place] += weight * taper
    return (total / weights).float()


@pytest.mark.parametrize("guided", [False, True], ids=["first", "second"])
def test_a_pass_is_that_of_plain_loops(guided):
    how = replace(SECOND if guided else FIRST, width=64, step=5, radius=4, group=8, flat=16)
    picture, noisy = textured(1, 0.1, (19, 22))
    guide = picture + 0.02 * torch.randn(picture.shape) if guided else None
    frames = noisy.movedim(-1, 0)[None].contiguous()
    sums = Sums.like(frames)
    sums.add(frames, guide.movedim(-1, 0)[None].contiguous() if guided else None, 0, 0.1, how)
    want = by_loops(noisy[..., 0], guide[..., 0] if guided else None, 0.1, how)
    torch.testing.assert_close(sums.mean()[0, 0], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(16, 16), (17, 43)])
def test_small_and_odd_pictures(size):
    picture, noisy = textured(1, 0.1, size)
    assert error(collaborative(noisy, 0.1), picture) < 0.5 * error(noisy, picture)


@pytest.mark.parametrize("sigma", [1e-3, 1e-6])
def test_hardly_any_noise_leaves_the_picture(sigma):
    picture, _ = textured(3, 0.0)
    torch.testing.assert_close(collaborative(picture, sigma), picture, atol=3e-3, rtol=0)


def test_flat_pictures_stay_flat():
    torch.testing.assert_close(collaborative(torch.full((20, 24, 1), 0.4), 0.1), torch.full((20, 24, 1), 0.4))


def test_settings_of_the_fast_method_need_it():
    with pytest.raises(ValueError, match="patch is a setting of the fast method; give fast=True too, or leave it out"):
        denoise(torch.rand(20, 20, 1), 0.1, patch=5)
