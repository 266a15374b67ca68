"""Gradients through the means of clusters, in Triton: each key reads its cluster's."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.calls import ClusterCall, ClusterGrads
from ....spec.grid import grid_of
from ..primitives import load_pieces, store_pieces
from ..runtime.block_sizes import tile_pieces
from ..runtime.launch import Kernel, cached, kinds, on_device

BLOCK_KEYS = 32


def cluster_backward(
    call: ClusterCall, sizes: Tensor, label: Tensor, grad_centers: Tensor, grad_values: Tensor
) -> ClusterGrads:
    """A key has 1 / size of the gradient of its cluster; one in no cluster has none."""
    grads = ClusterGrads(
        torch.empty_like(call.k, memory_format=torch.contiguous_format),
        torch.empty_like(call.v, memory_format=torch.contiguous_format),
    )
    if label.numel():
        given = tuple(x.contiguous() for x in (label, sizes, grad_centers, grad_values))
        with on_device(call.k):
            kernel = _kernel(label.numel(), call.k.shape[-1], call.v.shape[-1], kinds(*given, *grads))
            kernel(*given, grads, math.prod(grid_of(call.k)), label.numel(), call.clusters)
    return grads


@cached
def _kernel(keys: int, width: int, value_width: int, given: tuple[Any, ...]) -> Kernel:
    flags = {**tile_pieces(width, value_width, True), "BLOCK_S": BLOCK_KEYS, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(spread_kernel, -(-keys // BLOCK_KEYS), flags)


@triton.jit
def spread_kernel(
    label,
    sizes,
    d_centers,
    d_values,
    grads,
    keys,
    all_keys,
    count,
    BLOCK_S: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
):
    """Program: block of keys, of all keys of all rows; a row has `keys`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)  # [BK]
    inside = at < all_keys
    name = tl.load(label + at, mask=inside, other=-1)  # [BK]
    has_cluster = name >= 0
    slot = at // keys * count + name  # [BK]
    size = tl.maximum(tl.load(sizes + slot, mask=has_cluster, other=1), 1).to(tl.float32)[:, None]  # [BK, 1]
    d_center = load_pieces(d_centers, slot, has_cluster, E)  # [BK, E]
    d_value = load_pieces(d_values, slot, has_cluster, F)  # [BK, F]
    dk = ()
    dv = ()
    for n in tl.static_range(len(d_center)):
        dk += ((d_center[n] / size).to(grads.k.dtype.element_ty),)
    for n in tl.static_range(len(d_value)):
        dv += ((d_value[n] / size).to(grads.v.dtype.element_ty),)
    store_pieces(grads.k, at, dk, inside, E)
    store_pieces(grads.v, at, dv, inside, F)
