"""Attention over keys that each query visited on its own, each with a weight; shared by the two samplers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...grid import grid_of, key_row, rows
from ...scoring import accumulator, pair_score, weigh, widened
from ...types import Score
from .attend import CHUNK_ELEMENTS, mix
from .chunks import in_chunks

# points [C] -> the keys they visit [C, T], the log of their weights [C, T] (-inf: none), and diagnostics [C] each
Visit = Callable[[Tensor], tuple[Tensor, Tensor, tuple[Tensor, ...]]]


def attend_visited(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_out: Tensor | None,
    head_lse: Tensor | None,
    visit: Visit,
    *,
    samples: int,
    scale: float,
    score: Score,
    flat: bool,
) -> tuple[Tensor, ...]:
    """out, lse, variance, ess, and the diagnostics of `visit`; a key weighs exp(score) times its weight.

    `flat`: the visits themselves are in proportion to exp(score), so each weighs the same, and the score only carries
    the gradient. The head, if any, is exact attention over other keys: out [B, H, *G, F], lse [B, H, *G].
    """
    heads, key_heads, keys = q.shape[1], k.shape[1], math.prod(grid_of(k))
    queries, wide = math.prod(grid_of(q)), accumulator(v.dtype)
    if head_out is None or head_lse is None:
        head_out, head_lse = v.new_zeros(*q.shape[:-1], v.shape[-1]), v.new_full(q.shape[:-1], -torch.inf)

    def points(at: Tensor, q: Tensor, k: Tensor, v: Tensor, head_out: Tensor, head_lse: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            key, log_weight, told = visit(at)
        source = key_row(at // queries, heads, key_heads).unsqueeze(-1) * keys
        counts = log_weight > -torch.inf
        where = source + torch.where(counts, key, 0)
        k_seen = torch.where(counts.unsqueeze(-1), k[where], 0)
        v_seen = torch.where(counts.unsqueeze(-1), v[where], 0).to(wide)
        a = scale * pair_score(q[at].unsqueeze(1), k_seen, score).to(wide)
        a = a - a.detach() if flat else a + torch.where(counts, log_weight, 0).to(wide)
        head = head_lse[at].to(wide).unsqueeze(-1)
        p, lse = weigh(torch.cat([a, head], 1), torch.cat([counts, head != -torch.inf], 1), "softmax")
        p_seen, p_head = p[:, :samples], p[:, samples:]
        out = mix(p_seen, v_seen) + torch.where(head == -torch.inf, 0, p_head * head_out[at].to(wide))
        with torch.no_grad():
            r = torch.where(counts.unsqueeze(-1), p_seen.unsqueeze(-1) * (v_seen - out.unsqueeze(1)), 0)
            # Without a head the sum of r is 0: what is subtracted is the part of the samples in a joint mean.
            variance = (r.square().sum(1) - r.sum(1).square() / samples).clamp(min=0)
            some = counts.any(-1)
            variance = torch.where(some.unsqueeze(-1), variance, torch.inf)
            share = p_seen / p_seen.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
            ess = torch.where(some, share.sum(-1).square() / share.square().sum(-1), 0)
        return out, lse, variance, ess, *told

    tensors = (*(rows(x).flatten(0, 1) for x in widened(score, q, k, v)), head_out.flatten(0, -2), head_lse.flatten())
    size = max(1, CHUNK_ELEMENTS // (samples * (q.shape[-1] + 2 * v.shape[-1])))
    out, lse, variance, *told = in_chunks(points, math.prod(q.shape[:-1]), size, tensors)
    shape = (*q.shape[:-1], v.shape[-1])
    each = (x.reshape(q.shape[:-1]) for x in told)
    return out.to(v.dtype).reshape(shape), lse.reshape(shape[:-1]), variance.reshape(shape), *each
