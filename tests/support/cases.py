"""One table of cases for every implementation, and the tensors that belong to each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import scram


@dataclass(frozen=True)
class Case:
    """One call of search and attend. `key_heads` and `key_grid` default to those of the queries."""

    name: str
    batch: int = 1
    heads: int = 1
    key_heads: int | None = None
    grid: tuple[int, ...] = (6, 7)
    key_grid: tuple[int, ...] | None = None
    width: int = 4
    value_width: int = 3
    kappa: int = 2
    separation: int = 0
    radius: int | tuple[int, ...] = 1
    causal: bool = False
    mask: str = "none"  # "none", "batch" [B, *G'], "head" [B, H, *G'], "row" one row fully masked
    score: str = "dot"
    weight: str = "softmax"
    extra: int = 0
    dropout_p: float = 0.0
    propagate: str = "both"
    gossip: int = 2
    jumps: tuple[int, ...] = (4, 2, 1)
    sweeps: int = 2
    warm: int = 0  # kappa of the warm start, 0 for none
    reach: int | tuple[int, ...] | None = None
    random: bool = True
    dtype: torch.dtype = torch.float32
    value_dtype: torch.dtype | None = None  # of v and its extra values; that of the others
    strided: bool = False
    offset: float = 0.0  # of every key's first feature: what all scores of a query share; they are exact in float32
    method: str = "query"

    @property
    def keys_grid(self) -> tuple[int, ...]:
        return self.key_grid or self.grid

    @property
    def keys(self) -> int:
        return math.prod(self.keys_grid)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def settings(self, seed: int = 7) -> scram.Search:
        how = (self.method, self.kappa, self.separation, self.sweeps, self.jumps, self.propagate, self.gossip, seed)
        return scram.Search(*how, self.reach, self.random)


CASES = [
    Case("rank 1", grid=(17,)),
    Case("rank 2"),
    Case("rank 3", grid=(3, 4, 5), jumps=(2, 1)),
    Case("rank 4", grid=(2, 3, 2, 4), jumps=(2, 1), kappa=3),
    Case("unequal grids", grid=(5, 7), key_grid=(4, 9)),
    Case("unequal rank 1", grid=(19,), key_grid=(5,), kappa=3),
    Case("unequal rank 3", grid=(2, 3, 4), key_grid=(5, 2, 3), jumps=(1, 2)),
    Case("extents of 1", grid=(1, 9, 1)),
    Case("one point", grid=(1,), kappa=1),
    Case("one key", grid=(4, 4), key_grid=(1, 1), kappa=2),
    Case("more matches than keys", grid=(3, 3), key_grid=(2, 2), kappa=6),
    Case("runs without a key", grid=(40,), key_grid=(2,), kappa=4, sweeps=0),
    Case("separated", grid=(8, 8), kappa=3, separation=2),
    Case("separation over the grid", grid=(5, 5), kappa=3, separation=9),
    Case("causal", kappa=3, causal=True),
    Case("causal rank 1", grid=(23,), causal=True, radius=2),
    Case("mask of the batch", batch=2, heads=2, mask="batch"),
    Case("mask of each head", batch=2, heads=2, mask="head"),
    Case("one row fully masked", batch=2, heads=2, mask="row"),
    Case("causal, masked, separated", batch=2, mask="batch", causal=True, kappa=3, separation=1),
    Case("grouped heads", batch=2, heads=4, key_heads=2, grid=(4, 5)),
    Case("one key head", heads=3, key_heads=1, grid=(4, 5), mask="head"),
    Case("width 1", width=1, value_width=1, kappa=1),
    Case("width 3, values 60", width=3, value_width=60),
    Case("width 60, values 1", width=60, value_width=1),
    Case("radius per axis", radius=(0, 2), kappa=3),
    Case("radius 0, kappa 1", radius=0, kappa=1),
    Case("radius over the grid", radius=20, kappa=2),
    Case("the paper", grid=(9, 9), kappa=1, propagate="shift", gossip=0, jumps=(8, 4, 2, 1)),
    Case("stay", propagate="stay", gossip=0),
    Case("turns", propagate="turns", sweeps=3),
    Case("no jumps", jumps=(), gossip=3),
    Case("no sweeps", sweeps=0, kappa=3),
    Case("warm", warm=2, kappa=2, sweeps=1),
    Case("warm with fewer", warm=1, kappa=3, separation=1),
    Case("warm with more", warm=3, kappa=1, sweeps=0, mask="batch"),
    Case("reach", grid=(6, 7), reach=2, kappa=1),
    Case("reach per axis from warm matches", grid=(4, 5), key_grid=(5, 6), warm=3, reach=(1, 3), separation=1),
    Case("reach, causal, masked", heads=2, mask="head", causal=True, kappa=3, reach=2),
    Case("reach of 0", grid=(2, 3, 4), key_grid=(5, 2, 3), kappa=3, warm=2, reach=0, jumps=(1, 2)),
    Case("reach rank 4", grid=(2, 3, 2, 4), jumps=(2, 1), reach=(0, 1, 1, 2), propagate="turns", sweeps=3),
    Case("reach over the grid", grid=(17,), reach=99, mask="batch"),
    Case("no random search", random=False, kappa=3),
    Case("reach, no random search", grid=(19,), key_grid=(23,), warm=1, reach=4, random=False, mask="batch"),
    Case("strided", batch=2, heads=2, strided=True, mask="head", extra=2),
    Case("empty batch", batch=0),
    Case("float64", dtype=torch.float64),
    Case("float16", dtype=torch.float16, extra=1),
    Case("bfloat16", dtype=torch.bfloat16, kappa=3),
    Case("float16, values float32", dtype=torch.float16, value_dtype=torch.float32, extra=2, batch=2, mask="batch"),
    Case("bfloat16, values float32", dtype=torch.bfloat16, value_dtype=torch.float32, kappa=3, dropout_p=0.3),
    Case("bfloat16 l2", dtype=torch.bfloat16, score="l2", extra=2),
    Case("cosine", score="cosine", extra=2, kappa=3),
    Case("l2", score="l2", causal=True),
    Case("large common scores", offset=2.0**13, extra=1),
    Case("mean", weight="mean", extra=2),
    Case("relu", weight="relu", mask="row", batch=2),
    Case("mean of l2", weight="mean", score="l2"),
    Case("extra", extra=3, batch=2, heads=2, key_heads=1),
    Case("extra and a masked row", extra=1, batch=2, mask="row"),
    Case("dropout", dropout_p=0.4, extra=2),
    Case("dropout of relu", dropout_p=0.2, weight="relu"),
    Case(
        "all at once",
        batch=2,
        heads=4,
        key_heads=2,
        grid=(5, 4),
        key_grid=(6, 5),
        width=5,
        value_width=7,
        kappa=3,
        separation=1,
        radius=(2, 1),
        mask="head",
        extra=3,
        dropout_p=0.3,
        propagate="turns",
        sweeps=3,
        warm=2,
        strided=True,
    ),
]

# What a search or what attending alone does not read changes nothing for the other: those cases repeat others there.
ATTENDING = {
    *("radius per axis", "radius 0, kappa 1", "radius over the grid", "float16, values float32"),
    *("bfloat16, values float32", "mean", "relu", "mean of l2", "extra", "extra and a masked row"),
    *("dropout", "dropout of relu"),
}
SEARCHING = {
    *("runs without a key", "separated", "separation over the grid", "the paper", "stay", "turns", "no jumps"),
    *("no sweeps", "warm", "warm with fewer", "warm with more", "reach", "reach per axis from warm matches"),
    *("reach, causal, masked", "reach of 0", "reach rank 4", "reach over the grid", "no random search"),
    "reach, no random search",
}
ATTENDED = [case for case in CASES if case.name not in SEARCHING]
# Integer features make integer scores.
EXACT = [case for case in CASES if case.name not in ATTENDING and case.score != "cosine"]

# Rows of the table that run in Triton's interpreter, which is slow.
INTERPRETED = {
    "search": [
        "rank 1",
        "rank 3",
        "rank 4",
        "unequal grids",
        "runs without a key",
        "separated",
        "causal, masked, separated",
        "one row fully masked",
        "one key head",
        "width 3, values 60",  # padded keys
        "width 60, values 1",
        "the paper",
        "stay",
        "turns",
        "no jumps",
        "warm with fewer",
        "bfloat16",
        "reach",
        "reach per axis from warm matches",
        "reach, causal, masked",
        "reach, no random search",
        "empty batch",
    ],
    "attend": [
        "rank 1",
        "rank 3",
        "radius per axis",
        "causal, masked, separated",
        "width 3, values 60",
        "strided",
        "float16, values float32",
        "float16",
        "l2",  # bfloat16 on a device only: the interpreter cuts it instead of rounding
        "large common scores",
        "mean",
        "relu",
        "extra and a masked row",
        "dropout",
        "empty batch",
    ],
    "repeatable gradients": [
        "rank 1",
        "one key head",
        "causal, masked, separated",
        "float16, values float32",
        "mean",
        "dropout",
    ],
    "tile search": [
        "rank 1",
        "rank 4",
        "unequal grids",
        "more matches than keys",
        "causal, masked, separated",
        "one row fully masked",
        "width 60, values 1",
        "the paper",
        "turns",
        "no sweeps",
        "warm with fewer",
        "bfloat16",
        "reach per axis from warm matches",
        "reach, no random search",
        "empty batch",
    ],
    "tile attend": [
        "rank 1",
        "rank 4",
        "unequal grids",
        "radius 0, kappa 1",
        "radius over the grid",
        "causal, masked, separated",
        "one key head",
        "width 3, values 60",
        "strided",
        "float16, values float32",
        "bfloat16",
        "large common scores",
        "mean",
        "extra and a masked row",
        "dropout",
        "empty batch",
    ],
}


def table(cases: list[Case], stage: str) -> list:
    """The cases as parameters of a test, those of INTERPRETED[stage] marked."""
    missing = set(INTERPRETED[stage]) - {case.name for case in cases}
    assert not missing, missing
    interpreted = [[pytest.mark.interpreted] * (case.name in INTERPRETED[stage]) for case in cases]
    return [parameter(case, case, *marks) for case, marks in zip(cases, interpreted, strict=True)]


def parameter(given: object, case: Case, *marks: pytest.MarkDecorator) -> object:
    """A parameter of a test, slow where Numba compiles kernels for it alone."""
    slow = [pytest.mark.slow] * (len(case.grid) > 2 or case.dtype == torch.float64)
    return pytest.param(given, marks=[*marks, *slow], id=str(given))


@dataclass(frozen=True)
class Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    extra: tuple[Tensor, Tensor] | None
    key_mask: Tensor | None
    warm: scram.Matches | None
    matches: scram.Matches

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """Fresh leaves q, k, v and extra of another dtype; wider values stay so."""
        given = (self.q, self.k, self.v, *(self.extra or ()))
        dtypes = [dtype if x.dtype == self.q.dtype else torch.promote_types(dtype, x.dtype) for x in given]
        return [x.detach().to(own, copy=True).requires_grad_() for x, own in zip(given, dtypes, strict=True)]


def make_tensors(case: Case, seed: int = 0, integer: bool = False) -> Tensors:
    """The tensors of a case, each exact in its dtype. `matches` is random, with -1, repetitions, keys off the grid."""
    generator = torch.Generator().manual_seed(seed)

    def features(*shape: int) -> Tensor:
        if integer:
            x = torch.randint(-3, 4, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = (8 * x).round() / 8 if case.offset else x
        return _spread(x) if case.strided else x

    def keys(kappa: int) -> scram.Matches:
        shape = (case.batch, case.heads, *case.grid, kappa)
        index = torch.randint(-1, case.keys + 1, shape, generator=generator, dtype=torch.int32)
        return scram.Matches(_spread(index) if case.strided else index, torch.zeros(shape), case.keys_grid)

    key_heads = case.key_heads or case.heads
    q = features(case.batch, case.heads, *case.grid, case.width).to(case.dtype)
    k = features(case.batch, key_heads, *case.keys_grid, case.width).to(case.dtype)
    k[..., 0] += case.offset
    value_dtype = case.value_dtype or case.dtype
    v = features(case.batch, key_heads, *case.keys_grid, case.value_width).to(value_dtype)
    extra = None
    if case.extra:
        k_extra = features(case.batch, key_heads, case.extra, case.width).to(case.dtype)
        k_extra[..., 0] += case.offset
        extra = k_extra, features(case.batch, key_heads, case.extra, case.value_width).to(value_dtype)
    return Tensors(q, k, v, extra, _mask(case, generator), keys(case.warm) if case.warm else None, keys(case.kappa))


def _spread(x: Tensor) -> Tensor:
    """The same values, not contiguous: neither in the order of the axes nor in the steps."""
    wide = torch.stack([x, torch.full_like(x, -1)], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., 0]
    assert wide.numel() <= 1 or not wide.is_contiguous()
    return wide


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    if case.mask == "none":
        return None
    shape = (case.batch, *case.keys_grid) if case.mask == "batch" else (case.batch, case.heads, *case.keys_grid)
    mask = torch.rand(shape, generator=generator) < 0.6
    if case.mask == "row":
        mask[-1, -1] = False
    return mask


def run_search(case: Case, tensors: Tensors, impl: str, seed: int = 7) -> scram.Matches:
    return scram.search(
        tensors.q,
        tensors.k,
        search=case.settings(seed),
        causal=case.causal,
        key_mask=tensors.key_mask,
        score=case.score,
        warm=tensors.warm,
        impl=impl,
    )


def run_attend(case: Case, tensors: Tensors, leaves: list[Tensor], impl: str, dropout_seed: int = 3) -> scram.Attended:
    q, k, v, *extra = leaves
    torch.manual_seed(dropout_seed)
    return scram.attend(
        q,
        k,
        v,
        tensors.matches,
        radius=case.radius,
        causal=case.causal,
        key_mask=tensors.key_mask,
        score=case.score,
        weight=case.weight,
        extra=tuple(extra) if extra else None,
        dropout_p=case.dropout_p,
        impl=impl,
    )


def gradients(attended: scram.Attended, leaves: list[Tensor], seed: int = 5) -> list[Tensor]:
    """Of a fixed random functional of out and of the finite lse."""
    generator = torch.Generator().manual_seed(seed)
    g_out = torch.randn(attended.out.shape, generator=generator, dtype=torch.float64)
    g_lse = torch.randn(attended.lse.shape, generator=generator, dtype=torch.float64)
    finite = torch.where(attended.lse == -torch.inf, 0, attended.lse)
    total = (attended.out * g_out.to(attended.out)).sum(dtype=torch.float64) + (finite * g_lse).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def named(name: str, **changes: object) -> Case:
    """The case of that name, changed."""
    return replace(next(case for case in CASES if case.name == name), **changes)


def assert_as_near_float64(truth, same, ours, size) -> None:
    """Each of `ours` is at most twice as far from `truth` (float64) as the reference in the same dtype, by `size`."""
    for exact, reference, result in zip(truth, same, ours, strict=True):
        assert result.dtype == reference.dtype
        assert result.shape == exact.shape
        assert (result.isfinite() == exact.isfinite()).all()
        usual, found = (size(torch.where(exact.isfinite(), x.double() - exact, 0)) for x in (reference, result))
        assert found <= 2 * usual + 8 * torch.finfo(torch.float32).eps * size(exact)


def size(x: Tensor) -> float:
    return float(torch.where(x.isfinite(), x.double(), 0).norm())


def everything(case: Case, tensors: Tensors, impl: str, dtype: torch.dtype) -> list[Tensor]:
    """out, lse and the gradients of all leaves, on the CPU."""
    leaves = tensors.leaves(dtype)
    attended = run_attend(case, tensors, leaves, impl)
    attended = scram.Attended(attended.out.cpu(), attended.lse.cpu())
    return [x.detach().cpu() for x in (attended.out, attended.lse, *gradients(attended, leaves))]


def assert_attended_as_near_float64(case: Case, tensors: Tensors, impl: str, by=size) -> None:
    """`impl` attends as near float64 as the reference does in the same dtype."""
    truth, same = (everything(case, tensors, "reference", dtype) for dtype in (torch.float64, case.dtype))
    assert_as_near_float64(truth, same, everything(case, tensors, impl, case.dtype), by)
