"""Keys grouped by content, in Triton: assignment fused with its argmax, sums per cluster as one-hot matrix products.

The steps of k-means read a sample, laid side by side once; then all keys are assigned and their means taken. A kernel
each turns sums into centers and their forms, forms into labels, labels into sums.
Nothing has the size of keys times clusters, and the bits are the same every time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import ClusterCall, Clustered
from ....spec import clustering
from ....spec.grid import AllowedKeys, grid_of
from ..noise import absorb, row_state, seed_argument
from ..primitives import (
    UNMASKED,
    KeyMask,
    for_product,
    load_padded,
    load_piece,
    load_pieces,
    own_piece,
    product,
    store_piece,
)
from ..runtime.block_sizes import ASSIGN, ASSIGN_EXACT, CLUSTER_SUMS, CLUSTER_SUMS_EXACT, stages, tile_pieces
from ..runtime.launch import Kernel, cached, kinds, on_device
from .forms import DrawnStart, Forms, GivenStart, Parts, forms_kernel, means_kernel
from .sample import Draws, Sample, SampleConfig, Source, sample_kernel
from .space import Space, SpaceConfig, StartScores, metric_kernel, moments_of, space_kernel, start_scores_kernel

TABLE_BLOCK = 64  # forms are a whole number of these
SAMPLE_BLOCK = 64
SUM_PROGRAMS = 512  # in all
LEAST_SPLIT = 512  # keys of a split at least
FORM_CLUSTERS = 16
MEAN_CLUSTERS = 4
MOST_PLACES = 16  # far keys of a block of the sample


class AssignConfig(NamedTuple):
    """What `assign_kernel` is compiled for."""

    BLOCK_S: int  # keys
    BLOCK_C: int  # clusters per product
    PLACES: int  # far keys of each block that are reported


class SumConfig(NamedTuple):
    """What `cluster_sums_kernel` is compiled for."""

    BLOCK_S: int
    BLOCK_C: int
    PARTS: int  # programs that share the width


class _Plan(NamedTuple):
    """The kernels and the numbers that shapes give."""

    sample: Kernel
    metric: Kernel
    space: Kernel
    start_scores: Kernel
    clocks: Kernel
    start: Kernel
    warm: Kernel
    forms: Kernel
    assign_sample: Kernel
    sum_sample: Kernel
    assign: Kernel
    sum: Kernel
    means: Kernel
    keys: int  # of the sample
    sample_splits: int
    splits: int
    queries: int  # of the sample
    places: int  # for far keys
    sizes: _Sizes


def cluster(call: ClusterCall) -> Clustered:
    q = call.q.contiguous()
    k = call.k
    count = call.clusters
    rows = k.shape[0] * k.shape[1]
    keys = math.prod(grid_of(k))
    group = q.shape[1] // max(k.shape[1], 1)
    if count >= keys or not rows:
        with torch.no_grad():
            return clustering.cluster(call)
    warm_k = call.warm_centers
    warm_v = call.warm_values
    with on_device(k):
        source = _source(call)
        draws = Draws(seed_argument(call.seed, call.rows), group)
        plan = _plan(q.shape, k.shape, call.v.shape, count, kinds(q, source, draws))
        result = _empty(call)
        scratch = _scratch(plan, source)
        some = source
        if scratch.k is not None and scratch.v is not None:
            some = Source(scratch.k, scratch.v, UNMASKED, None, None, plan.keys)
        forms = scratch.forms
        parts = scratch.parts
        far = scratch.far
        sample = scratch.sample
        space = scratch.space
        queries = group * math.prod(grid_of(q))
        plan.sample(source, some, q, queries, plan.queries, call.scale, draws, sample, rows)
        moments = moments_of(sample, rows)
        plan.metric(moments, moments.shape[1], sample, scratch.metrics, plan.queries)
        plan.space(moments, moments.shape[1], sample, scratch.metrics, plan.queries, space)
        if warm_k is None or warm_v is None:
            plan.start_scores(sample, scratch.start_scores, plan.queries, plan.keys)
            plan.clocks(sample, scratch.start_scores, plan.queries, plan.keys)
            place = sample.clock.topk(count, largest=False, sorted=False).indices
            plan.start(parts, DrawnStart(place, sample.clock), some, far, space, forms, plan.places)
        else:
            given = GivenStart(warm_k.contiguous(), warm_v.contiguous())
            plan.warm(parts, given, some, far, space, forms, plan.places)
        if call.steps:
            assign = plan.assign_sample.bind(some, forms, scratch.label, far, draws, space)
            add = plan.sum_sample.bind(some, scratch.label, parts, count, rows)
            center = plan.forms.bind(parts, None, some, far, space, forms, plan.places)
        for step in range(call.steps):
            assign(step)
            add()
            center()
        plan.assign(source, forms, result.label, None, None, None, 0)
        parts = parts._replace(splits=plan.splits)
        plan.sum(source, result.label, parts, count, rows)
        plan.means(parts, result.centers, result.values, result.sizes, rows * count)
    return result


class _Scratch(NamedTuple):
    """What the kernels hand to each other."""

    sample: Sample
    metrics: Tensor  # float32 [R, blocks of queries, E, E]
    space: Space
    start_scores: StartScores
    forms: Forms
    parts: Parts
    far: Tensor  # int32 [R, places]
    label: Tensor  # int32 [R, keys of the sample]
    k: Tensor | None  # [R, keys of the sample, E], where it is not all keys
    v: Tensor | None  # [R, keys of the sample, F]


class _Sizes(NamedTuple):
    """How many numbers each tensor of `_Scratch` has, by name, for each dtype; and its shapes."""

    float32: dict[str, int]
    int32: dict[str, int]
    like_k: dict[str, int]
    like_v: dict[str, int]
    rows: int
    keys: int  # of the sample
    blocks: int  # of these keys
    query_blocks: int
    width: int  # of keys and values, in whole pieces
    count: int  # of clusters
    padded: int
    gathered: bool  # the sample is not all keys


def _empty(call: ClusterCall) -> Clustered:
    k = call.k
    shape = (*k.shape[:2], call.clusters)
    return Clustered(
        torch.empty((*shape, k.shape[-1]), dtype=torch.float32, device=k.device),
        torch.empty((*shape, call.v.shape[-1]), dtype=torch.float32, device=k.device),
        torch.empty(shape, dtype=torch.int32, device=k.device),
        torch.empty(k.shape[:-1], dtype=torch.int32, device=k.device),
    )


def _cut(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """One allocation, which takes its time on the host, cut up by name."""
    numbers = list(sizes.values())
    return dict(zip(sizes, torch.empty(sum(numbers), dtype=dtype, device=device).split(numbers), strict=True))


def _scratch(plan: _Plan, source: Source) -> _Scratch:
    k = source.k
    v = source.v
    sizes = plan.sizes
    rows = sizes.rows
    keys = sizes.keys
    width = sizes.width + 1
    floats = _cut(sizes.float32, torch.float32, k.device)
    ints = _cut(sizes.int32, torch.int32, k.device)
    like_k = _cut(sizes.like_k, k.dtype, k.device)
    like_v = _cut(sizes.like_v, v.dtype, k.device)
    half = torch.half in (k.dtype, v.dtype)
    return _Scratch(
        Sample(
            floats["joint"][: rows * keys * width].view(rows, keys, width),
            floats["first"],
            floats["clock"][: rows * keys].view(rows, keys),
            floats["q"],
            sizes.blocks,
            sizes.query_blocks,
        ),
        floats["metrics"],
        Space(floats["metric"], floats["k_mean"], floats["v_mean"], floats["weight"], floats["least"]),
        StartScores(floats["start_max"], floats["start_sum"]),
        Forms(
            like_k["form"],
            like_v["form"],
            floats["bias"],
            floats["units"] if half else None,
            floats["centers"],
            floats["values"],
            sizes.count,
            sizes.padded,
        ),
        Parts(floats["k_parts"], floats["v_parts"], floats["number_parts"], plan.sample_splits),
        ints["far"],
        ints["label"],
        like_k["sample"] if sizes.gathered else None,
        like_v["sample"] if sizes.gathered else None,
    )


def _sizes(
    rows: int,
    count: int,
    widths: tuple[int, int],
    padded_widths: tuple[int, int],
    sample_keys: int,
    queries: int,
    keys: int,
    splits: int,
    places: int,
) -> _Sizes:
    """`widths` of keys and values; `padded_widths` in whole pieces; `splits` of all sums; `places` for far keys."""
    width, value_width = padded_widths
    padded = -(-count // TABLE_BLOCK) * TABLE_BLOCK
    blocks = -(-sample_keys // SAMPLE_BLOCK)
    query_blocks = -(-queries // SAMPLE_BLOCK)
    gathered = sample_keys if sample_keys < keys else 0
    parts = splits * count

    def by_rows(**numbers: int) -> dict[str, int]:
        """Of all rows, rounded so that each begins where the first does within a line of memory."""
        return {name: -(-rows * n // 64) * 64 for name, n in numbers.items()}

    return _Sizes(
        float32=by_rows(
            joint=sample_keys * (width + value_width + 1),
            first=width + value_width,
            clock=sample_keys,
            q=queries * width,
            metrics=query_blocks * width * width,
            metric=width * width,
            k_mean=width,
            v_mean=value_width,
            weight=1,
            least=1,
            start_max=blocks * clustering.START_QUERIES,
            start_sum=blocks * clustering.START_QUERIES,
            bias=padded,
            units=2,
            centers=padded * width,
            values=padded * value_width,
            k_parts=parts * widths[0],
            v_parts=parts * widths[1],
            number_parts=parts,
        ),
        int32=by_rows(far=places, label=sample_keys),
        like_k=by_rows(form=padded * width, sample=gathered * widths[0]),
        like_v=by_rows(form=padded * value_width, sample=gathered * widths[1]),
        rows=rows,
        keys=sample_keys,
        blocks=blocks,
        query_blocks=query_blocks,
        width=width + value_width,
        count=count,
        padded=padded,
        gathered=gathered > 0,
    )


def _source(call: ClusterCall) -> Source:
    k = call.k.contiguous()
    v = call.v.contiguous()
    mask = call.key_mask
    keys = math.prod(grid_of(call.k))
    if mask is None:
        return Source(k, v, UNMASKED, None, None, keys)
    allowed = AllowedKeys.of(k, k, False, mask)
    order = None if allowed.order is None else allowed.order.contiguous()
    return Source(k, v, KeyMask(mask.contiguous(), allowed.heads_per_row), order, allowed.count, keys)


@cached
def _plan(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, count: int, seen: tuple[Any, ...]) -> _Plan:
    (device, dtype, _), (_, (_, value_dtype, _), *_), *_ = seen
    rows = k_shape[0] * k_shape[1]
    keys = math.prod(k_shape[2:-1])
    group = q_shape[1] // k_shape[1]
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    pieces = tile_pieces(k_shape[-1], v_shape[-1], narrow)
    features = pieces["E"]
    values = pieces["F"]
    sample_keys = min(keys, max(clustering.SAMPLED_KEYS, count))
    queries = min(clustering.SAMPLED_QUERIES, group * math.prod(q_shape[2:-1]))
    padded = -(-count // TABLE_BLOCK) * TABLE_BLOCK
    plain = {**pieces, "num_warps": 4 if narrow else 2, "num_stages": 1, "enable_fp_fusion": True}
    programs = rows * (-(-sample_keys // SAMPLE_BLOCK) + -(-queries // SAMPLE_BLOCK))
    config = SampleConfig(SAMPLE_BLOCK, sample_keys < keys)
    vector_bytes = features.BLOCK * dtype.itemsize + values.BLOCK * value_dtype.itemsize
    parts = max(features.PIECES, values.PIECES)

    def forms(source: str) -> Kernel:
        flags = {"FROM": source, "MANY": 16, "BLOCK_C": FORM_CLUSTERS, **plain}
        return Kernel(forms_kernel, rows * padded // FORM_CLUSTERS, flags)

    def assign(number: int, places: int) -> Kernel:
        block, clusters, warps, most = ASSIGN if narrow else ASSIGN_EXACT
        ahead = stages(device, most, clusters * vector_bytes, block * vector_bytes * parts)
        options = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
        flags = {"CONFIG": AssignConfig(block, clusters, places), **pieces, **options}
        return Kernel(assign_kernel, rows * -(-number // block), flags)

    def summed(number: int) -> tuple[Kernel, int]:
        block, clusters, warps, most = CLUSTER_SUMS if narrow else CLUSTER_SUMS_EXACT
        clusters = clusters if features.BLOCK + values.BLOCK <= 128 else 64
        clusters = min(clusters, max(16, triton.next_power_of_2(count)))
        programs = rows * -(-count // clusters) * parts
        splits = max(1, min(SUM_PROGRAMS // programs, -(-number // LEAST_SPLIT)))
        ahead = stages(device, most, block * vector_bytes, 0)
        options = {"num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}
        flags = {"CONFIG": SumConfig(block, clusters, parts), **pieces, **options}
        return Kernel(cluster_sums_kernel, programs * splits, flags), splits

    sum_sample, sample_splits = summed(sample_keys)
    sum_all, splits = summed(keys)
    blocks = -(-sample_keys // (ASSIGN if narrow else ASSIGN_EXACT)[0])
    places = min(MOST_PLACES, -(-count // blocks))
    metric, space, start_scores, clocks = _space_kernels(rows, pieces, sample_keys, queries)
    flags = {"MANY": 32, "BLOCK_C": MEAN_CLUSTERS, **plain}
    return _Plan(
        sample=Kernel(sample_kernel, programs, {"CONFIG": config, **plain}),
        metric=metric,
        space=space,
        start_scores=start_scores,
        clocks=clocks,
        start=forms("drawn"),
        warm=forms("given"),
        forms=forms("parts"),
        assign_sample=assign(sample_keys, places),
        sum_sample=sum_sample,
        assign=assign(keys, 0),
        sum=sum_all,
        means=Kernel(means_kernel, -(-rows * count // MEAN_CLUSTERS), flags),
        keys=sample_keys,
        sample_splits=sample_splits,
        splits=splits,
        queries=queries,
        places=places * blocks,
        sizes=_sizes(
            rows,
            count,
            (k_shape[-1], v_shape[-1]),
            (features.BLOCK * features.PIECES, values.BLOCK * values.PIECES),
            sample_keys,
            queries,
            keys,
            max(sample_splits, splits),
            places * blocks,
        ),
    )


def _space_kernels(
    rows: int, pieces: dict[str, Any], sample_keys: int, queries: int
) -> tuple[Kernel, Kernel, Kernel, Kernel]:
    """Of the metric, the space, the attention to blocks of keys, and the clocks of all keys."""
    features = pieces["E"]
    values = pieces["F"]
    config = SpaceConfig(
        WIDTH=features.BLOCK * features.PIECES,
        D=min(64, features.BLOCK),
        VALUE_WIDTH=values.BLOCK * values.PIECES,
        FD=min(64, values.BLOCK),
        BLOCK_S=SAMPLE_BLOCK,
    )
    flags = {"CONFIG": config, "num_warps": 2, "num_stages": 1, "enable_fp_fusion": True}
    key_programs = rows * -(-sample_keys // SAMPLE_BLOCK)
    return (
        Kernel(metric_kernel, rows * -(-queries // SAMPLE_BLOCK), flags),
        Kernel(space_kernel, rows, flags),
        Kernel(start_scores_kernel, key_programs, {**flags, "LAST": False}),
        Kernel(start_scores_kernel, key_programs, {**flags, "LAST": True}),
    )


@triton.jit
def assign_kernel(
    source,
    forms,
    label,
    far,
    draws,
    space,
    step,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The nearest center of a block of keys; -1 for a key that is masked, or so that no form of it is finite.

    With PLACES also some of them that are far from it, drawn by their squared distances: `far` int32 [R, PLACES,
    blocks], -1 for none. Program (row, block).
    """
    blocks = (source.keys + CONFIG.BLOCK_S - 1) // CONFIG.BLOCK_S
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
    exists = at < source.keys  # [BK]
    first_slot = row * forms.padded
    if source.masked.mask is not None:
        mask_place = source.masked.mask + row // source.masked.group * source.keys + at  # [BK]
        exists = exists & (tl.load(mask_place, mask=exists, other=0) != 0)
    k_block = load_pieces(source.k + row * source.keys * E.SIZE, at, exists, E)  # [BK, E]
    v_block = load_pieces(source.v + row * source.keys * F.SIZE, at, exists, F)  # [BK, F]
    best = tl.full([CONFIG.BLOCK_S, CONFIG.BLOCK_C], -float("inf"), tl.float32)  # [BK, BC]
    which = tl.zeros([CONFIG.BLOCK_S, CONFIG.BLOCK_C], tl.int32)  # [BK, BC]
    for start in range(0, forms.padded, CONFIG.BLOCK_C):
        slot = first_slot + start + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
        s = tl.zeros([CONFIG.BLOCK_S, CONFIG.BLOCK_C], tl.float32)  # [BK, BC]
        for n in tl.static_range(len(k_block)):
            a = for_product(k_block[n])
            s = product(a, tl.trans(for_product(load_padded(forms.a, slot, n, E))), s)
        by_values = s * 0.0 if forms.units is not None else s  # [BK, BC]
        for n in tl.static_range(len(v_block)):
            b = for_product(v_block[n])
            by_values = product(b, tl.trans(for_product(load_padded(forms.b, slot, n, F))), by_values)
        if forms.units is not None:
            s = s * tl.load(forms.units + row * 2) + by_values * tl.load(forms.units + row * 2 + 1)
        else:
            s = by_values
        s += tl.load(forms.bias + slot)[None, :]
        which = tl.where(s > best, start, which)
        best = tl.where(s > best, s, best)
    best_of_key = tl.max(best, 1)  # [BK]
    which += tl.arange(0, CONFIG.BLOCK_C)[None, :]
    name = tl.min(tl.where(best == best_of_key[:, None], which, 0x7FFFFFFF), 1)  # [BK]
    exists = exists & (tl.abs(best_of_key) < float("inf"))
    name = tl.where(exists, name, -1)
    tl.store(label + row * source.keys + at, name, mask=at < source.keys)

    if CONFIG.PLACES > 0:
        slot = first_slot + tl.maximum(name, 0)  # [BK]
        distance = squared_distance(k_block, v_block, exists, slot, row, forms, space, CONFIG, E, F)  # [BK]
        # The first of clocks that ring at random times, at rates that are the distances.
        noise = absorb(row_state(draws.seed, (row * draws.group).to(tl.int32)), 4 + step)
        share = ((absorb(noise, at) >> 8).to(tl.float32) + 0.5) / 16777216.0  # [BK]
        candidate = exists & (distance > tl.load(space.least + row))
        clock = tl.where(candidate, -tl.log(share) / tl.where(candidate, distance, 1.0), float("inf"))  # [BK]
        for n in range(CONFIG.PLACES):
            first = tl.min(clock, 0)
            chosen = tl.min(tl.where(clock == first, at, 0x7FFFFFFF), 0)
            place = far + (row * CONFIG.PLACES + n) * blocks + block
            tl.store(place, tl.where(first < float("inf"), chosen, -1))
            clock = tl.where(at == chosen, float("inf"), clock)


@triton.jit
def squared_distance(
    k_block,
    v_block,
    exists,
    slot,
    row,
    forms,
    space,
    CONFIG: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """The squared distance [BK] of each key from the center at its slot; its metric to the digits of bfloat16."""
    width = E.BLOCK * E.PIECES
    value_width = F.BLOCK * F.PIECES
    distance = tl.zeros([CONFIG.BLOCK_S], tl.float32)  # [BK]
    apart = ()
    for n in tl.static_range(len(k_block)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        center = tl.load(forms.k + slot[:, None] * width + e[None, :])  # [BK, E]
        apart += (tl.where(exists[:, None], k_block[n].to(tl.float32) - center, 0.0),)
    for n in tl.static_range(len(k_block)):
        e = n * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
        acc = tl.zeros([CONFIG.BLOCK_S, E.BLOCK], tl.float32)  # [BK, E]
        for m in tl.static_range(len(k_block)):
            i = m * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
            metric = tl.load(space.metric + (row * width + i)[:, None] * width + e[None, :])  # [E, E]
            rough = apart[m].to(tl.bfloat16)  # [BK, E]
            rough_metric = metric.to(tl.bfloat16)  # [E, E]
            acc = tl.dot(for_product(rough), for_product(rough_metric), acc)
        distance += tl.sum(acc * apart[n], 1)
    weight = tl.load(space.weight + row)
    for n in tl.static_range(len(v_block)):
        f = n * F.BLOCK + tl.arange(0, F.BLOCK)  # [F]
        value = tl.load(forms.v + slot[:, None] * value_width + f[None, :])  # [BK, F]
        value_apart = tl.where(exists[:, None], v_block[n].to(tl.float32) - value, 0.0)  # [BK, F]
        distance += weight * tl.sum(value_apart * value_apart, 1)
    return distance


@triton.jit
def cluster_sums_kernel(source, label, parts, count, rows, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row, split of the keys, block of clusters, piece of the width)."""
    blocks = (count + CONFIG.BLOCK_C - 1) // CONFIG.BLOCK_C
    piece = tl.program_id(0) % CONFIG.PARTS
    rest = tl.program_id(0) // CONFIG.PARTS
    block = rest % blocks
    rest = rest // blocks
    split = rest % parts.splits
    row = (rest // parts.splits).to(tl.int64)
    name = block * CONFIG.BLOCK_C + tl.arange(0, CONFIG.BLOCK_C)  # [BC]
    keys = source.keys
    each = ((keys + CONFIG.BLOCK_S - 1) // CONFIG.BLOCK_S + parts.splits - 1) // parts.splits * CONFIG.BLOCK_S
    k_row = source.k + row * keys * E.SIZE
    v_row = source.v + row * keys * F.SIZE
    k_sum = tl.zeros([CONFIG.BLOCK_C, E.BLOCK], tl.float32)  # [BC, E]
    v_sum = tl.zeros([CONFIG.BLOCK_C, F.BLOCK], tl.float32)  # [BC, F]
    first = split * each
    last = tl.minimum((split + 1) * each, keys)
    for begin in range(first, last, CONFIG.BLOCK_S):
        at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
        key_label = tl.load(label + row * keys + at, mask=at < keys, other=-1)  # [BK]
        one_hot = name[:, None] == key_label[None, :]  # [BC, BK]
        # A key that is not finite is zero here: 0 * NaN is NaN.
        k_block = for_product(load_piece(k_row, at, key_label >= 0, own_piece(piece, E), E))  # [BK, E]
        v_block = for_product(load_piece(v_row, at, key_label >= 0, own_piece(piece, F), F))  # [BK, F]
        k_sum = product(one_hot.to(k_block.dtype), k_block, k_sum)
        v_sum = product(one_hot.to(v_block.dtype), v_block, v_sum)
    slot = (split * rows + row) * count + name  # [BC]
    exists = name < count  # [BC]
    store_piece(parts.k, slot, exists, piece, k_sum, CONFIG.PARTS, False, E)
    store_piece(parts.v, slot, exists, piece, v_sum, CONFIG.PARTS, False, F)
    if piece == 0:  # counted apart: the products need all registers
        number = tl.zeros([CONFIG.BLOCK_C, CONFIG.BLOCK_S], tl.int32)  # [BC, BK]
        for begin in range(first, last, CONFIG.BLOCK_S):
            at = begin + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
            key_label = tl.load(label + row * keys + at, mask=at < keys, other=-1)  # [BK]
            number += (name[:, None] == key_label[None, :]).to(tl.int32)
        tl.store(parts.number + slot, tl.sum(number, 1).to(tl.float32), mask=exists)
