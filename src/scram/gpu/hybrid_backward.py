"""Gradients of the hybrid's tail in Triton, through out and through lse.

With p the joint weights and dp_j = <grad_out, v_j>, the gradient of a score is p_j (dp_j - shift), where shift is the
mean of dp over head and tail less grad_lse. One kernel makes shift and dq, one the gradients of the shared keys: there
the queries are split among programs, whose sums are added in order afterwards, so the bits are the same every time.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..draws import tail_rows
from ..grid import LegalKeys, grid_of
from .grid import points
from .hybrid import PROGRAMS, SETTINGS, arguments_of, block_of, finite, in_tail, product, scores, shared_names
from .launch import Kernel


def tail_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    head_out: Tensor,
    head_lse: Tensor,
    seed: Tensor,
    lse: Tensor,
    offset: Tensor,
    names: Tensor,
    for_keys: Tensor,
    *,
    samples: int,
    stratified: bool,
    causal: bool,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, head_out, head_lse, in the dtypes of their tensors."""
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    (rows, drawn), queries = names.shape, math.prod(grid_of(q))
    share = torch.where(lse == -torch.inf, 0, (head_lse - lse).exp())
    wish = grad_out.float()
    to_head = torch.where(share == 0, 0, (wish * head_out).sum(-1))
    shift = (share * to_head).contiguous()
    dk, dv = (torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], device=q.device) for x in (k, v))
    if lse.numel():
        legal = LegalKeys.of(q, k, causal, key_mask)
        tensors = (q, k, v, index, key_mask, head_out, head_lse, names, for_keys)
        arguments, flags = arguments_of(*tensors, legal=legal, causal=causal, **settings)
        above = (grad_out.contiguous(), grad_lse.contiguous(), lse.contiguous(), offset.contiguous())
        blocks, key_blocks = triton.cdiv(queries, flags["BM"]), triton.cdiv(drawn, flags["BN"])
        splits = max(1, min(blocks, PROGRAMS // max(rows * key_blocks, 1)))
        parts = [torch.empty((splits, rows * drawn, x.shape[-1]), device=q.device) for x in (k, v)]
        with torch.cuda.device_of(q):
            Kernel(queries_kernel, rows * blocks, flags)(*arguments, *above, shift, dq)
            Kernel(keys_kernel, rows * key_blocks * splits, flags)(*arguments, *above, shift, *parts, splits)
        at = tail_rows(names, q.shape[1], k.shape[1], legal.keys).flatten()
        dk.index_add_(0, at, parts[0].sum(0))
        dv.index_add_(0, at, parts[1].sum(0))
    d_head = share.unsqueeze(-1) * wish
    # The kernel has added the tail's part to shift and taken grad_lse from it.
    d_head_lse = share * (to_head - shift)
    grads = (dq, dk, dv, d_head, d_head_lse)
    return tuple(d.to(x.dtype).reshape(x.shape) for d, x in zip(grads, (q, k, v, head_out, head_lse), strict=True))


@triton.jit
def weights(
    mine, k_row, name, at, there, query, valid, index_row, kappa, logs, row, drawn, scale, norm, add, keys, KG, MAGIC,
    REACH, RANK: tl.constexpr, CAUSAL: tl.constexpr, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The joint weights [BM, BN], and which pairs count."""
    s = scores(mine, k_row, name, at, there, logs, row, drawn, scale, E, W, PIECES, BM, BN)
    ok = in_tail(name, there, query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK, CAUSAL)
    return tl.where(ok, tl.exp(s + (add - norm)[:, None]), 0.0), ok


@triton.jit
def wishes(
    wish, v_row, name, there, F: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """<grad_out, v> of every pair."""
    dp = tl.zeros([BM, BN], tl.float32)
    for n in tl.static_range(FPIECES):
        dp = product(wish[n], tl.trans(block_of(v_row, name, there, n, F, FW)), dp)
    return dp


@triton.jit(do_not_specialize=SETTINGS)
def queries_kernel(
    q, k, v, names, logs, index, head_out, head_lse, mask, count, drawn, mask_heads, group, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale,
    grad_out, grad_lse, lse, offset, shift_io, dq,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    blocks = (queries + BM - 1) // BM
    row = (tl.program_id(0) // blocks).to(tl.int64)
    query = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    valid = query < queries
    index_row, point = index + row * queries * kappa, row * queries + query
    k_row, v_row = k + row // group * keys * E, v + row // group * keys * F
    mine, wish, sums = (), (), ()
    for n in tl.static_range(PIECES):
        mine += (block_of(q + row * queries * E, query, valid, n, E, W),)
        sums += (tl.zeros([BM, W], tl.float32),)
    for n in tl.static_range(FPIECES):
        wish += (block_of(grad_out + row * queries * F, query, valid, n, F, FW),)
    norm = tl.load(lse + point, mask=valid, other=0.0)
    norm = tl.where(norm == -float("inf"), 0.0, norm)
    add = tl.load(offset + point, mask=valid, other=0.0)
    shift = tl.load(shift_io + point, mask=valid, other=0.0)

    for start in range(0, drawn, BN):
        at = start + tl.arange(0, BN)
        name, there = shared_names(names, row, at, drawn, keys)
        p, ok = weights(
            mine, k_row, name, at, there, query, valid, index_row, kappa, logs, row, drawn, scale, norm, add, keys, KG,
            MAGIC, REACH, RANK, CAUSAL, E, W, PIECES, BM, BN,
        )  # fmt: skip
        dp = wishes(wish, v_row, name, there, F, FW, FPIECES, BM, BN)
        shift += tl.sum(tl.where(ok, p * dp, 0.0), 1)
    shift -= tl.load(grad_lse + point, mask=valid, other=0.0)
    tl.store(shift_io + point, shift, mask=valid)

    for start in range(0, drawn, BN):
        at = start + tl.arange(0, BN)
        name, there = shared_names(names, row, at, drawn, keys)
        p, ok = weights(
            mine, k_row, name, at, there, query, valid, index_row, kappa, logs, row, drawn, scale, norm, add, keys, KG,
            MAGIC, REACH, RANK, CAUSAL, E, W, PIECES, BM, BN,
        )  # fmt: skip
        dp = wishes(wish, v_row, name, there, F, FW, FPIECES, BM, BN)
        ds = tl.where(ok, p * (dp - shift[:, None]) * scale, 0.0)
        more = ()
        for n in tl.static_range(PIECES):
            # Where a slope is 0, what is not finite must not spoil the sum; elsewhere the slope is NaN.
            theirs = finite(block_of(k_row, name, there, n, E, W))
            more += (product(ds.to(theirs.dtype), theirs, sums[n]),)
        sums = more
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)[None, :]
        place = dq + row * queries * E + query.to(tl.int64)[:, None] * E + e
        tl.store(place, sums[n].to(dq.dtype.element_ty), mask=valid[:, None] & (e < E))


@triton.jit(do_not_specialize=[*SETTINGS, "splits"])
def keys_kernel(
    q, k, v, names, logs, index, head_out, head_lse, mask, count, drawn, mask_heads, group, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale,
    grad_out, grad_lse, lse, offset, shift_in, dk, dv, splits,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """Program (row, block of keys, split) adds up its share of the row's queries: dk, dv [splits, B, H, m, width]."""
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    blocks, key_blocks = (queries + BM - 1) // BM, (drawn + BN - 1) // BN
    split, block = tl.program_id(0) % splits, tl.program_id(0) // splits
    row = (block // key_blocks).to(tl.int64)
    rows = tl.num_programs(0) // (splits * key_blocks)
    at = (block % key_blocks) * BN + tl.arange(0, BN)
    name, there = shared_names(names, row, at, drawn, keys)
    index_row = index + row * queries * kappa
    k_row, v_row = k + row // group * keys * E, v + row // group * keys * F
    k_sums, v_sums = (), ()
    for _ in tl.static_range(PIECES):
        k_sums += (tl.zeros([BN, W], tl.float32),)
    for _ in tl.static_range(FPIECES):
        v_sums += (tl.zeros([BN, FW], tl.float32),)
    for number in range(split, blocks, splits):
        query = number * BM + tl.arange(0, BM)
        valid = query < queries
        point = row * queries + query
        mine, wish = (), ()
        for n in tl.static_range(PIECES):
            mine += (block_of(q + row * queries * E, query, valid, n, E, W),)
        for n in tl.static_range(FPIECES):
            wish += (block_of(grad_out + row * queries * F, query, valid, n, F, FW),)
        norm = tl.load(lse + point, mask=valid, other=0.0)
        norm = tl.where(norm == -float("inf"), 0.0, norm)
        add = tl.load(offset + point, mask=valid, other=0.0)
        shift = tl.load(shift_in + point, mask=valid, other=0.0)
        p, ok = weights(
            mine, k_row, name, at, there, query, valid, index_row, kappa, logs, row, drawn, scale, norm, add, keys, KG,
            MAGIC, REACH, RANK, CAUSAL, E, W, PIECES, BM, BN,
        )  # fmt: skip
        dp = wishes(wish, v_row, name, there, F, FW, FPIECES, BM, BN)
        ds = tl.trans(tl.where(ok, p * (dp - shift[:, None]) * scale, 0.0))
        k_more, v_more = (), ()
        for n in tl.static_range(PIECES):
            k_more += (product(ds.to(mine[n].dtype), finite(mine[n]), k_sums[n]),)
        for n in tl.static_range(FPIECES):
            v_more += (product(tl.trans(p).to(wish[n].dtype), wish[n], v_sums[n]),)
        k_sums, v_sums = k_more, v_more
    slot = (split.to(tl.int64) * rows + row) * drawn
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)[None, :]
        tl.store(dk + (slot + at)[:, None] * E + e, k_sums[n], mask=(at < drawn)[:, None] & (e < E))
    for n in tl.static_range(FPIECES):
        f = n * FW + tl.arange(0, FW)[None, :]
        tl.store(dv + (slot + at)[:, None] * F + f, v_sums[n], mask=(at < drawn)[:, None] & (f < F))
