"""Attention of every query over the keys up to its own place, in Triton: blocks of queries and keys, matrix products.

A block of queries meets the blocks of keys before it, and then those it lies in, where scores of later keys are
selected away. How many there are follows from its place alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import EarlierCall
from ....results import Attended
from ..primitives import (
    LN2,
    LOG2E,
    LOWEST,
    Dropout,
    dropout_argument,
    dropout_noise,
    dropped,
    load_piece,
    load_pieces,
    product,
    softmax_step,
    store_piece,
)
from ..runtime.block_sizes import EARLIER, EARLIER_EXACT, stages, tile_pieces
from ..runtime.launch import Flags, Kernel, cached, kinds, on_device


class Inputs(NamedTuple):
    """An EarlierCall as kernels take it: contiguous tensors, and numbers."""

    q: Tensor  # [R, S, E]
    k: Tensor  # [Rk, S, E]
    v: Tensor  # [Rk, S, F]
    key_mask: Tensor | None  # bool [Rk, S]
    dropout: Dropout
    group: int  # rows of queries that share a row of keys
    length: int  # S
    scale: float


class EarlierConfig(NamedTuple):
    """What a kernel is compiled for."""

    BLOCK_Q: int
    BLOCK_K: int  # divides BLOCK_Q
    NARROW: bool  # features and values of 16 bits; scores are over log 2 then
    DROPOUT: bool
    PARTS: int  # programs that share the width of the values


class Rows(NamedTuple):
    """The queries of a program and the keys of their row, in a kernel."""

    row: Any  # of queries, int64
    place: Any  # [BQ]
    exists: Any  # bool [BQ]
    k: Any  # pointer to the row of keys
    v: Any  # pointer to the row of values
    source: Any  # that row, int64
    noise: Any  # [BQ, 1]


def earlier(call: EarlierCall) -> Attended:
    q = call.q.contiguous()
    out = torch.empty((*q.shape[:-1], call.v.shape[-1]), dtype=call.v.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if lse.numel():
        flags = flags_of(call, EARLIER, EARLIER_EXACT)
        config = flags["CONFIG"]
        programs = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], config.BLOCK_Q) * config.PARTS
        with on_device(q):
            inputs = inputs_of(call)
            _kernel(programs, tuple(flags.items()), kinds(*inputs))(inputs, out, lse)
    return Attended(out, lse)


def inputs_of(call: EarlierCall) -> Inputs:
    q, k, v = (x.contiguous() for x in (call.q, call.k, call.v))
    mask = None if call.usable is None else call.usable.contiguous()
    group = q.shape[1] // k.shape[1]
    dropout = dropout_argument(call.dropout_seed, call.dropout_p, call.rows)
    return Inputs(q, k, v, mask, dropout, group, q.shape[2], call.scale)


def flags_of(call: EarlierCall, half: tuple[int, ...], exact: tuple[int, ...]) -> Flags:
    """Flags of a kernel. `half`, `exact`: queries and keys per product, warps, stages at most."""
    dropout = call.dropout_seed is not None and call.dropout_p > 0
    widths = (call.q.shape[-1], call.v.shape[-1])
    return _flags(*widths, call.q.dtype, call.v.dtype, call.q.device, dropout, half, exact)


@cached
def _flags(
    width: int,
    value_width: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    device: torch.device,
    dropout: bool,
    half: tuple[int, ...],
    exact: tuple[int, ...],
) -> Flags:
    narrow = dtype.itemsize == value_dtype.itemsize == 2
    queries, keys, warps, most = half if narrow else exact
    widths = tile_pieces(width, value_width, narrow)
    features = widths["E"]
    values = widths["F"]
    each = features.BLOCK * features.PIECES * dtype.itemsize + values.BLOCK * values.PIECES * value_dtype.itemsize
    while each > 512 and keys > 16:
        keys //= 2
        each //= 2
    config = EarlierConfig(queries, keys, narrow, dropout, values.PIECES)
    ahead = stages(device, most, keys * each, queries * each)
    return {"CONFIG": config, **widths, "num_warps": warps, "num_stages": ahead, "enable_fp_fusion": True}


@cached
def _kernel(programs: int, flags: tuple[tuple[str, object], ...], given: tuple[object, ...]) -> Kernel:
    return Kernel(earlier_kernel, programs, dict(flags))


@triton.jit
def rows_of(row, source, place, inputs, E: tl.constexpr, F: tl.constexpr):
    """Queries at `place` [BQ] of a row, and the row of keys `source`."""
    k = inputs.k + source * inputs.length * E.SIZE
    v = inputs.v + source * inputs.length * F.SIZE
    noise = dropout_noise(inputs.dropout, row.to(tl.int32), place)[:, None]  # [BQ, 1]
    return Rows(row, place, place < inputs.length, k, v, source, noise)


@triton.jit
def earlier_scores(start, q_block, rows, inputs, CONFIG: tl.constexpr, E: tl.constexpr, LATER: tl.constexpr):
    """Keys from `start` on [BK], scores [BQ, BK] of those that may be attended, -inf of others; which they are.

    LATER: whether some of them may lie after a query.
    """
    at = start + tl.arange(0, CONFIG.BLOCK_K)  # [BK]
    s = tl.zeros([CONFIG.BLOCK_Q, CONFIG.BLOCK_K], tl.float32)  # [BQ, BK]
    for n in tl.static_range(len(q_block)):
        k_block = load_piece(rows.k, at, at < inputs.length, n, E)  # [BK, E]
        s = product(q_block[n], tl.trans(k_block), s)
    s = s * (inputs.scale * LOG2E if CONFIG.NARROW else inputs.scale)
    ok = rows.exists[:, None] & (at < inputs.length)[None, :]  # [BQ, BK]
    if LATER:
        ok = ok & (at[None, :] <= rows.place[:, None])
    if inputs.key_mask is not None:
        mask_row = inputs.key_mask + rows.source * inputs.length
        ok = ok & (tl.load(mask_row + at, mask=at < inputs.length, other=0) != 0)[None, :]
    return at, tl.where(ok, s, -float("inf")), ok


@triton.jit
def earlier_step(start, q_block, piece, state, rows, inputs, CONFIG, E, F, LATER: tl.constexpr):
    """Some more keys: the maximum, the sum and the weighted values with them."""
    running_max, running_sum, acc = state
    POWER: tl.constexpr = "exp2" if CONFIG.NARROW else "powers"
    at, s, _ = earlier_scores(start, q_block, rows, inputs, CONFIG, E, LATER)
    running_max, rescale, p = softmax_step(running_max, s, None, POWER, False, 1)
    running_sum = running_sum * rescale + tl.sum(p, 1)
    p = dropped(p, at[None, :], rows.noise, inputs.dropout, CONFIG.DROPOUT)  # [BQ, BK]
    v_block = load_piece(rows.v, at, at < inputs.length, piece, F)  # [BK, F]
    acc = product(p.to(v_block.dtype), v_block, acc * rescale[:, None])
    return running_max, running_sum, acc


@triton.jit
def earlier_kernel(inputs, out, lse, CONFIG: tl.constexpr, E: tl.constexpr, F: tl.constexpr):
    """Program (row, block of queries, piece of the values); the blocks with most keys come first."""
    piece = tl.program_id(0) % CONFIG.PARTS
    number = tl.program_id(0) // CONFIG.PARTS
    blocks = (inputs.length + CONFIG.BLOCK_Q - 1) // CONFIG.BLOCK_Q
    row = (number // blocks).to(tl.int64)
    first = (blocks - 1 - number % blocks) * CONFIG.BLOCK_Q
    place = first + tl.arange(0, CONFIG.BLOCK_Q)  # [BQ]
    rows = rows_of(row, row // inputs.group, place, inputs, E, F)
    q_block = load_pieces(inputs.q + row * inputs.length * E.SIZE, place, rows.exists, E)  # [BQ, E]
    zero = tl.zeros([CONFIG.BLOCK_Q], tl.float32)  # [BQ]
    state = (zero + LOWEST, zero, tl.zeros([CONFIG.BLOCK_Q, F.BLOCK], tl.float32))
    for start in range(0, first, CONFIG.BLOCK_K):
        state = earlier_step(start, q_block, piece, state, rows, inputs, CONFIG, E, F, False)
    for start in range(first, tl.minimum(first + CONFIG.BLOCK_Q, inputs.length), CONFIG.BLOCK_K):
        state = earlier_step(start, q_block, piece, state, rows, inputs, CONFIG, E, F, True)
    running_max, running_sum, acc = state
    some = running_sum > 0  # [BQ]
    total = tl.where(some, running_sum, 1.0)  # [BQ]
    acc = tl.where(some[:, None], acc / total[:, None], 0.0)  # [BQ, F]
    store_piece(out + row * inputs.length * F.SIZE, place, rows.exists, piece, acc, CONFIG.PARTS, False, F)
    if piece == 0:
        base = running_max * LN2 if CONFIG.NARROW else running_max  # [BQ]
        each = tl.where(some, base + tl.log2(total) * LN2, -float("inf"))  # [BQ]
        tl.store(lse + row * inputs.length + place, each, mask=rows.exists)
