"""Gradients through the means of clusters, in Triton: each key reads its cluster's."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import ClusterCall, ClusterGrads
from ....grid import grid_of
from ..cluster.sample import put_rows
from ..drawn_tail.shared_keys import blocks_of
from ..runtime.block_sizes import tile_pieces
from ..runtime.launch import Kernel, cached, kinds, on_device

BLOCK_KEYS = 32


def cluster_backward(
    call: ClusterCall, sizes: Tensor, label: Tensor, grad_centres: Tensor, grad_values: Tensor
) -> ClusterGrads:
    """A key has 1 / size of the gradient of its cluster; one in no cluster has none."""
    made = ClusterGrads(
        torch.empty_like(call.k, memory_format=torch.contiguous_format),
        torch.empty_like(call.v, memory_format=torch.contiguous_format),
    )
    if label.numel():
        given = tuple(x.contiguous() for x in (label, sizes, grad_centres, grad_values))
        widths = call.k.shape[-1], call.v.shape[-1]
        with on_device(call.k):
            _kernel(label.numel(), *widths, kinds(*given, *made))(
                *given, made, math.prod(grid_of(call.k)), label.numel(), call.clusters
            )
    return made


@cached
def _kernel(keys: int, width: int, value_width: int, given: tuple[Any, ...]) -> Kernel:
    flags = {**tile_pieces(width, value_width, True), "BLOCK_S": BLOCK_KEYS, "num_warps": 4, "enable_fp_fusion": True}
    return Kernel(spread_kernel, -(-keys // BLOCK_KEYS), flags)


@triton.jit
def spread_kernel(
    label, sizes, d_centres, d_values, made, keys, every, count, BLOCK_S: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    """Program: block of keys, of `every` key of all rows; a row has `keys`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = at < every
    name = tl.load(label + at, mask=inside, other=-1)
    there, slot = name >= 0, at // keys * count + name
    size = tl.maximum(tl.load(sizes + slot, mask=there, other=1), 1).to(tl.float32)[:, None]
    k, v = blocks_of(d_centres, slot, there, ROW), blocks_of(d_values, slot, there, VROW)
    dk, dv = (), ()
    for n in tl.static_range(len(k)):
        dk += ((k[n] / size).to(made.k.dtype.element_ty),)
    for n in tl.static_range(len(v)):
        dv += ((v[n] / size).to(made.v.dtype.element_ty),)
    put_rows(made.k, at, dk, inside, ROW)
    put_rows(made.v, at, dv, inside, VROW)
