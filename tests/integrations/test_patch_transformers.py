"""SCRAM inside models of transformers: as a registered implementation, and in a context."""

import functools
import sys
import warnings

import pytest
import torch

import scram
from scram.integrations import sdpa
from support.budgets import planned
from support.sparse_plans import hooked


@pytest.fixture
def vit():
    """A small ViT of transformers with random weights: a class token and 8 x 8 patches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing transformers has to say
        transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=4
    )
    return transformers.ViTModel(config).eval()


@pytest.fixture
def tuned(monkeypatch):
    """Calls of `tune`, which gives plans of windows over the whole grid."""
    tune, seen = planned()
    monkeypatch.setattr(sdpa, "tune", tune)
    return seen


@pytest.mark.slow
def test_transformers(vit):
    x = torch.randn(2, 3, 32, 32)
    want = vit(x).last_hidden_state
    how = {"grid": (8, 8), "before": 1, "search": scram.Search(sweeps=0)}
    report = scram.register_transformers("scram-whole", **how, radius=99)
    masks = sys.modules["transformers"].AttentionMaskInterface()
    assert masks["scram-whole"] is masks["sdpa"]
    vit.set_attn_implementation("scram-whole")
    torch.testing.assert_close(vit(x).last_hidden_state, want)
    assert (report.searched, report.left_alone) == (2, 0)
    few = scram.register_transformers("scram", **how, radius=0)
    vit.set_attn_implementation("scram")
    assert (vit(x).last_hidden_state != want).any()
    assert few.searched == 2
    assert report.searched == 2
    vit.set_attn_implementation("sdpa")
    assert (vit(x).last_hidden_state == want).all()


@pytest.mark.slow
def test_transformers_of_another_length_is_as_before(vit):
    x = torch.randn(2, 3, 32, 32)
    want = vit(x).last_hidden_state
    report = scram.register_transformers("scram-other", grid=(7, 8), before=1)
    vit.set_attn_implementation("scram-other")
    assert (vit(x).last_hidden_state == want).all()
    assert (report.searched, report.left_alone) == (0, 2)


@pytest.mark.slow
def test_transformers_in_the_context(vit):
    x = torch.randn(2, 3, 32, 32)
    want = vit(x).last_hidden_state
    with scram.patch_sdpa(grid=(8, 8), before=1, search=scram.Search(sweeps=0), radius=99) as report:
        torch.testing.assert_close(vit(x).last_hidden_state, want)
    assert report.searched == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_with_a_budget(vit, tuned):
    x = torch.randn(2, 3, 32, 32)
    want = vit(x).last_hidden_state
    report = scram.register_transformers("scram-budget", grid="auto", error=0.05)
    vit.set_attn_implementation("scram-budget")
    for _ in range(2):
        torch.testing.assert_close(vit(x).last_hidden_state, want)
    assert [(layer.grid, layer.tokens.before, layer.calls) for layer in report.layers.values()] == [((8, 8), 1, 2)] * 2
    assert len(tuned) == 2
    compiled = torch.compile(vit, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).last_hidden_state, want)
    assert [layer.calls for layer in report.layers.values()] == [3, 3]
    vit.set_attn_implementation("sdpa")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_in_a_context_with_a_budget(vit, tuned):
    x = torch.randn(2, 3, 32, 32)
    want = vit(x).last_hidden_state
    with scram.patch_sdpa(grid="auto", error=0.05) as report:
        torch.testing.assert_close(vit(x).last_hidden_state, want)
        torch.testing.assert_close(torch.compile(vit, backend="aot_eager", fullgraph=True)(x).last_hidden_state, want)
    assert len(tuned) == len(report.plans) == 2
    assert [layer.calls for layer in report.layers.values()] == [2, 2]


@functools.cache
def families():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        from support import vision
    return vision


NAMES = (
    *("ViT", "DINOv2", "DINOv2 with registers", "DINOv3", "SigLIP", "SegFormer", "Swin", "BEiT", "SAM", "DETR"),
    *("Depth Anything", "VideoMAE"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_patched_and_by_name(name, monkeypatch):
    tune, seen = planned(impl="reference")
    monkeypatch.setattr(sdpa, "tune", tune)
    vision = families()
    assert tuple(vision.VISION) == NAMES
    make, grids, left = vision.VISION[name]
    torch.manual_seed(0)
    model, inputs = make()
    model = model.eval().requires_grad_(False)
    want = model(**inputs)[0]
    by_name = scram.register_transformers("scram-families", grid="auto", error=0.05)
    with scram.patch_sdpa(grid="auto", error=0.05) as patched:
        for _ in range(2):
            torch.testing.assert_close(model(**inputs)[0], want, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("scram-families")
    for _ in range(2):
        torch.testing.assert_close(model(**inputs)[0], want, rtol=1e-4, atol=1e-4)
    reports = [patched] if name in vision.PATCH_ONLY else [patched, by_name]
    assert len(seen) == len(reports) * len(grids)  # the second call tunes nothing
    for report in reports:
        layers = list(report.layers.values())
        assert [(one.grid, one.tokens.before, one.tokens.key_grid) for one in layers if one.grid] == grids
        reasons = [one.why_not for one in layers if not one.grid]
        assert len(reasons) == len(left)
        assert all(reason.startswith(start) for reason, start in zip(reasons, left, strict=True))
        assert report.searched == 2 * len(grids)
    assert ("need scram.patch_sdpa" in str(by_name)) == (not by_name.calls) == (name in vision.PATCH_ONLY)


@pytest.mark.filterwarnings("ignore")
def test_a_name_that_is_registered_again_leaves_no_hooks(vit, tuned):
    hooks = []
    for _ in range(3):
        scram.register_transformers("scram-again", grid="auto", error=0.05)
        vit.set_attn_implementation("scram-again")
        vit(torch.randn(2, 3, 32, 32))
        hooks.append(sum(hooked(vit)))
    assert hooks[0] == hooks[1] == hooks[2] > 0


@pytest.mark.parametrize("name", ["", "sdpa", "eager"])
def test_names_of_transformers_are_not_taken(vit, name):
    with pytest.raises(ValueError, match="name must be a new one"):
        scram.register_transformers(name, grid=(8, 8))
