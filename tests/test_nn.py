"""The modules: what nn.MultiheadAttention and Wang's block compute, with the keys that SCRAM finds."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import scram
from scram.nn import GridAttention, NonLocalBlock
from test_compile import graphs_are

GRIDS = [(12,), (4, 5), (2, 3, 4), (2, 3, 2, 2)]
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


def test_what_the_mask_of_a_block_hides():
    block = NonLocalBlock(4, norm=False, **WHOLE)
    nn.init.normal_(block.out.weight)
    x, mask = torch.randn(1, 4, 5, 6), torch.ones(1, 5, 6, dtype=torch.bool)
    mask[0, 2, 3] = False
    other = torch.where(mask[:, None], x, -x)
    seen = mask[:, None].expand_as(x)
    assert (block(x, key_mask=mask)[seen] == block(other, key_mask=mask)[seen]).all()
    assert (block(x)[seen] != block(other)[seen]).any()


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


def test_copies_and_files():
    layer = GridAttention(12, 3, search=scram.Search(seed=torch.tensor(3)), keep_matches=True).eval()
    x = grids(4, 5)
    want, file = layer(x), io.BytesIO()
    layer(x)
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert (other.matches.index == layer.matches.index).all()
        other.reset()
        assert (other(x) == want).all()
    assert not any("kept" in name for name in layer.state_dict())


def test_threads_share_a_module():
    layer = GridAttention(12, 3, search=scram.Search(seed=0)).eval()
    inputs = [grids(4, 5) for _ in range(8)]
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        for ours, x in zip(pool.map(lambda x: layer(x).detach(), inputs), inputs, strict=True):
            assert (ours == layer(x)).all()


def test_compiled_training_step():
    layer = GridAttention(12, 3, dropout=0.0, search=scram.Search(seed=0, sweeps=2))
    x = grids(4, 7)
    with graphs_are(1):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
        results = []
        for call in (compiled, layer):
            layer.zero_grad()
            results.append(call(x))
            results[-1].square().sum().backward()
            results.append(layer.in_proj_weight.grad.clone())
        torch.testing.assert_close(results[:2], results[2:])
        compiled(grids(9, 6))


@pytest.mark.parametrize("module", [GridAttention(8, 2, keep_matches=True), NonLocalBlock(8, keep_matches=True)])
def test_kept_matches_start_the_next_call(module):
    """With no sweep a call returns its start: what the call before found."""
    x = torch.randn(2, 8, 6, 8)
    module.eval()
    module(x)
    first = module.matches
    module.warm_search = scram.Search(sweeps=0)
    module(x)
    assert (module.matches.index == first.index).all()
    module(x.repeat(1, 1, 2, 1))  # another grid starts anew
    assert module.matches.index.shape[2:-1].numel() == 2 * first.index.shape[2:-1].numel()
    module.half()
    assert module.matches.score.dtype == torch.float32
    module.float()
    module.reset()
    assert module.matches is None
    module.train()
    module(x)
    assert module.matches is None


def test_kept_matches_of_other_keys_or_devices_start_anew():
    layer = GridAttention(12, 3, search=scram.Search(seed=0), keep_matches=True).eval()
    x = grids(4, 5)
    layer(x, grids(3, 6))
    assert (layer(x, key=grids(2, 4)).isfinite()).all()
    layer.kept_index, layer.kept_score = layer.kept_index.to("meta"), layer.kept_score.to("meta")
    assert "found ?" in repr(layer.matches)
    layer(x, grids(2, 4))
    assert layer.matches.index.is_cpu


def test_matches_from_the_caller_beat_those_kept():
    layer = GridAttention(12, 3, search=scram.Search(), keep_matches=True).eval()
    layer.warm_search = scram.Search(sweeps=0)
    x = grids(4, 5)
    layer(x)
    warm = scram.Matches((layer.matches.index + 1) % 20, layer.matches.score, (4, 5))
    layer(x, warm=warm)
    assert (layer.matches.index == warm.index).all()
    block = NonLocalBlock(12, keep_matches=True).eval()
    block.warm_search = scram.Search(sweeps=0)
    block(x.movedim(-1, 1))
    warm = scram.Matches((block.matches.index + 1) % 20, block.matches.score, (4, 5))
    block(x.movedim(-1, 1), warm=warm)
    assert (block.matches.index == warm.index).all()


def test_the_search_knows_mask_and_score():
    mask, x = torch.rand(2, 4, 5) < 0.4, 3 * grids(4, 5)
    for module, given in (
        (GridAttention(12, 3, score="l2", search=scram.Search(seed=0), keep_matches=True), x),
        (NonLocalBlock(12, form="gaussian", search=scram.Search(seed=0), keep_matches=True), x.movedim(-1, 1)),
    ):
        module.eval()(given, key_mask=mask)
        found = module.matches.index
        assert mask.flatten(1)[:, None].expand(-1, found.shape[1], -1).gather(2, found.flatten(2).long()).all()
    layer = GridAttention(12, 3, score="l2", search=scram.Search(seed=0, sweeps=12), keep_matches=True).eval()
    layer(x)
    q, k, _ = layer._project(x, x, x)
    recall = scram.measure.recall(q, k, layer.matches, score="l2")
    assert (recall > scram.measure.recall(q, k, scram.search(q, k, search=layer.search), score="l2")).all()


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


def test_export():
    """For any size; an exported program keeps no matches."""
    layer, x = GridAttention(12, 3, search=scram.Search(seed=0), keep_matches=True).eval(), grids(4, 5)
    free = {n: torch.export.Dim(name) for n, name in enumerate(("batch", "height", "width"))}
    program = torch.export.export(layer, (x,), dynamic_shapes=(free,)).module()
    assert layer.matches is None
    for given in (x, grids(6, 9), grids(6, 9)[:1].repeat(5, 1, 1, 1)):
        torch.testing.assert_close(program(given), layer(given))
        layer.reset()


def test_kept_matches_compile():
    layer = GridAttention(12, 3, search=scram.Search(sweeps=2), keep_matches=True).eval()
    layer.warm_search = scram.Search(sweeps=0)
    x = grids(4, 7)
    with graphs_are(2), torch.no_grad():  # without and with matches to start from
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        compiled(x)
        first = layer.matches.index.clone()
        for _ in range(3):
            compiled(x)
            assert (layer.matches.index == first).all()


def test_warm_matches_are_taken_from_the_caller():
    layer = GridAttention(12, 3, search=scram.Search(sweeps=0), radius=0).eval()
    x = grids(4, 5)
    index = torch.randint(20, (2, 3, 4, 5, 1), dtype=torch.int32)
    warm = scram.Matches(index, torch.zeros(index.shape), (4, 5))
    assert (layer(x, warm=warm) == layer(x, warm=warm)).all()
    assert (layer(x, warm=warm) != layer(x)).any()
    with pytest.raises(ValueError, match="warm must have one entry per query"):
        layer(grids(4, 6), warm=warm)


def wang(block, x):
    """The formulas of Wang et al. over all positions."""
    n = x[0, 0].numel()
    points = x.flatten(2)
    g = block.g(x).flatten(2)
    if block.form == "gaussian":
        weights = torch.einsum("bci,bcj->bij", points, points).softmax(-1)
    else:
        theta, phi = block.theta(x).flatten(2), block.phi(x).flatten(2)
        if block.form == "embedded_gaussian":
            weights = torch.einsum("bci,bcj->bij", theta, phi).softmax(-1)
        elif block.form == "dot_product":
            weights = torch.einsum("bci,bcj->bij", theta, phi) / n
        else:
            pairs = torch.cat([theta[..., :, None].expand(-1, -1, -1, n), phi[..., None, :].expand(-1, -1, n, -1)], 1)
            weights = torch.einsum("c,bcij->bij", block.pair.weight.flatten(), pairs).relu() / n
    y = torch.einsum("bij,bcj->bci", weights, g).reshape(len(x), -1, *x.shape[2:])
    y = block.out(y)
    return x + (y if block.norm is None else block.norm(y))


@pytest.mark.parametrize("form", NonLocalBlock.FORMS)
@pytest.mark.parametrize("grid", GRIDS[:3])
def test_covering_window_is_the_block_of_wang(form, grid):
    block = NonLocalBlock(8, rank=len(grid), form=form, norm=len(grid) != 2, **WHOLE)
    x = torch.randn(2, 8, *grid)
    assert (block(x) == x).all()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    torch.testing.assert_close(block(x), wang(block, x))


@pytest.mark.parametrize("form", NonLocalBlock.FORMS)
def test_block_trains_compiled_and_in_half(form):
    block = NonLocalBlock(8, 3, form=form, search=scram.Search(seed=0, sweeps=2))
    nn.init.ones_(block.norm.weight)
    x = torch.randn(2, 8, 6, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert block(x).dtype == torch.float32  # the residual stays
    block.eval()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), block(x))
    block(x).square().sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    masked = torch.rand(2, 6, 7) < 0.5
    assert (block(x, key_mask=masked) != block(x)).any()


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_modules_under_autocast():
    layer = GridAttention(12, 3, add_bias_kv=True, add_zero_attn=True)
    # Without oneDNN, whose bfloat16 product ends the process on a machine that announces AMX and has none.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        assert layer(grids(4, 5), tokens=torch.randn(2, 1, 12)).dtype == torch.bfloat16


def test_modules_print_themselves():
    assert "causal=False, radius=2, window='query', Search(" in repr(GridAttention(12, 3, radius=2))
    assert "12, num_heads=3, causal=True, dense" in repr(GridAttention(12, 3, search=None, causal=True))
    assert "form='gaussian', radius=1, window='tile'" in repr(NonLocalBlock(4, form="gaussian", window="tile"))


WRONG = [
    (lambda: GridAttention(12, 5), r"num_heads must divide embed_dim, got 5 heads and 12 channels"),
    (lambda: GridAttention(12, 3, batch_first=False), r"batch_first must be True.*use x.movedim\(0, -2\)"),
    (lambda: GridAttention.from_mha(nn.Linear(12, 12)), r"mha must be a torch.nn.MultiheadAttention, got Linear"),
    (lambda: GridAttention(12, 3, radius=-1), r"radius must be at least 0, got -1"),
    (lambda: GridAttention(12, 3, search=3), r"search must be a scram.Search, got int"),
    (lambda: GridAttention(12, 3, scale=-1.0), r"scale must be positive"),
    (lambda: GridAttention(12, 3)(torch.randn(2, 12, 4, 5)), r"channels last.*use x.movedim\(1, -1\)"),
    (lambda: GridAttention(12, 3)(torch.randn(4, 12)), r"query must be \[B, \*G, C\].*add the batch axis"),
    (lambda: GridAttention(12, 3)(grids(4, 5), key_mask=torch.ones(2, 4, dtype=torch.bool)), r"key_mask must be"),
    (lambda: GridAttention(12, 3)(grids(4, 5), key_padding_mask=torch.ones(2, 4, 5)), r"float attention bias"),
    (
        lambda: GridAttention(12, 3)(grids(4, 5), key_padding_mask=torch.ones(4, 5, dtype=torch.bool)),
        r"key_padding_mask must be \[B, \*G'\] = \(2, 4, 5\), got \(4, 5\)",
    ),
    (lambda: GridAttention(12, 3)(grids(4, 5), tokens=torch.randn(3, 1, 12)), r"tokens must be .*\(2, X, 12\)"),
    (lambda: GridAttention(12, 3, vdim=5)(grids(4, 5), grids(4, 5), grids(4, 5, width=5), tokens=grids(1)), r"kdim"),
    (lambda: GridAttention(12, 3)(grids(4, 5), grids(4, 5), grids(4, 6)), r"v must be \[B, Hk, \*G', F\]"),
    (lambda: GridAttention(12, 3, search=None, score=torch.dot)(grids(4, 5)), r"takes no callable score"),
    (lambda: NonLocalBlock(8, rank=4), r"rank must be 1, 2, 3"),
    (lambda: NonLocalBlock(8, form="softmax"), r"form must be one of 'embedded_gaussian'"),
    (lambda: NonLocalBlock(8)(torch.randn(2, 4, 5, 8)), r"channels first, with C = 8.*use x.movedim\(-1, 1\)"),
    (lambda: NonLocalBlock(8, search=None), r"search must be a scram.Search"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_use_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_an_estimator_takes_the_place_of_the_windows():
    x = torch.randn(2, 6, 7, 16)
    layer = GridAttention(16, 2, search=scram.Search(seed=0), estimator=scram.Hybrid(samples=42, seed=1))
    dense = GridAttention(16, 2, search=None)
    dense.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), dense(x))  # a tail of every key is exact
    fewer = GridAttention(16, 2, search=scram.Search(seed=0), estimator=scram.Hybrid(samples=8, seed=1))
    fewer.load_state_dict(layer.state_dict())
    assert not torch.allclose(fewer(x), dense(x))
    fewer(x).sum().backward()
    assert fewer.in_proj_weight.grad.abs().sum() > 0


@pytest.mark.parametrize("settings", [{"search": None}, {"dropout": 0.1}, {"estimator": 512}, {"window": "tile"}])
def test_an_estimator_that_does_not_fit_is_refused(settings):
    with pytest.raises((ValueError, TypeError), match=r"estimator|method must be"):
        GridAttention(16, 2, **({"estimator": scram.Hybrid()} | settings))
