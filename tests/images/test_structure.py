"""The structure of a hole: offsets that repeat, labels that continue lines, parts."""

import pytest
import torch

from scram.images.structure import OFFSETS, _Labels, continued, frequent_offsets, parts


def bricks(height=80, width=100):
    """Rows of bricks of 16 x 8 pixels, every other row shifted by half of one; no two are equally bright."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    row = rows // 8
    shifted = columns + row % 2 * 8
    joint = (rows % 8 < 2) | (shifted % 16 < 2)
    bright = ((row * 7 + shifted // 16 * 13) % 5) * 0.02
    return torch.where(joint, 0.9, 0.3 + bright).unsqueeze(-1)


def box(height, width, top, left, bottom, right):
    hole = torch.zeros(height, width, dtype=torch.bool)
    hole[top:bottom, left:right] = True
    return hole


def test_offsets_of_bricks_are_their_periods():
    picture, hole = bricks(), box(80, 100, 30, 40, 55, 70)
    offsets, share = frequent_offsets(torch.where(hole[..., None], 0, picture), hole)
    assert 0 < len(offsets) <= OFFSETS
    assert share > 0.5
    down, across = offsets[:8].unbind(-1)
    assert bool((down % 8 == 0).all())
    assert bool(((across + down % 16) % 16 == 0).all())


def test_joints_go_on_across_a_hole():
    picture, hole = bricks(), box(80, 100, 30, 40, 55, 70)
    made = continued(torch.where(hole[..., None], 0, picture), hole, 1)
    assert torch.equal(made.picture[~hole], picture[~hole])
    joint = picture[hole] > 0.8
    assert float(((made.picture[hole] > 0.8) == joint).float().mean()) > 0.98
    assert float(made.cost[hole].mean()) < 0.01
    assert float(made.cost[~hole].abs().max()) == 0


def test_labels_agree_with_their_neighbors():
    """The ends of a line want the second label; those between would take the first, alone, by a little."""
    unary = torch.tensor([[5.0, 0.0], [0.0, 0.1], [0.0, 0.1], [0.0, 0.1], [5.0, 0.0]])
    seen = torch.tensor([0.0, 1.0]).expand(5, 2).unsqueeze(-1)
    labels, cost = _Labels(unary, torch.ones(5, 2, dtype=torch.bool), seen).chosen(torch.ones(1, 5, dtype=torch.bool))
    assert labels.tolist() == [1] * 5
    assert cost.tolist() == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.0])


def test_matches_lead_to_what_is_shown():
    picture, hole = bricks(), box(80, 100, 30, 40, 55, 70)
    known = torch.where(hole[..., None], 0, picture)
    made = continued(known, hole, 1)
    found = made.matches(7)
    index = found.index[0, 0, ..., 0]
    assert found.key_grid == tuple(index.shape) == (74, 94)
    row, column = 40, 55  # a patch inside the hole, centered at 43, 58
    target = int(index[row, column])
    center = (target // 94 + 3, target % 94 + 3)
    assert torch.equal(made.picture[43, 58], known[center])
    assert int(index[0, 0]) == -1


def test_what_does_not_repeat_itself_has_none():
    noise = torch.rand(80, 100, 3, generator=torch.Generator().manual_seed(0))
    hole = box(80, 100, 30, 40, 50, 60)
    assert continued(torch.where(hole[..., None], 0, noise), hole, 3) is None


@pytest.mark.parametrize("size", [(3, 3), (7, 7), (8, 40)], ids=str)
def test_nothing_to_learn_from(size):
    hole = torch.ones(size, dtype=torch.bool)
    hole[0, 0] = False
    assert continued(torch.zeros(*size, 3), hole, 3) is None


def test_parts_are_what_is_connected():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [1, 0, 1, 0]]).bool()
    number = parts(mask)
    assert torch.equal(number >= 0, mask)
    assert int(number.max()) == 2
    assert number[0, 0] == number[0, 1]
    assert number[1, 3] == number[2, 2]
    assert len({int(number[0, 0]), int(number[1, 3]), int(number[2, 0])}) == 3
    assert int(parts(torch.zeros(2, 3, dtype=torch.bool)).max()) == -1


def test_scores_are_of_one_dtype_whatever_the_default_is():
    picture, hole = bricks(), box(80, 100, 30, 40, 55, 70)
    made = continued(torch.where(hole[..., None], 0, picture), hole, 1)
    torch.set_default_dtype(torch.float64)
    try:
        assert made.matches(7).score.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
