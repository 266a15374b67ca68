"""What the kernels over windows share: the call as they take it, the keys of a window, weights and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import AttendCall
from ....results import Attended
from ..primitives import (
    Block,
    Dropout,
    Geometry,
    MatchWindows,
    QueryBlock,
    attended_key,
    dropout_argument,
    dropout_factor,
    dropout_noise,
    geometry,
    lane_query,
    load_float32,
    mask_argument,
    next_offset,
    points,
    reaches,
    routed_argument,
    tile_at,
    tiles,
)
from ..runtime.launch import cached, kinds


class Inputs(NamedTuple):
    """An AttendCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor  # [B, H, *G, E]
    k: Tensor  # [B, Hk, *G', E]
    v: Tensor  # [B, Hk, *G', F]
    k_extra: Tensor | None  # [B, Hk, X, E]
    v_extra: Tensor | None  # [B, Hk, X, F]
    windows: MatchWindows
    dropout: Dropout
    group: int  # rows of queries that share a row of keys
    extras: int  # extra keys of a row
    scale: float


class Upstream(NamedTuple):
    """What a backward pass begins with, contiguous."""

    grad_out: Tensor  # [B, H, *G, F]
    grad_lse: Tensor  # [B, H, *G]
    lse: Tensor  # [B, H, *G]
    sums: Tensor | None  # float32 [B, H, *G, 2 or 3], what keys need to collect: inv_sum, delta, of tiles slope_bound


class Config(NamedTuple):
    """What a kernel over windows is compiled for."""

    CAUSAL: bool
    WEIGHT: str
    DROPOUT: bool
    SEVERAL: bool  # matches


@dataclass(frozen=True, eq=False)
class Variant:
    """What the kernels of a call and their numbers follow from; one object for all calls that are alike."""

    q_shape: tuple[int, ...]
    widths: tuple[int, int]  # of features and values
    dtypes: tuple[torch.dtype, torch.dtype]
    device: torch.device
    config: Config
    geo: Geometry
    reach: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.q_shape) - 3

    def programs(self, block: Block) -> int:
        """Tiles of all rows."""
        return self.q_shape[0] * self.q_shape[1] * tiles(self.q_shape[2:-1], block.TILE)


def empty_attended(call: AttendCall) -> Attended:
    out = call.v.new_empty((*call.q.shape[:-1], call.v.shape[-1]))
    return Attended(out, call.q.new_empty(call.q.shape[:-1], dtype=torch.float32))


def inputs_of(call: AttendCall) -> tuple[Inputs, Variant]:
    q = call.q.contiguous()
    k = call.k.contiguous()
    v = call.v.contiguous()
    index = call.index.contiguous()
    k_extra = call.k_extra
    v_extra = call.v_extra
    extras = 0
    if k_extra is not None and v_extra is not None:
        k_extra = k_extra.contiguous()
        v_extra = v_extra.contiguous()
        extras = k_extra.shape[2]
    masked = mask_argument(q, k, call.key_mask)
    routed = routed_argument(q, call.label, call.routes)
    kappa = index.shape[-1]
    dropout = dropout_argument(call.dropout_seed, call.dropout_p, call.rows)
    settings = call.causal, call.weight, call.dropout_seed is not None and call.dropout_p > 0, kappa > 1
    seen = kinds(q, k, v, index, k_extra, v_extra, masked.mask, routed, dropout.seed.pointer, dropout.seed.rows)
    variant = _variant(q.shape, k.shape, v.shape, call.radius, settings, seen)
    windows = MatchWindows(index, masked, variant.geo, variant.reach, kappa, routed)
    group = q.shape[1] // k.shape[1]
    inputs = Inputs(
        q=q,
        k=k,
        v=v,
        k_extra=k_extra,
        v_extra=v_extra,
        windows=windows,
        dropout=dropout,
        group=group,
        extras=extras,
        scale=call.scale,
    )
    return inputs, variant


@cached
def _variant(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    radius: tuple[int, ...],
    settings: tuple[bool, str, bool, bool],
    seen: tuple[Any, ...],
) -> Variant:
    (device, dtype, _), _, (_, value_dtype, _), *_ = seen
    key_grid = tuple(k_shape[2:-1])
    return Variant(
        q_shape,
        (q_shape[-1], v_shape[-1]),
        (dtype, value_dtype),
        device,
        Config(*settings),
        geometry(tuple(q_shape[2:-1]), key_grid),
        reaches(radius, key_grid),
    )


@triton.jit
def program_queries(inputs, B: tl.constexpr, E: tl.constexpr):
    """The queries of a program: their row, where it begins among all queries, themselves, their features and noise."""
    windows = inputs.windows
    row, corner = tile_at(tl.program_id(0), windows.geo, B)
    query, exists = lane_query(corner, windows.geo, B)
    start = row * points(windows.geo.q).to(tl.int64)
    index_row = windows.index + start * windows.kappa
    query_block = QueryBlock(query, exists, index_row, (row // windows.masked.group).to(tl.int64), row)
    q_block = load_float32(inputs.q + start * E.SIZE, query, exists, E)  # [BQ, E]
    return row, start, query_block, q_block, dropout_noise(inputs.dropout, row, query)


@triton.jit
def next_key(match, e, offset, query_block, windows, CONFIG: tl.constexpr):
    """`attended_key`, and the next place of the walk."""
    key, ok = attended_key(match, e, offset, query_block, windows, CONFIG.CAUSAL, CONFIG.SEVERAL)
    return key, ok, next_offset(offset, windows.reach)


@triton.jit
def weigh(s, ok, WEIGHT: tl.constexpr):
    """The weight before normalization of scores under "mean" and "relu"."""
    f = tl.where(s < 0, 0.0, s) if WEIGHT == "relu" else s
    return tl.where(ok, f, 0.0)


@triton.jit
def rough_weight(s, ok, lse):
    """exp(s - lse), where lse has been rounded: all weights of a query are off by one and the same factor."""
    above = s - lse
    return tl.where(ok, tl.exp(tl.where(above > 60.0, 60.0, above)), 0.0)  # finite; a NaN stays


@triton.jit
def pair_gradient(s, dp, ok, lse, inv_sum, delta, name, noise, dropout, WEIGHT: tl.constexpr, DROPOUT: tl.constexpr):
    """The weight of a value in out, and the gradient of the scaled score.

    `inv_sum` is one over the sum of the query's rough weights: with 1 in its place no gradient would cancel where
    scores are large.
    """
    r = dropout_factor(name, noise, dropout, DROPOUT)
    if WEIGHT == "softmax":
        p = rough_weight(s, ok, lse) * inv_sum
        ds = p * (tl.where(r == 0, 0.0, r * dp) - delta)
    else:
        share = 1 / tl.maximum(tl.floor(tl.exp(lse) + 0.5), 1.0)
        p = weigh(s, ok, WEIGHT) * share
        flat = (r == 0) | (s <= 0) if WEIGHT == "relu" else r == 0
        ds = tl.where(flat, 0.0, r * dp * share)
    p = tl.where(r == 0, 0.0, p * r)  # what is dropped is zero, NaN too
    return tl.where(ok, p, 0.0), tl.where(ok, ds, 0.0)
