"""A part of a call, with the numbers of its rows, gives that part of the answer: bit for bit on whole numbers."""

import pytest
import torch

import scram
from scram.core.tails.base import Shard, draw_seed
from scram.engines import dispatch
from support import part_calls
from support.in_interpreter import INTERPRETED
from support.on_device import to

GRID, KEY_GRID = (5, 6), (6, 5)
HEADS, KEY_HEADS = (2, 2) if INTERPRETED else (4, 2)
PARTS = {"heads": (slice(None), slice(HEADS // 2, HEADS)), "both": (slice(1, 2), slice(HEADS // 2, HEADS))}
SEARCH = scram.Search("query", matches=2, sweeps=2, gossip=2)
TILE = scram.Search("tile", matches=2, sweeps=1, gossip=1)
CALLS = {
    "query search": {"search": SEARCH, "tail": None},
    "tile search": {"search": TILE, "tail": None},
    "clusters": {"search": SEARCH, "tail": scram.Clusters(count=7)},
    "tile search and clusters": {"search": TILE, "tail": scram.Clusters(count=7, steps=1), "dropout_p": 0.4},
    "drawn": {"search": SEARCH, "tail": scram.DrawnKeys(samples=6)},
    "dropout of drawn keys": {"search": SEARCH, "tail": scram.DrawnKeys(samples=6, stratified=True), "dropout_p": 0.4},
    "causal": {"search": SEARCH, "tail": scram.DrawnKeys(samples=6), "causal": True},
    "dropout of windows": {"search": SEARCH, "tail": None, "dropout_p": 0.4},
}
FEW = ("tile search and clusters", "dropout of drawn keys", "dropout of windows")  # that reach every kernel
ESTIMATORS = {
    "draws": scram.Snis(samples=5),
    "walks": scram.MetropolisHastings(samples=5, burn_in=1),
    "clusters": scram.Clusters(count=7),
}


def on_device(x, impl):
    return to(x, "cuda") if impl == "triton" and not INTERPRETED else x


def problem(impl, heads=HEADS, key_heads=KEY_HEADS, causal=False):
    """Whole numbers, so that every score is exact."""
    make = torch.Generator().manual_seed(0)
    keys = GRID if causal else KEY_GRID
    batch = 1 if INTERPRETED else 2
    shapes = (batch, heads, *GRID, 4), (batch, key_heads, *keys, 4), (batch, key_heads, *keys, 3)
    numbers = [torch.randint(-3, 4, shape, generator=make).float() for shape in shapes]
    return [on_device(x, impl).requires_grad_() for x in numbers]


def part_of(x, part, group=1):
    """The slice of a tensor [B, H or Hk, ..]."""
    batch, heads = part
    heads = slice(heads.start // group, heads.stop // group) if heads.start is not None else heads
    return x.detach()[batch, heads].clone().requires_grad_(x.requires_grad)


def shard_of(q, part):
    """A call of that part; `draw_seed` draws as the whole call does after the same torch.manual_seed."""
    return Shard(torch.arange(q.shape[0] * q.shape[1], device=q.device).reshape(q.shape[:2])[part], draw_seed)


def answer(function, tensors, **how):
    torch.manual_seed(1)
    found = function(*tensors, **how)
    out = found if isinstance(found, torch.Tensor) else found.out
    weights = torch.arange(out.shape[-1], device=out.device) + 1.0
    grads = torch.autograd.grad((out * weights).sum(), tensors)
    return out.detach(), grads


def compare(function, on_part, whole, part, **how):
    group = whole[0].shape[1] // whole[1].shape[1]
    want, grads = answer(function, whole, **how)
    own = [part_of(x, part, n) for x, n in zip(whole, (1, group, group), strict=True)]
    out, own_grads = answer(on_part, own, **how, shard=shard_of(whole[0], part))
    assert torch.equal(out, want[part])
    for name, found, grad, n in zip("qkv", own_grads, grads, (1, group, group), strict=True):
        torch.testing.assert_close(
            found, part_of(grad, part, n), atol=1e-4, rtol=1e-4, msg=lambda text, n=name: n + text
        )
    other, _ = answer(function, own, **how)
    return not torch.equal(other, out)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", FEW if INTERPRETED else CALLS)
@pytest.mark.parametrize("part", ["heads"] if INTERPRETED else PARTS)
@pytest.mark.slow
def test_part_of_an_attention(impl, name, part):
    how = CALLS[name]
    if how["search"].method == "tile" and dispatch.ENGINES[impl].most_tile_matches == 0:
        pytest.skip("the engine has no tile search")
    whole = problem(impl, causal=how.get("causal", False))
    assert compare(
        scram.attention, part_calls.attention, whole, PARTS[part], impl=impl, **how
    )  # without rows the noise is another


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ("walks",) if INTERPRETED else ESTIMATORS)
def test_part_of_an_estimate(impl, name):
    q, k, _ = whole = problem(impl)
    mask = on_device(torch.arange(len(q) * HEADS * 30).reshape(len(q), HEADS, *KEY_GRID) % 7 > 0, impl)
    part = PARTS["heads"]
    found = scram.search(q, k, search=scram.Search("query", matches=2, seed=3), key_mask=mask, impl=impl)

    def estimate(q, k, v, shard=None):
        rows = part if shard or q.shape[1] != HEADS else (slice(None), slice(None))
        matches = scram.Matches(found.index[rows], found.score[rows], KEY_GRID)
        how = {"method": ESTIMATORS[name], "key_mask": mask[rows], "impl": impl}
        if shard is None:
            return scram.estimate(q, k, v, matches, **how)
        return part_calls.estimate(q, k, v, matches, **how, shard=shard)

    assert compare(estimate, estimate, whole, part)
