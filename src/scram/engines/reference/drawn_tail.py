"""The hybrid's tail: keys that the queries of a row share, for all those outside the windows; joined with the head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...draws import NONE, legal_counts, ranked_keys, shared_tail, tail_values
from ...grid import Grid, LegalKeys, coordinates, grid_of, within
from ...scoring import accumulator, pair_score, weigh, widened
from ...types import Score
from .attend import CHUNK_ELEMENTS, expand, mix
from .chunks import in_chunks


def tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    head_out: Tensor,
    head_lse: Tensor,
    *,
    legal: LegalKeys,
    seed: Tensor,
    samples: int,
    stratified: bool,
    radius: Sequence[int],
    scale: float,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Head and tail together: out [B, H, *G, F], lse [B, H, *G], variance [B, H, *G, F].

    Args:
        q: [B, H, *G, E], prepared for `score`.
        k, v: [B, Hk, *G', E|F].
        index: the matches [B, H, *G, kappa]; keys within `radius` of one are in the head.
        head_out, head_lse: attention over the head, [B, H, *G, F] and [B, H, *G].
    """
    key_grid, queries = grid_of(k), math.prod(grid_of(q))
    flat_names, flat_for = shared_tail(ranked_keys(q, legal, seed), key_grid, samples, stratified)
    k_tail, v_tail = (tail_values(x, flat_names, q.shape[1]) for x in (k, v))
    flat_names, drawn = flat_names.long(), flat_names.shape[1]
    radius = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    flat_index, flat_total = index.reshape(-1, index.shape[-1]).long(), legal_counts(q, legal).reshape(-1)
    wide = accumulator(v_tail.dtype)

    def points(
        at: Tensor, q: Tensor, k_tail: Tensor, v_tail: Tensor, head_out: Tensor, head_lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        row, query = (at // queries).unsqueeze(-1), (at % queries).unsqueeze(-1)
        key, new = expand(flat_index[at], key_grid, radius)
        left = (flat_total[at] - (new & legal.allows(row, query, key)).sum(-1)).to(wide)  # M_i - |S_i|
        name = flat_names[row.squeeze(-1)]
        safe = torch.where(name == NONE, 0, name)
        counts = (name != NONE) & legal.allows(row, query, safe) & ~covered(safe, flat_index[at], key_grid, radius)
        seen = counts.sum(-1).to(wide)  # m_i
        k_seen = torch.where(counts.unsqueeze(-1), k_tail[row.squeeze(-1)], 0)
        v_seen = torch.where(counts.unsqueeze(-1), v_tail[row.squeeze(-1)], 0).to(wide)
        a = scale * pair_score(q[at].unsqueeze(1), k_seen, score).to(wide)
        each = left.unsqueeze(-1) / seen.clamp(min=1).unsqueeze(-1) if flat_for is None else flat_for[row.squeeze(-1)]
        a = a + torch.where(counts, each, 1).to(wide).log()
        # The head is one more key: its score is its lse, its value its out.
        head = head_lse[at].to(wide).unsqueeze(-1)
        p, lse = weigh(torch.cat([a, head], 1), torch.cat([counts, head != -torch.inf], 1), "softmax")
        p_tail, p_head = p[:, :drawn], p[:, drawn:]
        out = mix(p_tail, v_seen) + torch.where(head == -torch.inf, 0, p_head * head_out[at].to(wide))
        with torch.no_grad():
            variance = tail_variance(p_tail, v_seen, out, counts, left)
        return out, lse, variance

    q_wide, k_wide, v_wide = widened(score, q, k_tail, v_tail)
    tensors = (q_wide.flatten(0, -2), k_wide, v_wide, head_out.flatten(0, -2), head_lse.flatten())
    size = max(1, CHUNK_ELEMENTS // max(drawn * (q.shape[-1] + 2 * v_tail.shape[-1]), 1))
    out, lse, variance = in_chunks(points, math.prod(q.shape[:-1]), size, tensors)
    shape = (*q.shape[:-1], v_tail.shape[-1])
    return out.to(v_tail.dtype).reshape(shape), lse.reshape(q.shape[:-1]), variance.reshape(shape)


def covered(key: Tensor, match: Tensor, key_grid: Grid, radius: Sequence[int]) -> Tensor:
    """Whether each key [C, m] lies in the window of any of the matches [C, kappa]."""
    place = [c.unsqueeze(-1) for c in coordinates(key, key_grid)]
    there = (match >= 0) & (match < math.prod(key_grid))
    centre = [c.unsqueeze(1) for c in coordinates(torch.where(there, match, 0), key_grid)]
    return (within(place, centre, radius) & there.unsqueeze(1)).any(-1)


def tail_variance(p: Tensor, v: Tensor, out: Tensor, counts: Tensor, left: Tensor) -> Tensor:
    """Of each component of out, from the weights [C, m] and values [C, m, F] of the keys that count [C, m]."""
    seen = counts.sum(-1, keepdim=True).to(p.dtype)
    r = torch.where(counts.unsqueeze(-1), p.unsqueeze(-1) * (v - out.unsqueeze(1)), 0)
    mean = r.sum(1) / seen.clamp(min=1)
    spread = torch.where(counts.unsqueeze(-1), r - mean.unsqueeze(1), 0).square().sum(1)
    factor = (1 - seen / left.clamp(min=1).unsqueeze(-1)) * seen / (seen - 1)
    known = torch.where(seen >= 2, factor * spread, torch.inf)
    return torch.where(seen == left.unsqueeze(-1), 0, known)
