"""The search: what it must find, and what every answer must hold."""

import sys
from dataclasses import replace
from functools import cache

import pytest
import torch

import scram
from support import photos, plain
from support.cases import EXACT, make_tensors, named, run_attend, run_search, table

KEYS = 16
# Every method of every engine that has it.
SEARCHES = [
    ("reference", "query"),
    ("numba", "query"),
    pytest.param("triton", "query", marks=pytest.mark.gpu),
    ("reference", "tile"),
    pytest.param("triton", "tile", marks=pytest.mark.gpu),
]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pairs(*scores):
    """q, k on rank-1 grids whose score table is [N, M] = scores: k is one-hot."""
    table = torch.tensor(scores, dtype=torch.float32)
    return table[None, None], torch.eye(table.shape[1])[None, None]


def starts(*keys, key_grid):
    index = torch.tensor(keys, dtype=torch.int32).reshape(1, 1, -1, 1)
    return scram.Matches(index, torch.zeros(index.shape), key_grid)


@pytest.mark.slow
def test_long_search_finds_every_best_key(impl):
    q, k = (x.expand(6, -1, -1, -1, -1) for x in photos.stereo(8))  # each row of a batch draws its own
    settings = scram.Search(sweeps=32, propagate="both", gossip=8, seed=0)
    found = scram.search(q, k, search=settings, impl=impl)
    assert torch.equal(found.index, scram.exact_search(q, k).index)


@pytest.mark.parametrize("center", [0, 8, 15])
def test_boxes_are_cut_at_the_border_not_clamped(impl, center):
    n = 4096
    q = torch.ones(1, 1, n, 1)
    k = torch.ones(1, 1, KEYS, 1)
    k[0, 0, center] = 0  # every other key is better, all alike: the first one drawn stays
    warm = starts(*[center] * n, key_grid=(KEYS,))
    settings = scram.Search(sweeps=1, jumps=(), gossip=0, seed=1)
    found = scram.search(q, k, search=settings, warm=warm, impl=impl).index.flatten().long()
    share = torch.bincount(found, minlength=KEYS) / n
    assert share[torch.arange(KEYS) != center].min() > 0.04
    assert share[torch.arange(KEYS) != center].max() < 0.09


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("known", [0, 1], ids=["from the left", "from the right"])
def test_shift_moves_the_neighbors_match_along(impl, axis, known):
    grid = [2, 2, 2]
    grid[axis] = 24
    n, offset = 96, 5
    place = torch.arange(n).reshape(grid).movedim(axis, 0)
    right = torch.where((torch.arange(24) < 24 - offset).reshape(-1, 1, 1), place.roll(-offset, 0), -1)
    right = right.movedim(0, axis).flatten()  # the best key of i lies 5 further along the axis
    q = torch.zeros(n, n)
    q[right >= 0] = torch.eye(n)[right[right >= 0]]
    along = (torch.arange(24) % 2 == known).reshape(-1, 1, 1).expand_as(place).movedim(0, axis).flatten()
    warm = scram.Matches(
        torch.where(along, right, 0).int().reshape(1, 1, *grid, 1), torch.zeros(1, 1, *grid, 1), tuple(grid)
    )
    settings = scram.Search("query", sweeps=1, jumps=(1,), propagate="shift", gossip=0, seed=0)
    q, k = q.reshape(1, 1, *grid, n), torch.eye(n).reshape(1, 1, *grid, n)
    found = scram.search(q, k, search=settings, warm=warm, impl=impl).index.flatten()
    assert torch.equal(found[right >= 0].long(), right[right >= 0])


def test_stay_and_gossip_spread_one_key(impl):
    q, k = torch.ones(1, 1, 64, 1), torch.zeros(1, 1, 100000, 1)
    k[0, 0, 77777] = 1
    warm = starts(*[77777] + [0] * 63, key_grid=(100000,))
    quiet = scram.Search(sweeps=1, jumps=(1,), propagate="shift", gossip=0, seed=0)

    def knowing(**changes):
        settings = replace(quiet, **changes)
        return int((scram.search(q, k, search=settings, warm=warm, impl=impl).index == 77777).sum())

    assert knowing() == 1
    assert knowing(propagate="stay") == 2
    assert knowing(propagate="stay", jumps=(8, 1)) == 3
    assert knowing(propagate="stay", sweeps=3) == 4  # a sweep reads what the last one left
    assert knowing(propagate="turns", sweeps=1) == 1
    assert knowing(propagate="turns", sweeps=2) == 2
    assert knowing(gossip=64) > 20


def test_shift_never_wraps_around_the_key_grid(impl):
    q, k = torch.ones(1, 1, 3, 1), torch.zeros(1, 1, 50000, 1)
    k[0, 0, [0, 49999]] = torch.tensor([[1.0], [2.0]])
    settings = scram.Search(sweeps=1, jumps=(1,), propagate="shift", gossip=0, seed=0)
    # Query 1 sees key 0 of query 2 (minus 1: off the grid) and 49999 of query 0 (plus 1: off the grid).
    found = scram.search(q, k, search=settings, warm=starts(49999, 500, 0, key_grid=(50000,)), impl=impl)
    assert found.index.flatten().tolist()[1] == 500


def test_result_is_sorted(impl):
    q, k = randn(1, 2, 9, 9, 8), randn(1, 2, 9, 9, 8, seed=1)
    found = scram.search(q, k, search=scram.Search(matches=5, sweeps=0, seed=0), impl=impl)
    assert (found.score[..., :-1] >= found.score[..., 1:]).all()
    scores = torch.einsum("bhne,bhme->bhnm", q.flatten(2, 3), k.flatten(2, 3))
    index = found.index.flatten(2, 3).long()
    own = torch.where(index < 0, -torch.inf, scores.gather(-1, index.clamp(0)))
    torch.testing.assert_close(found.score.flatten(2, 3), own)


def test_equal_scores_stay_in_run_order(impl):
    q, k = torch.zeros(1, 1, 40, 1), torch.zeros(1, 1, 40, 1)
    all_runs = scram.search(q, k, search=scram.Search(matches=4, sweeps=1, seed=0), impl=impl).index
    for runs in (1, 2, 3):
        fewer = scram.search(q, k, search=scram.Search(matches=runs, sweeps=1, seed=0), impl=impl).index
        assert torch.equal(fewer, all_runs[..., :runs])


def test_seed_decides(impl):
    q, k = randn(1, 1, 12, 12, 4), randn(1, 1, 12, 12, 4, seed=1)
    settings = scram.Search(matches=2, sweeps=1, seed=5)
    first = scram.search(q, k, search=settings, impl=impl)
    again = scram.search(q, k, search=settings, impl=impl)
    assert torch.equal(first.index, again.index)
    assert torch.equal(first.score, again.score)
    for other in (6, 5 + 2**32, -5):
        assert not torch.equal(first.index, scram.search(q, k, search=replace(settings, seed=other), impl=impl).index)


@pytest.mark.parametrize("seed", [0, 5, -5, 2**63 - 1])
def test_seed_as_a_tensor_is_the_same_seed(impl, seed):
    q, k = randn(1, 1, 12, 12, 4), randn(1, 1, 12, 12, 4, seed=1)
    number, tensor = (
        scram.search(q, k, search=scram.Search(sweeps=1, seed=given), impl=impl) for given in (seed, torch.tensor(seed))
    )
    assert torch.equal(number.index, tensor.index)


def test_torch_manual_seed_governs_no_seed(impl):
    q, k = randn(1, 1, 12, 12, 4), randn(1, 1, 12, 12, 4, seed=1)
    settings = scram.Search(sweeps=0)

    def field():
        return scram.search(q, k, search=settings, impl=impl).index

    torch.manual_seed(1)
    first, second = field(), field()
    torch.manual_seed(1)
    assert torch.equal(field(), first)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(field(), first)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_depends_on_itself_alone(impl, causal):
    q, k = randn(2, 4, 6, 6, 3), randn(2, 2, 6, 6, 3, seed=1)
    mask = randn(2, 4, 6, 6, seed=2) < 1
    settings = scram.Search(matches=2, sweeps=2, seed=0)
    first = scram.search(q, k, search=settings, causal=causal, key_mask=mask, impl=impl)
    for batch, head in [(0, 0), (1, 2), (1, 3)]:
        other_q, other_k, other_mask = randn(*q.shape, seed=7), randn(*k.shape, seed=8), ~mask
        other_q[batch, head], other_k[batch, head // 2], other_mask[batch, head] = (
            q[batch, head],
            k[batch, head // 2],
            mask[batch, head],
        )
        second = scram.search(other_q, other_k, search=settings, causal=causal, key_mask=other_mask, impl=impl)
        assert torch.equal(first.index[batch, head], second.index[batch, head])
        assert torch.equal(first.score[batch, head], second.score[batch, head])
        assert not torch.equal(first.index, second.index)


def test_rows_of_equal_content_draw_differently(impl):
    q, k = randn(1, 1, 12, 12, 4).expand(2, 2, -1, -1, -1), randn(1, 1, 12, 12, 4, seed=1).expand(2, 2, -1, -1, -1)
    index = scram.search(q, k, search=scram.Search(sweeps=0, seed=0), impl=impl).index.flatten(0, 1)
    assert len({tuple(row.flatten().tolist()) for row in index}) == 4


@pytest.mark.parametrize("separation", [0, 1, 3])
def test_matches_of_a_query_are_farther_apart_than_the_separation(impl, separation):
    q, k = randn(1, 1, 8, 8, 4), randn(1, 1, 9, 10, 4, seed=1)
    settings = scram.Search(matches=4, separation=separation, seed=0)
    index = scram.search(q, k, search=settings, impl=impl).index.long().flatten(0, -2)
    assert (index >= 0).all()
    y, x = index // 10, index % 10
    apart = torch.maximum((y[:, :, None] - y[:, None]).abs(), (x[:, :, None] - x[:, None]).abs())
    assert apart[:, ~torch.eye(4, dtype=torch.bool)].min() == separation + 1  # and no farther than asked


def test_more_matches_than_keys_pad_with_none(impl):
    q, k = randn(1, 1, 5, 5, 4), randn(1, 1, 1, 3, 4, seed=1)
    found = scram.search(q, k, search=scram.Search(matches=6, sweeps=4, seed=0), impl=impl)
    assert (found.index[..., 3:] == -1).all()
    assert (found.score[..., 3:] == -torch.inf).all()
    assert (found.index[..., :3].sort(-1).values == torch.arange(3)).all()


def test_masked_and_later_keys_are_never_found(impl):
    q, k = randn(2, 2, 6, 6, 4), randn(2, 2, 6, 6, 4, seed=1)
    mask = randn(2, 2, 6, 6, seed=2) < -0.5
    found = scram.search(q, k, search=scram.Search(matches=3, seed=0), causal=True, key_mask=mask, impl=impl)
    index = found.index.flatten(2, 3).long()
    assert (index <= torch.arange(36)[:, None]).all()
    allowed = mask.flatten(2).unsqueeze(2).expand(-1, -1, 36, -1).gather(-1, index.clamp(0))
    assert (allowed | (index < 0)).all()
    legal = mask.flatten(2).cumsum(-1)
    assert ((index >= 0).sum(-1) <= legal.clamp(max=3)).all()
    assert torch.equal((index >= 0).any(-1), legal > 0)


def test_start_is_uniform_over_the_legal_keys(impl):
    q, k = torch.ones(1, 1, 4000, 1), torch.ones(1, 1, 9, 1)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 0]]).bool()
    index = scram.search(q, k, search=scram.Search(sweeps=0, seed=0), key_mask=mask, impl=impl).index
    share = torch.bincount(index.flatten().long(), minlength=9) / 4000
    assert torch.equal(share > 0, mask[0])
    assert (share[mask[0]] - 0.2).abs().max() < 0.03


def test_no_sweeps_give_the_start(impl):
    q, k = randn(1, 1, 12, 12, 4), randn(1, 1, 12, 12, 4, seed=1)
    none, loud = (
        scram.search(q, k, search=scram.Search(sweeps=0, gossip=gossip, propagate=how, seed=0), impl=impl).index
        for gossip, how in ((0, "shift"), (8, "both"))
    )
    assert torch.equal(none, loud)
    assert len(none.unique()) > 72  # 144 draws of 144 keys: 91 distinct are expected


def test_nan_query_keeps_a_key_and_stays_alone(impl):
    q, k = randn(1, 1, 6, 6, 4), randn(1, 1, 6, 6, 4, seed=1)
    clean = scram.search(q, k, search=scram.Search(matches=2, seed=0, propagate="shift", gossip=0, jumps=()), impl=impl)
    q[0, 0, 2, 3, 1] = torch.nan
    dirty = scram.search(q, k, search=scram.Search(matches=2, seed=0, propagate="shift", gossip=0, jumps=()), impl=impl)
    assert (dirty.index[0, 0, 2, 3] >= 0).all()
    assert (dirty.score[0, 0, 2, 3] == -torch.inf).all()
    others = torch.ones(6, 6, dtype=torch.bool)
    others[2, 3] = False
    assert torch.equal(clean.index[0, 0, others], dirty.index[0, 0, others])
    loud = scram.search(q, k, search=scram.Search(matches=2, seed=0), impl=impl)
    assert loud.score[0, 0, others].isfinite().all()
    assert (loud.index >= 0).all()
    assert scram.attend(q, k, k, loud, impl=impl).out[0, 0, 2, 3].isnan().all()


def test_nan_key_is_left_for_a_number(impl):
    q, k = randn(1, 1, 30, 4), randn(1, 1, 5, 4, seed=1)
    k[0, 0, 2] = torch.nan
    warm = starts(*[2] * 30, key_grid=(5,))
    found = scram.search(q, k, search=scram.Search(seed=0), warm=warm, impl=impl)
    assert not (found.index == 2).any()
    stuck = scram.search(q, k, search=scram.Search(sweeps=0, seed=0), warm=warm, impl=impl)
    assert (stuck.index == 2).all()
    assert (stuck.score == -torch.inf).all()


def test_warm_start_is_taken_where_it_is_legal(impl):
    q, k = pairs(*torch.arange(40.0).reshape(4, 10).tolist())
    mask = torch.arange(10).ne(6)[None]
    settings = scram.Search(sweeps=0, seed=0)
    cold = scram.search(q, k, search=settings, key_mask=mask, impl=impl).index.flatten().tolist()
    found = scram.search(q, k, search=settings, key_mask=mask, warm=starts(3, -1, 6, 10, key_grid=(10,)), impl=impl)
    assert found.index.flatten().tolist() == [3, cold[1], cold[2], cold[3]]
    assert found.score.flatten().tolist()[0] == 3  # computed anew, not the warm one's 0


@pytest.mark.parametrize("masks", ["no mask", "of the batch", "of each head"])
def test_a_warm_start_that_is_not_legal_gives_way_to_the_routed_key_then_to_the_draw(impl, masks):
    drawing = torch.Generator().manual_seed(1)
    q, k = (torch.randint(-3, 4, (2, 2, 8, 16, 4), generator=drawing).float() for _ in range(2))
    v = torch.randn(2, 2, 8, 16, 3, generator=drawing)
    mask = None
    if masks != "no mask":
        heads = () if masks == "of the batch" else (2,)
        mask = torch.rand(2, *heads, 8, 16, generator=drawing) > 0.3
    clusters = scram.Clusters(count=12, keys=16, seed=0)
    book = scram.cluster(q, k, v, clusters=clusters, key_mask=mask, scale=1.0, impl="reference")
    settings = scram.Search(sweeps=0, seed=0)
    how = {"key_mask": mask, "impl": impl}
    routed = scram.search(q, k, search=settings, codebook=book, scale=1.0, **how).index
    cold = scram.search(q, k, search=settings, **how).index
    assert not torch.equal(routed, cold)
    given = torch.randint(-1, 140, cold.shape, generator=drawing, dtype=torch.int32)  # of 128 keys
    warm = scram.Matches(given, torch.zeros(given.shape), (8, 16))
    found = scram.search(q, k, search=settings, codebook=book, scale=1.0, warm=warm, **how).index
    each = torch.ones(2, 2, 128, dtype=torch.bool)
    if mask is not None:
        each = mask.reshape(2, -1, 128).expand(2, 2, 128)
    key = given.flatten(2).long()
    is_legal = ((key >= 0) & (key < 128) & each.gather(2, key.clamp(0, 127))).reshape(given.shape)
    assert 0.4 < is_legal.float().mean() < 0.99
    assert torch.equal(found, torch.where(is_legal, given, routed))


def test_warm_start_too_close_to_an_earlier_match_is_drawn(impl):
    q, k = pairs(*[[0.0] * 9] * 3)
    warm = scram.Matches(torch.tensor([[4, 4], [4, 5], [4, 8]]).int()[None, None], torch.zeros(1, 1, 3, 2), (9,))
    settings = scram.Search(matches=2, separation=1, sweeps=0, seed=0)
    index = scram.search(q, k, search=settings, warm=warm, impl=impl).index[0, 0]
    assert index[:, 0].tolist() == [4, 4, 4]
    assert index[2].tolist() == [4, 8]
    for second in index[:2, 1].tolist():
        assert second == -1 or abs(second - 4) > 1


def test_warm_start_never_loses_a_score(impl):
    q, k = randn(1, 1, 12, 12, 4), randn(1, 1, 12, 12, 4, seed=1)
    first = scram.search(q, k, search=scram.Search(sweeps=2, seed=0), impl=impl)
    second = scram.search(q, k, search=scram.Search(sweeps=1, seed=1), warm=first, impl=impl)
    assert (second.score >= first.score).all()
    assert (second.score > first.score).any()


def test_search_carries_no_gradient(impl):
    q = randn(1, 1, 6, 6, 4).requires_grad_()
    assert not scram.search(q, q, impl=impl).score.requires_grad


def test_score_of_l2_and_callable(impl):
    q, k = randn(1, 1, 6, 6, 4), randn(1, 1, 6, 6, 4, seed=1)
    found = scram.search(q, k, search=scram.Search(sweeps=8, seed=0), score="l2", impl=impl)
    table = -(q.reshape(36, 1, 4) - k.reshape(1, 36, 4)).square().sum(-1)
    torch.testing.assert_close(found.score.flatten(), table.gather(-1, found.index.reshape(36, 1).long()).flatten())
    assert (found.score.flatten() >= table.amax(-1) - 1e-5).float().mean() > 0.8

    def distance(a, b):
        return -(a - b).square().sum(-1)

    named = scram.search(q, k, search=scram.Search(sweeps=8, seed=0), score=distance, impl="reference")
    assert torch.equal(named.index, found.index)


def test_half_precision_l2_does_not_lose_the_best(impl):
    q = (randn(1, 1, 8, 8, 4) + 30).bfloat16()  # far from 0, |q|^2 swamps the differences
    found = scram.search(q, q, search=scram.Search(sweeps=32, seed=0), score="l2", impl=impl)
    points = q.double().reshape(64, 4)
    table = -(points[:, None] - points).square().sum(-1)
    own = table.gather(-1, found.index.reshape(64, 1).long())
    assert (own.flatten() - found.score.flatten()).abs().max() < 1e-2
    assert (own.flatten() == 0).float().mean() > 0.9  # most find themselves


def test_chunks_do_not_change_the_answer(monkeypatch):
    q, k = randn(2, 1, 5, 5, 4), randn(2, 1, 5, 5, 4, seed=1)
    whole = scram.search(q, k, search=scram.Search(matches=2, sweeps=2, seed=0), impl="reference")
    monkeypatch.setattr(sys.modules["scram.engines.reference.search"], "CHUNK_ELEMENTS", 28)
    pieces = scram.search(q, k, search=scram.Search(matches=2, sweeps=2, seed=0), impl="reference")
    assert torch.equal(whole.index, pieces.index)


def test_paper_settings_are_algorithm_1(impl):
    q, k = randn(1, 1, 8, 8, 4), randn(1, 1, 8, 8, 4, seed=1)
    spelled = scram.Search("query", 2, 1, sweeps=8, jumps=(8, 4, 2, 1), propagate="shift", gossip=0, seed=4)
    paper = scram.search(q, k, search=scram.Search.paper(2, 1, seed=4), impl=impl)
    assert torch.equal(paper.index, scram.search(q, k, search=spelled, impl=impl).index)


@pytest.mark.parametrize(("impl", "method"), SEARCHES)
@pytest.mark.parametrize("warm", [False, True], ids=["from its own place", "from a warm match"])
@pytest.mark.slow
def test_no_match_lies_beyond_the_reach(impl, method, warm):
    q, k = randn(1, 1, 12, 16, 4), randn(1, 1, 24, 8, 4, seed=1)
    start = scram.search(q, k, search=scram.Search(sweeps=0, seed=3)) if warm else None
    center = scram.Matches.identity((12, 16), (24, 8)) if start is None else start
    settings = scram.Search(method, matches=2, sweeps=6, seed=0, reach=(5, 1))
    found = scram.search(q, k, search=settings, warm=start, impl=impl)
    apart = (found.coords() - center.coords()).abs().flatten(0, -2)
    assert (found.index >= 0).all()
    assert apart.amax(0).tolist() == [5, 1]
    free = scram.search(q, k, search=replace(settings, reach=99), warm=start, impl=impl)
    assert (free.coords() - center.coords()).abs().amax() > 10


@pytest.mark.parametrize(("impl", "method"), SEARCHES)
def test_without_random_search_only_what_was_found_is_tried(impl, method):
    q, k = randn(1, 1, 12, 12, 4), randn(1, 1, 12, 12, 4, seed=1)
    warm = starts(*[7] * 144, key_grid=(144,))
    warm = scram.Matches(warm.index.reshape(1, 1, 12, 12, 1), warm.score.reshape(1, 1, 12, 12, 1), (12, 12))
    settings = scram.Search(method, propagate="stay", seed=0, random=False)
    assert (scram.search(q, k, search=settings, warm=warm, impl=impl).index == 7).all()
    loud = scram.search(q, k, search=replace(settings, random=True), warm=warm, impl=impl)
    assert (loud.index != 7).any()


def test_a_refinement_stays_near_its_start_and_never_loses(impl):
    q, k = randn(1, 1, 16, 16, 8), randn(1, 1, 16, 16, 8, seed=1)
    coarse = scram.search(q, k, search=scram.Search(sweeps=1, seed=0), impl=impl)
    fine = scram.search(q, k, search=scram.Search(sweeps=12, seed=1, reach=1), warm=coarse, impl=impl)
    assert (fine.coords() - coarse.coords()).abs().amax() == 1
    assert (fine.score >= coarse.score).all()
    table = (q.reshape(256, 8) @ k.reshape(256, 8).T).reshape(256, 16, 16)
    y, x = (coarse.index.flatten() // 16).tolist(), (coarse.index.flatten() % 16).tolist()
    best = [
        table[i, max(r - 1, 0) : r + 2, max(c - 1, 0) : c + 2].max() for i, (r, c) in enumerate(zip(y, x, strict=True))
    ]
    assert (fine.score.flatten() >= torch.stack(best) - 1e-5).float().mean() > 0.95  # of the nine, nearly always


@cache
def by_plain_loop(case):
    tensors = make_tensors(case, integer=True)
    return tensors, *plain.search(case, tensors, seed=7)


@pytest.mark.parametrize("case", table(EXACT, "search"))
def test_field_is_that_of_the_plain_loop(case, impl):
    tensors, index, score = by_plain_loop(case)
    found = run_search(case, tensors, impl)
    assert torch.equal(found.index, index)
    assert torch.equal(found.score, score)
    assert found.key_grid == case.keys_grid


@pytest.mark.interpreted
def test_nan_reaches_what_it_reaches_in_the_reference(engine):
    case = named("rank 2", kappa=1)
    tensors = make_tensors(case, integer=True)
    tensors.q[0, 0, 1, 1] = torch.nan
    tensors.k[0, 0, 4, 4, 0] = torch.nan
    found, expected = (run_search(case, tensors, impl) for impl in (engine, "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)
    ours, theirs = (run_attend(case, tensors, tensors.leaves(torch.float32), impl) for impl in (engine, "reference"))
    assert theirs.out.isnan().any()
    assert torch.equal(ours.out.isnan(), theirs.out.isnan())
    assert torch.equal(ours.lse.isnan(), theirs.lse.isnan())
