"""Families of transformers by plans that are really sparse: the budget, graphs, threads, errors inside."""

import functools
import math
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import scram
from support.compiling import graphs_are
from support.sparse_plans import BUDGET, assert_within_the_budget, hooked, plan_clusters, recorded, tune_for_error

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
    "SegFormer": (128, 192),
    "DETR": (512, 768),
}
RATIOS = (2, 1, 1, 1)  # of SegFormer's reduced keys: 384 of 1536 tokens
# Compiled code cannot look at rows of a mask (DETR's padding), nor at a bias.
NOT_COMPILED = {
    "DETR": "a mask with a row for each query, which compiled code cannot look at",
    "BEiT": "a float bias, which compiled code cannot look at",
    "SAM": "a float bias, which compiled code cannot look at",
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
    model, inputs = make(SIDES[name]) if name in SIDES else make(RATIOS) if name == "SegFormer" else make()
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
def by(way, model, runs="reference", **how):
    """SCRAM in the model, patched or by a name."""
    if way == "patch":
        with scram.patch_sdpa(grid="auto", error=BUDGET, impl=runs, **how) as report:
            yield report
        return
    report = scram.register_transformers("scram-budgets", grid="auto", error=BUDGET, impl=runs, **how)
    model.set_attn_implementation("scram-budgets")
    try:
        yield report
    finally:
        model.set_attn_implementation({"": "sdpa"})  # DETR's backbone has no sdpa


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


@pytest.fixture
def planned(monkeypatch):
    return plan_clusters(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_tuned_model_compiles_without_a_break(name, way, planned):
    model, inputs, want = family(name)
    with by(way, model, runs="auto") as report:
        out = model(**inputs)[0]
        before = len(planned)
        layers = [layer for layer in report.layers.values() if layer.plan]  # the least grids have fewer keys
        counts = [(layer.clustered, layer.left_alone) for layer in layers]
        with graphs_are(1):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            for _ in range(2):
                same = want if name in NOT_COMPILED else out
                torch.testing.assert_close(compiled(**inputs)[0], same, rtol=1e-4, atol=1e-4)
        assert len(planned) == before
        left = name in NOT_COMPILED
        assert [(layer.clustered - (not left), layer.left_alone > 0) for layer in layers] == [
            (clustered, left) for clustered, _ in counts
        ]
        assert NOT_COMPILED.get(name, "") in str(report)
    assert not torch.equal(out, want)


@pytest.mark.parametrize("name", [*SIZES, *SIDES])
def test_threads_do_not_see_each_other(name, planned):
    model, inputs, want = family(name)
    made = {}

    def run(key):
        made[key] = model(**inputs)[0]

    def patched():
        with by("patch", model, min_tokens=10**6) as report:
            run("other patch")
        made["report"] = report

    with by("patch", model) as report:
        run("patch")
        before = sum(report.calls.values())
        for target in (functools.partial(run, "no patch"), patched):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert sum(report.calls.values()) == before
        again = model(**inputs)[0]
    assert torch.equal(made["no patch"], want)
    assert torch.equal(made["other patch"], want)
    assert made["report"].left_alone == sum(made["report"].calls.values()) > 0
    assert torch.equal(again, made["patch"])
    assert not torch.equal(again, want)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_an_error_inside_leaves_everything_as_it_was(name, way, planned):
    model, inputs, want = family(name)
    hooks = hooked(model)

    def fail(*args):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), by(way, model) as report:  # noqa: PT012 - the hook is the error
        handle = model.register_forward_hook(fail)
        try:
            model(**inputs)
        finally:
            handle.remove()
    made = sum(report.calls.values())
    assert made > 0
    assert torch.equal(model(**inputs)[0], want)
    assert sum(report.calls.values()) == made
    if way == "patch":  # a name keeps the hooks of its layers, for code that is compiled
        assert hooked(model) == hooks
