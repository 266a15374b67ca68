"""The rivals of the benchmark are what they say: each equals a dense masked softmax, or finds the nearest keys."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.cli import rivals
from scram.core.resolve import CLUSTERS, SEARCHES

SCALE = 0.7


def tensors(size, width=5, heads=2):
    return torch.randn(3, 1, heads, size, size, width, generator=torch.Generator().manual_seed(size)).unbind()


def masked(q, k, v, allows):
    """Dense softmax over the allowed pairs."""
    point = torch.arange(q.shape[2] * q.shape[3])
    scores = SCALE * q.flatten(2, 3) @ k.flatten(2, 3).mT
    scores = scores.masked_fill(~allows(0, 0, point[:, None], point[None]), -torch.inf)
    return (scores.softmax(-1) @ v.flatten(2, 3)).reshape(*q.shape[:-1], v.shape[-1])


@pytest.mark.parametrize("size", [8, 12, 19])
@pytest.mark.parametrize("name", rivals.PATTERNS)
def test_patterns_equal_a_masked_softmax(name, size, monkeypatch):
    monkeypatch.setattr(rivals, "CHUNK", 2000)  # several chunks of lines
    allows = rivals.PATTERNS[name](size)
    leaves = [x.clone().requires_grad_() for x in tensors(size)]
    out, truth = rivals.ATTENTIONS[name](*leaves, SCALE), masked(*leaves, allows)
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for mine, exact in zip(
        torch.autograd.grad(out, leaves, weights), torch.autograd.grad(truth, leaves, weights), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["full attention", "torch SDPA"])
def test_dense_rivals_are_exact(name):
    q, k, v = tensors(12)
    torch.testing.assert_close(
        rivals.ATTENTIONS[name](q, k, v, SCALE), scram.exact_attention(q, k, v, scale=SCALE).out, rtol=1e-4, atol=1e-5
    )


def test_scram_stands_with_clusters_and_the_paper_without_a_tail():
    q, k, v = tensors(24)
    clusters = scram.cluster(q, k, v, clusters=replace(CLUSTERS["cpu"], seed=0), scale=SCALE)
    default = replace(SEARCHES["cpu"], seed=0)
    found = {
        "SCRAM": scram.search(q, k, search=default, codebook=clusters, scale=SCALE),
        "SCRAM, paper": scram.search(q, k, search=scram.Search.paper(seed=0)),
    }
    for name, tail in (("SCRAM", clusters), ("SCRAM, paper", None)):
        out = scram.attend(q, k, v, found[name], scale=SCALE, tail=tail).out
        torch.testing.assert_close(rivals.ATTENTIONS[name](q, k, v, SCALE), out, rtol=1e-4, atol=1e-5)
        assert (rivals.matches_of(name, q, k, v, SCALE) == found[name].index).all()


def test_brute_force_attends_the_window_of_the_best_key():
    q, k, v = tensors(12)
    best = (q.flatten(2, 3) @ k.flatten(2, 3).mT).argmax(-1)

    def near(b, h, i, j):
        center = best[0, 0][i]
        return ((center // 12 - j // 12).abs() <= 1) & ((center % 12 - j % 12).abs() <= 1)

    one = [x[:, :1] for x in (q, k, v)]
    torch.testing.assert_close(rivals.brute_force(*one, SCALE), masked(*one, near), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", rivals.PATTERNS)
def test_flex_masks_equal_a_masked_softmax(name):
    q, k, v = tensors(12)
    attention = rivals.flex(name, 12, torch.device("cpu"))
    torch.testing.assert_close(
        attention(q, k, v, SCALE), masked(q, k, v, rivals.PATTERNS[name](12)), rtol=1e-4, atol=1e-5
    )
    assert rivals.flex(name, 12, torch.device("cpu")) is attention  # for another width


def natten_allows(size):
    """The square of keys around the query, moved inward at the border."""

    def near(i, j):
        first = (i - rivals.NEIGHBORS // 2).clamp(0, size - rivals.NEIGHBORS)
        return (j >= first) & (j < first + rivals.NEIGHBORS)

    return lambda b, h, i, j: near(i // size, j // size) & near(i % size, j % size)


@pytest.mark.filterwarnings("ignore")  # of the package and of FlexAttention
def test_natten_equals_a_masked_softmax():
    pytest.importorskip("natten")
    q, k, v = tensors(18)
    out = rivals.natten(q, k, v, SCALE)
    torch.testing.assert_close(out, masked(q, k, v, natten_allows(18)), rtol=1e-4, atol=1e-5)


def test_patterns_are_those_of_their_papers():
    """At point (2, 3) of a 16 x 16 picture: what a reader of the papers would list."""
    point, j = torch.tensor(2 * 16 + 3), torch.arange(256)
    strided = set(range(20, 36)) | {3, 19}
    assert set(j[rivals.strided_allows(16)(0, 0, point, j)].tolist()) == strided
    fixed = set(range(32, 36)) | set(range(8, 16)) | set(range(24, 32))
    assert set(j[rivals.fixed_allows(16)(0, 0, point, j)].tolist()) == fixed
    local = {16 * row + column for row in range(12) for column in range(12)}
    assert set(j[rivals.local_allows(16)(0, 0, point, j)].tolist()) == local


@pytest.mark.filterwarnings("ignore")  # of third-party index builders
@pytest.mark.parametrize("name", ["faiss flat", "faiss HNSW"])  # pynndescent compiles for minutes
def test_searches_find_the_nearest_keys(name):
    call, efforts, package = rivals.SEARCHES[name]
    pytest.importorskip(package)
    q, k, _ = (F.normalize(x, dim=-1) for x in tensors(24, 8, 1))
    exact = scram.exact_search(q, k).index.flatten()
    found = call(q, k, efforts[-1]).flatten()
    share = float((found == exact).float().mean())
    assert share > (0.999 if name == "faiss flat" else 0.95)
