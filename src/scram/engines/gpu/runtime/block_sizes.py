"""Tile sizes of the kernels by width and rank, measured; nothing is tuned on a user's call."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ....spec.schedule import LANE_GROUPS
from ..primitives import Block, Width, block_shape, vector
from .launch import INTERPRETED, Flags, cached

MOST_PIECES = 4  # loads a thread makes of one vector: each is unrolled, which costs registers and compile time

# Queries per program, threads per query, warps. H200, 512x512, the paper's search, graph replays, ms, bytes a vector:
#                           16 (E=3)   64     128           256 (bf16)    512
#   (32, 1, 1)              .276       .659   -             -             -
#   (64, 1, 2), (128, 1, 4) .290 .278  -      -             -             -
#   (256, 1, 8)             .268       -      -             -             -
#   (32, 2, 1)              -          .519   .973          -             -
#   (16, 2, 1)              -          -      1.021         1.774         -
#   (64, 2, 1), (64, 2, 2)  -          .855   1.700, 1.061  -             -
#   (16, 4, 1), (32, 4, 2)  -          -      1.033, 1.031  1.778, 1.776  4.025
#   (8, 8, 1), (16, 8, 4)   -          -      -             -             3.626, 3.218
# One warp per program needs neither barriers nor shared memory; two queries per thread hide each other's latency.
# With earlier matches queries have to agree on what to read; four matches, E=3: 1.34 (32, 1, 1), 1.40 (64, 1, 2).
SEARCH_NARROW = (256, 1, 8)
SEARCH = {16: (32, 1, 1), 32: (32, 1, 1), 64: (32, 2, 1), 128: (32, 2, 1), 256: (16, 4, 1)}
SEARCH_WIDE = (16, 8, 4)

# The same for attend, radius 1: E=3 f32 .028 (32, 1, 1), .031 (64, 1, 2), .029 (128, 1, 4); E=64 bf16 .102 (16, 2, 1),
# .099 (16, 4, 1), .099 (32, 4, 2), .124 (32, 2, 1). Its backward, a plain call: E=64 .768 (16, 4, 1), .876 (16, 2, 1),
# .750 (32, 4, 4), .758 (8, 4, 1); E=3 .298 (16, 4, 1), .409 (32, 1, 1), .396 (32, 4, 4).
ATTEND_NARROW = (32, 1, 1)
ATTEND = (16, 4, 1)
BACKWARD = (16, 4, 1)
# Of vectors of more than WIDE bytes. 256x256, 24 heads, E = F = 128, two matches anywhere: 2.53 (8, 4, 1), 2.89
# (16, 4, 1), 3.07 (8, 8, 2), 3.12 (16, 8, 4); backward 17.3 (8, 8, 2), 17.5 (16, 8, 4), 17.9 (8, 4, 1), 21.1
# (16, 4, 1).
ATTEND_WIDE = (8, 4, 1)
BACKWARD_WIDE = (8, 8, 2)
WIDE = 128
# Pairs of a key at a time, and of a share, with repeatable bits; four matches on stereo, projected and un-normalized
# features, a call: 3.56, 3.32, 3.64 (8, 4, 1), 3.56, 3.18, 3.32 (4, 4, 1), 3.88, 3.49, 3.67 (8, 8, 2), 4.13, 3.76, 3.82
# (16, 4, 1); shares of 128 3.59, 3.65, 3.62, of 512 3.54, 3.42, 3.75.
COLLECT = (8, 4, 1)
LEAST_SHARE = 256

# The tile search, 64 keys per product: stages by width padded, warps of the kernel that makes the offers. H200,
# 512x512, five sweeps, gossip 4, ms, before the offers had no holes:
#   .955 (2 stages), .940 (3) at E=32; 1.071, 1.116 at E=64; 2.176, 1.580 at E=128; 128 keys 1.077, 32 keys 1.191
#   E=256 (256x256), in one piece .958, in pieces of 64 .821
# Eight warps: 1.4 times as long; two: 1.6. Offers made by 1, 2, 4 warps: 1.060, 1.071, 1.157 in all.
# Since then: 1.060, 1.080, 1.092 with 2, 3, 4 stages.
# float32, E=64, eight sweeps, stereo: in halves 3.40 (2 stages), 3.28 (3), 3.27 (4); the unit's own three products of
# bf16 4.38, of tf32 7.85; one of tf32 2.67, but recall .869 instead of .949.
SCORE_PIECE = 128
SCORE_WARPS = 4
OFFER_WARPS = 1
# Several matches, slots x columns and registers of a thread at most, stereo, eight sweeps, ms:
#    2 matches  1x2 2.31, 64 registers 2.32, 96 2.47;  in one column 2.42
#    4 matches  2x2 2.68, 64 registers 2.86, 96 2.84;  in one column 3.04
#    8 matches  4x2 3.83, 64 registers 3.94, 80 3.53, 96 3.59;  2x4 4.67;  in one column 5.20
#   16 matches  8x2 6.05, 80 registers 6.07, 96 5.88, 112 6.03;  4x4 7.58;  2x8 14.3;  as a matrix 33.1
#   32 matches  8x4 15.9, 128 registers 13.7, 168 13.5, 200 15.7;  4x8 22.3;  as a matrix 57.3
# 16 slots compile for a minute. A look at each group of lanes whether anybody has hope of it costs more than it saves.
MOST_SLOTS = 8
SCORE_REGISTERS = {8: 80, 16: 96, 32: 168}

TILE_WIDTH = 128  # features of one product; more come in pieces
TILE_WIDTH_EXACT = 64

# Clusters per product, warps, stages at most, of the tail, of its gradients by queries and by clusters. H200, 512x512,
# E = F = 64, bf16, 256 clusters, one match, us:
#   tail         180 (32, 4, 2); 192 (32, 4, 3); 223 (64, 4, 2); 218 (64, 4, 3); 214 (32, 2, 3); 448 (64, 8, 2)
#   by queries   454 (64, 4, 2); 486 (64, 4, 1); 506 (32, 4, 3); 536 (32, 4, 2); 621 (32, 2, 2)
#   by clusters  380 (64, 4, 1); 466 (64, 4, 2); 408 (32, 4, 2); 586 (32, 4, 1); 846 (128, 8, 1)
# With 768 routed keys and 384 clusters, ms, without windows and with one match; 64 keys per product:
#   256x256, 24 heads, E = 128  3.41 4.63 (64, 4, 2); 3.73 4.97 (32, 4, 2); 5.40 7.99 (64, 4, 3); 7.02 10.1 (64, 8, 2)
#   512x512, E = 64  .315 .540 (32, 4, 2); .315 .460 (32, 4, 2, 128); .325 .470 (32, 4, 3, 128); .404 .626 (64, 4, 2)
# Gradients of the 24 heads, and of 512x512 behind them, without windows:
#   by queries   5.91 .618 (64, 4, 2); 6.53 .609 (32, 4, 2, 168); 6.97 .714 (32, 4, 2); - .598 (64, 4, 2, 168)
#   by clusters  3.01 .266 (64, 4, 1); 4.22 .470 (32, 4, 2, 168); 5.24 - (32, 4, 2); - .435 (64, 4, 1, 168)
#   by keys      6.20 .583 (64, 4, 1); 6.69 - (32, 4, 2, 168); 7.11 - (32, 4, 2); - .527 (64, 4, 1, 168)
#   of the slope .407 (64, 8, 2); .504 (32, 8, 3); .573 (64, 4, 2)
# For float32 two warps, as in the hybrid; more than 16 clusters do not fit their registers.
CLUSTER_TAIL = (64, 4, 2)
CLUSTER_TAIL_NARROW = (32, 4, 2, 128)
CLUSTER_TAIL_EXACT = (32, 2, 2)
CLUSTER_TAIL_KEYS = 64  # routed keys per product, of 16 bits
# Queries and keys per product, warps, stages at most, of dense attention in causal order; not tuned.
EARLIER = (128, 64, 8, 3)
EARLIER_EXACT = (64, 32, 4, 2)
EARLIER_BACKWARD = (64, 64, 4, 2)
EARLIER_BACKWARD_EXACT = (32, 32, 4, 1)
# Keys or clusters of a program, warps, stages, of the newest positions over a cache; not tuned.
DECODE = (128, 4, 1)
DECODE_EXACT = (64, 4, 1)
CLUSTER_BACKWARD = (64, 4, 2)
CLUSTER_BACKWARD_EXACT = (16, 2, 1)
CLUSTER_COLLECT = (64, 4, 1)
CLUSTER_COLLECT_EXACT = (16, 2, 1)
# The same of the gradients of routed keys, and of the slope: there queries per product.
KEYS_COLLECT = (64, 4, 1)
KEYS_COLLECT_NARROW = (64, 4, 1, 168)
KEYS_COLLECT_EXACT = (16, 2, 1)
SLOPE = (64, 8, 2)
SLOPE_NARROW = (64, 4, 2)
SLOPE_EXACT = (16, 2, 1)
# Clusters or keys per product, warps, stages at most, of the importance of clusters to a tile and of the best key.
ROUTE = (64, 4, 3)
ROUTE_EXACT = (32, 2, 2)
# Importance, the grids as above: 1.07 .118 (64, 4, 3); 1.15 .124 (64, 4, 4); 1.21 .115 (64, 4, 2); 1.59 .181 (32, 4, 3)
# The best of 768 keys: .968 .130 (32, 4, 2); .966 .128 (64, 4, 3); 1.02 .128 (32, 4, 3); 1.01 .140 (64, 4, 2).
ROUTED_START = (32, 4, 2)
ROUTED_START_EXACT = (32, 2, 1)
# Of the clustering: keys and clusters of a product, warps.
ASSIGN = (64, 128, 4)
ASSIGN_EXACT = (32, 32, 4)
ASSIGN_BYTES = 64 << 10  # of the forms that a program holds: two programs have a multiprocessor to share
ASSIGN_AHEAD = 512  # bytes of a key and its value up to which the next ones are loaded while others are multiplied
ASSIGN_WAVES = 2  # of two programs a multiprocessor
# Sums over the keys of clusters: keys at a time, warps for pieces of at least 128 and for narrower ones, registers of a
# thread at most. 256x256, 24 heads, E = F = 128, and 512x512, E = F = 64, bf16, ms: .450, .058 (16, 2, 2, 255); .487,
# .054 (32, 2, 2, 255); .743, .067 (32, 4, 4, 255); .684, .073 (16, 4, 4, 128).
SEGMENTS = (16, 2, 2, 255)
SEGMENTS_EXACT = (32, 4, 4, 255)
# Their products: keys at a time, warps, stages. Likewise .324, .027 (32, 4, 1); .506, .036 (64, 4, 1); .526, .056
# (32, 4, 2).
PRODUCTS = (32, 4, 1)
PRODUCTS_EXACT = (32, 4, 1)
PRODUCT_PROGRAMS = 4  # of a multiprocessor, in one wave
SEGMENT_PROGRAMS = 4  # of a multiprocessor, in one wave
# Gradients: keys at a time, warps.
SPREAD = (64, 8)
SPREAD_EXACT = (32, 8)
SPREAD_WAVES = 4  # of two programs a multiprocessor

SPARE = 20 << 10  # bytes of shared memory for what passes between threads
# Queries of a program of `window_scores`, one after the other; places of a box times features at a time; warps.
WINDOW_QUERIES = 8
WINDOW_ELEMENTS = 8192
WINDOW_WARPS = 4


class Places(NamedTuple):
    """The places for the matches of a query in the tile search, known when compiling."""

    SLOTS: int
    COLUMNS: int
    PADDED: bool  # there are more places than matches
    SEPARATED: bool  # matches keep others at a distance, not only from themselves
    LANE_GROUPS: int  # of an offer


def stages(device: torch.device, most: int, each: int, fixed: int) -> int:
    """How many blocks of `each` bytes are loaded ahead: what shared memory holds besides `fixed`, `most` at most."""
    return max(1, min(most, (_shared_memory(device) - SPARE - fixed) // each))


@cached
def _shared_memory(device: torch.device) -> int:
    """Bytes of a program; without a device the least that supported ones have."""
    if device.type != "cuda":
        return 99 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10)


@cached
def multiprocessors(device: torch.device) -> int:
    """How many programs run at the same time at least; without a device a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shares(running: int, each: int, waves: int, most: int) -> int:
    """Into how many parts, `most` at most, work is cut of which every part is `each` programs.

    `running` programs run at the same time, about `waves` one after the other: few of them wait in the last wave.
    """
    least = max(1, waves * running // max(each, 1))

    def busy(parts: int) -> float:
        programs = parts * max(each, 1)
        return programs / (-(-programs // running) * running)

    return max(1, min(most, max(range(least, 2 * least + 2), key=busy)))


@cached
def search_tile(rank: int, width: int, dtype: torch.dtype, earlier: bool = False) -> Flags:
    size = max(16, triton.next_power_of_2(width * dtype.itemsize))
    queries, threads, warps = SEARCH_NARROW if size == 16 and not earlier else SEARCH.get(size, SEARCH_WIDE)
    return {"B": _block(rank, queries), "E": _width(width, dtype, threads), **_options(warps)}


@cached
def attend_tile(rank: int, widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> Flags:
    size = _bytes(widths, dtypes)
    shape = ATTEND_NARROW if size <= 16 else ATTEND_WIDE if size > WIDE else ATTEND
    return {"B": _block(rank, shape[0]), **_widths(widths, dtypes, shape)}


@cached
def backward_tile(rank: int, widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> Flags:
    shape = BACKWARD_WIDE if _bytes(widths, dtypes) > WIDE else BACKWARD
    return {"B": _block(rank, shape[0]), **_widths(widths, dtypes, shape)}


@cached
def visit_tile(widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> Flags:
    return {"BLOCK_Q": _block(1, BACKWARD[0]).BLOCK_Q, **_widths(widths, dtypes, BACKWARD)}


@cached
def collect_tile(widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> Flags:
    return {"BLOCK_Q": _block(1, COLLECT[0]).BLOCK_Q, **_widths(widths, dtypes, COLLECT)}


@cached
def score_tile(width: int, dtype: torch.dtype, matches: int, separated: bool) -> Flags:
    """Of the tile search: how vectors are multiplied, and the places for matches."""
    wide = max(16, triton.next_power_of_2(width))
    piece = wide if wide <= SCORE_PIECE else SCORE_PIECE // 2
    places = triton.next_power_of_2(matches)
    columns = 1 if matches == 1 else max(2, places // MOST_SLOTS)
    # float32 as two numbers of 16 bits; Triton's interpreter multiplies none of those.
    halves = 1 + (dtype == torch.float32)
    ahead = 3 if wide == SCORE_PIECE or matches > 1 or halves > 1 else 2
    block = {
        "E": Width(width, piece, wide // piece),
        "HALVES": halves,
        "WIDEN": INTERPRETED,
        "PLACES": Places(places // columns, columns, places > matches, separated, LANE_GROUPS),
        "num_stages": ahead,
        **_options(SCORE_WARPS),
    }
    return {**block, "maxnreg": SCORE_REGISTERS[places]} if places in SCORE_REGISTERS else block


@cached
def tile_pieces(width: int, value_width: int, narrow: bool) -> dict[str, Width]:
    """Features and values of the attention of tiles in pieces that matrix products take; `narrow`: 16 bits each.

    Triton 3.6 multiplies the wrong numbers where one operand of 16 bits is narrower than another and less than 64 wide.
    """
    most = TILE_WIDTH if narrow else TILE_WIDTH_EXACT
    block, value_block = (max(16, min(most, triton.next_power_of_2(x))) for x in (width, value_width))
    if narrow:
        least = min(64, max(block, value_block))
        block = max(block, least)
        value_block = max(value_block, least)
    features = Width(width, block, -(-width // block))
    return {"E": features, "F": Width(value_width, value_block, -(-value_width // value_block))}


@cached
def window_tile(width: int, dtype: torch.dtype, slots: int) -> Flags:
    """Of `window_scores`: as many places of a box as there are, at most 128, and features of 128 bytes."""
    block = min(128, max(16, triton.next_power_of_2(slots)))
    features = min(triton.next_power_of_2(width), WINDOW_ELEMENTS // block, max(16, 128 // dtype.itemsize))
    pieces = Width(width, features, -(-width // features))
    return {"QUERIES": WINDOW_QUERIES, "BLOCK_S": block, "E": pieces, **_options(WINDOW_WARPS)}


def _block(rank: int, queries: int) -> Block:
    return Block(block_shape(queries, rank), queries)


def _bytes(widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> int:
    """Of the wider vectors."""
    return max(width * dtype.itemsize for width, dtype in zip(widths, dtypes, strict=True))


def _width(width: int, dtype: torch.dtype, threads: int) -> Width:
    """Vectors of which each is spread over `threads` threads in aligned loads."""
    block = threads * vector(width, dtype)
    while block * MOST_PIECES < width:
        block *= 2
    block = min(block, triton.next_power_of_2(width))
    return Width(width, block, -(-width // block))


def _widths(widths: tuple[int, ...], dtypes: tuple[torch.dtype, ...], shape: tuple[int, int, int]) -> Flags:
    """Of features and of values."""
    features, values = (_width(width, dtype, shape[1]) for width, dtype in zip(widths, dtypes, strict=True))
    return {"E": features, "F": values, **_options(shape[2])}


def _options(warps: int) -> Flags:
    # Triton's default for fusion changes in 3.10; a product and a sum stay one instruction here.
    return {"num_warps": warps, "enable_fp_fusion": True}
