"""Families of diffusers by plans that are really sparse: the budget, what is tuned, graphs, threads, errors inside."""

import functools
import math
import sys
import threading
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import scram
from scram import _compat
from scram.core.resolve import Resolved
from scram.integrations import diffusers as ours
from scram.integrations import sdpa
from scram.quality.plan import Rung, Setting
from scram.quality.timing import Believed
from support.compiling import graphs_are

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing it has to say
    diffusers = pytest.importorskip("diffusers")
    from support.families import BY_BACK_END, FAMILIES, LARGE, sharp

diffusers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")
tuning = sys.modules["scram.quality.tune"]  # scram.tune is the function
TAILS = ((8, 16), (16, 32), (32, 64), (48, 128), (64, 192))
BUDGET = 0.05
SPARSE = Setting(None, scram.Clusters(count=32, keys=64, seed=0))
WAYS = [(name, way) for name in FAMILIES for way in ("patch", *("back end",) * (name in BY_BACK_END))]


@functools.cache
def family(name):
    """A model, its inputs, and what it returns by torch."""
    torch.manual_seed(0)
    model, inputs = sharp(name)
    return model, inputs, model(**inputs)[0]


@pytest.fixture
def tuned(monkeypatch):
    """Kinds of q of the calls of `tune`. It measures errors; times are made up, dense attention takes the longest."""
    seen, tune = [], sdpa.tune

    def believed(call, device, limit=math.inf, beside=None):
        resolved = call.args[0]
        work = tuning.Work.of(Setting(resolved.search, resolved.tail)) if isinstance(resolved, Resolved) else None
        return Believed(1e4 if work is None else 1e3 * work.matches + work.tail + work.keys, True), call()

    def counted(q, *args, **how):
        seen.append(tuple(q.shape))
        return tune(q, *args, **how)

    monkeypatch.setattr(tuning, "believed", believed)
    monkeypatch.setattr(tuning, "TAILS", TAILS)
    monkeypatch.setattr(sdpa, "tune", counted)
    return seen


@pytest.fixture
def calls(monkeypatch):
    """Of each call of attention its tensors, what SCRAM returned and what torch does."""
    seen, attend = [], sdpa.Replacement.attention

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *named, ranks=1, **how):
        given = query, key, value, attn_mask, dropout_p, is_causal
        how |= dict(zip(("scale", "enable_gqa"), named, strict=False))
        out = attend(self, *given, **how)
        with _compat.without_modes():
            seen.append((query, key, out, F.scaled_dot_product_attention(*given, **how)))
        return out

    monkeypatch.setattr(sdpa.Replacement, "attention", attention)
    return seen


@contextmanager
def by(way, model, runs="reference", **how):
    """SCRAM in the model, patched or as a back end."""
    if way == "patch":
        with scram.patch_sdpa(grid="auto", error=BUDGET, impl=runs, **how) as report:
            yield report
        return
    report = ours.register(error=BUDGET, impl=runs, **how)
    try:
        model.set_attention_backend("scram")
        yield report
    finally:
        ours.unregister()
        model.reset_attention_backend()


def p95(out, want):
    """The promised error of the worst head, [B, H, N, F]."""
    off = (out - want).norm(dim=-1) / want.square().sum(-1).mean(-1, keepdim=True).sqrt()
    return float(off.quantile(0.95, -1).max())


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_sparse_plan_keeps_the_budget(name, way, tuned, calls):
    """What its layers return is compared with what torch does with the same tensors."""
    model, inputs, want = family(name)
    with by(way, model) as report:
        out = model(**inputs)[0]
        first = len(tuned)
        again = model(**inputs)[0]
    assert torch.equal(again, out)
    layers = [layer for layer in report.layers.values() if layer.grid]
    assert first == len(tuned) == len(layers) > 0  # the second step tunes nothing
    assert all(layer.plan is not None and layer.left_alone == 0 and layer.calls == 2 for layer in layers)
    large = [layer for layer in layers if layer.grid == LARGE[name][2]]
    assert any(not layer.plan.dense for layer in large)
    on_grids = {layer.tokens.total: layer.tokens for layer in layers}
    errors = []
    for q, k, made, exact in calls:
        tokens = on_grids.get(q.shape[-2])
        if tokens is None or k.shape[-2] != q.shape[-2]:
            assert torch.equal(made, exact)  # left to torch
            continue
        grid = slice(tokens.before, tokens.total - tokens.after)
        errors.append(p95(made[:, :, grid], exact[:, :, grid]))
        for text in (slice(tokens.before), slice(tokens.total - tokens.after, None)):
            torch.testing.assert_close(made[:, :, text], exact[:, :, text], rtol=1e-5, atol=1e-5)
    assert 1e-4 < max(errors) <= BUDGET  # not by dense attention, and within the budget
    assert 0 < (out - want).norm() / want.norm() < 2 * BUDGET  # of two layers and more


@pytest.fixture
def planned(monkeypatch):
    """Every layer is tuned at once: clusters, whatever they cost."""
    made, seen = sdpa.tune, []

    def tune(q, k, v, **how):
        seen.append(tuple(q.shape))
        plan = made(q, k, v, **{**how, "error": 0.0})
        rung = Rung(SPARSE, 96, 1e-9, (0.0, 0.0, 0.0), 0.0, True)
        return replace(plan, error=how["error"], rungs=(rung, *plan.rungs), chosen=0)

    monkeypatch.setattr(sdpa, "tune", tune)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tuned_model_compiles_without_a_break(name, planned):
    model, inputs, want = family(name)
    way = "back end" if name in BY_BACK_END else "patch"
    with by(way, model, runs="auto") as report:
        out = model(**inputs)[0]
        before = len(planned)
        layers = {layer.name: layer.clustered for layer in report.layers.values() if layer.grid}
        with graphs_are(1):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(compiled(**inputs)[0], out, rtol=1e-4, atol=1e-4)
        assert len(planned) == before
        compiled_once = {layer.name: layer.clustered - 1 for layer in report.layers.values() if layer.grid}
        assert compiled_once == layers
    assert not torch.allclose(out, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
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
    last = [module for module in model.modules() if hasattr(module, "to_out")][-1]

    def fail(*args):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), by(way, model) as report:  # noqa: PT012 - the hook is the error
        handle = last.register_forward_hook(fail)
        try:
            model(**inputs)
        finally:
            handle.remove()
    assert report.calls
    made = sum(report.calls.values())
    assert torch.equal(model(**inputs)[0], want)
    assert sum(report.calls.values()) == made
    assert hooked(model) == hooks


def hooked(model):
    """How many hooks the modules of a model have."""
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
