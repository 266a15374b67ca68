"""Patches and their features, beside plain loops."""

import pytest
import torch

from scram.images.patches import Features, unfold, whole


def plain_patch(picture, row, column, side):
    return picture[row : row + side, column : column + side].movedim(-1, 0).flatten()


@pytest.mark.parametrize(("shape", "side"), [((5, 7, 3), 3), ((9, 5, 1), 5), ((4, 6, 4), 1)], ids=str)
def test_unfold_is_a_loop_over_patches(shape, side):
    picture = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    patches = unfold(picture, side)
    assert patches.shape == (shape[0] - side + 1, shape[1] - side + 1, shape[2] * side * side)
    for row in range(patches.shape[0]):
        for column in range(patches.shape[1]):
            assert torch.equal(patches[row, column], plain_patch(picture, row, column, side))


def test_whole_patches_lie_in_the_mask():
    mask = torch.rand(9, 12, generator=torch.Generator().manual_seed(0)) > 0.1
    want = [[bool(mask[r : r + 3, c : c + 3].all()) for c in range(10)] for r in range(7)]
    assert whole(mask, 3).tolist() == want
    assert any(map(any, want))


def test_all_features_keep_all_distances():
    picture = torch.rand(9, 8, 2, generator=torch.Generator().manual_seed(0)).double()
    patches = unfold(picture, 3)
    x = Features.fit(patches, 3, 18)(picture)[0, 0].flatten(0, 1)
    want = torch.cdist(patches.flatten(0, 1), patches.flatten(0, 1))
    torch.testing.assert_close(torch.cdist(x, x), want, rtol=1e-4, atol=1e-4)


def test_few_features_are_those_of_most_variance():
    picture = torch.zeros(20, 20, 1)
    picture[:, ::2] = 1  # two kinds of patches alone
    patches = unfold(picture, 3)
    x = Features.fit(patches, 3, 1)(picture)[0, 0]
    torch.testing.assert_close((x[0, 0] - x[0, 1]).abs(), torch.tensor([3.0]), rtol=1e-5, atol=1e-5)


def test_features_are_fitted_to_legal_patches_alone():
    picture = torch.rand(12, 12, 1, generator=torch.Generator().manual_seed(0))
    patches, legal = unfold(picture, 3), torch.zeros(10, 10, dtype=torch.bool)
    legal[:4] = True
    changed = patches.clone()
    changed[5:] = 7
    assert torch.equal(Features.fit(patches, 3, 4, legal).basis, Features.fit(changed, 3, 4, legal).basis)
    assert not torch.equal(Features.fit(patches, 3, 4).basis, Features.fit(changed, 3, 4).basis)
