"""Plain baselines of `scram judge` and of the frontier: keys that an oracle knows, random features, blocks of keys.

Every one takes q, k `[B, H, *G, E]`, v `[B, H, *G, F]` of one grid and the scale of the scores, and returns out
`[B, H, *G, F]`. Blocks are tiles of the grid: 8 x 8 points of a picture. Blocks of queries choose blocks of keys by the
dot product of their means, as block-sparse attentions do that need no training. The best blocks are attended exactly.
The others are left out, or each stands for its keys by their mean key, their mean value and their number.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.dense import fused_attention

SIDES = {1: 64, 2: 8, 3: 4, 4: 3}  # of a block by the rank of the grid
CHUNK = 1 << 20  # numbers at a time: what a cache holds, so that no fresh memory is needed
LEAST_EXPONENT = -40.0  # of random features: products of smaller ones are subnormal, which is very slow on a CPU


def top_keys(q: Tensor, k: Tensor, v: Tensor, scale: float, count: int = 64) -> Tensor:
    """Each query attends the keys of its highest scores, which come from all scores: an oracle, slower than dense."""
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    count = min(count, flat[1].shape[2])
    some = max(1, CHUNK // (q.shape[0] * q.shape[1] * max(flat[1].shape[2], count * v.shape[-1])))
    parts = []
    for part in torch.split(flat[0], some, 2):  # [B, H, n, E]
        score, index = (scale * part @ flat[1].mT).topk(count, -1)  # [B, H, n, count]
        rows = index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, v.shape[-1])
        values = flat[2].gather(2, rows).reshape(*index.shape, -1)  # [B, H, n, count, F]
        parts.append((score.softmax(-1).unsqueeze(-2) @ values).squeeze(-2))
    return torch.cat(parts, 2).reshape(*q.shape[:-1], v.shape[-1])


def random_features(q: Tensor, k: Tensor, v: Tensor, scale: float, count: int = 256, seed: int = 0) -> Tensor:
    """Positive orthogonal random features of the softmax kernel, as Performers have them: linear attention."""
    width = q.shape[-1]
    draws = torch.Generator("cpu").manual_seed(seed)
    blocks = [
        torch.linalg.qr(torch.randn(width, width, generator=draws, dtype=torch.float32, device="cpu"))[0]
        for _ in range(-(-count // width))
    ]
    lengths = torch.randn(count, width, generator=draws, dtype=torch.float32, device="cpu").norm(dim=-1, keepdim=True)
    directions = (torch.cat(blocks, 1).T[:count] * lengths).to(q)  # [count, E]

    def exponents(x: Tensor) -> Tensor:
        """[B, H, n, E] -> [B, H, n, count]."""
        x = x * scale**0.5
        products: Tensor = x @ directions.T
        return products - x.square().sum(-1, keepdim=True) / 2

    # Neither factor changes the softmax: one for each query, one for all keys of a head.
    some = max(1, CHUNK // (q.shape[0] * q.shape[1] * count))
    keys = torch.split(k.flatten(2, -2), some, 2)
    most = torch.stack([exponents(part).amax((-1, -2), keepdim=True) for part in keys]).amax(0)  # [B, H, 1, 1]
    values = torch.cat([v.flatten(2, -2), torch.ones_like(k.flatten(2, -2)[..., :1])], -1)  # the last: the normalizer
    summed = torch.zeros(*k.shape[:2], count, values.shape[-1], dtype=q.dtype, device=q.device)
    for part, its in zip(keys, torch.split(values, some, 2), strict=True):
        summed += (exponents(part) - most).clamp(min=LEAST_EXPONENT).exp().mT @ its
    outs = []
    for part in torch.split(q.flatten(2, -2), some, 2):
        of_q = exponents(part)
        out = (of_q - of_q.amax(-1, keepdim=True)).clamp(min=LEAST_EXPONENT).exp() @ summed
        outs.append(out[..., :-1] / out[..., -1:])
    return torch.cat(outs, 2).reshape(*q.shape[:-1], v.shape[-1])


class Blocks(NamedTuple):
    """The points of a grid by blocks."""

    points: Tensor  # [T, S] their flat numbers, 0 for padding
    real: Tensor  # [T, S] False for padding
    place: Tensor  # [N] of each point among all places of blocks

    def of(self, x: Tensor) -> Tensor:
        """[B, H, *G, E] -> [B, H, T, S, E], 0 for padding."""
        taken = x.flatten(2, -2)[:, :, self.points.flatten()]
        return taken.reshape(*x.shape[:2], *self.points.shape, -1) * self.real.unsqueeze(-1)

    def mean(self, x: Tensor) -> Tensor:
        """[B, H, T, S, E] -> [B, H, T, E], padding left out."""
        return x.sum(-2) / self.real.sum(-1, keepdim=True)

    def joined(self, x: Tensor, grid: torch.Size) -> Tensor:
        """[B, H, T, S, F] -> [B, H, *G, F]."""
        return x.flatten(2, 3)[:, :, self.place].reshape(*x.shape[:2], *grid, -1)


@cache
def blocks_of(grid: torch.Size, device: torch.device) -> Blocks:
    """The blocks of a grid of rank 1 to 4."""
    side = SIDES[len(grid)]
    padding = [pad for extent in reversed(grid) for pad in (0, -extent % side)]
    number = F.pad(torch.arange(math.prod(grid), device=device).reshape(grid), padding, value=-1)
    split = number.reshape([n for extent in number.shape for n in (extent // side, side)])
    order = [*range(0, split.ndim, 2), *range(1, split.ndim, 2)]
    index = split.permute(order).reshape(-1, side ** len(grid))  # [T, S]
    return Blocks(index.clamp(0), index >= 0, index.flatten().argsort(stable=True)[(index < 0).sum() :])


def best_blocks(q: Tensor, k: Tensor, blocks: Blocks, count: int) -> Tensor:
    """Numbers of the blocks of keys that each block of queries attends, [B, H, T, count], from q, k [B, H, T, S, E]."""
    scores = blocks.mean(q) @ blocks.mean(k).mT  # [B, H, T, T]
    return scores.topk(min(count, scores.shape[-1]), -1).indices


def near_blocks(blocks: Blocks, grid: torch.Size, reach: int) -> tuple[Tensor, Tensor]:
    """Numbers of the blocks around each block, first those that count, and how many count: [T, most] and [T]."""
    side = SIDES[len(grid)]
    axes = (torch.arange(-(-extent // side), device=blocks.points.device) for extent in grid)
    at = torch.cartesian_prod(*axes).reshape(-1, len(grid))  # [T, rank]
    near = ((at[:, None] - at[None]).abs() <= reach).all(-1)  # [T, T]
    numbers = near.sum(-1)
    return near.int().argsort(dim=-1, descending=True, stable=True)[:, : int(numbers.max())], numbers


def block_sparse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, count: int = 16, means: bool = False, reach: int | None = None
) -> Tensor:
    """Each block of queries attends its `count` best blocks of keys exactly, or all blocks within `reach` of its own.

    With `means` the other blocks stand for their keys.
    """
    blocks = blocks_of(q.shape[2:-1], q.device)
    in_q, in_k, in_v = (blocks.of(x) for x in (q, k, v))  # [B, H, T, S, E]
    chosen, numbers = _chosen(in_q, in_k, blocks, q.shape[2:-1], count, reach)
    counts = torch.arange(chosen.shape[-1], device=q.device) < numbers.unsqueeze(-1)  # [B, H, T, most]
    mean_k, mean_v = blocks.mean(in_k), blocks.mean(in_v)
    sizes = blocks.real.sum(-1).to(q.dtype).log()  # [T]
    rows = q.shape[0] * q.shape[1]
    row = torch.arange(rows, device=q.device).reshape(*q.shape[:2], 1, 1)
    some = max(1, CHUNK // (rows * chosen.shape[-1] * in_k.shape[3] * q.shape[-1]))
    outs = []
    for part, which, real in zip(*(torch.split(x, some, 2) for x in (in_q, chosen, counts)), strict=True):
        keys, values = (x.flatten(0, 1)[row, which].flatten(3, 4) for x in (in_k, in_v))  # [B, H, t, most * S, E]
        allowed = (blocks.real[which] & real.unsqueeze(-1)).flatten(3, 4).unsqueeze(-2)  # [B, H, t, 1, most * S]
        bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~allowed, -torch.inf)
        if means:
            keys, values = (
                torch.cat([near, far.unsqueeze(2).expand(-1, -1, part.shape[2], -1, -1)], 3)
                for near, far in ((keys, mean_k), (values, mean_v))
            )
            far = sizes.expand(*which.shape[:3], -1).scatter(-1, which, -torch.inf)  # [B, H, t, T]
            bias = torch.cat([bias, far.unsqueeze(-2)], -1)
        outs.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=bias, scale=scale))
    return blocks.joined(torch.cat(outs, 2), q.shape[2:-1])


def _chosen(
    q: Tensor, k: Tensor, blocks: Blocks, grid: torch.Size, count: int, reach: int | None
) -> tuple[Tensor, Tensor]:
    """Blocks of keys of each block of queries [B, H, T, most], and how many of them count [B, H, T]."""
    if reach is None:
        best = best_blocks(q, k, blocks, count)
        return best, torch.full(best.shape[:-1], best.shape[-1], dtype=torch.int64, device=q.device)
    order, numbers = near_blocks(blocks, grid, reach)
    return order.expand(*q.shape[:2], -1, -1), numbers.expand(*q.shape[:2], -1)


@lru_cache(maxsize=1)
def _compiled_flex(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    """FlexAttention for such tensors: torch keeps only a few programs of one function."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def flex_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, count: int = 16, reach: int | None = None) -> Tensor:
    """`block_sparse` without means by torch's compiled FlexAttention."""
    from torch.nn.attention.flex_attention import BlockMask

    grid = q.shape[2:-1]
    blocks = blocks_of(grid, q.device)
    in_q, in_k, in_v = (blocks.of(x) for x in (q, k, v))
    many, size = blocks.points.shape
    chosen, numbers = _chosen(in_q, in_k, blocks, grid, count, reach)
    real = blocks.real.flatten()
    mask = BlockMask.from_kv_blocks(
        numbers.int().contiguous(),
        F.pad(chosen, (0, many - chosen.shape[-1])).int().contiguous(),
        BLOCK_SIZE=size,
        mask_mod=lambda b, h, i, j: real[j],
        seq_lengths=(many * size, many * size),
    )
    flat = [x.flatten(2, 3) for x in (in_q, in_k, in_v)]
    out: Tensor = _compiled_flex(flat[0].shape, q.dtype, q.device)(*flat, block_mask=mask, scale=scale)
    return blocks.joined(out.reshape(*out.shape[:2], many, size, -1), grid)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's dense attention."""
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    return fused_attention(flat[0], flat[1], flat[2], scale=scale).reshape(*q.shape[:-1], v.shape[-1])
