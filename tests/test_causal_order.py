"""Causal order, strictly: what comes after a position changes no bit at it or before it, in any call or engine."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

import scram

SHAPES = {  # grid, heads, key heads, dtype
    "rank 1": ((83,), 2, 1, torch.bfloat16),
    "rank 2": ((9, 11), 2, 2, torch.float64),
    "rank 3": ((4, 5, 5), 4, 2, torch.float32),
}
SEARCH = scram.Search(matches=2, sweeps=3, jumps=(4, 1), gossip=3, seed=5)
PAPER = scram.Search.paper(seed=5)
JUNK = (float("nan"), float("inf"), float("-inf"), 1e30)
DRAWN = scram.DrawnKeys(samples=24, seed=3)
CELLS = scram.DrawnKeys(samples=24, stratified=True, seed=3)
STRETCHES = scram.Clusters(count=8, keys=20, stretch=64, seed=3)


@dataclass(frozen=True)
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor
    warm: scram.Matches

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(self.q.shape[2:-1])

    @property
    def queries(self) -> int:
        return self.q[0, 0, ..., 0].numel()

    @staticmethod
    def of(grid, heads, key_heads, dtype, seed=0) -> "Problem":
        generator = torch.Generator().manual_seed(seed)

        def randn(heads: int, width: int) -> Tensor:
            return torch.randn(2, heads, *grid, width, generator=generator).to(dtype)

        q, k, v = randn(heads, 6), randn(key_heads, 6), randn(key_heads, 5)
        mask = torch.rand(2, heads, *grid, generator=generator) < 0.7
        index = torch.randint(-1, k[0, 0, ..., 0].numel(), (2, heads, *grid, 2), generator=generator, dtype=torch.int32)
        return Problem(q, k, v, mask, scram.Matches(index, torch.zeros(index.shape), grid))

    def to(self, device: str) -> "Problem":
        return Problem(*(x.to(device) for x in (*self.tensors, self.key_mask, self.warm)))

    def after(self, at: int, seed: int, junk: tuple[float, ...] = JUNK) -> "Problem":
        """Everything after a position is another: numbers, with `junk` among them, masks and warm matches."""
        grid = self.grid
        other = Problem.of(grid, self.q.shape[1], self.k.shape[1], self.q.dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        later = (torch.arange(self.queries) > at).reshape(grid)

        def spoiled(x: Tensor) -> Tensor:
            numbers = torch.tensor(junk)[torch.randint(len(junk), x.shape, generator=generator)].to(x.dtype)
            return torch.where(torch.rand(x.shape, generator=generator) < 0.1, numbers, 4 * x)

        q, k, v = (
            torch.where(later.unsqueeze(-1), spoiled(new), old)
            for old, new in ((self.q, other.q), (self.k, other.k), (self.v, other.v))
        )
        index = torch.where(later.unsqueeze(-1), other.warm.index, self.warm.index)
        mask = torch.where(later, other.key_mask, self.key_mask)
        return Problem(q, k, v, mask, replace(self.warm, index=index))


def searched(settings, warm=False, masked=True):
    def call(problem: Problem, impl: str):
        found = scram.search(
            problem.q,
            problem.k,
            search=settings,
            causal=True,
            key_mask=problem.key_mask if masked else None,
            warm=problem.warm if warm else None,
            impl=impl,
        )
        return found.index, found.score

    return call


def attended(tail=None, radius=1, **how):
    def call(problem: Problem, impl: str):
        torch.manual_seed(0)  # of dropout
        options = {"radius": radius, "causal": True, "tail": tail, "impl": impl, **how}
        return scram.attend(*problem.tensors, problem.warm, key_mask=problem.key_mask, **options)

    return call


def attention(masked=True, **how):
    def call(problem: Problem, impl: str):
        torch.manual_seed(0)
        options = {"causal": True, "key_mask": problem.key_mask if masked else None, "return_lse": True, **how}
        return scram.attention(*problem.tensors, impl=impl, **options)

    return call


def estimated(method):
    def call(problem: Problem, impl: str):
        how = {"method": method, "causal": True, "key_mask": problem.key_mask, "impl": impl}
        made = scram.estimate(*problem.tensors, problem.warm, **how)
        parts = (made.out, made.lse, made.variance, made.ess, made.acceptance, made.rhat)
        return [x for x in parts if x is not None]

    return call


def near(problem: Problem, impl: str):
    return scram.local(*problem.tensors, radius=2, causal=True, key_mask=problem.key_mask, impl=impl)


CALLS = {
    "search": searched(SEARCH),
    "search of the paper": searched(PAPER, masked=False),
    "search from warm matches": searched(replace(SEARCH, separation=1, propagate="turns"), warm=True),
    "search with a reach": searched(replace(SEARCH, reach=3), warm=True, masked=False),
    "attend": attended(),
    "attend with drawn keys": attended(DRAWN, dropout_p=0.3),
    "attend with relu": attended(weight="relu"),
    "attention": attention(search=SEARCH),
    "attention of windows": attention(search=PAPER, tail=None, score="l2"),
    "attention with drawn keys": attention(search=SEARCH, tail=CELLS),
    "clusters": attention(search=None, tail=STRETCHES),
    "clusters without a mask": attention(
        masked=False, search=None, tail=replace(STRETCHES, count=4, keys=0), score="l2"
    ),
    "clusters beside a search": attention(search=SEARCH, tail=STRETCHES),
    "clusters around matches": attended(STRETCHES, radius=2),
    "local": near,
    "drawn keys": estimated(DRAWN),
    "drawn keys of cells": estimated(CELLS),
    "samples": estimated(scram.Snis(samples=9, alpha=0.5, seed=3)),
    "walks": estimated(scram.MetropolisHastings(samples=9, seed=3)),
}


@pytest.mark.parametrize(
    ("shape", "call"),
    [(shape, call) for shape in SHAPES for call in CALLS if shape == "rank 2" or call not in ("samples", "walks")],
)
def test_what_comes_later_changes_no_bit(shape, call, impl):
    check(CALLS[call], SHAPES[shape], impl, seed=len(call))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.interpreted
@pytest.mark.parametrize("call", ["search from warm matches", "attention with few drawn keys", "samples"])
def test_on_a_small_grid(call, impl):
    few = attention(search=SEARCH, tail=replace(CELLS, samples=6))
    check(CALLS.get(call, few), ((3, 5), 2, 1, torch.float32), impl, seed=len(call))


def check(call, shape, impl: str, seed: int, device: str = "cpu") -> None:
    """The call of a problem and of two others that differ from it after some position."""
    grid, heads, key_heads, dtype = shape
    if impl == "triton" and dtype == torch.float64:
        dtype = torch.float16
    problem = Problem.of(grid, heads, key_heads, dtype)
    whole = call(problem.to(device), impl)
    generator = torch.Generator().manual_seed(seed)
    for n, at in enumerate(torch.randint(1, problem.queries - 1, (2,), generator=generator).tolist()):
        changed = call(problem.after(at, seed + n).to(device), impl)
        assert not torch.equal(changed[0], whole[0])
        for new, old in zip(changed, whole, strict=True):
            assert_equal_up_to(at, new, old, len(grid))


def assert_equal_up_to(at: int, new: Tensor, old: Tensor, rank: int) -> None:
    """Two results [B, H, *G, ..] agree to the bit up to a position."""
    new, old = (x.flatten(2, 1 + rank)[:, :, : at + 1] for x in (new, old))
    different = ~((new == old) | (new.isnan() & old.isnan()))
    assert not different.any(), f"{int(different.sum())} numbers up to {at} differ"


def in_torchs_signature(before=0, after=0):
    def call(problem: Problem, impl: str):
        q, k, v = (x.flatten(2, -2) for x in problem.tensors)
        grid = problem.grid if not before else (problem.queries - before - after,)
        off = {"before": before, "after": after}
        out = scram.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, grid=grid, **off)
        return (out.unflatten(2, problem.grid),)

    return call


def patched(problem: Problem, impl: str):
    with scram.patch_sdpa(grid=problem.grid, search=SEARCH, tail=DRAWN):
        q, k, v = (x.flatten(2, -2) for x in problem.tensors)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return (out.unflatten(2, problem.grid),)


def module(**how):
    def call(problem: Problem, impl: str):
        torch.manual_seed(0)
        layer = scram.nn.GridAttention(12, 2, causal=True, device=problem.q.device, dtype=problem.q.dtype, **how).eval()
        x = torch.cat([problem.q[:, 0], problem.q[:, 1]], -1)  # [B, *G, 12]
        with torch.no_grad():
            return (layer(x, key_mask=problem.key_mask[:, 0]).unsqueeze(1),)

    return call


def exact(problem: Problem, impl: str):
    how = {"causal": True, "key_mask": problem.key_mask}
    found = scram.exact_search(problem.q, problem.k, matches=2, causal=True, key_mask=problem.key_mask)
    many = scram.exact_attention(*problem.tensors, weight="mean", **how)
    return [*scram.exact_attention(*problem.tensors, **how), *many, found.index, found.score]


def with_extra(problem: Problem, impl: str):
    more = tuple(x[..., :3, :].flatten(2, -2)[:, :, :3] for x in problem.tensors[1:])
    return scram.attention(*problem.tensors, causal=True, extra=more, return_lse=True)


DENSE = {
    "attention": lambda problem, impl: attention()(problem, "auto"),
    "attention without a mask": lambda problem, impl: attention(masked=False)(problem, "auto"),
    "attention with extra keys": with_extra,
    "attention of cosine": lambda problem, impl: attention(score="cosine")(problem, "auto"),
    "exact": exact,
    "torch's signature": in_torchs_signature(),
    "torch's signature, tokens around": in_torchs_signature(before=30, after=20),
    "a patched call": patched,
    "module": module(),
    "module that searches": module(search=SEARCH),
    "module of clusters": module(search=None, tail=STRETCHES),
}


@pytest.mark.parametrize("call", DENSE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dense_attention_and_modules(device, shape, call):
    check(DENSE[call], SHAPES[shape], "auto", seed=len(call), device=device)


def attended_of(leaves: list[Tensor], problem: Problem, impl: str, tail: scram.DrawnKeys | None) -> Tensor:
    out, lse = attended(tail)(replace(problem, q=leaves[0], k=leaves[1], v=leaves[2]), impl)
    return torch.cat([out, torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1)], -1)


def dense_of(leaves: list[Tensor], problem: Problem) -> Tensor:
    return scram.attention(*leaves, causal=True, key_mask=problem.key_mask)


def exact_of(leaves: list[Tensor], problem: Problem) -> Tensor:
    return scram.exact_attention(*leaves, causal=True, key_mask=problem.key_mask).out


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.interpreted
@pytest.mark.parametrize("tail", [None, replace(DRAWN, samples=9)], ids=["windows", "drawn keys"])
def test_no_gradient_goes_to_what_comes_later(tail, impl):
    check_gradients(partial(attended_of, impl=impl, tail=tail), repeatable=impl != "triton")


@pytest.mark.parametrize("call", [dense_of, exact_of], ids=["by torch", "exact"])
def test_no_gradient_of_dense_attention_goes_to_what_comes_later(call):
    check_gradients(call)


def check_gradients(call, repeatable: bool = True) -> None:
    """Of what is up to a position: exactly none to what follows, and the rest whatever follows."""
    problem, at = Problem.of((4, 6), 2, 1, torch.float32), 11

    def gradients(problem: Problem) -> list[Tensor]:
        """Of q, k, v: up to the position, and after it."""
        leaves = [x.clone().requires_grad_() for x in problem.tensors]
        out = call(leaves, problem).flatten(2, 3)[:, :, : at + 1]
        grads = [x.flatten(2, 3) for x in torch.autograd.grad(out.cos().sum(), leaves)]
        return grads

    whole = gradients(problem)
    assert all(x[:, :, at + 1 :].count_nonzero() == 0 for x in whole)
    finite = problem.after(at, 1, junk=(1.0,))
    for new, old in zip(gradients(replace(problem, q=finite.q, k=finite.k, v=finite.v)), whole, strict=True):
        assert new[:, :, at + 1 :].count_nonzero() == 0
        # Additions to keys on a device have no order.
        same = torch.equal if repeatable else torch.allclose
        assert same(new[:, :, : at + 1], old[:, :, : at + 1])
    spoiled = problem.after(at, 2)
    dq = gradients(replace(problem, k=spoiled.k, v=spoiled.v))[0]
    assert torch.equal(dq[:, :, : at + 1], whole[0][:, :, : at + 1])
