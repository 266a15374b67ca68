"""torch's signature by SCRAM: budgets of layers, grids that are found, calls that torch answers."""

import contextlib
import copy
import math
import pickle
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import scram
from scram.integrations import sdpa
from scram.quality.plan import Setting
from support.budgets import Model, picture, planned, tokens
from support.compiling import graphs_are


@pytest.fixture
def tuned(monkeypatch):
    """Calls of `tune`, which gives plans of windows over the whole grid."""
    tune, seen = planned()
    monkeypatch.setattr(sdpa, "tune", tune)
    return seen


@pytest.fixture(autouse=True)
def forgotten():
    yield
    sdpa.clear_plans()


def test_each_layer_is_tuned_once(tuned):
    model, x = Model().eval(), tokens()
    want = model(x)
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        for _ in range(3):
            torch.testing.assert_close(model(x), want)
    assert [shape for shape, _ in tuned] == [(2, 2, 8, 8, 8)] * 2
    assert [(layer.name, layer.grid, layer.tokens.before, layer.calls) for layer in report.layers.values()] == [
        ("blocks.0", (8, 8), 1, 3),
        ("blocks.1", (8, 8), 1, 3),
    ]
    assert "2 of 2 layers tuned for an error of at most 0.1: 2e+03 ms of attention in place of 4e+03 ms" in str(report)
    assert (report.searched, report.dense, report.left_alone) == (6, 0, 0)


def test_plans_are_used_again(tuned, tmp_path):
    model, x = Model().eval(), tokens()
    with scram.patch_sdpa(grid=(8, 8), before=1, error=0.1) as report:
        want = model(x)
    report.plans.save(tmp_path / "plans.json")
    plans = scram.Plans.load(tmp_path / "plans.json")
    assert list(plans) == ["blocks.0", "blocks.1"]
    with scram.patch_sdpa(grid=(8, 8), before=1, error=0.1, plans=plans) as again:
        assert (model(x) == want).all()
    assert len(tuned) == 2
    assert again.plans == plans


def test_a_layer_in_training_is_not_tuned(tuned):
    model, x = Model().train(), tokens()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        model(x)
        assert not tuned
        assert "default settings: it is training" in str(report)
        model.eval()(x)
    assert len(tuned) == 2
    assert all(layer.plan is not None and not layer.why_not for layer in report.layers.values())


def test_what_cannot_be_tuned_says_why(monkeypatch):
    q, module = torch.randn(1, 2, 64, 8), Calling().eval()
    with scram.patch_sdpa(grid=(8, 8), error=0.1) as report:
        module(q, q, q, dropout_p=0.5)
        assert next(iter(report.layers.values())).why_not == "dropout; tuned without it"
        bad = q.clone()
        bad[0, 0, 3, 2] = math.nan
        module(bad[:1], q, q)
    assert "finite" in next(iter(report.layers.values())).why_not


def test_calls_of_no_module_are_not_tuned(tuned):
    q = torch.randn(1, 2, 64, 8)
    with scram.patch_sdpa(grid=(8, 8), error=0.1) as report:
        for batch in (1, 2, 1):
            F.scaled_dot_product_attention(*[q.expand(batch, -1, -1, -1)] * 3)
    assert list(report.layers) == ["no module, q [1, 2, 64, 8]", "no module, q [2, 2, 64, 8]"]
    assert {layer.why_not for layer in report.layers.values()} == {"no module calls; use scram.tune"}
    assert not tuned


def test_layers_of_two_models_are_not_the_same(tuned):
    models, x = [Model().eval(), Model().eval()], tokens()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        for model in (*models, *models):
            model(x)
        models[1].blocks[0](x)  # called by itself it keeps its name
    assert list(report.layers) == ["blocks.0", "blocks.1", "blocks.0 (2)", "blocks.1 (2)"]
    assert [layer.calls for layer in report.layers.values()] == [2, 2, 3, 2]
    assert len(tuned) == 4


def test_plans_of_a_looser_budget_are_refused(tuned):
    model, x = Model().eval(), tokens()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        model(x)
    with pytest.raises(ValueError, match=r"plans must keep the error 0.05, but 'blocks.0' was tuned for 0.1"):
        scram.patch_sdpa(grid="auto", error=0.05, plans=report.plans)


def test_patched_models_are_pickled_and_copied(tuned):
    model, x = Model().eval(), tokens()
    with scram.patch_sdpa(grid="auto", error=0.1):
        want = model(x)
        copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    for one in copies:
        torch.testing.assert_close(one(x), want)


def test_a_module_of_two_lengths_is_two_layers(tuned):
    model = Model().eval()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        for side in (8, 6, 8, 6):
            model(picture(side, side))
    assert list(report.layers) == ["blocks.0", "blocks.1", "blocks.0, 36 tokens", "blocks.1, 36 tokens"]
    assert len(tuned) == 4


class Calling(nn.Module):
    """Calls torch's function as it is told."""

    def forward(self, q, k, v, **how):
        return F.scaled_dot_product_attention(q, k, v, **how)


def test_how_a_call_is_tuned(tuned):
    q = torch.randn(1, 2, 65, 8)
    with scram.patch_sdpa(grid=(8, 8), before=1, error=0.1, radius=2, impl="reference"):
        Calling().eval()(q, q, q, is_causal=True, scale=0.3)
    how = tuned[0][1]
    assert {name: how[name] for name in ("radius", "impl", "causal", "scale", "key_mask")} == {
        "radius": (2, 2),
        "impl": "reference",
        "causal": True,
        "scale": 0.3,
        "key_mask": None,
    }
    assert (how["extra"][0] == q[:, :, :1]).all()


def test_really_tuned():
    model, x = Model().eval().requires_grad_(False), picture(16, 16)
    want = model(x)
    with scram.patch_sdpa(grid="auto", error=0.02) as report:
        out = model(x)
    assert len(report.plans) == 2
    assert float((out - want).norm() / want.norm()) < 0.02


def test_an_outer_patch_does_not_see_how_layers_are_tuned():
    """Windows of one key would be the truth that they are compared with."""
    model, x = Model().eval(), tokens(1024)
    search = scram.Search(sweeps=0, seed=0)
    with (
        scram.patch_sdpa(grid=(32, 32), search=search, radius=0, tail=None) as outer,
        scram.patch_sdpa(grid=(32, 32), error=0.05) as inner,
    ):
        model(x)
    assert all(plan.rungs[0].error is None or plan.rungs[0].error[0] > 0.05 for plan in inner.plans.values())
    assert sum(outer.calls.values()) <= 2


def test_contexts_within_each_other(tuned):
    model, x = Model().eval(), tokens(64)
    with scram.patch_sdpa(grid=(8, 8), error=0.1) as outer:
        model(x)
        with scram.patch_sdpa(grid=(8, 8), error=0.2) as inner:
            model(x)
        model(x)
    assert [layer.calls for layer in outer.layers.values()] == [2, 2]
    assert [layer.calls for layer in inner.layers.values()] == [1, 1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_inside_removes_the_hooks(tuned):
    model, x = Model().eval(), tokens(64)
    with contextlib.suppress(KeyError), scram.patch_sdpa(grid="auto", error=0.1):
        model(x)
        assert model.blocks[0]._forward_hooks
        raise KeyError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_two_threads_do_not_see_each_other(tuned):
    model, together, reports = Model().eval(), threading.Barrier(2), {}

    def run(number, error):
        x = picture(*number)
        with scram.patch_sdpa(grid="auto", error=error) as report:
            for _ in range(5):
                together.wait()
                model(x)
        reports[number] = report

    threads = [threading.Thread(target=run, args=args) for args in (((8, 8), 0.1), ((4, 9), 0.2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reports) == [(4, 9), (8, 8)]
    for grid, report in reports.items():
        assert [layer.grid for layer in report.layers.values()] == [grid] * 2
        assert [layer.calls for layer in report.layers.values()] == [5, 5]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
def test_a_tuned_model_compiles_without_a_break(tuned):
    model, x = Model().eval(), tokens()
    want = model(x)
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        model(x)
        with graphs_are(1):
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(compiled(x), want)
    assert len(tuned) == 2
    assert [layer.calls for layer in report.layers.values()] == [2, 2]  # noted while it compiles


@pytest.mark.slow
def test_a_model_compiled_first_runs_the_default_and_says_so(tuned):
    model, x = Model().eval(), tokens()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
    assert report.layers["compiled"].why_not == "compiled before it was tuned"
    assert len(tuned) == 2  # by the call that was not compiled


@pytest.mark.slow
def test_plans_for_a_model_that_is_compiled_first(tuned):
    model, x = Model().eval(), tokens()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        want = model(x)
    torch._dynamo.reset()
    with scram.patch_sdpa(grid="auto", error=0.1, plans=report.plans, model=model) as again:
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), want)
    assert again.plans == report.plans
    assert len(tuned) == 2


class Checkpointed(Model):
    """Its blocks are computed again in the backward pass, when the model around them is not running."""

    reentrant = False

    def forward(self, x):
        x = x.flatten(2).mT
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


SPARSE = {"search": scram.Search(seed=0), "radius": 0, "tail": None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_on_the_grid_that_was_found(reentrant):
    plain, model = Model(), Checkpointed()
    model.load_state_dict(plain.state_dict())
    model.reentrant = reentrant
    grads = []
    for one in (plain, model):
        x = picture(4, 16).requires_grad_()
        with scram.patch_sdpa(grid="auto", **SPARSE) as report:
            one(x).square().sum().backward()
        grads.append([x.grad, *(weight.grad for weight in one.parameters())])
        assert (report.searched, report.left_alone) == (2 + 2 * (one is model), 0)
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("measured", [False, True])
def test_a_checkpoint_of_a_layer_that_is_tuned(tuned, measured):
    model = Checkpointed().train(not measured)
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        model(picture(4, 16).requires_grad_()).sum().backward()
    assert len(tuned) == 2 * measured
    assert [layer.grid for layer in report.layers.values()] == [(4, 16)] * 2
    assert report.left_alone == 0


def under_flop_counter(model, x):
    with FlopCounterMode(display=False):
        return model(x)


NOTHING_TO_MEASURE = {
    "meta": lambda model, x: model.to("meta")(x.to("meta")),
    "vmap": lambda model, x: torch.vmap(model)(x[None]),
    "dispatch mode": under_flop_counter,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", NOTHING_TO_MEASURE)
def test_what_holds_no_numbers_is_not_tuned(name):
    model, x = Model().eval(), tokens(64)
    with scram.patch_sdpa(grid=(8, 8), error=0.1) as report:
        out = NOTHING_TO_MEASURE[name](model, x)
    assert out.shape[-2:] == (64, 16)
    assert not report.plans
    reasons = {layer.why_not for layer in report.layers.values()}
    assert reasons == {"meta tensors, a dispatch mode or torch.func; tuned outside of them"}


@pytest.mark.filterwarnings("ignore")
def test_a_trace_is_torchs():
    model, x = Model().eval(), tokens(64)
    with scram.patch_sdpa(grid=(8, 8), **SPARSE) as report:
        traced = torch.jit.trace(model, (x,), check_trace=False)
    torch.testing.assert_close(traced(x), model(x))
    assert "torch.jit.trace, which keeps no shapes" in str(report)


@pytest.mark.slow
def test_a_compiled_model_is_given_pictures_of_several_sizes():
    """As many tokens may have other extents; and torch turns sizes that change into symbols."""
    model = Model().eval()
    torch._dynamo.reset()
    with scram.patch_sdpa(grid="auto", **SPARSE) as report:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for size in ((4, 16), (16, 4), (6, 8), (8, 8)):
            x = picture(*size)
            torch.testing.assert_close(compiled(x), model(x))
    assert report.left_alone == 0
    torch._dynamo.reset()


def test_survey_replaces_nothing(tuned):
    model, x = Model().train(), tokens(64)
    want = model.eval()(x)
    model.train()
    model.blocks[1].eval()
    report = scram.survey(model, x, error=0.1)
    assert len(report.plans) == len(tuned) == 2
    assert [module.training for module in model.blocks] == [True, False]
    assert "2 x q [2, 2, 64, 8]: left to torch: surveyed" in str(report)
    seen = []
    scram.survey(nn.Sequential(model, nn.Identity()).eval(), (x,), error=0.1)
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    scram.survey(model, {"x": x}, error=0.1)
    assert (seen[0] == want).all()


def test_tokens_of_no_picture_are_left_to_torch():
    """A square number of tokens is no picture."""
    q, module = torch.randn(1, 1, 4096, 8), Calling().eval()
    with scram.patch_sdpa(grid="auto") as report:
        for number in (4096, 100):
            module(*[q[:, :, :number]] * 3)
        module(*[q[:, :, :64]] * 3, is_causal=True)
        module(q, *[q[:, :, :77]] * 2)
    assert (report.searched, report.dense, report.left_alone) == (0, 0, 4)
    assert [call.why_not.split(",")[0] for call in report.calls] == [
        "4096 tokens",
        "100 tokens",
        "causal order",
        "4096 queries and 77 keys",
    ]
    assert "no picture is known that they are patches of; pass grid=(height, width) and before=" in str(report)


@pytest.mark.parametrize("how", [{}, {"error": 0.1}])
def test_searched_dense_and_left_to_torch_are_counted_apart(monkeypatch, how):
    """As the default on a small grid, and as plans, chose dense attention."""
    tune, _ = planned(dense=True)
    monkeypatch.setattr(sdpa, "tune", tune)
    q, module = torch.randn(1, 2, 64, 8), Calling().eval()
    with scram.patch_sdpa(grid=(8, 8), **how) as report:
        for _ in range(4):
            out = module(q, q, q)
        module(q, q, q, attn_mask=torch.randn(64, 64))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))
    assert (report.searched, report.dense, report.left_alone) == (0, 4, 1)
    lines = str(report).splitlines()
    assert lines[0] == "5 calls of scaled_dot_product_attention: 0 searched, 4 dense, 1 left to torch"
    assert lines[1] == "  4 x q [1, 2, 64, 8]: dense"
    assert [(one.searched, one.dense, one.left_alone) for one in report.layers.values()] == [(0, 4, 1)] * bool(how)


def test_clusters_without_a_search_are_counted_as_such(monkeypatch):
    q, module = torch.randn(1, 2, 64, 8), Calling().eval()
    clusters = scram.Clusters(count=8, keys=16, seed=0)
    grid = q.reshape(1, 2, 8, 8, 8)
    want = scram.attention(grid, grid, grid, search=None, tail=clusters).flatten(2, 3)
    with scram.patch_sdpa(grid=(8, 8), search=None, tail=clusters) as report:
        torch.testing.assert_close(module(q, q, q), want)
    assert (report.searched, report.clustered, report.dense, report.left_alone) == (0, 1, 0, 0)
    assert str(report).splitlines() == [
        "1 calls of scaled_dot_product_attention: 0 searched, 1 clustered, 0 dense, 0 left to torch",
        "  1 x q [1, 2, 64, 8]: clustered",
    ]

    def tune(*given, **how):
        plan = planned()[0](*given, **how)
        return replace(plan, rungs=(replace(plan.rungs[0], setting=Setting(None, clusters)), plan.rungs[1]))

    monkeypatch.setattr(sdpa, "tune", tune)
    with scram.patch_sdpa(grid=(8, 8), error=0.1) as report:
        torch.testing.assert_close(module(q, q, q), want)
    layer = report.layers["Calling"]
    assert (layer.searched, layer.clustered, layer.dense, layer.calls) == (0, 1, 0, 1)
    assert "no search, 8 clusters + 16 keys" in str(report)


@pytest.mark.parametrize("tail", ["auto", None])
def test_without_a_search_other_tails_are_counted_as_dense(tail):
    q = torch.randn(1, 2, 64, 8)
    with scram.patch_sdpa(grid=(8, 8), search=None, tail=tail) as report:
        out = F.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))
    assert (report.searched, report.clustered, report.dense) == (0, 0, 1)


def test_a_layer_that_is_left_to_torch_has_its_line(tuned):
    q, module = torch.randn(1, 2, 64, 8), Calling().eval()
    with scram.patch_sdpa(grid=(8, 8), error=0.1) as report:
        module(q, q[:, :, :9], q[:, :, :9])
        assert not report.layers["Calling"].grid
        assert "left to torch: 64 queries and 9 keys" in str(report).splitlines()[3]
        assert "0 of 0 layers tuned for an error of at most 0.1, 1 left to torch" in str(report)
        module(q, q, q)
    layer = report.layers["Calling"]
    assert (layer.grid, layer.why_not, layer.searched, layer.left_alone) == ((8, 8), "", 1, 1)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"scale": 0.2},
        {"attn_mask": torch.randn(65, 65)},
        {"attn_mask": torch.ones(65, 65, dtype=torch.bool).tril()},
    ],
)
def test_a_function_of_torch_s_signature(how):
    q, k, v = torch.randn(3, 2, 4, 65, 8).unbind()
    ours = scram.scaled_dot_product_attention(q, k, v, **how, grid=(8, 8), before=1)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **how))
    grouped = scram.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True, grid=(8, 8), before=1)
    torch.testing.assert_close(grouped, F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True))


def test_a_function_warns_where_it_finds_no_picture():
    q = torch.randn(1, 2, 64, 8)
    for error in (None, 0.1):
        with pytest.warns(UserWarning, match="leaves a call to torch: 64 tokens, and no picture is known") as caught:
            out = scram.scaled_dot_product_attention(q, q, q, grid="auto", error=error)
        assert caught[0].filename == __file__
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"grid": None}, ValueError, "grid must be a sequence"),
        ({"grid": (10**30, 10**30)}, ValueError, r"grid\[0\] must be below 2\*\*63"),
        ({"before": 10**30}, ValueError, r"before must be below 2\*\*63"),
        ({"error": [0.1]}, TypeError, "error must be a float, got list"),
        ({"error": 10**400}, ValueError, "error must fit a float"),
    ],
)
def test_a_function_refuses_wrong_settings(change, kind, message):
    q = torch.randn(1, 2, 64, 8)
    with pytest.raises(kind, match=message):
        scram.scaled_dot_product_attention(q, q, q, **{"grid": (8, 8), **change})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("grid", [(8, 8), "auto"])
def test_a_function_refuses_nested_tensors(layout, grid):
    q = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (20, 7)], layout=layout).transpose(1, 2)
    with pytest.raises(TypeError, match=r"query must be a dense tensor, got a nested one; pad it .*attn_mask"):
        scram.scaled_dot_product_attention(q, q, q, grid=grid)


def test_a_function_refuses_another_grid():
    q = torch.randn(1, 2, 64, 8)
    with pytest.raises(ValueError, match="must have the tokens of the grid, 8 x 7 = 56, got 64 and 64"):
        scram.scaled_dot_product_attention(q, q, q, grid=(8, 7))


def test_a_function_with_a_budget(tuned):
    function = partial(scram.scaled_dot_product_attention, grid="auto", error=0.1)
    model, x = Model(function=function).eval(), tokens()
    plain = Model().eval()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
    assert len(tuned) == 2
    sdpa.clear_plans()
    assert not any(module._forward_hooks for module in model.modules())
    model(x)
    assert len(tuned) == 4


@pytest.mark.slow
def test_a_function_with_a_budget_compiles(tuned):
    function = partial(scram.scaled_dot_product_attention, grid=(8, 8), before=1, error=0.1)
    model, x = Model(function=function).eval(), tokens()
    want = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), want)
    assert len(tuned) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"grid": (8, 8), "before": 1}, {"grid": "auto"}, {"grid": "auto", "error": 0.1}])
def test_a_function_compiles_at_its_first_call(how, tuned):
    model, x = Model(function=partial(scram.scaled_dot_product_attention, **how)).eval(), tokens()
    plain = Model().eval()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))
    assert not tuned
    model(x)
    torch.testing.assert_close(compiled(x), plain(x))
    assert len(tuned) == (2 if "error" in how else 0)


def test_names_are_looked_for_once(tuned, monkeypatch):
    looked = []
    monkeypatch.setattr(sdpa, "name_in", lambda root, module: looked.append(module) or f"layer {len(looked)}")
    model, x = Model().eval(), tokens()
    with scram.patch_sdpa(grid="auto", error=0.1) as report:
        for _ in range(3):
            model(x)
    assert looked == list(model.blocks)
    assert list(report.layers) == ["layer 1", "layer 2"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"error": -1.0}, "error must be"),
        ({"error": 0.1, "search": scram.Search()}, "error chooses search and tail"),
        ({"error": 0.1, "tail": None}, "error chooses search and tail"),
        ({"plans": scram.Plans()}, "plans keep an error budget"),
        ({"error": 0.1, "plans": {}}, "plans must be a scram.Plans"),
        ({"grid": "square"}, "grid must be one of"),
        ({"grid": "auto", "before": 1}, "before is found with"),
    ],
)
def test_wrong_settings_are_refused(how, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scram.patch_sdpa(**{"grid": (8, 8), **how})
