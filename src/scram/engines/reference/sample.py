"""Attention over keys that each query visits on its own, drawn (Snis) or walked to (MetropolisHastings)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import SampleCall, Sampled
from ...spec.grid import grid_of, key_row, rows
from ...spec.scoring import accumulator, normalized_weights, pair_score, widened
from .attend import CHUNK_ELEMENTS, mix
from .chunks import in_chunks
from .draw import draws_of
from .walk import walks_of


def sample(call: SampleCall) -> Sampled:
    """Attention over the keys that each query visits; a key weighs exp(score) times its weight.

    Walks visit keys in proportion to exp(score): their visits weigh the same, and the score only carries the gradient.
    Extra keys, if any, are attended exactly before: their out and lse join as one more key.
    """
    q = call.q
    k = call.k
    v = call.v
    samples = call.samples
    walks = call.method == "metropolis"
    visit = walks_of(call) if walks else draws_of(call)
    extra_out = call.near_out
    extra_lse = call.near_lse
    heads = q.shape[1]
    key_heads = k.shape[1]
    keys = math.prod(grid_of(k))
    queries = math.prod(grid_of(q))
    wide = accumulator(v.dtype)
    if extra_out is None or extra_lse is None:
        extra_out = v.new_zeros(*q.shape[:-1], v.shape[-1])
        extra_lse = v.new_full(q.shape[:-1], -torch.inf)

    def points(at: Tensor, q: Tensor, k: Tensor, v: Tensor, extra_out: Tensor, extra_lse: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            key, log_weight, diagnostics = visit(at)  # [C, T], [C, T], [C] each
        source = key_row(at // queries, heads, key_heads).unsqueeze(-1) * keys
        counts = log_weight > -torch.inf
        where = source + torch.where(counts, key, 0)
        k_seen = torch.where(counts.unsqueeze(-1), k[where], 0)  # [C, T, E]
        v_seen = torch.where(counts.unsqueeze(-1), v[where], 0).to(wide)  # [C, T, F]
        a = call.scale * pair_score(q[at].unsqueeze(1), k_seen, call.score).to(wide)
        a = a - a.detach() if walks else a + torch.where(counts, log_weight, 0).to(wide)
        extra_score = extra_lse[at].to(wide).unsqueeze(-1)  # [C, 1]
        p, lse = normalized_weights(
            torch.cat([a, extra_score], 1), torch.cat([counts, extra_score != -torch.inf], 1), "softmax"
        )
        p_seen = p[:, :samples]
        p_extra = p[:, samples:]
        out = mix(p_seen, v_seen) + torch.where(extra_score == -torch.inf, 0, p_extra * extra_out[at].to(wide))
        with torch.no_grad():
            r = torch.where(counts.unsqueeze(-1), p_seen.unsqueeze(-1) * (v_seen - out.unsqueeze(1)), 0)
            # Without extra keys the sum of r is 0: what is subtracted is the part of the samples in a joint mean.
            variance = (r.square().sum(1) - r.sum(1).square() / samples).clamp(min=0)
            some = counts.any(-1)
            variance = torch.where(some.unsqueeze(-1), variance, torch.inf)
            share = p_seen / p_seen.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).tiny)
            ess = torch.where(some, share.sum(-1).square() / share.square().sum(-1), 0)
        return out, lse, variance, ess, *(diagnostics or (ess, ess))

    tensors = (
        *(rows(x).flatten(0, 1) for x in widened(call.score, q, k, v)),
        extra_out.flatten(0, -2),
        extra_lse.flatten(),
    )
    size = max(1, CHUNK_ELEMENTS // (samples * (q.shape[-1] + 2 * v.shape[-1])))
    out, lse, variance, *diagnostics = in_chunks(points, math.prod(q.shape[:-1]), size, tensors)
    shape = (*q.shape[:-1], v.shape[-1])
    each = (x.reshape(q.shape[:-1]) for x in diagnostics)
    return Sampled(out.to(v.dtype).reshape(shape), lse.reshape(shape[:-1]), variance.reshape(shape), *each)
