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

from ...draws import tail_rows
from ...grid import grid_of
from .drawn_tail import EXACT, HALF, SETTINGS, arguments_of
from .grid import points
from .launch import Kernel
from .shared_keys import (
    KEYS,
    LOWEST,
    block_of,
    corners_of,
    finite,
    in_tail,
    joined,
    powers,
    product,
    scores,
    stages,
    whole_block,
)

# Of programs that share the queries in the gradient of the shared keys: a few for every processor of a large device.
PROGRAMS = 512


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
    wish = grad_out.float()
    to_head = torch.where(head_lse == -torch.inf, 0, (wish * head_out).sum(-1))
    numbers = [torch.empty_like(to_head) for _ in range(4)]
    share, shift = numbers[:2]
    dk, dv = (torch.zeros(math.prod(x.shape[:-1]), x.shape[-1], device=q.device) for x in (k, v))
    if to_head.numel():
        with torch.cuda.device_of(q):
            tensors = (q, k, v, index, head_lse, names, for_keys)
            arguments, flags = arguments_of(*tensors, causal=causal, spread=False, **settings)
            flags = {**flags, **backward_block(q, v, flags)}
            above = (grad_out.contiguous(), offset.contiguous())
            blocks, key_blocks = -(-queries // flags["BM"]), -(-drawn // flags["BN"])
            splits = max(1, min(blocks, PROGRAMS // max(rows * key_blocks, 1)))
            parts = [torch.empty((splits, rows * drawn, x.shape[-1]), device=q.device) for x in (k, v)]
            more = (grad_lse.contiguous(), to_head.contiguous(), *numbers)
            Kernel(queries_kernel, rows * blocks, flags)(*arguments, *above, *more, dq)
            Kernel(keys_kernel, rows * key_blocks * splits, flags)(*arguments, *above, *numbers[1:], *parts, splits)
        at = tail_rows(names, q.shape[1], k.shape[1], math.prod(grid_of(k))).flatten()
        dk.index_add_(0, at, parts[0].sum(0))
        dv.index_add_(0, at, parts[1].sum(0))
    d_head = share.unsqueeze(-1) * wish
    d_head_lse = torch.where(share == 0, 0, share * (to_head - shift))
    grads = (dq, dk, dv, d_head, d_head_lse)
    return tuple(d.to(x.dtype).reshape(x.shape) for d, x in zip(grads, (q, k, v, head_out, head_lse), strict=True))


def backward_block(q: Tensor, v: Tensor, flags: dict[str, Any]) -> dict[str, int]:
    """Queries per program, warps and stages. As in `forward_block`, both kernels: 2 and 3 stages 993, 925 us."""
    half = q.element_size() == v.element_size() == 2
    block, most = (HALF, 3) if half else (EXACT, 2)
    row = flags["W"] * flags["PIECES"] * q.element_size() + flags["FW"] * flags["FPIECES"] * v.element_size()
    return {**block, "num_stages": stages(q.device, most, KEYS * row, block["BM"] * row)}


@triton.jit
def wishes(
    wish, values_row, at, FW: tl.constexpr, FPIECES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """<grad_out, v> of every pair."""
    dp = tl.zeros([BM, BN], tl.float32)
    for n in tl.static_range(FPIECES):
        dp = product(wish[n], tl.trans(whole_block(values_row, at, n, FW, FPIECES)), dp)
    return dp


@triton.jit(do_not_specialize=SETTINGS)
def queries_kernel(
    q, index, head_lse, keys_in, values_in, places, logs, drawn, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale,
    grad_out, offset, grad_lse, to_head, share_out, shift_out, top_out, factor_out, dq,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, MATCHES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """dq, and of each query the head's share, shift, and what makes weights of scores: `powers` over top, times factor.

    The normaliser is made anew: from lse, rounded, the weights would not add up to 1 where scores are large.
    """
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    blocks, padded = (queries + BM - 1) // BM, (drawn + BN - 1) // BN * BN
    row = (tl.program_id(0) // blocks).to(tl.int64)
    query = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    valid = query < queries
    index_row, point = index + row * queries * kappa, row * queries + query
    keys_row, logs_row = keys_in + row * padded * (W * PIECES), logs + row * padded
    values_row, place = values_in + row * padded * (FW * FPIECES), places + row * (RANK + 1) * padded
    mine, wish, sums = (), (), ()
    for n in tl.static_range(PIECES):
        mine += (block_of(q + row * queries * E, query, valid, n, E, W),)
        sums += (tl.zeros([BM, W], tl.float32),)
    for n in tl.static_range(FPIECES):
        wish += (block_of(grad_out + row * queries * F, query, valid, n, F, FW),)

    low = corners_of(query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK, MATCHES)
    top = tl.full([BM], LOWEST, tl.float32)
    whole, mean, seen = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.int32)
    for start in range(0, padded, BN):
        at = start + tl.arange(0, BN)
        log = tl.load(logs_row + at)
        ok = in_tail(
            place, padded, at, log, query, valid, low, index_row, kappa, keys, KG, MAGIC, REACH, RANK, CAUSAL, MATCHES
        )  # fmt: skip
        s = tl.where(ok, scores(mine, keys_row, at, log, scale, W, PIECES, BM, BN), -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, p = powers(top, higher), powers(s, higher[:, None])
        top = higher
        whole = whole * shrink + tl.sum(p, 1)
        dp = wishes(wish, values_row, at, FW, FPIECES, BM, BN)
        mean = mean * shrink + tl.sum(tl.where(ok, p * dp, 0.0), 1)
        seen += tl.sum(ok.to(tl.int32), 1)
    head = tl.load(head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
    add = tl.load(offset + point, mask=valid, other=0.0)
    factor, share, top, _ = joined(top, whole, seen > 0, add, head)
    shift = mean * factor + tl.where(share == 0, 0.0, share * tl.load(to_head + point, mask=valid, other=0.0))
    shift -= tl.load(grad_lse + point, mask=valid, other=0.0)
    tl.store(share_out + point, share, mask=valid)
    tl.store(shift_out + point, shift, mask=valid)
    tl.store(top_out + point, top, mask=valid)
    tl.store(factor_out + point, factor, mask=valid)

    for start in range(0, padded, BN):
        at = start + tl.arange(0, BN)
        log = tl.load(logs_row + at)
        ok = in_tail(
            place, padded, at, log, query, valid, low, index_row, kappa, keys, KG, MAGIC, REACH, RANK, CAUSAL, MATCHES
        )  # fmt: skip
        s = tl.where(ok, scores(mine, keys_row, at, log, scale, W, PIECES, BM, BN), -float("inf"))
        p = powers(s, top[:, None]) * factor[:, None]
        dp = wishes(wish, values_row, at, FW, FPIECES, BM, BN)
        ds = tl.where(ok, p * (dp - shift[:, None]) * scale, 0.0)
        more = ()
        for n in tl.static_range(PIECES):
            # Where a slope is 0, what is not finite must not spoil the sum; elsewhere the slope is NaN.
            theirs = finite(whole_block(keys_row, at, n, W, PIECES))
            more += (product(ds.to(theirs.dtype), theirs, sums[n]),)
        sums = more
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)[None, :]
        to = dq + row * queries * E + query.to(tl.int64)[:, None] * E + e
        tl.store(to, sums[n].to(dq.dtype.element_ty), mask=valid[:, None] & (e < E))


@triton.jit(do_not_specialize=[*SETTINGS, "splits"])
def keys_kernel(
    q, index, head_lse, keys_in, values_in, places, logs, drawn, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale,
    grad_out, offset, shift_in, top_in, factor_in, dk, dv, splits,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, MATCHES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """Program (row, block of keys, split) adds up its share of the row's queries: dk, dv [splits, B, H, m, width]."""
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    blocks, key_blocks = (queries + BM - 1) // BM, (drawn + BN - 1) // BN
    padded = key_blocks * BN
    split, block = tl.program_id(0) % splits, tl.program_id(0) // splits
    row = (block // key_blocks).to(tl.int64)
    rows = tl.num_programs(0) // (splits * key_blocks)
    at = (block % key_blocks) * BN + tl.arange(0, BN)
    log = tl.load(logs + row * padded + at)
    index_row, place = index + row * queries * kappa, places + row * (RANK + 1) * padded
    keys_row, values_row = keys_in + row * padded * (W * PIECES), values_in + row * padded * (FW * FPIECES)
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
        top = tl.load(top_in + point, mask=valid, other=0.0)
        factor = tl.load(factor_in + point, mask=valid, other=0.0)
        shift = tl.load(shift_in + point, mask=valid, other=0.0)
        low = corners_of(query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK, MATCHES)
        ok = in_tail(
            place, padded, at, log, query, valid, low, index_row, kappa, keys, KG, MAGIC, REACH, RANK, CAUSAL, MATCHES
        )  # fmt: skip
        s = tl.where(ok, scores(mine, keys_row, at, log, scale, W, PIECES, BM, BN), -float("inf"))
        p = powers(s, top[:, None]) * factor[:, None]
        dp = wishes(wish, values_row, at, FW, FPIECES, BM, BN)
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
