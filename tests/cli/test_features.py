"""How photographs are read."""

from pathlib import Path

import torch
from PIL import Image

from scram.cli.features import read_picture


def test_picture_keeps_its_aspect(tmp_path: Path) -> None:
    Image.new("L", (40, 20), 128).save(tmp_path / "gray.png")
    picture = read_picture(tmp_path / "gray.png", height=10)
    assert picture.shape == (10, 20, 3)
    torch.testing.assert_close(picture, torch.full_like(picture, 128 / 255))
