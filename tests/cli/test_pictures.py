"""Pictures of matches."""

import pytest
import torch

import scram
from scram.cli.pictures import flow_of, lines, wheel_colors


def test_flow_points_from_query_to_key() -> None:
    index = torch.tensor([[0, 1], [5, -1]], dtype=torch.int32).reshape(1, 1, 2, 2, 1)
    field = flow_of(scram.Matches(index, torch.zeros(index.shape), (2, 3)))
    assert field[:, :, 0].tolist()[0] == [0, 0]
    assert field[1, 0].tolist() == [2, 0]
    assert field[1, 1].isnan().all()
    colors = wheel_colors(field, limit=4)
    assert colors[1, 1].tolist() == [0.5] * 3
    assert colors[0, 0].std() == 0
    red, green, blue = colors[1, 0].tolist()
    assert red > green == pytest.approx(blue)


def test_lines_end_at_the_matches() -> None:
    a, b = torch.zeros(70, 700, 3), torch.zeros(35, 350, 3)  # B is shown at twice its size
    points = scram.MatchedPoints(torch.tensor([[100.0, 20.0]]), torch.tensor([[300.0, 30.0]]), torch.ones(1))
    picture = lines(a, b, points, gap=16)
    assert picture.shape == (70, 700 + 16 + 700, 3)
    assert (picture[:, 700:716].amin((0, 2)) < 1).all()  # crossed by the line
    for x, y in ((100, 20), (716 + 601, 61)):
        assert float(picture[y, x].max()) > 0.9
    assert not picture[:, :90].any()
