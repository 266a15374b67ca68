"""Keys grouped by content, in Triton.

The steps of k-means read a sample, laid side by side once; then all keys are assigned, sorted by their labels and added
up cluster by cluster, in one pass each. Nothing has the size of keys times clusters, and the bits are the same every
time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ....core.calls import ClusterCall, Clustered
from ....spec import clustering
from ....spec.grid import AllowedKeys, grid_of
from ..noise import seed_argument
from ..primitives import UNMASKED, KeyMask
from ..runtime.block_sizes import (
    ASSIGN,
    ASSIGN_AHEAD,
    ASSIGN_BYTES,
    ASSIGN_EXACT,
    ASSIGN_WAVES,
    PRODUCT_PROGRAMS,
    PRODUCTS,
    PRODUCTS_EXACT,
    SEGMENT_PROGRAMS,
    SEGMENTS,
    SEGMENTS_EXACT,
    multiprocessors,
    shares,
    tile_pieces,
)
from ..runtime.launch import Flags, Kernel, cached, kinds, on_device
from .assign import NONE, AssignConfig, FarConfig, assign_kernel, far_kernel
from .forms import DrawnStart, Forms, GivenStart, forms_kernel
from .order import Counting, OrderConfig, PrefixConfig, label_kernel, order_kernel, prefix_kernel
from .sample import Draws, Sample, SampleConfig, Source, sample_kernel
from .segments import (
    ProductConfig,
    SegmentConfig,
    Segments,
    SlopeConfig,
    Statistics,
    means_kernel,
    products_kernel,
    segments_kernel,
    slope_kernel,
)
from .space import METRIC_ROWS, Moments, Space, SpaceConfig, metric_kernel, moments_kernel, space_kernel

SAMPLE_BLOCK = 64
RATE_BLOCK = 256
METRIC_QUERIES = 64  # of a program
FORM_CLUSTERS = 16
MEAN_CLUSTERS = 4
MOST_PLACES = 16  # far keys of a block of the sample
SORTED_KEYS = 1024  # of a block
LEAST_SPLIT = 128  # keys of a split at least
MOST_CHOSEN = 1 << 14  # keys of the sample that one program chooses the starts of


class _Sizes(NamedTuple):
    """What shapes say: widths in whole pieces, and into how many parts work is cut."""

    rows: int
    keys: int
    count: int  # of clusters
    padded: int  # clusters, in whole groups
    width: int
    value_width: int
    sample: int  # keys of the sample
    gathered: bool  # the sample is drawn, not all keys
    queries: int  # of the sample
    moment_splits: int
    query_splits: int
    sample_splits: int
    splits: int
    slope_splits: int
    places: int  # for far keys

    @property
    def blocks(self) -> int:
        """Of the keys that are sorted."""
        return -(-self.keys // SORTED_KEYS)

    @property
    def sample_blocks(self) -> int:
        return -(-self.sample // SORTED_KEYS)


class _Sorting(NamedTuple):
    """The kernels from forms to keys in the order of their clusters and sums over them."""

    assign: Kernel
    label: Kernel
    prefix: Kernel
    order: Kernel
    segments: Kernel
    assign_splits: int


class _Plan(NamedTuple):
    """The kernels and the numbers that shapes give."""

    sample: Kernel
    moments: Kernel
    metric: Kernel
    space: Kernel
    start: Kernel
    forms: Kernel
    far: Kernel
    of_sample: _Sorting
    of_all: _Sorting
    sum: Kernel  # over all keys, without squares
    products: Kernel
    means: Kernel
    slope: Kernel
    sizes: _Sizes


class _Scratch(NamedTuple):
    """What the kernels hand to each other."""

    some: Source  # the sample
    sample: Sample
    moments: Moments
    metrics: Tensor  # float32 [R, query_splits, E, E]
    space: Space
    place: Tensor  # int32 [R, C], keys of the sample to start from
    forms: Forms
    best: Tensor  # int64 [R, M]
    far: Tensor  # int32 [R, places]
    label: Tensor  # int32 [R, S]
    order: Tensor  # int32 [R, S]
    sample_counting: Counting
    counting: Counting
    sample_segments: Segments
    segments: Segments
    scatter: Tensor  # float32 [R, C, E]
    scatters: Tensor  # float32 [R, C]


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
    warm = call.warm_centers is not None and call.warm_values is not None
    with on_device(k):
        source = _source(call)
        draws = Draws(seed_argument(call.seed, call.rows), group)
        plan = _plan(q.shape, k.shape, call.v.shape, count, warm, kinds(q, source, draws))
        result = _empty(call)
        scratch = _scratch(plan.sizes, source)
        some = scratch.some
        sample = scratch.sample
        moments = scratch.moments
        forms = scratch.forms
        counting = scratch.sample_counting
        sizes = plan.sizes
        queries = group * math.prod(grid_of(q))
        query_splits = sizes.query_splits
        metrics = scratch.metrics
        place = scratch.place
        plan.sample(source, some, q, queries, sizes.queries, call.scale, draws, sample, rows)
        plan.moments(some, sample, moments, sizes.queries, rows)
        plan.metric(sample, moments, metrics, query_splits, sizes.queries, place, count, sizes.sample, rows)
        plan.space(some, sample, moments, metrics, query_splits, sizes.queries, scratch.space)
        start = _start(call, scratch, sizes)
        left = (counting.starting, scratch.sample_segments, scratch.far, scratch.space, forms, sizes.places)
        plan.start(start, some, *left)
        for step in range(call.steps):
            _sort(plan.of_sample, some, forms, scratch.best, scratch.label, scratch.order, counting)
            plan.far(some, forms, scratch.label, counting.starting, scratch.far, draws, scratch.space, step)
            plan.of_sample.segments(some, scratch.order, counting.starting, forms, scratch.sample_segments)
            plan.forms(None, some, *left)
        counting = scratch.counting
        segments = scratch.segments
        _sort(plan.of_all, source, forms, scratch.best, result.label, result.order, counting)
        if warm and not call.steps:  # the centers may be far from the means: then these take their place first
            scratch.far.fill_(-1)
            plan.sum(source, result.order, counting.starting, forms, segments)
            plan.forms(None, source, counting.starting, segments, scratch.far, scratch.space, forms, sizes.places)
        plan.of_all.segments(source, result.order, counting.starting, forms, segments)
        plan.products(source, result.label, forms, segments)
        statistics = Statistics(
            k=result.centers,
            v=result.values,
            slope=result.slope,
            sizes=result.sizes,
            variance=result.variance,
            spreads=result.spreads,
            scatter=scratch.scatter,
            scatters=scratch.scatters,
        )
        plan.means(counting.starting, segments, forms, scratch.space.metric, statistics, keys)
        plan.slope(counting.starting, segments, forms, statistics)
    return result


def _start(call: ClusterCall, scratch: _Scratch, sizes: _Sizes) -> GivenStart | DrawnStart:
    if call.warm_centers is not None and call.warm_values is not None:
        return GivenStart(call.warm_centers.contiguous(), call.warm_values.contiguous())
    clock = scratch.sample.clock
    if sizes.sample > MOST_CHOSEN:
        clocks = clock[: sizes.rows * sizes.sample].view(sizes.rows, sizes.sample)
        return DrawnStart(clocks.topk(sizes.count, largest=False, sorted=False).indices.to(torch.int32), clock)
    return DrawnStart(scratch.place, clock)


def _sort(
    sorting: _Sorting, source: Source, forms: Forms, best: Tensor, label: Tensor, order: Tensor, counting: Counting
) -> None:
    """The nearest centers of the keys of `source`, and the keys in their order."""
    sorting.assign(source, forms, best, sorting.assign_splits)
    sorting.label(best, source.masked, label, counting, source.keys, forms.count)
    sorting.prefix(counting, forms.count)
    sorting.order(label, order, counting, source.keys, forms.count)


def _empty(call: ClusterCall) -> Clustered:
    k = call.k
    heads = k.shape[:2]
    width = k.shape[-1]
    value_width = call.v.shape[-1]

    def floats(*shape: int) -> Tensor:
        return torch.empty((*heads, *shape), dtype=torch.float32, device=k.device)

    def ints(*shape: int) -> Tensor:
        return torch.empty((*heads, *shape), dtype=torch.int32, device=k.device)

    return Clustered(
        centers=floats(call.clusters, width),
        values=floats(call.clusters, value_width),
        slope=floats(width, value_width),
        sizes=ints(call.clusters),
        label=ints(*grid_of(k)),
        order=ints(math.prod(grid_of(k))),
        variance=floats(width),
        spreads=floats(call.clusters),
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


def _cut(numbers: dict[str, int], rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Numbers of each row by name: one allocation, which takes its time on the host, cut up at lines of memory."""
    lengths = [-(-rows * n // 64) * 64 for n in numbers.values()]
    return dict(zip(numbers, torch.empty(sum(lengths), dtype=dtype, device=device).split(lengths), strict=True))


def _scratch(sizes: _Sizes, source: Source) -> _Scratch:
    k = source.k
    v = source.v
    rows = sizes.rows
    count = sizes.count
    width = sizes.width
    value_width = sizes.value_width
    few = clustering.START_QUERIES
    blocks = -(-sizes.sample // SAMPLE_BLOCK)
    segments = count + max(sizes.splits, sizes.sample_splits)
    floats = _cut(
        {
            "valid": sizes.sample,
            "clock": sizes.sample,
            "q": sizes.queries * width,
            "scores": sizes.sample * few,
            "block_max": blocks * few,
            "block_sum": blocks * few,
            "square": sizes.moment_splits * width * width,
            "k_sum": sizes.moment_splits * width,
            "v_sum": sizes.moment_splits * value_width,
            "v_square": sizes.moment_splits * value_width,
            "number": sizes.moment_splits,
            "metrics": sizes.query_splits * width * width,
            "metric": width * width,
            "k_mean": width,
            "v_mean": value_width,
            "spread": width // METRIC_ROWS,
            "variance": 1,
            "bias": sizes.padded,
            "units": 2,
            "centers": sizes.padded * width,
            "values": sizes.padded * value_width,
            "k_segments": segments * width,
            "v_segments": segments * value_width,
            "squares": segments * width,
            "slopes": sizes.slope_splits * width * value_width,
            "scatter": count * width,
            "scatters": count,
        },
        rows,
        torch.float32,
        k.device,
    )
    ints = _cut(
        {
            "place": count,
            "far": sizes.places,
            "label": sizes.sample,
            "order": sizes.sample,
            "sample_counts": sizes.sample_blocks * (count + 1),
            "counts": sizes.blocks * (count + 1),
            "totals": count + 1,
            "starting": count + 1,
        },
        rows,
        torch.int32,
        k.device,
    )
    gathered = sizes.sample if sizes.gathered else 0
    like_k = _cut({"form": sizes.padded * width, "sample": gathered * k.shape[-1]}, rows, k.dtype, k.device)
    like_v = _cut({"form": sizes.padded * value_width, "sample": gathered * v.shape[-1]}, rows, v.dtype, k.device)
    in_all = Segments(
        k=floats["k_segments"],
        v=floats["v_segments"],
        square=floats["squares"],
        slope=floats["slopes"],
        splits=sizes.splits,
        slope_splits=sizes.slope_splits,
    )
    counting = Counting(ints["counts"], ints["totals"], ints["starting"], sizes.blocks)
    some = Source(like_k["sample"], like_v["sample"], UNMASKED, None, None, sizes.sample)
    return _Scratch(
        some=some if sizes.gathered else source,
        sample=Sample(
            valid=floats["valid"],
            clock=floats["clock"],
            q=floats["q"],
            scores=floats["scores"],
            block_max=floats["block_max"],
            block_sum=floats["block_sum"],
            blocks=blocks,
            query_blocks=-(-sizes.queries // SAMPLE_BLOCK),
        ),
        moments=Moments(
            square=floats["square"],
            k_sum=floats["k_sum"],
            v_sum=floats["v_sum"],
            v_square=floats["v_square"],
            number=floats["number"],
            splits=sizes.moment_splits,
        ),
        metrics=floats["metrics"],
        space=Space(
            metric=floats["metric"],
            k_mean=floats["k_mean"],
            v_mean=floats["v_mean"],
            spread=floats["spread"],
            variance=floats["variance"],
            tiles=width // METRIC_ROWS,
        ),
        place=ints["place"],
        forms=Forms(
            a=like_k["form"],
            b=like_v["form"],
            bias=floats["bias"],
            units=floats["units"] if torch.half in (k.dtype, v.dtype) else None,
            k=floats["centers"],
            v=floats["values"],
            count=count,
            padded=sizes.padded,
        ),
        best=torch.full((rows * sizes.keys,), NONE, dtype=torch.int64, device=k.device),
        far=ints["far"],
        label=ints["label"],
        order=ints["order"],
        sample_counting=counting._replace(counts=ints["sample_counts"], blocks=sizes.sample_blocks),
        counting=counting,
        sample_segments=in_all._replace(splits=sizes.sample_splits),
        segments=in_all,
        scatter=floats["scatter"],
        scatters=floats["scatters"],
    )


def _group(count: int, vector_bytes: int, most: int) -> int:
    """Clusters of a group: what shared memory holds, and few of them empty."""
    group = min(most, max(16, int(triton.next_power_of_2(count))))
    while group > 16 and group * vector_bytes > ASSIGN_BYTES:
        group //= 2
    while group > 64 and 4 * (-(-count // group) * group) > 5 * count:
        group //= 2
    return group


@cached
def _plan(
    q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, count: int, warm: bool, seen: tuple[Any, ...]
) -> _Plan:
    (device, dtype, _), (_, (_, value_dtype, _), (masked, _), *_), *_ = seen
    rows = k_shape[0] * k_shape[1]
    keys = math.prod(k_shape[2:-1])
    group = q_shape[1] // k_shape[1]
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    pieces = tile_pieces(k_shape[-1], v_shape[-1], narrow)
    features = pieces["E"]
    values = pieces["F"]
    width = features.BLOCK * features.PIECES
    value_width = values.BLOCK * values.PIECES
    vector_bytes = width * dtype.itemsize + value_width * value_dtype.itemsize
    sample = min(keys, max(clustering.SAMPLED_KEYS, count))
    gathered = sample < keys or masked is not None
    queries = min(clustering.SAMPLED_QUERIES, group * math.prod(q_shape[2:-1]))
    running = multiprocessors(device)
    squares = features.PIECES**2
    at_once = triton.next_power_of_2(running)
    moment_splits = max(4, min(32, at_once // triton.next_power_of_2(rows * squares)))
    query_splits = -(-queries // (4 * METRIC_QUERIES)) * 4 or 4
    parts = max(features.PIECES, values.PIECES)
    far_blocks = -(-sample // SAMPLE_BLOCK)
    places = min(MOST_PLACES, -(-count // far_blocks))
    clusters = _group(count, vector_bytes, (ASSIGN if narrow else ASSIGN_EXACT)[1])
    padded = -(-count // clusters) * clusters
    plain: Flags = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    config = SpaceConfig(
        WIDTH=width,
        D=min(64, features.BLOCK),
        VALUE_WIDTH=value_width,
        FD=min(64, values.BLOCK),
        ROWS=METRIC_ROWS,
        BLOCK_S=SAMPLE_BLOCK,
        BLOCK_Q=METRIC_QUERIES,
        BLOCK_RATE=RATE_BLOCK,
        NARROW=narrow,
        SAMPLED=min(triton.next_power_of_2(sample), MOST_CHOSEN),
    )
    wide: Flags = {**plain, "num_warps": 8 if features.BLOCK >= 128 else 4}
    sampling: Flags = {"CONFIG": SampleConfig(SAMPLE_BLOCK, gathered, not warm), **pieces, **plain}
    rate_programs = 0 if warm else rows * -(-sample // RATE_BLOCK)
    choices = 0 if warm or sample > MOST_CHOSEN else rows
    sample_programs = rows * (far_blocks + -(-queries // SAMPLE_BLOCK))

    def forms(source: str) -> Kernel:
        return Kernel(
            forms_kernel, rows * padded // FORM_CLUSTERS, {"FROM": source, "BLOCK_C": FORM_CLUSTERS, **pieces, **wide}
        )

    def splits_of(number: int) -> int:
        return shares(SEGMENT_PROGRAMS * running, rows * parts, 1, -(-number // LEAST_SPLIT))

    def sorting(number: int, splits: int, squares: bool) -> _Sorting:
        return _sorting(
            number=number,
            count=count,
            rows=rows,
            splits=splits,
            squares=squares,
            clusters=clusters,
            running=running,
            vector_bytes=vector_bytes,
            narrow=narrow,
            pieces=pieces,
        )

    sample_splits = splits_of(sample)
    splits = splits_of(keys)
    block, product_warps, product_stages = PRODUCTS if narrow else PRODUCTS_EXACT
    slope_splits = shares(
        PRODUCT_PROGRAMS * running, rows * features.PIECES * values.PIECES, 1, -(-keys // LEAST_SPLIT)
    )
    products = {
        "CONFIG": ProductConfig(block, narrow),
        **pieces,
        **plain,
        "num_warps": product_warps,
        "num_stages": product_stages,
    }
    slope = SlopeConfig(TILE=16, VALUE_TILE=min(32, values.BLOCK), BLOCK_C=32)
    slope_programs = rows * (width // slope.TILE) * (value_width // slope.VALUE_TILE)
    return _Plan(
        sample=Kernel(sample_kernel, sample_programs, sampling),
        moments=Kernel(
            moments_kernel,
            rows * moment_splits * squares + rate_programs,
            {"CONFIG": config, **pieces, **wide},
        ),
        metric=Kernel(metric_kernel, rows * query_splits + choices, {"CONFIG": config, **plain, "num_warps": 8}),
        space=Kernel(space_kernel, rows * (width // METRIC_ROWS), {"CONFIG": config, **pieces, **plain}),
        start=forms("given" if warm else "drawn"),
        forms=forms("means"),
        far=Kernel(far_kernel, rows * far_blocks, {"CONFIG": FarConfig(SAMPLE_BLOCK, places), **pieces, **wide}),
        of_sample=sorting(sample, sample_splits, False),
        of_all=sorting(keys, splits, True),
        sum=_segments(rows, splits, False, narrow, pieces),
        products=Kernel(products_kernel, rows * features.PIECES * values.PIECES * slope_splits, products),
        means=Kernel(means_kernel, rows * -(-count // MEAN_CLUSTERS), {"BLOCK_C": MEAN_CLUSTERS, **pieces, **plain}),
        slope=Kernel(slope_kernel, slope_programs, {"CONFIG": slope, **pieces, **plain}),
        sizes=_Sizes(
            rows=rows,
            keys=keys,
            count=count,
            padded=padded,
            width=width,
            value_width=value_width,
            sample=sample,
            gathered=gathered,
            queries=queries,
            moment_splits=moment_splits,
            query_splits=query_splits,
            sample_splits=sample_splits,
            splits=splits,
            slope_splits=slope_splits,
            places=places * far_blocks,
        ),
    )


def _sorting(
    number: int,
    count: int,
    rows: int,
    splits: int,
    squares: bool,
    clusters: int,
    running: int,
    vector_bytes: int,
    narrow: bool,
    pieces: Flags,
) -> _Sorting:
    """Of `number` keys of a row; `clusters` of a group, `running` multiprocessors."""
    plain: Flags = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    block, _, warps = ASSIGN if narrow else ASSIGN_EXACT
    while block > 16 and block * vector_bytes > ASSIGN_BYTES:
        block //= 2
    each = rows * -(-count // clusters)
    assign_splits = shares(2 * running, each, ASSIGN_WAVES, -(-number // block))
    assigned = {
        "CONFIG": AssignConfig(block, clusters, vector_bytes <= ASSIGN_AHEAD),
        **pieces,
        **plain,
        "num_warps": warps,
    }
    blocks = -(-number // SORTED_KEYS)
    config = OrderConfig(SORTED_KEYS, triton.next_power_of_2(count + 1), 64)
    prefix = PrefixConfig(32, 64)
    sorted_flags = {"CONFIG": config, **plain}
    return _Sorting(
        assign=Kernel(assign_kernel, each * assign_splits, assigned),
        label=Kernel(label_kernel, rows * blocks, sorted_flags),
        prefix=Kernel(prefix_kernel, rows * -(-(count + 1) // prefix.LABELS), {"CONFIG": prefix, **plain}),
        order=Kernel(order_kernel, rows * blocks, sorted_flags),
        segments=_segments(rows, splits, squares, narrow, pieces),
        assign_splits=assign_splits,
    )


def _segments(rows: int, splits: int, squares: bool, narrow: bool, pieces: Flags) -> Kernel:
    features = pieces["E"]
    values = pieces["F"]
    keys, most_warps, few_warps, registers = SEGMENTS if narrow else SEGMENTS_EXACT
    parts = max(features.PIECES, values.PIECES)
    flags = {
        "CONFIG": SegmentConfig(keys, squares, parts),
        **pieces,
        "num_warps": most_warps if features.BLOCK >= 128 else few_warps,
        "num_stages": 1,
        "maxnreg": registers,
        "enable_fp_fusion": True,
    }
    return Kernel(segments_kernel, rows * splits * parts, flags)
