"""Features of photographs: projections of patches; how pictures are read."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from scram.cli.features import PatchFeatures, read_picture


def test_features_are_the_projection_of_every_patch() -> None:
    picture = torch.rand(9, 12, 3, generator=torch.Generator().manual_seed(0))
    whole = PatchFeatures.fit(picture, width=75, patch=5, stride=1)(picture)
    padded = torch.nn.functional.pad(picture.movedim(-1, 0)[None], [2] * 4, mode="reflect")
    patches = torch.nn.functional.unfold(padded, 5)[0].T
    centred = torch.nn.functional.normalize(patches - patches.mean(0), dim=-1)
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(1, 1, 9, 12))
    # A full basis only turns the patches: their cosines stay.
    flat = whole.reshape(-1, 75)
    torch.testing.assert_close(flat @ flat.T, centred @ centred.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"patch": 4}, "odd"), ({"patch": 3, "width": 28}, "1..27"), ({"patch": 25}, "too small")],
)
def test_features_refuse_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatchFeatures.fit(torch.rand(12, 12, 3), **settings)


def test_picture_keeps_its_aspect(tmp_path: Path) -> None:
    Image.new("L", (40, 20), 128).save(tmp_path / "grey.png")
    picture = read_picture(tmp_path / "grey.png", height=10)
    assert picture.shape == (10, 20, 3)
    torch.testing.assert_close(picture, torch.full_like(picture, 128 / 255))
