"""SCRAM inside models that call torch's attention: what is replaced, what is left alone, and what the report says."""

import contextlib
import functools
import pickle
import re
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils.checkpoint import checkpoint

import scram
from support.compiling import graphs_are

GRID = (4, 5)
WHOLE = {"grid": GRID, "search": scram.Search(sweeps=0), "radius": 99}  # every window covers the grid


def tensors(tokens=21, heads=2, key_heads=2, dtype=torch.float32):
    shapes = [(2, heads, tokens, 8), (2, key_heads, tokens, 8), (2, key_heads, tokens, 6)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


TAKEN = {
    "plain": (0, {}, {}),
    "class token": (1, {}, {}),
    "registers": (5, {}, {"scale": 0.3}),
    "causal": (0, {}, {"is_causal": True}),
    "causal after a prefix": (3, {}, {"is_causal": True}),
    "grouped heads": (2, {"heads": 4}, {"enable_gqa": True}),
    "key mask": (0, {}, {"attn_mask": torch.arange(40).reshape(2, 1, 1, 20) % 3 > 0}),
    "a key mask for each head": (0, {}, {"attn_mask": torch.arange(80).reshape(2, 2, 1, 20) % 3 > 0}),
    "one key mask for all": (0, {}, {"attn_mask": torch.arange(20).reshape(1, 20) % 3 > 0}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_covering_window_changes_nothing(name):
    prefix, shape, how = TAKEN[name]
    leaves = tensors(prefix + 20, **shape)
    want = F.scaled_dot_product_attention(*leaves, **how)
    with scram.patch_sdpa(**WHOLE, before=prefix) as report:
        for function in (F.scaled_dot_product_attention, imported):
            out = function(*leaves, **how)
            torch.testing.assert_close(out, want)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            torch.testing.assert_close(grads, torch.autograd.grad(want.square().sum(), leaves, retain_graph=True))
    assert (report.searched, report.left_alone) == (2, 0)
    assert (F.scaled_dot_product_attention(*leaves, **how) == want).all()


def test_three_axes():
    q, k, v = (x[:, 0] for x in tensors())
    with scram.patch_sdpa(**WHOLE, before=1) as report:
        out = F.scaled_dot_product_attention(q, k, v)
    assert report.searched == 1
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


def test_it_is_scram_that_answers():
    q, k, v = tensors(20)
    search = scram.Search(seed=3)
    with scram.patch_sdpa(grid=GRID, search=search, radius=0):
        out = F.scaled_dot_product_attention(q, k, v)
    parts = [x.unflatten(2, GRID) for x in (q, k, v)]
    assert (out.unflatten(2, GRID) == scram.attention(*parts, search=search, radius=0)).all()


@pytest.mark.parametrize("tail", ["auto", scram.DrawnKeys(samples=64, seed=1)], ids=["auto", "DrawnKeys"])
def test_dropout_beside_drawn_keys(tail):
    q, k, v = tensors(20)
    search = scram.Search(seed=3)
    how = {"search": search, "radius": 0, "tail": tail}
    with scram.patch_sdpa(grid=GRID, **how) as report:
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
    assert report.searched == 1
    torch.manual_seed(1)
    parts = [x.unflatten(2, GRID) for x in (q, k, v)]
    assert torch.equal(out.unflatten(2, GRID), scram.attention(*parts, causal=True, dropout_p=0.3, **how))


LEFT = {
    "another length": (tensors(19), {}, r"19 queries and 19 keys, the grid has 1 \+ 4 x 5 = 21"),
    "fewer keys": ([x[:, :, :n] for x, n in zip(tensors(), (21, 9, 9), strict=True)], {}, "21 queries and 9 keys"),
    "a dropout of everything": (tensors(), {"dropout_p": 1.0}, "a dropout of 1.0"),
    "a rough float bias": (tensors(), {"attn_mask": torch.randn(21, 21)}, "a float bias that 10 features leave"),
    "a negative scale": (tensors(), {"scale": -1.0}, "a scale of -1.0"),
    "heads that broadcast": (tensors(key_heads=1), {}, "broadcast"),
    "five axes": ([x.unsqueeze(0) for x in tensors()], {}, "5 axes"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name):
    leaves, how, why = LEFT[name]
    want = F.scaled_dot_product_attention(*leaves, **how)
    with scram.patch_sdpa(**WHOLE, before=1) as report:
        out = F.scaled_dot_product_attention(*leaves, **how)
    assert (out == want).all()
    assert (report.searched, report.left_alone) == (0, 1)
    assert re.search(why, next(iter(report.calls)).why_not)


def test_a_mask_between_queries_is_left_alone():
    leaves = tensors(20)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    with scram.patch_sdpa(**WHOLE) as report:
        F.scaled_dot_product_attention(*leaves, mask)
        F.scaled_dot_product_attention(*(x[:, 0] for x in leaves), mask[:, :1].T.logical_not())
    assert [call.why_not for call in report.calls] == ["a mask that differs between queries", ""]


def test_torch_still_says_what_is_wrong():
    q, k, v = tensors()
    with scram.patch_sdpa(**WHOLE, before=1), pytest.raises(RuntimeError, match="dtype"):
        F.scaled_dot_product_attention(q, k.double(), v)
    mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    with scram.patch_sdpa(**WHOLE | {"grid": (21,)}), pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    with scram.patch_sdpa(**WHOLE, before=1) as report, contextlib.suppress(RuntimeError):
        F.scaled_dot_product_attention(q, k.to("meta"), v)
    assert next(iter(report.calls)).why_not == "tensors on several devices"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_ragged_tensors_are_left_alone(layout):
    if layout == torch.jagged:
        q = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (20, 7)], layout=layout).transpose(1, 2)
    else:
        q = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (20, 7)])
    want = F.scaled_dot_product_attention(q, q, q)
    with scram.patch_sdpa(**WHOLE) as report:
        out = F.scaled_dot_product_attention(q, q, q)
    assert all((one == other).all() for one, other in zip(out.unbind(), want.unbind(), strict=True))
    assert next(iter(report.calls)).why_not == "tensors that are not dense"
    assert "tensors that are not dense" in str(report)


def test_dropout_reaches_prefix_and_grid():
    """Of values of one: without dropout the output is one too."""
    q, k, v = tensors()
    with scram.patch_sdpa(**WHOLE, before=1):
        out = F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5)
    for part in (out[:, :, :1], out[:, :, 1:]):
        assert (part - 1).abs().max() > 0.1


def test_settings_go_along(monkeypatch):
    seen = {}
    run = scram.core.pipeline.run
    monkeypatch.setattr("scram.core.pipeline.run", lambda *x: seen.update(x[0].request._asdict()) or run(*x))
    settings = {"search": scram.Search(sweeps=1), "radius": (0, 2), "impl": "reference"}
    with scram.patch_sdpa(grid=GRID, **settings):
        F.scaled_dot_product_attention(*tensors(20), scale=0.7)
    assert {name: seen[name] for name in (*settings, "scale")} == {**settings, "scale": 0.7}


@pytest.mark.parametrize("how", ["backward", "reentrant backward", "grad"])
def test_a_checkpoint_inside_computes_the_same_again(how):
    """The second time it runs while torch handles a call that the patch sees, too."""
    q, k, v = tensors(20)
    with scram.patch_sdpa(grid=GRID, search=scram.Search(), radius=0) as report:
        out = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=how.startswith("reentrant"))
        loss = out.square().sum()
        _ = torch.autograd.grad(loss, q) if how == "grad" else loss.backward()
    assert (report.searched, report.left_alone) == (2, 0)


@pytest.mark.parametrize("inner", [True, False])
def test_another_mode_stands_beside_it(inner):
    """`torch.device` as a context is a mode, too."""
    q, k, v = tensors(20)
    with contextlib.ExitStack() as stack:
        report = None if inner else stack.enter_context(scram.patch_sdpa(grid=GRID, search=scram.Search(), radius=0))
        stack.enter_context(torch.device("cpu"))
        report = report or stack.enter_context(scram.patch_sdpa(grid=GRID, search=scram.Search(), radius=0))
        checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False).square().sum().backward()
    assert (report.searched, report.left_alone) == (2, 0)
    assert (v.grad != 0).any()


def test_the_report_does_not_grow_with_the_calls():
    q, k, v = tensors(20)
    sizes = []
    with scram.patch_sdpa(**WHOLE) as report:
        for _ in range(3):
            for _ in range(50):
                F.scaled_dot_product_attention(q, k, v)
                F.scaled_dot_product_attention(q, k[:, :, :9], v[:, :, :9])
            sizes.append(len(pickle.dumps(report)))
    assert (report.searched, report.left_alone) == (150, 150)
    assert len(report.calls) == 2
    assert report.calls[scram.integrations.sdpa.Call((2, 2, 20, 8), (2, 2, 20, 8), "")] == 150
    assert sizes[2] <= sizes[0] + 4  # the digits of the counts
    assert str(report).splitlines()[:2] == [
        "300 calls of scaled_dot_product_attention: 150 searched, 0 dense, 150 left to torch",
        "  150 x q [2, 2, 20, 8]: searched",
    ]


def plain_wrapper(function, seen):
    return lambda *args, **kwargs: seen.append("plain") or function(*args, **kwargs)


def documented_wrapper(function, seen):
    return functools.wraps(function)(plain_wrapper(function, seen))


def bound_wrapper(function, seen):
    """A C callable that keeps no `__wrapped__`; on the class a descriptor makes it a method."""

    def before(function, *args, **kwargs):
        return seen.append("partial") or function(*args, **kwargs)

    return functools.partial(before, function)


WRAPPERS = {"plain": plain_wrapper, "functools.wraps": documented_wrapper, "partial": bound_wrapper}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("owner", ["Tensor.backward", "autograd.backward", "autograd.grad", "all"])
@pytest.mark.parametrize("again", [None, True, False], ids=["no checkpoint", "reentrant", "checkpoint"])
def test_another_library_wraps_backward(monkeypatch, wrapper, owner, again):
    """A wrapper runs once for each call, and a checkpoint computes again with SCRAM."""
    q, k, v = tensors(20)
    seen = []
    for holder, name in ((torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad")):
        if owner in ("all", f"{holder.__name__.removeprefix('torch.')}.{name}"):
            wrapped = WRAPPERS[wrapper](getattr(holder, name), seen)
            if holder is torch.Tensor and wrapper == "partial":
                wrapped = functools.partialmethod(wrapped)
            monkeypatch.setattr(holder, name, wrapped)
    with scram.patch_sdpa(grid=GRID, search=scram.Search(), radius=0) as report:
        call = F.scaled_dot_product_attention
        out = call(q, k, v) if again is None else checkpoint(call, q, k, v, use_reentrant=again)
        loss = out.square().sum()
        if owner == "autograd.grad" and again is not True:  # the older checkpoint has no grad
            assert len(torch.autograd.grad(loss, (q, k, v))) == 3
        else:
            loss.backward()
            assert (v.grad != 0).any()
    assert (report.searched, report.left_alone) == (1 if again is None else 2, 0)
    inner = 1 if again is True else 0  # the older checkpoint calls torch.autograd.backward itself
    wants = {"Tensor.backward": 1, "autograd.backward": 1 + inner, "autograd.grad": again is not True, "all": 2 + inner}
    assert len(seen) == wants[owner]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_another_library_wraps_attention(monkeypatch, wrapper):
    mha, x, seen = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 20, 16), []
    for name in ("scaled_dot_product_attention", "multi_head_attention_forward"):
        monkeypatch.setattr(F, name, WRAPPERS[wrapper](getattr(F, name), seen))
    want = mha(x, x, x, need_weights=False)[0]
    with scram.patch_sdpa(**WHOLE) as report:
        torch.testing.assert_close(mha(x, x, x, need_weights=False)[0], want)
        F.scaled_dot_product_attention(*tensors(20))
    assert (report.searched, report.left_alone) == (2, 0)
    assert not report.warning


def renamed():
    """nn.MultiheadAttention's function as it would be if torch called its attention by another name."""
    code = F.multi_head_attention_forward.__code__
    names = tuple("_another" if name == "scaled_dot_product_attention" else name for name in code.co_names)
    function = types.FunctionType(code.replace(co_names=names), vars(F), code.co_name)
    function.__defaults__, function.__kwdefaults__ = F.multi_head_attention_forward.__defaults__, None
    return function


@pytest.mark.parametrize("wrapper", [None, *WRAPPERS])
def test_a_renamed_inner_call_is_reported(monkeypatch, wrapper):
    """At once where the function can be seen, at its first call where a wrapper hides it; once."""
    mha, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 20, 16)
    function = renamed() if wrapper is None else WRAPPERS[wrapper](renamed(), [])
    monkeypatch.setattr(F, "_another", F.scaled_dot_product_attention, raising=False)
    monkeypatch.setattr(F, "multi_head_attention_forward", function)
    want = mha(x, x, x, need_weights=False)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context = scram.patch_sdpa(**WHOLE)
        assert len(caught) == (wrapper in (None, "functools.wraps"))
        with context as report:
            for _ in range(2):
                assert (mha(x, x, x, need_weights=False)[0] == want).all()
    assert [one.category for one in caught] == [RuntimeWarning]
    assert "does not call scaled_dot_product_attention by that name" in str(caught[0].message)
    assert caught[0].filename == __file__ or wrapper in ("plain", "partial")
    assert str(report).splitlines()[-1].startswith("warning: torch ")
    assert "GridAttention.from_mha" in str(report)


class Tagged(torch.Tensor):
    """A tensor of the caller's own class."""


def test_multihead_attention_as_a_function():
    """With nothing but what it needs, and with tensors of another class."""
    mha, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 20, 16)
    needed = (16, 2, mha.in_proj_weight, mha.in_proj_bias, None, None, False, 0.0, *mha.out_proj.parameters())
    with scram.patch_sdpa(**WHOLE) as report:
        assert F.multi_head_attention_forward(*[x.transpose(0, 1)] * 3, *needed)[1] is not None
        mine = x.as_subclass(Tagged)
        mha(mine, mine, mine, need_weights=False)
    assert report.searched == 1


class ClassToken(nn.Module):
    """A vision transformer with a class token, of torch's own layers."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        points = self.embed(x).flatten(2).mT
        return self.layers(torch.cat([self.token.expand(len(x), -1, -1), points], 1))[:, 0]


@pytest.mark.parametrize("training", [True, False])
def test_vision_transformer_with_a_class_token(training):
    model, x = ClassToken().train(training), torch.randn(2, 3, 16, 20)
    with torch.set_grad_enabled(training):
        want = model(x)
        with scram.patch_sdpa(**WHOLE, before=1) as report:
            out = model(x)
    assert (report.searched, report.left_alone) == (2, 0)
    torch.testing.assert_close(out, want)
    assert str(report).splitlines()[1] == "  2 x q [2, 2, 21, 8]: searched"


def test_returned_weights_are_reported():
    mha, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 20, 16)
    want = mha(x, x, x)
    with scram.patch_sdpa(**WHOLE) as report:
        torch.testing.assert_close(mha(x, x, x), want)
    assert "need_weights=False" in str(report)


@pytest.mark.slow
def test_compiled_model():
    model, x = ClassToken(), torch.randn(2, 3, 16, 20)
    want = model(x)
    with graphs_are(1):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with scram.patch_sdpa(**WHOLE, before=1) as report:
            for _ in range(2):
                torch.testing.assert_close(compiled(x), want)
    assert str(report).splitlines()[1] == "  2 x compiled: searched"  # noted while it compiles


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


class SelfAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention of one argument."""

    def __init__(self):
        super().__init__(16, 2, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


FAST_PATHS = {
    "layer": encoder_layer,
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False),
    "attention": SelfAttention,
}


@pytest.mark.parametrize("name", FAST_PATHS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_modules_with_a_fast_path_of_torch_are_patched(name, compiled):
    """In eval mode without gradients torch runs the whole layer as one operator, which calls no attention."""
    model, x = FAST_PATHS[name]().eval(), torch.randn(2, 20, 16)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    how = {"grid": GRID, "search": scram.Search(sweeps=0), "radius": 0, "tail": None}  # each query its own key
    with torch.no_grad():
        want = run(x)
        with scram.patch_sdpa(**how) as report:
            out = run(x)
        assert (report.searched, report.left_alone) == (1, 0)
        assert not torch.allclose(out, want, atol=1e-3)
        torch.testing.assert_close(run(x), want)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_comes_back_with_the_last_context():
    with scram.patch_sdpa(**WHOLE):
        assert not torch.backends.mha.get_fastpath_enabled()
        with contextlib.suppress(KeyError), scram.patch_sdpa(**WHOLE):
            raise KeyError
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with scram.patch_sdpa(**WHOLE):
            pass
        assert not torch.backends.mha.get_fastpath_enabled()  # as it was
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_fast_path_that_is_taken_is_reported():
    """As it is where torch's operator is called by its name."""
    mha, x = SelfAttention().eval(), torch.randn(2, 20, 16)
    weights = (mha.in_proj_weight, mha.in_proj_bias, mha.out_proj.weight, mha.out_proj.bias)
    with torch.no_grad(), scram.patch_sdpa(**WHOLE) as report:
        torch._native_multi_head_attention(x, x, x, 16, 2, *weights)
    assert "1 x q [2, 20, 16]: left to torch: torch's fast path of a whole layer" in str(report)


def test_other_threads_are_left_alone():
    leaves, results = tensors(20), []
    want = F.scaled_dot_product_attention(*leaves)
    with scram.patch_sdpa(grid=GRID, search=scram.Search(), radius=0) as report:
        thread = threading.Thread(target=lambda: results.append(F.scaled_dot_product_attention(*leaves)))
        thread.start()
        thread.join()
    assert (results[0] == want).all()
    assert not report.calls


def test_an_error_inside_ends_the_patch():
    with pytest.raises(KeyError), scram.patch_sdpa(**WHOLE):
        raise KeyError
    leaves = tensors(20)
    with scram.patch_sdpa(**WHOLE) as report:
        pass
    F.scaled_dot_product_attention(*leaves)
    assert not report.calls


def test_autocast():
    leaves = tensors()
    with torch.autocast("cpu", torch.bfloat16), scram.patch_sdpa(**WHOLE, before=1) as report:
        assert F.scaled_dot_product_attention(*leaves).dtype == torch.bfloat16
    assert report.searched == 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"grid": (4, 0)}, r"grid\[1\] must be at least 1, got 0"),
        ({"grid": 16}, r"grid must be a sequence of 1 to 4 extents"),
        ({"before": -1}, r"before must be at least 0"),
        ({"radius": -1}, r"radius must be at least 0"),
        ({"search": 3}, r"search must be a scram.Search"),
        ({"impl": "cuda"}, r"impl must be one of"),
    ],
)
def test_wrong_settings_are_refused(how, message):
    with pytest.raises((ValueError, TypeError), match=message), scram.patch_sdpa(**{"grid": GRID, **how}):
        pass
