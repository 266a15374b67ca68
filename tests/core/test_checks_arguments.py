"""Arguments under another name: an unknown one is explained, an old one still works."""

import pytest
import torch

import scram
from scram.core.checks import explains, unknown_arguments
from scram.nn import GridAttention, NonLocalBlock

X = torch.randn(1, 4, 4, 8)
MODULES = [
    (lambda: GridAttention(8, 2, is_causal=True), r"GridAttention\(\) has no argument is_causal; use causal="),
    (lambda: GridAttention(8, 2, matches=4), r"no argument matches; use search=scram\.Search\(matches=\.\.\.\)"),
    (lambda: GridAttention(8, 2, seed=4), r"no argument seed; use search=scram\.Search\(seed=\.\.\.\)"),
    (lambda: GridAttention(8, 2, raduis=4), r"no argument raduis; use radius="),
    (
        lambda: GridAttention(8, 2)(X, attn_mask=X),
        r"GridAttention\.forward\(\) has no argument attn_mask; use key_mask=",
    ),
    (lambda: GridAttention(8, 2)(X, need_weights=False), r"no argument need_weights; no weights are kept"),
    (
        lambda: GridAttention(8, 2)(X, is_causal=True),
        r"no argument is_causal; use causal=True where the module",
    ),
    (lambda: GridAttention(8, 2)(X, seed=1), r"no argument seed; use search=scram\.Search\(seed=.* is chosen"),
    (lambda: NonLocalBlock(8, matches=2), r"NonLocalBlock\(\) has no argument matches; use search=scram\.Search\(mat"),
    (lambda: NonLocalBlock(4)(X, attn_mask=X), r"NonLocalBlock\.forward\(\) has no argument attn_mask; use key_mask="),
    (lambda: GridAttention.from_mha(torch.nn.MultiheadAttention(8, 2), is_causal=True), r"use causal="),
]


@pytest.mark.parametrize("n", range(len(MODULES)))
def test_the_modules_name_the_right_argument(n):
    call, message = MODULES[n]
    with pytest.raises(TypeError, match=message):
        call()


FUNCTIONS = {
    ("search", "attn_mask"): "use key_mask=, bool",
    ("search", "is_causal"): "use causal=",
    ("search", "matches"): r"use search=scram\.Search\(matches",
    ("search", "seed"): r"use search=scram\.Search\(seed",
    ("search", "need_weights"): "no weights are kept",
    ("attend", "seed"): "torch.manual_seed governs dropout",
    ("attend", "sweeps"): r"scram\.Search\(sweeps=\.\.\.\) where the search is chosen",
    ("attention", "matches"): r"use search=scram\.Search\(matches",
    ("attention", "key_padding_mask"): "use key_mask=~key_padding_mask",
    ("attention", "dropout"): "use dropout_p=",
    ("attention", "zzz"): "it takes q, k, v, search",
    ("estimate", "seed"): r"use method=, such as scram\.DrawnKeys\(samples=512, seed=0\)",
    ("estimate", "samples"): r"use method=",
}


@pytest.mark.parametrize(("function", "name"), FUNCTIONS, ids="-".join)
def test_functions_name_the_right_argument(function, name):
    wrapped = explains(getattr(scram, function))
    given = [torch.randn(1, 1, 4, 4, 8)] * (2 if function == "search" else 3)
    with pytest.raises(TypeError, match=rf"{function}\(\) has no argument {name}; .*{FUNCTIONS[function, name]}"):
        wrapped(*given, **{name: 1})


def test_other_type_errors_pass():
    with pytest.raises(TypeError, match="radius must be"):
        GridAttention(8, 2, radius="3")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        GridAttention(8)


def test_several_at_once():
    error = unknown_arguments("f", ["is_causal", "mask"], ["q", "causal"])
    assert str(error) == "f() has no argument is_causal; use causal=. f() has no argument mask; it takes q, causal"
