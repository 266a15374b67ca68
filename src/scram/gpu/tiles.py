"""Tile sizes of the kernels by width and rank, measured; nothing is tuned on a user's call."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton

from .grid import tile_shape, vector

MOST_PIECES = 4  # loads a thread makes of one row: each is unrolled, which costs registers and compile time

# Queries per program, threads per query, warps. H200, 512x512, the paper's search, graph replays, ms, by bytes per row:
#                           16 (E=3)   64     128     256 (bf16)   512
#   (32, 1, 1)              .29        .659   -       -            -
#   (128, 1, 4)             .28        -      -       -            -
#   (32, 2, 1)              -          .519   .970    -            -
#   (16, 2, 1)              -          -      1.071   -            -
#   (64, 2, 1)              -          .855   1.700   -            -
#   (16, 4, 1), (32, 4, 2)  -          -      1.019   1.81, 1.78   4.025
#   (8, 8, 1), (16, 8, 4)   -          -      -       -            3.626, 3.218
# One warp per program needs neither barriers nor shared memory; two queries per thread hide each other's latency.
# With four matches, where lanes agree on what to read, E=3: 1.41 (32, 1, 1), 1.47 (64, 1, 2), 1.50 (128, 1, 4).
SEARCH = {16: (32, 1, 1), 32: (32, 1, 1), 64: (32, 2, 1), 128: (32, 2, 1), 256: (16, 4, 1)}
SEARCH_WIDE = (16, 8, 4)

# The same for attend, radius 1: E=3 f32 .026 (32, 1, 1), .065 (32, 4, 4); E=64 bf16 .103 (16, 2, 1), .113 (16, 4, 1),
# .122 (64, 4, 4); E=128 bf16 .192 (16, 2, 1), .190 (16, 4, 1). Its backward: E=64 .611 (16, 4, 1), .644 (16, 2, 1),
# .579 (32, 4, 4); E=3 .158 (32, 1, 1), .116 (32, 4, 4).
ATTEND_NARROW, ATTEND, ATTEND_WIDE = (32, 1, 1), (16, 2, 1), (16, 4, 1)
BACKWARD = (16, 4, 1)
COLLECT = (32, 4, 4)


# The tile search, 64 keys per product: stages by width padded, registers of a thread with two to four matches, warps of
# the kernel that makes the offers. H200, 512x512, five sweeps, gossip 4, ms, before the offers had no holes:
#   .955 (2 stages), .940 (3) at E=32; 1.071, 1.116 at E=64; 2.176, 1.580 at E=128; 128 keys 1.077, 32 keys 1.191
#   E=256 (256x256), in one piece .958, in pieces of 64 .821
# Eight warps: 1.4 times as long; two: 1.6. Offers made by 1, 2, 4 warps: 1.060, 1.071, 1.157 in all.
# Since then: 1.060, 1.080, 1.092 with 2, 3, 4 stages; four matches 1.814 with 99 registers, 1.720 with 96, where one
# tile more has room on a multiprocessor.
WEIGH_PIECE, WEIGH_WARPS, OFFER_WARPS = 128, 4, 1
FEW = 8  # matches that are kept as tuples: with 16 the kernel compiles for a minute
WEIGH_REGISTERS, REGISTERS_FOR = 96, range(2, 5)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=256)
def search_tile(rank: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    size = max(16, triton.next_power_of_2(width * dtype.itemsize))
    return _block(rank, width, dtype, *SEARCH.get(size, SEARCH_WIDE))


@lru_cache(maxsize=256)
def attend_tile(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> dict[str, Any]:
    size = max(width * dtype.itemsize, value_width * value_dtype.itemsize)
    shape = ATTEND_NARROW if size <= 16 else ATTEND if size <= 128 else ATTEND_WIDE
    return _blocks(rank, width, value_width, dtype, value_dtype, shape)


@lru_cache(maxsize=256)
def backward_tile(
    rank: int, width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> dict[str, Any]:
    return _blocks(rank, width, value_width, dtype, value_dtype, BACKWARD)


@lru_cache(maxsize=256)
def visit_tile(width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype) -> dict[str, Any]:
    block = _blocks(1, width, value_width, dtype, value_dtype, BACKWARD)
    return {name: value for name, value in block.items() if name != "TILE"}


@lru_cache(maxsize=256)
def collect_tile(width: int, value_width: int, dtype: torch.dtype, value_dtype: torch.dtype) -> dict[str, Any]:
    block = _blocks(1, width, value_width, dtype, value_dtype, COLLECT)
    return {name: value for name, value in block.items() if name != "TILE"}


@lru_cache(maxsize=256)
def weigh_tile(width: int, dtype: torch.dtype, matches: int) -> dict[str, Any]:
    """Of the tile search: keys per matrix product, features per piece, places for matches, and how to multiply."""
    wide = max(16, triton.next_power_of_2(width))
    piece = wide if wide <= WEIGH_PIECE else WEIGH_PIECE // 2
    block: dict[str, Any] = {"BE": piece, "PIECES": wide // piece, "FEW": matches <= FEW}
    places = triton.next_power_of_2(matches)
    # float32 in three products of tf32, as good as float32; Triton's interpreter multiplies no 16-bit types.
    precision = "tf32x3" if dtype == torch.float32 else "tf32"
    block.update(KP=places, PADDED=places > matches, PRECISION=precision, WIDEN=INTERPRETED)
    stages = 3 if wide == WEIGH_PIECE or matches > 1 else 2
    block.update(num_warps=WEIGH_WARPS, num_stages=stages, enable_fp_fusion=True)
    return {**block, "maxnreg": WEIGH_REGISTERS} if matches in REGISTERS_FOR else block


def _blocks(
    rank: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    shape: tuple[int, int, int],
) -> dict[str, Any]:
    values = _block(rank, value_width, value_dtype, *shape)
    return {**_block(rank, width, dtype, *shape), "FW": values["W"], "FPIECES": values["PIECES"]}


def _block(rank: int, width: int, dtype: torch.dtype, lanes: int, threads: int, warps: int) -> dict[str, Any]:
    """`lanes` queries per program, the features of each spread over `threads` threads in aligned loads."""
    w = threads * vector(width, dtype)
    while w * MOST_PIECES < width:
        w *= 2
    w = min(w, triton.next_power_of_2(width))
    block = {"TILE": tile_shape(lanes, rank), "LANES": lanes, "W": w, "PIECES": -(-width // w)}
    # Triton's default for fusion changes in 3.10; a product and a sum stay one instruction here.
    return {**block, "num_warps": warps, "enable_fp_fusion": True}
