"""Attention over keys that each query visited on its own, in Triton: queries in chunks, their keys in a list.

Drawing or walking fills the list; the backward pass fills it again.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...grid import grid_of
from .attend_backward import add_rows
from .block_sizes import visit_tile
from .draw import draw_kernel
from .grid import dot, features, geometry, put
from .launch import Kernel
from .noise import below_argument, seed_arguments
from .shared_keys import LN2, LOWEST, joined, powers
from .walk import walk_kernel
from .windows import add

CHUNK_PAIRS = 1 << 26
CHUNK_ELEMENTS = 1 << 26  # of gathered rows, where repeatable bits are asked for
SETTINGS = ("queries", "keys", "group", "samples", "begin", "size")


class Visits:
    """The tensors and settings of `sample` and its backward pass, and the lists of keys, chunk by chunk."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        modes: Tensor,
        count: Tensor,
        total: Tensor,
        order: Tensor | None,
        key_mask: Tensor | None,
        head_out: Tensor | None,
        head_lse: Tensor | None,
        seed: Tensor,
        table: Tensor,
        *,
        method: str,
        samples: int,
        alpha: float,
        chains_per_mode: int,
        burn_in: int,
        causal: bool,
        scale: float,
    ) -> None:
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.queries, self.keys = math.prod(grid_of(q)), math.prod(grid_of(k))
        self.points, self.samples, self.walks = math.prod(q.shape[:-1]), samples, method == "metropolis"
        self.head = (head_out, head_lse)
        if head_out is not None and head_lse is not None:
            self.head = (head_out.contiguous(), head_lse.contiguous())
        shared = key_mask is not None and key_mask.ndim == k.ndim - 2
        lists = (modes, count, total, order, key_mask, table)
        self.lists = tuple(None if x is None else x.contiguous() for x in lists)
        self.group = q.shape[1] // k.shape[1]
        self.before = (*seed_arguments(seed), q.shape[1] if shared else 1, self.group, modes.shape[-1], samples)
        self.before += (below_argument(alpha), table.shape[0] - 1)
        self.after = (*geometry(grid_of(q), grid_of(k)), alpha)
        self.flags = {"RANK": q.ndim - 3, "CAUSAL": causal}
        self.scale, self.chains_per_mode, self.burn_in = scale, chains_per_mode, burn_in
        self.rounds = samples + burn_in * min(modes.shape[-1] * chains_per_mode, samples)
        self.told = tuple(torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
        self.block = visit_tile(q.shape[-1], v.shape[-1], q.dtype, v.dtype)

    def chunks(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """First point and number of points, their keys [C, T] with -1 for none, and the logs of their weights."""
        size = max(1, min(self.points, CHUNK_PAIRS // self.samples))
        keys = torch.empty((size, self.samples), dtype=torch.int32, device=self.q.device)
        logs = torch.empty((size, self.samples), dtype=torch.float32, device=self.q.device)
        for begin in range(0, self.points, size):
            now = min(size, self.points - begin)
            before = (*self.lists, *self.before, begin, now, *self.after)
            if self.walks:
                logs.zero_()
                names = ("LANES", "W", "PIECES", "num_warps", "enable_fp_fusion")
                flags = {**self.flags, "E": self.q.shape[-1], **{name: self.block[name] for name in names}}
                how = (self.q, self.k, self.scale, self.chains_per_mode, self.burn_in, self.rounds)
                programs = triton.cdiv(now, self.block["LANES"])
                Kernel(walk_kernel, programs, flags)(*before, *how, keys, logs, *self.told)
            else:
                flags = {**self.flags, "BLOCK": 256, "num_warps": 4, "enable_fp_fusion": True}
                Kernel(draw_kernel, triton.cdiv(now * self.samples, 256), flags)(*before, keys, logs)
            yield begin, now, keys, logs

    def arguments(self, begin: int, size: int, keys: Tensor, logs: Tensor) -> tuple[Any, ...]:
        numbers = (self.queries, self.keys, self.group, self.samples, begin, size, self.scale)
        return (self.q, self.k, self.v, *self.head, keys, logs, *numbers)


def sample(*tensors: Any, **settings: Any) -> tuple[Tensor, ...]:
    """The tensors of `scram.estimate_ops` -> out, lse, variance, ess, acceptance, rhat."""
    visits = Visits(*tensors, **settings)
    q, v = visits.q, visits.v
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=v.dtype, device=q.device)
    variance = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse, ess = (torch.empty(shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    if lse.numel():
        flags = {"E": q.shape[-1], "F": v.shape[-1], "FLAT": visits.walks, **visits.block}
        with torch.cuda.device_of(q):
            for begin, size, keys, logs in visits.chunks():
                kernel = Kernel(visit_kernel, triton.cdiv(size, visits.block["LANES"]), flags)
                kernel(*visits.arguments(begin, size, keys, logs), out, lse, variance, ess)
    return out, lse, variance, ess, *visits.told


def sample_backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Any, **settings: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, and of head_out and head_lse where there is a head."""
    visits = Visits(*tensors, **settings)
    q, k, v = visits.q, visits.k, visits.v
    repeatable = torch.are_deterministic_algorithms_enabled()
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    d_head = tuple(None if x is None else torch.empty_like(x) for x in visits.head)
    if grad_lse.numel():
        above = (grad_out.contiguous(), grad_lse.contiguous())
        flags = {"E": q.shape[-1], "F": v.shape[-1], "FLAT": visits.walks, "REPEATABLE": repeatable, **visits.block}
        weights = None
        with torch.cuda.device_of(q):
            for begin, size, keys, logs in visits.chunks():
                if repeatable and weights is None:
                    weights = torch.empty_like(logs)
                kernel = Kernel(visit_backward_kernel, triton.cdiv(size, visits.block["LANES"]), flags)
                kernel(*visits.arguments(begin, size, keys, logs), *above, weights, dq, dk, dv, *d_head)
                if weights is not None:
                    _collect(visits, begin, size, keys, weights, logs, above[0], dk, dv)
    return dq, dk.to(k.dtype), dv.to(v.dtype), *d_head


def _collect(
    visits: Visits,
    begin: int,
    size: int,
    keys: Tensor,
    weights: Tensor,
    slopes: Tensor,
    grad_out: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the pairs of a chunk to dk and dv in a fixed order, which index_add_ keeps to where that is asked for."""
    q, wish = visits.q.flatten(0, -2), grad_out.flatten(0, -2)
    k_sums, v_sums = dk.view(-1, dk.shape[-1]), dv.view(-1, dv.shape[-1])
    some = max(1, CHUNK_ELEMENTS // (visits.samples * max(q.shape[1], wish.shape[1])))
    for low in range(0, size, some):
        at = torch.arange(low, min(low + some, size), device=q.device)
        point = begin + at
        ok = keys[at] >= 0
        source = (point // visits.queries // visits.group * visits.keys).unsqueeze(1) + torch.where(ok, keys[at], 0)
        for sums, factor, rows in ((k_sums, slopes, q), (v_sums, weights, wish)):
            each = torch.where(ok, factor[at], 0).unsqueeze(-1) * rows[point].float().unsqueeze(1)
            sums.index_add_(0, source.flatten(), each.flatten(0, 1))


@triton.jit
def visit(
    mine, k, source, keys, logs, slot, valid, scale, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """Row of the key visited at a slot, whether there is one, its features and its score with the log of its weight."""
    key = tl.load(keys + slot, mask=valid, other=-1)
    ok = key >= 0
    place = source + tl.where(ok, key, 0)
    theirs = features(k, place, ok, E, W, PIECES)
    s = dot(mine, theirs, PIECES) * scale
    if FLAT:
        s = s - s  # keeps a NaN
    else:
        s += tl.load(logs + slot, mask=ok, other=0.0)
    return place, ok, theirs, s


@triton.jit(do_not_specialize=SETTINGS)
def visit_kernel(
    q, k, v, head_out, head_lse, keys_in, logs, queries, keys, group, samples, begin, size, scale,
    out, lse, variance, ess,
    E: tl.constexpr, F: tl.constexpr, FLAT: tl.constexpr, LANES: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    valid = lane < size
    point, slots = begin + lane.to(tl.int64), lane.to(tl.int64) * samples
    source = point // queries // group * keys
    mine = features(q, point, valid, E, W, PIECES)
    head = tl.full([LANES], -float("inf"), tl.float32)
    if head_lse is not None:
        head = tl.load(head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)

    whole, seen = tl.zeros([LANES], tl.float32), lane * 0
    top = tl.full([LANES], LOWEST, tl.float32)
    mixed = ()
    for _ in tl.static_range(FPIECES):
        mixed += (tl.zeros([LANES, FW], tl.float32),)
    for t in range(samples):
        place, ok, theirs, s = visit(mine, k, source, keys_in, logs, slots + t, valid, scale, E, W, PIECES, FLAT)
        value = features(v, place, ok, F, FW, FPIECES)
        if not FLAT:
            tl.store(logs + slots + t, s, mask=ok)
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, s)
        shrink, p = powers(top, higher), powers(s, higher)
        whole, top = whole * shrink + p, higher
        seen += ok.to(tl.int32)
        more = ()
        for n in tl.static_range(FPIECES):
            more += (mixed[n] * shrink[:, None] + p[:, None] * value[n],)
        mixed = more

    factor, share, highest, norm = joined(top, whole, seen > 0, tl.zeros([LANES], tl.float32), head)
    tl.store(lse + point, highest + norm * LN2, mask=valid)
    answer = ()
    if head_out is not None:
        theirs = features(head_out, point, valid & (head > -float("inf")), F, FW, FPIECES)
        for n in tl.static_range(FPIECES):
            answer += (mixed[n] * factor[:, None] + share[:, None] * theirs[n],)
    else:
        for n in tl.static_range(FPIECES):
            answer += (mixed[n] * factor[:, None],)
    put(out, point, answer, valid, F, FW, FPIECES)

    if not FLAT:
        plain, squares = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
        r_sum, r_squares = (), ()
        for _ in tl.static_range(FPIECES):
            r_sum += (tl.zeros([LANES, FW], tl.float32),)
            r_squares += (tl.zeros([LANES, FW], tl.float32),)
        for t in range(samples):
            key = tl.load(keys_in + slots + t, mask=valid, other=-1)
            ok = key >= 0
            s = tl.load(logs + slots + t, mask=ok, other=-float("inf"))
            value = features(v, source + tl.where(ok, key, 0), ok, F, FW, FPIECES)
            weight = powers(s, highest)
            p = weight * factor
            plain += weight
            squares += weight * weight
            sum_more, more = (), ()
            for n in tl.static_range(FPIECES):
                r = tl.where(ok[:, None], p[:, None] * (value[n] - answer[n]), 0.0)
                sum_more += (r_sum[n] + r,)
                more += (r_squares[n] + r * r,)
            r_sum, r_squares = sum_more, more
        known = ()
        for n in tl.static_range(FPIECES):
            spread = tl.maximum(r_squares[n] - r_sum[n] * r_sum[n] / samples, 0.0)
            known += (tl.where((seen > 0)[:, None], spread, float("inf")),)
        put(variance, point, known, valid, F, FW, FPIECES)
        tl.store(ess + point, tl.where(seen > 0, plain * plain / tl.where(seen > 0, squares, 1.0), 0.0), mask=valid)


@triton.jit(do_not_specialize=SETTINGS)
def visit_backward_kernel(
    q, k, v, head_out, head_lse, keys_in, logs, queries, keys, group, samples, begin, size, scale,
    grad_out, grad_lse, weights, dq, dk, dv, d_head, d_head_lse,
    E: tl.constexpr, F: tl.constexpr, FLAT: tl.constexpr, REPEATABLE: tl.constexpr, LANES: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    valid = lane < size
    point, slots = begin + lane.to(tl.int64), lane.to(tl.int64) * samples
    source = point // queries // group * keys
    mine = features(q, point, valid, E, W, PIECES)
    wish = features(grad_out, point, valid, F, FW, FPIECES)
    from_lse = tl.load(grad_lse + point, mask=valid, other=0.0)

    # The normaliser is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
    # Slopes are measured from one of them, so that equal ones leave nothing.
    whole, mean = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    top = tl.full([LANES], LOWEST, tl.float32)
    if head_lse is None:
        key = tl.load(keys_in + slots, mask=valid, other=-1)
        value = features(v, source + tl.maximum(key, 0), key >= 0, F, FW, FPIECES)
        base = dot(wish, value, FPIECES)
    else:
        head = tl.load(head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, head)
        whole = powers(head, top)
        base = dot(wish, features(head_out, point, valid & (head > -float("inf")), F, FW, FPIECES), FPIECES)
    for t in range(samples):
        place, ok, theirs, s = visit(mine, k, source, keys_in, logs, slots + t, valid, scale, E, W, PIECES, FLAT)
        dp = dot(wish, features(v, place, ok, F, FW, FPIECES), FPIECES) - base
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, s)
        shrink, p = powers(top, higher), powers(s, higher)
        whole, mean, top = whole * shrink + p, mean * shrink + p * dp, higher
    top = tl.where(top == LOWEST, 0.0, top)
    factor = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    shift = mean * factor
    if head_lse is not None:
        share = powers(head, top) * factor
        back = ()
        for n in tl.static_range(FPIECES):
            back += (share[:, None] * wish[n],)
        put(d_head, point, back, valid, F, FW, FPIECES)
        d_lse = (share * (from_lse - shift)).to(d_head_lse.dtype.element_ty)
        tl.store(d_head_lse + point, d_lse, mask=valid)
    shift -= from_lse

    sums = ()
    for _ in tl.static_range(PIECES):
        sums += (tl.zeros([LANES, W], tl.float32),)
    for t in range(samples):
        place, ok, theirs, s = visit(mine, k, source, keys_in, logs, slots + t, valid, scale, E, W, PIECES, FLAT)
        dp = dot(wish, features(v, place, ok, F, FW, FPIECES), FPIECES) - base
        p = tl.where(ok, powers(s, top) * factor, 0.0)
        ds = tl.where(ok, p * (dp - shift) * scale, 0.0)
        sums = add(sums, ds, theirs, PIECES)
        if REPEATABLE:
            tl.store(weights + slots + t, p, mask=ok)
            tl.store(logs + slots + t, ds, mask=ok)
        else:
            add_rows(dk, place, ds, mine, ok, E, W, PIECES)
            add_rows(dv, place, p, wish, ok, F, FW, FPIECES)
    put(dq, point, sums, valid, E, W, PIECES)
