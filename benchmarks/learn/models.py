"""One transformer for all tasks: a token for each point of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attentions import attention


class Block(nn.Module):
    """Attention, then two layers, each with a residual."""

    def __init__(self, name: str, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention(name, width, heads, causal)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.layers(self.second(x))


class Transformer(nn.Module):
    """Tokens -> outputs for each token: embed(x) [B, *grid, width] -> [B, *grid, outputs].

    Args:
        embed: what makes tokens of the input.
        grid: of the tokens; each axis has learned places.
        outputs: numbers for each token.
        pool: cells of the grid, along each axis, whose tokens are averaged before the output; None keeps them apart.
    """

    def __init__(
        self,
        embed: nn.Module,
        grid: Sequence[int],
        outputs: int,
        *,
        name: str,
        width: int,
        heads: int,
        depth: int,
        causal: bool = False,
        pool: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.pool = embed, pool
        self.places = nn.ParameterList(torch.randn(n, width) * 0.35 for n in grid)
        self.blocks = nn.Sequential(*(Block(name, width, heads, causal) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def tokens(self, x: Tensor) -> Tensor:
        """What the first block reads."""
        x = self.embed(x)
        for axis, place in enumerate(self.places):
            x = x + place.view(-1, *[1] * (len(self.places) - 1 - axis), place.shape[-1])
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.tokens(x)))
        if self.pool is not None:
            for axis, cells in enumerate(self.pool):
                x = x.unflatten(1 + axis, (cells, -1)).mean(2 + axis)
        return self.head(x)


class Patches(nn.Module):
    """Pixels [B, *S, colors], a token for each patch: [B, *S / patch, width].

    Args:
        stem: convolutions of three points along each axis that follow: what is small is seen at once.
    """

    def __init__(self, colors: int, width: int, patch: Sequence[int], stem: int = 0) -> None:
        super().__init__()
        self.patch = tuple(patch)
        self.linear = nn.Linear(colors * math.prod(self.patch), width)
        made = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(self.patch)]
        self.stem = nn.ModuleList(made(width, width, 3, padding=1) for _ in range(stem))

    def forward(self, x: Tensor) -> Tensor:
        for axis, size in enumerate(self.patch):
            x = x.unfold(1 + axis, size, size)
        x = self.linear(x.flatten(1 + len(self.patch)))
        for layer in self.stem:
            x = x + layer(F.gelu(x).movedim(-1, 1)).movedim(1, -1)
        return x


class Values(nn.Module):
    """Levels [B, *G] -> [B, *G, width] of the level before, in the order of the grid; the first sees none."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(levels + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        none = torch.full_like(flat[:, :1], self.table.num_embeddings - 1)
        return self.table(torch.cat([none, flat[:, :-1]], 1).view(x.shape))
