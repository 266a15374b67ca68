"""The drawn tail of `DrawnKeys`: keys that the queries of a row share stand for all keys outside the windows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.calls import DrawnTail, DrawnTailCall
from ...spec.draws import NONE, allowed_counts, by_heads, ranked_keys, shared_tail, tail_values, unmasked_later
from ...spec.grid import AllowedKeys, grid_of
from ...spec.scoring import accumulator, normalized_weights, pair_score, widened
from .attend import CHUNK_ELEMENTS, kept, mix
from .chunks import in_chunks
from .windows import Windows


def drawn_tail(call: DrawnTailCall) -> DrawnTail:
    """Windows and tail together. A query does not draw the keys in its windows again."""
    q = call.q
    k = call.k
    key_grid = grid_of(k)
    queries = math.prod(grid_of(q))
    allowed = AllowedKeys.of(q, k, call.causal, call.key_mask)
    ranked = ranked_keys(q, allowed, call.seed, call.rows)
    unmasked = unmasked_later(allowed)
    names, represents = shared_tail(ranked, key_grid, call.samples, call.stratified, unmasked)
    k_tail, v_tail = (tail_values(x, names, q.shape[1]) for x in (k, call.v))
    flat_names = names.long()
    drawn = names.shape[1]
    flat_total = allowed_counts(q, allowed).reshape(-1)
    wide = accumulator(v_tail.dtype)
    windows = Windows(call.index, key_grid, call.radius)

    def points(
        at: Tensor, q: Tensor, k_tail: Tensor, v_tail: Tensor, near_out: Tensor, near_lse: Tensor
    ) -> tuple[Tensor, ...]:
        row = (at // queries).unsqueeze(-1)  # [C, 1]
        query = (at % queries).unsqueeze(-1)  # [C, 1]
        key, new = windows.of(row, query)  # [C, keys of the windows]
        left = (flat_total[at] - (new & allowed.allows(row, query, key)).sum(-1)).to(wide)  # M_i - |S_i|
        name = flat_names[row.squeeze(-1)]  # [C, m]
        safe = torch.where(name == NONE, 0, name)
        counts = (name != NONE) & allowed.allows(row, query, safe) & ~windows.hold(row, query, safe)
        seen = counts.sum(-1).to(wide)  # m_i
        k_seen = torch.where(counts.unsqueeze(-1), k_tail[row.squeeze(-1)], 0)  # [C, m, E]
        v_seen = torch.where(counts.unsqueeze(-1), v_tail[row.squeeze(-1)], 0).to(wide)  # [C, m, F]
        a = call.scale * pair_score(q[at].unsqueeze(1), k_seen, call.score).to(wide)
        each = left / seen.clamp(min=1)
        offset = torch.where(seen > 0, each, 1).log() if represents is None else torch.zeros_like(each)
        stands_for = each.unsqueeze(-1) if represents is None else represents[row.squeeze(-1)]
        a = a + torch.where(counts, stands_for, 1).to(wide).log()
        # The windows are one more key: its score is their lse, its value their out.
        near_score = near_lse[at].to(wide).unsqueeze(-1)  # [C, 1]
        p, lse = normalized_weights(
            torch.cat([a, near_score], 1), torch.cat([counts, near_score != -torch.inf], 1), "softmax"
        )
        p_tail = p[:, :drawn]
        p_near = p[:, drawn:]
        if call.dropout_seed is not None:
            p_tail = torch.where(kept(call, row, query, safe), p_tail / (1 - call.dropout_p), 0)
        out = mix(p_tail, v_seen) + torch.where(near_score == -torch.inf, 0, p_near * near_out[at].to(wide))
        with torch.no_grad():
            variance = torch.full_like(out, torch.inf)
            if call.dropout_seed is None:
                variance = tail_variance(p_tail, v_seen, out, counts, left)
        return out, lse, variance, offset

    q_wide, k_wide, v_wide = widened(call.score, q, k_tail, v_tail)
    tensors = (q_wide.flatten(0, -2), k_wide, v_wide, call.near_out.flatten(0, -2), call.near_lse.flatten())
    each = max(drawn * (q.shape[-1] + 2 * v_tail.shape[-1]), windows.size, 1)
    size = max(1, CHUNK_ELEMENTS // each)
    out, lse, variance, offset = in_chunks(points, math.prod(q.shape[:-1]), size, tensors)
    shape = (*q.shape[:-1], v_tail.shape[-1])
    out = out.to(v_tail.dtype).reshape(shape)
    lse = lse.reshape(shape[:-1])
    offset = offset.reshape(shape[:-1])
    return DrawnTail(out, lse, variance.reshape(shape), offset, *by_heads(q, names, represents))


def tail_variance(p: Tensor, v: Tensor, out: Tensor, counts: Tensor, left: Tensor) -> Tensor:
    """Of each component of out, from the weights [C, m] and values [C, m, F] of the keys that count [C, m]."""
    seen = counts.sum(-1, keepdim=True).to(p.dtype)
    r = torch.where(counts.unsqueeze(-1), p.unsqueeze(-1) * (v - out.unsqueeze(1)), 0)
    mean = r.sum(1) / seen.clamp(min=1)
    spread = torch.where(counts.unsqueeze(-1), r - mean.unsqueeze(1), 0).square().sum(1)
    factor = (1 - seen / left.clamp(min=1).unsqueeze(-1)) * seen / (seen - 1)
    known = torch.where(seen >= 2, factor * spread, torch.inf)
    return torch.where(seen == left.unsqueeze(-1), 0, known)
