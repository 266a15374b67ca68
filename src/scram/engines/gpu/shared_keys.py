"""The keys that the queries of a row share, in Triton: drawn, laid side by side, told from the keys of a query's head.

What every query of a row needs of a shared key is made once: its features and values in whole blocks, its coordinates,
the log of how many keys it is for. A place without a key has the log of 0.
"""

# Kernels carry no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...draws import shared_tail
from ...grid import LegalKeys, grid_of
from .grid import divide, geometry
from .launch import Kernel
from .noise import absorb, row_state, seed_arguments
from .windows import match_of

KEYS, WIDTH = 64, 64  # keys and features of a block; wider features come in several pieces
SPARE = 20 << 10  # bytes of shared memory for what passes between threads
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)  # where a maximum begins: -inf - -inf would be NaN


def draw(q: Tensor, k: Tensor, legal: LegalKeys, seed: Tensor, samples: int, stratified: bool) -> tuple[Tensor, Tensor]:
    """names and for_keys [rows, m] as `draws.shared_tail` has them, not sorted; for_keys empty unless stratified."""
    rows, keys = q.shape[0] * q.shape[1], legal.keys
    ranked = torch.empty((rows, keys), dtype=torch.int64, device=q.device)
    if ranked.numel():
        flags = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
        kernel = Kernel(rank_kernel, -(-rows * keys // 1024), flags)
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


@lru_cache(maxsize=256)
def pieces(width: int, value_width: int) -> dict[str, int]:
    """Features and values in blocks that matrix products take."""
    w, fw = (max(16, min(WIDTH, triton.next_power_of_2(x))) for x in (width, value_width))
    return {"W": w, "PIECES": -(-width // w), "FW": fw, "FPIECES": -(-value_width // fw)}


def stages(device: torch.device, most: int, each: int, fixed: int) -> int:
    """How many blocks of `each` bytes are loaded ahead: what shared memory holds besides `fixed`, `most` at most."""
    return max(1, min(most, (_shared_memory(device) - SPARE - fixed) // each))


@lru_cache(maxsize=16)
def _shared_memory(device: torch.device) -> int:
    """Bytes of a program; without a device the least that supported ones have."""
    if device.type != "cuda":
        return 99 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10)


def side_by_side(
    q: Tensor, k: Tensor, v: Tensor, names: Tensor, for_keys: Tensor, causal: bool, spread: bool
) -> tuple[Tensor | None, ...]:
    """keys [rows, m, E], values [rows, m, F], places int32 [rows, rank + 1, m], logs [rows, m] of the shared keys.

    m, E, F are whole blocks; a key's places are its coordinates and its name. With `spread`, for the variance: values
    measured from the mean of a few in units of the largest, and their squares, [2, rows, m, F], and that mean and unit,
    [2, rows, F]; else None.
    """
    (rows, drawn), key_grid, device = names.shape, grid_of(k), q.device
    flags = pieces(k.shape[-1], v.shape[-1])
    blocks = -(-drawn // KEYS)
    padded, width, value_width = blocks * KEYS, flags["W"] * flags["PIECES"], flags["FW"] * flags["FPIECES"]
    keys = torch.empty((rows, padded, width), dtype=k.dtype, device=device)
    values = torch.empty((rows, padded, value_width), dtype=v.dtype, device=device)
    places = torch.empty((rows, len(key_grid) + 1, padded), dtype=torch.int32, device=device)
    logs = torch.empty((rows, padded), dtype=torch.float32, device=device)
    away = middle = None
    if spread:
        # A variance needs few digits. Those of bfloat16 were too few where one key has most of the weight: 2 % off.
        kind = torch.float32 if v.dtype == torch.float32 else torch.float16
        away = torch.empty((2, rows, padded, value_width), dtype=kind, device=device)
        middle = torch.empty((2, rows, value_width), dtype=torch.float32, device=device)
    made = (keys, values, places, logs, away, middle)
    flags = {"RANK": len(key_grid), "E": k.shape[-1], "F": v.shape[-1], "CAUSAL": causal, "BN": KEYS, **flags}
    kernel = Kernel(gather_kernel, rows * blocks, {**flags, "num_warps": 4, "enable_fp_fusion": True})
    given = (k.contiguous(), v.contiguous(), names, for_keys if for_keys.numel() else None)
    kernel(*given, drawn, q.shape[1] // k.shape[1], *geometry(grid_of(q), key_grid)[4:], *made)
    return made


@triton.jit
def finite(x):
    """x with zeros for what is not finite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def block_of(base, at, there, piece, E: tl.constexpr, W: tl.constexpr):
    """Rows base[at] as [len(at), W]: piece number `piece` of their width; zeros where there is nothing."""
    e, here = piece * W + tl.arange(0, W)[None, :], there[:, None]
    if E != W:
        here = here & (e < E)
    return tl.load(base + at.to(tl.int64)[:, None] * E + e, mask=here, other=0.0)


@triton.jit
def whole_block(base, at, piece, W: tl.constexpr, PIECES: tl.constexpr):
    """Rows base[at] that are whole blocks."""
    return tl.load(base + at[:, None] * (W * PIECES) + (piece * W + tl.arange(0, W))[None, :])


@triton.jit(do_not_specialize=["drawn", "group", "k0", "k1", "k2", "k3", "m1", "m2", "m3"])
def gather_kernel(
    k, v, names, for_keys, drawn, group, k0, k1, k2, k3, m1, m2, m3,
    keys_out, values_out, places, logs, away, middle_out,
    RANK: tl.constexpr, E: tl.constexpr, F: tl.constexpr, CAUSAL: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, FW: tl.constexpr, FPIECES: tl.constexpr,
):  # fmt: skip
    """Program (row, block of keys) of `side_by_side`."""
    KG, MAGIC = (k0, k1, k2, k3), (m1, m1, m2, m3)
    keys = k0
    for a in tl.static_range(1, RANK):
        keys = keys * KG[a]
    blocks = (drawn + BN - 1) // BN
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    padded, k_row, v_row = blocks * BN, k + row // group * keys * E, v + row // group * keys * F
    at = block * BN + tl.arange(0, BN)
    name = tl.load(names + row * drawn + at, mask=at < drawn, other=keys)
    there = name < keys
    name = tl.where(there, name, 0)
    slot = row * padded + at
    for n in tl.static_range(PIECES):
        e = n * W + tl.arange(0, W)
        tl.store(keys_out + slot[:, None] * (W * PIECES) + e[None, :], block_of(k_row, name, there, n, E, W))
    log = tl.zeros([BN], tl.float32)
    if for_keys is not None:
        log = tl.log(tl.load(for_keys + row * drawn + at, mask=there, other=1.0))
    tl.store(logs + slot, tl.where(there, log, -float("inf")))
    place = places + row * (RANK + 1) * padded + at
    tl.store(place + RANK * padded, name)
    rest = name
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(rest, MAGIC[a]) if a > 0 else rest * 0
        tl.store(place + a * padded, rest - up * KG[a])
        rest = up

    few = tl.arange(0, BN)
    first = tl.load(names + row * drawn + few, mask=few < drawn, other=keys)
    some = first < keys
    first = tl.where(some, first, 0)
    for n in tl.static_range(FPIECES):
        f = n * FW + tl.arange(0, FW)
        value, to = block_of(v_row, name, there, n, F, FW), slot[:, None] * (FW * FPIECES) + f[None, :]
        tl.store(values_out + to, value)
        if away is not None:
            sums = tl.sum(finite(block_of(v_row, first, some, n, F, FW)).to(tl.float32), 0)
            middle = sums / tl.maximum(tl.sum(some.to(tl.float32), 0), 1.0)
            unit = tl.zeros([FW], tl.float32)
            for start in range(0, drawn, BN):
                other = tl.load(names + row * drawn + start + few, mask=start + few < drawn, other=keys)
                theirs = finite(block_of(v_row, tl.where(other < keys, other, 0), other < keys, n, F, FW))
                far = tl.where((other < keys)[:, None], tl.abs(theirs.to(tl.float32) - middle[None, :]), 0.0)
                unit = tl.maximum(unit, tl.max(far, 0))
            unit = tl.where(unit > 0, unit, 1.0)
            if block == 0:
                tl.store(middle_out + row * (FW * FPIECES) + f, middle)
                rows = tl.num_programs(0) // blocks
                tl.store(middle_out + (rows + row) * (FW * FPIECES) + f, unit)
            if CAUSAL:  # as the products of the values themselves have it
                value = finite(value)
            apart = ((value.to(tl.float32) - middle[None, :]) / unit[None, :]).to(away.dtype.element_ty)
            all_values = (tl.num_programs(0) * BN).to(tl.int64) * (FW * FPIECES)
            tl.store(away + to, apart)
            squared = apart.to(tl.float32) * apart.to(tl.float32)
            tl.store(away + all_values + to, squared.to(away.dtype.element_ty))


@triton.jit
def corner_of(match, KG, MAGIC, REACH, RANK: tl.constexpr):
    """The first coordinates, last axis first, of the window around a match of each query; far off for none."""
    y, low = tl.maximum(match, 0), ()
    for a in tl.static_range(RANK - 1, -1, -1):
        up = divide(y, MAGIC[a]) if a > 0 else y * 0
        first = y - up * KG[a] - REACH[a]
        low += (tl.where(match >= 0, first, -2 * REACH[a] - 1),)
        y = up
    return low


@triton.jit
def corners_of(
    query, valid, index_row, kappa, keys, KG, MAGIC, REACH, RANK: tl.constexpr, MATCHES: tl.constexpr
):  # fmt: skip
    """`corner_of` the first MATCHES matches, one after the other."""
    low = ()
    for e in tl.static_range(MATCHES):
        low += corner_of(match_of(index_row, query, e, valid, kappa, keys), KG, MAGIC, REACH, RANK)
    return low


@triton.jit
def in_tail(
    place, padded, at, log, query, valid, low, index_row, kappa, keys, KG, MAGIC, REACH, RANK: tl.constexpr,
    CAUSAL: tl.constexpr, MATCHES: tl.constexpr,
):  # fmt: skip
    """Which shared keys [BN] count for which queries [BM]: they exist, come up to it under CAUSAL, and no window holds
    them."""
    x = ()
    for a in tl.static_range(RANK - 1, -1, -1):
        x += (tl.load(place + a * padded + at),)
    ok = (log > -float("inf"))[None, :]
    if CAUSAL:
        ok = ok & (tl.load(place + RANK * padded + at)[None, :] <= query[:, None])
    for e in tl.static_range(MATCHES):
        ok = ok & ~covered(x, low, e, REACH, RANK)
    if MATCHES == 0:
        for e in range(kappa):
            one = corner_of(match_of(index_row, query, e, valid, kappa, keys), KG, MAGIC, REACH, RANK)
            ok = ok & ~covered(x, one, 0, REACH, RANK)
    return ok


@triton.jit
def covered(x, low, e: tl.constexpr, REACH, RANK: tl.constexpr):
    """Which shared keys [BN], by their coordinates, lie in the e-th windows [BM]."""
    near = None
    for n in tl.static_range(RANK):
        reach = 2 * REACH[RANK - 1 - n]
        within = (x[n][None, :] - low[e * RANK + n][:, None]).to(tl.uint32) <= reach.to(tl.uint32)
        near = within if near is None else near & within
    return near


@triton.jit
def product(a, b, total):
    """total + a @ b; float32 to nearly all of its digits."""
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def scores(
    mine, keys_row, at, log, scale, W: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """scale <q, k> plus the log of how many keys each is for: [BM, BN]."""
    s = tl.zeros([BM, BN], tl.float32)
    for n in tl.static_range(PIECES):
        s = product(mine[n], tl.trans(whole_block(keys_row, at, n, W, PIECES)), s)
    return s * scale + log[None, :]


@triton.jit
def powers(s, top):
    """exp(s - top), exactly 1 for s = top; tl.exp would spend as much again on results below 1e-38."""
    return tl.exp2((s - top) * LOG2E)


@triton.jit
def joined(top, whole, some, add, head):
    """Head and tail in one sum, all over exp(top), since `top` may be large and would take the digits of what is added.

    Returns what a tail's `powers` and the head weigh in the sum, `top` or 0 for none, and the sum's log to base 2.
    """
    top = tl.where(top == LOWEST, 0.0, top)
    own = tl.where(some, tl.log2(tl.where(some, whole, 1.0)) + add * LOG2E, -float("inf"))
    head = (head - top) * LOG2E
    large = tl.maximum(own, head)
    large = tl.where(large == -float("inf"), 0.0, large)
    empty = ~some & (head == -float("inf"))
    norm = tl.log2(tl.where(empty, 1.0, tl.exp2(own - large) + tl.exp2(head - large))) + large
    factor = tl.where(some, tl.exp2(add * LOG2E - norm), 0.0)
    return factor, tl.exp2(head - norm), top, tl.where(empty, -float("inf"), norm)
