"""Rows of queries that neighbors hold: a shard's search runs on them too, so that the field of matches has no seam.

Matches go from query to query in jumps. Without a halo the last rows of a shard have neighbors on one side only, and
find less. The matches of the halo are dropped: its rows are searched by the rank that holds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import pipeline
from ..core.pipeline import execute
from ..core.tails.clusters import Codebook
from ..results import Matches
from .mesh import Layout, pack, packed_size, unpack
from .shards import Shards

JUMPS = 2  # that a match makes through the halo; rows at a border find as much as in one process (docs/distributed.md)


class Halo(NamedTuple):
    """Rows of x [B, H, n, *, X] that lie before and after those of this rank, each [B, H, rows, *, X]."""

    before: Tensor
    after: Tensor

    def around(self, x: Tensor) -> Tensor:
        return torch.cat([self.before, x, self.after], 2)

    def without(self, x: Tensor) -> Tensor:
        begin = self.before.shape[2]
        end = x.shape[2] - self.after.shape[2]
        return x[:, :, begin:end].contiguous()


def halo_rows(shards: Shards) -> int:
    """How many rows on either side; all ranks know the same."""
    search = shards.call.search
    halo = shards.call.halo
    if shards.request.matches is not None or search is None or search.sweeps == 0:
        return 0
    wanted = JUMPS * max(search.jumps, default=0) if halo is None else halo
    return min(wanted, max(shards.queries) if halo is None else sum(shards.queries))


def exchanged(shards: Shards, x: Tensor, rows: int) -> Halo | None:
    """The halo of x [B, H, n, *, X], which is cut like q; all ranks call it. None: no rank has one.

    Shards may be thinner than the halo: then it comes from several ranks.
    """
    ranks = shards.ranks
    if rows == 0 or sum(n > 0 for n in shards.queries) < 2:
        return None
    x = x.detach()
    first = sum(shards.queries[: ranks.rank])
    messages = []
    layouts = []
    for other in range(ranks.size):
        begin, end = _shared(shards, ranks.rank, other, rows)
        messages.append(_packed(x[:, :, begin - first : end - first]))
        begin, end = _shared(shards, other, ranks.rank, rows)
        layouts.append([((*x.shape[:2], end - begin, *x.shape[3:]), x.dtype)])
    received = ranks.all_to_all(messages, [packed_size(layout) for layout in layouts])
    parts = [unpack(message, layout)[0] for message, layout in zip(received, layouts, strict=True)]
    before = torch.cat([x[:, :, :0], *parts[: ranks.rank]], 2)
    after = torch.cat([x[:, :, :0], *parts[ranks.rank + 1 :]], 2)
    return Halo(before, after)


def _shared(shards: Shards, holder: int, reader: int, rows: int) -> tuple[int, int]:
    """The rows of the whole grid that `holder` has and `reader` wants for its halo, begin and end."""
    queries = shards.queries
    first = sum(queries[:holder])
    if holder == reader or queries[reader] == 0:
        return first, first
    wanted = sum(queries[:reader])
    begin = max(first, wanted - rows)
    end = min(first + queries[holder], wanted + queries[reader] + rows)
    return (begin, end) if begin < end else (first, first)


def _packed(x: Tensor) -> Tensor:
    layout: Layout = [(tuple(x.shape), x.dtype)]
    return pack([x], packed_size(layout))


def search_shard(
    shards: Shards,
    halo: Halo | None,
    seed: Tensor,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    book: Codebook | None = None,
    warm: Matches | None = None,
) -> Matches | None:
    """The matches of this rank's queries q [B, H, n, *, E] among keys k; None without a search.

    With clusters of these keys, `book`, each query starts from the best key that its tile routes. Tiles are those of
    q with its halo: where either begins off a border of a tile of the whole grid, they are not those of one process.
    `warm` has the matches of the halo too.
    """
    search = shards.call.search
    if search is None:
        return None
    start = "auto" if search.start == "routed" else search.start  # the share of a small shard may route no key
    request = shards.request._replace(
        search=replace(search, seed=seed, start=start),
        tail=None if book is None else book.detach(),
        key_mask=mask,
        warm=warm,
        matches=None,
        extra=None,
    )
    wide = q.detach() if halo is None else halo.around(q.detach())
    matches = execute(pipeline.search, wide, k.detach(), None, request)
    if halo is None:
        return matches
    return Matches(halo.without(matches.index), halo.without(matches.score), matches.key_grid)
