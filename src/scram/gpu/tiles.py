"""Tile sizes of the kernels by width and rank, measured; nothing is tuned on a user's call."""

from __future__ import annotations

from typing import Any

import torch
import triton

from .grid import tile_shape, vector

MOST_PIECES = 4  # loads a thread makes of one row: each is unrolled, which costs registers and compile time


def search_tile(rank: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    threads = max(1, triton.next_power_of_2(width * dtype.itemsize) // 64)
    return _block(rank, width, dtype, lanes=max(32 // max(threads // 2, 1), 4), threads=threads, warps=1)


def attend_tile(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> dict[str, Any]:
    small = max(width, value_width) <= 4
    return _blocks(rank, width, value_width, dtype, value_dtype, *((64, 1, 2) if small else (16, 2, 1)))


def backward_tile(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> dict[str, Any]:
    return _blocks(rank, width, value_width, dtype, value_dtype, lanes=32, threads=4, warps=4)


def collect_tile(width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype) -> dict[str, Any]:
    block = _blocks(1, width, value_width, dtype, value_dtype, lanes=32, threads=4, warps=4)
    return {name: value for name, value in block.items() if name != "TILE"}


def _blocks(
    rank: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    lanes: int,
    threads: int,
    warps: int,
) -> dict[str, Any]:
    values = _block(rank, value_width, value_dtype, lanes, threads, warps)
    return {**_block(rank, width, dtype, lanes, threads, warps), "FW": values["W"], "FPIECES": values["PIECES"]}


def _block(rank: int, width: int, dtype: torch.dtype, lanes: int, threads: int, warps: int) -> dict[str, Any]:
    """`lanes` queries per program, the features of each spread over `threads` threads in aligned loads."""
    w = threads * vector(width, dtype)
    while w * MOST_PIECES < width:
        w *= 2
    w = min(w, triton.next_power_of_2(width))
    block = {"TILE": tile_shape(lanes, rank), "LANES": lanes, "W": w, "PIECES": -(-width // w)}
    # Triton's default for fusion changes in 3.10; a product and a sum stay one instruction here.
    return {**block, "num_warps": warps, "enable_fp_fusion": True}


def attend_tile(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> dict[str, Any]:
    return _blocks(rank, width, value_width, dtype, value_dtype, lanes=64, threads=4, warps=4)


def backward_tile(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> dict[str, Any]:
    return _blocks(rank, width, value_width, dtype, value_dtype, lanes=32, threads=4, warps=4)


def collect_tile(width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype) -> dict[str, Any]:
    block = _blocks(1, width, value_width, dtype, value_dtype, lanes=32, threads=4, warps=4)
    return {name: value for name, value in block.items() if name != "TILE"}


def _blocks(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype, **shape: int
) -> dict[str, Any]:
    values = _block(rank, value_width, value_dtype, **shape)
    return {**_block(rank, width, dtype, **shape), "FW": values["W"], "FPIECES": values["PIECES"]}
