"""Tokens of a call that are a grid, tokens off it, and masks of both."""

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.integrations.layers import Tokens
from scram.integrations.layouts import MaskReader, given_tokens
from support.compiling import graphs_are

SMALL, KEYS = (2, 3, 4), (1, 2, 3)  # 24 queries; 6 reduced keys
# Every window covers the grid. The reference has all ranks at once, where kernels are compiled for each.
WHOLE = {"search": scram.Search(sweeps=0), "radius": 99, "impl": "reference"}


def tensors(queries, keys=None, heads=2, key_heads=2):
    keys = queries if keys is None else keys
    shapes = [(2, heads, queries, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 6)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def mask(*shape, hidden=()):
    """True but at these places of the last axis; of the first batch entry alone where there are several."""
    made = torch.ones(shape, dtype=torch.bool)
    made[0, ..., list(hidden)] = False
    return made


# Layout, queries, keys, options of the call, and whether masks reach SCRAM: of keys on the grid, of those off it.
TAKEN = {
    "text after a film": ({"grid": SMALL, "after": 3}, 27, 27, {}, (False, False)),
    "text on both sides": ({"grid": SMALL, "before": 2, "after": 3}, 29, 29, {"scale": 0.3}, (False, False)),
    "a line": ({"grid": (24,), "before": 1}, 25, 25, {}, (False, False)),
    "causal": ({"grid": (4, 6), "before": 2, "after": 3}, 29, 29, {"is_causal": True}, (False, False)),
    "padded text": (
        {"grid": SMALL, "after": 5},
        29,
        29,
        {"attn_mask": mask(2, 1, 1, 29, hidden=(27, 28))},
        (False, True),
    ),
    "padded text, a row for each query": (
        {"grid": SMALL, "before": 5},
        29,
        29,
        {"attn_mask": mask(2, 1, 29, 29, hidden=(3, 4))},
        (False, True),
    ),
    "a mask that masks nothing": (
        {"grid": SMALL, "after": 5},
        29,
        29,
        {"attn_mask": mask(2, 1, 1, 29)},
        (False, False),
    ),
    "keys of both kinds": (
        {"grid": SMALL, "after": 5},
        29,
        29,
        {"attn_mask": mask(2, 1, 1, 29, hidden=(0, 7, 28))},
        (True, True),
    ),
    "keys on the grid, by heads": (
        {"grid": SMALL},
        24,
        24,
        {"attn_mask": torch.arange(96).reshape(2, 2, 1, 24) % 5 > 0},
        (True, False),
    ),
    "reduced keys": ({"grid": SMALL, "key_grid": KEYS}, 24, 6, {}, (False, False)),
    "reduced keys after a token": (
        {"grid": SMALL, "key_grid": KEYS, "before": 1},
        *(25, 7, {"attn_mask": mask(2, 1, 1, 7, hidden=(2,))}, (True, False)),
    ),
    "one of several grids": ({"grid": [(9, 9), SMALL], "after": 1}, 25, 25, {}, (False, False)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_covering_windows_change_nothing(name, monkeypatch):
    layout, queries, keys, how, masked = TAKEN[name]
    leaves = tensors(queries, keys)
    seen = []
    run = scram.core.pipeline.run
    monkeypatch.setattr(
        scram.core.pipeline, "run", lambda resolved, *args: seen.append(resolved) or run(resolved, *args)
    )
    want = F.scaled_dot_product_attention(*leaves, **how)
    with scram.patch_sdpa(**layout, **WHOLE) as report:
        out = F.scaled_dot_product_attention(*leaves, **how)
    assert (report.searched, report.left_alone) == (1, 0), report
    assert tuple(x is not None for x in (seen[0].request.key_mask, seen[0].request.extra_mask)) == masked
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), leaves))
    direct = scram.scaled_dot_product_attention(*leaves, **how, **layout)
    torch.testing.assert_close(direct, want)


def test_three_axes_and_a_mask():
    q, k, v = (x[:, 0] for x in tensors(27))
    hidden = mask(2, 1, 27, hidden=(26,))
    with scram.patch_sdpa(grid=SMALL, after=3, **WHOLE) as report:
        out = F.scaled_dot_product_attention(q, k, v, hidden)
    assert report.searched == 1
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, hidden))


LEFT = {
    "rows that differ": (mask(2, 1, 29, 29) & torch.ones(29, 29).tril().bool(), "a mask that differs between queries"),
    "text that differs between heads": (
        torch.stack([mask(2, 1, 29), mask(2, 1, 29, hidden=(28,))], 1),
        "a mask of tokens off the grid that differs between heads",
    ),
    "a rough bias": (torch.randn(29, 29), "a float bias"),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_masks_are_left_to_torch(name):
    hidden, why = LEFT[name]
    leaves = tensors(29)
    with scram.patch_sdpa(grid=SMALL, after=5, **WHOLE) as report:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=hidden)
    assert next(iter(report.calls)).why_not.startswith(why)
    assert (out == F.scaled_dot_product_attention(*leaves, attn_mask=hidden)).all()


def test_a_mask_is_looked_at_again_once_it_has_changed():
    reader, q, tokens = MaskReader(), torch.zeros(2, 2, 29, 8), Tokens(SMALL, after=5)
    hidden = mask(2, 1, 1, 29)
    assert not any(x is not None for x in reader.read(hidden, q, tokens))
    hidden[:, ..., 28] = False
    assert reader.read(hidden, q, tokens).off.sum() == 8
    assert reader.read(hidden, q, Tokens((5,), after=24)).off.shape == (2, 24)
    with torch.inference_mode():
        other = mask(2, 1, 1, 29)
        assert reader.read(other, q, tokens).off is None
        other[...] = False
        assert not reader.read(other, q, tokens).off.any()


def test_text_is_exact_and_the_grid_is_not_sheared():
    """Other text behind the grid changes the grid's outputs as it does in dense attention."""
    torch.manual_seed(0)
    grid, text = (8, 12), 6
    q, k, v = (torch.randn(1, 2, 96 + text, 16) for _ in range(3))
    how = {"search": None, "tail": scram.Clusters(count=48, keys=48, seed=0)}
    outs, wants = [], []
    for _ in range(2):
        k, v = k.clone(), v.clone()
        k[:, :, 96:], v[:, :, 96:] = torch.randn(1, 2, text, 16) * 3, torch.randn(1, 2, text, 16)
        wants.append(F.scaled_dot_product_attention(q, k, v))
        with scram.patch_sdpa(grid=grid, after=text, **how) as report:
            outs.append(F.scaled_dot_product_attention(q, k, v))
        assert report.clustered == 1
        torch.testing.assert_close(outs[-1][:, :, 96:], wants[-1][:, :, 96:])
    change, expected = outs[1] - outs[0], wants[1] - wants[0]
    assert float(expected.norm() / wants[0].norm()) > 0.5
    assert float((change - expected).norm() / expected.norm()) < 0.05
    with scram.patch_sdpa(grid=grid, before=text, **how):  # the wrong end
        sheared = F.scaled_dot_product_attention(q, k, v)
    assert float((sheared - wants[1])[:, :, 96:].abs().max()) > 0.01


@pytest.mark.slow
def test_compiled_code_keeps_masks():
    leaves, hidden = tensors(29), mask(2, 1, 1, 29, hidden=(3, 28))
    with scram.patch_sdpa(grid=(4, 6), after=5, **WHOLE | {"impl": "auto"}) as report, graphs_are(1):
        call = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        out = call(*leaves, hidden)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*leaves, hidden))
    assert report.searched == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"grid": "auto", "after": 1}, 'after is found with grid="auto"'),
        ({"grid": "auto", "key_grid": (2, 2)}, 'key_grid is found with grid="auto"'),
        ({"grid": (2, 2), "key_grid": (2,)}, "key_grid must have the rank of grid, 2"),
        ({"grid": (2, 2), "after": -1}, "after must be at least 0"),
        ({"grid": [(2, 6), (3, 4)]}, "grids must differ in their number of tokens"),
        ({"grid": [(2, 6), 3]}, r"grid\[0\] must be an int"),
    ],
)
def test_wrong_layouts_are_refused(how, message):
    with pytest.raises((ValueError, TypeError), match=message):
        given_tokens(how["grid"], how.get("before", 0), how.get("after", 0), how.get("key_grid"))


def test_tokens_say_what_they_are():
    assert str(Tokens((2, 3), 1, 4)) == "1 + 2 x 3 + 4 = 11"
    assert str(Tokens((2, 3), key_grid=(1, 2))) == "2 x 3 = 6, keys 1 x 2"
    assert Tokens((2, 3), key_grid=(1, 2)).of(6, 6) == Tokens((2, 3))
    assert Tokens((2, 3), 1, key_grid=(1, 2)).of(7, 3) == Tokens((2, 3), 1, 0, (1, 2))
    assert Tokens((2, 3), 1).of(7, 3) is None
