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

from ....calls import SampleCall, Sampled, TailGrads
from ....grid import grid_of
from ..attend.query_backward import add_rows
from ..attend.windows import add, masked_by, zeros
from ..drawn_tail.shared_keys import LN2, LOWEST, joined, powers
from ..noise import below_argument, seed_argument
from ..primitives import dot, features, geometry, put
from ..runtime.block_sizes import visit_tile
from ..runtime.launch import Kernel, on_device
from ..sample.draw import Chunk, Proposal, draw_kernel
from ..sample.walk import Walks, walk_kernel

CHUNK_PAIRS = 1 << 26
CHUNK_ELEMENTS = 1 << 26  # of gathered rows, with deterministic algorithms


class Visits(NamedTuple):
    """A SampleCall as the kernels over visited keys take it: contiguous tensors, and numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    head_out: Tensor | None
    head_lse: Tensor | None
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
    head_out: Tensor | None
    head_lse: Tensor | None
    weights: Tensor | None  # float32 [C, T] with deterministic algorithms: the weights of a chunk, not added to k and v


def visits_of(call: SampleCall) -> Visits:
    q, k = call.q, call.k
    head_out, head_lse = (None if x is None else x.contiguous() for x in (call.head_out, call.head_lse))
    sizes = math.prod(grid_of(q)), math.prod(grid_of(k)), q.shape[1] // k.shape[1]
    q, k, v = q.contiguous(), k.contiguous(), call.v.contiguous()
    return Visits(q, k, v, head_out, head_lse, *sizes, call.samples, call.scale)


def flags_of(call: SampleCall) -> dict[str, Any]:
    block = visit_tile((call.q.shape[-1], call.v.shape[-1]), (call.q.dtype, call.v.dtype))
    return {"FLAT": call.method == "metropolis", **block}


def chunks(call: SampleCall, visits: Visits, acceptance: Tensor, rhat: Tensor) -> Iterator[Chunk]:
    """The lists of keys, chunk by chunk. Walks write their diagnostics [B, H, *G]."""
    q, k, modes, samples = visits.q, visits.k, call.modes, call.samples
    lists = modes.contiguous(), call.count.contiguous(), call.total.contiguous()
    order, table = None if call.order is None else call.order.contiguous(), call.table.contiguous()
    rules = masked_by(q, k, call.key_mask), seed_argument(call.seed, call.rows), geometry(grid_of(q), grid_of(k))
    numbers = modes.shape[-1], samples, len(table) - 1, below_argument(call.alpha)
    proposal = Proposal(*lists, order, table, *rules, *numbers, call.alpha)
    chains = min(modes.shape[-1] * call.chains_per_mode, samples)
    length = (call.chains_per_mode, call.burn_in, samples + call.burn_in * chains, call.scale)
    walks = Walks(q, k, acceptance, rhat, visits.group, *length)
    points = acceptance.numel()
    size = max(1, min(points, CHUNK_PAIRS // samples))
    keys = torch.empty((size, samples), dtype=torch.int32, device=q.device)
    logs = torch.empty((size, samples), dtype=torch.float32, device=q.device)
    for begin in range(0, points, size):
        chunk = Chunk(keys, logs, begin, min(size, points - begin))
        if call.method == "metropolis":
            logs.zero_()
            flags = {name: flag for name, flag in flags_of(call).items() if name not in ("FLAT", "VROW")}
            kernel = Kernel(walk_kernel, triton.cdiv(chunk.size, flags["BLOCK_Q"]), {"CAUSAL": call.causal, **flags})
            kernel(proposal, chunk, walks)
        else:
            flags = {"CAUSAL": call.causal, "BLOCK": 256, "num_warps": 4, "enable_fp_fusion": True}
            Kernel(draw_kernel, triton.cdiv(chunk.size * samples, 256), flags)(proposal, chunk)
        yield chunk


def sample(call: SampleCall) -> Sampled:
    q, v = call.q, call.v
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=v.dtype, device=q.device)
    variance = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse, *diagnostics = (torch.empty(shape[:-1], dtype=torch.float32, device=q.device) for _ in range(4))
    made = Sampled(out, lse, variance, *diagnostics)
    if lse.numel():
        visits, flags = visits_of(call), flags_of(call)
        with on_device(q):
            for chunk in chunks(call, visits, made.acceptance, made.rhat):
                Kernel(visit_kernel, triton.cdiv(chunk.size, flags["BLOCK_Q"]), flags)(visits, chunk, made)
    return made


def sample_backward(call: SampleCall, grad_out: Tensor, grad_lse: Tensor) -> TailGrads:
    """grad_out [B, H, *G, F], grad_lse [B, H, *G] -> gradients in the dtypes of their tensors."""
    visits, flags, weights = visits_of(call), flags_of(call), None
    q, k, v = visits.q, visits.k, visits.v
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    d_out, d_lse = (None if x is None else torch.empty_like(x) for x in (visits.head_out, visits.head_lse))
    grads = Grads(torch.empty_like(q), dk, dv, d_out, d_lse, None)
    if grad_lse.numel():
        grad_out, grad_lse = grad_out.contiguous(), grad_lse.contiguous()
        with on_device(q):
            for chunk in chunks(call, visits, *(torch.empty_like(grad_lse, dtype=torch.float32) for _ in range(2))):
                if torch.are_deterministic_algorithms_enabled() and weights is None:
                    weights = torch.empty_like(chunk.logs)
                kernel = Kernel(visit_backward_kernel, triton.cdiv(chunk.size, flags["BLOCK_Q"]), flags)
                kernel(visits, chunk, grad_out, grad_lse, grads._replace(weights=weights))
                if weights is not None:
                    _collect(visits, chunk, weights, grad_out, dk, dv)
    return TailGrads(grads.q, dk.to(k.dtype), dv.to(v.dtype), d_out, d_lse)


def _collect(visits: Visits, chunk: Chunk, weights: Tensor, grad_out: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Add the pairs of a chunk to dk and dv in a fixed order, to which index_add_ keeps; its logs are slopes now."""
    q, grads = visits.q.flatten(0, -2), grad_out.flatten(0, -2)
    k_sums, v_sums = dk.view(-1, dk.shape[-1]), dv.view(-1, dv.shape[-1])
    some = max(1, CHUNK_ELEMENTS // (visits.samples * max(q.shape[1], grads.shape[1])))
    for low in range(0, chunk.size, some):
        at = torch.arange(low, min(low + some, chunk.size), device=q.device)
        point, key = chunk.begin + at, chunk.keys[at]
        ok = key >= 0
        source = (point // visits.queries // visits.group * visits.keys).unsqueeze(1) + torch.where(ok, key, 0)
        for sums, factor, rows in ((k_sums, chunk.logs, q), (v_sums, weights, grads)):
            each = torch.where(ok, factor[at], 0).unsqueeze(-1) * rows[point].float().unsqueeze(1)
            sums.index_add_(0, source.flatten(), each.flatten(0, 1))


class Points(NamedTuple):
    """The queries of a program, in a kernel."""

    point: Any  # int64 [BLOCK_Q], among those of all rows
    valid: Any
    slots: Any  # int64 [BLOCK_Q], where their lists of keys begin
    source: Any  # int64 [BLOCK_Q], where their keys begin
    mine: Any  # features in pieces


@triton.jit
def points_of(x, chunk, BLOCK_Q: tl.constexpr, ROW: tl.constexpr):
    lane = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = lane < chunk.size
    point, slots = chunk.begin + lane.to(tl.int64), lane.to(tl.int64) * x.samples
    return Points(point, valid, slots, point // x.queries // x.group * x.keys, features(x.q, point, valid, ROW))


@triton.jit
def visit(t, here, x, chunk, FLAT: tl.constexpr, ROW: tl.constexpr):
    """Row of the t-th key of each list, whether there is one, its features and its score with the log of its weight."""
    slot = here.slots + t
    key = tl.load(chunk.keys + slot, mask=here.valid, other=-1)
    ok = key >= 0
    place = here.source + tl.where(ok, key, 0)
    theirs = features(x.k, place, ok, ROW)
    s = dot(here.mine, theirs) * x.scale
    if FLAT:
        s = s - s  # keeps a NaN
    else:
        s += tl.load(chunk.logs + slot, mask=ok, other=0.0)
    return place, ok, theirs, s


@triton.jit
def visit_kernel(x, chunk, made, FLAT: tl.constexpr, BLOCK_Q: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    here = points_of(x, chunk, BLOCK_Q, ROW)
    point, valid, slots = here.point, here.valid, here.slots
    head = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    if x.head_lse is not None:
        head = tl.load(x.head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)

    whole, seen = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.int32)
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    mixed = zeros(BLOCK_Q, VROW)
    for t in range(x.samples):
        place, ok, theirs, s = visit(t, here, x, chunk, FLAT, ROW)
        value = features(x.v, place, ok, VROW)
        if not FLAT:
            tl.store(chunk.logs + slots + t, s, mask=ok)
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, s)
        shrink, p = powers(top, higher), powers(s, higher)
        whole, top = whole * shrink + p, higher
        seen += ok.to(tl.int32)
        more = ()
        for n in tl.static_range(len(mixed)):
            more += (mixed[n] * shrink[:, None] + p[:, None] * value[n],)
        mixed = more

    factor, share, highest, norm = joined(top, whole, seen > 0, tl.zeros([BLOCK_Q], tl.float32), head)
    tl.store(made.lse + point, highest + norm * LN2, mask=valid)
    answer = ()
    if x.head_out is not None:
        theirs = features(x.head_out, point, valid & (head > -float("inf")), VROW)
        for n in tl.static_range(len(mixed)):
            answer += (mixed[n] * factor[:, None] + share[:, None] * theirs[n],)
    else:
        for n in tl.static_range(len(mixed)):
            answer += (mixed[n] * factor[:, None],)
    put(made.out, point, answer, valid, VROW)

    if not FLAT:
        plain, squares = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
        r_sum, r_squares = zeros(BLOCK_Q, VROW), zeros(BLOCK_Q, VROW)
        for t in range(x.samples):
            key = tl.load(chunk.keys + slots + t, mask=valid, other=-1)
            ok = key >= 0
            s = tl.load(chunk.logs + slots + t, mask=ok, other=-float("inf"))
            value = features(x.v, here.source + tl.where(ok, key, 0), ok, VROW)
            weight = powers(s, highest)
            p = weight * factor
            plain += weight
            squares += weight * weight
            sum_more, more = (), ()
            for n in tl.static_range(len(mixed)):
                r = tl.where(ok[:, None], p[:, None] * (value[n] - answer[n]), 0.0)
                sum_more += (r_sum[n] + r,)
                more += (r_squares[n] + r * r,)
            r_sum, r_squares = sum_more, more
        known = ()
        for n in tl.static_range(len(mixed)):
            spread = tl.maximum(r_squares[n] - r_sum[n] * r_sum[n] / x.samples, 0.0)
            known += (tl.where((seen > 0)[:, None], spread, float("inf")),)
        put(made.variance, point, known, valid, VROW)
        number = tl.where(seen > 0, plain * plain / tl.where(seen > 0, squares, 1.0), 0.0)
        tl.store(made.ess + point, number, mask=valid)


@triton.jit
def visit_backward_kernel(
    x, chunk, grad_out, grad_lse, grads, FLAT: tl.constexpr, BLOCK_Q: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    here = points_of(x, chunk, BLOCK_Q, ROW)
    point, valid, slots = here.point, here.valid, here.slots
    above = features(grad_out, point, valid, VROW)
    from_lse = tl.load(grad_lse + point, mask=valid, other=0.0)

    # The normaliser is computed again: from lse, rounded, the weights would not add up to 1 where scores are large.
    # Slopes are measured from one of them, so that equal ones leave nothing.
    whole, mean = tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    top = tl.full([BLOCK_Q], LOWEST, tl.float32)
    if x.head_lse is None:
        key = tl.load(chunk.keys + slots, mask=valid, other=-1)
        value = features(x.v, here.source + tl.maximum(key, 0), key >= 0, VROW)
        base = dot(above, value)
    else:
        head = tl.load(x.head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, head)
        whole = powers(head, top)
        base = dot(above, features(x.head_out, point, valid & (head > -float("inf")), VROW))
    for t in range(x.samples):
        place, ok, theirs, s = visit(t, here, x, chunk, FLAT, ROW)
        dp = dot(above, features(x.v, place, ok, VROW)) - base
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, s)
        shrink, p = powers(top, higher), powers(s, higher)
        whole, mean, top = whole * shrink + p, mean * shrink + p * dp, higher
    top = tl.where(top == LOWEST, 0.0, top)
    factor = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    delta = mean * factor
    if x.head_lse is not None:
        share = powers(head, top) * factor
        back = ()
        for n in tl.static_range(len(above)):
            back += (share[:, None] * above[n],)
        put(grads.head_out, point, back, valid, VROW)
        d_lse = (share * (from_lse - delta)).to(grads.head_lse.dtype.element_ty)
        tl.store(grads.head_lse + point, d_lse, mask=valid)
    delta -= from_lse

    sums = zeros(BLOCK_Q, ROW)
    for t in range(x.samples):
        place, ok, theirs, s = visit(t, here, x, chunk, FLAT, ROW)
        dp = dot(above, features(x.v, place, ok, VROW)) - base
        p = tl.where(ok, powers(s, top) * factor, 0.0)
        ds = tl.where(ok, p * (dp - delta) * x.scale, 0.0)
        sums = add(sums, ds, theirs)
        if grads.weights is not None:
            tl.store(grads.weights + slots + t, p, mask=ok)
            tl.store(chunk.logs + slots + t, ds, mask=ok)
        else:
            add_rows(grads.k, place, ds, here.mine, ok, ROW)
            add_rows(grads.v, place, p, above, ok, VROW)
    put(grads.q, point, sums, valid, ROW)
