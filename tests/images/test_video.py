"""Films: several frames denoise better than one, motion is followed, memory is bounded, frames come in order."""

import pytest
import torch
import torch.nn.functional as F

import scram.images
from scram.images import video
from scram.images.collaborative import Sums
from scram.images.denoising import Basis, fold, unfold
from scram.images.video import _centers, _Film, _followed, _passed, denoise_frames

pytestmark = pytest.mark.slow


def film(count, step=3, channels=3, size=(48, 64), seed=0):
    """A smooth picture that moves to the left by `step` pixels a frame, and the same with noise."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.rand(1, channels, size[0], size[1] + step * count, generator=generator)
    wide = F.avg_pool2d(wide, 7, 1, 3, count_include_pad=False)[0].movedim(0, -1)
    wide = ((wide - wide.mean()) * 4 + 0.5).clamp(0, 1)
    clean = [wide[:, n * step : n * step + size[1]] for n in range(count)]
    return clean, [frame + 0.1 * torch.randn(frame.shape, generator=generator) for frame in clean]


def error(made, clean):
    return float(sum((a - b).square().mean() for a, b in zip(made, clean, strict=True)) / len(clean))


@pytest.mark.parametrize("channels", [1, 3])
def test_several_frames_are_better_than_one(channels):
    clean, noisy = film(5, channels=channels)
    for fast in (False, True):
        made = list(denoise_frames(noisy, 0.1, fast=fast))
        assert [frame.shape for frame in made] == [frame.shape for frame in clean]
        single = [scram.images.denoise(frame, 0.1, fast=fast) for frame in noisy]
        assert error(made, clean) < 0.9 * error(single, clean)
        assert error(made, clean) < error(list(denoise_frames(noisy, 0.1, fast=fast, reach=0)), clean)


def test_groups_over_frames_are_better_than_non_local_means():
    clean, noisy = film(5)
    assert error(list(denoise_frames(noisy, 0.1)), clean) < 0.8 * error(
        list(denoise_frames(noisy, 0.1, fast=True)), clean
    )


@pytest.mark.parametrize("reach", [0, 1, 2])
def test_frames_as_they_come_are_denoised_as_the_whole_film_is(reach):
    _, noisy = film(5)
    settings = video.Settings.of(3, {"reach": reach})
    frames = list(_followed(settings, 0.1, noisy))
    stacked = torch.stack([frame.noisy for frame in frames])
    guides = None
    for how in (video.FIRST, video.SECOND):
        sums = Sums.like(stacked)
        for own, frame in enumerate(frames):
            near = range(max(own - reach, 0), min(own + reach, 4) + 1)
            moved = {n: frame.moved[number - own] for n, number in enumerate(near) if number != own}
            part = slice(near[0], near[-1] + 1)
            both = Sums(sums.values[part], sums.weights[part])  # views
            some = None if guides is None else guides[part]
            both.add(stacked[part], some, near.index(own), 0.1, how, _centers(stacked[part], moved), video.NEAR)
        guides = sums.mean()
    made = list(_passed(_passed(iter(frames), reach, 0.1, video.FIRST), reach, 0.1, video.SECOND))
    torch.testing.assert_close(torch.stack([frame.guide for frame in made]), guides, atol=1e-4, rtol=0)


def test_motion_is_followed():
    _, noisy = film(3, step=6)
    maker = _Film(video.Settings.of(3, {"reach": 1}), 0.1, noisy[0].shape)
    made = list(maker(noisy))
    assert len(made) == 3
    for n, frame in enumerate(noisy):
        maker._take(n, frame)
    maker.motion.before = {}
    found = maker._matches(1)
    assert found.key_grid == (3, 48, 64)
    place = found.coords()[0, 0, 0]
    slots = place[10, 10, :, 0].tolist()
    assert sorted(slots) == [0, 1, 2]
    columns = 2 * torch.arange(32)
    for n in range(3):
        moved = place[:, :, slots.index(n), 2] - columns
        assert moved[4:-4, 6:-6].median() == 6 * (1 - n)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_as_many_frames_as_came_in_their_order(count):
    clean, noisy = film(count, step=2)
    for reach, fast in ((0, True), (2, True), (0, False), (2, False)):
        made = list(denoise_frames(iter(noisy), 0.1, reach=reach, fast=fast))
        assert len(made) == count
        for n, frame in enumerate(made):
            others = [float((frame - other).square().mean()) for other in clean]
            assert min(range(count), key=others.__getitem__) == n


def test_frames_are_asked_for_one_by_one_and_forgotten():
    _, noisy = film(12, step=0)
    taken = []

    def coming():
        for n, frame in enumerate(noisy):
            taken.append(n)
            yield frame

    maker = _Film(video.Settings.of(3, {"reach": 2}), 0.1, noisy[0].shape)
    for n, _ in enumerate(maker(coming())):
        assert len(taken) == min(n + 3, 12)
        assert len(maker.noisy) <= 5
        assert len(maker.motion.small) <= 5


@pytest.mark.parametrize("reach", [0, 1])
def test_groups_wait_for_few_frames(reach):
    """What was taken and not given back is held: five times the reach, and at first five to estimate the noise on."""
    _, noisy = film(12, step=0, channels=1)
    taken = []

    def coming():
        for n, frame in enumerate(noisy):
            taken.append(n)
            yield frame

    for n, _ in enumerate(denoise_frames(coming(), 0.1, reach=reach)):
        assert len(taken) <= max(5, n + 5 * reach + 1)


def test_a_new_basis_changes_little(monkeypatch):
    _, noisy = film(6)
    want = list(denoise_frames(noisy, 0.1, fast=True))
    monkeypatch.setattr(video, "REFIT", 2)
    for a, b in zip(denoise_frames(noisy, 0.1, fast=True), want, strict=True):
        assert float((a - b).abs().mean()) < 0.02


@pytest.mark.parametrize("size", [(20, 24), (21, 25)], ids=["even", "odd"])
def test_every_second_patch_covers_every_pixel(size):
    picture = torch.rand(*size, 3)
    patches = unfold(picture, 5)[::2, ::2]
    made = fold(patches, torch.rand(*patches.shape[:2], 1) + 0.1, picture.shape, 5, stride=2)
    rim = made[2:-2, 2:-2] - picture[2:-2, 2:-2]
    assert float(rim.abs().max()) < 1e-5
    assert made.isfinite().all()


def test_noise_is_estimated_and_nonsense_refused():
    clean, noisy = film(3)
    assert error(list(denoise_frames(noisy)), clean) < 0.3 * error(noisy, clean)
    assert list(denoise_frames([])) == []
    with pytest.raises(ValueError, match=r"frames must all be \(48, 64, 3\), got \(40, 64, 3\)"):
        list(denoise_frames([noisy[0], noisy[1][:40]], 0.1))
    with pytest.raises(ValueError, match="patch is a setting of the fast method"):
        list(denoise_frames(noisy, 0.1, patch=5))
    with pytest.raises(ValueError, match="the noise must be positive, got 0"):
        list(denoise_frames([torch.zeros(48, 64, 3)] * 2))
    assert Basis.fit(noisy[0], 0.1, 5, 16)(noisy[0]).shape == (1, 1, 48, 64, 16)
