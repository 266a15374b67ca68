"""Families of transformers by plans that are really sparse, patched and by name: each layer keeps the budget."""

import functools
import math
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import scram
from support.sparse_plans import BUDGET, assert_within_the_budget, recorded, tune_for_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing it has to say
    pytest.importorskip("transformers")
    from support.vision import PATCH_ONLY, VISION

pytestmark = pytest.mark.filterwarnings("ignore")
PROJECTIONS = (
    "query",
    "q_proj",
    "key",
    "k_proj",
    "qkv",
)  # of queries and keys, made so large that attention is not even
SIDES = {"SigLIP": 80, "BEiT": 64, "SAM": 96, "VideoMAE": 96}  # of models that take pictures of one size
SIZES = {  # of pictures, 256 tokens and more
    "ViT": (96, 64),
    "DINOv2": (168, 112),
    "DINOv2 with registers": (168, 112),
    "DINOv3": (96, 64),
    "Depth Anything": (168, 112),
}
WAYS = [
    (name, way)
    for name in (*SIZES, *SIDES)
    for way in ("patch", *("name",) * (name not in (*PATCH_ONLY, "Depth Anything")))
]


@functools.cache
def family(name):
    """A model whose attention is not even, a picture that varies slowly, and what it returns by torch."""
    torch.manual_seed(0)
    make = VISION[name][0]
    model, inputs = make(SIDES[name]) if name in SIDES else make()
    size = SIZES.get(name) or (SIDES[name],) * 2
    shape = inputs["pixel_values"].shape[:-2]
    coarse = torch.randn(1, shape.numel(), *(n // 8 for n in size))
    inputs["pixel_values"] = F.interpolate(coarse, size, mode="bilinear").reshape(*shape, *size)
    for part, module in model.named_modules():
        last = part.rsplit(".", 1)[-1]
        if last in PROJECTIONS:
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if hasattr(module, "relative_position_bias_table"):
            table = module.relative_position_bias_table.data
            apart = torch.linspace(-1, 1, math.isqrt(len(table) - 3)).square()
            table[:-3] = -2 * (apart[:, None] + apart).flatten()[:, None]
    model = model.eval().requires_grad_(False)
    return model, inputs, model(**inputs)[0]


@contextmanager
def by(way, model):
    """SCRAM in the model, patched or by a name."""
    if way == "patch":
        with scram.patch_sdpa(grid="auto", error=BUDGET, impl="reference") as report:
            yield report
        return
    report = scram.register_transformers("scram-budgets", grid="auto", error=BUDGET, impl="reference")
    model.set_attn_implementation("scram-budgets")
    yield report
    model.set_attn_implementation("sdpa")


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_sparse_plan_keeps_the_budget(name, way, monkeypatch):
    model, inputs, want = family(name)
    tuned = tune_for_error(monkeypatch)
    calls = recorded(monkeypatch)
    with by(way, model) as report:
        out = model(**inputs)[0]
        first = len(tuned)
        again = model(**inputs)[0]
    assert torch.equal(again, out)
    layers = [layer for layer in report.layers.values() if layer.grid]
    assert first == len(tuned) == len(layers) > 0  # the second call tunes nothing
    assert all(layer.plan is not None and layer.left_alone == 0 and layer.calls == 2 for layer in layers)
    assert any(not layer.plan.dense for layer in layers)
    assert_within_the_budget(report, calls)
    assert torch.equal(model(**inputs)[0], want)
    assert not torch.equal(out, want)
