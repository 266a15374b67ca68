"""Factors of biases: tables of offsets as trained models have them, decomposed ones, ALiBi; errors as they are said."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.bias import Bias, decomposed, linear, relative


def pairs(bias):
    """The bias of all pairs [B, H, N, M]."""
    return bias.a.flatten(2, -2) @ bias.b.flatten(2, -2).mT


def points(grid):
    return torch.tensor(list(itertools.product(*map(range, grid))))  # [N, rank]


def by_offset(table, grid, key_grid):
    """The bias [H, N, M] of a table [H, *S] by offset, entry by entry."""
    offset = points(grid)[:, None] - points(key_grid) + torch.tensor(key_grid) - 1  # [N, M, rank]
    return table[(slice(None), *offset.unbind(-1))]


def off(bias, wanted):
    return float((pairs(bias)[0] - wanted).square().mean((1, 2)).max().sqrt())


@pytest.mark.parametrize(
    ("grid", "key_grid"),
    [((5,), (7,)), ((9,), (4,)), ((4, 6), (4, 6)), ((3, 5), (6, 2)), ((2, 3, 4), (3, 3, 2)), ((1,), (1,))],
    ids=str,
)
def test_tables_of_offsets(grid, key_grid):
    table = torch.randn(2, *(n + m - 1 for n, m in zip(grid, key_grid, strict=True)))
    wanted = by_offset(table, grid, key_grid)
    exact = relative(table, grid, key_grid, error=1e-6)
    torch.testing.assert_close(pairs(exact)[0], wanted, atol=1e-5, rtol=0)
    assert exact.error < 1e-6
    for rank in (1, 2):
        fewer = relative(table, grid, key_grid, rank=rank)
        assert fewer.rank == min(rank, exact.rank)
        assert fewer.error == pytest.approx(off(fewer, wanted), rel=1e-3, abs=1e-6)


def smooth(*sizes):
    """A table [2, *sizes], like those of trained models: bumps and waves."""
    axes = torch.meshgrid(*(torch.linspace(-1, 1, n, dtype=torch.float64) for n in sizes), indexing="ij")
    square = sum(x.square() for x in axes)
    return torch.stack([3 * (-4 * square).exp(), (2 * axes[0] - axes[-1]).sin() + axes[0].abs()]).float()


@pytest.mark.slow
def test_large_grids_by_products_with_the_table(monkeypatch):
    """No pair is held; what it finds and says is what a decomposition of all pairs does."""
    table = smooth(39, 59)
    grids = (20, 30), (20, 30)
    whole = relative(table, *grids)
    monkeypatch.setattr(scram.bias, "SMALL", 10)
    found = relative(table, *grids)
    assert found.rank == whole.rank
    assert found.error == pytest.approx(whole.error, rel=0.01)
    assert found.error == pytest.approx(off(found, by_offset(table, *grids)), rel=0.01)
    assert relative(table, *grids, rank=3).error == pytest.approx(relative(table, *grids, rank=3).error)
    assert off(relative(table, *grids, rank=20), by_offset(table, *grids)) < whole.error


def test_distances_in_place_of_offsets():
    """MobileSAM's attention_biases: one entry for each |dy| and |dx|, in the order in which pairs first meet them."""
    grid = (4, 5)
    numbers = {}
    index = [
        [numbers.setdefault((abs(a[0] - b[0]), abs(a[1] - b[1])), len(numbers)) for b in points(grid).tolist()]
        for a in points(grid).tolist()
    ]
    attention_biases = torch.randn(3, len(numbers))
    wanted = attention_biases[:, torch.tensor(index)]
    bias = relative(attention_biases.unflatten(1, grid), grid, error=1e-6)
    torch.testing.assert_close(pairs(bias)[0], wanted, atol=1e-5, rtol=0)


def test_swin_index():
    """Swin's relative_position_index, as Swin makes it, and its table [offsets, H]."""
    grid = (4, 6)
    table = torch.randn((2 * 4 - 1) * (2 * 6 - 1), 2)
    place = points(grid).T
    apart = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + torch.tensor([3, 5])
    index = apart[..., 0] * (2 * 6 - 1) + apart[..., 1]
    wanted = table[index.flatten()].reshape(24, 24, 2).permute(2, 0, 1)
    bias = relative(table.T.unflatten(1, (7, 11)), grid, error=1e-6)
    torch.testing.assert_close(pairs(bias)[0], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("grid", [(14, 14), (7, 7)], ids=str)
def test_attention_is_off_by_the_error_that_is_said(grid):
    table = smooth(*(2 * n - 1 for n in grid))
    q, k, v = torch.randn(3, 1, 2, *grid, 8).unbind()
    mask = by_offset(table, grid, grid)[None]
    exact = F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, v)), attn_mask=mask).reshape(v.shape)
    bias = relative(table, grid)
    assert bias.error <= 0.01
    assert bias.rank < 0.3 * mask.shape[-1]
    out = scram.attention(q, k, v, bias=bias)
    assert (out - exact).norm() < 0.01 * exact.norm()
    assert (scram.attention(q, k, v) - exact).norm() > 0.1 * exact.norm()


def swins(table, grid):
    """The bias [H, N, N] that transformers' Swin makes of a table [offsets, H]."""
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    module = swin.SwinRelativePositionBias(table.shape[1], grid)
    module.relative_position_bias_table.data = table
    return module()[0].detach()


def beits(table, grid):
    """That of BEiT, of the tokens on the grid; its table has three entries more, for the class token."""
    beit = pytest.importorskip("transformers.models.beit.modeling_beit")
    config = beit.BeitConfig(image_size=grid, patch_size=1, num_attention_heads=table.shape[1], hidden_size=8)
    module = beit.BeitRelativePositionBias(config)
    module.relative_position_bias_table.data = torch.cat([table, torch.randn(3, table.shape[1])])
    return module(grid)[0, :, 1:, 1:].detach()


@pytest.mark.parametrize("made", [swins, beits])
@pytest.mark.parametrize("rough", [0.0, 0.3], ids=["smooth", "rough"])
def test_tables_of_models_are_at_most_a_percent_off(made, rough):
    """By their own code; the rank is chosen, and the error that is said is that of all pairs."""
    grid = (12, 12)
    table = smooth(23, 23) + rough * torch.randn(2, 23, 23)
    wanted = made(table.flatten(1).T.contiguous(), grid)
    bias = relative(table, grid, error=0.01)
    assert off(bias, wanted) == pytest.approx(bias.error, rel=1e-3)
    assert bias.error <= 0.01
    assert (bias.rank < 50) == (rough == 0)
    scores = torch.randn_like(wanted)
    weights, exact = ((scores + one).double().softmax(-1) for one in (pairs(bias)[0], wanted))
    assert (weights / exact - 1).square().mean().sqrt() <= 0.01


def test_decomposed_is_sams():
    """SAM's add_decomposed_rel_pos, with gradients to what the factors are made of."""
    q = torch.randn(1, 2, 4, 5, 8)
    relative_h, relative_w = torch.randn(4, 3, 8), torch.randn(5, 6, 8)  # [h, k_h, C], [w, k_w, C]
    rel_h = torch.einsum("bnhwc,hkc->bnhwk", q, relative_h).requires_grad_()
    rel_w = torch.einsum("bnhwc,wkc->bnhwk", q, relative_w).requires_grad_()
    wanted = (rel_h[..., :, None] + rel_w[..., None, :]).reshape(1, 2, 20, 18)
    bias = decomposed(rel_h, rel_w)
    assert bias.error == 0
    torch.testing.assert_close(pairs(bias), wanted)
    k, v = torch.randn(2, 1, 2, 3, 6, 8).unbind()
    out = scram.attention(q, k, v, bias=bias)
    exact = F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, v)), attn_mask=wanted).reshape(out.shape)
    torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(x.square().sum(), (rel_h, rel_w)) for x in (out, exact)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_alibi(dtype):
    q, k, v = torch.randn(3, 1, 2, 50, 8).to(dtype).unbind()
    slopes = torch.tensor([0.7, 0.0625])
    place = torch.arange(50.0)
    mask = (slopes[:, None, None] * (place - place[:, None])).masked_fill(place > place[:, None], -torch.inf)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask.double())
    bias = linear(slopes, (50,), causal=True)
    out = scram.attention(q, k, v, bias=bias, causal=True)
    rounding = 10 if dtype == torch.float32 else 2  # -slope i and slope j cancel
    assert (out.double() - exact).norm() < rounding * torch.finfo(dtype).eps * exact.norm()
    with pytest.raises(ValueError, match="causal order alone"):
        scram.attention(q, k, v, bias=bias)


def test_moved_and_shown():
    bias = relative(smooth(7, 7), (4, 4), rank=2).to(torch.float64)
    assert bias.a.dtype == bias.b.dtype == torch.float64
    shown = r"Bias\(a \[1, 2, 4, 4, 2\], b \[1, 2, 4, 4, 2\], rank 2, error 0\.\d+\)"
    assert re.fullmatch(shown, repr(bias))
    assert "causal" in repr(linear(torch.ones(1), (2, 2), causal=True))


def test_float64_stays():
    assert relative(torch.randn(1, 7).double(), (4,)).a.dtype == torch.float64


REFUSED = {
    "table without heads": (lambda: relative(torch.zeros(7), (4,)), ValueError, r"table must be a float tensor \[H"),
    "whole numbers": (lambda: relative(torch.zeros(1, 7).long(), (4,)), ValueError, "got torch.int64"),
    "table of another size": (lambda: relative(torch.zeros(1, 6), (4,)), ValueError, "7 offsets or 4 distances"),
    "NaN": (lambda: relative(torch.full((1, 7), torch.nan), (4,)), ValueError, "table must be finite"),
    "other ranks": (lambda: relative(torch.zeros(1, 7), (4,), (2, 2)), ValueError, "must have the same rank"),
    "rank 0": (lambda: relative(torch.zeros(1, 7), (4,), rank=0), ValueError, "rank must be at least 1"),
    "error below 0": (lambda: relative(torch.zeros(1, 7), (4,), error=-1), ValueError, "error must be in"),
    "nothing": (lambda: decomposed(), TypeError, "needs a tensor for each axis"),
    "one part of two": (lambda: decomposed(torch.zeros(1, 1, 4, 4, 4)), ValueError, r"parts\[0\] must be"),
    "parts of other grids": (
        lambda: decomposed(torch.zeros(1, 1, 4, 4, 4), torch.zeros(1, 1, 4, 5, 4)), ValueError, r"parts\[1\] must be"
    ),
    "slopes of each token": (lambda: linear(torch.zeros(2, 3), (3,), causal=True), ValueError, "slopes must be"),
    "no order": (lambda: linear(torch.ones(2), (3,), causal=False), ValueError, "linear needs causal order"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_table_of_zeros():
    bias = relative(torch.zeros(2, 7), (4,))
    assert bias.error == 0
    assert isinstance(bias, Bias)
    assert not pairs(bias).any()
