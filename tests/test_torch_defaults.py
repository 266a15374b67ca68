"""torch.set_default_dtype and torch.set_default_device belong to the user: no result of the package follows them."""

import ast
import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import scram
import scram.images
from scram import nn
from scram.images.video import denoise_frames
from scram.quality import measure

PACKAGE = Path(scram.__file__).parent
# Functions of torch that make a tensor: of whole numbers unless they are told otherwise, and all others.
WHOLE = {"arange", "randint", "randperm"}
MAKERS = {"tensor", "as_tensor", "asarray", "scalar_tensor", "full", "zeros", "ones", "empty", "eye", "linspace"}
MAKERS |= {"logspace", "rand", "randn", "normal", "empty_strided", "tril_indices", "triu_indices", *WHOLE}


def unnamed(source):
    """The lines that leave a tensor's device, or its dtype, to torch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "torch":
            continue
        name = node.func.attr
        if name == "where" and _is_of_floats(node.args[1:]):
            found.append(f"{node.lineno}: torch.where of two numbers")
        if name in MAKERS:
            wanted = {"device"} if name in WHOLE and not _has_float(node) else {"device", "dtype"}
            named = {keyword.arg for keyword in node.keywords}
            missing = set() if None in named else wanted - named  # **like names both
            found += [f"{node.lineno}: torch.{name} without {keyword}" for keyword in sorted(missing)]
    return found


def _is_of_floats(arguments):
    """Whether all are numbers, and one of them is a float."""
    plain = [part.operand if isinstance(part, ast.UnaryOp) else part for part in arguments]
    return any(map(_is_float, plain)) and all(_is_float(part) or isinstance(part, ast.Constant) for part in plain)


def _is_float(node):
    named = isinstance(node, ast.Attribute) and node.attr in ("inf", "nan", "pi")
    return named or (isinstance(node, ast.Constant) and isinstance(node.value, float))


def _has_float(call):
    return any(_is_float(part) for argument in call.args for part in ast.walk(argument))


def test_every_tensor_of_the_package_names_its_device_and_dtype():
    found = {path.relative_to(PACKAGE).as_posix(): unnamed(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_rule_sees_what_is_left_to_torch():
    source = "torch.zeros(2, device=x)\ntorch.arange(3)\ntorch.arange(0.5, device=x)\ntorch.where(x, 1.0, -torch.inf)"
    assert unnamed(source) == [
        "1: torch.zeros without dtype",
        "2: torch.arange without device",
        "3: torch.arange without dtype",
        "4: torch.where of two numbers",
    ]
    assert unnamed("torch.ones(2, dtype=torch.float32, device='cpu')\nx.new_zeros(3)\ntorch.where(x, y, 0.0)") == []


def leaves(x):
    """Every tensor and number in a result."""
    if isinstance(x, (torch.Tensor, bool, int, float, str)):
        return [x]
    if dataclasses.is_dataclass(x):
        return [leaf for field in dataclasses.fields(x) for leaf in leaves(getattr(x, field.name))]
    if isinstance(x, dict):
        x = list(x.values())
    return [leaf for part in x for leaf in leaves(part)] if isinstance(x, (tuple, list)) else []


@contextlib.contextmanager
def default(name, value):
    """torch's default dtype or device, for a while."""
    before = getattr(torch, f"get_default_{name}")()
    getattr(torch, f"set_default_{name}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_default_{name}")(None if name == "device" else before)
        assert getattr(torch, f"get_default_{name}")() == before


class Given(NamedTuple):
    """What every call is made of, on the CPU and of float32; modules are made before torch's defaults change."""

    q: Tensor  # [1, 2, 6, 7, 4]
    k: Tensor
    v: Tensor
    mask: Tensor  # [1, 6, 7]
    matches: scram.Matches
    attended: scram.Attended
    codebook: scram.Codebook
    mha: nn.GridAttention
    block: nn.NonLocalBlock
    picture: Tensor  # [24, 26, 3]

    @staticmethod
    def made():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 2, 6, 7, 4, generator=generator) for _ in range(3))
        mask = torch.rand(1, 6, 7, generator=generator) < 0.8
        matches = scram.search(q, k, search=SEARCH, impl="reference")
        attended = scram.attend(q, k, v, matches, impl="reference")
        codebook = scram.cluster(q, k, v, clusters=TAILS["routed clusters"], impl="reference")
        mha = nn.GridAttention(8, 2, search=SEARCH, tail=TAILS["stratified keys"], impl="reference")
        block = nn.NonLocalBlock(8, search=SEARCH, impl="reference")
        picture = torch.rand(24, 26, 3, generator=generator)
        return Given(q, k, v, mask, matches, attended, codebook, mha, block, picture)


SEARCH = scram.Search(matches=2, sweeps=2, seed=3)
TAILS = {
    "clusters": scram.Clusters(count=8, keys=0, seed=1),
    "routed clusters": scram.Clusters(count=8, keys=12, seed=1),
    "drawn keys": scram.DrawnKeys(samples=9, seed=1),
    "stratified keys": scram.DrawnKeys(samples=9, stratified=True, seed=1),
}
METHODS = {**TAILS, "Snis": scram.Snis(samples=9, seed=1), "walks": scram.MetropolisHastings(samples=9, seed=1)}


def attends(tail, **options):
    return lambda x, impl: scram.attention(x.q, x.k, x.v, search=SEARCH, tail=tail, impl=impl, **options)


def estimates(method):
    return lambda x, impl: scram.estimate(x.q, x.k, x.v, x.matches, method=method, key_mask=x.mask, impl=impl)


def with_gradients(call):
    """A call's result and its gradients."""

    def run(x, impl):
        leaves_of_x = [one.detach().requires_grad_() for one in (x.q, x.k, x.v)]
        made = call(x._replace(q=leaves_of_x[0], k=leaves_of_x[1], v=leaves_of_x[2]), impl)
        total = sum(one.sum() for one in leaves(made) if isinstance(one, Tensor) and one.requires_grad)
        return made, torch.autograd.grad(total, leaves_of_x, allow_unused=True)

    return run


# Calls that an engine runs, and all others.
ENGINE_CALLS = {
    "search": lambda x, impl: scram.search(x.q, x.k, search=SEARCH, key_mask=x.mask, causal=True, impl=impl),
    "search in tiles": lambda x, impl: scram.search(x.q, x.k, search=scram.Search("tile", seed=3), impl="reference"),
    "search apart": lambda x, impl: scram.search(
        x.q, x.k, search=scram.Search(matches=2, separation=1, seed=3), score="l2", impl=impl
    ),
    "search near": lambda x, impl: scram.search(
        x.q, x.k, search=scram.Search(reach=2, seed=3), warm=x.matches, impl=impl
    ),
    "search without a seed": lambda x, impl: scram.search(x.q, x.k, impl=impl),
    "local": with_gradients(lambda x, impl: scram.local(x.q, x.k, x.v, radius=1, impl=impl)),
    "local by the mean": lambda x, impl: scram.local(x.q, x.k, x.v, radius=1, weight="mean", impl=impl),
    "local with dropout": lambda x, impl: scram.local(x.q, x.k, x.v, radius=1, dropout_p=0.3, impl=impl),
    "attend": with_gradients(
        lambda x, impl: scram.attend(x.q, x.k, x.v, x.matches, causal=True, key_mask=x.mask, impl=impl)
    ),
    "attend with a codebook": lambda x, impl: scram.attend(x.q, x.k, x.v, x.matches, tail=x.codebook, impl=impl),
    "search from routed keys": lambda x, impl: scram.search(
        x.q, x.k, search=scram.Search(seed=3, start="routed"), codebook=x.codebook, impl=impl
    ),
    "route": lambda x, impl: scram.route(x.q, x.k, x.codebook, impl=impl),
    "attend without windows": with_gradients(
        lambda x, impl: scram.attend(x.q, x.k, x.v, None, tail=TAILS["routed clusters"], impl=impl)
    ),
    "cluster": lambda x, impl: scram.cluster(
        x.q, x.k, x.v, clusters=TAILS["clusters"], key_mask=x.mask, score="cosine", impl=impl
    ),
    "attention": with_gradients(attends(None)),
    **{f"attention with {name}": with_gradients(attends(tail)) for name, tail in TAILS.items()},
    **{f"causal attention with {name}": attends(tail, causal=True) for name, tail in TAILS.items() if "keys" in name},
    **{f"estimate by {name}": estimates(method) for name, method in METHODS.items()},
    "Matcher": lambda x, impl: nn.Matcher(search=SEARCH, bidirectional=True, scales=(2, 1), impl=impl)(x.q, x.k),
    "flow": lambda x, impl: nn.Matcher(search=SEARCH, impl=impl)(x.q, x.k).flow,
    "sample": lambda x, impl: nn.Matcher(search=SEARCH, impl=impl)(x.q, x.k).sample(9),
}
CALLS = {
    "attention of a small grid": lambda x: scram.attention(x.q, x.k, x.v),
    "causal attention of a small grid": lambda x: scram.attention(x.q, x.k, x.v, causal=True, key_mask=x.mask),
    "explain": lambda x: str(scram.explain(x.q, x.k, x.v)),
    "exact_attention": lambda x: scram.exact_attention(x.q, x.k, x.v, causal=True, key_mask=x.mask),
    "exact_search": lambda x: scram.exact_search(x.q, x.k, matches=2, separation=1),
    "merge": lambda x: scram.merge(x.attended, x.attended),
    "Matches.identity": lambda x: scram.Matches.identity((3, 4)),
    "Matches.from_coords": lambda x: scram.Matches.from_coords(x.matches.coords()),
    "Matches.inverse": lambda x: x.matches.inverse(),
    "Matches.upsample": lambda x: x.matches.upsample((9, 9)),
    "Matches.repr": lambda x: repr(x.matches),
    "recall": lambda x: measure.recall(x.q, x.k, x.matches, num_queries=20),
    "recall of modes": lambda x: measure.recall(x.q, x.k, x.matches, separation=1, key_mask=x.mask),
    "score_gap": lambda x: measure.score_gap(x.q, x.k, x.matches),
    "captured_mass": lambda x: measure.captured_mass(x.q, x.k, x.attended, num_queries=20),
    "output_error": lambda x: measure.output_error(x.q, x.k, x.v, x.attended),
    "scaled_dot_product_attention": lambda x: scram.scaled_dot_product_attention(
        *(one.flatten(2, 3) for one in x[:3]), grid=(6, 7)
    ),
    "trust": lambda x: scram.trust(x.q, x.k, x.v, search=SEARCH, num_queries=20, impl="reference"),
    "tune": lambda x: scram.tune(x.q, x.k, x.v, num_queries=20, impl="reference").rungs[0].error,
    "judge": lambda x: scram.judge(scram.attention, x.q, x.k, x.v, num_queries=20).p95_error,
    "explore": lambda x: scram.explore(x.q, x.k, x.v, search=SEARCH, num_queries=20, impl="reference").html,
    "GridAttention": lambda x: x.mha(x.q.movedim(1, 3).flatten(3)),
    "NonLocalBlock": lambda x: x.block(x.q.movedim(4, 1).flatten(1, 2)),
    "match": lambda x: dataclasses.replace(
        scram.images.match(x.picture, x.picture.roll(2, 1), patch=3, width=8, rotations=(60,), impl="reference"),
        seconds={},
    ),
    "denoise": lambda x: scram.images.denoise(x.picture),
    "denoise_frames": lambda x: list(denoise_frames([x.picture, x.picture.roll(1, 0)])),
    "inpaint": lambda x: scram.images.inpaint(x.picture, x.picture[..., 0] > 0.9),
    "retarget": lambda x: scram.images.retarget(x.picture, (24, 30)),
    "generate": lambda x: scram.images.generate(x.picture, (24, 30)),
}


def assert_same(plain, made):
    """The same numbers in the same dtype on the CPU, whatever torch's defaults are."""
    plain, made = leaves(plain), leaves(made)
    assert len(plain) == len(made)
    for want, got in zip(plain, made, strict=True):
        if not isinstance(want, Tensor):
            assert got == want or (got != got and want != want)
            continue
        assert (got.dtype, got.device) == (want.dtype, want.device)
        assert torch.equal(got.nan_to_num(nan=7e7), want.nan_to_num(nan=7e7))


DEFAULTS = [("dtype", torch.float64), ("dtype", torch.bfloat16), ("device", "meta")]


@functools.cache
def given():
    return Given.made()


@functools.cache
def plain(call, impl):
    """The result while torch's defaults are torch's own."""
    return run(call, impl)


def run(call, impl):
    tensors = given()  # made before the seed: making them draws too
    torch.manual_seed(5)
    return CALLS[call](tensors) if impl is None else ENGINE_CALLS[call](tensors, impl)


@pytest.mark.parametrize(("name", "value"), DEFAULTS)
@pytest.mark.parametrize("call", ENGINE_CALLS)
@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_engines_do_not_follow_torchs_defaults(impl, call, name, value):
    want = plain(call, impl)
    with default(name, value):
        assert_same(want, run(call, impl))


@pytest.mark.parametrize(("name", "value"), DEFAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_public_calls_do_not_follow_torchs_defaults(call, name, value):
    want = plain(call, None)
    with default(name, value):
        assert_same(want, run(call, None))
