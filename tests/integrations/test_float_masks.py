"""Float masks of torch's attention on a grid: hidden keys, tables, low rank, keys off the grid, and what stays."""

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.integrations.float_masks import FloatMasks, GridMask

GRID = (8, 10)
POINTS = 80
LEAST = torch.finfo(torch.float32).min
WHOLE = {"grid": GRID, "search": scram.Search(seed=0), "tail": None, "radius": 10}  # windows hold every key


def tensors(points=POINTS, heads=2):
    return torch.randn(3, 2, heads, points, 8).unbind()


def table_of_offsets(heads=2):
    """A smooth table and the bias [H, N, M] that it makes."""
    down, right = torch.meshgrid(torch.linspace(-1, 1, 15), torch.linspace(-1, 1, 19), indexing="ij")
    table = torch.stack([3 * torch.cos(down + n) * torch.exp(-right.square()) for n in range(heads)])
    place = torch.cartesian_prod(*map(torch.arange, GRID))
    offset = place[:, None] - place + torch.tensor([7, 9])
    return table, table[:, offset[..., 0], offset[..., 1]]


def compared(mask, leaves, tolerance=0.01, **how):
    """Attention by SCRAM with a float mask, against torch's."""
    want = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    with scram.patch_sdpa(**{**WHOLE, **how}) as report:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    assert report.searched == 1, str(report)
    assert (out - want).norm() <= tolerance * want.norm()
    return out


def test_hidden_keys():
    leaves = tensors()
    hidden = torch.rand(2, 1, 1, POINTS) < 0.3
    for least in (-torch.inf, LEAST):
        mask = torch.where(hidden, least, 0.0)
        compared(mask, leaves, 1e-5)
        compared(mask.expand(-1, -1, POINTS, -1), leaves, 1e-5)


def test_a_number_for_each_key():
    compared(torch.randn(1, 2, 1, POINTS), tensors(), 1e-5)


@pytest.mark.parametrize("extra_axes", [0, 1, 2])
def test_tables_of_offsets(extra_axes):
    _, mask = table_of_offsets(1 if extra_axes == 0 else 2)
    mask = mask[0] if extra_axes == 0 else mask
    compared(mask[None] if extra_axes == 2 else mask, tensors())
    meaning = FloatMasks().read(mask[(None,) * (4 - mask.ndim)], GRID, GRID)
    assert isinstance(meaning, GridMask)
    assert meaning.bias.error <= 0.01
    assert meaning.bias.rank < 10


def test_tables_beside_hidden_keys():
    _, mask = table_of_offsets()
    mask = mask[None].clone()
    mask[..., 70:] = -torch.inf
    compared(mask, tensors())


def test_low_rank():
    a, b = torch.randn(2, POINTS, 3), torch.randn(2, POINTS, 3)
    mask = (a @ b.mT)[None]
    compared(mask, tensors(), 1e-3)
    assert FloatMasks().read(mask, GRID, GRID).bias.rank == 3


def test_tokens_before_the_grid_have_a_bias_of_their_own():
    """BEiT's: an entry for the class token towards all, one for all towards it, and one for itself."""
    _, grid = table_of_offsets()
    mask = torch.randn(1, 2, 1 + POINTS, 1 + POINTS)
    mask[..., 1:, 1:] = grid
    mask[..., 0, 1:] = 0.3
    mask[..., 1:, 0] = -1.5
    compared(mask, tensors(1 + POINTS), before=1)


def test_hidden_tokens_off_the_grid():
    """Padded text behind the picture."""
    mask = torch.zeros(2, 1, 1, POINTS + 3)
    mask[0, ..., -2:] = -torch.inf
    compared(mask, tensors(POINTS + 3), 1e-5, after=3)


def test_factored_once(monkeypatch):
    _, mask = table_of_offsets()
    reads = []
    own = scram.integrations.float_masks._read
    monkeypatch.setattr(scram.integrations.float_masks, "_read", lambda *x: reads.append(1) or own(*x))
    masks = FloatMasks()
    first = masks.read(mask[None], GRID, GRID)
    for again in (mask[None].clone(), mask[None]):
        assert masks.read(again, GRID, GRID) is first
    assert len(reads) == 1
    changed = mask[None].clone()
    assert masks.read(changed, GRID, GRID) is first
    changed[0, 1, 5, 7] += 1
    assert masks.read(changed, GRID, GRID) is not first
    assert len(reads) == 2
    masks.clear()
    masks.read(mask[None], GRID, GRID)
    assert len(reads) == 3


def test_few_are_remembered():
    masks = FloatMasks()
    for n in range(70):
        masks.read(torch.full((1, 1, 1, POINTS), float(n)), GRID, GRID)
    assert sum(map(len, masks._known.values())) == 64


def test_a_budget_is_for_the_factors_too():
    """A quarter of it; and each layer is tuned with the bias."""
    _, mask = table_of_offsets()
    masks = FloatMasks()
    few, many = (masks.read(mask[None], GRID, GRID, error=error).bias for error in (0.4, 0.004))
    assert few.error <= 0.1
    assert many.error <= 0.001
    assert few.rank < many.rank

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    layer, leaves = Layer().eval(), tensors()
    want = layer(*leaves)
    with torch.no_grad(), scram.patch_sdpa(grid=GRID, error=0.1) as report:
        out = layer(*leaves)
    assert report.left_alone == 0
    assert next(iter(report.layers.values())).plan.given == ("bias",)
    assert (out - want).norm() < 0.1 * want.norm()


def test_dense_calls_are_torchs_own():
    """Where SCRAM would be dense attention, torch adds the mask itself, to the bit."""
    _, mask = table_of_offsets()
    leaves = tensors()
    want = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    assert torch.equal(scram.scaled_dot_product_attention(*leaves, attn_mask=mask, grid=GRID), want)
    with scram.patch_sdpa(grid=GRID) as report:
        assert torch.equal(F.scaled_dot_product_attention(*leaves, attn_mask=mask), want)
    assert report.dense == 1


def left(mask, **how):
    """Why a mask is left to torch, which answers."""
    leaves = tensors(POINTS + how.get("before", 0))
    want = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    with scram.patch_sdpa(**WHOLE, **how) as report:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    assert torch.equal(out.nan_to_num(), want.nan_to_num())
    assert report.left_alone == 1
    return next(iter(report.calls)).why_not


def test_what_stays_with_torch():
    rough = torch.randn(POINTS, POINTS)
    assert "a float bias that 40 features leave" in left(rough)
    assert "differs between queries" in left(torch.where(rough > 1, -torch.inf, 0.0))
    assert "differs between the entries of a batch" in left(torch.randn(2, 1, 1, POINTS))
    assert "gradients" in left(rough.clone().requires_grad_())
    assert "NaN or infinity" in left(torch.full((1, POINTS), torch.inf))
    assert "more than 16 tokens off the grid" in left(torch.randn(1, 17 + POINTS), before=17)
    hidden = torch.zeros(1, 2, 1, 1 + POINTS)
    hidden[0, 0, 0, 0] = -torch.inf
    assert "differs between heads" in left(hidden, before=1)
