"""Gradients of the scores of the keys of one box per query, in Triton.

Queries add the gradients of keys by float32 atomics. With deterministic algorithms torch adds them up, one place of the
box after the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import WindowScoresCall, WindowScoresGrads
from ....spec.grid import coordinates, flat, grid_of, inside, key_row, rows
from ..primitives import points
from ..runtime.block_sizes import window_tile
from ..runtime.launch import Kernel, cached, kinds, on_device
from .forward import box_key, first_query, inputs_of, programs_of


def window_scores_backward(call: WindowScoresCall, grad_scores: Tensor) -> WindowScoresGrads:
    inputs = inputs_of(call)
    repeatable = torch.are_deterministic_algorithms_enabled()
    dq = torch.empty_like(inputs.q)
    dk = torch.zeros(call.k.shape, dtype=torch.float32, device=call.k.device)
    if dq.numel():
        above = grad_scores.contiguous()
        flags = {**window_tile(dq.shape[-1], dq.dtype, inputs.slots), "REPEATABLE": repeatable}
        with on_device(dq):
            _kernel(programs_of(dq), tuple(flags.items()), kinds(*inputs))(inputs, above, dq, dk)
            if repeatable:
                _add_to_keys(call, above, dk)
    return WindowScoresGrads(dq, dk.to(call.k.dtype))


def _add_to_keys(call: WindowScoresCall, above: Tensor, dk: Tensor) -> None:
    """dk += the gradients of keys, in a fixed order."""
    grid = grid_of(dk)
    corner = call.corner.reshape(-1, len(grid)).long()  # [P, rank]
    row = torch.arange(len(corner), device=dk.device) // math.prod(grid_of(call.q))
    first = key_row(row, call.q.shape[1], call.k.shape[1]) * math.prod(grid)
    ds = call.scale * above.reshape(len(corner), -1)  # [P, S]
    q = rows(call.q).flatten(0, 1).float()
    for slot, offset in enumerate(
        torch.stack(coordinates(torch.arange(ds.shape[1], device="cpu"), call.sides), -1).tolist()
    ):
        place = [corner[:, axis] + step for axis, step in enumerate(offset)]
        ok = inside(place, grid)
        key = torch.where(ok, first + flat(place, grid), 0)
        dk.reshape(-1, dk.shape[-1]).index_add_(0, key, torch.where(ok[:, None], ds[:, slot, None] * q, 0))


@cached
def _kernel(programs: int, flags: tuple[tuple[str, Any], ...], given: tuple[Any, ...]) -> Kernel:
    return Kernel(window_scores_backward_kernel, programs, dict(flags))


@triton.jit
def window_scores_backward_kernel(
    inputs,
    above,
    dq,
    dk,
    QUERIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    E: tl.constexpr,
    REPEATABLE: tl.constexpr,
):
    begin, queries, row = first_query(inputs, QUERIES)
    first_key = row // inputs.group * points(inputs.geo.k)
    for n in range(begin, min(begin + QUERIES, queries)):
        point = row * queries + n
        for piece in range(E.PIECES):
            e = piece * E.BLOCK + tl.arange(0, E.BLOCK)  # [E]
            q_piece = tl.load(inputs.q + point * E.SIZE + e, mask=e < E.SIZE, other=0.0).to(tl.float32)  # [E]
            dq_piece = tl.zeros([E.BLOCK], tl.float32)  # [E]
            for first in range(0, inputs.slots, BLOCK_S):
                slot = first + tl.arange(0, BLOCK_S)  # [BS]
                key, ok = box_key(point, slot, inputs)  # [BS]
                ds = tl.load(above + point * inputs.slots + slot, mask=ok, other=0.0) * inputs.scale  # [BS]
                at = (first_key + key)[:, None] * E.SIZE + e[None, :]  # [BS, E]
                exists = ok[:, None] & (e < E.SIZE)[None, :]  # [BS, E]
                k_piece = tl.load(inputs.k + at, mask=exists, other=0.0).to(tl.float32)  # [BS, E]
                dq_piece += tl.sum(tl.where(exists, ds[:, None] * k_piece, 0.0), 0)
                if not REPEATABLE:
                    tl.atomic_add(dk + at, ds[:, None] * q_piece[None, :], mask=exists, sem="relaxed")
            tl.store(dq + point * E.SIZE + e, dq_piece, mask=e < E.SIZE)
