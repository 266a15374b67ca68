"""Tile search: the reference against plain Python, and what every answer must hold."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import scram
from support import photos, plain_tile
from support.cases import EXACT, make_tensors, named, run_search, table
from support.in_interpreter import INTERPRETED

TRITON = pytest.param("triton", marks=pytest.mark.gpu)
TILED = [replace(case, method="tile", causal=False, sweeps=case.sweeps and case.sweeps + 1) for case in EXACT]


@pytest.fixture(params=["reference", TRITON], scope="session")
def impl(request):
    """Every engine that has a tile search."""
    return request.param


@pytest.fixture(params=[TRITON], scope="session")
def engine(request):
    """Those of them that are compared with the reference."""
    return request.param


def search(q, k, impl="reference", warm=None, key_mask=None, **settings):
    how = scram.Search("tile", **{"seed": 0, **settings})
    return scram.search(q, k, search=how, warm=warm, key_mask=key_mask, impl=impl)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def by_plain_python(case):
    tensors = make_tensors(case, integer=True)
    return tensors, *plain_tile.tile_search(case, tensors, seed=7)


@pytest.mark.parametrize("case", table(TILED, "tile search"))
def test_field_is_that_of_plain_python(case, impl):
    tensors, index, score = by_plain_python(case)
    found = run_search(case, tensors, impl)
    assert torch.equal(found.index, index)
    assert torch.equal(found.score, score)


@pytest.mark.parametrize("kappa", [1, 2])
def test_a_grid_of_several_tiles_that_do_not_divide_it(impl, kappa):
    case = named("rank 2", grid=(9, 19), key_grid=(11, 8), kappa=kappa, separation=1, sweeps=3, method="tile")
    tensors, index, _ = by_plain_python(case)
    assert torch.equal(run_search(case, tensors, impl).index, index)


def test_finds_what_the_query_search_finds_and_more(impl):
    q, k = photos.stereo(32)
    exact = scram.exact_search(q, k)
    tile = search(q, k, impl, sweeps=4)
    query = scram.search(q, k, search=scram.Search("query", sweeps=4, seed=0))
    share = [float((found.index == exact.index).float().mean()) for found in (query, tile)]
    assert share[1] > share[0]
    assert share[1] > 0.97


@pytest.mark.parametrize("separation", [0, 2])
def test_matches_are_apart_legal_and_best_first(separation, impl):
    q, k = randn(1, 2, 12, 12, 4), randn(1, 2, 12, 12, 4, seed=1)
    mask = torch.rand(1, 2, 12, 12, generator=torch.Generator().manual_seed(2)) < 0.5
    found = search(q, k, impl, matches=4, separation=separation, sweeps=3, key_mask=mask)
    assert (found.score[..., :-1] >= found.score[..., 1:]).all()
    index = found.index.flatten(2, 3).long()
    for head in range(2):
        one = index[0, head]
        assert ((one < 0) | mask[0, head].flatten()[one.clamp(0)]).all()
        row, column = one // 12, one % 12
        apart = torch.maximum((row[:, :, None] - row[:, None]).abs(), (column[:, :, None] - column[:, None]).abs())
        both = (one[:, :, None] >= 0) & (one[:, None] >= 0) & ~torch.eye(4, dtype=torch.bool)
        assert (apart[both.expand_as(apart)] > separation).all()


def test_small_grids_are_searched_whole(impl):
    q, k = randn(1, 1, 5, 5, 8), randn(1, 1, 4, 3, 8, seed=1)  # both smaller than a tile
    exact = scram.exact_search(q, k, matches=3, separation=1)
    found = search(q, k, impl, matches=3, separation=1, sweeps=16)
    assert (found.index == exact.index).float().mean() > 0.9


@pytest.mark.slow
def test_a_row_stops_when_few_queries_took_a_key(impl):
    case = named("rank 2", grid=(23, 23), width=12, kappa=1, jumps=(1,), gossip=1, sweeps=14, method="tile")
    tensors, index, _ = by_plain_python(case)
    assert torch.equal(run_search(case, tensors, impl).index, index)


def test_a_row_that_stops_leaves_the_others_alone(impl):
    q, k = randn(1, 1, 32, 32, 2), randn(1, 1, 32, 32, 2, seed=1)
    calm = torch.zeros_like(q)
    beside = search(torch.cat([calm, q], 1), torch.cat([calm, k], 1), impl, sweeps=4)  # the first row stops at once
    alone = search(torch.cat([q, q], 1), torch.cat([k, k], 1), impl, sweeps=4)
    assert torch.equal(beside.index[:, 1], alone.index[:, 1])


def test_warm_matches_are_kept_unless_beaten(impl):
    q, k = photos.stereo(24)
    exact = scram.exact_search(q, k, matches=2, separation=3)
    again = search(q, k, impl, matches=2, separation=3, sweeps=2, warm=exact)
    assert torch.equal(again.index, exact.index)


def test_an_empty_batch_can_be_warm(impl):
    q, k = torch.zeros(0, 1, 5, 5, 4), torch.zeros(0, 1, 4, 3, 4)
    cold = search(q, k, impl, matches=2)
    again = search(q, k, impl, matches=2, warm=cold)
    assert again.index.shape == again.score.shape == (0, 1, 5, 5, 2)


@pytest.mark.parametrize("kappa", [1, 2])
def test_a_nan_reaches_no_other_query(impl, kappa):
    q, k = randn(1, 1, 9, 9, 4), randn(1, 1, 3, 3, 4, seed=1)  # few keys: bad ones are in every window
    q[..., 3], k[..., 3] = 1, 0
    k[0, 0, :2, :, 3] = -1e6  # nobody wants these

    def found_by(sweeps):
        return search(q, k, impl, sweeps=sweeps, matches=kappa)

    clean, start = found_by(3), found_by(0)
    k[0, 0, :2] = torch.nan
    assert torch.equal(found_by(3).index, clean.index)
    q[0, 0, 3, 3] = torch.nan
    found = found_by(3)
    assert found.index[0, 0, 3, 3, 0] == start.index[0, 0, 3, 3, 0]
    assert found.score[0, 0, 3, 3, 0] == -torch.inf
    assert found.score.isfinite().sum() == 80 * kappa


def test_a_callable_score_runs_in_the_reference():
    q, k = randn(1, 1, 6, 6, 4), randn(1, 1, 6, 6, 4, seed=1)
    by_name = scram.search(q, k, search=scram.Search("tile", seed=0), score="l2", impl="reference")
    by_call = scram.search(q, k, search=scram.Search("tile", seed=0), score=lambda a, b: -(a - b).square().sum(-1))
    assert torch.equal(by_name.index, by_call.index)


@pytest.mark.interpreted
@pytest.mark.parametrize(("width", "large"), [(5, 1500), (140, 300)])
def test_large_whole_numbers_of_float32(engine, width, large):
    case = named("rank 2", grid=(9, 10), width=width, kappa=1, sweeps=3, method="tile")
    tensors = make_tensors(case)
    little = torch.arange(width) % 5 - 2
    for x in (tensors.q, tensors.k):  # of equal sums: the products differ in their last digits
        x.copy_(large + little[torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x))).argsort(-1)])
        large -= 1
    found, expected = (run_search(case, tensors, impl) for impl in (engine, "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("width", "kappa"), [(16, 1), (140, 3)])
def test_float32_that_is_not_finite(engine, width, kappa):
    sweeps = 2 if INTERPRETED else 4
    case = named("rank 2", grid=(9, 10), key_grid=(11, 9), width=width, kappa=kappa, sweeps=sweeps, method="tile")
    tensors = make_tensors(case, integer=True)
    q, k = tensors.q, tensors.k
    q[q == 0] = 1  # zero times infinity is NaN for the reference too
    k[0, 0, 3, 4, 2], k[0, 0, 8, 8, 1], k[0, 0, 0, 0, 0], k[0, 0, 5, 5, 0] = torch.inf, -torch.inf, 3e38, torch.nan
    q[0, 0, 7, 7, 0], q[0, 0, 2, 2, 1] = torch.inf, torch.nan
    found, expected = (run_search(case, tensors, impl) for impl in (engine, "reference"))
    assert torch.equal(found.index, expected.index)
    assert found.score.isinf().any()
