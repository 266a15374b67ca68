"""GridAttention: what nn.MultiheadAttention computes, with the keys that SCRAM finds."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import scram
from scram.nn import GridAttention, NonLocalBlock
from support.compiling import graphs_are

GRIDS = [(12,), (4, 5), *(pytest.param(grid, marks=pytest.mark.slow) for grid in [(2, 3, 4), (2, 3, 2, 2)])]

WHOLE = {"search": scram.Search(sweeps=0), "radius": 99}  # every window covers the grid


def grids(*shape, width=12):
    return torch.randn(2, *shape, width)


def flat(x):
    return x.flatten(1, -2)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("search", [WHOLE["search"], None], ids=["sparse", "dense"])
def test_covering_window_is_multihead_attention(grid, search):
    mha = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.init.normal_(mha.in_proj_bias)
    x = grids(*grid)
    want = mha(flat(x), flat(x), flat(x), need_weights=False)[0]
    layer = GridAttention.from_mha(mha, search=search, radius=99)
    torch.testing.assert_close(flat(layer(x)), want)


MHA = {
    "no bias": {"bias": False},
    "learned key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True, "add_bias_kv": True},
    "other widths": {"kdim": 5, "vdim": 7},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("name", MHA)
@pytest.mark.parametrize("search", [WHOLE["search"], None], ids=["sparse", "dense"])
def test_converted_cross_attention_with_padding(name, search):
    """Weights of every kind of MultiheadAttention, another key grid, and its mask that means the opposite."""
    mha = nn.MultiheadAttention(12, 3, batch_first=True, **MHA[name])
    dtype = mha.out_proj.weight.dtype
    query = grids(4, 5).to(dtype)
    key, value = grids(3, 6, width=mha.kdim).to(dtype), grids(3, 6, width=mha.vdim).to(dtype)
    ignored = torch.rand(2, 3, 6) < 0.4
    want = mha(flat(query), flat(key), flat(value), ignored.flatten(1), need_weights=False)[0]
    layer = GridAttention.from_mha(mha, search=search, radius=99)
    torch.testing.assert_close(flat(layer(query, key, value, key_padding_mask=ignored)), want)
    torch.testing.assert_close(flat(layer(query, key, value, key_mask=~ignored)), want)
    both = layer(query, key, value, key_mask=torch.ones_like(ignored), key_padding_mask=ignored)
    torch.testing.assert_close(flat(both), want)
    by_head = (~ignored).unsqueeze(1).expand(-1, 3, -1, -1)
    torch.testing.assert_close(flat(layer(query, key, value, key_mask=by_head)), want)


@pytest.mark.parametrize("search", [WHOLE["search"], None], ids=["sparse", "dense"])
def test_causal(search):
    mha = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True)
    x = grids(4, 5)
    mask = torch.ones(20, 20, dtype=torch.bool).triu(1)
    want = mha(flat(x), flat(x), flat(x), attn_mask=mask, need_weights=False)[0]
    layer = GridAttention.from_mha(mha, search=search, radius=99, causal=True)
    torch.testing.assert_close(flat(layer(x)), want)
    with pytest.raises(ValueError, match="causal needs equal grids"):
        layer(x, grids(2, 5))


@pytest.mark.parametrize("search", [WHOLE["search"], None], ids=["sparse", "dense"])
def test_tokens_and_grid_together_are_dense_attention(search):
    mha = nn.MultiheadAttention(12, 3, batch_first=True)
    x, tokens = grids(4, 5), torch.randn(2, 3, 12)
    joined = torch.cat([tokens, flat(x)], 1)
    want = mha(joined, joined, joined, need_weights=False)[0]
    layer = GridAttention.from_mha(mha, search=search, radius=99)
    ours = torch.cat([layer.read(tokens, x), flat(layer(x, tokens=tokens))], 1)
    torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("score", ["cosine", "l2"])
def test_dense_knows_the_other_scores(score):
    x = grids(4, 5)
    sparse = GridAttention(12, 3, score=score, scale=3.0, **WHOLE)
    dense = GridAttention(12, 3, score=score, scale=3.0, search=None)
    dense.load_state_dict(sparse.state_dict())
    torch.testing.assert_close(sparse(x), dense(x))


def test_state_dict_is_that_of_multihead_attention():
    for settings in ({}, *MHA.values()):
        mha, layer = nn.MultiheadAttention(12, 3, **settings), GridAttention(12, 3, **settings)
        assert {k: v.shape for k, v in layer.state_dict().items()} == {k: v.shape for k, v in mha.state_dict().items()}
        layer.load_state_dict(mha.state_dict())
        mha.load_state_dict(layer.state_dict())


def test_it_starts_as_multihead_attention_does():
    for settings in ({}, *MHA.values()):
        starts = []
        for module in (nn.MultiheadAttention, GridAttention):
            torch.manual_seed(0)
            starts.append(module(12, 3, **settings).state_dict())
        torch.testing.assert_close(dict(starts[0]), dict(starts[1]), rtol=0, atol=0)


def test_empty_batch():
    layer, block = GridAttention(12, 3), NonLocalBlock(4).eval()
    assert layer(torch.randn(0, 4, 5, 12), tokens=torch.randn(0, 1, 12)).shape == (0, 4, 5, 12)
    assert GridAttention(12, 3, search=None)(torch.randn(0, 4, 5, 12)).shape == (0, 4, 5, 12)
    assert block(torch.randn(0, 4, 5, 6)).shape == (0, 4, 5, 6)


def test_gradients_reach_every_parameter():
    layer = GridAttention(12, 3, add_bias_kv=True, radius=0, search=scram.Search(seed=0))
    x, tokens = grids(4, 5).requires_grad_(), torch.randn(2, 3, 12, requires_grad=True)
    layer(x, tokens=tokens).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in [*layer.parameters(), x, tokens])


def test_dropout_acts_in_training_only():
    layer = GridAttention(12, 3, dropout=0.5, search=scram.Search(seed=0))
    x = grids(4, 5)
    assert (layer(x) != layer(x)).any()
    layer.eval()
    assert (layer(x) == layer(x)).all()
    dense = GridAttention(12, 3, dropout=0.5, search=None).eval()
    assert (dense(x) == dense(x)).all()


def test_threads_share_a_module():
    layer = GridAttention(12, 3, search=scram.Search(seed=0)).eval()
    inputs = [grids(4, 5) for _ in range(8)]
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        for ours, x in zip(pool.map(lambda x: layer(x).detach(), inputs), inputs, strict=True):
            assert (ours == layer(x)).all()


@pytest.mark.slow
def test_compiled_training_step():
    layer = GridAttention(12, 3, dropout=0.0, search=scram.Search(seed=0, sweeps=2))
    x = grids(11, 17)  # several tiles: one graph for all such grids
    with graphs_are(1):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        results = []
        for call in (compiled, layer):
            layer.zero_grad()
            results.append(call(x))
            results[-1].square().sum().backward()
            results.append(layer.in_proj_weight.grad.clone())
        torch.testing.assert_close(results[:2], results[2:])
        compiled(grids(9, 20))


def test_values_of_their_own():
    mha = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x, value = grids(4, 5), grids(4, 5)
    layer = GridAttention.from_mha(mha, **WHOLE)
    assert not layer.training
    torch.testing.assert_close(flat(layer(x, x, value)), mha(flat(x), flat(x), flat(value), need_weights=False)[0])


def test_reading_is_not_causal():
    x, tokens = grids(4, 5), torch.randn(2, 3, 12)
    causal, plain = GridAttention(12, 3, causal=True), GridAttention(12, 3)
    plain.load_state_dict(causal.state_dict())
    torch.testing.assert_close(causal.read(tokens, x), plain.read(tokens, x))


@pytest.mark.slow
def test_export():
    """For any size of several tiles; an exported program keeps no matches."""
    layer, x = GridAttention(12, 3, search=scram.Search(seed=0), keep_matches=True).eval(), grids(12, 17)
    free = {n: torch.export.Dim(name, min=1 + 8 * (n > 0)) for n, name in enumerate(("batch", "height", "width"))}
    program = torch.export.export(layer, (x,), dynamic_shapes=(free,)).module()
    assert layer.matches is None
    for given in (x, grids(9, 20), grids(9, 20)[:1].repeat(5, 1, 1, 1)):
        torch.testing.assert_close(program(given), layer(given))
        layer.reset()


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_modules_under_autocast():
    layer = GridAttention(12, 3, add_bias_kv=True, add_zero_attn=True)
    # Without oneDNN, whose bfloat16 product ends the process on a machine that announces AMX and has none.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        assert layer(grids(4, 5), tokens=torch.randn(2, 1, 12)).dtype == torch.bfloat16


def test_an_estimator_takes_the_place_of_the_windows():
    x = torch.randn(2, 6, 7, 16)
    layer = GridAttention(16, 2, search=scram.Search(seed=0), tail=scram.DrawnKeys(samples=42, seed=1))
    dense = GridAttention(16, 2, search=None)
    dense.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), dense(x))  # a tail of every key is exact
    fewer = GridAttention(16, 2, search=scram.Search(seed=0), tail=scram.DrawnKeys(samples=8, seed=1))
    fewer.load_state_dict(layer.state_dict())
    assert not torch.allclose(fewer(x), dense(x))
    fewer(x).sum().backward()
    assert fewer.in_proj_weight.grad.abs().sum() > 0


@pytest.mark.parametrize("settings", [{"search": None}, {"dropout": 0.1}, {"tail": 512}])
def test_a_tail_that_does_not_fit_is_refused(settings):
    with pytest.raises((ValueError, TypeError), match=r"tail|with Snis"):
        GridAttention(16, 2, **({"tail": scram.Snis()} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["auto", scram.DrawnKeys(samples=42, seed=1)], ids=["auto", "DrawnKeys"])
def test_drawn_keys_take_dropout(tail):
    x = torch.randn(2, 6, 7, 16)
    how = {"search": scram.Search(seed=0), "tail": tail, "causal": True}
    layer = GridAttention(16, 2, dropout=0.4, **how)
    dense = GridAttention(16, 2, search=None, causal=True)
    dense.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x), dense(x))  # 42 keys: all are drawn
    layer.train()
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    assert not torch.allclose(layer(x), first)
    many = x.repeat(30, 1, 1, 1)  # whose rows draw for themselves
    runs = torch.cat([layer(many).detach().unflatten(0, (30, 2)) for _ in range(10)])
    error = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - dense(x)).abs() <= 5 * error + 1e-6).all()


def test_clusters_stand_for_far_keys():
    x = torch.randn(2, 6, 7, 16)
    layer = GridAttention(16, 2, search=scram.Search(seed=0))  # 42 keys: one cluster each
    dense = GridAttention(16, 2, search=None)
    dense.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), dense(x))
    sparse = GridAttention(16, 2, search=scram.Search(seed=0), tail=None)
    sparse.load_state_dict(layer.state_dict())
    assert not torch.allclose(sparse(x), dense(x))
    layer.search = "auto"  # a small grid: dense
    torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=0)


@pytest.mark.parametrize("search", ["auto", None])
@pytest.mark.parametrize("bias_kv", [False, True])
def test_decoding_is_the_rows_of_the_whole_call(search, bias_kv):
    torch.manual_seed(0)
    tail = "auto" if search is None else scram.Clusters(count=8, keys=32, stretch=64, seed=0)
    how = {"search": search, "tail": tail, "causal": True, "add_bias_kv": bias_kv, "add_zero_attn": bias_kv}
    layer = GridAttention(16, 2, **how).eval()
    x, tokens = torch.randn(2, 10, 15, 16), torch.randn(2, 3, 16)
    whole = layer(x, tokens=tokens).flatten(1, 2)
    cache = layer.cache((10, 15))
    rows = [layer.decode(part, cache, tokens=tokens) for part in x.flatten(1, 2).split([70, 1, 1, 78], dim=1)]
    torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=0)


def test_decoding_needs_causal_order_and_no_search():
    with pytest.raises(ValueError, match="make the layer with causal=True"):
        GridAttention(16, 2).cache((8,))
    with pytest.raises(ValueError, match="a cache takes no search"):
        GridAttention(16, 2, causal=True, search=scram.Search()).cache((8,))
    with pytest.raises(ValueError, match="decoding needs clusters, or every key"):
        GridAttention(16, 2, causal=True, tail=None).cache((8,))
