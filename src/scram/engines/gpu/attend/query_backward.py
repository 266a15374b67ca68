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

from ....calls import AttendCall, AttendGrads
from ..attend import windows as win
from ..attend.query_collect import Upstream, collect
from ..primitives import dot, features, points, put
from ..runtime.block_sizes import backward_tile
from ..runtime.launch import Kernel, cached, kinds, on_device


def attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    """out, grad_out [B, H, *G, F], lse, grad_lse [B, H, *G] -> gradients in the dtypes of their tensors."""
    windows, variant = win.windows_of(call)
    above = upstream(lse, grad_out, grad_lse, 2)
    kernel = _kernel(variant, kinds(*above))
    grads = empty_grads(call, above, kernel.programs)
    if grads.q.numel():
        with on_device(grads.q):
            kernel(windows, above, grads)
            if above.sums is not None:
                collect(windows, variant, above, grads, call.radius)
    return rounded_grads(call, grads)


@cached
def _kernel(variant: win.Variant, above: tuple[Any, ...]) -> Kernel:
    block = backward_tile(variant.rank, variant.widths, variant.dtypes)
    return Kernel(backward_kernel, variant.programs(block["B"]), {"MODE": variant.mode, **block})


def upstream(lse: Tensor, grad_out: Tensor, grad_lse: Tensor, numbers: int) -> Upstream:
    """With deterministic algorithms also room for what queries find, that many numbers of each."""
    repeatable = torch.are_deterministic_algorithms_enabled()
    sums = torch.empty((*lse.shape, numbers), dtype=torch.float32, device=lse.device) if repeatable else None
    return Upstream(grad_out.contiguous(), grad_lse.contiguous(), lse.contiguous(), sums)


def empty_grads(call: AttendCall, above: Upstream, programs: int) -> AttendGrads:
    """Where gradients are summed, zeros of float32, and where that of q is written.

    The extra keys have slots [slots, X, width]. Atomics share one slot per key row; repeatable sums need one per
    program, and `rounded_grads` adds them up in order.
    """
    q, k, v, extra = call.q, call.k, call.v, (call.k_extra, call.v_extra)
    slots = k.shape[0] * k.shape[1] if above.sums is None else programs
    shapes = [k.shape, v.shape, *[None if x is None else (slots, *x.shape[2:]) for x in extra]]
    sums = [None if x is None else torch.zeros(x, dtype=torch.float32, device=q.device) for x in shapes]
    return AttendGrads(torch.empty(q.shape, dtype=q.dtype, device=q.device), *sums)  # type: ignore[arg-type]


def rounded_grads(call: AttendCall, grads: AttendGrads) -> AttendGrads:
    """The gradients in the shapes and dtypes of what they belong to."""

    def whole(grad: Tensor | None, extra: Tensor | None) -> Tensor | None:
        if grad is None or extra is None:
            return None
        key_rows = extra.shape[0] * extra.shape[1]
        if len(grad) != key_rows:
            grad = grad.reshape(key_rows, len(grad) // key_rows, *grad.shape[1:]).sum(1)
        return grad.reshape(extra.shape).to(extra.dtype)

    extra = whole(grads.k_extra, call.k_extra), whole(grads.v_extra, call.v_extra)
    return AttendGrads(grads.q, grads.k.to(call.k.dtype), grads.v.to(call.v.dtype), *extra)


@triton.jit
def add_rows(base, at, factor, pieces, ok, ROW: tl.constexpr):
    """base[at] += factor * pieces, atomically, where `ok`."""
    for n in tl.static_range(len(pieces)):
        e = n * ROW.W + tl.arange(0, ROW.W)[None, :]
        place = base + at.to(tl.int64)[:, None] * ROW.E + e
        tl.atomic_add(place, factor[:, None] * pieces[n], mask=ok[:, None] & (e < ROW.E), sem="relaxed")


@triton.jit
def add_sum(base, factor, pieces, ROW: tl.constexpr, REPEATABLE: tl.constexpr):
    """base += the sum over queries of factor * pieces; a plain store where the slot is the program's own."""
    for n in tl.static_range(len(pieces)):
        e = n * ROW.W + tl.arange(0, ROW.W)
        total = tl.sum(factor[:, None] * pieces[n], axis=0)
        if REPEATABLE:
            tl.store(base + e, total, mask=e < ROW.E)
        else:
            tl.atomic_add(base + e, total, mask=e < ROW.E, sem="relaxed")


@triton.jit
def backward_kernel(w, above, grads, MODE: tl.constexpr, B: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    REPEATABLE: tl.constexpr = above.sums is not None
    row, start, here, mine, noise = win.program_queries(w, B, ROW)
    source, keys, query, valid = (row // w.group).to(tl.int64), points(w.geo.k), here.query, here.exists
    k_row, v_row = w.k + source * keys * ROW.E, w.v + source * keys * VROW.E
    grad_out = features(above.grad_out + start * VROW.E, query, valid, VROW)
    lse = tl.load(above.lse + start + query, mask=valid, other=0.0)
    window = win.window_size(w.reach)
    if w.k_extra is not None:
        k_extra, v_extra = w.k_extra + source * w.extras * ROW.E, w.v_extra + source * w.extras * VROW.E

    delta, inv_sum = tl.zeros([B.BLOCK_Q], tl.float32), tl.zeros([B.BLOCK_Q], tl.float32)
    if MODE.WEIGHT == "softmax":
        total = tl.zeros([B.BLOCK_Q], tl.float32)
        for e in range(w.kappa):
            match, offset = win.match_of(e, valid, here, w), win.first_offset(w.reach)
            for _step in range(window):
                key, ok, offset = win.next_key(match, e, offset, here, w, MODE)
                _, s, dp = pair(mine, grad_out, k_row, v_row, key, ok, w, ROW, VROW)
                total, delta = summed(total, delta, s, dp, ok, lse, key, noise, w, MODE)
        if w.k_extra is not None:
            for x in range(w.extras):
                at = query * 0 + x
                _, s, dp = pair(mine, grad_out, k_extra, v_extra, at, valid, w, ROW, VROW)
                total, delta = summed(total, delta, s, dp, valid, lse, keys + at, noise, w, MODE)
        inv_sum = 1 / tl.where(total == 0, 1.0, total)
        delta = delta * inv_sum - tl.load(above.grad_lse + start + query, mask=valid, other=0.0)
    if REPEATABLE:
        tl.store(above.sums + (start + query) * 2, inv_sum, mask=valid)
        tl.store(above.sums + (start + query) * 2 + 1, delta, mask=valid)

    dq = win.zeros(B.BLOCK_Q, ROW)
    for e in range(w.kappa):
        match, offset = win.match_of(e, valid, here, w), win.first_offset(w.reach)
        for _step in range(window):
            key, ok, offset = win.next_key(match, e, offset, here, w, MODE)
            theirs, s, dp = pair(mine, grad_out, k_row, v_row, key, ok, w, ROW, VROW)
            p, ds = win.pair_gradient(s, dp, ok, lse, inv_sum, delta, key, noise, w, MODE.WEIGHT, MODE.DROPOUT)
            dq = win.add(dq, ds * w.scale, theirs)
            if not REPEATABLE:
                add_rows(grads.k + source * keys * ROW.E, key, ds * w.scale, mine, ok, ROW)
                add_rows(grads.v + source * keys * VROW.E, key, p, grad_out, ok, VROW)
    if w.k_extra is not None:
        slot = (tl.program_id(0).to(tl.int64) if REPEATABLE else source) * w.extras
        for x in range(w.extras):
            at = query * 0 + x
            theirs, s, dp = pair(mine, grad_out, k_extra, v_extra, at, valid, w, ROW, VROW)
            p, ds = win.pair_gradient(s, dp, valid, lse, inv_sum, delta, keys + at, noise, w, MODE.WEIGHT, MODE.DROPOUT)
            dq = win.add(dq, ds * w.scale, theirs)
            add_sum(grads.k_extra + (slot + x) * ROW.E, ds * w.scale, mine, ROW, REPEATABLE)
            add_sum(grads.v_extra + (slot + x) * VROW.E, p, grad_out, VROW, REPEATABLE)

    put(grads.q + start * ROW.E, query, dq, valid, ROW)


@triton.jit
def pair(mine, grad_out, k_row, v_row, at, ok, w, ROW: tl.constexpr, VROW: tl.constexpr):
    """One key per query, row `at` of keys and values where `ok`: its features, its score, <grad_out, v>."""
    theirs = features(k_row, at, ok, ROW)
    return theirs, dot(mine, theirs) * w.scale, dot(grad_out, features(v_row, at, ok, VROW))


@triton.jit
def summed(total, delta, s, dp, ok, lse, name, noise, w, MODE: tl.constexpr):
    """One more key in the sum of the weights and in delta."""
    p, r = win.rough_weight(s, ok, lse), win.kept(name, noise, w, MODE.DROPOUT)
    return total + p, delta + tl.where(ok & (r > 0), p * r * dp, 0.0)
