"""The matcher: against dense matching, from coarse to fine, over frames, there and back."""

import pytest
import torch

import scram
from scram.nn import Matcher
from support import photos
from support.on_device import to

LONG = scram.Search(sweeps=12, seed=0)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(grid=(20, 24), shift=(3, -2), width=16):
    """Features and the same moved: key p + shift is query p, where it is there."""
    q = randn(1, 2, *grid, width)
    return q, q.roll(shift, (2, 3))


def inner(x, grid=(20, 24), margin=5):
    return x[:, :, margin : grid[0] - margin, margin : grid[1] - margin]


def matched(impl, device, q, k, **settings):
    """By a matcher of that implementation, the Triton one on its device."""
    on = device if impl == "triton" else "cpu"
    return to(Matcher(search=LONG, impl=impl, **settings)(q.to(on), k.to(on)), "cpu")


def test_a_window_over_the_grid_is_dense_matching(impl, device):
    q, k = randn(2, 2, 6, 7, 8), randn(2, 1, 5, 9, 8, seed=1)
    found = matched(impl, device, q, k, radius=9)
    scores = q.flatten(2, 3) @ k.expand(2, 2, 5, 9, 8).flatten(2, 3).mT * 8**-0.5
    down, right = torch.meshgrid(torch.arange(5.0), torch.arange(9.0), indexing="ij")
    mean = scores.softmax(-1) @ torch.stack((right, down), -1).reshape(45, 2)
    torch.testing.assert_close(found.warp, mean.reshape(2, 2, 6, 7, 2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.lse, scores.logsumexp(-1).reshape(2, 2, 6, 7), rtol=1e-4, atol=1e-4)
    best = scores.softmax(-1).amax(-1).reshape(2, 2, 6, 7)
    assert (found.certainty - best).abs().median() < 1e-5
    assert (found.certainty <= best + 1e-5).all()
    own = torch.stack(
        torch.meshgrid((torch.arange(6) + 0.5) * 5 / 6 - 0.5, (torch.arange(7) + 0.5) * 9 / 7 - 0.5, indexing="ij"), -1
    )
    torch.testing.assert_close(found.flow, found.warp - own.flip(-1), rtol=1e-5, atol=1e-5)


def test_a_shift_is_found_with_certainty(impl, device):
    q, k = moved()
    found = matched(impl, device, q, k, radius=2, bidirectional=True, score="cosine", scale=30.0)
    off = (inner(found.flow) - torch.tensor([-2.0, 3.0])).abs().amax(-1)
    assert (off < 0.05).float().mean() > 0.95
    assert inner(found.certainty)[off < 0.05].min() > 0.9
    assert inner(found.agrees).float().mean() > 0.95
    other = matched(impl, device, q, randn(*k.shape, seed=5), radius=2, bidirectional=True)
    assert other.agrees.float().mean() < 0.6  # nothing corresponds
    assert other.back.index.shape == (1, 2, 20, 24, 1)


def test_agreement_is_the_way_there_and_back():
    q, k = randn(1, 2, 6, 7, 8), randn(1, 1, 5, 9, 8, seed=1)
    found = Matcher(search=LONG, bidirectional=True, tolerance=1)(q, k)
    there, back = found.matches.index[..., 0].flatten(2), found.back.index[..., 0].flatten(2)
    for head in range(2):
        for i, j in enumerate(there[0, head].tolist()):
            home = int(back[0, head, j])
            near = home >= 0 and abs(home // 7 - i // 7) <= 1 and abs(home % 7 - i % 7) <= 1
            assert bool(found.agrees.flatten(2)[0, head, i]) == near


def test_what_is_masked_is_not_found_and_nothing_is_nan():
    q, k = randn(2, 1, 6, 7, 8), randn(2, 1, 6, 7, 8, seed=1)
    mask = torch.arange(2).reshape(2, 1, 1).expand(2, 6, 7) > 0  # nothing in the first
    for scales in ((1,), (2, 1)):
        found = Matcher(search=LONG, scales=scales, bidirectional=True)(q, k, key_mask=mask)
        assert found.warp[0].isnan().all()
        assert found.warp[1].isfinite().all()
        assert not found.certainty[0].any()
        assert not found.agrees[0].any()
        assert (found.lse[0] == -torch.inf).all()


def test_coarse_to_fine_stays_near_the_coarse_matches(monkeypatch):
    q, k = photos.stereo(64)
    fast = scram.Search(sweeps=4, seed=0)
    matcher = Matcher(
        scales=(4, 2, 1), search=fast, warm_search=scram.Search(sweeps=2, gossip=0, seed=1), score="cosine"
    )
    seen = []
    search = scram.core.pipeline.search

    def watched(resolved, q, *rest):
        found = search(resolved, q, *rest)
        seen.append((tuple(q.shape[2:-1]), resolved.search.reach, resolved.request.warm, found))
        return found

    monkeypatch.setattr("scram.core.pipeline.search", watched)
    found = matcher(q, k)
    assert [x[:2] for x in seen] == [((16, 16), None), ((32, 32), 4), ((64, 64), 4)]
    for _, reach, warm, level in seen[1:]:
        assert (level.coords() - warm.coords()).abs().amax() <= reach
    exact = scram.exact_search(q, k, score="cosine")
    share = ((found.matches.coords() - exact.coords()).abs().amax(-1) <= 1).float().mean()
    assert share > 0.6
    assert torch.equal(seen[-1][3].index, found.matches.index)


@pytest.mark.parametrize("grid", [(17,), (9, 10), (5, 6, 7), (4, 5, 3, 4)], ids=str)
def test_every_rank_and_odd_extents(grid):
    q = randn(1, 1, *grid, 32)
    found = Matcher(scales=(2, 1), search=LONG, radius=1, bidirectional=True)(q, q)
    assert found.flow.shape == (1, 1, *grid, len(grid))
    assert (found.flow.abs() < 0.5).all(-1).float().mean() > 0.7


def test_frames_start_from_the_last_ones():
    q, k = moved()
    matcher = Matcher(search=LONG, warm_search=scram.Search(sweeps=0, seed=0), keep_matches=True).eval()
    first = matcher(q, k)
    second = matcher(q, k)
    assert torch.equal(first.matches.index, second.matches.index)  # no sweeps: what was kept
    cold = matcher(q[:, :, :10].contiguous(), k)
    assert cold.matches.index.shape == (1, 2, 10, 24, 1)
    matcher(q, k)
    matcher.reset()
    assert matcher.matches is None
    assert Matcher(search=LONG, keep_matches=True, scales=(2, 1)).eval()(q, k).matches is not None
    assert not list(matcher.parameters())


def test_warm_matches_of_a_coarser_grid_are_resampled():
    q, k = moved()
    coarse = scram.Matches.identity((10, 12), heads=2)
    settings = scram.Search(sweeps=0, seed=0)
    found = Matcher(search=LONG, warm_search=settings)(q, k, warm=coarse)
    assert torch.equal(found.matches.index, scram.Matches.identity((20, 24), heads=2).index)


def test_gradients_reach_q_and_k():
    q, k = (x.double().requires_grad_() for x in (randn(1, 1, 4, 5, 3), randn(1, 1, 4, 5, 3, seed=1)))
    matcher = Matcher(radius=1, search=scram.Search(seed=0))

    def function(q, k):
        found = matcher(q, k)
        return found.warp.double(), found.lse

    found = matcher(q, k)
    (found.warp.sum() + found.lse.sum()).backward()
    assert q.grad.abs().sum() > 0
    assert k.grad.abs().sum() > 0
    assert not found.certainty.requires_grad
    own = scram.Matches(found.matches.index, found.matches.score, found.matches.key_grid)
    place = found.warp.new_tensor([[i % 5, i // 5] for i in range(20)]).double().reshape(1, 1, 4, 5, 2)
    wanted = torch.autograd.grad(scram.attend(q, k, place, own).out.sum(), q)[0]
    torch.testing.assert_close(torch.autograd.grad(matcher(q, k).warp.sum(), q)[0], wanted, rtol=1e-4, atol=1e-5)


def test_samples_are_pairs_of_the_warp_and_carry_gradients():
    q, k = moved()
    q.requires_grad_()
    mask = torch.zeros(1, 2, 20, 24, dtype=torch.bool)
    mask[:, 1] = True  # nothing for the first head
    found = Matcher(radius=1, search=LONG, bidirectional=True, score="cosine", scale=30.0)(q, k, key_mask=mask)
    points = found.sample(60, seed=3)
    assert [tuple(x.shape) for x in points] == [(1, 2, 60, 2), (1, 2, 60, 2), (1, 2, 60)]
    assert points.a[0, 0].isnan().all()
    assert not points.certainty[0, 0].any()
    x, y = points.a[0, 1].long().unbind(-1)
    assert len(set(zip(x.tolist(), y.tolist(), strict=True))) == 60
    assert torch.equal(points.b[0, 1], found.warp[0, 1, y, x])
    assert found.agrees[0, 1, y, x].all()
    assert torch.equal(points.certainty[0, 1], found.certainty[0, 1, y, x])
    points.b[0, 1].sum().backward()
    assert q.grad[0, 1].abs().sum() > 0
    assert points.a.nan_to_num(-1).equal(found.sample(60, seed=3).a.nan_to_num(-1))
    for n, message in (
        (0, "n must be at least 1, got 0"),
        (481, "n must be at most the 480 queries of a head, got 481"),
    ):
        with pytest.raises(ValueError, match=message):
            found.sample(n)


def test_half_precision_keeps_coordinates():
    q, k = moved((20, 300), (0, 7))
    found = Matcher(radius=2, search=LONG, score="cosine", scale=30.0)(q.bfloat16(), k.bfloat16())
    assert found.warp.dtype == torch.float32
    assert (inner(found.flow, (20, 280), 5) - torch.tensor([7.0, 0.0])).abs().median() < 0.01


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scales": (1, 2)}, ValueError, r"scales must fall to 1, coarse to fine, such as \(4, 2, 1\), got \(1, 2\)"),
        ({"scales": 4}, ValueError, "scales must be a sequence of ints"),
        ({"scales": (4, 2)}, ValueError, "scales must fall to 1"),
        ({"scales": (2.0, 1)}, TypeError, r"scales\[0\] must be an int, got float 2.0"),
        ({"radius": -1}, ValueError, "radius must be at least 0"),
        ({"tolerance": -1.0}, ValueError, r"tolerance must be in \[0, inf\), got -1.0"),
        ({"warm_search": None}, TypeError, "search must be a scram.Search, got NoneType"),
        ({"bidirectional": 1}, TypeError, "bidirectional must be True or False"),
        ({"tail": None}, TypeError, r"Matcher\(\) has no argument tail"),
    ],
)
def test_errors_say_what_was_expected(change, error, message):
    with pytest.raises(error, match=message):
        Matcher(**change)
    if "radius" in change:
        with pytest.raises(TypeError, match=r"warm must be a scram.Matches, got int"):
            Matcher()(randn(1, 1, 4, 4, 3), randn(1, 1, 4, 4, 3), warm=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_device(dtype):
    q, k = (x.to("cuda", dtype) for x in moved((60, 92), (3, -2), 64))
    for scales in ((1,), (2, 1)):
        found = Matcher(radius=2, scales=scales, bidirectional=True, score="cosine", scale=30.0, search=LONG)(q, k)
        assert found.warp.device.type == "cuda"
        assert (
            (inner(found.flow, (60, 92)) - torch.tensor([-2.0, 3.0], device="cuda")).abs().amax(-1) < 0.05
        ).float().mean() > 0.95
