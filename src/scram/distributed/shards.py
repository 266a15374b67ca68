"""A checked call of the distributed attention: its settings, and what each rank holds of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..core import checks
from ..core.resolve import (
    Request,
    as_search,
    automatic_search,
    check_start,
    check_warm_matches,
    default_tail,
    resolve,
    tail_kind,
)
from ..core.tails.base import NO_TAIL, Tail, as_tail, draw_seed
from ..core.tails.clusters import Clusters, Codebook, settings_of
from ..results import Matches
from ..settings import Score, Search
from ..spec.noise import noise
from ..spec.scoring import accumulator
from .mesh import Layout, Ranks, packed_size


@dataclass(frozen=True)
class Call:
    """A call that was checked on this rank.

    Args:
        given: its options as they were given.
        request: the same with settings for "auto", and without the mask, which `Shards` has.
        halo: as in `attention`.
    """

    given: Request
    request: Request
    halo: int | None

    @property
    def search(self) -> Search | None:
        assert not isinstance(self.request.search, str)
        return self.request.search

    @property
    def tail(self) -> Tail:
        return as_tail(self.request.tail, NO_TAIL)

    @property
    def clusters(self) -> Clusters | None:
        """The settings of clusters that are still to be made."""
        return self.request.tail if isinstance(self.request.tail, Clusters) else None

    @property
    def codebook(self) -> Codebook | None:
        """Clusters that were given."""
        return self.tail.codebook

    def checksum(self) -> int:
        """A number that differs where settings do; seeds aside, since rank 0's count."""
        request = self.request
        score: str | Score = request.score
        if callable(score):
            score = getattr(score, "__qualname__", type(score).__qualname__)
        search = None if self.search is None else replace(self.search, seed=None)
        settings = [search, self.tail.of_part(None), score]
        if self.codebook is not None:
            settings += [settings_of(self.codebook), self.codebook.slope is None]
        options = (request.radius, request.causal, request.scale, request.weight, request.impl)
        kappa = 0 if request.warm is None else request.warm.index.shape[-1]
        given = (request.matches is None, request.extra is None, request.dropout_p, kappa)
        return crc32(repr((settings, options, given, self.halo, self.given.is_automatic())).encode())


def checked(q: Any, k: Any, v: Any, request: Request, halo: int | None) -> Call:
    """The call, if this rank's arguments are valid; a shard may be empty."""
    whole_q, whole_k, whole_v = (_not_empty(x, 2) for x in (q, k, v))
    checks.queries_keys(whole_q, whole_k)
    key_mask = request.key_mask
    if isinstance(key_mask, Tensor):
        key_mask = _not_empty(key_mask, key_mask.ndim - k.ndim + 3)
    if isinstance(v, Tensor) and v.dtype != q.dtype:
        raise TypeError(
            f"v must have q's dtype {q.dtype} where grids are cut into shards, got {v.dtype}; use q.float()"
        )
    checks.flag("causal", request.causal)
    # Matches, codebooks, causal order and what a search starts from are of the whole grid.
    local = request._replace(key_mask=key_mask, causal=False, tail=None, matches=None, warm=None)
    tail, search = _settings(q, request)
    searched = None if search is None else replace(search, start="auto")
    resolved = resolve(whole_q, whole_k, whole_v, local._replace(search=searched))
    if halo is not None:
        checks.whole("halo", halo, 0)
    tail.check(tail_kind(request))
    check_start(search, tail)
    check_warm_matches(request)
    if search is None and request.matches is None and tail is not NO_TAIL and not tail.stands_alone:
        raise ValueError(f"search=None takes tail=None, clusters or a codebook, got {tail}; pass search='auto'")
    if request.warm is not None:
        checks.instance("warm", request.warm, Matches, "scram.Matches", "; scram.search returns one")
        got = request.warm.index.shape[:-1]
        if got != q.shape[:-1]:
            want = tuple(q.shape[:-1])
            raise ValueError(f"warm must have one entry per query of this rank, {want}, got {tuple(got)}")
    extra = None if request.extra is None else (request.extra[0], request.extra[1])
    settings = request._replace(
        search=search,
        tail=None if tail is NO_TAIL else tail,
        radius=resolved.radius,
        scale=resolved.scale,
        extra=extra,
        key_mask=None,
    )
    return Call(request, settings, halo)


def _settings(q: Tensor, request: Request) -> tuple[Tail, Search | None]:
    """The tail and the search, with "auto" replaced; neither of them: attention over every key."""
    device = q.device.type
    default = default_tail(device, request.weight, request.causal, request.score)
    if request.search is None:
        return as_tail(request.tail, NO_TAIL if request.matches is None else default), None
    tail = as_tail(request.tail, default)
    if isinstance(request.search, str):
        as_search(request.search)
        return tail, automatic_search(device, tail, request)
    return tail, request.search


def _not_empty(x: Any, axis: int) -> Any:
    """x, with one row where it has none along the sharded axis: what is checked of it does not depend on their number.

    >>> _not_empty(torch.zeros(1, 1, 0, 5, 8), 2).shape
    torch.Size([1, 1, 1, 5, 8])
    """
    if not isinstance(x, Tensor) or not 1 <= axis < x.ndim or x.shape[axis] != 0:
        return x
    return x.new_zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]))


# What every rank says of its call; all but those in OWN must agree.
FIELDS = (
    *("failed", "rows of q", "rows of k", "axes of key_mask", "seed of search", "seed of tail"),
    *("seed of dropout", "settings"),
    *("batch", "heads of q", "heads of k", "rank of the grid", "width of q", "width of v", "dtype"),
    *("second extent of q", "third extent of q", "fourth extent of q"),
    *("second extent of k", "third extent of k", "fourth extent of k"),
    *("requires_grad of q", "requires_grad of k", "requires_grad of v", "extra keys", "requires_grad of extra"),
)
OWN = FIELDS[:7]


@dataclass(frozen=True)
class Shards:
    """What each rank holds: q [B, H, queries[rank], *, E], k and v [B, Hk, keys[rank], *, E or F]."""

    ranks: Ranks
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # [B, 1, *G'] or [B, H, *G'] of this rank's keys; None: no rank has one
    call: Call
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    seed: int
    tail_seed: int
    dropout_seed: int = 0
    apart: bool = False  # the keys of each rank have clusters of their own, as in a ring

    @staticmethod
    def of(ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, call: Call) -> Shards:
        """All ranks say what they have; raises on all of them where that does not fit."""
        request = call.request
        search_seed = None if call.search is None else call.search.seed_tensor
        seed = int(draw_seed() if search_seed is None else search_seed)
        tail_seed = seed if call.tail.seed_tensor is None else int(call.tail.seed_tensor)
        dropout_seed = int(draw_seed()) if request.dropout_p else 0
        axes = 0 if key_mask is None else key_mask.ndim - k.ndim + 3  # 1 or 2
        extents = [[*x.shape[3:-1], *[0] * (7 - x.ndim)] for x in (q, k)]
        grads = [int(torch.is_grad_enabled() and x.requires_grad) for x in (q, k, v)]
        extra = request.extra or ()
        grads += [extra[0].shape[2] if extra else 0]
        grads += [int(torch.is_grad_enabled() and any(x.requires_grad for x in extra))]
        numbers = [
            0,
            q.shape[2],
            k.shape[2],
            axes,
            seed,
            tail_seed,
            dropout_seed,
            call.checksum(),
            *q.shape[:2],
            k.shape[1],
        ]
        numbers += [
            q.ndim - 3,
            q.shape[-1],
            v.shape[-1],
            checks.DTYPES.index(q.dtype),
            *extents[0],
            *extents[1],
            *grads,
        ]
        everyone = ranks.exchange(numbers)
        ranks.raise_failures(None, everyone)
        _agreed(everyone)
        by_field = dict(zip(FIELDS, zip(*everyone, strict=True), strict=True))
        if sum(by_field["rows of k"]) == 0:
            raise ValueError("k must have at least one row on some rank, all shards are empty")
        most = max(by_field["axes of key_mask"])
        if most:
            if key_mask is None:
                key_mask = torch.ones(k.shape[0], *k.shape[2:-1], dtype=torch.bool, device=k.device)
            if key_mask.ndim < k.ndim - 1:
                key_mask = key_mask.unsqueeze(1)
            if most == 2:
                key_mask = key_mask.expand(-1, q.shape[1], *key_mask.shape[2:])
        return Shards(
            ranks=ranks,
            q=q,
            k=k,
            v=v,
            key_mask=key_mask,
            call=call,
            queries=tuple(by_field["rows of q"]),
            keys=tuple(by_field["rows of k"]),
            seed=by_field["seed of search"][0],
            tail_seed=by_field["seed of tail"][0],
            dropout_seed=by_field["seed of dropout"][0],
        )

    def share(self, rank: int) -> Fraction:
        """The part of all keys that is that rank's."""
        return Fraction(self.keys[rank], sum(self.keys))

    @property
    def request(self) -> Request:
        return self.call.request

    def without_tail(self) -> Shards:
        request = self.request._replace(tail=None)
        return replace(self, call=replace(self.call, request=request))

    @property
    def scale(self) -> float:
        assert self.request.scale is not None
        return self.request.scale

    def count(self, rank: int) -> int:
        """Clusters of that rank's keys: not more than keys."""
        clusters = self.call.clusters
        assert clusters is not None
        if self.apart:
            clusters = clusters.of_part(None, self.share(rank))
        return min(clusters.count, self.keys[rank] * math.prod(self.k.shape[3:-1]))

    def layout(self, rank: int) -> Layout:
        """The tensors of that rank's keys which travel: k, v, of clusters what carries gradients, then constants."""
        return list(self._layout(rank).values())

    def _layout(self, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """`layout`, by name."""
        batch, heads, _, *rest, width = self.k.shape
        value_width = self.v.shape[-1]
        grid = (self.keys[rank], *rest)
        kind = self.k.dtype
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "k": ((batch, heads, *grid, width), kind),
            "v": ((batch, heads, *grid, value_width), kind),
        }
        constants: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.key_mask is not None:
            constants["key_mask"] = ((batch, self.key_mask.shape[1], *grid), torch.bool)
        if self.call.clusters is None:
            return parts | constants
        if self.key_mask is not None and self.key_mask.shape[1] > 1:
            heads = self.q.shape[1]
        wide = accumulator(self.v.dtype)
        width += 2 * (self.request.score == "l2")
        axes = width if self.keys[rank] else 0  # where all keys come together a rank without any has no part in sums
        clusters = (batch, heads, self.count(rank))
        parts["centers"] = ((*clusters, width), wide)
        parts["values"] = ((*clusters, value_width), wide)
        if self.call.clusters.first_order:
            parts["slope"] = ((batch, heads, axes, value_width), wide)
        constants["label"] = ((batch, heads, *grid), torch.int32)
        constants["sizes"] = (clusters, torch.int32)
        constants["variance"] = ((batch, heads, axes), wide)
        constants["spreads"] = (clusters, wide)
        return parts | constants

    @property
    def differentiable(self) -> int:
        """How many of the tensors that travel carry gradients, the first ones."""
        clusters = self.call.clusters
        return 2 if clusters is None else 4 + clusters.first_order

    @property
    def message_size(self) -> int:
        """Bytes of the longest message: all are as long."""
        return max(packed_size(self.layout(rank)) for rank in range(self.ranks.size))

    def traveling(self, book: Codebook | None) -> list[Tensor]:
        """This rank's tensors of `layout`, with `book` of its own keys; None where it has none, or there is no need."""
        layout = self._layout(self.ranks.rank)
        named = {"k": self.k, "v": self.v}
        if self.key_mask is not None:
            named["key_mask"] = self.key_mask
        missing = [name for name in layout if name not in named]
        if book is not None:
            named |= {name: getattr(book, name) for name in missing}
        elif missing:
            named |= {name: self.k.new_zeros(layout[name][0], dtype=layout[name][1]) for name in missing}
            reach = self.k.sum() + self.v.sum()  # no element holds it: gradients find their way
            named |= {name: named[name] + reach for name in list(layout)[2 : self.differentiable]}
        return [named[name] for name in layout]

    def arrived(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        """Tensors of `layout`, of some rank or all: keys, values, mask, and those of clusters by name."""
        named = dict(zip(self._layout(0), tensors, strict=True))
        k = named.pop("k")
        v = named.pop("v")
        return k, v, public_mask(named.pop("key_mask", None)), named

    @contextmanager
    def dropping(self, *first: int) -> Iterator[None]:
        """Dropout inside is drawn for the shards that begin at these queries and keys, whenever that is."""
        if not self.request.dropout_p:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(shard_seed(self.dropout_seed, *first)) & (2**63 - 1))
            yield

    def extra_stop(self) -> int:
        """The rank whose keys are attended together with `extra`: the first in a ring that has any."""
        rank = self.ranks.rank
        size = self.ranks.size
        return next(origin for stop in range(size) if self.keys[origin := (rank - stop) % size])

    def first_query(self, rank: int) -> int:
        """The number of a rank's first query on the whole grid."""
        return math.prod(self.q.shape[3:-1]) * sum(self.queries[:rank])

    def first_key(self, rank: int) -> int:
        """The number of a rank's first key on the whole grid."""
        return math.prod(self.k.shape[3:-1]) * sum(self.keys[:rank])


def public_mask(mask: Tensor | None) -> Tensor | None:
    """A mask [B, 1 or H, *G'] as functions of the package take it."""
    return mask.squeeze(1) if mask is not None and mask.shape[1] == 1 else mask


def shard_seed(seed: int, *first: int) -> Tensor:
    """The seed of a shard that begins at these queries and keys; the first one has the seed itself.

    >>> shard_seed(7, 0), shard_seed(7, 64) == shard_seed(7, 128)
    (tensor(7), tensor(False))
    """
    whole = torch.tensor(seed, dtype=torch.int64, device="cpu")
    if not any(first):
        return whole
    words = [word for number in first for word in (number & 0xFFFFFFFF, number >> 32)]
    return (noise(whole, *words, 0) << 31) ^ noise(whole, *words, 1)


def _agreed(everyone: list[list[int]]) -> None:
    for name, numbers in zip(FIELDS, zip(*everyone, strict=True), strict=True):
        odd = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if name not in OWN and odd is not None:
            got = "other settings" if name == "settings" else f"{numbers[odd]}, rank 0 {numbers[0]}"
            raise ValueError(f"all ranks must call with the same {name}: rank {odd} has {got}")
