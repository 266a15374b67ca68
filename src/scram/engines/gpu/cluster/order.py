"""Keys in the order of their labels, in Triton: a counting sort whose bits are the same every time.

Blocks of keys count their labels, sums over the blocks say where the keys of each begin, and a key goes behind those
of its label that come before it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .assign import LAST, NONE

NOTHING = tl.constexpr(NONE)
CHUNK = tl.constexpr(256)  # labels that are looked at at a time


class Counting(NamedTuple):
    """What the kernels of the sort hand to each other. Label C is that of keys without one."""

    counts: Tensor  # int32 [R, blocks, C + 1], keys of each label; then of those of earlier blocks; then next places
    totals: Tensor  # int32 [R, C + 1]
    starting: Tensor  # int32 [R, C + 1], the place of the first key of each label
    blocks: int


class OrderConfig(NamedTuple):
    """What the kernels of the sort are compiled for."""

    BLOCK_S: int  # keys of a block
    BINS: int  # at least C + 1
    TURN: int  # keys that are placed at a time


class PrefixConfig(NamedTuple):
    """What `prefix_kernel` is compiled for."""

    LABELS: int
    BLOCKS: int  # of keys, at a time


@triton.jit
def label_kernel(best, masked, label, counting, keys, count, CONFIG: tl.constexpr):
    """Labels from the best scores, which begin anew, and how many keys of a block have each. Program (row, block)."""
    row = (tl.program_id(0) // counting.blocks).to(tl.int64)
    block = tl.program_id(0) % counting.blocks
    at = block * CONFIG.BLOCK_S + tl.arange(0, CONFIG.BLOCK_S)  # [BK]
    inside = at < keys  # [BK]
    both = tl.load(best + row * keys + at, mask=inside, other=NOTHING)  # [BK]
    tl.store(best + row * keys + at, tl.full([CONFIG.BLOCK_S], NOTHING, tl.int64), mask=inside)
    name = tl.where(both > NOTHING, (both & LAST).to(tl.int32) ^ LAST, -1)  # [BK]
    if masked.mask is not None:
        place = masked.mask + row // masked.group * keys + at  # [BK]
        name = tl.where(tl.load(place, mask=inside, other=0) != 0, name, -1)
    tl.store(label + row * keys + at, name, mask=inside)
    name = tl.where(name < 0, count, name)
    outside = tl.sum((at >= keys).to(tl.int32), 0)
    number = tl.histogram(name, CONFIG.BINS)  # [BINS]
    c = tl.arange(0, CONFIG.BINS)  # [BINS]
    number -= tl.where(c == count, outside, 0)
    tl.store(counting.counts + (row * counting.blocks + block) * (count + 1) + c, number, mask=c <= count)


@triton.jit
def prefix_kernel(counting, count, CONFIG: tl.constexpr):
    """Counts of a block become those of all blocks before it. Program (row, some labels)."""
    programs = (count + CONFIG.LABELS) // CONFIG.LABELS
    row = (tl.program_id(0) // programs).to(tl.int64)
    c = tl.program_id(0) % programs * CONFIG.LABELS + tl.arange(0, CONFIG.LABELS)  # [LABELS]
    before = tl.zeros([CONFIG.LABELS], tl.int32)  # [LABELS]
    for begin in range(0, counting.blocks, CONFIG.BLOCKS):
        block = begin + tl.arange(0, CONFIG.BLOCKS)  # [BLOCKS]
        place = (
            counting.counts + (row * counting.blocks + block)[:, None] * (count + 1) + c[None, :]
        )  # [BLOCKS, LABELS]
        inside = (block < counting.blocks)[:, None] & (c <= count)[None, :]  # [BLOCKS, LABELS]
        number = tl.load(place, mask=inside, other=0)  # [BLOCKS, LABELS]
        tl.store(place, before[None, :] + tl.cumsum(number, 0) - number, mask=inside)
        before += tl.sum(number, 0)
    tl.store(counting.totals + row * (count + 1) + c, before, mask=c <= count)


@triton.jit
def order_kernel(label, order, counting, keys, count, CONFIG: tl.constexpr):
    """Program (row, block)."""
    row = (tl.program_id(0) // counting.blocks).to(tl.int64)
    block = tl.program_id(0) % counting.blocks
    next_place = counting.counts + (row * counting.blocks + block) * (count + 1)
    begins = tl.cast(0, tl.int32)
    for begin in range(0, count + 1, CHUNK):
        c = begin + tl.arange(0, CHUNK)  # [CHUNK]
        exists = c <= count
        number = tl.load(counting.totals + row * (count + 1) + c, mask=exists, other=0)  # [CHUNK]
        start = begins + tl.cumsum(number, 0) - number  # [CHUNK]
        tl.store(counting.starting + row * (count + 1) + c, start, mask=exists & (c * 0 + block == 0))
        tl.store(next_place + c, tl.load(next_place + c, mask=exists, other=0) + start, mask=exists)
        begins += tl.sum(number, 0)
    tl.debug_barrier()  # what threads of the program wrote others read
    lane = tl.arange(0, CONFIG.TURN)  # [TURN]
    for turn in range(0, CONFIG.BLOCK_S, CONFIG.TURN):
        at = block * CONFIG.BLOCK_S + turn + lane  # [TURN]
        inside = at < keys  # [TURN]
        name = tl.load(label + row * keys + at, mask=inside, other=-1)  # [TURN]
        name = tl.where(inside & (name < 0), count, name)
        same = name[:, None] == name[None, :]  # [TURN, TURN]
        # How many have the same label, and above bit 16 how many of them come before.
        both = tl.sum(tl.where(same, tl.where(lane[None, :] < lane[:, None], 0x10001, 1), 0), 1)  # [TURN]
        rank = both >> 16  # [TURN]
        place = tl.load(next_place + name, mask=inside, other=0) + rank  # [TURN]
        tl.store(order + row * keys + place, at, mask=inside)
        tl.debug_barrier()
        is_last = inside & (rank + 1 == (both & 0xFFFF))  # [TURN]
        tl.store(next_place + name, place + 1, mask=is_last)
        tl.debug_barrier()
