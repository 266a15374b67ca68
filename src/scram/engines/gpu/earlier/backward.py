"""Gradients of the attention over earlier keys, in Triton: one kernel by blocks of queries, one by blocks of keys.

No atomics: each program adds up what is its own, in one order, so that the gradients have the same bits on every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import EarlierCall, EarlierGrads
from ..primitives import (
    LOWEST,
    dropout_factor,
    finite,
    load_piece,
    load_pieces,
    power,
    product,
    softmax_step,
    store_pieces,
    zero_pieces,
)
from ..runtime.block_sizes import EARLIER_BACKWARD, EARLIER_BACKWARD_EXACT
from ..runtime.launch import Kernel, cached, kinds, on_device
from .forward import earlier_scores, flags_of, inputs_of, rows_of


class Upstream(NamedTuple):
    """What comes from above, contiguous, and what the first kernel finds for the second."""

    grad_out: Tensor  # [R, S, F]
    grad_lse: Tensor  # float32 [R, S]
    delta: Tensor  # float32 [R, S], the mean of the gradients of the weights, less grad_lse
    base: Tensor  # float32 [R, S], the largest score
    factor: Tensor  # float32 [R, S], 1 / the sum of the weights over it: a rounded lse would not make them sum to 1


def earlier_backward(call: EarlierCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> EarlierGrads:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    if not lse.numel():
        return EarlierGrads(dq.zero_(), dk.zero_(), dv.zero_())
    flags = flags_of(call, EARLIER_BACKWARD, EARLIER_BACKWARD_EXACT)
    config = flags["CONFIG"]
    batch, heads, length, _ = call.q.shape
    with on_device(call.q):
        inputs = inputs_of(call)
        scratch = (torch.empty_like(lse, memory_format=torch.contiguous_format) for _ in range(3))
        above = Upstream(grad_out.to(call.v.dtype).contiguous(), grad_lse.float().contiguous(), *scratch)
        given = kinds(*inputs, *above)
        by_query = batch * heads * triton.cdiv(length, config.BLOCK_Q)
        _kernel("queries", by_query, tuple(flags.items()), given)(inputs, above, dq)
        by_key = batch * call.k.shape[1] * triton.cdiv(length, config.BLOCK_K)
        _kernel("keys", by_key, tuple(flags.items()), given)(inputs, above, dk, dv)
    return EarlierGrads(dq, dk, dv)


@cached
def _kernel(which: str, programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(earlier_queries_kernel if which == "queries" else earlier_keys_kernel, programs, dict(flags))


@triton.jit
def weight_gradients(at, grad_out, rows, inputs, CONFIG, F):
    """Of keys [BK], after dropout, and what dropout multiplies by: both [BQ, BK]."""
    dp = tl.zeros([CONFIG.BLOCK_Q, CONFIG.BLOCK_K], tl.float32)  # [BQ, BK]
    for n in tl.static_range(len(grad_out)):
        v_block = load_piece(rows.v, at, at < inputs.length, n, F)  # [BK, F]
        dp = product(grad_out[n].to(v_block.dtype), tl.trans(v_block), dp)
    share = dropout_factor(at[None, :], rows.noise, inputs.dropout, CONFIG.DROPOUT)  # [BQ, BK] or [1, BK]
    return dp * share, share


@triton.jit
def slopes(start, q_block, upstream, rows, inputs, CONFIG, E, F, LATER: tl.constexpr):
    """Keys from `start` on [BK]: weights after dropout and the slopes of their scores, both [BQ, BK]."""
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    grad_out, delta, base, factor = upstream
    at, s, ok = earlier_scores(start, q_block, rows, inputs, CONFIG, E, LATER)
    p = tl.where(ok, power(s, base[:, None], POWER) * factor[:, None], 0.0)  # [BQ, BK]
    dp, share = weight_gradients(at, grad_out, rows, inputs, CONFIG, F)
    ds = tl.where(ok, p * (dp - delta[:, None]) * inputs.scale, 0.0)  # [BQ, BK]
    return at, p * share, ds


@triton.jit
def load_upstream(above, row, place, exists, inputs, F: tl.constexpr):
    """grad_out [BQ, F] in pieces, delta, base and factor [BQ] of some queries of a row."""
    point = row * inputs.length + place  # [BQ]
    grad_out = load_pieces(above.grad_out + row * inputs.length * F.SIZE, place, exists, F)
    delta = tl.load(above.delta + point, mask=exists, other=0.0)
    base = tl.load(above.base + point, mask=exists, other=0.0)
    factor = tl.load(above.factor + point, mask=exists, other=0.0)
    return grad_out, delta, base, factor


@triton.jit
def with_sums(state, start, q_block, grad_out, rows, inputs, CONFIG, E, F, LATER: tl.constexpr):
    """The largest score, the sum of the weights and that of their gradients with some more keys."""
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    running_max, running_sum, mean_dp = state
    at, s, ok = earlier_scores(start, q_block, rows, inputs, CONFIG, E, LATER)
    running_max, rescale, p = softmax_step(running_max, s, None, POWER, False, 1)
    dp, _ = weight_gradients(at, grad_out, rows, inputs, CONFIG, F)
    mean_dp = mean_dp * rescale + tl.sum(tl.where(ok, p * dp, 0.0), 1)
    return running_max, running_sum * rescale + tl.sum(p, 1), mean_dp


@triton.jit
def with_keys(acc, start, q_block, upstream, rows, inputs, CONFIG, E, F, LATER: tl.constexpr):
    """acc [BQ, E] with the slopes of some more keys."""
    at, _, ds = slopes(start, q_block, upstream, rows, inputs, CONFIG, E, F, LATER)
    more = ()
    for n in tl.static_range(len(acc)):
        k_block = load_piece(rows.k, at, at < inputs.length, n, E)  # [BK, E]
        more += (product(ds.to(k_block.dtype), k_block, acc[n]),)
    return more


@triton.jit
def earlier_queries_kernel(inputs, above, dq, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """dq, and delta, base and factor of every query. Program: row, block of queries."""
    blocks = (inputs.length + CONFIG.BLOCK_Q - 1) // CONFIG.BLOCK_Q
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (blocks - 1 - tl.program_id(0) % blocks) * CONFIG.BLOCK_Q
    place = first + tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
    rows = rows_of(row, row // inputs.group, place, inputs, E, F)
    q_block = load_pieces(inputs.q + row * inputs.length * E.SIZE, place, rows.exists, E)  # [BQ, E]
    zero = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    grad_out = load_pieces(above.grad_out + row * inputs.length * F.SIZE, place, rows.exists, F)
    state = (zero + LOWEST, zero, zero)
    for start in range(0, first, CONFIG.BLOCK_K):
        state = with_sums(state, start, q_block, grad_out, rows, inputs, CONFIG, E, F, False)
    for start in range(first, tl.minimum(first + CONFIG.BLOCK_Q, inputs.length), CONFIG.BLOCK_K):
        state = with_sums(state, start, q_block, grad_out, rows, inputs, CONFIG, E, F, True)
    base, total, mean_dp = state
    factor = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)  # [BQ]
    tl.store(above.base + row * inputs.length + place, base, mask=rows.exists)
    tl.store(above.factor + row * inputs.length + place, factor, mask=rows.exists)
    delta = mean_dp * factor - tl.load(above.grad_lse + row * inputs.length + place, mask=rows.exists, other=0.0)
    tl.store(above.delta + row * inputs.length + place, delta, mask=rows.exists)
    upstream = (grad_out, delta, base, factor)
    acc = zero_pieces(CONFIG.BLOCK_Q, E)  # [BQ, E]
    for start in range(0, first, CONFIG.BLOCK_K):
        acc = with_keys(acc, start, q_block, upstream, rows, inputs, CONFIG, E, F, False)
    for start in range(first, tl.minimum(first + CONFIG.BLOCK_Q, inputs.length), CONFIG.BLOCK_K):
        acc = with_keys(acc, start, q_block, upstream, rows, inputs, CONFIG, E, F, True)
    store_pieces(dq + row * inputs.length * E.SIZE, place, acc, rows.exists, E)


@triton.jit
def earlier_keys_kernel(inputs, above, dk, dv, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """dk and dv. Program: row of keys, block of keys; the blocks with most queries come first."""
    blocks = (inputs.length + CONFIG.BLOCK_K - 1) // CONFIG.BLOCK_K
    source = (tl.program_id(0) // blocks).to(tl.int64)
    begin = (tl.program_id(0) % blocks) * CONFIG.BLOCK_K
    dk_acc = zero_pieces(CONFIG.BLOCK_K, E)  # [BK, E]
    dv_acc = zero_pieces(CONFIG.BLOCK_K, F)  # [BK, F]
    first = begin // CONFIG.BLOCK_Q * CONFIG.BLOCK_Q
    queries = (inputs.length - first + CONFIG.BLOCK_Q - 1) // CONFIG.BLOCK_Q
    for number in range(0, queries * inputs.group):
        row = source * inputs.group + number // queries
        place = first + number % queries * CONFIG.BLOCK_Q + tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
        rows = rows_of(row, source, place, inputs, E, F)
        q_block = load_pieces(inputs.q + row * inputs.length * E.SIZE, place, rows.exists, E)  # [BQ, E]
        upstream = load_upstream(above, row, place, rows.exists, inputs, F)
        grad_out = upstream[0]
        _, p, ds = slopes(begin, q_block, upstream, rows, inputs, CONFIG, E, F, True)
        dk_more = ()
        dv_more = ()
        for n in tl.static_range(len(dk_acc)):
            dk_more += (product(tl.trans(ds).to(q_block[n].dtype), finite(q_block[n]), dk_acc[n]),)
        for n in tl.static_range(len(dv_acc)):
            dv_more += (product(tl.trans(p).to(grad_out[n].dtype), grad_out[n], dv_acc[n]),)
        dk_acc = dk_more
        dv_acc = dv_more
    at = begin + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    store_pieces(dk + source * inputs.length * E.SIZE, at, dk_acc, at < inputs.length, E)
    store_pieces(dv + source * inputs.length * F.SIZE, at, dv_acc, at < inputs.length, F)
