"""Attention of whole tiles, window="tile": what it holds more than each query's own windows, and what it leaves alone.

The table of cases runs against it in test_cases.py, test_tile_interpreter.py and test_gpu_device.py.
"""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.engines import dispatch
from scram.spec.schedule import members


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def matches(index, key_grid):
    index = torch.as_tensor(index, dtype=torch.int32)
    return scram.Matches(index, torch.zeros(index.shape), key_grid)


@pytest.mark.parametrize("grid", [(150,), (17, 20), (5, 6, 9), (3, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("radius", [0, 1, 2, 5])
def test_a_tile_holds_what_its_queries_hold(grid, radius):
    """As sets: values are one-hot and scores 0, so out tells which keys are attended."""
    points = math.prod(grid)
    generator = torch.Generator().manual_seed(radius)
    found = matches(torch.randint(-1, points, (1, 1, *grid, 1), generator=generator), grid)
    found.index[torch.rand(found.index.shape, generator=generator) < 0.7] = -1
    q, k = torch.zeros(2, 1, 1, *grid, 1).unbind()
    v = torch.eye(points).reshape(1, 1, *grid, -1)
    own, tile = (
        scram.attend(q, k, v, found, radius=radius, window=window, impl="reference").out.reshape(points, points) > 0
        for window in ("query", "tile")
    )
    assert not (own & ~tile).any()
    for lanes in members(grid, torch.device("cpu")):
        together = tile[lanes[lanes >= 0]]
        assert (together == together[:1]).all()
        assert together[0].any() == own[lanes[lanes >= 0]].any()


def test_it_captures_more():
    q, k, v = randn(3, 1, 1, 20, 27, 8).unbind()
    found = scram.exact_search(q, k)
    found.index[torch.rand(found.index.shape, generator=torch.Generator().manual_seed(0)) < 0.9] = -1
    own, tile = (
        scram.attend(q, k, v, found, scale=2.0, window=window, impl="reference").lse for window in ("query", "tile")
    )
    assert (tile >= own).all()
    assert (tile > own + 0.5).any()


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("grid", [(90,), (9, 10), (2, 9, 5)], ids=["rank 1", "rank 2", "rank 3"])
def test_window_over_the_grid_is_dense_attention(grid, causal):
    leaves = [randn(2, h, 90, e, seed=e).requires_grad_() for h, e in ((4, 8), (2, 8), (2, 5))]
    q, k, v = (x.unflatten(2, grid) for x in leaves)
    found = matches(torch.randint(0, 90, (2, 4, *grid, 2), generator=torch.Generator().manual_seed(0)), grid)
    ours = scram.attend(q, k, v, found, radius=90, causal=causal, window="tile", impl="reference").out.flatten(2, -2)
    dense = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(ours, dense)
    weight = randn(*dense.shape, seed=9)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((dense * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("weight", "causal"), [("softmax", False), ("softmax", True), ("mean", True), ("relu", False)])
@pytest.mark.slow
def test_gradcheck(weight, causal):
    leaves = [randn(1, 2, 3, 2, 2, seed=s, dtype=torch.float64).requires_grad_() for s in range(3)]
    extra = [randn(1, 2, 1, 2, seed=s, dtype=torch.float64).requires_grad_() for s in (3, 4)]
    index = torch.tensor([5, 1, -1, 4, 0, 2] * 2, dtype=torch.int32).reshape(1, 2, 3, 2, 1)
    index[0, 1] = -1
    mask = torch.tensor([[[True, True], [False, True], [True, True]]])

    def function(q, k, v, k_extra, v_extra):
        torch.manual_seed(1)
        how = {"causal": causal, "weight": weight, "key_mask": mask, "dropout_p": 0.3, "window": "tile"}
        return scram.attend(q, k, v, matches(index, (3, 2)), extra=(k_extra, v_extra), impl="reference", **how)

    assert torch.autograd.gradcheck(function, [*leaves, *extra])


@pytest.mark.parametrize("weight", ["softmax", "mean", "relu"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_nan_reaches_only_queries_whose_set_holds_it(which, weight):
    leaves = [randn(1, 1, 200, 4, seed=s).requires_grad_() for s in range(3)]
    q, k, v = (x * 1 for x in leaves)
    (k if which == "k" else v).data[0, 0, 70] = torch.nan
    found = matches(torch.arange(200).reshape(1, 1, 200, 1), (200,))
    mask = torch.ones(1, 200, dtype=torch.bool)
    how = {"weight": weight, "radius": 2, "window": "tile", "impl": "reference"}
    # Tiles of 64 queries, each at its own place and two keys around: cells of four.
    reached = scram.attend(q, k, v, found, key_mask=mask, **how).out.isnan().any(-1).flatten()
    assert reached.nonzero().flatten().tolist() == list(range(64, 128))
    reached = scram.attend(q, k, v, found, causal=True, **how).out.isnan().any(-1).flatten()
    assert reached.nonzero().flatten().tolist() == list(range(70, 128))
    mask[0, 70] = False
    out, lse = scram.attend(q, k, v, found, key_mask=mask, **how)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum() + lse.sum(), leaves))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_under_causal_order_a_nan_reaches_no_gradient_of_pairs_that_are_none(which):
    leaves = [randn(1, 1, 64, 3, seed=s) for s in range(3)]
    leaves["qkv".index(which)][0, 0, 40] = torch.nan
    leaves = [x.requires_grad_() for x in leaves]
    found = matches(torch.arange(64).reshape(1, 1, 64, 1), (64,))
    out, lse = scram.attend(*leaves, found, causal=True, window="tile", impl="reference")
    assert out[0, 0, :40].isfinite().all()
    assert out[0, 0, 40].isnan().any()
    dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert dq[0, 0, :40].isfinite().all()
    if which != "q":
        assert torch.equal(dq.isnan().any(-1), out.isnan().any(-1))
    if which == "q":  # what comes after the query has no part in it
        assert dk[0, 0, 41:].isfinite().all()
        assert dv[0, 0, 41:].isfinite().all()


def test_nan_query_reaches_no_other():
    q, k, v = randn(3, 1, 1, 80, 4).unbind()
    found = matches(torch.arange(80).reshape(1, 1, 80, 1), (80,))
    clean = scram.attend(q, k, v, found, window="tile", impl="reference").out
    q = q.clone()
    q[0, 0, 7, 2] = torch.nan
    dirty = scram.attend(q, k, v, found, window="tile", impl="reference").out
    others = torch.arange(80) != 7
    torch.testing.assert_close(clean[:, :, others], dirty[:, :, others])
    assert dirty[0, 0, 7].isnan().all()


def test_chunks_do_not_change_the_answer(monkeypatch):
    leaves = [randn(2, 2, 9, 17, 4, seed=s).requires_grad_() for s in range(3)]
    generator = torch.Generator().manual_seed(0)
    found = matches(torch.randint(-1, 153, (2, 2, 9, 17, 2), generator=generator), (9, 17))

    def everything():
        out, lse = scram.attend(*leaves, found, window="tile", impl="reference")
        return [out, lse, *torch.autograd.grad(out.sum() + lse.square().sum(), leaves)]

    whole = everything()
    monkeypatch.setattr(sys.modules["scram.engines.reference.tile_attend"], "CHUNK_ELEMENTS", 20000)
    for one, other in zip(whole, everything(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_callable_score_goes_by_pairs():
    q, k, v = randn(3, 1, 2, 5, 9, 4).unbind()
    found = scram.search(q, k, search=scram.Search(seed=0))
    how = {"window": "tile", "scale": 0.7, "causal": True}
    ours = scram.attend(q, k, v, found, score=lambda a, b: (a * b).sum(-1), **how)
    torch.testing.assert_close(ours, scram.attend(q, k, v, found, impl="reference", **how))


def test_on_a_cpu_numba_searches_and_the_reference_attends():
    q, k, v = randn(3, 1, 2, 9, 10, 4).unbind()
    settings = scram.Search(seed=0)
    whole = scram.attention(q, k, v, search=settings, tail=None, window="tile")
    found = scram.search(q, k, search=settings, impl="numba")
    assert torch.equal(whole, scram.attend(q, k, v, found, window="tile", impl="reference").out)
    assert not torch.equal(
        whole, scram.attention(q, k, v, search=settings, tail=None)
    )  # valid before, but another call
    assert dispatch.choose("auto", q.device, q.dtype, window="tile").name == "reference"
    for call in (scram.attention, lambda *given, **how: scram.attend(*given, found, **how)):
        with pytest.raises(ValueError, match="numba: it does not take window='tile'"):
            call(q, k, v, window="tile", impl="numba")


def test_in_a_layer():
    x = randn(2, 9, 10, 16)
    layer = scram.nn.GridAttention(16, 2, search=scram.Search(seed=0), window="tile")
    own = scram.nn.GridAttention(16, 2, search=scram.Search(seed=0))
    own.load_state_dict(layer.state_dict())
    assert not torch.allclose(layer(x), own(x))
    wide = scram.nn.GridAttention(16, 2, search=scram.Search(seed=0), radius=10, window="tile")
    dense = scram.nn.GridAttention(16, 2, search=None)
    for other in (wide, dense):
        other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(wide(x), dense(x))
    layer(x).sum().backward()
    assert layer.in_proj_weight.grad.abs().sum() > 0
    block = scram.nn.NonLocalBlock(6, norm=False, search=scram.Search(seed=0), window="tile")
    torch.nn.init.ones_(block.out.weight)
    features = randn(1, 6, 9, 9)
    tile = block(features)
    block.window = "query"
    assert not torch.allclose(tile, block(features))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's compiler warns
@pytest.mark.slow
def test_compiles_as_a_whole():
    q, k, v = randn(3, 1, 1, 5, 6, 4).unbind()
    found = scram.search(q, k, search=scram.Search(seed=0))

    def attend(q, k, v):
        return scram.attend(q, k, v, found, window="tile", impl="reference").out

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def test_func_maps_over_samples():
    q, k, v = randn(3, 2, 1, 1, 5, 6, 4).unbind()
    found = scram.search(q[0], k[0], search=scram.Search(seed=0))

    def attend(q, k, v):
        return scram.attend(q, k, v, found, window="tile", impl="reference").out

    one_by_one = torch.stack([attend(*x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(q, k, v), one_by_one)


def test_func_maps_over_searches_and_masks():
    q, k, v = randn(3, 2, 1, 1, 5, 6, 4).unbind()
    mask = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(0)) > 0.3

    def attention(q, mask):
        how = {"search": scram.Search(seed=0), "key_mask": mask, "window": "tile", "impl": "reference"}
        return scram.attention(q, k[0], v[0], **how)

    one_by_one = torch.stack([attention(*x) for x in zip(q, mask, strict=True)])
    torch.testing.assert_close(torch.vmap(attention)(q, mask), one_by_one)


def test_under_causal_order_an_infinite_key_weighs_what_it_weighs_otherwise():
    q, k, v = randn(3, 1, 1, 64, 3).unbind()
    k = k.clone()
    k[0, 0, 40, 0] = torch.inf
    found = matches(torch.arange(64).reshape(1, 1, 64, 1), (64,))
    tile = scram.attend(q, k, v, found, radius=64, causal=True, window="tile", impl="reference").out
    query = scram.attend(q, k, v, found, radius=64, causal=True, impl="reference").out
    assert 0 < query.isnan().sum() < query[0, 0, 40:].numel()  # where the score is -inf it weighs nothing
    torch.testing.assert_close(tile, query, equal_nan=True)
