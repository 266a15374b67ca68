"""What the modules share: the search they were given, and the matches kept from call to call."""

import copy
import io

import pytest
import torch

import scram
from scram.core.pipeline import execute
from scram.nn import GridAttention, NonLocalBlock
from support.compiling import graphs_are


def grids(*shape, width=12):
    return torch.randn(2, *shape, width)


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


@pytest.mark.slow
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
    layer = GridAttention(12, 3, search=scram.Search(sweeps=0), radius=0, tail=None).eval()
    x = grids(4, 5)
    index = torch.randint(20, (2, 3, 4, 5, 1), dtype=torch.int32)
    warm = scram.Matches(index, torch.zeros(index.shape), (4, 5))
    assert (layer(x, warm=warm) == layer(x, warm=warm)).all()
    assert (layer(x, warm=warm) != layer(x)).any()
    with pytest.raises(ValueError, match="warm must have one entry per query"):
        layer(grids(4, 6), warm=warm)


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


def test_clusters_stand_alone_without_a_search():
    x = grids(9, 10)
    tail = scram.Clusters(count=8, keys=12, seed=0)
    layer = GridAttention(12, 3, search=None, tail=tail, keep_matches=True).eval()
    dense = GridAttention(12, 3, search=None)
    dense.load_state_dict(layer.state_dict())
    q, k, v = layer._project(x, x, x)
    want = layer._join(scram.attention(q, k, v, search=None, tail=tail))
    torch.testing.assert_close(layer(x), want)
    assert not torch.allclose(want, dense(x), atol=1e-3)
    assert "search=None, tail=Clusters(count=8" in repr(layer)


def test_clusters_without_a_search_are_kept(monkeypatch):
    layer = GridAttention(12, 3, search=None, tail=scram.Clusters(count=8, keys=12, seed=0), keep_matches=True)
    x = grids(9, 10)
    layer(x)
    assert layer.codebook is None  # in training
    layer.eval()(x)
    first = layer.codebook
    assert first.centers.shape == (2, 3, 8, 4)
    assert layer.matches is None
    warm = []
    monkeypatch.setattr(
        scram.nn.searching, "execute", lambda *given: warm.append(given[-1].warm_codebook) or execute(*given)
    )
    layer(x)
    assert warm == [first]
    layer.reset()
    assert layer.codebook is None


@pytest.mark.parametrize("tail", ["auto", None])
def test_without_a_search_other_tails_are_dense(tail):
    layer = GridAttention(12, 3, search=None, tail=tail, keep_matches=True).eval()
    x = grids(4, 5)
    q, k, v = layer._project(x, x, x)
    torch.testing.assert_close(layer(x), layer._join(scram.exact_attention(q, k, v).out))
    assert layer.codebook is None
    with pytest.raises(ValueError, match="a tail starts from matches"):
        GridAttention(12, 3, search=None, tail=scram.DrawnKeys())


def test_modules_print_themselves():
    assert "causal=False, radius=2, search=auto, tail=auto" in repr(GridAttention(12, 3, radius=2))
    assert "12, num_heads=3, causal=True, dense" in repr(GridAttention(12, 3, search=None, causal=True))
    assert "form='gaussian', radius=1" in repr(NonLocalBlock(4, form="gaussian"))


def test_under_causal_order_kept_clusters_start_no_others():
    """They may come from later keys; kept matches do start the search."""
    layer = GridAttention(8, 2, causal=True, search=scram.Search(seed=0), keep_matches=True).eval()
    x = torch.randn(1, 10, 20, 8)
    first = layer(x)
    assert layer.matches is not None
    assert layer(x).shape == first.shape
