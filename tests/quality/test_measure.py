"""The four measures on examples whose values are known."""

import math

import pytest
import torch

import scram
from scram.quality import measure


def table(*scores):
    """q, k on rank-1 grids whose score table is [N, M] = scores."""
    scores = torch.tensor(scores, dtype=torch.float32)
    return scores[None, None], torch.eye(scores.shape[1])[None, None]


def matches(*index, keys):
    index = torch.tensor(index, dtype=torch.int32)[None, None]
    return scram.Matches(index, torch.zeros(index.shape), (keys,))


SCORES = [5.0, 3.0, 3.0, 1.0, 0.0, 4.0]  # best two: 0 and 5; the third best is tied


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ([0, 5], 1),
        ([5, 0], 1),
        ([0, 1], 0.5),
        ([0, 0], 0.5),  # the same key twice is one key
        ([0, -1], 0.5),
        ([-1, -1], 0),
        ([0, 6], 0.5),  # off the grid is none
        ([3, 4], 0),
        ([0, 5, 2], 1),  # a tied third best is as good
        ([0, 5, 3], 2 / 3),
    ],
)
def test_recall(found, value):
    q, k = table(SCORES)
    assert measure.recall(q, k, matches(found, keys=6)).item() == pytest.approx(value)


def test_recall_allows_rounding_of_the_score_alone():
    q, k = table([1000.0, 999.995, 999.98])
    assert measure.recall(q, k, matches([1], keys=3)).item() == 1
    assert measure.recall(q, k, matches([2], keys=3)).item() == 0
    q, k = table([-1000.0, -1000.005, -1000.02])
    assert measure.recall(q, k, matches([1], keys=3)).item() == 1
    assert measure.recall(q, k, matches([2], keys=3)).item() == 0


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ([0, 5], 1),
        ([1, 4], 1),  # within 1 of each mode
        ([2, 5], 0.5),
        ([1, 1], 0.5),
        ([5, -1], 0.5),
        ([5, 6], 0.5),
        ([-1, -1], 0),
    ],
)
def test_recall_of_modes(found, value):
    q, k = table(SCORES)
    assert measure.recall(q, k, matches(found, keys=6), separation=1).item() == pytest.approx(value)


def test_recall_of_modes_that_do_not_exist():
    q, k = table(SCORES)
    # With separation 4 the modes are 0 and 5; a third does not fit.
    assert measure.recall(q, k, matches([0, 5, -1], keys=6), separation=4).item() == 1


def test_recall_counts_what_can_be_found():
    q, k = table(SCORES)
    mask = torch.tensor([[True, False, False, False, False, False]])
    assert measure.recall(q, k, matches([0, -1], keys=6), key_mask=mask).item() == 1


def test_an_illegal_key_is_none():
    q, k = table(SCORES)
    mask = torch.arange(6).ne(0)[None]
    assert measure.recall(q, k, matches([0, 5], keys=6), key_mask=mask).item() == 0.5
    assert measure.recall(q, k, matches([0, 5], keys=6), key_mask=mask, separation=1).item() == 0.5
    q, k = table(SCORES[:2], SCORES[:2])
    assert measure.recall(q, k, matches([0], [1], keys=2), causal=True).item() == 0.5
    assert measure.recall(q, k, matches([1], [0], keys=2), causal=True).item() == 0.5


def test_score_gap_is_by_rank_in_nats():
    q, k = table(SCORES, SCORES)
    found = matches([0, 1], [5, 3], keys=6)  # gaps 0, 1 and 1, 3
    assert measure.score_gap(q, k, found, scale=1.0).item() == pytest.approx(5 / 4)
    assert measure.score_gap(q, k, found).item() == pytest.approx(5 / 4 * 6**-0.5)
    assert measure.score_gap(q, k, found, scale=0.5).item() == pytest.approx(5 / 8)


def test_score_gap_of_modes():
    q, k = table(SCORES)
    # Farther than 4 from key 0 is key 5 alone; than 1: key 5 too.
    assert measure.score_gap(q, k, matches([0, 3], keys=6), separation=1, scale=1.0).item() == pytest.approx(1.5)


def test_score_gap_leaves_out_what_was_not_found():
    q, k = table(SCORES)
    assert measure.score_gap(q, k, matches([5, -1], keys=6), scale=1.0).item() == pytest.approx(1)
    assert measure.score_gap(q, k, matches([5, 6], keys=6), scale=1.0).item() == pytest.approx(1)


def test_captured_mass_is_the_share_of_the_softmax():
    q, k = table([0.0, math.log(2), math.log(5)], [0.0, 0.0, 0.0])
    found = matches([2], [1], keys=3)
    attended = scram.attend(q, k, k, found, radius=0, scale=1.0, impl="reference")
    assert measure.captured_mass(q, k, attended, scale=1.0).item() == pytest.approx((5 / 8 + 1 / 3) / 2)


def test_output_error_is_relative_to_the_norm():
    q, k = table([0.0, 0.0], [0.0, 0.0])
    v = torch.tensor([[3.0], [5.0]])[None, None]  # the truth is 4 and 4
    attended = scram.Attended(torch.tensor([[4.0], [1.0]])[None, None], torch.zeros(1, 1, 2))
    assert measure.output_error(q, k, v, attended).item() == pytest.approx(3 / 32**0.5)


def test_output_error_knows_the_weights():
    q, k = table([1.0, -3.0])
    v = torch.tensor([[2.0], [4.0]])[None, None]
    attended = scram.Attended(torch.tensor([[1.0]])[None, None], torch.zeros(1, 1, 1))  # relu: (1*2 + 0) / 2
    assert measure.output_error(q, k, v, attended, weight="relu").item() == 0
    assert measure.output_error(q, k, v, attended, weight="mean").item() == pytest.approx(6 / 5)  # (2 - 12) / 2


def test_queries_without_a_legal_key_are_left_out():
    q, k = table(SCORES, SCORES)
    q, k = torch.cat([q, q]), torch.cat([k, k])
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1] = False
    causal_q, causal_k = table([1.0, 2.0], [1.0, 2.0])
    found = scram.Matches(torch.tensor([[[[0], [3]]]] * 2).int(), torch.zeros(2, 1, 2, 1), (6,))
    one = measure.recall(q, k, found, key_mask=mask)
    assert one[0].item() == 0.5
    assert one[1].isnan()  # no query left
    first = torch.tensor([[False, True]])
    # Under causal query 0 has no key: query 1 alone counts.
    found = matches([-1], [1], keys=2)
    assert measure.recall(causal_q, causal_k, found, causal=True, key_mask=first).item() == 1
    assert measure.score_gap(causal_q, causal_k, found, causal=True, key_mask=first).item() == 0
    attended = scram.attend(causal_q, causal_k, causal_k, found, causal=True, key_mask=first, impl="reference")
    how = {"causal": True, "key_mask": first}
    assert measure.captured_mass(causal_q, causal_k, attended, **how).item() == pytest.approx(1)
    assert measure.output_error(causal_q, causal_k, causal_k, attended, **how).item() == 0


def test_measures_come_per_batch_and_head():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, 5, 5, 4, generator=generator).unbind()
    found = scram.search(q, k, search=scram.Search(sweeps=1, seed=0), impl="reference")
    attended = scram.attend(q, k, k, found, impl="reference")
    values = [
        measure.recall(q, k, found),
        measure.score_gap(q, k, found),
        measure.captured_mass(q, k, attended),
        measure.output_error(q, k, k, attended),
    ]
    for value in values:
        assert value.shape == (2, 3)
        assert len(value.unique()) > 1
    # One row at a time says the same, also where key heads are shared.
    shared = k[:, :1]
    whole = measure.recall(q, shared, found)
    for b in range(2):
        for h in range(3):
            one = scram.Matches(found.index[b : b + 1, h : h + 1], found.score[b : b + 1, h : h + 1], (5, 5))
            assert measure.recall(q[b : b + 1, h : h + 1], shared[b : b + 1], one).item() == whole[b, h]


def test_sample_is_of_the_queries():
    q, k = table(*[SCORES] * 40)
    found = matches(*[[0]] * 10 + [[3]] * 30, keys=6)
    sample = measure.sample_queries(q, 12, seed=3)
    assert len(sample) == 12 == len(sample.unique())
    assert torch.equal(sample, sample.sort().values)
    assert not torch.equal(sample, measure.sample_queries(q, 12, seed=4))
    share = (sample < 10).float().mean()
    assert measure.recall(q, k, found, num_queries=12, seed=3).item() == pytest.approx(share.item())
    attended = scram.attend(q, k, k, found, radius=0, impl="reference")
    part = scram.exact_attention(q, k, k, queries=sample)
    error = (attended.out[0, 0, sample] - part.out[0, 0]).norm() / part.out.norm()
    assert measure.output_error(q, k, k, attended, num_queries=12, seed=3).item() == pytest.approx(error.item())
    mass = (attended.lse[0, 0, sample] - part.lse[0, 0]).exp().mean()
    assert measure.captured_mass(q, k, attended, num_queries=12, seed=3).item() == pytest.approx(mass.item())
    assert torch.equal(measure.sample_queries(q, 100), torch.arange(40))


def test_exact_results_measure_as_exact():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 6, 6, 4, generator=generator).unbind()
    for separation in (0, 2):
        best = scram.exact_search(q, k, matches=3, separation=separation)
        assert (measure.recall(q, k, best, separation=separation) == 1).all()
        assert measure.score_gap(q, k, best, separation=separation).abs().max() < 1e-6
    truth = scram.exact_attention(q, k, k)
    torch.testing.assert_close(measure.captured_mass(q, k, truth), torch.ones(1, 2))
    assert measure.output_error(q, k, k, truth).max() < 1e-6
