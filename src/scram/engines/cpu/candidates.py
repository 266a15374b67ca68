"""Candidates for a block of points at a time: plain loops over int32, which the vector units take."""

import numpy as np

from .compiled import compiled
from .noise import absorb


@compiled
def leave(key, key_before, memory, after, offered, flags):
    """Write a block's keys, and those that are news to the neighbors in the next sweep."""
    for p in range(len(after)):
        history = np.uint8(flags[p] << 1) | np.uint8(key[p] != key_before[p])
        after[p] = key[p]
        flags[p] = history
        offered[p] = key[p] if history & memory else -1


@compiled
def read_neighbors(offered, block, queries, to_point, place, step, extent, offers):
    """Write what the neighbors of the points in one direction offer, -1 for nothing; return whether any does."""
    low = max(-block.begin - to_point, 0)
    high = min(queries - block.begin - to_point, block.size)  # the points that may have one
    for p in range(block.size):
        offers[p] = -1
    if low >= high:
        return False
    from_neighbors = offered[block.first + to_point + low :]
    to = offers[low:high]
    at = place[low:high]
    news = np.int32(-1)
    step = np.int32(step)
    extent = np.int32(extent)
    for p in range(high - low):
        offer = from_neighbors[p]
        target = np.int32(at[p] + step)
        offer = offer if (target >= 0) & (target < extent) else np.int32(-1)
        to[p] = offer
        news = max(news, offer)
    return news >= 0


@compiled
def move(offers, to_key, line, candidate, size):
    """The offers moved along an axis, -1 where that leaves the grid; `line` is the axis' extent times its stride."""
    inverse = 1.0 / line
    step = np.int32(to_key)
    line = np.int32(line)
    for p in range(size):
        offer = offers[p]
        rest = np.int32(offer - np.int32(np.int32((offer + 0.5) * inverse) * line) - step)
        candidate[p] = np.int32(offer - step) if (offer >= 0) & (rest >= 0) & (rest < line) else np.int32(-1)


@compiled
def draw_around(noise, draw, center, reach, extent, drawn, size):
    """For each point a coordinate from the interval of that reach around its center, cut at the border."""
    word = np.uint32(draw)
    far = np.int32(reach)
    last = np.int32(extent - 1)
    for p in range(size):
        low = max(np.int32(center[p] - far), np.int32(0))
        high = min(np.int32(center[p] + far), last)
        choices = np.uint64(np.uint32(high - low + np.int32(1)))
        drawn[p] = low + np.int32((np.uint64(absorb(noise[p], word)) * choices) >> np.uint64(32))


@compiled
def follow(key, candidate, drawn, center, size):
    """Move the center of each point that took its candidate to what was drawn."""
    for p in range(size):
        new = drawn[p]
        old = center[p]
        center[p] = new if key[p] == candidate[p] else old


@compiled
def leave_out(candidate, barred, size):
    """No candidate where it is the key that is barred."""
    for p in range(size):
        new = candidate[p]
        candidate[p] = np.int32(-1) if new == barred[p] else new
