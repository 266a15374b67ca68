"""Attention over keys that each query visited on its own, in Triton: queries in chunks, their keys in a list.

Drawing or walking fills the list; the backward pass fills it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import SampleCall, Sampled, TailGrads
from ....spec.grid import grid_of
from ..noise import below_argument, seed_argument
from ..primitives import (
    LN2,
    LOWEST,
    add_scaled,
    atomic_add_scaled,
    dot,
    geometry,
    join_lse,
    load_float32,
    mask_argument,
    powers,
    softmax_step,
    store_pieces,
    zero_pieces,
)
from ..runtime.block_sizes import visit_tile
from ..runtime.launch import Flags, Kernel, on_device
from .draw import Chunk, Proposal, draw_kernel
from .walk import Walks, walk_kernel

CHUNK_PAIRS = 1 << 26
CHUNK_ELEMENTS = 1 << 26  # of gathered vectors, with deterministic algorithms


class Inputs(NamedTuple):
    """A SampleCall as the kernels over visited keys take it: contiguous tensors, and numbers."""

    q: Tensor  # [B, H, *G, E]
    k: Tensor  # [B, Hk, *G', E]
    v: Tensor  # [B, Hk, *G', F]
    near_out: Tensor | None  # [B, H, *G, F]
    near_lse: Tensor | None  # [B, H, *G]
    queries: int  # of a row
    keys: int  # of a row
    group: int  # rows of queries that share a row of keys
    samples: int
    scale: float


class Grads(NamedTuple):
    """Where gradients go: sums of float32 for k and v, else in the dtypes of their tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    near_out: Tensor | None
    near_lse: Tensor | None
    weights: Tensor | None  # float32 [C, T] with deterministic algorithms: the weights of a chunk, not added to k and v


def inputs_of(call: SampleCall) -> Inputs:
    return Inputs(
        q=call.q.contiguous(),
        k=call.k.contiguous(),
        v=call.v.contiguous(),
        near_out=None if call.near_out is None else call.near_out.contiguous(),
        near_lse=None if call.near_lse is None else call.near_lse.contiguous(),
        queries=math.prod(grid_of(call.q)),
        keys=math.prod(grid_of(call.k)),
        group=call.q.shape[1] // call.k.shape[1],
        samples=call.samples,
        scale=call.scale,
    )


def flags_of(call: SampleCall) -> Flags:
    block = visit_tile((call.q.shape[-1], call.v.shape[-1]), (call.q.dtype, call.v.dtype))
    return {"FLAT": call.method == "metropolis", **block}


def chunks(call: SampleCall, inputs: Inputs, acceptance: Tensor, rhat: Tensor) -> Iterator[Chunk]:
    """The lists of keys, chunk by chunk. Walks write their diagnostics [B, H, *G]."""
    q = inputs.q
    k = inputs.k
    samples = call.samples
    table = call.table.contiguous()
    kappa = call.modes.shape[-1]
    proposal = Proposal(
        modes=call.modes.contiguous(),
        count=call.count.contiguous(),
        total=call.total.contiguous(),
        order=None if call.order is None else call.order.contiguous(),
        table=table,
        masked=mask_argument(q, k, call.key_mask),
        seed=seed_argument(call.seed, call.rows),
        geo=geometry(grid_of(q), grid_of(k)),
        kappa=kappa,
        samples=samples,
        steps=len(table) - 1,
        threshold=below_argument(call.alpha),
        alpha=call.alpha,
    )
    walks = Walks(
        q=q,
        k=k,
        acceptance=acceptance,
        rhat=rhat,
        group=inputs.group,
        chains_per_mode=call.chains_per_mode,
        burn_in=call.burn_in,
        rounds=samples + call.burn_in * min(kappa * call.chains_per_mode, samples),
        scale=call.scale,
    )
    points = acceptance.numel()
    size = max(1, min(points, CHUNK_PAIRS // samples))
    keys = torch.empty((size, samples), dtype=torch.int32, device=q.device)
    logs = torch.empty((size, samples), dtype=torch.float32, device=q.device)
    for begin in range(0, points, size):
        chunk = Chunk(keys, logs, begin, min(size, points - begin))
        if call.method == "metropolis":
            logs.zero_()
            flags = {name: flag for name, flag in flags_of(call).items() if name not in ("FLAT", "F")}
            kernel = Kernel(walk_kernel, triton.cdiv(chunk.size, flags["BLOCK_Q"]), {"CAUSAL": call.causal, **flags})
            kernel(proposal, chunk, walks)
        else:
            flags = {"CAUSAL": call.causal, "BLOCK": 256, "num_warps": 4, "enable_fp_fusion": True}
            Kernel(draw_kernel, triton.cdiv(chunk.size * samples, 256), flags)(proposal, chunk)
        yield chunk


def sample(call: SampleCall) -> Sampled:
    q = call.q
    v = call.v
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=v.dtype, device=q.device)
    variance = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse, *diagnostics = (torch.empty(shape[:-1], dtype=torch.float32, device=q.device) for _ in range(4))
    result = Sampled(out, lse, variance, *diagnostics)
    if lse.numel():
        inputs = inputs_of(call)
        flags = flags_of(call)
        with on_device(q):
            for chunk in chunks(call, inputs, result.acceptance, result.rhat):
                Kernel(visit_kernel, triton.cdiv(chunk.size, flags["BLOCK_Q"]), flags)(inputs, chunk, result)
    return result


def sample_backward(call: SampleCall, grad_out: Tensor, grad_lse: Tensor) -> TailGrads:
    """grad_out [B, H, *G, F], grad_lse [B, H, *G] -> gradients in the dtypes of their tensors."""
    inputs = inputs_of(call)
    flags = flags_of(call)
    q = inputs.q
    k = inputs.k
    v = inputs.v
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    d_out, d_lse = (None if x is None else torch.empty_like(x) for x in (inputs.near_out, inputs.near_lse))
    grads = Grads(torch.empty_like(q), dk, dv, d_out, d_lse, None)
    weights = None
    if grad_lse.numel():
        grad_out = grad_out.contiguous()
        grad_lse = grad_lse.contiguous()
        with on_device(q):
            for chunk in chunks(call, inputs, *(torch.empty_like(grad_lse, dtype=torch.float32) for _ in range(2))):
                if torch.are_deterministic_algorithms_enabled() and weights is None:
                    weights = torch.empty_like(chunk.logs)
                kernel = Kernel(visit_backward_kernel, triton.cdiv(chunk.size, flags["BLOCK_Q"]), flags)
                kernel(inputs, chunk, grad_out, grad_lse, grads._replace(weights=weights))
                if weights is not None:
                    _collect(inputs, chunk, weights, grad_out, dk, dv)
    return TailGrads(grads.q, dk.to(k.dtype), dv.to(v.dtype), d_out, d_lse)


def _collect(inputs: Inputs, chunk: Chunk, weights: Tensor, grad_out: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the pairs of a chunk to dk and dv in a fixed order, to which index_add_ keeps; its logs are slopes now."""
    q = inputs.q.flatten(0, -2)
    grads = grad_out.flatten(0, -2)
    k_sums = dk.view(-1, dk.shape[-1])
    v_sums = dv.view(-1, dv.shape[-1])
    queries = max(1, CHUNK_ELEMENTS // (inputs.samples * max(q.shape[1], grads.shape[1])))
    for low in range(0, chunk.size, queries):
        at = torch.arange(low, min(low + queries, chunk.size), device=q.device)
        point = chunk.begin + at
        key = chunk.keys[at]
        ok = key >= 0
        first_key = (point // inputs.queries // inputs.group * inputs.keys).unsqueeze(1)
        place = first_key + torch.where(ok, key, 0)
        for sums, factor, vectors in ((k_sums, chunk.logs, q), (v_sums, weights, grads)):
            each = torch.where(ok, factor[at], 0).unsqueeze(-1) * vectors[point].float().unsqueeze(1)
            sums.index_add_(0, place.flatten(), each.flatten(0, 1))


class Points(NamedTuple):
    """The queries of a program, in a kernel."""

    point: Any  # int64 [BQ], among those of all rows
    exists: Any  # bool [BQ]
    slots: Any  # int64 [BQ], where their lists of keys begin
    first_key: Any  # int64 [BQ], where their keys begin
    q_block: Any  # [BQ, E], in pieces


@triton.jit
def points_of(inputs, chunk, BLOCK_Q: tl.constexpr, E: tl.constexpr):
    lane = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # [BQ]
    exists = lane < chunk.size
    point = chunk.begin + lane.to(tl.int64)  # [BQ]
    slots = lane.to(tl.int64) * inputs.samples  # [BQ]
    first_key = point // inputs.queries // inputs.group * inputs.keys  # [BQ]
    return Points(point, exists, slots, first_key, load_float32(inputs.q, point, exists, E))


@triton.jit
def visit(t, queries, inputs, chunk, FLAT: tl.constexpr, E: tl.constexpr):
    """The t-th key of each list: its place among all keys, whether there is one, its features, its score and the log of
    its weight."""
    slot = queries.slots + t  # [BQ]
    key = tl.load(chunk.keys + slot, mask=queries.exists, other=-1)  # [BQ]
    ok = key >= 0
    place = queries.first_key + tl.where(ok, key, 0)  # [BQ]
    k_block = load_float32(inputs.k, place, ok, E)  # [BQ, E]
    s = dot(queries.q_block, k_block) * inputs.scale  # [BQ]
    if FLAT:
        s = s - s  # keeps a NaN
    else:
        s += tl.load(chunk.logs + slot, mask=ok, other=0.0)
    return place, ok, k_block, s


@triton.jit
def visit_kernel(inputs, chunk, result, FLAT: tl.constexpr, BLOCK_Q: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program: block of queries of a chunk."""
    queries = points_of(inputs, chunk, BLOCK_Q, E)
    point = queries.point  # [BQ]
    exists = queries.exists  # [BQ]
    slots = queries.slots  # [BQ]
    near_lse = tl.full([BLOCK_Q], -float("inf"), tl.float32)  # [BQ]
    if inputs.near_lse is not None:
        near_lse = tl.load(inputs.near_lse + point, mask=exists, other=-float("inf")).to(tl.float32)

    running_sum = tl.zeros([BLOCK_Q], tl.float32)  # [BQ]
    seen = tl.zeros([BLOCK_Q], tl.int32)  # [BQ]
    running_max = tl.full([BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    acc = zero_pieces(BLOCK_Q, F)  # [BQ, F]
    for t in range(inputs.samples):
        place, ok, _, s = visit(t, queries, inputs, chunk, FLAT, E)
        v_block = load_float32(inputs.v, place, ok, F)  # [BQ, F]
        if not FLAT:
            tl.store(chunk.logs + slots + t, s, mask=ok)
        s = tl.where(ok, s, -float("inf"))
        running_max, rescale, p = softmax_step(running_max, s, None, "powers", False, None)
        running_sum = running_sum * rescale + p
        seen += ok.to(tl.int32)
        more = ()
        for n in tl.static_range(len(acc)):
            more += (acc[n] * rescale[:, None] + p[:, None] * v_block[n],)
        acc = more

    zero = tl.zeros([BLOCK_Q], tl.float32)  # [BQ]
    factor, near_factor, base, norm = join_lse(running_max, running_sum, seen > 0, zero, near_lse)
    tl.store(result.lse + point, base + norm * LN2, mask=exists)
    out = ()
    if inputs.near_out is not None:
        near_out = load_float32(inputs.near_out, point, exists & (near_lse > -float("inf")), F)  # [BQ, F]
        for n in tl.static_range(len(acc)):
            out += (acc[n] * factor[:, None] + near_factor[:, None] * near_out[n],)
    else:
        for n in tl.static_range(len(acc)):
            out += (acc[n] * factor[:, None],)
    store_pieces(result.out, point, out, exists, F)

    if not FLAT:
        weight_sum = tl.zeros([BLOCK_Q], tl.float32)  # [BQ]
        square_sum = tl.zeros([BLOCK_Q], tl.float32)  # [BQ]
        r_sum = zero_pieces(BLOCK_Q, F)  # [BQ, F]
        r_squares = zero_pieces(BLOCK_Q, F)  # [BQ, F]
        for t in range(inputs.samples):
            key = tl.load(chunk.keys + slots + t, mask=exists, other=-1)  # [BQ]
            ok = key >= 0
            s = tl.load(chunk.logs + slots + t, mask=ok, other=-float("inf"))  # [BQ]
            v_block = load_float32(inputs.v, queries.first_key + tl.where(ok, key, 0), ok, F)  # [BQ, F]
            weight = powers(s, base)  # [BQ]
            p = weight * factor  # [BQ]
            weight_sum += weight
            square_sum += weight * weight
            sum_more = ()
            squares_more = ()
            for n in tl.static_range(len(acc)):
                r = tl.where(ok[:, None], p[:, None] * (v_block[n] - out[n]), 0.0)  # [BQ, F]
                sum_more += (r_sum[n] + r,)
                squares_more += (r_squares[n] + r * r,)
            r_sum = sum_more
            r_squares = squares_more
        variance = ()
        for n in tl.static_range(len(acc)):
            spread = tl.maximum(r_squares[n] - r_sum[n] * r_sum[n] / inputs.samples, 0.0)  # [BQ, F]
            variance += (tl.where((seen > 0)[:, None], spread, float("inf")),)
        store_pieces(result.variance, point, variance, exists, F)
        ess = tl.where(seen > 0, weight_sum * weight_sum / tl.where(seen > 0, square_sum, 1.0), 0.0)  # [BQ]
        tl.store(result.ess + point, ess, mask=exists)


@triton.jit
def visit_backward_kernel(
    inputs,
    chunk,
    grad_out,
    grad_lse,
    grads,
    FLAT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program: block of queries of a chunk."""
    queries = points_of(inputs, chunk, BLOCK_Q, E)
    point = queries.point  # [BQ]
    exists = queries.exists  # [BQ]
    slots = queries.slots  # [BQ]
    d_out = load_float32(grad_out, point, exists, F)  # [BQ, F]
    d_lse = tl.load(grad_lse + point, mask=exists, other=0.0)  # [BQ]

    # The normalizer is computed again: from lse, rounded, the weights would not add up to 1 where scores are large.
    # Slopes are measured from one of them, so that equal ones leave nothing.
    running_sum = tl.zeros([BLOCK_Q], tl.float32)  # [BQ]
    mean_dp = tl.zeros([BLOCK_Q], tl.float32)  # [BQ]
    running_max = tl.full([BLOCK_Q], LOWEST, tl.float32)  # [BQ]
    if inputs.near_lse is None:
        key = tl.load(chunk.keys + slots, mask=exists, other=-1)  # [BQ]
        v_block = load_float32(inputs.v, queries.first_key + tl.maximum(key, 0), key >= 0, F)  # [BQ, F]
        dp_origin = dot(d_out, v_block)  # [BQ]
    else:
        near_lse = tl.load(inputs.near_lse + point, mask=exists, other=-float("inf")).to(tl.float32)  # [BQ]
        running_max = tl.maximum(running_max, near_lse)
        running_sum = powers(near_lse, running_max)
        dp_origin = dot(d_out, load_float32(inputs.near_out, point, exists & (near_lse > -float("inf")), F))  # [BQ]
    for t in range(inputs.samples):
        place, ok, k_block, s = visit(t, queries, inputs, chunk, FLAT, E)
        dp = dot(d_out, load_float32(inputs.v, place, ok, F)) - dp_origin  # [BQ]
        s = tl.where(ok, s, -float("inf"))
        running_max, rescale, p = softmax_step(running_max, s, None, "powers", False, None)
        running_sum = running_sum * rescale + p
        mean_dp = mean_dp * rescale + p * dp
    base = tl.where(running_max == LOWEST, 0.0, running_max)  # [BQ]
    factor = 1.0 / tl.where(running_sum == 0.0, 1.0, running_sum)  # [BQ]
    delta = mean_dp * factor  # [BQ]
    if inputs.near_lse is not None:
        near_factor = powers(near_lse, base) * factor  # [BQ]
        d_near_out = ()
        for n in tl.static_range(len(d_out)):
            d_near_out += (near_factor[:, None] * d_out[n],)
        store_pieces(grads.near_out, point, d_near_out, exists, F)
        d_near_lse = (near_factor * (d_lse - delta)).to(grads.near_lse.dtype.element_ty)
        tl.store(grads.near_lse + point, d_near_lse, mask=exists)
    delta -= d_lse

    dq = zero_pieces(BLOCK_Q, E)  # [BQ, E]
    for t in range(inputs.samples):
        place, ok, k_block, s = visit(t, queries, inputs, chunk, FLAT, E)
        dp = dot(d_out, load_float32(inputs.v, place, ok, F)) - dp_origin  # [BQ]
        p = tl.where(ok, powers(s, base) * factor, 0.0)  # [BQ]
        ds = tl.where(ok, p * (dp - delta) * inputs.scale, 0.0)  # [BQ]
        dq = add_scaled(dq, ds, k_block)
        if grads.weights is not None:
            tl.store(grads.weights + slots + t, p, mask=ok)
            tl.store(chunk.logs + slots + t, ds, mask=ok)
        else:
            atomic_add_scaled(grads.k, place, ds, queries.q_block, ok, E)
            atomic_add_scaled(grads.v, place, p, d_out, ok, F)
    store_pieces(grads.q, point, dq, exists, E)
