"""The baselines are what they say: each equals a dense masked softmax, or comes near the exact one as it should."""

import math

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.cli import arguments, baselines
from scram.cli import judge as judge_module

SCALE = 0.4
GRIDS = {"line": (150,), "picture": (19, 23), "film": (5, 6, 7)}


def tensors(grid, width=8, scale=2.0):
    q, k, v = torch.randn(3, 1, 2, *grid, width, generator=torch.Generator().manual_seed(len(grid))).unbind()
    return scale * q, scale * k, v[..., :5]


def exact(q, k, v, allowed=None):
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*flat, attn_mask=allowed, scale=SCALE).reshape(*q.shape[:-1], v.shape[-1])


def tile_of(grid):
    """The block of each point, by hand."""
    side = {1: 64, 2: 8, 3: 4}[len(grid)]
    at = torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(-1, len(grid)) // side
    return torch.unique(at, dim=0, return_inverse=True)[1], torch.unique(at, dim=0)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_all_blocks_and_all_keys_are_exact(grid):
    q, k, v = tensors(grid)
    for out in (
        baselines.top_keys(q, k, v, SCALE, math.prod(grid)),
        baselines.block_sparse(q, k, v, SCALE, 1000),
        baselines.block_sparse(q, k, v, SCALE, 1000, means=True),
        baselines.block_sparse(q, k, v, SCALE, reach=1000),
    ):
        torch.testing.assert_close(out, exact(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_blocks_equal_a_masked_softmax(grid):
    q, k, v = tensors(grid)
    tile, places = tile_of(grid)
    mean_q, mean_k = (
        torch.stack([x.flatten(2, -2)[:, :, tile == t].mean(2) for t in range(len(places))], 2) for x in (q, k)
    )
    best = (mean_q @ mean_k.mT).topk(2, -1).indices  # [1, 2, T, 2]
    allowed = (best[:, :, tile].unsqueeze(-2) == tile[:, None]).any(-1)  # [1, 2, N, N]
    out = baselines.block_sparse(q, k, v, SCALE, 2)
    torch.testing.assert_close(out, exact(q, k, v, allowed), rtol=1e-4, atol=1e-5)
    near = ((places[tile][:, None] - places[tile]).abs() <= 1).all(-1)
    out = baselines.block_sparse(q, k, v, SCALE, reach=1)
    torch.testing.assert_close(out, exact(q, k, v, near), rtol=1e-4, atol=1e-5)


def test_means_stand_for_equal_keys_exactly():
    """Where all keys of a block are equal and so are their values, a mean stands for them without error."""
    q, k, v = tensors((16, 24))
    k, v = (x[:, :, ::8, ::8].repeat_interleave(8, 2).repeat_interleave(8, 3) for x in (k, v))
    torch.testing.assert_close(
        baselines.block_sparse(q, k, v, SCALE, 1, means=True), exact(q, k, v), rtol=1e-4, atol=1e-5
    )
    assert (baselines.block_sparse(q, k, v, SCALE, 1) - exact(q, k, v)).norm() > 0.1 * exact(q, k, v).norm()


def test_the_oracle_attends_the_best_keys_in_chunks(monkeypatch):
    monkeypatch.setattr(baselines, "CHUNK", 5000)
    q, k, v = tensors((19, 23))
    scores = q.flatten(2, -2) @ k.flatten(2, -2).mT
    allowed = scores >= scores.topk(7, -1).values[..., -1:]
    out = baselines.top_keys(q, k, v, SCALE, 7)
    torch.testing.assert_close(out, exact(q, k, v, allowed), rtol=1e-4, atol=1e-5)


def test_more_random_features_come_nearer():
    q, k, v = tensors((19, 23), scale=0.35)  # sharp attention needs far more of them
    off = [
        float((baselines.random_features(q, k, v, SCALE, n) - exact(q, k, v)).norm() / exact(q, k, v).norm())
        for n in (16, 256, 4096)
    ]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, as it compiles
def test_flex_attends_the_same_blocks():
    q, k, v = tensors((19, 23), width=16)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    for how in ({"count": 2}, {"reach": 1}):
        flex, plain = (call(q, k, v, SCALE, **how) for call in (baselines.flex_blocks, baselines.block_sparse))
        torch.testing.assert_close(flex, plain, rtol=1e-4, atol=1e-5)


def test_backends_of_a_family_take_any_number():
    assert arguments.family_of("top-k-7") == ("top-k", 7)
    assert arguments.family_of("top-k-0") is arguments.family_of("top-k-x") is arguments.family_of("flex-local") is None
    assert arguments.check_backends(["top-k-7", "frontier", "sdpa"])[:2] == ["top-k-7", "sdpa"]
    assert set(arguments.FRONTIER) <= set(arguments.check_backends(["frontier"]))
    with pytest.raises(ValueError, match=r"got top-k-0; did you mean top-k-"):
        arguments.check_backends(["top-k-0"])
    q, k, v = tensors((19, 23))
    found = judge_module.backend("scram-clusters-20", q, k, False)(q, k, v)
    clusters = scram.Clusters(count=20, keys=40, seed=0)
    torch.testing.assert_close(found, scram.attention(q, k, v, search=None, tail=clusters))
    with pytest.raises(ValueError, match="takes no causal order"):
        judge_module.backend("best-blocks-2", q, k, True)
    with pytest.raises(ValueError, match="there are 9 blocks, so it would be dense attention"):
        judge_module.backend("best-blocks-9", q, k, False)
    with pytest.raises(ValueError, match="takes equal grids and heads"):
        judge_module.backend("block-means-2", q, k[:, :, :8], False)
