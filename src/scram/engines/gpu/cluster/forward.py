"""Keys grouped by content, in Triton: assignment fused with its argmax, sums per cluster as one-hot matrix products.

The steps of k-means read a sample, laid side by side once; then all keys are assigned and their means taken. A kernel
each turns sums into centres and their forms, forms into labels, labels into sums.
Nothing has the size of keys times clusters, and the bits are the same every time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import clustering
from ....calls import ClusterCall, Clustered
from ....grid import LegalKeys, grid_of
from ..attend.tile_pairs import own_piece, put_piece
from ..attend.windows import UNMASKED
from ..cluster import forms as cf
from ..cluster import sample as cl
from ..cluster import space as cs
from ..cluster.sample import wide
from ..drawn_tail.shared_keys import block_of, blocks_of, product, stages, whole_block
from ..noise import absorb, row_state, seed_argument
from ..primitives import KeyMask
from ..runtime.block_sizes import ASSIGN, ASSIGN_EXACT, CLUSTER_SUMS, CLUSTER_SUMS_EXACT, tile_pieces
from ..runtime.launch import Kernel, cached, kinds, on_device

TABLE_BLOCK = 64  # forms are a whole number of these
SAMPLE_BLOCK = 64
SUM_PROGRAMS, LEAST_SPLIT = 512, 512  # programs in all, keys of a split at least
FORM_CLUSTERS, MEAN_CLUSTERS = 16, 4
MOST_PLACES = 16  # far keys of a block of the sample


class AssignMode(NamedTuple):
    """What `assign_kernel` is compiled for."""

    BLOCK_S: int  # keys
    BLOCK_C: int  # clusters per product
    PLACES: int  # far keys of each block that are reported


class SumMode(NamedTuple):
    """What `cluster_sums_kernel` is compiled for."""

    BLOCK_S: int
    BLOCK_C: int
    PARTS: int  # programs that share the width


class _Plan(NamedTuple):
    """The kernels and the numbers that shapes give."""

    sample: Kernel
    metric: Kernel
    space: Kernel
    paid: Kernel
    clocks: Kernel
    start: Kernel
    warm: Kernel
    forms: Kernel
    assign_some: Kernel
    sum_some: Kernel
    assign: Kernel
    sum: Kernel
    means: Kernel
    some: int  # keys of the sample
    some_splits: int
    splits: int
    queries: int  # of the sample
    places: int  # for far keys
    sizes: _Sizes


def cluster(call: ClusterCall) -> Clustered:
    q, k, v, count = call.q.contiguous(), call.k, call.v, call.clusters
    rows, keys, group = k.shape[0] * k.shape[1], math.prod(grid_of(k)), q.shape[1] // max(k.shape[1], 1)
    if count >= keys or not rows:
        with torch.no_grad():
            return clustering.cluster(call)
    warm_k, warm_v = call.warm_centres, call.warm_values
    with on_device(k):
        source, by = _source(call), cl.Drawn(seed_argument(call.seed, call.rows), group)
        plan = _plan(q.shape, k.shape, v.shape, count, kinds(q, source, by))
        made, some, scratch = _made(call), source, _scratch(plan, source)
        if scratch.some_k is not None and scratch.some_v is not None:
            some = cl.Source(scratch.some_k, scratch.some_v, UNMASKED, None, None, plan.some)
        forms, parts, far = scratch.forms, scratch.parts, scratch.far
        queries = group * math.prod(grid_of(q))
        plan.sample(source, some, q, queries, plan.queries, call.scale, by, scratch.sample, rows)
        sample, space = scratch.sample, scratch.space
        moments = cs.moments_of(sample, rows)
        plan.metric(moments, moments.shape[1], sample, scratch.metrics, plan.queries)
        plan.space(moments, moments.shape[1], sample, scratch.metrics, plan.queries, space)
        if warm_k is None or warm_v is None:
            plan.paid(sample, scratch.paid, plan.queries, plan.some)
            plan.clocks(sample, scratch.paid, plan.queries, plan.some)
            place = sample.clock.topk(count, largest=False, sorted=False).indices
            plan.start(parts, cf.Places(place, sample.clock), some, far, space, forms, plan.places)
        else:
            given = cf.Given(warm_k.contiguous(), warm_v.contiguous())
            plan.warm(parts, given, some, far, space, forms, plan.places)
        if call.steps:
            assign = plan.assign_some.bind(some, forms, scratch.label, far, by, space)
            add = plan.sum_some.bind(some, scratch.label, parts, count, rows)
            centre = plan.forms.bind(parts, None, some, far, space, forms, plan.places)
        for step in range(call.steps):
            assign(step)
            add()
            centre()
        plan.assign(source, forms, made.label, None, None, None, 0)
        parts = parts._replace(splits=plan.splits)
        plan.sum(source, made.label, parts, count, rows)
        plan.means(parts, made.centres, made.values, made.sizes, rows * count)
    return made


class _Scratch(NamedTuple):
    """What the kernels hand to each other, flat."""

    sample: cl.Sample
    metrics: Tensor
    space: cs.Space
    paid: cs.Paid
    forms: cf.Forms
    parts: cf.Parts
    far: Tensor
    label: Tensor
    some_k: Tensor | None
    some_v: Tensor | None


def _made(call: ClusterCall) -> Clustered:
    k, v = call.k, call.v
    shape = (*k.shape[:2], call.clusters)
    wide = (torch.empty((*shape, x.shape[-1]), dtype=torch.float32, device=k.device) for x in (k, v))
    whole = (torch.empty(x, dtype=torch.int32, device=k.device) for x in (shape, k.shape[:-1]))
    return Clustered(*wide, *whole)


def _scratch(plan: _Plan, source: cl.Source) -> _Scratch:
    """Few allocations, cut up: each takes its time on the host."""
    k, v, sizes = source.k, source.v, plan.sizes
    floats = torch.empty(sum(sizes.floats), dtype=torch.float32, device=k.device).split(sizes.floats)
    whole = torch.empty(sum(sizes.whole), dtype=torch.int32, device=k.device).split(sizes.whole)
    by_k, by_v = (
        torch.empty(sum(cut), dtype=x.dtype, device=k.device).split(cut) for x, cut in ((k, sizes.k), (v, sizes.v))
    )
    half, (rows, some), width = torch.half in (k.dtype, v.dtype), sizes.sample, sum(sizes.widths) + 1
    joint = floats[0][: rows * some * width].view(rows, some, width)
    clock = floats[2][: rows * some].view(rows, some)
    return _Scratch(
        cl.Sample(joint, floats[1], clock, floats[3], *sizes.blocks),
        floats[4],
        cs.Space._make(floats[5:10]),
        cs.Paid._make(floats[10:12]),
        cf.Forms(by_k[0], by_v[0], floats[12], floats[13] if half else None, floats[14], floats[15], *sizes.clusters),
        cf.Parts._make((*floats[16:19], plan.some_splits)),
        whole[0],
        whole[1],
        by_k[1] if sizes.drawn else None,
        by_v[1] if sizes.drawn else None,
    )


class _Sizes(NamedTuple):
    """How many numbers each of the tensors of `_Scratch` has."""

    floats: list[int]
    whole: list[int]
    k: list[int]
    v: list[int]
    sample: tuple[int, int]  # rows, keys
    widths: tuple[int, int]  # in whole pieces
    blocks: tuple[int, int]  # of the sample, of keys and of queries
    clusters: tuple[int, int]  # count and padded
    drawn: bool  # the sample is not all keys


def _sizes(rows: int, count: int, widths: tuple[int, int], padded_widths: tuple[int, int], some: int, queries: int,
           keys: int, splits: int, places: int) -> _Sizes:  # fmt: skip
    (width, value_width), (wide, value_wide) = widths, padded_widths
    padded, number = -(-count // TABLE_BLOCK) * TABLE_BLOCK, splits * rows * count
    blocks, square = (-(-some // SAMPLE_BLOCK), -(-queries // SAMPLE_BLOCK)), wide * wide
    sample = [some * (wide + value_wide + 1), wide + value_wide, some, queries * wide, blocks[1] * square]
    space = [square, wide, value_wide, 1, 1] + [blocks[0] * clustering.START_QUERIES] * 2
    forms = [padded, 2, padded * wide, padded * value_wide]
    floats = [rows * n for n in (*sample, *space, *forms)] + [number * n for n in (width, value_width, 1)]
    whole = [rows * n for n in (places, some)]
    drawn = some if some < keys else 0
    k, v = ([rows * padded * a, rows * drawn * b] for a, b in zip(padded_widths, widths, strict=True))

    def rounded(numbers: list[int]) -> list[int]:
        return [-(-n // 64) * 64 for n in numbers]  # each begins where the first does within a line of memory

    cut = rounded(floats), rounded(whole), rounded(k), rounded(v)
    return _Sizes(*cut, (rows, some), padded_widths, blocks, (count, padded), drawn > 0)


def _source(call: ClusterCall) -> cl.Source:
    k, mask, keys = call.k.contiguous(), call.key_mask, math.prod(grid_of(call.k))
    v = call.v.contiguous()
    if mask is None:
        return cl.Source(k, v, UNMASKED, None, None, keys)
    legal = LegalKeys.of(k, k, False, mask)
    order = None if legal.order is None else legal.order.contiguous()
    return cl.Source(k, v, KeyMask(mask.contiguous(), legal.heads_per_row), order, legal.count, keys)


@cached
def _plan(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, count: int, seen: tuple[Any, ...]) -> _Plan:
    (device, dtype, _), (_, (_, value_dtype, _), *_), *_ = seen
    rows, keys, group = k_shape[0] * k_shape[1], math.prod(k_shape[2:-1]), q_shape[1] // k_shape[1]
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    pieces = tile_pieces(k_shape[-1], v_shape[-1], narrow)
    row, value_row = pieces["ROW"], pieces["VROW"]
    some = min(keys, max(clustering.SAMPLED_KEYS, count))
    queries = min(clustering.SAMPLED_QUERIES, group * math.prod(q_shape[2:-1]))
    padded = -(-count // TABLE_BLOCK) * TABLE_BLOCK
    plain = {**pieces, "num_warps": 4 if narrow else 2, "num_stages": 1, "enable_fp_fusion": True}
    programs = rows * (-(-some // SAMPLE_BLOCK) + -(-queries // SAMPLE_BLOCK))
    sample = Kernel(cl.sample_kernel, programs, {"MODE": cl.SampleMode(SAMPLE_BLOCK, some < keys), **plain})

    def forms(source: str) -> Kernel:
        flags = {"FROM": source, "MANY": 16, "BLOCK_C": FORM_CLUSTERS, **plain}
        return Kernel(cf.forms_kernel, rows * padded // FORM_CLUSTERS, flags)

    def assign(number: int, places: int) -> Kernel:
        block, clusters, warps, most = ASSIGN if narrow else ASSIGN_EXACT
        each = row.W * dtype.itemsize + value_row.W * value_dtype.itemsize
        ahead = stages(device, most, clusters * each, block * each * max(row.PIECES, value_row.PIECES))
        how = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
        mode = AssignMode(block, clusters, places)
        return Kernel(assign_kernel, rows * -(-number // block), {"MODE": mode, **pieces, **how})

    def summed(number: int) -> tuple[Kernel, int]:
        block, clusters, warps, most = CLUSTER_SUMS if narrow else CLUSTER_SUMS_EXACT
        clusters = min(clusters if row.W + value_row.W <= 128 else 64, max(16, triton.next_power_of_2(count)))
        parts = max(row.PIECES, value_row.PIECES)
        programs = rows * -(-count // clusters) * parts
        splits = max(1, min(SUM_PROGRAMS // programs, -(-number // LEAST_SPLIT)))
        each = row.W * dtype.itemsize + value_row.W * value_dtype.itemsize
        how = {"num_warps": warps, "num_stages": stages(device, most, block * each, 0), "enable_fp_fusion": True}
        mode = SumMode(block, clusters, parts)
        return Kernel(cluster_sums_kernel, programs * splits, {"MODE": mode, **pieces, **how}), splits

    (sum_some, some_splits), (sum_all, splits) = summed(some), summed(keys)
    flags = {"MANY": 32, "BLOCK_C": MEAN_CLUSTERS, **plain}
    means = Kernel(cf.means_kernel, -(-rows * count // MEAN_CLUSTERS), flags)
    blocks = -(-some // (ASSIGN if narrow else ASSIGN_EXACT)[0])
    places = min(MOST_PLACES, -(-count // blocks))
    spaces = _spaces(rows, pieces, some, queries)
    kernels = (sample, *spaces, forms("drawn"), forms("given"), forms("parts"), assign(some, places), sum_some)
    rest = (assign(keys, 0), sum_all, means)
    widths = (k_shape[-1], v_shape[-1]), (row.W * row.PIECES, value_row.W * value_row.PIECES)
    sizes = _sizes(rows, count, *widths, some, queries, keys, max(some_splits, splits), places * blocks)
    return _Plan(*kernels, *rest, some, some_splits, splits, queries, places * blocks, sizes)


def _spaces(rows: int, pieces: dict[str, Any], some: int, queries: int) -> tuple[Kernel, Kernel, Kernel, Kernel]:
    """Of the metric, the space, the attention to blocks of keys, and the clocks of all keys."""
    row, value_row = pieces["ROW"], pieces["VROW"]
    width, value_width = row.W * row.PIECES, value_row.W * value_row.PIECES
    mode = cs.SpaceMode(width, min(64, row.W), value_width, min(64, value_row.W), SAMPLE_BLOCK)
    flags = {"MODE": mode, "num_warps": 2, "num_stages": 1, "enable_fp_fusion": True}
    keys, blocks = rows * -(-some // SAMPLE_BLOCK), rows * -(-queries // SAMPLE_BLOCK)
    paid, clocks = (Kernel(cs.paid_kernel, keys, {**flags, "LAST": last}) for last in (False, True))
    return Kernel(cs.metric_kernel, blocks, flags), Kernel(cs.space_kernel, rows, flags), paid, clocks


@triton.jit
def assign_kernel(
    source, forms, label, far, by, space, step, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """The nearest centre of a block of keys; -1 for a key that is masked, or so that no form of it is finite.

    With PLACES also some of them that are far from it, drawn by their squared distances: `far` int32 [R, PLACES,
    blocks], -1 for none. Program (row, block).
    """
    blocks = (source.keys + MODE.BLOCK_S - 1) // MODE.BLOCK_S
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    at = block * MODE.BLOCK_S + tl.arange(0, MODE.BLOCK_S)
    there, slot = at < source.keys, row * forms.padded
    if source.masked.mask is not None:
        allowed = source.masked.mask + row // source.masked.heads * source.keys + at
        there = there & (tl.load(allowed, mask=there, other=0) != 0)
    k = blocks_of(source.k + row * source.keys * ROW.E, at, there, ROW)
    v = blocks_of(source.v + row * source.keys * VROW.E, at, there, VROW)
    best = tl.full([MODE.BLOCK_S, MODE.BLOCK_C], -float("inf"), tl.float32)
    which = tl.zeros([MODE.BLOCK_S, MODE.BLOCK_C], tl.int32)
    for start in range(0, forms.padded, MODE.BLOCK_C):
        name = slot + start + tl.arange(0, MODE.BLOCK_C)
        s = tl.zeros([MODE.BLOCK_S, MODE.BLOCK_C], tl.float32)
        for n in tl.static_range(len(k)):
            s = product(wide(k[n]), tl.trans(wide(whole_block(forms.a, name, n, ROW))), s)
        values = s * 0.0 if forms.units is not None else s
        for n in tl.static_range(len(v)):
            values = product(wide(v[n]), tl.trans(wide(whole_block(forms.b, name, n, VROW))), values)
        if forms.units is not None:
            s = s * tl.load(forms.units + row * 2) + values * tl.load(forms.units + row * 2 + 1)
        else:
            s = values
        s += tl.load(forms.bias + name)[None, :]
        which = tl.where(s > best, start, which)
        best = tl.where(s > best, s, best)
    top = tl.max(best, 1)
    which += tl.arange(0, MODE.BLOCK_C)[None, :]
    found = tl.min(tl.where(best == top[:, None], which, 0x7FFFFFFF), 1)
    there = there & (tl.abs(top) < float("inf"))
    found = tl.where(there, found, -1)
    tl.store(label + row * source.keys + at, found, mask=at < source.keys)

    if MODE.PLACES > 0:
        width, value_width = ROW.W * ROW.PIECES, VROW.W * VROW.PIECES
        name, distance = slot + tl.maximum(found, 0), tl.zeros([MODE.BLOCK_S], tl.float32)
        away = ()
        for n in tl.static_range(len(k)):
            e = n * ROW.W + tl.arange(0, ROW.W)
            centre = tl.load(forms.k + name[:, None] * width + e[None, :])
            away += (tl.where(there[:, None], k[n].to(tl.float32) - centre, 0.0),)
        for n in tl.static_range(len(k)):
            e = n * ROW.W + tl.arange(0, ROW.W)
            by_metric = tl.zeros([MODE.BLOCK_S, ROW.W], tl.float32)
            for m in tl.static_range(len(k)):
                i = m * ROW.W + tl.arange(0, ROW.W)
                metric = tl.load(space.metric + (row * width + i)[:, None] * width + e[None, :])
                rough, theirs = away[m].to(tl.bfloat16), metric.to(tl.bfloat16)
                by_metric = tl.dot(wide(rough), wide(theirs), by_metric)
            distance += tl.sum(by_metric * away[n], 1)
        weight = tl.load(space.weight + row)
        for n in tl.static_range(len(v)):
            f = n * VROW.W + tl.arange(0, VROW.W)
            value = tl.load(forms.v + name[:, None] * value_width + f[None, :])
            apart = tl.where(there[:, None], v[n].to(tl.float32) - value, 0.0)
            distance += weight * tl.sum(apart * apart, 1)
        # The first of clocks that ring at random times, at rates that are the distances.
        noise = absorb(row_state(by.seed, (row * by.group).to(tl.int32)), 4 + step)
        share = ((absorb(noise, at) >> 8).to(tl.float32) + 0.5) / 16777216.0
        candidate = there & (distance > tl.load(space.least + row))
        clock = tl.where(candidate, -tl.log(share) / tl.where(candidate, distance, 1.0), float("inf"))
        for n in range(MODE.PLACES):
            first = tl.min(clock, 0)
            chosen = tl.min(tl.where(clock == first, at, 0x7FFFFFFF), 0)
            place = far + (row * MODE.PLACES + n) * blocks + block
            tl.store(place, tl.where(first < float("inf"), chosen, -1))
            clock = tl.where(at == chosen, float("inf"), clock)


@triton.jit
def cluster_sums_kernel(
    source, label, parts, count, rows, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr
):  # fmt: skip
    """Program (row, split of the keys, block of clusters, piece of the width)."""
    programs = (count + MODE.BLOCK_C - 1) // MODE.BLOCK_C
    piece, rest = tl.program_id(0) % MODE.PARTS, tl.program_id(0) // MODE.PARTS
    block, rest = rest % programs, rest // programs
    split, row = rest % parts.splits, (rest // parts.splits).to(tl.int64)
    name, keys = block * MODE.BLOCK_C + tl.arange(0, MODE.BLOCK_C), source.keys
    each = ((keys + MODE.BLOCK_S - 1) // MODE.BLOCK_S + parts.splits - 1) // parts.splits * MODE.BLOCK_S
    k_row, v_row = source.k + row * keys * ROW.E, source.v + row * keys * VROW.E
    k_sum = tl.zeros([MODE.BLOCK_C, ROW.W], tl.float32)
    v_sum, first, last = (
        tl.zeros([MODE.BLOCK_C, VROW.W], tl.float32),
        split * each,
        tl.minimum((split + 1) * each, keys),
    )
    for begin in range(first, last, MODE.BLOCK_S):
        at = begin + tl.arange(0, MODE.BLOCK_S)
        found = tl.load(label + row * keys + at, mask=at < keys, other=-1)
        own = name[:, None] == found[None, :]
        # A key that is not finite is zero here: 0 * NaN is NaN.
        k = wide(block_of(k_row, at, found >= 0, own_piece(piece, ROW), ROW))
        v = wide(block_of(v_row, at, found >= 0, own_piece(piece, VROW), VROW))
        k_sum = product(own.to(k.dtype), k, k_sum)
        v_sum = product(own.to(v.dtype), v, v_sum)
    slot, there = (split * rows + row) * count + name, name < count
    put_piece(parts.k, slot, there, piece, k_sum, MODE.PARTS, False, ROW)
    put_piece(parts.v, slot, there, piece, v_sum, MODE.PARTS, False, VROW)
    if piece == 0:  # counted apart: the products need all registers
        number = tl.zeros([MODE.BLOCK_C, MODE.BLOCK_S], tl.int32)
        for begin in range(first, last, MODE.BLOCK_S):
            at = begin + tl.arange(0, MODE.BLOCK_S)
            found = tl.load(label + row * keys + at, mask=at < keys, other=-1)
            number += (name[:, None] == found[None, :]).to(tl.int32)
        tl.store(parts.number + slot, tl.sum(number, 1).to(tl.float32), mask=there)
