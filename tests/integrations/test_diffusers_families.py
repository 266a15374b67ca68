"""Families of diffusers by plans that are really sparse: the budget, what is tuned, graphs, threads, errors inside."""

import functools
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch

import scram
from scram.integrations import diffusers as ours
from support.compiling import graphs_are
from support.sparse_plans import BUDGET, assert_within_the_budget, hooked, plan_clusters, recorded, tune_for_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing it has to say
    diffusers = pytest.importorskip("diffusers")
    from support.families import BY_BACK_END, FAMILIES, LARGE, sharp

diffusers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")
WAYS = [(name, way) for name in FAMILIES for way in ("patch", *("back end",) * (name in BY_BACK_END))]


@functools.cache
def family(name):
    """A model, its inputs, and what it returns by torch."""
    torch.manual_seed(0)
    model, inputs = sharp(name)
    return model, inputs, model(**inputs)[0]


@pytest.fixture
def tuned(monkeypatch):
    return tune_for_error(monkeypatch)


@pytest.fixture
def calls(monkeypatch):
    return recorded(monkeypatch)


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
    assert_within_the_budget(report, calls)
    assert 0 < (out - want).norm() / want.norm() < 2 * BUDGET  # of two layers and more


@pytest.fixture
def planned(monkeypatch):
    return plan_clusters(monkeypatch)


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
