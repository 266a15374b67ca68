"""NonLocalBlock: what Wang's block computes, with the keys that SCRAM finds."""

import pytest
import torch
from torch import nn

import scram
from scram.nn import NonLocalBlock

GRIDS = [(12,), (4, 5), (2, 3, 4)]
WHOLE = {"search": scram.Search(sweeps=0), "radius": 99}  # every window covers the grid


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
@pytest.mark.parametrize("grid", GRIDS)
def test_covering_window_is_the_block_of_wang(form, grid):
    block = NonLocalBlock(8, rank=len(grid), form=form, norm=len(grid) != 2, **WHOLE)
    x = torch.randn(2, 8, *grid)
    assert (block(x) == x).all()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    torch.testing.assert_close(block(x), wang(block, x))


def test_what_the_mask_of_a_block_hides():
    block = NonLocalBlock(4, norm=False, **WHOLE)
    nn.init.normal_(block.out.weight)
    x, mask = torch.randn(1, 4, 5, 6), torch.ones(1, 5, 6, dtype=torch.bool)
    mask[0, 2, 3] = False
    other = torch.where(mask[:, None], x, -x)
    seen = mask[:, None].expand_as(x)
    assert (block(x, key_mask=mask)[seen] == block(other, key_mask=mask)[seen]).all()
    assert (block(x)[seen] != block(other)[seen]).any()


@pytest.mark.slow
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


TAIL = scram.Clusters(count=8, keys=16, stretch=64, seed=0)


@pytest.mark.parametrize("form", NonLocalBlock.FORMS)
@pytest.mark.parametrize("settings", [{}, {"search": scram.Search(seed=0)}, {"tail": TAIL}], ids=["", "search", "tail"])
def test_in_causal_order_nothing_later_matters(form, settings):
    if "tail" in settings and form in ("dot_product", "concatenation"):
        settings = {"search": scram.Search(seed=0), "tail": None}
    block = NonLocalBlock(6, form=form, norm=False, causal=True, **settings)
    nn.init.normal_(block.out.weight)
    x = torch.randn(2, 6, 10, 20)
    changed = x.clone()
    changed[:, :, 6:] = torch.nan
    changed[:, :, 5, 7:] = 1e30
    torch.manual_seed(0)
    out = block(x)
    torch.manual_seed(0)
    other = block(changed)
    assert torch.equal(other.flatten(2)[:, :, :107], out.flatten(2)[:, :, :107])
    assert not torch.equal(other.flatten(2)[:, :, 107:], out.flatten(2)[:, :, 107:])


@pytest.mark.parametrize("form", ["embedded_gaussian", "gaussian"])
@pytest.mark.parametrize("grid", [(200,), (10, 20), (4, 5, 10)])
def test_position_after_position_is_the_whole_call(form, grid):
    block = NonLocalBlock(6, rank=len(grid), form=form, norm=False, causal=True, tail=TAIL).eval()
    nn.init.normal_(block.out.weight)
    x = torch.randn(2, 6, *grid)
    cache = block.cache(grid)
    rows = [block.decode(one, cache) for one in x.flatten(2).split([70, *[1] * 130], dim=2)]
    torch.testing.assert_close(torch.cat(rows, 2), block(x).flatten(2), atol=2e-5, rtol=0)


def test_what_cannot_be_causal_is_refused():
    with pytest.raises(ValueError, match="batch normalization reads every position"):
        NonLocalBlock(6, causal=True)
    with pytest.raises(ValueError, match="decoding needs causal order"):
        NonLocalBlock(6).cache((8, 8))
    with pytest.raises(ValueError, match="decoding needs a form with softmax"):
        NonLocalBlock(6, form="dot_product", norm=False, causal=True).cache((8, 8))
    with pytest.raises(ValueError, match="decoding needs clusters, or every key"):
        NonLocalBlock(6, norm=False, causal=True, tail=None).cache((8, 8))
