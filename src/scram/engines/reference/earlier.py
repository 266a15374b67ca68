"""Attention of every query over the keys up to its own place, all of them, in causal order."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.calls import EarlierCall
from ...results import Attended
from ...spec.noise import noise, numbered
from ...spec.scoring import accumulator, normalized_weights


def earlier(call: EarlierCall) -> Attended:
    """Row by row; of a key that may not be attended nothing is read."""
    q = call.q
    wide = accumulator(call.v.dtype)
    batch, heads, length, _ = q.shape
    below = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    outs = []
    sums = []
    for row in range(batch * heads):
        source = row // heads * call.k.shape[1] + row % heads // (heads // call.k.shape[1])
        k = call.k.flatten(0, 1)[source].to(wide)  # [S, E]
        v = call.v.flatten(0, 1)[source].to(wide)  # [S, F]
        allowed = below
        if call.usable is not None:
            mask = call.usable.flatten(0, 1)[source]
            k = torch.where(mask.unsqueeze(-1), k, 0)
            v = torch.where(mask.unsqueeze(-1), v, 0)
            allowed = below & mask
        p, lse = normalized_weights(call.scale * (q.flatten(0, 1)[row].to(wide) @ k.T), allowed, "softmax")
        outs.append(_kept(call, row, p) @ v)
        sums.append(lse)
    if not outs:
        reach = q.sum() + call.k.sum() + call.v.sum()  # no element holds it; the gradients are empty, not missing
        out = call.v.new_zeros(*q.shape[:-1], call.v.shape[-1])
        return Attended(out + reach, q.new_zeros(q.shape[:-1], dtype=wide) + reach)
    out = torch.stack(outs).to(call.v.dtype).reshape(*q.shape[:-1], call.v.shape[-1])
    return Attended(out, torch.stack(sums).reshape(q.shape[:-1]))


def _kept(call: EarlierCall, row: int, p: Tensor) -> Tensor:
    """What dropout makes of the weights p [S, S] of a row."""
    if call.dropout_seed is None:
        return p
    place = torch.arange(len(p), device=p.device)
    number = numbered(torch.tensor(row, dtype=torch.int64, device=p.device), call.rows)
    bits = noise(call.dropout_seed, number, place.unsqueeze(1), place)
    return torch.where(bits >= int(call.dropout_p * 2**32), p / (1 - call.dropout_p), 0)
