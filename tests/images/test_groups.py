"""Groups of blocks: the kernels of a CPU do what torch does, over one frame and several, and strips change nothing."""

import pytest
import torch

from scram.engines.cpu import collaborate
from scram.images import groups
from scram.images.collaborative import FIRST, SECOND, Sums


def frames_of(count, channels, size=(30, 41)):
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(float(size[0])), torch.arange(float(size[1])), indexing="ij")
    made = [
        0.5 + 0.3 * torch.sin(0.7 * (x - 2 * n) + (0.3 + 0.1 * c) * y) for n in range(count) for c in range(channels)
    ]
    clean = torch.stack(made).reshape(count, channels, *size)
    # An estimate that is nowhere exact: else many blocks would be equally far.
    return [clean + level * torch.randn(clean.shape, generator=generator) for level in (0.03, 0.1)]


def sums_of(guide, noisy, guided):
    """Of the middle frame, by whatever serves."""
    count, _, height, width = noisy.shape
    own = count // 2
    centers = None
    if count > 1:
        place = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1)
        moved = [place + torch.tensor([n - own, 2 * (n - own)]) for n in range(count)]
        centers = torch.stack(moved).clamp(min=0)  # past the lower right edge: windows end at it
    sums = Sums.like(noisy)
    sums.add(noisy, guide if guided else None, own, 0.1, SECOND if guided else FIRST, centers, 3)
    return sums


@pytest.mark.parametrize("guided", [False, True], ids=["first", "second"])
@pytest.mark.parametrize(("count", "channels"), [(1, 1), (1, 3), (3, 1)])
def test_kernels_do_what_torch_does(count, channels, guided, monkeypatch):
    guide, noisy = frames_of(count, channels)
    made = sums_of(guide, noisy, guided)
    monkeypatch.setattr("scram.images.collaborative.add_groups", groups.add_groups_by_torch)
    want = sums_of(guide, noisy, guided)
    assert float(want.weights.max()) > 0
    # Of blocks at all but equal distances one or the other may be taken: few pixels differ.
    assert float((made.weights - want.weights).abs().mean()) < 1e-3 * float(want.weights.mean())
    assert float((made.values - want.values).abs().mean()) < 1e-3 * float(want.weights.mean())


def test_strips_of_torch_change_nothing(monkeypatch):
    guide, noisy = frames_of(1, 1)
    monkeypatch.setattr("scram.images.collaborative.add_groups", groups.add_groups_by_torch)
    want = sums_of(guide, noisy, True).mean()
    for name in ("STRIP_BYTES", "SCORE_NUMBERS", "CHUNK_NUMBERS"):
        monkeypatch.setattr(groups, name, 1 << 14)
    torch.testing.assert_close(sums_of(guide, noisy, True).mean(), want, atol=1e-4, rtol=0)


def test_strips_of_kernels_change_nothing(monkeypatch):
    guide, noisy = frames_of(3, 1)
    want = sums_of(guide, noisy, True)
    monkeypatch.setattr(collaborate, "LINES", 1)
    monkeypatch.setattr(collaborate, "SLAB_BYTES", 1)
    made = sums_of(guide, noisy, True)
    torch.testing.assert_close(made.values, want.values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.weights, want.weights, atol=1e-5, rtol=1e-5)


def test_the_number_of_threads_changes_no_bit():
    guide, noisy = frames_of(3, 1)
    want = sums_of(guide, noisy, True)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        made = sums_of(guide, noisy, True)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made.values, want.values)
