"""Matching of pictures: what is found, and what the certainty says of it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import scram.images
from scram.cli.features import sample_pair
from scram.images.matching import Matching, _better, match
from scram.images.resample import own_places, turned


@pytest.fixture(scope="module")
def photo():
    return sample_pair(120)[0][:, :160]


def error(found, truth):
    return (found.warp.flip(-1) - truth).norm(dim=-1).nan_to_num(torch.inf)


def test_names_of_the_room():
    assert scram.images.match is match
    assert {"match", "denoise"} <= set(dir(scram.images))
    with pytest.raises(AttributeError, match="no attribute 'macth'"):
        scram.images.macth  # noqa: B018


def test_a_crop_is_found_and_what_was_cut_off_is_not_believed(photo):
    crop = photo[12:100, 30:140]
    truth = own_places(*photo.shape[:2]) - torch.tensor([12, 30])
    inside = ((truth >= 0) & (truth < torch.tensor(crop.shape[:2]))).all(-1)
    found = scram.images.match(photo, crop)
    assert found.warp.shape == (120, 160, 2)
    assert float(error(found, truth)[inside].median()) < 0.2
    deep = -F.max_pool2d(-inside.float()[None, None], 17, 1, 8)[0, 0] > 0
    assert float((found.certainty[deep] >= 0.5).float().mean()) > 0.9
    assert float((found.certainty[~inside] >= 0.5).float().mean()) < 0.15
    assert found.sure == pytest.approx(float((found.certainty >= 0.5).float().mean()))
    torch.testing.assert_close(found.flow, found.warp - own_places(120, 160).flip(-1), equal_nan=True)
    right = inside & (error(found, truth) < 1)
    assert float((found.rebuilt - photo).abs()[right].mean()) < 0.05
    assert set(found.seconds) == {"features", "search", "check", "attend", "refine"}


def test_pictures_of_different_things_are_not_believed(photo):
    noise = torch.rand(120, 160, 3, generator=torch.Generator().manual_seed(0))
    assert scram.images.match(photo, noise).sure < 0.05


def test_a_repeated_pattern_is_not_believed():
    tile = torch.rand(16, 16, 3, generator=torch.Generator().manual_seed(0))
    pattern = tile.repeat(6, 8, 1)
    assert scram.images.match(pattern, pattern).sure < 0.2
    once = torch.rand(pattern.shape, generator=torch.Generator().manual_seed(1))
    assert scram.images.match(once, once).sure > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "rotation", "options"),
    [
        (1.0, 90, {"rotations": (0, 90, 180, 270)}),
        (0.5, 0, {"scales": (0.5, 1)}),
        (2.0, 0, {"scales": (1, 2)}),
        (1.0, 40, {"rotations": (0, 40)}),
    ],
    ids=["quarter", "half size", "double size", "40 degrees"],
)
def test_other_sizes_and_angles_need_their_options(photo, scale, rotation, options):
    posed = turned(photo, scale, rotation)
    height, width = photo.shape[:2]
    truth = (own_places(height, width) - posed.shift) @ posed.matrix.inverse().T
    found = scram.images.match(photo, posed.picture, **options)
    assert found.poses[0] == (scale, rotation)
    assert float((error(found, truth) <= 3).float().mean()) > 0.7
    assert found.sure > 2 * scram.images.match(photo, posed.picture).sure


def test_of_two_poses_the_surer_one_is_taken():
    def one(certainty):
        full = torch.full((2, 2), certainty[0])
        full[1] = certainty[1]
        return Matching(
            full[..., None].expand(2, 2, 2),
            full,
            full[..., None].expand(2, 2, 3),
            full,
            torch.zeros(2, 2, dtype=torch.int64),
            ((1.0, 0.0),),
            {"search": 1.0},
        )

    both = _better(one((0.2, 0.7)), one((0.5, 0.6)), 1)
    assert both.pose.tolist() == [[1, 1], [0, 0]]
    torch.testing.assert_close(both.certainty, torch.tensor([[0.5, 0.5], [0.7, 0.7]]))
    assert torch.equal(both.warp[..., 0], both.certainty)
    assert both.seconds == {"search": 2.0}


def test_it_repeats_tells_and_takes_gray(photo):
    shares = []
    gray = photo.mean(-1, keepdim=True)
    how = {"patch": 7, "matches": 2, "separation": 2}
    found = scram.images.match(gray, gray.roll(3, 1), **how, progress=lambda share, _: shares.append(share))
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert max(shares) < 1
    again = scram.images.match(gray, gray.roll(3, 1), **how)
    assert torch.equal(found.warp, again.warp)
    assert float((found.flow[10:-10, 10:-20] - torch.tensor([3.0, 0.0])).norm(dim=-1).median()) < 0.5


def test_samples_and_files_hold_the_warp(photo, tmp_path):
    found = scram.images.match(photo, photo.roll((2, 5), (0, 1)), patch=5)
    points = found.sample(300, seed=2)
    x, y = points.a.long().unbind(-1)
    assert torch.equal(points.b, found.warp[y, x])
    assert torch.equal(points.certainty, found.certainty[y, x])
    assert float(points.certainty.min()) >= 0.5
    taken = ((y // 30) * 4 + x // 40).bincount(minlength=16)  # in 4 x 4 tiles of 30 x 40 pixels
    passed = F.avg_pool2d((found.certainty >= 0.5).float()[None], (30, 40)).flatten()
    assert int(taken[passed > 0.7].min()) >= 10  # of 19 each, where all pass
    assert len(found.sample(10**6).a) == round(found.sure * 120 * 160)
    for name in ("found.npz", "found.safetensors"):
        found.save(tmp_path / name, points)
    with np.load(tmp_path / "found.npz") as arrays:
        arrays = dict(arrays)
    tensors = load_file(tmp_path / "found.safetensors")
    assert sorted(tensors) == sorted(arrays)
    for name, x in tensors.items():
        np.testing.assert_array_equal(x, arrays[name])
    torch.testing.assert_close(tensors["warp"], found.warp, equal_nan=True)
    assert torch.equal(tensors["points_b"], points.b)
    with pytest.raises(ValueError, match=r"path must end in .npz or .safetensors, got 'found.pt'"):
        found.save("found.pt")
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        found.sample(0)


def test_opencv_warps_with_the_warp(photo):
    cv2 = pytest.importorskip("cv2")
    b = photo.roll((2, 5), (0, 1))
    found = scram.images.match(photo, b)
    x, y = (found.warp[..., n].numpy() for n in (0, 1))
    warped = cv2.remap(b.numpy(), x, y, cv2.INTER_CUBIC)
    assert float((torch.from_numpy(warped) - photo).abs()[8:-8, 8:-8].mean()) < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, m: m(p[..., 0], p), r"a must be a tensor of floats \[H, W, 3\].*got torch.float32 \(120, 160\)"),
        (lambda p, m: m(p, "b.png"), "b must be a tensor .*got str"),
        (lambda p, m: m(p, p, scales=(0,)), r"scales must lie between 0.1 and 10, got \(0.0,\)"),
        (lambda p, m: m(p, p, rotations=()), "rotations must hold at least one finite number"),
        (lambda p, m: m(p, p, scales=(float("nan"),)), "scales must hold at least one finite number"),
        (lambda p, m: m(p, p, patch=4), "patch must be odd"),
        (lambda p, m: m(p[:4, :4], p), "a 4 x 4 picture is too small for 11 x 11 patches"),
    ],
    ids=["axes", "path", "scale", "no angle", "nan", "patch", "tiny"],
)
def test_errors(photo, call, message):
    with pytest.raises(ValueError, match=message):
        call(photo, scram.images.match)
