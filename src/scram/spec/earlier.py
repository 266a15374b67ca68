"""Attention of every query over the keys up to its own place, block by block, in plain torch.

For engines without a kernel of their own: on a CPU torch's matrix products are the fastest.
A block of queries meets all keys up to its end. Scores of later keys are selected away, so that nothing of these
reaches a query or its gradients, whatever their size. Some rows are taken at a time: nothing of size S x S is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.calls import EarlierCall, EarlierGrads
from .noise import noise, numbered
from .scoring import accumulator

BLOCK = 128  # queries that meet the keys at a time
CHUNK_ELEMENTS = 1 << 21  # of scores at a time


class Rows(NamedTuple):
    """Some rows of keys and the queries that read them."""

    q: Tensor  # [R, g, S, E]
    k: Tensor  # [R, S, E]
    v: Tensor  # [R, S, F]
    key_mask: Tensor | None  # bool [R, S]
    number: Tensor  # int64 [R, g], what the noise of a row of queries is keyed by
    some: slice  # of all rows of keys

    def block(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Some queries of a tensor like q, those of a group one below the other: [R, g * n, width]."""
        return x[:, :, begin:end].flatten(1, 2)

    def apart(self, x: Tensor) -> Tensor:
        """The inverse: [R, g * n, ...] -> [R, g, n, ...]."""
        group = self.q.shape[1]
        return x.reshape(x.shape[0], group, x.shape[1] // group, *x.shape[2:])


class Block(NamedTuple):
    """Some queries of some rows, and what they have of the keys up to the last of them."""

    begin: int
    end: int
    allowed: Tensor  # bool [g * n, n], of the last n keys
    scores: Tensor  # [R, g * n, end], -inf where not allowed


def _rows(call: EarlierCall) -> Iterator[Rows]:
    batch, heads, length, width = call.q.shape
    key_heads = call.k.shape[1]
    group = heads // max(key_heads, 1)
    wide = accumulator(call.v.dtype)
    q = call.q.detach().reshape(batch * key_heads, group, length, width)
    k = call.k.detach().flatten(0, 1)
    v = call.v.detach().flatten(0, 1)
    number = numbered(torch.arange(batch * heads, device=q.device), call.rows).reshape(-1, group)
    mask = None if call.usable is None else call.usable.flatten(0, 1)
    step = max(1, CHUNK_ELEMENTS // max(1, group * min(BLOCK, length) * length))
    for begin in range(0, len(k), step):
        some = slice(begin, begin + step)
        some_q, some_k, some_v = (x[some].to(wide) for x in (q, k, v))
        yield Rows(some_q, some_k, some_v, None if mask is None else mask[some], number[some], some)


def _blocks(call: EarlierCall, rows: Rows) -> Iterator[Block]:
    length = rows.k.shape[1]
    group = rows.q.shape[1]
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        scores = (rows.block(rows.q, begin, end) * call.scale) @ rows.k[:, :end].mT  # [R, g * n, end]
        place = torch.arange(begin, end, device=scores.device)
        allowed = (place <= place.unsqueeze(1)).repeat(group, 1)  # [g * n, n]
        scores[..., begin:].masked_fill_(~allowed, -torch.inf)
        if rows.key_mask is not None:
            scores.masked_fill_(~rows.key_mask[:, None, :end], -torch.inf)
        yield Block(begin, end, allowed, scores)


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [.., n], in place, to weights that sum to 1, or to 0 without a key; and the log of their sum."""
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)  # -inf - -inf is NaN
    p = scores.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total.log() + top, -torch.inf)
    return p.div_(torch.where(total > 0, total, 1)), lse.squeeze(-1)


def _share(call: EarlierCall, rows: Rows, block: Block) -> Tensor | None:
    """What dropout multiplies the weights of a block by; None without dropout."""
    if call.dropout_seed is None:
        return None
    query = torch.arange(block.begin, block.end, device=rows.q.device).unsqueeze(1)
    bits = noise(call.dropout_seed, rows.number[..., None, None], query, torch.arange(block.end, device=query.device))
    kept = (bits >= int(call.dropout_p * 2**32)).flatten(1, 2)  # [R, g * n, end]
    return kept.to(rows.q.dtype) / (1 - call.dropout_p)


def earlier(call: EarlierCall) -> tuple[Tensor, Tensor]:
    """out [B, H, S, F] and lse [B, H, S]."""
    q = call.q
    wide = accumulator(call.v.dtype)
    out = q.new_empty((*q.shape[:-1], call.v.shape[-1]), dtype=wide)
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    for rows in _rows(call):
        group = rows.q.shape[1]
        all_out = out.view(-1, group, *out.shape[2:])[rows.some]  # [R, g, S, F]
        all_lse = lse.view(-1, group, lse.shape[2])[rows.some]  # [R, g, S]
        for block in _blocks(call, rows):
            p, sums = _weights(block.scores)
            share = _share(call, rows, block)
            p = p if share is None else p.mul_(share)
            values = _selected(rows.v, rows.key_mask)[:, : block.end]
            all_out[:, :, block.begin : block.end] = rows.apart(p @ values)
            all_lse[:, :, block.begin : block.end] = rows.apart(sums)
    return out.to(call.v.dtype), lse


def earlier_backward(call: EarlierCall, out: Tensor, grad_out: Tensor, grad_lse: Tensor) -> EarlierGrads:
    wide = accumulator(call.v.dtype)
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (call.q, call.k, call.v))
    for rows in _rows(call):
        group = rows.q.shape[1]
        by_row = (x.to(wide).reshape(-1, group, *x.shape[2:])[rows.some] for x in (out, grad_out, grad_lse))
        row_out, row_grad, row_lse = by_row
        delta = (row_out * row_grad).sum(-1) - row_lse  # [R, g, S]
        q_grad = d_q.view(-1, group, *d_q.shape[2:])[rows.some]
        k_grad = d_k.flatten(0, 1)[rows.some]
        v_grad = d_v.flatten(0, 1)[rows.some]
        for block in _blocks(call, rows):
            begin, end = block.begin, block.end
            p, _ = _weights(block.scores)
            grad = rows.block(row_grad, begin, end)  # [R, g * n, F]
            d_p = grad @ _selected(rows.v, rows.key_mask)[:, :end].mT  # [R, g * n, end]
            share = _share(call, rows, block)
            v_grad[:, :end] += (p if share is None else p * share).mT @ grad
            d_p = d_p if share is None else d_p.mul_(share)
            d_s = d_p.sub_(delta[:, :, begin:end].flatten(1).unsqueeze(-1)).mul_(p)
            d_s[..., begin:].masked_fill_(~block.allowed, 0)  # what is too large times 0 is NaN
            if rows.key_mask is not None:
                d_s.masked_fill_(~rows.key_mask[:, None, :end], 0)
            d_s = d_s.mul_(call.scale)
            q_grad[:, :, begin:end] = rows.apart(d_s @ _selected(rows.k, rows.key_mask)[:, :end])
            k_grad[:, :end] += d_s.mT @ rows.block(rows.q, begin, end)
    return EarlierGrads(d_q.to(call.q.dtype), d_k.to(call.k.dtype), d_v.to(call.v.dtype))


def _selected(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys or values [R, S, width], zero where they may not be attended."""
    return x if key_mask is None else torch.where(key_mask.unsqueeze(-1), x, 0)
