"""Attention of the newest positions over a cache, in plain torch: one softmax over three kinds of keys.

The keys of their own stretch, one by one; the routed keys of their tile; and the clusters of all earlier stretches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.calls import DecodeCall
from .routing import MOST_RAISED
from .scoring import accumulator
from .stretches import fine_features


def decode(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """out [B, H, n, F] and lse [B, H, n]."""
    batch, heads, count, width = call.q.shape
    key_heads = call.k.shape[1]
    group = heads // key_heads
    wide = accumulator(call.v.dtype)
    whole = fine_features(call.q)  # [B, H, n]
    q = torch.where(whole.unsqueeze(-1), call.q, 0).to(wide) * call.scale  # [B, H, n, E]
    by_key = q.reshape(batch, key_heads, group * count, width)  # [B, Hk, g * n, E]

    def by_head(x: Tensor) -> Tensor:
        """[B, Hk, g * n, ..] -> [B, H, n, ..]"""
        return x.reshape(batch, heads, count, x.shape[-1])

    def mixed(p: Tensor, values: Tensor) -> Tensor:
        """Weights [B, H, n, L] and values [B, Hk, L, F] -> [B, H, n, F]."""
        return by_head(p.reshape(batch, key_heads, group * count, p.shape[-1]) @ values.to(wide))

    number = call.k.shape[2]
    own = by_head(by_key @ call.k.to(wide).mT)  # [B, H, n, L]
    hidden = ~call.usable.repeat_interleave(group, 1).unsqueeze(2)  # [B, H, 1, L]
    if count > 1:
        at = torch.arange(number, device=q.device)
        hidden = hidden | (at > at[number - count :].unsqueeze(1))
    scores = [own.masked_fill(hidden, -torch.inf)]
    listed = call.listed
    if listed is not None:
        each = q @ listed.k.to(wide).mT  # [B, H, n, K]
        scores.append(each.masked_fill(~listed.exists.unsqueeze(2), -torch.inf))
    seen = call.seen
    spread = None
    if seen is not None:
        spread = by_key.square() @ seen.variance.unsqueeze(-1)  # [B, Hk, g * n, 1]
        each = by_key @ seen.centers.to(wide).mT + seen.log_sizes.unsqueeze(2)  # [B, Hk, g * n, C]
        if seen.spreads is not None:
            each = each + (spread * seen.spreads.unsqueeze(2)).clamp(max=MOST_RAISED) / 2
        each = by_head(each)
        if listed is not None:
            each = each.masked_fill(listed.chosen.unsqueeze(2), -torch.inf)
        scores.append(each)
    every = torch.cat(scores, -1)
    top = every.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)
    p = (every - top).exp()
    total = p.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total.log() + top, -torch.inf).squeeze(-1)
    p = p / torch.where(total > 0, total, 1)

    out = mixed(p[..., :number], call.v)
    if listed is not None:
        out = out + p[..., number : number + listed.k.shape[2]] @ listed.v.to(wide)
    if seen is not None and spread is not None:
        share = p[..., p.shape[-1] - seen.log_sizes.shape[-1] :]
        out = out + mixed(share, seen.values)
        if seen.slope is not None:
            first = by_head(by_key @ seen.slope / (1 + spread))  # [B, H, n, F]
            if seen.spreads is not None:
                share = share * seen.spreads.repeat_interleave(group, 1).unsqueeze(2)  # [B, H, n, C]
            out = out + share.sum(-1, keepdim=True) * first
    broken = call.broken.cumsum(2)[:, :, number - count :] > 0  # [B, Hk, n]
    broken = broken.repeat_interleave(group, 1) | ~whole
    out = torch.where(broken.unsqueeze(-1), torch.nan, out)
    return out.to(call.v.dtype), torch.where(broken, torch.nan, lse)
