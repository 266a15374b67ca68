"""Pictures of matches."""

import pytest
import torch

import scram
from scram.cli.pictures import offsets, wheel_colors


def test_offsets_point_from_query_to_key() -> None:
    index = torch.tensor([[0, 1], [5, -1]], dtype=torch.int32).reshape(1, 1, 2, 2, 1)
    field = offsets(scram.Matches(index, torch.zeros(index.shape), (2, 3)))
    assert field[:, :, 0].tolist()[0] == [0, 0]
    assert field[1, 0].tolist() == [0, 2]
    assert field[1, 1].isnan().all()
    colors = wheel_colors(field, limit=4)
    assert colors[1, 1].tolist() == [0.5] * 3
    assert colors[0, 0].std() == 0
    red, green, blue = colors[1, 0].tolist()
    assert red > green == pytest.approx(blue)
