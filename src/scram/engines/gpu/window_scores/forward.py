"""Scores of the keys of one box per query in Triton.

A program takes a few neighboring queries one after the other: their boxes overlap, and the first cache holds them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import WindowScores, WindowScoresCall
from ....spec.grid import grid_of
from ....spec.scoring import accumulator
from ..primitives import Geometry, geometry, points
from ..runtime.block_sizes import WINDOW_QUERIES, window_tile
from ..runtime.launch import Kernel, cached, kinds, on_device


class Inputs(NamedTuple):
    """A WindowScoresCall as kernels take it."""

    q: Tensor  # [B, H, *G, E]
    k: Tensor  # [B, Hk, *G', E]
    corner: Tensor  # int32 [B, H, *G, rank]
    sides: tuple[int, ...]
    geo: Geometry
    group: int  # rows of queries that share a row of keys
    slots: int  # places of a box
    scale: float


def inputs_of(call: WindowScoresCall) -> Inputs:
    return Inputs(
        q=call.q.contiguous(),
        k=call.k.contiguous(),
        corner=call.corner.contiguous(),
        sides=tuple(call.sides),
        geo=geometry(grid_of(call.q), grid_of(call.k)),
        group=call.q.shape[1] // call.k.shape[1],
        slots=math.prod(call.sides),
        scale=call.scale,
    )


def programs_of(q: Tensor) -> int:
    return q.shape[0] * q.shape[1] * -(-math.prod(grid_of(q)) // WINDOW_QUERIES)


def window_scores(call: WindowScoresCall) -> WindowScores:
    q = call.q
    scores = torch.empty((*q.shape[:-1], math.prod(call.sides)), dtype=accumulator(q.dtype), device=q.device)
    if scores.numel():
        inputs = inputs_of(call)
        flags = window_tile(q.shape[-1], q.dtype, inputs.slots)
        with on_device(q):
            _kernel(programs_of(q), tuple(flags.items()), kinds(*inputs))(inputs, scores)
    return WindowScores(scores)


@cached
def _kernel(programs: int, flags: tuple[tuple[str, Any], ...], given: tuple[Any, ...]) -> Kernel:
    return Kernel(window_scores_kernel, programs, dict(flags))


@triton.jit
def first_query(inputs, QUERIES: tl.constexpr):
    """Of a program: its first query within its row, the number of queries of a row, its row."""
    queries = points(inputs.geo.q)
    runs = (queries + QUERIES - 1) // QUERIES
    return tl.program_id(0) % runs * QUERIES, queries, (tl.program_id(0) // runs).to(tl.int64)


@triton.jit
def box_key(point, slot, inputs):
    """The key at each place [BS] of the box of a query, and whether it exists."""
    rest = slot
    key = tl.zeros_like(slot)
    stride = 1
    ok = slot < inputs.slots
    for a in tl.static_range(len(inputs.sides) - 1, -1, -1):
        place = tl.load(inputs.corner + point * len(inputs.sides) + a) + rest % inputs.sides[a]  # [BS]
        rest = rest // inputs.sides[a]
        ok = ok & (place >= 0) & (place < inputs.geo.k[a])
        key += place * stride
        stride = stride * inputs.geo.k[a]
    return key.to(tl.int64), ok


@triton.jit
def window_scores_kernel(inputs, scores, QUERIES: tl.constexpr, BLOCK_S: tl.constexpr, E: tl.constexpr):
    begin, queries, row = first_query(inputs, QUERIES)
    k_row = inputs.k + row // inputs.group * points(inputs.geo.k) * E.SIZE
    for n in range(begin, min(begin + QUERIES, queries)):
        point = row * queries + n
        for first in range(0, inputs.slots, BLOCK_S):
            slot = first + tl.arange(0, BLOCK_S)  # [BS]
            key, ok = box_key(point, slot, inputs)  # [BS]
            products = tl.zeros([BLOCK_S, E.BLOCK], tl.float32)  # [BS, E]
            for piece in range(E.PIECES):
                e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
                q_piece = tl.load(inputs.q + point * E.SIZE + e, mask=e < E.SIZE, other=0.0)  # [E]
                at = key[:, None] * E.SIZE + e[None, :]  # [BS, E]
                k_piece = tl.load(k_row + at, mask=ok[:, None] & (e < E.SIZE)[None, :], other=0.0)  # [BS, E]
                products += tl.where(ok[:, None], k_piece.to(tl.float32) * q_piece.to(tl.float32)[None, :], 0.0)
            s = tl.sum(products, 1) * inputs.scale  # [BS]
            tl.store(scores + point * inputs.slots + slot, s, mask=slot < inputs.slots)
