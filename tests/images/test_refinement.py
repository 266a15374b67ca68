"""Finer than a pixel: medians by weights, affine flow, steps of Lucas and Kanade."""

import torch
import torch.nn.functional as F

from scram.cli.features import sample_pair
from scram.images import refinement
from scram.images.refinement import _affine, refined, weighted_median
from scram.images.resample import own_places


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_a_weighted_median_is_that_of_repeated_values(monkeypatch):
    x = uniform(7, 9, 2)
    weight = (3 * uniform(7, 9, seed=1)).floor() + 1
    whole = weighted_median(x, weight, 2)
    for row, column in ((0, 0), (3, 4), (6, 8), (6, 1)):
        part = slice(max(0, row - 2), row + 3), slice(max(0, column - 2), column + 3)
        times = weight[part].flatten().long()
        for channel in range(2):
            values = x[(*part, channel)].flatten().repeat_interleave(times)
            assert whole[row, column, channel] == values.sort().values[(len(values) - 1) // 2]
    monkeypatch.setattr(refinement, "STRIP", 1)  # line by line
    assert torch.equal(weighted_median(x, weight, 2), whole)


def test_a_median_may_leave_out_every_second_point():
    x = torch.zeros(9, 9, 1)
    x[1::2] = 5
    x[:, 1::2] = 5  # what remains is 0 seen from an even place
    assert not weighted_median(x, torch.ones(9, 9), 2, 2)[4, 4]
    assert weighted_median(x, torch.ones(9, 9), 2)[4, 4] == 5


def test_affine_flow_stays_and_stray_matches_go():
    own = own_places(20, 24)
    flow = torch.stack((3 + 0.1 * own[..., 0] - 0.05 * own[..., 1], -7 + 0.2 * own[..., 1]), -1)
    noisy = flow.clone()
    noisy[::5, ::4] += 11
    out = _affine(noisy, torch.ones(20, 24))
    torch.testing.assert_close(out[3:-3, 3:-3], flow[3:-3, 3:-3], rtol=0, atol=0.02)


def test_an_edge_of_the_flow_stays_sharp():
    flow = torch.zeros(20, 24, 2)
    flow[:, 12:] = 6
    torch.testing.assert_close(_affine(flow, torch.ones(20, 24)), flow, rtol=0, atol=0.05)


def test_places_become_finer_than_a_pixel_at_another_brightness():
    a = sample_pair(72)[0]
    height, width = a.shape[:2]
    own = own_places(height, width)
    truth = own + torch.stack((1.3 + 0.02 * own[..., 1], -2.6 - 0.015 * own[..., 0]), -1)  # where a pixel of A lies
    inverse = truth
    for _ in range(20):  # where a pixel of B comes from: fixed point
        moved = torch.stack((1.3 + 0.02 * inverse[..., 1], -2.6 - 0.015 * inverse[..., 0]), -1)
        inverse = own - moved
    grid = ((2 * inverse + 1) / torch.tensor([height, width]) - 1).flip(-1)[None]
    b = F.grid_sample(a.movedim(-1, 0)[None], grid, mode="bicubic", padding_mode="border", align_corners=False)
    b = 0.9 * b[0].movedim(0, -1) + 0.03
    certainty = torch.ones(height, width)
    start = truth.round()
    start[10:14, 20:24] = 5.0  # stray
    certainty[10:14, 20:24] = 0.1
    inner = slice(8, -8), slice(8, -8)
    before, after = ((place - truth).norm(dim=-1)[inner] for place in (start, refined(a, b, start, certainty)))
    assert float(before.median()) > 0.3
    assert float(after.median()) < 0.06
    assert float(after[2:6, 12:16].max()) < 0.5


def test_a_picture_without_anything_in_it_keeps_its_matches():
    flat = torch.full((20, 24, 3), 0.4)
    own = own_places(20, 24)
    out = refined(flat, flat[:, :20], own + 2, torch.zeros(20, 24))
    assert out.isfinite().all()
    torch.testing.assert_close(out[:18, :18], own[:18, :18] + 2, rtol=0, atol=1e-3)
    assert (out.amax((0, 1)) == torch.tensor([19.0, 19.0])).all()
    tiny = refined(flat[:2, :3], flat[:1, :1], torch.zeros(2, 3, 2), torch.ones(2, 3))
    assert not tiny.any()
