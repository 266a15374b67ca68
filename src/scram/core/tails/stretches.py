"""Clusters under causal order: each stretch of positions by itself (`spec.stretches`).

A stretch that another follows is clustered from its own queries, keys and values. A query attends the earlier keys of
its own stretch one by one, routed keys of earlier stretches too, and the rest of these by their clusters. Stretches are
heads of their own to the engines: rows (h, s) of queries and of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...results import Attended
from ...spec.grid import coordinates, grid_of
from ...spec.scoring import accumulator
from ...spec.stretches import (
    complete_count,
    cut,
    earlier_queries,
    fine_features,
    fine_values,
    joined,
    look_back,
    prefix_mean,
    row_numbers,
    stretch_count,
)
from .. import calls, ops
from ..exact import merge
from .base import Inputs

if TYPE_CHECKING:
    from .clusters import Codebook


def cluster(inputs: Inputs, call: calls.ClusterCall, stretch: int) -> calls.Clustered:
    """The clusters of every complete stretch, [B, Hc * m, ...]: head h * m + s is stretch s of head h.

    `call` has the keys of the whole grid.
    """
    number = complete_count(math.prod(grid_of(call.k)), stretch)
    heads = call.k.shape[1]
    wide = accumulator(call.v.dtype)
    if not number or not heads:
        return _no_clusters(call, stretch, wide)
    q, k, v = (x.flatten(2, -2)[:, :, : number * stretch] for x in (call.q, call.k, call.v))
    fine = fine_features(k) & fine_values(v)  # [B, Hc, m * S]
    mask = _by_head(call.key_mask, call.k)
    mask = fine if mask is None else fine & mask[:, :, : number * stretch]
    rows = row_numbers(call.rows, q.shape[0], q.shape[1], q.device).reshape(q.shape[0], heads, 1, -1)
    # A key without a label is still read: nothing of it may be left in what is summed.
    k, v = (torch.where(mask.unsqueeze(-1), x, 0) for x in (k, v))
    folded = call._replace(
        q=cut(torch.where(fine_features(q).unsqueeze(-1), q, 0), stretch, heads),
        k=cut(k, stretch, heads),
        v=cut(v, stretch, heads),
        key_mask=cut(mask, stretch, heads),
        rows=rows.expand(-1, -1, number, -1).reshape(q.shape[0], -1),
    )
    return ops.cluster(inputs.engine, folded)


def _no_clusters(call: calls.ClusterCall, stretch: int, dtype: torch.dtype) -> calls.Clustered:
    batch = call.k.shape[0]
    count = min(call.count, stretch)
    width = call.k.shape[-1]
    value_width = call.v.shape[-1]

    def none(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return call.k.new_zeros((batch, 0, *shape), dtype=of)

    return calls.Clustered(
        centers=none(count, width),
        values=none(count, value_width),
        slope=none(width, value_width),
        sizes=none(count, of=torch.int32),
        label=none(stretch, of=torch.int32),
        order=none(stretch, of=torch.int32),
        variance=none(width),
        spreads=none(count),
    )


def _by_head(mask: Tensor | None, k: Tensor) -> Tensor | None:
    """A mask of keys [B, *G'] or [B, Hc, *G'] for k [B, Hc, *G', E], as [B, Hc, M]."""
    if mask is None:
        return None
    if mask.ndim == k.ndim - 2:
        return mask.flatten(1).unsqueeze(1).expand(-1, k.shape[1], -1)
    return mask.flatten(2)


class Clean(NamedTuple):
    """Queries, keys and values in row-major order, with zeros for what is not finite or masked."""

    q: Tensor  # [B, H, N, E]
    k: Tensor  # [B, Hc, N, E]
    v: Tensor  # [B, Hc, N, F]
    key_mask: Tensor | None  # bool [B, Hc, N]
    usable: Tensor  # bool [B, Hc, N], keys that may be attended and are finite
    broken: Tensor  # bool [B, H, N], queries that are not finite, or attend a key of their stretch that is not

    @staticmethod
    def of(inputs: Inputs, stretch: int) -> Clean:
        q, k, v = (x.flatten(2, -2) for x in (inputs.q, inputs.k, inputs.v))
        mask = inputs.key_mask
        group = q.shape[1] // max(k.shape[1], 1)
        if group > 1 and mask is not None and mask.ndim == inputs.k.ndim - 1:
            k = k.repeat_interleave(group, 1)
            v = v.repeat_interleave(group, 1)
        mask = _by_head(mask, k.reshape(*k.shape[:2], *grid_of(inputs.k), k.shape[-1]))
        fine = fine_features(k) & fine_values(v)  # [B, Hc, N]
        wrong = ~fine if mask is None else mask & ~fine
        heads = k.shape[1]
        before = joined(cut(wrong, stretch, heads).cumsum(2) > 0, q.shape[2], heads, heads)  # [B, Hc, N]
        whole = fine_features(q)  # [B, H, N]
        usable = fine if mask is None else fine & mask
        return Clean(
            q=torch.where(whole.unsqueeze(-1), q, 0),
            k=torch.where(usable.unsqueeze(-1), k, 0),
            v=torch.where(usable.unsqueeze(-1), v, 0),
            key_mask=mask,
            usable=usable,
            broken=~whole | before.repeat_interleave(q.shape[1] // max(heads, 1), 1),
        )


class Prefixes(NamedTuple):
    """What the queries of each of n = m + 1 stretches see of the clusters of all m complete ones."""

    sizes: Tensor  # int32 [B, Hc, n, m * C], 0 for the clusters of the own stretch and of later ones
    variance: Tensor  # [B, Hc, n, E], mean over all earlier keys
    spreads: Tensor  # [B, Hc, n, m * C], beside that mean
    slope: Tensor | None  # [B, Hc, n, E, F], mean over all earlier keys

    @staticmethod
    def of(sizes: Tensor, variance: Tensor, spreads: Tensor, slope: Tensor | None) -> Prefixes:
        """Of what each stretch has: [B, Hc, m, C], [B, Hc, m, E], [B, Hc, m, C] and [B, Hc, m, E, F].

        Means over all earlier keys stand for those of each stretch.
        """
        complete = sizes.shape[2]
        place = torch.arange(complete + 1, device=sizes.device)
        seen = place[:complete] < place.unsqueeze(1)  # [n, m]
        keys = sizes.sum(-1).to(variance.dtype)  # [B, Hc, m]
        mean = prefix_mean(variance, keys)  # [B, Hc, n, E]
        # A spread counts beside the variance that it is multiplied with.
        total = mean.sum(-1).unsqueeze(-1)  # [B, Hc, n, 1]
        factor = torch.where(total > 0, variance.sum(-1).unsqueeze(2) / torch.where(total > 0, total, 1), 0)
        return Prefixes(
            sizes=torch.where(seen.unsqueeze(-1), sizes.unsqueeze(2), 0).flatten(3),
            variance=mean,
            spreads=(spreads.unsqueeze(2) * torch.where(seen, factor, 0).unsqueeze(-1)).flatten(3),
            slope=None if slope is None else prefix_mean(slope, keys),
        )


def visible(book: Codebook, heads: int, positions: int) -> Codebook:
    """The clusters as the n = m + 1 stretches of every head see them: of Hc * n heads, each with all m * C clusters.

    Sizes, variances, spreads and slopes are those of `Prefixes`; keys of no complete stretch have no label.

    Args:
        book: the clusters of every complete stretch.
        heads: Hc.
        positions: N.
    """
    batch, _, count = book.sizes.shape
    complete = book.stretches

    def by_stretch(x: Tensor) -> Tensor:
        return x.reshape(batch, heads, complete, *x.shape[2:])

    def for_each(x: Tensor) -> Tensor:
        """[B, Hc, ...], the same for all stretches."""
        return x.unsqueeze(2).expand(-1, -1, complete + 1, *x.shape[2:]).flatten(1, 2)

    slope = None if book.slope is None else by_stretch(book.slope)
    seen = Prefixes.of(by_stretch(book.sizes), by_stretch(book.variance), by_stretch(book.spreads), slope)
    label = global_label(by_stretch(book.label), count, positions)
    return replace(
        book,
        centers=for_each(by_stretch(book.centers).flatten(2, 3)),
        values=for_each(by_stretch(book.values).flatten(2, 3)),
        sizes=seen.sizes.flatten(1, 2),
        variance=seen.variance.flatten(1, 2),
        spreads=seen.spreads.flatten(1, 2),
        slope=None if seen.slope is None else seen.slope.flatten(1, 2),
        label=for_each(label),
        order=for_each(_global_order(book, by_stretch(book.sizes), positions)) if book.keys else None,
        key_mask=None,
        grid=None,
    )


def _global_order(book: Codebook, sizes: Tensor, positions: int) -> Tensor:
    """`order_of` the labels of all m * C clusters, int32 [B, Hc, N], from the orders of the stretches."""
    order = book.ordered().order
    assert order is not None
    batch, heads, complete, _ = sizes.shape
    stretch = order.shape[2]
    device = order.device
    order = order.reshape(batch, heads, complete, stretch)
    before = torch.arange(complete, device=device, dtype=torch.int32).unsqueeze(1) * stretch  # [m, 1]
    place = torch.arange(stretch, device=device, dtype=torch.int32)
    number = sizes.sum(-1, dtype=torch.int32)  # [B, Hc, m], keys with a label
    first = (number.cumsum(-1, dtype=torch.int32) - number).unsqueeze(-1)
    total = number.sum(-1, keepdim=True, dtype=torch.int32).unsqueeze(-1)  # [B, Hc, 1, 1]
    # Those with a label come first, stretch by stretch; then the others.
    labelled = place < number.unsqueeze(-1)  # [B, Hc, m, S]
    to = torch.where(labelled, first + place, total + before - first + place - number.unsqueeze(-1))
    every = torch.arange(positions, device=device, dtype=torch.int32).repeat(batch, heads, 1)
    return every.scatter(2, to.flatten(2).long(), (order + before).flatten(2))


def global_label(label: Tensor, count: int, positions: int) -> Tensor:
    """The labels of stretches, int32 [B, Hc, m, S], as those of all m * count clusters: [B, Hc, N], -1 for none."""
    step = count * torch.arange(label.shape[2], device=label.device, dtype=torch.int32).unsqueeze(1)
    every = torch.where(label < 0, -1, label + step).flatten(2)
    return F.pad(every, (0, positions - every.shape[2]), value=-1)


def window_keys(index: Tensor, radius: Sequence[int], clean: Clean, grid: tuple[int, ...], stretch: int) -> Tensor:
    """The keys of earlier stretches in the windows of each query, one by one: int32 [B, H, N, W], -1 for none.

    Those of its own stretch it attends anyway. A key that is masked or not finite is none.
    """
    _, heads, positions, _ = clean.q.shape
    places = coordinates(index.flatten(2, -2), grid)  # of the centers [B, H, N, kappa]
    steps = torch.cartesian_prod(*[torch.arange(-b, b + 1, device=index.device) for b in radius])
    steps = steps.reshape(-1, len(grid))  # [V, rank]
    inside = (index.flatten(2, -2) >= 0).unsqueeze(-1)  # [B, H, N, kappa, 1]
    key = torch.zeros_like(places[0]).unsqueeze(-1)  # becomes [B, H, N, kappa, V]
    for place, step, extent in zip(places, steps.unbind(1), grid, strict=True):
        at = place.unsqueeze(-1) + step
        inside = inside & (at >= 0) & (at < extent)
        key = key * extent + at
    first = torch.arange(positions, device=index.device) // stretch * stretch  # of the own stretch
    inside = (inside & (key < first.reshape(-1, 1, 1))).flatten(3)  # [B, H, N, W]
    key = torch.where(inside, key.flatten(3), 0)
    usable = clean.usable.repeat_interleave(heads // clean.usable.shape[1], 1)  # [B, H, N]
    inside = inside & usable.gather(2, key.flatten(2)).reshape(key.shape)
    return torch.where(inside, key, -1).to(torch.int32)


def join(book: Codebook, inputs: Inputs, index: Tensor | None = None) -> Attended:
    """Attention of every query over the earlier keys of its stretch, and over earlier stretches by their clusters.

    Beside windows around matches, index int32 [B, H, *G, kappa], their keys are attended one by one too.
    """
    inputs = inputs.level()
    grid = grid_of(inputs.q)
    stretch = book.label.shape[2]
    clean = Clean.of(inputs, stretch)
    batch, rows, positions, _ = clean.q.shape
    heads = clean.k.shape[1]
    number = stretch_count(positions, stretch)
    numbers = row_numbers(inputs.shard.rows, batch, rows, clean.q.device)
    step = torch.arange(number, device=clean.q.device)[:, None]
    numbers = (numbers.reshape(batch, heads, 1, -1) * number + step).reshape(batch, -1)  # [B, Hc * n * g]
    q = cut(clean.q, stretch, heads)
    own = calls.EarlierCall(
        q=q,
        k=cut(clean.k, stretch, heads),
        v=cut(clean.v, stretch, heads),
        usable=None if clean.key_mask is None else cut(clean.key_mask, stretch, heads),
        dropout_seed=inputs.draw_dropout_seed(),
        rows=numbers if inputs.dropout_p else None,
        scale=inputs.scale,
        dropout_p=inputs.dropout_p,
    )
    attended = ops.earlier(inputs.engine, own)
    if number > 1:
        windows = None if index is None else window_keys(index, inputs.radius, clean, grid, stretch)
        attended = _with_earlier_stretches(book, inputs, clean, q, numbers, attended, windows)
    out, lse = (joined(x, positions, heads, rows) for x in attended)
    out = torch.where(clean.broken.unsqueeze(-1), torch.nan, out)
    lse = torch.where(clean.broken, torch.nan, lse)
    attended = Attended(out.reshape(batch, rows, *grid, out.shape[-1]), lse.reshape(batch, rows, *grid))
    return merge(attended, inputs.attend_windows(None)) if inputs.num_extra() else attended


def _with_earlier_stretches(
    book: Codebook,
    inputs: Inputs,
    clean: Clean,
    q: Tensor,
    numbers: Tensor,
    near: Attended,
    windows: Tensor | None,
) -> Attended:
    """`near`, of the folded queries q [B, Hc * n * g, S, E], joined with the clusters of earlier stretches.

    Keys of windows, int32 [B, H, N, W], are windows of one key each.
    """
    heads = clean.k.shape[1]
    stretch = q.shape[2]
    seen = visible(book, heads, clean.q.shape[2])
    rows = numbers if inputs.dropout_p else None
    folded = inputs._replace(
        q=q,
        k=clean.k,
        v=clean.v,
        k_extra=None,
        v_extra=None,
        key_mask=None,
        causal=False,
        radius=(0,),
        shard=inputs.shard._replace(rows=rows),
    )
    choosing = cut(earlier_queries(clean.q, look_back(grid_of(inputs.q)), stretch), stretch, heads)
    routed = seen.route(folded._replace(q=choosing.detach()))
    routes = None if routed is None else routed.routes
    if windows is None:
        return seen.beside(near, folded, routes=routes)
    each = cut(windows + 1, stretch, heads) - 1  # what fills up the last stretch is no key
    near = merge(near, folded.attend_windows(each, None if routes is None else seen.label, routes))
    return seen.beside(near, folded, each, routes)
