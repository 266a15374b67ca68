"""The hybrid's tail in Triton: the keys that a row shares as matrix products, the head's keys left out by comparison.

A program takes a block of queries and walks the shared keys in blocks. A key is the head's when it lies within the
radius of one of the query's matches, so no key counts twice and nothing is subtracted afterwards.
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

from ...grid import LegalKeys, grid_of
from .grid import GEOMETRY, geometry, points
from .launch import Kernel
from .shared_keys import (
    KEYS,
    LN2,
    LOWEST,
    block_of,
    corners_of,
    draw,
    finite,
    in_tail,
    joined,
    pieces,
    powers,
    product,
    scores,
    side_by_side,
    stages,
    whole_block,
)
from .windows import legal_key, match_of, window_size

SETTINGS = ("drawn", "kappa", *GEOMETRY, "b0", "b1", "b2", "b3")
# Where a product is of float32: two warps make Triton multiply by mma.sync. With four it takes wgmma on sm_90, which in
# its version 3.6 read shared memory out of bounds (products of float32 beside those of bfloat16, a stratified tail).
HALF, EXACT = {"BM": 64, "num_warps": 4}, {"BM": 32, "num_warps": 2}
UNROLLED = 8  # matches at most that are compared without a loop


def arguments_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    head_lse: Tensor,
    names: Tensor,
    for_keys: Tensor,
    *,
    radius: tuple[int, ...],
    causal: bool,
    scale: float,
    spread: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernels, forward and backward, begin with, and their flags."""
    key_grid = grid_of(k)
    reach = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    shared = side_by_side(q, k, v, names, for_keys, causal, spread)
    arguments = (
        *(x.contiguous() for x in (q, index, head_lse)),
        *(shared if spread else shared[:4]),
        names.shape[-1],
        index.shape[-1],
        *geometry(grid_of(q), key_grid),
        *reach,
        *[0] * (4 - len(reach)),
        scale,
    )
    flags = {"RANK": len(key_grid), "E": q.shape[-1], "F": v.shape[-1], "CAUSAL": causal, "BN": KEYS}
    flags["MATCHES"] = index.shape[-1] if index.shape[-1] <= UNROLLED else 0
    return arguments, {**flags, **pieces(q.shape[-1], v.shape[-1]), "enable_fp_fusion": True}


def tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    head_out: Tensor,
    head_lse: Tensor,
    seed: Tensor,
    *,
    samples: int,
    stratified: bool,
    causal: bool,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """The tensors of `scram.estimate_ops` -> out, lse, variance, offset, names, for_keys."""
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=v.dtype, device=q.device)
    lse, offset = (torch.empty(shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    variance = torch.empty(shape, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        legal = LegalKeys.of(q, k, causal, key_mask)
        names, for_keys = draw(q, k, legal, seed, samples, stratified)
        if lse.numel():
            tensors = (q, k, v, index, head_lse, names, for_keys)
            arguments, flags = arguments_of(*tensors, causal=causal, spread=True, **settings)
            flags = {**flags, "STRATIFIED": stratified, **forward_block(q, v, flags)}
            programs = q.shape[0] * q.shape[1] * -(-math.prod(grid_of(q)) // flags["BM"]) * flags["FPIECES"]
            more = (head_out.contiguous(), legal.mask, legal.count, legal.heads_per_row)
            Kernel(tail_kernel, programs, flags)(*arguments, *more, out, lse, variance, offset)
    return out, lse, variance, offset, names, for_keys


def forward_block(q: Tensor, v: Tensor, flags: dict[str, Any]) -> dict[str, int]:
    """Queries per program, warps and stages. H200, 512x512, E = F = 64, bf16, 512 shared keys, one match, us:

    64 queries, 4 warps, 2 and 3 stages 351, 342; 128, 8 warps 391, 388; with blocks of 32 keys 400, of 128 630.
    """
    half = q.element_size() == v.element_size() == 2
    block, most = (HALF, 3) if half else (EXACT, 2)
    row = flags["W"] * flags["PIECES"] * q.element_size()
    each = KEYS * (row + flags["FW"] * (v.element_size() + 2 * (4 if v.dtype == torch.float32 else 2)))
    return {**block, "num_stages": stages(q.device, most, each, block["BM"] * row)}


@triton.jit
def head_size(
    query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH,
    RANK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """|S_i|: the legal keys in the union of the windows."""
    found = query * 0
    for e in range(kappa):
        match = match_of(index_row, query, e, valid, kappa, keys)
        for number in range(window_size(REACH, RANK)):
            _, ok = legal_key(
                match, e, number, query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH, RANK, CAUSAL
            )
            found += ok.to(tl.int32)
    return found


@triton.jit
def plus(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def rough_product(a, b, total):
    """total + a @ b, to about three digits."""
    return tl.dot(a.to(b.dtype), b, total, input_precision="tf32")


@triton.jit(do_not_specialize=[*SETTINGS, "mask_heads"])
def tail_kernel(
    q, index, head_lse, keys_in, values_in, places, logs, away, middle_in, drawn, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale,
    head_out, mask, count, mask_heads, out, lse, variance, offset,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, MATCHES: tl.constexpr,
    STRATIFIED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
    FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    blocks, padded = (queries + BM - 1) // BM, (drawn + BN - 1) // BN * BN
    piece, block = tl.program_id(0) % FPIECES, tl.program_id(0) // FPIECES
    row = (block // blocks).to(tl.int64)
    rows = tl.num_programs(0) // (FPIECES * blocks)
    query = (block % blocks) * BM + tl.arange(0, BM)
    valid = query < queries
    index_row, point = index + row * queries * kappa, row * queries + query
    keys_row, logs_row = keys_in + row * padded * (W * PIECES), logs + row * padded
    values_row, away_row = values_in + row * padded * (FW * FPIECES), away + row * padded * (FW * FPIECES)
    squares_row, place = away_row + rows.to(tl.int64) * padded * (FW * FPIECES), places + row * (RANK + 1) * padded
    mine = ()
    for n in tl.static_range(PIECES):
        mine += (block_of(q + row * queries * E, query, valid, n, E, W),)

    low = corners_of(query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK, MATCHES)
    top = tl.full([BM], LOWEST, tl.float32)
    whole, squares, seen = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, FW], tl.float32)
    first, second, spoiled = mixed, mixed, mixed
    for start in range(0, padded, BN):
        at = start + tl.arange(0, BN)
        log = tl.load(logs_row + at)
        s = scores(mine, keys_row, at, log, scale, W, PIECES, BM, BN)
        ok = in_tail(
            place, padded, at, log, query, valid, low, index_row, kappa, keys, KG, MAGIC, REACH, RANK, CAUSAL, MATCHES
        )  # fmt: skip
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        shrink, p = powers(top, higher), powers(s, higher[:, None])
        top = higher
        value = whole_block(values_row, at, piece, FW, FPIECES)
        if CAUSAL:  # a weight of 0 lets no NaN of a later key through
            bad = ~(tl.abs(value.to(tl.float32)) < float("inf"))
            spoiled = rough_product(tl.where(ok, 1.0, 0.0), tl.where(bad, 1.0, 0.0).to(value.dtype), spoiled)
            value = finite(value)
        mixed = product(p.to(value.dtype), value, mixed * shrink[:, None])
        p2, less = (p * p).to(away.dtype.element_ty), (shrink * shrink)[:, None]  # rounded alike in all three sums
        first = rough_product(p2, whole_block(away_row, at, piece, FW, FPIECES), first * less)
        second = rough_product(p2, whole_block(squares_row, at, piece, FW, FPIECES), second * less)
        p_sum, p2_sum, ok_sum = tl.reduce((p, p2.to(tl.float32), tl.where(ok, 1.0, 0.0)), 1, plus)
        whole, squares, seen = whole * shrink + p_sum, squares * shrink * shrink + p2_sum, seen + ok_sum

    mask_row = row // mask_heads
    size = head_size(query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH, RANK, CAUSAL)
    last = query if CAUSAL else query * 0 + keys - 1
    total = last + 1
    if count is not None:
        total = tl.load(count + mask_row * keys + last, mask=valid, other=0).to(tl.int32)
    left = (total - size).to(tl.float32)
    some, add = valid & (seen > 0), tl.zeros([BM], tl.float32)
    if not STRATIFIED:
        add = tl.log(tl.where(some, left, 1.0) / tl.maximum(seen, 1.0))
    head = tl.load(head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
    factor, share, top, norm = joined(top, whole, some, add, head)
    f = piece * FW + tl.arange(0, FW)
    here = valid[:, None] & (f < F)[None, :]
    theirs = tl.load(head_out + point[:, None] * F + f[None, :], mask=here, other=0.0).to(tl.float32)
    theirs = tl.where((head == -float("inf"))[:, None], 0.0, theirs)
    answer = tl.where(some[:, None], mixed * factor[:, None], 0.0)
    answer += tl.where((share == 0.0)[:, None], 0.0, share[:, None] * theirs)
    if CAUSAL:
        answer = tl.where(spoiled > 0, float("nan"), answer)

    # Values are measured from the mean of a few, so that little cancels in the sums of squares.
    middle_row = middle_in + row * (FW * FPIECES) + f
    middle, unit = tl.load(middle_row), tl.load(middle_row + rows * (FW * FPIECES))
    apart, each = (answer - middle[None, :]) / unit[None, :], factor[:, None] * unit[None, :]
    r_squares = (second - 2 * apart * first + apart * apart * squares[:, None]) * (each * each)
    r_sum = share[:, None] * (answer - theirs)  # all residuals add up to 0, so the tail's are the head's negated
    spread = tl.maximum(r_squares - r_sum * r_sum / tl.maximum(seen, 1.0)[:, None], 0.0)
    rest = (1 - seen / tl.maximum(left, 1.0)) * seen / tl.maximum(seen - 1, 1.0)
    known = tl.where((seen >= 2)[:, None], rest[:, None] * spread, float("inf"))
    known = tl.where((seen == left)[:, None], 0.0, known)

    tl.store(out + point[:, None] * F + f[None, :], answer.to(out.dtype.element_ty), mask=here)
    tl.store(variance + point[:, None] * F + f[None, :], known, mask=here)
    if piece == 0:
        tl.store(lse + point, top + norm * LN2, mask=valid)
        tl.store(offset + point, add, mask=valid)
