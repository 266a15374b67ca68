"""The core of patch synthesis, beside plain loops: votes, completeness, one step, and levels."""

import pytest
import torch

from scram.images.patches import unfold
from scram.images.synthesis import Settings, Source, check_picture, coarse_to_fine, complete_keys, tile_vote, update
from scram.images.tiles import Tiles
from scram.spec.scoring import prepare_query


def noise(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("focus", [0.0, 0.4])
def test_votes_are_a_loop_over_patches(focus):
    side, patches, weight = 3, noise(9, 8, 18), noise(9, 8, seed=1)
    weight[0, 0] = 0
    tiles = Tiles.of(weight > 0.8, 4, 2)
    total, summed = torch.zeros(11, 10, 1), torch.zeros(11, 10, 2)
    taken = tiles.put(torch.ones(len(tiles.wanted), 4, 4, 1), 0)[..., 0] > 0
    for row, column in taken.nonzero().tolist():
        patch = patches[row, column].reshape(2, side, side)
        for down in range(side):
            for right in range(side):
                share = weight[row, column] * torch.tensor(-focus * ((down - 1) ** 2 + (right - 1) ** 2)).exp()
                summed[row + down, column + right] += share * patch[:, down, right]
                total[row + down, column + right] += share
    want = torch.where(total > 0, summed / total, 0)
    assert (total == 0).any()
    got = tile_vote(tiles.cut(patches), tiles.cut(weight.unsqueeze(-1)), tiles, side, focus)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_patches_of_a_picture_vote_for_it():
    picture = noise(12, 15, 3)
    tiles = Tiles.whole((10, 13), picture.device)
    got = tile_vote(unfold(picture, 3)[None], noise(1, 10, 13, 1) + 0.1, tiles, 3)
    torch.testing.assert_close(got, picture, rtol=1e-5, atol=1e-6)


def test_complete_keys_are_a_dot_product():
    q, k, alpha = noise(1, 1, 5, 6, 4), noise(1, 1, 7, 5, 4, seed=1), 0.3
    far = torch.cdist(q.flatten(0, 3), k.flatten(0, 3)).square()
    want = -far / (alpha + far.amin(0))
    keys = complete_keys(q, k, Settings(), alpha)
    got = prepare_query(q, "l2").flatten(0, 3) @ keys.flatten(0, 3).T
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("matches", "alpha", "selective"), [(1, None, 0.0), (3, None, 0.0), (1, 0.05, 0.0), (1, None, 4.0), (3, 0.05, 1.0)]
)
def test_a_step_is_the_textbook_step(matches, alpha, selective):
    """On a small grid the search is exact: every patch becomes a mean of its nearest ones, and they vote."""
    guess, picture = noise(11, 12, 1), noise(13, 10, 1, seed=1)
    settings = Settings(patch=3, width=9, matches=matches, sharpness=2.0, selective=selective)
    legal = noise(11, 8, seed=2) > 0.3
    source = Source.of(picture, settings, legal)
    got, found = update(guess, source, settings, alpha=alpha)
    q, k = source.features(guess).flatten(0, 3), source.features(picture).flatten(0, 3)
    score = -torch.cdist(q, k).square()
    if alpha is not None:
        score = score / (alpha * k.square().sum(-1).mean() + (-score).amin(0))
    best = score.masked_fill(~legal.flatten(), -torch.inf).topk(matches, 1)
    assert torch.equal(found.index.flatten(0, 3).long(), best.indices)
    scale = 2.0 / -best.values[:, 0].median()
    patches = (source.values.flatten(0, 1)[best.indices] * (scale * best.values).softmax(1).unsqueeze(-1)).sum(1)
    tiles = Tiles.whole((9, 10), guess.device)
    distance = -best.values[:, 0]
    weight = (-selective * distance / distance.quantile(0.75)).exp().reshape(1, 9, 10, 1)
    want = tile_vote(patches.reshape(1, 9, 10, 9), weight, tiles, 3)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_blurred_source_is_searched_and_the_sharp_one_votes():
    picture, settings = noise(14, 14, 1), Settings(patch=3)
    blurred = picture.roll(4, 0)  # where it is searched a patch lies four rows lower
    guess, found = update(picture, Source.of(picture, settings), settings, blurred=blurred)
    rows = found.coords()[0, 0, :8, :, 0, 0]
    assert torch.equal(rows, torch.arange(4.0, 12.0)[:, None].expand_as(rows))
    torch.testing.assert_close(guess[2:6], picture[6:10], rtol=1e-4, atol=1e-5)


def test_a_source_made_of_itself_stays():
    picture, told = noise(40, 40, 3), []
    levels = [picture[::2, ::2].contiguous(), picture]
    settings = Settings(patch=3, iterations=2)
    out = coarse_to_fine(levels[0], levels, [(20, 20), (40, 40)], settings, 0.01, told.append)
    assert out.shape == picture.shape
    assert told == sorted(told)
    assert told[-1] == 1
    assert float((out - picture).square().mean()) < 0.5 * float(picture.var())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"patch": 4}, "odd"),
        ({"patch": 1}, "odd"),
        ({"matches": 0}, "matches"),
        ({"sharpness": 0.0}, "sharpness"),
        ({"focus": -1.0}, "focus"),
    ],
    ids=str,
)
def test_settings_are_checked(changed, words):
    with pytest.raises(ValueError, match=words):
        Settings(**changed)


def test_pictures_are_checked():
    with pytest.raises(ValueError, match="floats"):
        check_picture(torch.zeros(20, 20, 3, dtype=torch.uint8), (20, 20), 3)
    with pytest.raises(ValueError, match="picture must be 14 x 14"):
        check_picture(torch.zeros(20, 10, 3), (20, 20), 7)
    with pytest.raises(ValueError, match="size must be 14 x 14"):
        check_picture(torch.zeros(20, 20, 3), (20, 5), 7)
