"""Matches as coordinates, at other resolutions and seen from the keys, each against a plain loop over fractions."""

from fractions import Fraction
from itertools import product
from math import floor, isnan, nan, prod

import pytest
import torch

import scram

GRIDS = [((5,), (7,)), ((4, 3), (4, 3)), ((2, 5), (6, 3)), ((2, 3, 4), (3, 1, 5)), ((2, 2, 3, 2), (3, 2, 1, 4))]
IDS = ["1", "2 equal", "2", "3", "4"]
BATCH, HEADS = 2, 3


def drawn(grid, key_grid, kappa=2, seed=0):
    """Distinct matches, some of them none or off the grid, with scores in which ties are common."""
    torch.manual_seed(seed)
    shape = (BATCH, HEADS, *grid, max(kappa, prod(key_grid)))
    index = torch.rand(shape).argsort(-1)[..., :kappa].int()
    index = torch.where(torch.rand(index.shape) < 0.2, -1, index)
    index[0, 0].flatten()[0] = prod(key_grid)  # off the grid counts as none
    return scram.Matches(index, torch.randint(0, 3, index.shape).float(), key_grid)


def points(grid):
    return list(product(*map(range, grid)))


def number(place, grid):
    index = 0
    for one, extent in zip(place, grid, strict=True):
        index = index * extent + one
    return index


def place_of(index, grid):
    return points(grid)[index] if 0 <= index < prod(grid) else None


def center(x, new, old):
    """Where a point of an axis of `new` cells lies on one of `old` cells, as a fraction."""
    return (x + Fraction(1, 2)) * Fraction(old, new) - Fraction(1, 2)


def nearest(x):
    return floor(x + Fraction(1, 2))


@pytest.mark.parametrize(("grid", "key_grid"), GRIDS, ids=IDS)
def test_identity(grid, key_grid):
    found = scram.Matches.identity(grid, key_grid, batch=BATCH, heads=HEADS)
    assert found.index.shape == (BATCH, HEADS, *grid, 1)
    assert found.key_grid == key_grid
    for point in points(grid):
        own = [nearest(center(x, n, o)) for x, n, o in zip(point, grid, key_grid, strict=True)]
        assert (found.index[(slice(None), slice(None), *point)] == number(own, key_grid)).all()
    assert torch.equal(scram.Matches.identity(grid).index.flatten(), torch.arange(prod(grid)).int())
    assert not found.score.any()


@pytest.mark.parametrize(("grid", "key_grid"), GRIDS, ids=IDS)
def test_coordinates_there_and_back(grid, key_grid):
    found = drawn(grid, key_grid)
    coords = found.coords()
    assert coords.shape == (*found.index.shape, len(grid))
    for index, place in zip(found.index.flatten().tolist(), coords.flatten(0, -2).tolist(), strict=True):
        want = place_of(index, key_grid)
        assert all(map(isnan, place)) if want is None else tuple(place) == want
    back = scram.Matches.from_coords(coords + 0.3 * (2 * torch.rand(coords.shape) - 1), key_grid)
    there = (found.index >= 0) & (found.index < prod(key_grid))
    assert torch.equal(back.index, torch.where(there, found.index, -1))
    assert torch.equal(back.score, torch.where(there, 0.0, -torch.inf))
    assert torch.equal(scram.Matches.from_coords(coords.nan_to_num(-1).long(), key_grid).index, back.index)


def test_coordinates_off_the_grid_are_no_match():
    coords = torch.tensor([-0.51, -0.5, 2.49, 2.5, nan, torch.inf, -torch.inf, 1e30]).reshape(1, 1, 8, 1, 1)
    assert scram.Matches.from_coords(coords, (3,)).index.flatten().tolist() == [-1, 0, 2, -1, -1, -1, -1, -1]
    assert scram.Matches.from_coords(torch.ones(1, 1, 4, 1, 1)).key_grid == (4,)


@pytest.mark.parametrize("factor", [2, 3, Fraction(3, 2), Fraction(1, 2)], ids=str)
@pytest.mark.parametrize(("grid", "key_grid"), GRIDS, ids=IDS)
@pytest.mark.slow
def test_upsample(grid, key_grid, factor):
    found = drawn(grid, key_grid, kappa=2)
    new, new_keys = ([max(1, floor(factor * n)) for n in sizes] for sizes in (grid, key_grid))
    finer = found.upsample(new, new_keys)
    assert finer.index.shape == (BATCH, HEADS, *new, 2)
    assert finer.key_grid == tuple(new_keys)
    for point in points(new):
        lies = [center(x, n, o) for x, n, o in zip(point, new, grid, strict=True)]
        old = tuple(map(nearest, lies))
        for row in product(range(BATCH), range(HEADS), [old], range(2)):
            here = (*row[:2], *row[2], row[3])
            there = (*row[:2], *point, row[3])
            place, want = place_of(int(found.index[here]), key_grid), -1
            if place is not None:
                moved = [key + at - o for key, at, o in zip(place, lies, old, strict=True)]
                scaled = [nearest(center(x, o, n)) for x, n, o in zip(moved, new_keys, key_grid, strict=True)]
                want = number(scaled, new_keys)
            assert finer.index[there] == want
            assert finer.score[there] == found.score[here]


@pytest.mark.parametrize(("grid", "key_grid"), GRIDS, ids=IDS)
def test_upsample_scales_the_key_grid_and_keeps_what_it_means(grid, key_grid):
    twice = drawn(grid, key_grid).upsample([2 * n for n in grid])
    assert twice.key_grid == tuple(2 * n for n in key_grid)
    own = scram.Matches.identity(grid).upsample([3 * n for n in grid])
    assert torch.equal(own.index, scram.Matches.identity([3 * n for n in grid]).index)
    assert scram.Matches.identity((100,), (5,)).upsample((10,)).key_grid == (1,)


@pytest.mark.parametrize("kept", [None, 1, 5])
@pytest.mark.parametrize(("grid", "key_grid"), GRIDS, ids=IDS)
def test_inverse(grid, key_grid, kept):
    found = drawn(grid, key_grid)
    back = found.inverse(kept)
    kept = kept or found.index.shape[-1]
    assert back.key_grid == grid
    assert back.index.shape == (BATCH, HEADS, *key_grid, kept)
    for row in product(range(BATCH), range(HEADS)):
        finders = {key: [] for key in range(prod(key_grid))}
        for query, point in enumerate(points(grid)):
            for key, score in zip(found.index[(*row, *point)].tolist(), found.score[(*row, *point)], strict=True):
                if key in finders:
                    finders[key].append((-float(score), query))
        for key, point in enumerate(points(key_grid)):
            want = [*sorted(finders[key])[:kept], *[(torch.inf, -1)] * kept][:kept]
            assert back.index[(*row, *point)].tolist() == [query for _, query in want]
            assert (-back.score[(*row, *point)]).tolist() == [score for score, _ in want]


def test_inverse_twice_keeps_pairs_that_agree():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).reshape(1, 1, 3, 4, 1).int()
    found = scram.Matches(order, torch.rand(order.shape), (4, 3))
    assert torch.equal(found.inverse().inverse().index, order)


def test_upsampled_matches_start_a_search():
    coarse = torch.nn.functional.normalize(torch.randn(1, 1, 8, 8, 6), dim=-1)
    fine = coarse.repeat_interleave(2, 2).repeat_interleave(2, 3)
    found = scram.exact_search(coarse, coarse.roll(3, 2))
    warm = found.upsample((16, 16))
    again = scram.search(fine, fine.roll(6, 2), search=scram.Search(sweeps=0, seed=0), warm=warm, impl="reference")
    assert (again.score > 0.999).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.identity((3,), (3, 4)), ValueError, r"key_grid must have 1 extents like the query grid, got"),
        (lambda m: m.identity(3), ValueError, "grid must be a sequence of 1 to 4 extents"),
        (lambda m: m.from_coords([0]), TypeError, r"coords must be a tensor \[B, H, \*G, kappa, rank\], got list"),
        (lambda m: m.from_coords(torch.zeros(1, 1, 4, 4, 1)[0]), ValueError, "coords must be .* one number for each"),
        (lambda m: m.from_coords(torch.zeros(1, 1, 4, 4, 1, 1)), ValueError, "coords must be .* one number for each"),
        (lambda m: m.from_coords(torch.zeros(1, 1, 4, 1, 1), (4, 4)), ValueError, "key_grid must have 1 extents"),
        (lambda m: m.identity((3,)).upsample((3, 3)), ValueError, "grid must have 1 extents like the query grid"),
        (lambda m: m.identity((3,)).upsample((3,), (3, 3)), ValueError, "key_grid must have 1 extents"),
        (lambda m: m.identity((3,)).inverse(0), ValueError, "matches must be at least 1, got 0"),
    ],
    ids=["identity", "extents", "list", "short", "rank", "keys", "grid", "finer keys", "none"],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call(scram.Matches)
