"""What the kernels over windows share: the call as they take it, the keys of a window, weights and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import AttendCall
from ....types import Attended
from ..noise import Seed, absorb, below_argument, row_state, seed_argument
from ..primitives import Block, Geometry, KeyMask, divide, features, geometry, lane_query, near, points, tile_at, tiles
from ..runtime.launch import cached, kinds

UNMASKED = KeyMask(None, 1)


class Windows(NamedTuple):
    """An AttendCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    k_extra: Tensor | None
    v_extra: Tensor | None
    masked: KeyMask
    seed: Seed
    geo: Geometry
    reach: tuple[int, ...]  # the radius on each axis, less than its extent
    group: int  # rows of queries that share a row of keys
    kappa: int  # matches of a query
    extras: int  # extra keys of a row
    threshold: int  # dropout takes a pair whose noise lies below
    keep: float  # 1 / (1 - dropout_p)
    scale: float


class Mode(NamedTuple):
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
    mode: Mode
    grids: tuple[Geometry, tuple[int, ...]]  # and the reach

    @property
    def rank(self) -> int:
        return len(self.q_shape) - 3

    def programs(self, block: Block) -> int:
        """Tiles of all rows."""
        return self.q_shape[0] * self.q_shape[1] * tiles(self.q_shape[2:-1], block.TILE)


class QueryBlock(NamedTuple):
    """Some queries of a row, in a kernel."""

    query: Any  # int32 [BLOCK_Q], flat
    exists: Any  # bool [BLOCK_Q]
    index_row: Any  # pointer to the row of matches
    mask_row: Any  # the number of the row of the mask, int64


def empty_attended(call: AttendCall) -> Attended:
    q, v = call.q, call.v
    return Attended(v.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32))


def masked_by(q: Tensor, k: Tensor, key_mask: Tensor | None) -> KeyMask:
    """key_mask bool [B, *G'] or [B, H, *G']."""
    if key_mask is None:
        return UNMASKED
    return KeyMask(key_mask.contiguous(), q.shape[1] if key_mask.ndim == k.ndim - 2 else 1)


def windows_of(call: AttendCall) -> tuple[Windows, Variant]:
    q, k, v, index = call.q.contiguous(), call.k.contiguous(), call.v.contiguous(), call.index.contiguous()
    k_extra, v_extra, extras = call.k_extra, call.v_extra, 0
    if k_extra is not None and v_extra is not None:
        k_extra, v_extra, extras = k_extra.contiguous(), v_extra.contiguous(), k_extra.shape[2]
    masked, kappa = masked_by(q, k, call.key_mask), index.shape[-1]
    seed = seed_argument(call.dropout_seed, call.rows)
    settings = call.causal, call.weight, call.dropout_seed is not None and call.dropout_p > 0, kappa > 1
    seen = kinds(q, k, v, index, k_extra, v_extra, masked.mask, seed.pointer, seed.rows)
    variant = _variant(q.shape, k.shape, v.shape, call.radius, settings, seen)
    sizes = q.shape[1] // k.shape[1], kappa, extras, below_argument(call.dropout_p)
    tensors, numbers = (q, k, v, index, k_extra, v_extra), (1 / (1 - call.dropout_p), call.scale)
    return Windows(*tensors, masked, seed, *variant.grids, *sizes, *numbers), variant


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
    grids = geometry(tuple(q_shape[2:-1]), key_grid), reaches(radius, key_grid)
    return Variant(q_shape, (q_shape[-1], v_shape[-1]), (dtype, value_dtype), device, Mode(*settings), grids)


@cached
def reaches(radius: tuple[int, ...], key_grid: tuple[int, ...]) -> tuple[int, ...]:
    """The radius, less than the extent on every axis."""
    return tuple(min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True))


@triton.jit
def program_queries(w, B: tl.constexpr, ROW: tl.constexpr):
    """The queries of a program: their row, where it begins among all queries, themselves, their features and noise."""
    row, corner = tile_at(tl.program_id(0), w.geo, B)
    query, exists = lane_query(corner, w.geo, B)
    start = row * points(w.geo.q).to(tl.int64)
    here = QueryBlock(query, exists, w.index + start * w.kappa, (row // w.masked.heads).to(tl.int64))
    return row, start, here, features(w.q + start * ROW.E, query, exists, ROW), absorb(row_state(w.seed, row), query)


@triton.jit
def window_size(reach):
    n = 2 * reach[0] + 1
    for a in tl.static_range(1, len(reach)):
        n = n * (2 * reach[a] + 1)
    return n


@triton.jit
def first_offset(reach):
    """Where a walk through a window begins, as an offset from its centre on every axis."""
    offset = ()
    for a in tl.static_range(len(reach)):
        offset += (-tl.cast(reach[a], tl.int32),)
    return offset


@triton.jit
def next_offset(offset, reach):
    """The next place of a walk, row-major: counting up takes a fifth of the instructions of dividing a number."""
    moved, carry = (), 1
    for a in tl.static_range(len(reach) - 1, -1, -1):
        here = offset[a] + carry
        carry = (here > reach[a]).to(tl.int32)
        moved = (tl.where(carry > 0, -reach[a], here),) + moved  # noqa: RUF005 - Triton knows no unpacking
    return moved


@triton.jit
def offset_of(number, reach):
    """The place `number`, row-major."""
    offset = ()
    for a in tl.static_range(len(reach) - 1, -1, -1):
        offset = (number % (2 * reach[a] + 1) - reach[a],) + offset  # noqa: RUF005 - Triton knows no unpacking
        number = number // (2 * reach[a] + 1)
    return offset


@triton.jit
def window_key(match, offset, geo):
    """The key at an offset from each match, and whether it lies on the grid."""
    rest, key, stride, ok = match, match, 1, match >= 0
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        ok = ok & ((rest - up * geo.k[a] + offset[a]).to(tl.uint32) < tl.cast(geo.k[a], tl.uint32))
        key += offset[a] * stride
        rest, stride = up, stride * geo.k[a]
    return key, ok


@triton.jit
def unmasked(key, ok, mask_row, w):
    """Where `ok` also holds whether the mask allows a key."""
    if w.masked.mask is not None:
        ok = ok & (tl.load(w.masked.mask + mask_row * points(w.geo.k) + key, mask=ok, other=0) != 0)
    return ok


@triton.jit
def match_of(e, ok, here, w):
    """Match e of each of the queries `here`, -1 for none; what is off the grid is none. Read where `ok`."""
    match = tl.load(here.index_row + here.query.to(tl.int64) * w.kappa + e, mask=ok, other=-1)
    return tl.where(match < points(w.geo.k), match, -1)


@triton.jit
def next_key(match, e, offset, here, w, MODE: tl.constexpr):
    """`legal_at`, and the next place of the walk."""
    key, ok = legal_at(match, e, offset, here, w, MODE.CAUSAL, MODE.SEVERAL)
    return key, ok, next_offset(offset, w.reach)


@triton.jit
def legal_at(match, e, offset, here, w, CAUSAL: tl.constexpr, SEVERAL: tl.constexpr):
    """The key at `offset` in window e, and whether it counts: on the grid, allowed, and in no window before e."""
    key, ok = window_key(match, offset, w.geo)
    ok = ok & here.exists
    if CAUSAL:
        ok = ok & (key <= here.query)
    ok = unmasked(key, ok, here.mask_row, w)
    if SEVERAL:
        for before in range(e):
            earlier = match_of(before, ok, here, w)
            ok = ok & ~((earlier >= 0) & near(key, tl.maximum(earlier, 0), w.reach, w.geo))
    return key, ok


@triton.jit
def weigh(s, ok, WEIGHT: tl.constexpr):
    """The weight before normalisation of scores under "mean" and "relu"."""
    f = tl.where(s < 0, 0.0, s) if WEIGHT == "relu" else s
    return tl.where(ok, f, 0.0)


@triton.jit
def rough_weight(s, ok, lse):
    """exp(s - lse), where lse has been rounded: all weights of a query are off by one and the same factor."""
    above = s - lse
    return tl.where(ok, tl.exp(tl.where(above > 60.0, 60.0, above)), 0.0)  # finite; a NaN stays


@triton.jit
def dropped(p, name, noise, w, DROPOUT: tl.constexpr):
    """Weights after dropout; `name` is the key's number."""
    if DROPOUT:
        p = tl.where(absorb(noise, name) >= tl.cast(w.threshold, tl.uint32), p * w.keep, 0.0)
    return p


@triton.jit
def kept(name, noise, w, DROPOUT: tl.constexpr):
    """What dropout makes of a weight: a factor."""
    factor = (name * 0 + 1).to(tl.float32)
    if DROPOUT:
        factor = tl.where(absorb(noise, name) >= tl.cast(w.threshold, tl.uint32), w.keep, 0.0)
    return factor


@triton.jit
def pair_gradient(
    s, dp, ok, lse, inv_sum, delta, name, noise, w, WEIGHT: tl.constexpr, DROPOUT: tl.constexpr
):  # fmt: skip
    """The weight of a value in out, and the gradient of the scaled score.

    `inv_sum` is one over the sum of the query's rough weights: with 1 in its place no gradient would cancel where
    scores are large.
    """
    r = kept(name, noise, w, DROPOUT)
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


@triton.jit
def zeros(BLOCK: tl.constexpr, ROW: tl.constexpr):
    """Rows of zeros in pieces."""
    pieces = ()
    for _ in tl.static_range(tl.constexpr(ROW.PIECES)):
        pieces += (tl.zeros([BLOCK, ROW.W], tl.float32),)
    return pieces


@triton.jit
def add(sums, factor, pieces):
    """sums + factor * pieces."""
    more = ()
    for n in tl.static_range(len(sums)):
        more += (sums[n] + factor[:, None] * pieces[n],)
    return more
