"""Features of photographs: projections of patches."""

import pytest
import torch

from scram.images import features as features_module
from scram.images.features import PatchFeatures, plain_share


def test_features_are_the_projection_of_every_patch() -> None:
    picture = torch.rand(9, 12, 3, generator=torch.Generator().manual_seed(0))
    whole = PatchFeatures.fit(picture, width=75, patch=5, stride=1)(picture)
    padded = torch.nn.functional.pad(picture.movedim(-1, 0)[None], [2] * 4, mode="reflect")
    patches = torch.nn.functional.unfold(padded, 5)[0].T
    centered = torch.nn.functional.normalize(patches - patches.mean(0), dim=-1)
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(1, 1, 9, 12))
    # A full basis only turns the patches: their cosines stay.
    flat = whole.reshape(-1, 75)
    torch.testing.assert_close(flat @ flat.T, centered @ centered.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"patch": 4}, "odd"), ({"patch": 3, "width": 28}, "1..27"), ({"patch": 25}, "too small")],
)
def test_features_refuse_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatchFeatures.fit(torch.rand(12, 12, 3), **settings)


def test_strips_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = torch.rand(23, 12, 3)
    features = PatchFeatures.fit(picture, width=8, patch=5)
    whole = features(picture)
    monkeypatch.setattr(features_module, "STRIP", 7)
    torch.testing.assert_close(features(picture), whole)


def test_the_share_of_plain_patches() -> None:
    picture = torch.rand(12, 20, 3)
    picture[:, :11] = 0.5
    assert plain_share(picture, 3) == pytest.approx(10 / 20)
