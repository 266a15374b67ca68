"""Causal order, strictly: what comes after a position changes no bit at it or before it, in any call or engine."""

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor
    warm: scram.Matches

    @staticmethod
    def of(grid, heads, key_heads, dtype, seed=0) -> "Problem":
        generator = torch.Generator().manual_seed(seed)

        def randn(heads: int, width: int) -> Tensor:
            return torch.randn(2, heads, *grid, width, generator=generator).to(dtype)

        q, k, v = randn(heads, 6), randn(key_heads, 6), randn(key_heads, 5)
        mask = torch.rand(2, heads, *grid, generator=generator) < 0.7
        index = torch.randint(-1, k[0, 0, ..., 0].numel(), (2, heads, *grid, 2), generator=generator, dtype=torch.int32)
        return Problem(q, k, v, mask, scram.Matches(index, torch.zeros(index.shape), grid))

    def after(self, at: int, seed: int) -> "Problem":
        """Everything after a position is another: numbers, some of them not finite, masks and warm matches."""
        grid = self.q.shape[2:-1]
        other = Problem.of(grid, self.q.shape[1], self.k.shape[1], self.q.dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        later = (torch.arange(self.q[0, 0, ..., 0].numel()) > at).reshape(grid)

        def spoiled(x: Tensor) -> Tensor:
            junk = torch.tensor(JUNK)[torch.randint(len(JUNK), x.shape, generator=generator)].to(x.dtype)
            return torch.where(torch.rand(x.shape, generator=generator) < 0.1, junk, 4 * x)

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


CALLS = {
    "search": searched(SEARCH),
    "search of the paper": searched(PAPER, masked=False),
    "search from warm matches": searched(replace(SEARCH, separation=1, propagate="turns"), warm=True),
    "search with a reach": searched(replace(SEARCH, reach=3), warm=True, masked=False),
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.interpreted
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_comes_later_changes_no_bit(shape, call, impl):
    grid, heads, key_heads, dtype = SHAPES[shape]
    if impl == "triton" and dtype == torch.float64:
        dtype = torch.float16
    problem = Problem.of(grid, heads, key_heads, dtype)
    whole = CALLS[call](problem, impl)
    generator = torch.Generator().manual_seed(len(call) + len(shape))
    positions = torch.randint(1, whole[0][0, 0].numel() // whole[0].shape[-1] - 1, (2,), generator=generator).tolist()
    for seed, at in enumerate(positions, 1):
        changed = CALLS[call](problem.after(at, seed), impl)
        for new, old in zip(changed, whole, strict=True):
            assert_equal_up_to(at, new, old, len(grid))


def assert_equal_up_to(at: int, new: Tensor, old: Tensor, rank: int) -> None:
    """Two results [B, H, *G, ..] agree to the bit up to a position, and differ after it."""
    new, old = (x.flatten(2, 1 + rank)[:, :, : at + 1] for x in (new, old))
    different = ~((new == old) | (new.isnan() & old.isnan()))
    assert not different.any(), f"{int(different.sum())} numbers up to {at} differ"
