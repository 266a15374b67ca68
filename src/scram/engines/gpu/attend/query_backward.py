"""The gradient of Algorithm 2 in Triton, through out and through lse.

With p the weights, r the dropout factor, dp_j = <grad_out, v_j> and delta = sum_j p_j r_j dp_j - grad_lse, the gradient
of a score is p_j (r_j dp_j - delta). The sum of the weights and delta come from a first walk through the windows: lse
and out were rounded. Queries add the gradients of keys and values by float32 atomics. With deterministic algorithms
keys collect them in a fixed order instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import AttendCall, AttendGrads
from ..primitives import (
    add_scaled,
    atomic_add_scaled,
    dot,
    dropout_factor,
    first_offset,
    load_float32,
    match_of,
    points,
    store_pieces,
    window_size,
    zero_pieces,
)
from ..runtime.block_sizes import backward_tile
from ..runtime.launch import Kernel, cached, kinds, on_device
from .query_collect import collect
from .windows import Upstream, Variant, inputs_of, next_key, pair_gradient, program_queries, rough_weight


def attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    """out, grad_out [B, H, *G, F], lse, grad_lse [B, H, *G] -> gradients in the dtypes of their tensors."""
    inputs, variant = inputs_of(call)
    above = upstream(lse, grad_out, grad_lse, 2)
    kernel = _kernel(variant, kinds(*above))
    grads = empty_grads(call, above, kernel.programs)
    if grads.q.numel():
        with on_device(grads.q):
            kernel(inputs, above, grads)
            if above.sums is not None:
                collect(inputs, variant, above, grads, call.radius)
    return rounded_grads(call, grads)


@cached
def _kernel(variant: Variant, above: tuple[Any, ...]) -> Kernel:
    block = backward_tile(variant.rank, variant.widths, variant.dtypes)
    return Kernel(backward_kernel, variant.programs(block["B"]), {"CONFIG": variant.config, **block})


def upstream(lse: Tensor, grad_out: Tensor, grad_lse: Tensor, numbers: int) -> Upstream:
    """With deterministic algorithms also room for `Upstream.sums`, that many numbers of each query."""
    repeatable = torch.are_deterministic_algorithms_enabled()
    sums = torch.empty((*lse.shape, numbers), dtype=torch.float32, device=lse.device) if repeatable else None
    return Upstream(grad_out.contiguous(), grad_lse.contiguous(), lse.contiguous(), sums)


def empty_grads(call: AttendCall, above: Upstream, programs: int) -> AttendGrads:
    """Where gradients are summed, zeros of float32, and where that of q is written.

    The extra keys have slots [slots, X, width]. Atomics share one slot per key row; repeatable sums need one per
    program, and `rounded_grads` adds them up in order.
    """
    q = call.q
    slots = call.k.shape[0] * call.k.shape[1] if above.sums is None else programs
    extra = [None if x is None else (slots, *x.shape[2:]) for x in (call.k_extra, call.v_extra)]
    shapes = [call.k.shape, call.v.shape, *extra]
    sums = [None if x is None else torch.zeros(x, dtype=torch.float32, device=q.device) for x in shapes]
    return AttendGrads(torch.empty(q.shape, dtype=q.dtype, device=q.device), *sums)  # type: ignore[arg-type]


def rounded_grads(call: AttendCall, grads: AttendGrads) -> AttendGrads:
    """The gradients in the shapes and dtypes of what they belong to."""

    def summed(grad: Tensor | None, extra: Tensor | None) -> Tensor | None:
        if grad is None or extra is None:
            return None
        key_rows = extra.shape[0] * extra.shape[1]
        if len(grad) != key_rows:
            grad = grad.reshape(key_rows, len(grad) // key_rows, *grad.shape[1:]).sum(1)
        return grad.reshape(extra.shape).to(extra.dtype)

    k_extra = summed(grads.k_extra, call.k_extra)
    v_extra = summed(grads.v_extra, call.v_extra)
    return AttendGrads(grads.q, grads.k.to(call.k.dtype), grads.v.to(call.v.dtype), k_extra, v_extra)


@triton.jit
def add_sum(base, factor, pieces, E: tl.constexpr, REPEATABLE: tl.constexpr):
    """base += the sum over queries of factor * pieces; a plain store where the slot is the program's own."""
    for n in tl.static_range(len(pieces)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        total = tl.sum(factor[:, None] * pieces[n], axis=0)  # [E]
        if REPEATABLE:
            tl.store(base + e, total, mask=e < E.SIZE)
        else:
            tl.atomic_add(base + e, total, mask=e < E.SIZE, sem="relaxed")


@triton.jit
def backward_kernel(inputs, above, grads, CONFIG: tl.constexpr, B: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program: tile of queries."""
    REPEATABLE: tl.constexpr = above.sums is not None
    windows = inputs.windows
    row, start, query_block, q_block, noise = program_queries(inputs, B, E)
    key_row = (row // inputs.group).to(tl.int64)
    keys = points(windows.geo.k)
    query = query_block.query  # [BQ]
    exists = query_block.exists  # [BQ]
    k_row = inputs.k + key_row * keys * E.SIZE
    v_row = inputs.v + key_row * keys * F.SIZE
    grad_out = load_float32(above.grad_out + start * F.SIZE, query, exists, F)  # [BQ, F]
    lse = tl.load(above.lse + start + query, mask=exists, other=0.0)  # [BQ]
    size = window_size(windows.reach)
    if inputs.k_extra is not None:
        k_extra = inputs.k_extra + key_row * inputs.extras * E.SIZE
        v_extra = inputs.v_extra + key_row * inputs.extras * F.SIZE

    delta = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    inv_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
    if CONFIG.WEIGHT == "softmax":
        p_sum = tl.zeros([B.BLOCK_Q], tl.float32)  # [BQ]
        for e in range(windows.kappa):
            match = match_of(e, exists, query_block, windows)  # [BQ]
            offset = first_offset(windows.reach)
            for _step in range(size):
                key, ok, offset = next_key(match, e, offset, query_block, windows, CONFIG)
                _, s, dp = pair(q_block, grad_out, k_row, v_row, key, ok, inputs, E, F)
                p_sum, delta = add_pair(p_sum, delta, s, dp, ok, lse, key, noise, inputs, CONFIG)
        if inputs.k_extra is not None:
            for n in range(inputs.extras):
                at = query * 0 + n  # [BQ]
                _, s, dp = pair(q_block, grad_out, k_extra, v_extra, at, exists, inputs, E, F)
                p_sum, delta = add_pair(p_sum, delta, s, dp, exists, lse, keys + at, noise, inputs, CONFIG)
        inv_sum = 1 / tl.where(p_sum == 0, 1.0, p_sum)
        delta = delta * inv_sum - tl.load(above.grad_lse + start + query, mask=exists, other=0.0)
    if REPEATABLE:
        tl.store(above.sums + (start + query) * 2, inv_sum, mask=exists)
        tl.store(above.sums + (start + query) * 2 + 1, delta, mask=exists)

    dq = zero_pieces(B.BLOCK_Q, E)  # [BQ, E]
    for e in range(windows.kappa):
        match = match_of(e, exists, query_block, windows)  # [BQ]
        offset = first_offset(windows.reach)
        for _step in range(size):
            key, ok, offset = next_key(match, e, offset, query_block, windows, CONFIG)
            k_block, s, dp = pair(q_block, grad_out, k_row, v_row, key, ok, inputs, E, F)
            p, ds = pair_gradient(
                s, dp, ok, lse, inv_sum, delta, key, noise, inputs.dropout, CONFIG.WEIGHT, CONFIG.DROPOUT
            )
            dq = add_scaled(dq, ds * inputs.scale, k_block)
            if not REPEATABLE:
                atomic_add_scaled(grads.k + key_row * keys * E.SIZE, key, ds * inputs.scale, q_block, ok, E)
                atomic_add_scaled(grads.v + key_row * keys * F.SIZE, key, p, grad_out, ok, F)
    if inputs.k_extra is not None:
        slot = (tl.program_id(0).to(tl.int64) if REPEATABLE else key_row) * inputs.extras
        for n in range(inputs.extras):
            at = query * 0 + n  # [BQ]
            k_block, s, dp = pair(q_block, grad_out, k_extra, v_extra, at, exists, inputs, E, F)
            p, ds = pair_gradient(
                s, dp, exists, lse, inv_sum, delta, keys + at, noise, inputs.dropout, CONFIG.WEIGHT, CONFIG.DROPOUT
            )
            dq = add_scaled(dq, ds * inputs.scale, k_block)
            add_sum(grads.k_extra + (slot + n) * E.SIZE, ds * inputs.scale, q_block, E, REPEATABLE)
            add_sum(grads.v_extra + (slot + n) * F.SIZE, p, grad_out, F, REPEATABLE)

    store_pieces(grads.q + start * E.SIZE, query, dq, exists, E)


@triton.jit
def pair(q_block, grad_out, k_row, v_row, at, ok, inputs, E: tl.constexpr, F: tl.constexpr):
    """One key per query, vector `at` of keys and values where `ok`: its features, its score, <grad_out, v>."""
    k_block = load_float32(k_row, at, ok, E)  # [BQ, E]
    s = dot(q_block, k_block) * inputs.scale  # [BQ]
    return k_block, s, dot(grad_out, load_float32(v_row, at, ok, F))


@triton.jit
def add_pair(p_sum, delta, s, dp, ok, lse, name, noise, inputs, CONFIG: tl.constexpr):
    """One more key in the sum of the weights and in delta."""
    p = rough_weight(s, ok, lse)  # [BQ]
    r = dropout_factor(name, noise, inputs.dropout, CONFIG.DROPOUT)  # [BQ]
    return p_sum + p, delta + tl.where(ok & (r > 0), p * r * dp, 0.0)
