"""The attention of a model, by name."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scram
from scram.nn import GridAttention

FEW = scram.Search(sweeps=1, jumps=(1,), gossip=2)
FOUR = scram.Search(matches=4, separation=2)
SEARCHING: dict[str, dict[str, Any]] = {
    "windows": {"search": scram.Search(), "tail": None},
    "windows, 4 matches": {"search": FOUR, "tail": None},
    "tail": {"search": scram.Search()},  # clusters; in stored causal rows drawn keys, the default then
    "tail, 4 matches": {"search": FOUR},
    "tail, 4 matches, 2048 drawn": {"search": FOUR, "tail": scram.DrawnKeys(samples=2048)},
    "tail, fixed seed": {"search": scram.Search(seed=0), "tail": scram.Clusters(seed=0)},
    "tail, few sweeps": {"search": FEW},
    "32 clusters": {"search": scram.Search(), "tail": scram.Clusters(count=32)},  # for few keys
    "32 clusters, fixed seed": {"search": scram.Search(seed=0), "tail": scram.Clusters(count=32, seed=0)},
    "32 clusters, few sweeps": {"search": FEW, "tail": scram.Clusters(count=32)},
    # Stretches of an eighth; a seed, so that decoding has the clusters of the whole call.
    "causal clusters": {"search": None, "tail": scram.Clusters(count=64, keys=512, seed=0)},  # the default's
    "causal clusters, few": {"search": None, "tail": scram.Clusters(count=16, keys=128, seed=0)},  # for few keys
    "dense": {"search": None},
    "dense, dropout": {"search": None, "dropout": 0.1},
}
NAMES = (*SEARCHING, "local", "local, 64 keys", "strided", "natten")


def attention(name: str, width: int, heads: int, causal: bool = False) -> nn.Module:
    """[B, *G, width] -> the same shape."""
    if name in SEARCHING:
        return GridAttention(width, heads, causal=causal, **SEARCHING[name])
    if name == "local, 64 keys":
        return Local(width, heads, causal, keys=64)
    made: type[Projected] = {"local": Local, "strided": Strided, "natten": Natten}[name]
    return made(width, heads, causal)


class Projected(nn.Module):
    """The projections of dense attention around `mix`."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).movedim(-2, 2)
        return self.outer(self.mix(q, k, v).movedim(1, -2).flatten(-2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [B, H, *G, E] -> [B, H, *G, E]."""
        raise NotImplementedError


class Local(Projected):
    """Blocks of queries see the block and a border around it (Parmar et al., "Image Transformer", 2018)."""

    def __init__(self, width: int, heads: int, causal: bool, keys: int = 256) -> None:
        super().__init__(width, heads, causal)
        self.keys = keys  # in a block with its border, about

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grid = q.shape[2:-1]
        side = round(self.keys ** (1 / len(grid)))
        border = [min(side // 4, n) for n in grid]
        block = [max(1, min(side - 2 * b, n)) for b, n in zip(border, grid, strict=True)]
        own = self._blocks(q, block, [0] * len(grid))
        seen = [self._blocks(x, block, border) for x in (k, v)]
        place = torch.arange(math.prod(grid), device=q.device).view(1, 1, *grid, 1)
        inside = self._blocks(place + 1, block, border).squeeze(-1).unsqueeze(-2)  # 0: beyond the grid
        mask = inside > 0
        if self.causal:
            mask = mask & (inside <= self._blocks(place + 1, block, [0] * len(grid)).squeeze(-1).unsqueeze(-1))
            mask = mask | (self._blocks(place + 1, block, [0] * len(grid)).squeeze(-1) == 0).unsqueeze(-1)
        else:
            mask = mask.expand(-1, -1, -1, own.shape[-2], -1)
        out = F.scaled_dot_product_attention(own, *seen, attn_mask=mask)
        return self._joined(out, block, grid)

    @staticmethod
    def _blocks(x: Tensor, block: list[int], border: list[int]) -> Tensor:
        """[B, H, *G, E] -> [B, H, blocks, keys of a block, E]."""
        rank = len(block)
        pad = [0, 0]
        for axis in reversed(range(rank)):
            size = x.shape[2 + axis]
            pad += [border[axis], border[axis] + -size % block[axis]]
        x = F.pad(x, pad)
        for axis in range(rank):
            x = x.unfold(2 + axis, block[axis] + 2 * border[axis], block[axis])
        x = x.movedim(2 + rank, -1)  # [B, H, *blocks, *inside, E]
        return x.flatten(2 + rank, -2).flatten(2, 1 + rank)

    @staticmethod
    def _joined(x: Tensor, block: list[int], grid: torch.Size) -> Tensor:
        rank, counts = len(grid), [-(-n // b) for n, b in zip(grid, block, strict=True)]
        x = x.unflatten(2, counts).unflatten(2 + rank, block)
        for axis in range(rank):
            x = x.movedim(2 + rank + axis, 3 + 2 * axis)
        for axis in range(rank):
            x = x.flatten(2 + axis, 3 + axis)
        return x[(slice(None), slice(None), *(slice(n) for n in grid))]


class Strided(Projected):
    """Each head sees one line through the query, along one axis (Child et al., "Sparse Transformers", 2019)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, out = q.ndim - 3, []
        for head, parts in enumerate(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)):
            axis = 1 + (rank - 1 - head % rank)
            lines = [x.movedim(axis, -2).flatten(0, -3) for x in parts]
            found = F.scaled_dot_product_attention(*lines, is_causal=self.causal)
            shape = parts[0].movedim(axis, -2).shape
            out.append(found.view(shape).movedim(-2, axis))
        return torch.stack(out, 1)


class Natten(Projected):
    """Neighborhood attention, a window of 7 along each axis."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from natten.functional import neighborhood_attention_generic

        rank = q.ndim - 3
        size = tuple(min(7, n - (n % 2 == 0)) for n in q.shape[2:-1])
        q, k, v = (x.movedim(1, -2) for x in (q, k, v))
        out = neighborhood_attention_generic(q, k, v, kernel_size=size, is_causal=(self.causal,) * rank)
        return out.movedim(-2, 1)
