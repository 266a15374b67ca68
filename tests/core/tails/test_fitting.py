"""The fit of a codebook: less error than without, an error that is reported as it is, and what stays as it was."""

import pytest
import torch

import scram
from scram.cli.features import PatchFeatures, sample_pair

RADIUS = 1


def photo(size=48, width=16):
    picture, _ = sample_pair(size)
    x = PatchFeatures.fit(picture, width)(picture)
    w_q, w_k = torch.randn(2, width, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    return 2 * x @ w_q, 2 * x @ w_k, x


@pytest.fixture(scope="module")
def problem():
    q, k, v = photo()
    found = scram.search(q, k, search=scram.Search(matches=2, separation=2, seed=0))
    return q, k, v, found, scram.exact_attention(q, k, v, scale=2.0).out


def error_of(problem, fit, seed=0):
    q, k, v, found, exact = problem
    clusters = scram.Clusters(count=48, fit=fit, seed=seed)
    book = scram.cluster(q, k, v, clusters=clusters, matches=found, radius=RADIUS, scale=2.0)
    out = scram.attend(q, k, v, found, radius=RADIUS, scale=2.0, tail=book).out
    return float((out - exact).norm() / exact.norm()), book


def test_the_fit_lowers_the_error_and_says_what_is_left(problem):
    plain, _ = error_of(problem, 0)
    left, book = error_of(problem, 256)
    assert left < 0.7 * plain
    assert abs(book.report.output_error - left) < 0.3 * left
    assert abs(book.report.plain_error - plain) < 0.3 * plain
    low, high = book.report.median
    assert 0 < low <= high <= book.report.percentile_95[1]
    assert book.report.queries == 128


def test_clusters_of_one_key_stay_as_they_are(problem):
    q, k, v, *_ = problem
    _, book = error_of(problem, 64)
    plain = scram.cluster(q, k, v, clusters=scram.Clusters(count=48, seed=0), scale=2.0)
    single = plain.sizes == 1
    assert (book.gains[single] == 1).all()
    torch.testing.assert_close(book.values[single], plain.values[single])
    assert (book.gains >= 0).all()


@pytest.mark.slow
def test_many_queries_of_several_heads_are_fitted_at_once():
    """A batch of large systems on several threads, which MKL's LU does not solve."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    q, k, v = torch.randn(3, 1, 5, 24, 24, 32, generator=torch.Generator().manual_seed(0)).unbind()
    found = scram.search(q, k, search=scram.Search(seed=0))
    clusters = scram.Clusters(32, fit=256, seed=0)
    try:
        book = scram.cluster(q, k, v, clusters=clusters, matches=found, radius=1)
    finally:
        torch.set_num_threads(threads)
    assert book.report.output_error < book.report.plain_error
    first = [x[:, :1].contiguous() for x in (q, k, v)]  # its draws are those of row 0 in both calls
    few = scram.Matches(found.index[:, :1].contiguous(), found.score[:, :1].contiguous(), found.key_grid)
    alone = scram.cluster(*first, clusters=clusters, matches=few, radius=1)
    torch.testing.assert_close(book.values[:, :1], alone.values, rtol=1e-3, atol=1e-4)


def test_every_query_head_has_a_fit_of_its_own():
    q = torch.randn(1, 4, 12, 12, 8)
    k, v = torch.randn(2, 1, 2, 12, 12, 8).unbind()
    found = scram.search(q, k, search=scram.Search(seed=0))
    book = scram.cluster(q, k, v, clusters=scram.Clusters(12, fit=32, seed=0), matches=found, radius=1)
    assert book.centers.shape[:2] == book.gains.shape[:2] == book.label.shape[:2] == (1, 4)
    assert scram.attend(q, k, v, found, tail=book).out.isfinite().all()
    as_one = scram.attention(q, k, v, search=scram.Search(seed=0), tail=scram.Clusters(12, fit=32))
    torch.testing.assert_close(as_one, scram.attend(q, k, v, found, tail=book).out)


def test_queries_and_keys_that_are_not_finite_take_no_part():
    q, k, v = torch.randn(3, 1, 1, 14, 14, 8).unbind()
    found = scram.search(q, k, search=scram.Search(seed=0))
    q[0, 0, 3:9] = torch.nan
    k[0, 0, 2, 2] = torch.inf
    book = scram.cluster(q, k, v, clusters=scram.Clusters(12, fit=32, seed=0), matches=found, radius=1)
    assert book.values.isfinite().all()
    assert book.gains.isfinite().all()
    assert 0 <= book.report.output_error < 1


def test_few_queries_and_no_keys():
    q, k, v = torch.randn(1, 1, 3, 3, 8), torch.randn(1, 1, 9, 9, 8), torch.randn(1, 1, 9, 9, 8)
    found = scram.search(q, k, search=scram.Search(seed=0))
    book = scram.cluster(q, k, v, clusters=scram.Clusters(6, fit=64, seed=0), matches=found, radius=1)
    assert book.values.isfinite().all()
    mask = torch.zeros(1, 9, 9, dtype=torch.bool)
    found = scram.search(q, k, key_mask=mask)
    clusters = scram.Clusters(6, fit=64, seed=0)
    book = scram.cluster(q, k, v, clusters=clusters, matches=found, radius=1, key_mask=mask)
    out, lse = scram.attend(q, k, v, found, tail=book, key_mask=mask)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    empty = torch.zeros(0, 1, 3, 3, 8)
    found = scram.search(empty, empty)
    assert scram.cluster(empty, empty, empty, clusters=clusters, matches=found, radius=1).gains.numel() == 0
