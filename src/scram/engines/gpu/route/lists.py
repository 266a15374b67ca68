"""The keys that a tile routes, one after another, in Triton: made from the bits of its clusters.

Kernels over tiles read k and v where they are, by these numbers: no copy of k and v in the order of the clusters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..primitives import for_product
from ..runtime.launch import Kernel, cached, kinds

LIST_BLOCK = 128  # a list is filled up to a whole number of these: no kernel reads more keys at a time


class RoutedKeys(NamedTuple):
    """The routed keys of all tiles, as kernels take them.

    A list is filled up to whole blocks with one of its keys: what is read there is finite where the tile's keys are.
    """

    keys: Tensor  # int32 [tiles, most]
    number: Tensor  # int32 [tiles], how many a tile has
    most: int


def routed_keys(routes: Tensor, order: Tensor, sizes: Tensor, keys: int) -> RoutedKeys:
    """`keys` of each tile at most: routes int32 [B, H, T, W], order int32 [B, Hc, M], sizes int32 [B, Hc, C]."""
    keys = min(keys, order.shape[-1])
    most = triton.cdiv(keys, LIST_BLOCK) * LIST_BLOCK
    tiles = routes.shape[0] * routes.shape[1] * routes.shape[2]
    listed = RoutedKeys(
        torch.empty((tiles, most), dtype=torch.int32, device=routes.device),
        torch.empty((tiles,), dtype=torch.int32, device=routes.device),
        most,
    )
    ends = sizes.cumsum(-1, dtype=torch.int32)
    given = (routes.contiguous(), order.contiguous(), sizes.contiguous(), ends)
    group = routes.shape[1] // sizes.shape[1] * routes.shape[2]
    kernel = _kernel(tiles, kinds(*given, *listed))
    kernel(*given, listed, keys, group, order.shape[-1], sizes.shape[-1], routes.shape[-1])
    return listed


@cached
def _kernel(tiles: int, given: tuple[Any, ...]) -> Kernel:
    return Kernel(routed_keys_kernel, tiles, {"BLOCK": LIST_BLOCK, "num_warps": 1, "enable_fp_fusion": True})


@triton.jit
def lowest_bit(bit):
    """Its number, where one bit of int32 is set: the exponent of a float32."""
    return (bit.to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def routed_keys_kernel(routes, order, sizes, ends, listed, keys, group, all_keys, count, words, BLOCK: tl.constexpr):
    """Program: tile. `group` tiles share a row of clusters."""
    tile = tl.program_id(0).to(tl.int64)
    source = tile // group
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    order_row = order + source * all_keys
    list_row = listed.keys + tile * listed.most
    filled = tl.program_id(0) * 0
    one = filled  # of the keys
    for w in range(words):
        word = tl.load(routes + tile * words + w)
        while word != 0:
            bit = word & -word
            cluster = w * 32 + lowest_bit(bit)
            word = word ^ bit
            size = tl.load(sizes + source * count + cluster, mask=cluster < count, other=0)
            first = tl.load(ends + source * count + cluster, mask=cluster < count, other=0) - size
            size = tl.minimum(size, keys - filled)
            for begin in range(0, size, BLOCK):
                at = begin + lane  # [BLOCK]
                key = tl.load(order_row + first + at, mask=at < size, other=0)  # [BLOCK]
                tl.store(list_row + filled + at, key, mask=at < size)
            one = tl.load(order_row + first, mask=size > 0, other=one)
            filled += size
    at = filled + lane  # [BLOCK]
    tl.store(list_row + at, one + lane * 0, mask=at < (filled + BLOCK - 1) // BLOCK * BLOCK)
    tl.store(listed.number + tile, filled)


@triton.jit
def load_listed(base, at, piece, E: tl.constexpr):
    """Piece number `piece` of the vectors base[at], all of which exist: [len(at), E.BLOCK]."""
    e = piece * E.BLOCK + tl.arange(0, E.BLOCK)[None, :]  # [1, E]
    place = base + at.to(tl.int64)[:, None] * E.SIZE + e  # [BK, E]
    PADDED: tl.constexpr = E.SIZE != E.BLOCK * E.PIECES
    return for_product(tl.load(place, mask=e < E.SIZE, other=0.0) if PADDED else tl.load(place))
