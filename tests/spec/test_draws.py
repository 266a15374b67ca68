"""The draws of the estimators: integers that the definitions give."""

import itertools
import math

import pytest
import torch

from scram.spec import draws
from scram.spec.grid import AllowedKeys
from support import plain

CPU = torch.device("cpu")


@pytest.mark.parametrize("bandwidth", [0.3, 1.0, 2.5, 100.0])
@pytest.mark.parametrize("key_grid", [(1,), (4, 9), (40, 3)], ids=str)
def test_steps_weigh_as_a_gaussian_does(bandwidth, key_grid):
    table = draws.step_table(bandwidth, key_grid, CPU).tolist()
    reach = min(math.ceil(4 * bandwidth), max(key_grid) - 1)
    weights = [math.exp(-0.5 * (d / bandwidth) ** 2) for d in range(-reach, reach + 1)]
    assert table[0] == 0
    assert [b - a for a, b in itertools.pairwise(table)] == [
        round(draws.UNIT * weight / sum(weights)) for weight in weights
    ]


def test_modes_come_first_and_are_counted():
    index = torch.tensor([[-1, 3, 9, 2], [0, -5, -1, 8]], dtype=torch.int32).reshape(1, 1, 2, 4)
    found, count = draws.modes(index, (3, 3), None)
    assert count.flatten().tolist() == [2, 2]
    assert found[0, 0, 0, :2].tolist() == [3, 2]
    assert found[0, 0, 1, :2].tolist() == [0, 8]
    allowed = AllowedKeys.of(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 3, 3, 1), True, None)
    assert draws.modes(index, (3, 3), allowed)[1].flatten().tolist() == [0, 1]  # keys up to the query alone


def test_keys_are_ranked_by_the_noise():
    q, k = torch.zeros(2, 1, 4, 1), torch.zeros(2, 1, 3, 2, 1)
    mask = torch.tensor([[True] * 6, [True, False] * 3]).reshape(2, 3, 2)
    ranked = draws.ranked_keys(q, AllowedKeys.of(q, k, False, mask), torch.tensor(5))
    for row in range(2):
        want = [plain.noise(5, row, key) << 31 | key if mask[row].flatten()[key] else draws.LAST for key in range(6)]
        assert ranked[row].tolist() == want


@pytest.mark.parametrize("stratified", [False, True])
def test_under_causal_order_the_draw_reads_no_mask(stratified):
    q, k = torch.zeros(1, 2, 20, 1), torch.zeros(1, 1, 20, 1)
    mask = torch.rand(1, 2, 20) < 0.5

    def drawn(mask):
        allowed = AllowedKeys.of(q, k, True, mask)
        ranked = draws.ranked_keys(q, allowed, torch.tensor(5))
        return draws.shared_tail(ranked, (20,), 7, stratified, draws.unmasked_later(allowed))

    names, represents = drawn(mask)
    every, represents_every = drawn(None)
    for row in range(2):
        kept = [i for i, name in enumerate(every[row].tolist()) if mask[0, row, name]]
        assert names[row].tolist() == [*every[row, kept].tolist(), *[draws.NONE] * (7 - len(kept))]
        if stratified:
            assert represents[row, : len(kept)].tolist() == represents_every[row, kept].tolist()
    assert stratified or represents is None


@pytest.mark.parametrize("samples", [1, 4, 6, 50])
def test_a_plain_tail_is_the_keys_ranked_first(samples):
    ranked = torch.randperm(6).repeat(3, 1) << 31 | torch.arange(6)
    ranked[0, 2] = draws.LAST
    names, represents = draws.shared_tail(ranked, (6,), samples, stratified=False)
    assert represents is None
    assert names.shape == (3, draws.tail_size((6,), samples, False))
    for row in range(3):
        assert names[row].tolist() == sorted(int(x) & draws.NONE for x in ranked[row].sort().values[:samples])


def test_a_stratified_tail_is_the_first_key_of_each_cell():
    cells = [range(10), range(10, 20)]  # of a grid (20,)
    ranked = torch.stack([torch.randperm(20) << 31 | torch.arange(20) for _ in range(3)])
    ranked[0, :10] = ranked[1, 3] = draws.LAST  # a whole cell is masked, and one key of another
    names, represents = draws.shared_tail(ranked, (20,), 2, stratified=True)
    assert names.shape == represents.shape == (3, draws.tail_size((20,), 2, True)) == (3, 2)
    for row in range(3):
        firsts = [min(cell, key=lambda key, row=row: ranked[row, key]) for cell in cells]
        sizes = [sum(bool(ranked[row, key] != draws.LAST) for key in cell) for cell in cells]
        want = sorted((first if count else draws.NONE, count) for first, count in zip(firsts, sizes, strict=True))
        assert list(zip(names[row].tolist(), represents[row].tolist(), strict=True)) == want


@pytest.mark.parametrize("most", [1, 5, 30, 1000])
@pytest.mark.parametrize("key_grid", [(9,), (4, 100), (5, 6, 7)], ids=str)
def test_cells_are_as_many_as_they_may_be(key_grid, most):
    parts = draws.cell_counts(key_grid, most)
    assert math.prod(parts) <= most
    for axis, extent in enumerate(key_grid):
        more = math.prod(parts) // parts[axis] * (parts[axis] + 1)
        assert parts[axis] == extent or more > most


def test_values_of_names():
    x = torch.arange(2 * 2 * 3.0).reshape(2, 2, 3, 1)
    x[0, 0, 2] = torch.nan
    names = torch.tensor([[0, 1], [2, draws.NONE]] * 4, dtype=torch.int32)[: 2 * 4]  # 4 heads on 2 key heads
    found = draws.tail_values(x, names, heads=4)
    assert found.shape == (8, 2, 1)
    for row in range(8):
        source = x[row // 4, row % 4 // 2].flatten()
        want = [0.0 if name == draws.NONE else float(source[name]) for name in names[row].tolist()]
        torch.testing.assert_close(found[row].flatten(), torch.tensor(want), equal_nan=True)
    assert not found[names == draws.NONE].any()


def test_one_key_of_each_cell_stands_for_the_cell():
    q = torch.randn(1, 1, 6, 9, 2)
    mask = torch.randn(1, 6, 9) < 0.5
    mask[0, :3, :3] = False
    allowed = AllowedKeys.of(q, q, False, mask)
    names, for_keys = draws.shared_tail(draws.ranked_keys(q, allowed, torch.tensor(5)), (6, 9), 6, True)
    assert draws.cell_counts((6, 9), 6) == (2, 3)
    expected = {}
    for corner in range(6):
        low = (corner // 3 * 3, corner % 3 * 3)
        cell = [9 * y + x for y in range(low[0], low[0] + 3) for x in range(low[1], low[1] + 3) if mask[0, y, x]]
        if cell:
            expected[min(cell, key=lambda j: (plain.noise(5, 0, j), j))] = len(cell)
    found = dict(zip(names[0].tolist(), for_keys[0].tolist(), strict=True))
    assert found.pop(draws.NONE) == 0
    assert found == expected
    assert names[0].tolist() == [*sorted(expected), *[draws.NONE] * (6 - len(expected))]
