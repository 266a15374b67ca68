"""The keys that the queries of a row share, in Triton: drawn, laid side by side, told apart from those of the windows.

What every query of a row needs of a shared key is computed once: its features and values in whole blocks, its
coordinates, the log of how many keys it represents. A place without a key has the log of 0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....calls import DrawnTailCall
from ....draws import by_heads, shared_tail
from ....grid import grid_of
from ..attend.windows import masked_by, match_of
from ..noise import absorb, row_state, seed_argument
from ..primitives import divide, geometry, points
from ..runtime.block_sizes import tile_pieces
from ..runtime.launch import Kernel, cached

BLOCK_K = 64  # shared keys of a block
SPARE = 20 << 10  # bytes of shared memory for what passes between threads
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e38)  # where a maximum begins: -inf - -inf would be NaN


class SharedKeys(NamedTuple):
    """The shared keys of all rows, as kernels take them. m, E, F are whole blocks."""

    k: Tensor  # [rows, m, E]
    v: Tensor  # [rows, m, F]
    places: Tensor  # int32 [rows, rank + 1, m], coordinates and name
    logs: Tensor  # float32 [rows, m], log of how many keys each represents
    # For the variance, else None: values measured from `middle` in its units and their squares, and what they are
    # measured from, the mean of a few values, and in, the largest distance.
    away: Tensor | None  # [2, rows, m, F]
    middle: Tensor | None  # float32 [2, rows, F]
    drawn: int  # how many of the m are drawn


class SharedRow(NamedTuple):
    """The shared keys of a row, in a kernel: pointers, and m."""

    k: Any
    v: Any
    places: Any
    logs: Any
    padded: Any


def draw_names(call: DrawnTailCall) -> tuple[Tensor, Tensor]:
    """names and represents [B, H, m] of `draws.shared_tail`, not sorted; the latter [B, H, 0] unless stratified."""
    q, rows, keys = call.q, call.q.shape[0] * call.q.shape[1], math.prod(grid_of(call.k))
    ranked = torch.empty((rows, keys), dtype=torch.int64, device=q.device)
    if ranked.numel():
        flags = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
        kernel = Kernel(rank_kernel, -(-rows * keys // 1024), flags)
        kernel(ranked, masked_by(q, call.k, call.key_mask), seed_argument(call.seed, call.rows), rows, keys)
    names, represents = shared_tail(ranked, grid_of(call.k), call.samples, call.stratified, ascending=False)
    return by_heads(q, names, represents)


@triton.jit
def rank_kernel(ranked, masked, seed, rows, keys, BLOCK: tl.constexpr):
    """`draws.ranked_keys`."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = slot < tl.cast(rows, tl.int64) * keys
    row, key = (slot // keys).to(tl.int32), (slot % keys).to(tl.int32)
    rank = (absorb(row_state(seed, row), key).to(tl.int64) << 31) | key.to(tl.int64)
    if masked.mask is not None:
        ok = tl.load(masked.mask + (row // masked.heads).to(tl.int64) * keys + key, mask=valid, other=0) != 0
        rank = tl.where(ok, rank, 0x7FFFFFFFFFFFFFFF)
    tl.store(ranked + slot, rank, mask=valid)


def stages(device: torch.device, most: int, each: int, fixed: int) -> int:
    """How many blocks of `each` bytes are loaded ahead: what shared memory holds besides `fixed`, `most` at most."""
    return max(1, min(most, (_shared_memory(device) - SPARE - fixed) // each))


@cached
def _shared_memory(device: torch.device) -> int:
    """Bytes of a program; without a device the least that supported ones have."""
    if device.type != "cuda":
        return 99 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 99 << 10)


def side_by_side(call: DrawnTailCall, names: Tensor, represents: Tensor, spread: bool) -> SharedKeys:
    """The shared keys of the names [B, H, m], each for `represents` keys if not empty; `spread`: for the variance."""
    q, k, v, (rows, drawn) = call.q, call.k, call.v, names.flatten(0, 1).shape
    flags = tile_pieces(k.shape[-1], v.shape[-1], False)
    row, value_row, blocks = flags["ROW"], flags["VROW"], -(-drawn // BLOCK_K)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    padded, width, value_width = blocks * BLOCK_K, row.W * row.PIECES, value_row.W * value_row.PIECES
    # A variance needs few digits. Those of bfloat16 were too few where one key has most of the weight: 2 % off.
    kind = torch.float32 if v.dtype == torch.float32 else torch.float16
    shared = SharedKeys(
        empty(rows, padded, width, dtype=k.dtype),
        empty(rows, padded, value_width, dtype=v.dtype),
        empty(rows, k.ndim - 2, padded, dtype=torch.int32),
        empty(rows, padded, dtype=torch.float32),
        empty(2, rows, padded, value_width, dtype=kind) if spread else None,
        empty(2, rows, value_width, dtype=torch.float32) if spread else None,
        drawn,
    )
    how = {"CAUSAL": call.causal, "BLOCK_K": BLOCK_K, **flags, "num_warps": 4, "enable_fp_fusion": True}
    given = (k.contiguous(), v.contiguous(), names, represents if represents.numel() else None)
    kernel = Kernel(gather_kernel, rows * blocks, how)
    kernel(*given, q.shape[1] // k.shape[1], geometry(grid_of(q), grid_of(k)), shared)
    return shared


@triton.jit
def finite(x):
    """x with zeros for what is not finite."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def block_of(base, at, there, piece, ROW: tl.constexpr):
    """Rows base[at] as [len(at), W]: piece number `piece` of their width; zeros where there is nothing."""
    e, here = piece * ROW.W + tl.arange(0, ROW.W)[None, :], there[:, None]
    if ROW.E != ROW.W:
        here = here & (e < ROW.E)
    return tl.load(base + at.to(tl.int64)[:, None] * ROW.E + e, mask=here, other=0.0)


@triton.jit
def blocks_of(base, at, there, ROW: tl.constexpr):
    """Rows base[at] as all their pieces."""
    pieces = ()
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        pieces += (block_of(base, at, there, n, ROW),)
    return pieces


@triton.jit
def whole_block(base, at, piece, ROW: tl.constexpr):
    """Rows base[at] that are whole blocks."""
    return tl.load(base + at[:, None] * (ROW.W * ROW.PIECES) + (piece * ROW.W + tl.arange(0, ROW.W))[None, :])


@triton.jit
def gather_kernel(
    k, v, names, represents, group, geo, shared, CAUSAL: tl.constexpr, BLOCK_K: tl.constexpr, ROW: tl.constexpr,
    VROW: tl.constexpr,
):  # fmt: skip
    """Program (row, block of keys) of `side_by_side`."""
    keys, drawn = points(geo.k), shared.drawn
    blocks = (drawn + BLOCK_K - 1) // BLOCK_K
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    padded, k_row, v_row = blocks * BLOCK_K, k + row // group * keys * ROW.E, v + row // group * keys * VROW.E
    at = block * BLOCK_K + tl.arange(0, BLOCK_K)
    name = tl.load(names + row * drawn + at, mask=at < drawn, other=keys)
    there = name < keys
    name = tl.where(there, name, 0)
    slot = row * padded + at
    for n in tl.static_range(tl.constexpr(ROW.PIECES)):
        e = n * ROW.W + tl.arange(0, ROW.W)
        to = shared.k + slot[:, None] * (ROW.W * ROW.PIECES) + e[None, :]
        tl.store(to, block_of(k_row, name, there, n, ROW))
    log = tl.zeros([BLOCK_K], tl.float32)
    if represents is not None:
        log = tl.log(tl.load(represents + row * drawn + at, mask=there, other=1.0))
    tl.store(shared.logs + slot, tl.where(there, log, -float("inf")))
    place, rank = shared.places + row * (len(geo.k) + 1) * padded + at, len(geo.k)
    tl.store(place + rank * padded, name)
    rest = name
    for a in tl.static_range(len(geo.k) - 1, -1, -1):
        up = divide(rest, geo.magic[a]) if a > 0 else rest * 0
        tl.store(place + a * padded, rest - up * geo.k[a])
        rest = up

    few = tl.arange(0, BLOCK_K)
    first = tl.load(names + row * drawn + few, mask=few < drawn, other=keys)
    some = first < keys
    first = tl.where(some, first, 0)
    for n in tl.static_range(tl.constexpr(VROW.PIECES)):
        f = n * VROW.W + tl.arange(0, VROW.W)
        value, to = block_of(v_row, name, there, n, VROW), slot[:, None] * (VROW.W * VROW.PIECES) + f[None, :]
        tl.store(shared.v + to, value)
        if shared.away is not None:
            sums = tl.sum(finite(block_of(v_row, first, some, n, VROW)).to(tl.float32), 0)
            middle = sums / tl.maximum(tl.sum(some.to(tl.float32), 0), 1.0)
            unit = tl.zeros([VROW.W], tl.float32)
            for start in range(0, drawn, BLOCK_K):
                other = tl.load(names + row * drawn + start + few, mask=start + few < drawn, other=keys)
                theirs = finite(block_of(v_row, tl.where(other < keys, other, 0), other < keys, n, VROW))
                far = tl.where((other < keys)[:, None], tl.abs(theirs.to(tl.float32) - middle[None, :]), 0.0)
                unit = tl.maximum(unit, tl.max(far, 0))
            unit = tl.where(unit > 0, unit, 1.0)
            if block == 0:
                tl.store(shared.middle + row * (VROW.W * VROW.PIECES) + f, middle)
                rows = tl.num_programs(0) // blocks
                tl.store(shared.middle + (rows + row) * (VROW.W * VROW.PIECES) + f, unit)
            if CAUSAL:  # as the products of the values themselves have it
                value = finite(value)
            apart = ((value.to(tl.float32) - middle[None, :]) / unit[None, :]).to(shared.away.dtype.element_ty)
            all_values = (tl.num_programs(0) * BLOCK_K).to(tl.int64) * (VROW.W * VROW.PIECES)
            tl.store(shared.away + to, apart)
            squared = apart.to(tl.float32) * apart.to(tl.float32)
            tl.store(shared.away + all_values + to, squared.to(shared.away.dtype.element_ty))


@triton.jit
def shared_row(row, t, MODE: tl.constexpr, ROW: tl.constexpr, VROW: tl.constexpr):
    """The shared keys of a row."""
    shared, padded = t.shared, (t.shared.drawn + MODE.BLOCK_K - 1) // MODE.BLOCK_K * MODE.BLOCK_K
    return SharedRow(
        shared.k + row * padded * (ROW.W * ROW.PIECES),
        shared.v + row * padded * (VROW.W * VROW.PIECES),
        shared.places + row * (len(t.geo.k) + 1) * padded,
        shared.logs + row * padded,
        padded,
    )


@triton.jit
def corner_of(match, t):
    """The first coordinates, last axis first, of the window around a match of each query; far off for none."""
    y, low = tl.maximum(match, 0), ()
    for a in tl.static_range(len(t.reach) - 1, -1, -1):
        up = divide(y, t.geo.magic[a]) if a > 0 else y * 0
        first = y - up * t.geo.k[a] - t.reach[a]
        low += (tl.where(match >= 0, first, -2 * t.reach[a] - 1),)
        y = up
    return low


@triton.jit
def corners_of(here, t, MODE: tl.constexpr):
    """`corner_of` the first MATCHES matches, one after the other."""
    low = ()
    for e in tl.static_range(tl.constexpr(MODE.MATCHES)):
        low += corner_of(match_of(e, here.exists, here, t), t)
    return low


@triton.jit
def name_of(at, row, t):
    """The names of shared keys."""
    return tl.load(row.places + len(t.reach) * row.padded + at)


@triton.jit
def in_tail(at, log, low, row, here, t, MODE: tl.constexpr):
    """Which shared keys [BLOCK_K] count for which queries [BLOCK_Q]: those that exist, come up to the query under
    CAUSAL, and lie in none of its windows, or of its tile's."""
    ok = (log > -float("inf"))[None, :]
    if MODE.CAUSAL:
        ok = ok & (name_of(at, row, t)[None, :] <= here.query[:, None])
    if MODE.TILED:
        attended = tl.load(t.heads.attended + here.tile * row.padded + at) != 0
        ok = ok & here.exists[:, None] & ~attended[None, :]
    else:
        ok = not_near(ok, at, low, row, here, t, MODE)
    return ok


@triton.jit
def not_near(ok, at, low, row, here, t, MODE: tl.constexpr):
    """Which shared keys are `ok` and in none of the query's own windows."""
    x = ()
    for a in tl.static_range(len(t.reach) - 1, -1, -1):
        x += (tl.load(row.places + a * row.padded + at),)
    for e in tl.static_range(tl.constexpr(MODE.MATCHES)):
        ok = ok & ~covered(x, low, e, t.reach)
    if MODE.MATCHES == 0:
        ok = ok & here.exists[:, None]  # a loop keeps the shape
        for e in range(t.kappa):
            one = corner_of(match_of(e, here.exists, here, t), t)
            ok = ok & ~covered(x, one, 0, t.reach)
    return ok


@triton.jit
def covered(x, low, e: tl.constexpr, reach):
    """Which shared keys [BLOCK_K], by their coordinates, lie in the e-th windows [BLOCK_Q]."""
    near = None
    for n in tl.static_range(len(reach)):
        span = tl.cast(2 * reach[len(reach) - 1 - n], tl.uint32)
        within = (x[n][None, :] - low[e * len(reach) + n][:, None]).to(tl.uint32) <= span
        near = within if near is None else near & within
    return near


@triton.jit
def product(a, b, total):
    """total + a @ b; float32 to nearly all of its digits."""
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def products(mine, base, at, MODE: tl.constexpr, ROW: tl.constexpr):
    """Rows of the queries, in pieces, times rows base[at] that are whole blocks: [BLOCK_Q, BLOCK_K]."""
    total = tl.zeros([MODE.BLOCK_Q, MODE.BLOCK_K], tl.float32)
    for n in tl.static_range(len(mine)):
        total = product(mine[n], tl.trans(whole_block(base, at, n, ROW)), total)
    return total


@triton.jit
def tail_scores(start, mine, low, row, here, t, MODE: tl.constexpr, ROW: tl.constexpr):
    """BLOCK_K shared keys from `start` on: where they are, their scores, and which count for which query.

    The score is scale <q, k> plus the log of how many keys each represents, -inf where it does not count.
    """
    at = start + tl.arange(0, MODE.BLOCK_K)
    log = tl.load(row.logs + at)
    if MODE.SCORES_FIRST:
        s = products(mine, row.k, at, MODE, ROW)
        ok = in_tail(at, log, low, row, here, t, MODE)
    else:
        ok = in_tail(at, log, low, row, here, t, MODE)
        s = products(mine, row.k, at, MODE, ROW)
    s = s * t.scale + log[None, :]
    return at, tl.where(ok, s, -float("inf")), ok


@triton.jit
def powers(s, top):
    """exp(s - top), exactly 1 for s = top; tl.exp would spend as much again on results below 1e-38."""
    return tl.exp2((s - top) * LOG2E)


@triton.jit
def joined(top, whole, some, add, head):
    """Head and tail in one sum, all over exp(top), since `top` may be large and would take the digits of what is added.

    Returns the factors of a tail's `powers` and of the head in the sum, `top` or 0 for none, and the sum's log2.
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
