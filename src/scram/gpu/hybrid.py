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

from ..draws import shared_tail
from ..grid import LegalKeys, grid_of
from .grid import GEOMETRY, divide, geometry, points
from .launch import Kernel
from .noise import absorb, row_state, seed_arguments
from .windows import legal_key, match_of, window_size

SETTINGS = ("drawn", "mask_heads", "group", "kappa", *GEOMETRY, "b0", "b1", "b2", "b3")
QUERIES, KEYS, WIDTH = 64, 64, 64  # a block of each; wider features come in several pieces
# Of programs that share the queries in the gradient of the shared keys: a few for every processor of a large device.
PROGRAMS = 512


def draw(q: Tensor, k: Tensor, legal: LegalKeys, seed: Tensor, samples: int, stratified: bool) -> tuple[Tensor, Tensor]:
    """names and for_keys [rows, m] as `draws.shared_tail` has them, not sorted; for_keys empty unless stratified."""
    rows, keys = q.shape[0] * q.shape[1], legal.keys
    ranked = torch.empty((rows, keys), dtype=torch.int64, device=q.device)
    if ranked.numel():
        flags = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
        kernel = Kernel(rank_kernel, triton.cdiv(rows * keys, 1024), flags)
        kernel(ranked, legal.mask, *seed_arguments(seed), legal.heads_per_row, rows, keys)
    names, for_keys = shared_tail(ranked, grid_of(k), samples, stratified, ascending=False)
    return names, torch.empty(0, device=q.device) if for_keys is None else for_keys


@triton.jit(do_not_specialize=["low", "high", "mask_heads", "rows", "keys"])
def rank_kernel(ranked, mask, SEED, low, high, mask_heads, rows, keys, BLOCK: tl.constexpr):
    """`draws.ranked_keys`."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = slot < rows.to(tl.int64) * keys
    row, key = (slot // keys).to(tl.int32), (slot % keys).to(tl.int32)
    rank = (absorb(row_state(SEED, low, high, row), key).to(tl.int64) << 31) | key.to(tl.int64)
    if mask is not None:
        ok = tl.load(mask + (row // mask_heads).to(tl.int64) * keys + key, mask=valid, other=0) != 0
        rank = tl.where(ok, rank, 0x7FFFFFFFFFFFFFFF)
    tl.store(ranked + slot, rank, mask=valid)


def arguments_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    head_out: Tensor,
    head_lse: Tensor,
    names: Tensor,
    for_keys: Tensor,
    *,
    legal: LegalKeys,
    radius: tuple[int, ...],
    causal: bool,
    scale: float,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the kernels, forward and backward, begin with, and their flags."""
    key_grid = grid_of(k)
    logs = for_keys.log() if for_keys.numel() else None
    tensors = (q, k, v, names, logs, index, head_out, head_lse, legal.mask, legal.count)
    reach = [min(b, extent - 1) for b, extent in zip(radius, key_grid, strict=True)]
    arguments = (
        *(None if x is None else x.contiguous() for x in tensors),
        names.shape[-1],
        legal.heads_per_row,
        q.shape[1] // k.shape[1],
        index.shape[-1],
        *geometry(grid_of(q), key_grid),
        *reach,
        *[0] * (4 - len(reach)),
        scale,
    )
    flags = {"RANK": len(key_grid), "E": q.shape[-1], "F": v.shape[-1], "CAUSAL": causal}
    return arguments, {**flags, **_blocks(q.shape[-1], v.shape[-1])}


def _blocks(width: int, value_width: int) -> dict[str, Any]:
    w, fw = (max(16, min(WIDTH, triton.next_power_of_2(x))) for x in (width, value_width))
    pieces = {"W": w, "PIECES": -(-width // w), "FW": fw, "FPIECES": -(-value_width // fw)}
    return {"BM": QUERIES, "BN": KEYS, **pieces, "num_warps": 4, "enable_fp_fusion": True}


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
            tensors = (q, k, v, index, key_mask, head_out, head_lse, names, for_keys)
            arguments, flags = arguments_of(*tensors, legal=legal, causal=causal, **settings)
            programs = q.shape[0] * q.shape[1] * triton.cdiv(math.prod(grid_of(q)), flags["BM"]) * flags["FPIECES"]
            Kernel(tail_kernel, programs, flags)(*arguments, out, lse, variance, offset)
    return out, lse, variance, offset, names, for_keys


@triton.jit
def block_of(base, at, there, piece, E: tl.constexpr, W: tl.constexpr):
    """Rows base[at] as [len(at), W]: piece number `piece` of their width; zeros where there is nothing."""
    e = piece * W + tl.arange(0, W)[None, :]
    return tl.load(base + at.to(tl.int64)[:, None] * E + e, mask=there[:, None] & (e < E), other=0.0)


@triton.jit
def shared_names(names, row, at, drawn, keys):
    """The keys at some places among a row's shared ones, 0 where there is none, and whether there is one."""
    name = tl.load(names + row * drawn + at, mask=at < drawn, other=keys)
    there = name < keys
    return tl.where(there, name, 0), there


@triton.jit
def finite(x):
    """x with zeros for what is not finite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def product(a, b, total):
    """total + a @ b; float32 to nearly all of its digits."""
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def spread_sums(p2, away, first, second, ROUGH: tl.constexpr):
    """first + p2 @ away, second + p2 @ away^2: a variance needs few digits, and fewer where the values have few."""
    if ROUGH:
        first = tl.dot(p2.to(tl.bfloat16), away.to(tl.bfloat16), first)
        second = tl.dot(p2.to(tl.bfloat16), (away * away).to(tl.bfloat16), second)
    else:
        first = tl.dot(p2, away, first, input_precision="tf32")
        second = tl.dot(p2, away * away, second, input_precision="tf32")
    return first, second


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
def in_tail(
    name, there, query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Which shared keys [BN] count for which queries [BM]: they exist, come up to it under CAUSAL, and no window holds
    them."""
    ok = valid[:, None] & there[None, :]
    if CAUSAL:
        ok = ok & (name[None, :] <= query[:, None])
    for e in range(kappa):
        match = match_of(index_row, query, e, valid, kappa, keys)
        near = (match >= 0)[:, None] & there[None, :]
        x, y = name, tl.maximum(match, 0)
        for a in tl.static_range(RANK - 1, -1, -1):
            x_up, y_up = x * 0, y * 0
            if a > 0:
                x_up, y_up = divide(x, MAGIC[a]), divide(y, MAGIC[a])
            near = near & (tl.abs((x - x_up * KG[a])[None, :] - (y - y_up * KG[a])[:, None]) <= REACH[a])
            x, y = x_up, y_up
        ok = ok & ~near
    return ok


@triton.jit
def scores(
    mine, k_row, name, at, there, logs, row, drawn, scale, E: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """scale <q, k> plus the log of how many keys each stands for: [BM, BN]."""
    s = tl.zeros([BM, BN], tl.float32)
    for n in tl.static_range(PIECES):
        s = product(mine[n], tl.trans(block_of(k_row, name, there, n, E, W)), s)
    s = s * scale
    if logs is not None:
        s += tl.load(logs + row * drawn + at, mask=there, other=0.0)[None, :]
    return s


@triton.jit(do_not_specialize=SETTINGS)
def tail_kernel(
    q, k, v, names, logs, index, head_out, head_lse, mask, count, drawn, mask_heads, group, kappa,
    q0, q1, q2, q3, k0, k1, k2, k3, m1, m2, m3, b0, b1, b2, b3, scale,
    out, lse, variance, offset,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    QG, KG, MAGIC, REACH = (q0, q1, q2, q3), (k0, k1, k2, k3), (m1, m1, m2, m3), (b0, b1, b2, b3)
    queries, keys = points(QG, RANK), points(KG, RANK)
    blocks = (queries + BM - 1) // BM
    piece, block = tl.program_id(0) % FPIECES, tl.program_id(0) // FPIECES
    row = (block // blocks).to(tl.int64)
    query = (block % blocks) * BM + tl.arange(0, BM)
    valid = query < queries
    index_row, point = index + row * queries * kappa, row * queries + query
    mask_row = row // mask_heads
    k_row, v_row = k + row // group * keys * E, v + row // group * keys * F
    mine = ()
    for n in tl.static_range(PIECES):
        mine += (block_of(q + row * queries * E, query, valid, n, E, W),)
    f = piece * FW + tl.arange(0, FW)
    # Values are measured from the mean of the first few, so that little cancels in the sums of squares.
    name, there = shared_names(names, row, tl.arange(0, BN), drawn, keys)
    some_values = finite(block_of(v_row, name, there, piece, F, FW)).to(tl.float32)
    middle = tl.sum(some_values, 0) / tl.maximum(tl.sum(there.to(tl.float32), 0), 1.0)

    top = tl.full([BM], -float("inf"), tl.float32)
    whole, squares, seen = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    mixed = tl.zeros([BM, FW], tl.float32)
    first, second, spoiled = mixed * 0, mixed * 0, mixed * 0
    for start in range(0, drawn, BN):
        at = start + tl.arange(0, BN)
        name, there = shared_names(names, row, at, drawn, keys)
        s = scores(mine, k_row, name, at, there, logs, row, drawn, scale, E, W, PIECES, BM, BN)
        ok = in_tail(name, there, query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK, CAUSAL)
        s = tl.where(ok, s, -float("inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # -inf - -inf is NaN
        shrink, p = tl.exp(top - safe), tl.exp(s - safe[:, None])
        top = higher
        value = block_of(v_row, name, there, piece, F, FW)
        if CAUSAL:  # a weight of 0 lets no NaN of a later key through
            bad = ~(tl.abs(value.to(tl.float32)) < float("inf"))
            spoiled = product(tl.where(ok, 1.0, 0.0), tl.where(bad, 1.0, 0.0), spoiled)
            value = finite(value)
        mixed = product(p.to(value.dtype), value, mixed * shrink[:, None])
        away, p2, less = value.to(tl.float32) - middle[None, :], p * p, (shrink * shrink)[:, None]
        first, second = spread_sums(p2, away, first * less, second * less, value.dtype == tl.bfloat16)
        whole = whole * shrink + tl.sum(p, 1)
        squares = squares * shrink * shrink + tl.sum(p2, 1)
        seen += tl.sum(tl.where(ok, 1.0, 0.0), 1)

    size = head_size(query, valid, index_row, kappa, mask, mask_row, keys, KG, MAGIC, REACH, RANK, CAUSAL)
    last = query if CAUSAL else query * 0 + keys - 1
    total = last + 1
    if count is not None:
        total = tl.load(count + mask_row * keys + last, mask=valid, other=0).to(tl.int32)
    left = (total - size).to(tl.float32)
    add = tl.zeros([BM], tl.float32)
    if logs is None:
        add = tl.log(tl.where(seen > 0, left, 1.0) / tl.maximum(seen, 1.0))
    some = seen > 0
    head = tl.load(head_lse + point, mask=valid, other=-float("inf")).to(tl.float32)
    top = tl.where(top == -float("inf"), 0.0, top)
    own = tl.where(some, tl.log(tl.where(some, whole, 1.0)) + top + add, -float("inf"))
    large = tl.maximum(own, head)
    large = tl.where(large == -float("inf"), 0.0, large)
    empty = ~some & (head == -float("inf"))
    norm = tl.log(tl.where(empty, 1.0, tl.exp(own - large) + tl.exp(head - large))) + large
    factor = tl.where(some, tl.exp(top + add - norm), 0.0)
    share = tl.exp(head - norm)
    here = valid[:, None] & (f < F)[None, :]
    theirs = tl.load(head_out + point[:, None] * F + f[None, :], mask=here, other=0.0).to(tl.float32)
    theirs = tl.where((head == -float("inf"))[:, None], 0.0, theirs)
    answer = mixed * factor[:, None] + tl.where((share == 0.0)[:, None], 0.0, share[:, None] * theirs)
    if CAUSAL:
        answer = tl.where(spoiled > 0, float("nan"), answer)

    apart = answer - middle[None, :]
    r_squares = (second - 2 * apart * first + apart * apart * squares[:, None]) * (factor * factor)[:, None]
    r_sum = share[:, None] * (answer - theirs)  # all residuals add up to 0, so the tail's are the head's negated
    spread = tl.maximum(r_squares - r_sum * r_sum / tl.maximum(seen, 1.0)[:, None], 0.0)
    rest = (1 - seen / tl.maximum(left, 1.0)) * seen / tl.maximum(seen - 1, 1.0)
    known = tl.where((seen >= 2)[:, None], rest[:, None] * spread, float("inf"))
    known = tl.where((seen == left)[:, None], 0.0, known)

    tl.store(out + point[:, None] * F + f[None, :], answer.to(out.dtype.element_ty), mask=here)
    tl.store(variance + point[:, None] * F + f[None, :], known, mask=here)
    if piece == 0:
        tl.store(lse + point, tl.where(empty, -float("inf"), norm), mask=valid)
        tl.store(offset + point, add, mask=valid)
