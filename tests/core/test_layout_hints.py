"""Tensors in another layout: a warning with the line that mends it, once, and none where the layout is plausible."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import scram
from scram.core import layout_hints
from scram.core.layout_hints import LayoutWarning, warn_about_layout
from scram.nn import GridAttention, NonLocalBlock

WRONG = {  # shape of q -> the line that mends it, and the shape that it gives
    (2, 4096, 8, 64): ("q.transpose(1, 2).unflatten(2, (64, 64))", (2, 8, 64, 64, 64)),
    (2, 600, 8, 64): ("q.transpose(1, 2)", (2, 8, 600, 64)),
    (2, 128, 64, 64): ("q.movedim(1, -1).unsqueeze(1)", (2, 1, 64, 64, 128)),
    (2, 64, 64, 8, 32): ("q.movedim(-2, 1)", (2, 8, 64, 64, 32)),
    (2, 8, 64, 512, 512): ("q.movedim(2, -1)", (2, 8, 512, 512, 64)),
    (2, 8, 576, 64): ("q.unflatten(2, (24, 24))", (2, 8, 24, 24, 64)),
    (2, 8, 577, 64): ("q[:, :, 1:].unflatten(2, (24, 24))", (2, 8, 24, 24, 64)),
    (2, 6, 1374, 64): ("q[:, :, 5:].unflatten(2, (37, 37))", (2, 6, 37, 37, 64)),
}
RIGHT = [
    (2, 8, 64, 64, 64),
    (2, 8, 16000, 64),  # a sequence
    (2, 8, 1500, 64),
    (1, 32, 128, 128),  # a language model's heads and tokens, 1 + 127 is no square
    (2, 8, 4, 4, 64),
    (2, 20, 8, 8, 64),
    (2, 12, 2, 3, 64),
    (2, 4, 8, 28, 28, 64),
    (1, 1, 512, 512, 512),
    (1, 1, 480, 640, 363),
    (2, 16, 16, 16, 64),
    (2, 3, 49, 8),
]


@pytest.fixture(autouse=True)
def _forgotten():
    layout_hints.clear()


def caught(call, *args):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args)
    return found


@pytest.mark.parametrize("shape", WRONG, ids=str)
def test_another_layout_is_mended(shape):
    line, mended = WRONG[shape]
    (found,) = caught(warn_about_layout, shape, shape)
    assert found.category is LayoutWarning
    assert issubclass(LayoutWarning, UserWarning)
    assert found.filename == __file__
    assert line in str(found.message)
    assert eval(line, {"q": torch.empty(shape, device="meta")}).shape == mended
    layout_hints.clear()
    assert not caught(warn_about_layout, mended, mended)


@pytest.mark.parametrize("shape", RIGHT, ids=str)
def test_a_plausible_layout_is_left_alone(shape):
    assert not caught(warn_about_layout, shape, shape)


def test_prefix_tokens_are_extra_keys():
    (found,) = caught(warn_about_layout, (1, 8, 577, 64), (1, 8, 577, 64))
    assert "1 + 24 x 24 flattened tokens" in str(found.message)
    assert "extra=(k[:, :, :1], v[:, :, :1])" in str(found.message)


def test_queries_and_keys_of_other_lengths_are_no_picture():
    assert not caught(warn_about_layout, (1, 8, 576, 64), (1, 8, 77, 64))


def test_each_kind_is_reported_once():
    one, other = (1, 8, 576, 64), (3, 8, 576, 64)
    assert len(caught(warn_about_layout, one, one)) == 1
    assert not caught(warn_about_layout, one, one)
    assert not caught(warn_about_layout, other, other)  # another batch
    assert len(caught(warn_about_layout, (1, 8, 577, 64), (1, 8, 577, 64))) == 1


@pytest.mark.parametrize("call", ["GridAttention", "NonLocalBlock", "patch_sdpa"])
def test_only_the_outermost_call_gives_hints(call):
    """What the user was warned about once, or said in so many words, is not doubted again further down."""
    search = scram.Search(sweeps=0)
    if call == "GridAttention":
        layer = GridAttention(8, 2, search=search, impl="reference")
        assert len(caught(layer, torch.randn(1, 64, 8))) == 1
    elif call == "NonLocalBlock":
        block = NonLocalBlock(8, rank=1, search=search, impl="reference")
        assert not caught(block, torch.randn(1, 8, 64))
    else:
        x = torch.randn(1, 2, 64, 4)
        with scram.patch_sdpa(grid=(64,), search=search, impl="reference"):
            assert not caught(F.scaled_dot_product_attention, x, x, x)


def test_the_memory_is_bounded():
    for n in range(5000):
        warn_about_layout((n, 1, 2, 3), (n, 1, 2, 3))
    assert len(layout_hints._seen) <= 4096


def test_the_filter_silences_it():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=LayoutWarning)
        warn_about_layout((1, 8, 576, 64), (1, 8, 576, 64))
    assert not found


def test_nothing_is_said_while_torch_compiles():
    layer = GridAttention(8, 2, search=None)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert not caught(compiled, torch.randn(1, 64, 8))
    assert not caught(torch.compile(warn_about_layout, backend="eager"), (1, 8, 576, 64), (1, 8, 576, 64))


def test_symbolic_extents_are_left_alone():
    def traced(x):
        warn_about_layout(x.shape, x.shape)
        return x + 1

    graph = make_fx(traced, tracing_mode="symbolic")(torch.zeros(1, 8, 576, 4))
    assert (graph(torch.zeros(1, 8, 9, 4)) == 1).all()


@pytest.mark.parametrize(
    ("points", "line"),
    [(65, "layer(x[:, 1:].unflatten(1, (8, 8)), tokens=x[:, :1])"), (64, "x.unflatten(1, (8, 8))")],
)
def test_a_module_on_flattened_tokens(points, line):
    layer, x = GridAttention(8, 2, search=scram.Search(seed=0), impl="reference"), torch.randn(1, points, 8)
    (found,) = caught(layer, x)
    assert found.category is LayoutWarning
    assert found.filename == __file__
    assert line in str(found.message)
    layout_hints.clear()
    assert not caught(lambda: eval(line, {"layer": layer, "x": x}))


@pytest.mark.parametrize("shape", [(60, 8), (8, 8, 8), (7, 9, 8)], ids=str)
def test_a_module_on_a_grid(shape):
    assert not caught(GridAttention(8, 2, search=None), torch.randn(1, *shape))
