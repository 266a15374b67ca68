"""SCRAM in models of diffusers: patched, and as a back end."""

import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.integrations import diffusers as ours
from scram.integrations import sdpa
from support import diffusers_jobs
from support.budgets import planned
from support.compiling import graphs_are
from support.sharded import on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what importing it has to say
    diffusers = pytest.importorskip("diffusers")
    from support.families import BY_BACK_END, FAMILIES

diffusers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def family(name):
    """A model, its inputs, and what it returns by torch."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name][0]()
    model = model.eval().requires_grad_(False)
    return model, inputs, model(**inputs)[0]


@pytest.fixture
def tuned(monkeypatch):
    """Calls of `tune`, which gives plans of windows over the whole grid."""
    tune, seen = planned(impl="reference")
    monkeypatch.setattr(sdpa, "tune", tune)
    return seen


@pytest.fixture
def backend():
    """Registers SCRAM; all is as it was behind the test."""
    yield ours.register
    ours.unregister()
    for name in BY_BACK_END:
        family(name)[0].reset_attention_backend()


def grids(report):
    return {
        layer.tokens.grid: (layer.tokens.before, layer.tokens.after) for layer in report.layers.values() if layer.grid
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_patched(name, tuned):
    model, inputs, want = family(name)
    with scram.patch_sdpa(grid="auto", error=0.05) as report:
        for _ in range(2):
            torch.testing.assert_close(model(**inputs)[0], want, rtol=1e-4, atol=1e-4)
    assert grids(report).items() >= FAMILIES[name][1].items()
    on_grids = [layer for layer in report.layers.values() if layer.grid]
    assert len(tuned) == len(on_grids)  # the second call tunes nothing
    assert all(layer.plan is not None and (layer.searched, layer.left_alone) == (2, 0) for layer in on_grids)
    left = [layer.why_not for layer in report.layers.values() if not layer.grid]
    assert all("which are not the same grid" in why or "no picture is known" in why for why in left)
    assert (model(**inputs)[0] == want).all()


@pytest.mark.parametrize("name", BY_BACK_END)
def test_a_back_end(name, tuned, backend):
    model, inputs, want = family(name)
    report = backend(error=0.05)
    model.set_attention_backend("scram")
    for _ in range(2):
        torch.testing.assert_close(model(**inputs)[0], want, rtol=1e-4, atol=1e-4)
    assert grids(report) == FAMILIES[name][1]
    assert len(tuned) == len(report.plans) == report.searched // 2


def test_a_back_end_in_a_context_and_by_the_environment(tuned, backend, monkeypatch):
    from diffusers.models import attention_dispatch as dispatch

    model, inputs, want = family("Wan")
    active = dispatch._AttentionBackendRegistry._active_backend
    with pytest.raises(ValueError, match="not registered"), dispatch.attention_backend("scram"):
        pass
    report = backend(grid="auto")
    with pytest.raises(KeyError), dispatch.attention_backend("scram"):  # noqa: PT012 - the call comes before
        model(**inputs)
        raise KeyError
    assert dispatch._AttentionBackendRegistry._active_backend == active
    assert sum(report.calls.values()) == 4
    assert (model(**inputs)[0] == want).all()
    assert sum(report.calls.values()) == 4
    monkeypatch.setattr(diffusers.utils.constants, "DIFFUSERS_ATTN_BACKEND", "scram")
    again = backend(grid="auto")
    model(**inputs)
    assert (sum(report.calls.values()), sum(again.calls.values())) == (4, 4)
    ours.unregister()
    assert dispatch._AttentionBackendRegistry._active_backend == active
    assert "scram" not in [member.value for member in dispatch.AttentionBackendName]
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("scram")


def test_a_model_that_asks_for_no_back_end_is_said_to_need_a_patch(backend):
    model, inputs, want = family("SD3")
    report = backend(error=0.05)
    model.set_attention_backend("scram")
    assert (model(**inputs)[0] == want).all()
    assert "need scram.patch_sdpa" in str(report)
    other, inputs, _ = family("Wan")
    other.set_attention_backend("scram")
    other(**inputs)
    assert "patch_sdpa" not in str(report)


def test_padded_text_does_not_reach_the_grid(backend):
    """Of Hunyuan's, in settings that are far from exact."""
    model, inputs, want = family("HunyuanVideo")
    report = backend(search=scram.Search(sweeps=0, seed=0), radius=0, tail=None, impl="reference")
    model.set_attention_backend("scram")
    out = model(**inputs)[0]
    assert report.searched == 2
    assert (out - want).abs().max() > 1e-3
    noise = inputs["encoder_hidden_states"].clone()
    noise[0, 5:] = torch.randn(3, 16)
    mask = inputs["encoder_attention_mask"].bool()
    assert not mask[0, 5:].any()
    others = model(**{**inputs, "encoder_hidden_states": noise})[0]
    torch.testing.assert_close(others, out, rtol=1e-4, atol=1e-4)


class Sampler:
    """Calls a model at timesteps, some times each as guidance does."""

    def __init__(self, times, calls=2):
        self.times, self.calls = times, calls
        self.model, self.inputs, _ = family("Wan")

    def run(self):
        for time in self.times:
            for _ in range(self.calls):
                self.model(**{**self.inputs, "timestep": torch.tensor([time])})


def test_first_steps_and_layers_and_small_calls_are_left_to_torch(tuned, backend):
    sampler = Sampler((9, 7, 4, 1))
    report = backend(error=0.05, dense_steps=2, dense_layers=1)
    sampler.model.set_attention_backend("scram")
    for _ in range(2):  # a sampler that starts again
        sampler.run()
    first, second = (layer for name, layer in report.layers.items() if "attn1" in name)
    assert (first.left_alone, first.searched) == (16, 0)
    assert (second.left_alone, second.searched) == (8, 8)
    assert len(tuned) == 1
    assert "one of the first 2 steps" in str(report)
    assert "one of the first 1 layers" in str(report)
    report = backend(min_tokens=73)
    sampler.run()
    assert report.left_alone == 32
    assert "72 tokens, and min_tokens=73" in str(report)


def test_layers_start_from_the_step_before(backend, monkeypatch):
    sampler, seen = Sampler((9, 7)), []
    run = sdpa.pipeline.run
    monkeypatch.setattr(sdpa.pipeline, "run", lambda call, *args: seen.append(call.request) or run(call, *args))
    tail = scram.Clusters(count=4, keys=8, seed=0)
    backend(keep=True, search=scram.Search(seed=0), tail=tail, impl="reference")
    sampler.model.set_attention_backend("scram")
    with torch.no_grad():
        sampler.run()
        cold, warm = seen[:4], seen[4:]  # two layers, two calls, two steps
        assert all(request.warm is None and request.warm_codebook is None for request in cold)
        assert all(request.warm is not None and request.warm_codebook is not None for request in warm)
        assert len({id(request.warm) for request in warm}) == 4  # each call of a step has its own
        del seen[:]
        sampler.run()
    assert [request.warm is None for request in seen] == [True] * 4 + [False] * 4


@pytest.mark.slow
def test_a_tuned_model_compiles_without_a_break(monkeypatch, backend):
    tune, tuned = planned()
    monkeypatch.setattr(sdpa, "tune", tune)
    torch._dynamo.reset()
    model, inputs, want = family("Flux")
    report = backend(error=0.05)
    model.set_attention_backend("scram")
    model(**inputs)
    with graphs_are(1):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(**inputs)[0], want, rtol=1e-4, atol=1e-4)
    assert [layer.searched for layer in report.layers.values() if layer.grid] == [2, 2]
    assert len(tuned) == 2


def test_all_tokens_of_some_heads_on_each_rank():
    """What runs between the exchanges of Ulysses, and its gradients; text stands between the parts of the ranks."""
    replacement = sdpa.Replacement((4, 6), search=scram.Search(sweeps=0), radius=9, impl="reference")
    forward, backward = ours._parallel(replacement)
    config = SimpleNamespace(context_parallel_config=SimpleNamespace(ulysses_degree=2))
    q, k, v, grad = torch.randn(4, 2, 24, 2, 8).unbind()
    context = SimpleNamespace()
    context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    options = None, 0.0, False, None, False
    out = forward(context, q, k, v, *options, False, _parallel_config=config)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(backward(context, grad), torch.autograd.grad(want, leaves, grad))
    assert replacement.report.searched == 2
    with pytest.raises(ValueError, match="scram returns no lse"):
        forward(context, q, k, v, *options, True, _parallel_config=config)
    text = sdpa.Replacement((4, 5), after=4)
    ours._parallel(text)[0](context, q, k, v, *options, False, _parallel_config=config)
    assert "tokens off the grid stand between those of several ranks" in str(text.report)


def test_a_mask_of_two_axes_is_one_of_keys():
    replacement = sdpa.Replacement((4, 6), search=scram.Search(sweeps=0), radius=9, impl="reference")
    q = torch.randn(2, 24, 2, 8)
    mask = torch.arange(48).reshape(2, 24) % 5 > 0
    out = ours.backend(replacement)(q, q[:, :, :1], q[:, :, :1], mask, enable_gqa=True)
    wide = [x.transpose(1, 2) for x in (q, q[:, :, :1], q[:, :, :1])]
    want = F.scaled_dot_product_attention(*wide, mask[:, None, None], enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, want)
    assert replacement.report.searched == 1


@pytest.mark.parametrize("name", ["native", "", "SCRAM", 3])
def test_names_of_diffusers_are_not_taken(name):
    with pytest.raises((ValueError, TypeError), match="name must be"):
        ours.register(name)


@pytest.mark.slow
def test_a_model_on_two_ranks():
    """Each rank has half of the tokens; its attention has all of them for half of the heads."""
    for off, calls in on_ranks(2, diffusers_jobs.ulysses):
        assert off < 1e-4
        assert calls[1, 1, 96, 12] == "searched"
