"""A checked call of the distributed attention: its settings, and what each rank holds of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from .. import errors, validate
from ..codebook import Codebook
from ..defaults import SEARCH, default_tail
from ..estimators import Clusters, Hybrid
from ..noise import draw_seed, noise
from ..options import Impl, Weight, Window
from ..scoring import accumulator, default_scale
from ..types import Matches, Score, Search
from .mesh import Layout, Ranks, packed_size


@dataclass(frozen=True)
class Call:
    """Settings of a call that were checked on this rank."""

    search: Search
    tail: Clusters | Hybrid | None
    radius: tuple[int, ...]
    causal: bool
    scale: float
    score: Score
    weight: Weight
    window: Window
    impl: Impl
    matches: Matches | None
    halo: int | None
    extra: tuple[Tensor, Tensor] | None
    dropout_p: float
    warm: Matches | None
    book: Codebook | None  # in place of a tail
    automatic: bool

    def words(self) -> int:
        """A number that differs where settings do; seeds aside, since rank 0's count."""
        named: str | Score = self.score
        if callable(named):
            named = getattr(named, "__qualname__", type(named).__qualname__)
        seedless = [None if x is None else replace(x, seed=None) for x in (self.search, self.tail)]
        rest = (self.radius, self.causal, self.scale, self.weight, self.window, self.impl, self.matches is None)
        kappa = 0 if self.warm is None else self.warm.index.shape[-1]
        more = self.halo, self.extra is None, self.dropout_p, kappa, self.book, self.automatic
        return crc32(repr((seedless, named, rest, more)).encode())


def checked(
    q: Any, k: Any, v: Any, key_mask: Any, search: Any, radius: int | Sequence[int], tail: Any, causal: bool,
    scale: float | None, score: Score, weight: Weight, window: Window, impl: Impl, matches: Matches | None,
    halo: int | None, extra: tuple[Tensor, Tensor] | None = None, dropout_p: float = 0.0, warm: Matches | None = None,
) -> Call:  # fmt: skip
    """The call, if this rank's arguments are valid; a shard may be empty."""
    whole_q, whole_k, whole_v = (_not_empty(x, 2) for x in (q, k, v))
    errors.queries_keys(whole_q, whole_k)
    if isinstance(key_mask, Tensor):
        key_mask = _not_empty(key_mask, key_mask.ndim - k.ndim + 3)
    validate.pairs(whole_q, whole_k, False, key_mask, score)
    errors.flag("causal", causal)
    if v.dtype != q.dtype:
        raise TypeError(
            f"v must have q's dtype {q.dtype} where grids are cut into shards, got {v.dtype}; use q.float()"
        )
    radii = validate.attend(whole_q, whole_k, whole_v, radius, scale, weight, extra, dropout_p, window)
    settings = errors.search_settings(search, SEARCH)
    validate.search(whole_q, whole_k, settings, None)
    validate.search_engine(impl, whole_q, score, settings)
    if halo is not None:
        errors.whole("halo", halo, 0)
    errors.tail(tail)
    chosen = default_tail(weight, causal, score) if isinstance(tail, str) else tail
    if isinstance(chosen, Hybrid):
        errors.hybrid_only(weight)
    elif chosen is not None:
        errors.clusters_only(weight, causal, score)
        if isinstance(chosen, Clusters) and chosen.fit:
            raise ValueError("Clusters(fit=...) fits the queries of one machine; leave fit out, raise count instead")
    if warm is not None:
        errors.instance("warm", warm, Matches, "scram.Matches", "; scram.search returns one")
        if warm.index.shape[:-1] != q.shape[:-1]:
            got = tuple(warm.index.shape[:-1])
            raise ValueError(f"warm must have one entry per query of this rank, {tuple(q.shape[:-1])}, got {got}")
    unsaid = isinstance(search, str) and isinstance(tail, str) and impl == "auto"
    automatic = unsaid and matches is None and warm is None
    factor = default_scale(scale, q.shape[-1], score, weight)
    pair, book = None if extra is None else (extra[0], extra[1]), chosen if isinstance(chosen, Codebook) else None
    more = (matches, halo, pair, dropout_p, warm, book, automatic)
    return Call(
        settings,
        None if isinstance(chosen, Codebook) else chosen,
        radii,
        causal,
        factor,
        score,
        weight,
        window,
        impl,
        *more,
    )


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

    @staticmethod
    def of(ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, call: Call) -> Shards:
        """All ranks say what they have; raises on all of them where that does not fit."""
        seeds = [getattr(x, "seed_tensor", None) for x in (call.search, call.tail)]
        seed = int(draw_seed() if seeds[0] is None else seeds[0])
        tail_seed = seed if seeds[1] is None else int(seeds[1])
        dropout_seed = int(draw_seed()) if call.dropout_p else 0
        axes = 0 if key_mask is None else key_mask.ndim - k.ndim + 3  # 1 or 2
        extents = [[*x.shape[3:-1], *[0] * (7 - x.ndim)] for x in (q, k)]
        grads = [int(torch.is_grad_enabled() and x.requires_grad) for x in (q, k, v)]
        extra = call.extra or ()
        grads += [extra[0].shape[2] if extra else 0]
        grads += [int(torch.is_grad_enabled() and any(x.requires_grad for x in extra))]
        mine = [0, q.shape[2], k.shape[2], axes, seed, tail_seed, dropout_seed, call.words(), *q.shape[:2], k.shape[1]]
        mine += [q.ndim - 3, q.shape[-1], v.shape[-1], errors.DTYPES.index(q.dtype), *extents[0], *extents[1], *grads]
        everyone = ranks.exchange(mine)
        ranks.told(None, everyone)
        _agreed(everyone)
        said = dict(zip(FIELDS, zip(*everyone, strict=True), strict=True))
        if sum(said["rows of k"]) == 0:
            raise ValueError("k must have at least one row on some rank, all shards are empty")
        most = max(said["axes of key_mask"])
        if most:
            if key_mask is None:
                key_mask = torch.ones(k.shape[0], *k.shape[2:-1], dtype=torch.bool, device=k.device)
            if key_mask.ndim < k.ndim - 1:
                key_mask = key_mask.unsqueeze(1)
            if most == 2:
                key_mask = key_mask.expand(-1, q.shape[1], *key_mask.shape[2:])
        rows = tuple(said["rows of q"]), tuple(said["rows of k"])
        drawn = [said[f"seed of {name}"][0] for name in ("search", "tail", "dropout")]
        return Shards(ranks, q, k, v, key_mask, call, *rows, *drawn)

    def share(self, total: int, rank: int) -> int:
        """The part of `total` drawn keys that is that rank's, by its keys; rounded up, one at least."""
        return max(1, -(-total * self.keys[rank] // sum(self.keys)))

    def count(self, rank: int) -> int:
        """Clusters of that rank's keys: not more than keys."""
        tail, keys = self.call.tail, self.keys[rank] * math.prod(self.k.shape[3:-1])
        assert isinstance(tail, Clusters)
        return min(tail.count, keys)

    def layout(self, rank: int) -> Layout:
        """The tensors of that rank's keys which travel: k, v, with clusters centres and values, then constants."""
        (batch, heads, _, *rest, width), wide = self.k.shape, accumulator(self.v.dtype)
        rows, kind = self.keys[rank], self.k.dtype
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((batch, heads, rows, *rest, x.shape[-1]), kind) for x in (self.k, self.v)
        ]
        constants: list[tuple[tuple[int, ...], torch.dtype]] = []
        if self.key_mask is not None:
            constants.append(((batch, self.key_mask.shape[1], rows, *rest), torch.bool))
        if isinstance(self.call.tail, Clusters):
            if self.key_mask is not None and self.key_mask.shape[1] > 1:
                heads = self.q.shape[1]
            width += 2 * (self.call.score == "l2")
            clusters = (batch, heads, self.count(rank) if rows else 0)
            parts += [((*clusters, x), wide) for x in (width, self.v.shape[-1])]
            constants += [((batch, heads, rows, *rest), torch.int32), (clusters, torch.int32)]
        return [*parts, *constants]

    @property
    def differentiable(self) -> int:
        """How many of the tensors that travel carry gradients, the first ones."""
        return 4 if isinstance(self.call.tail, Clusters) else 2

    @property
    def message_size(self) -> int:
        """Bytes of the longest message: all are as long."""
        return max(packed_size(self.layout(rank)) for rank in range(self.ranks.size))

    def travelling(self, book: Codebook | None) -> list[Tensor]:
        """This rank's tensors of `layout`, with `book` of its own keys; None where it has none, or there is no need."""
        tensors, constants = [self.k, self.v], [] if self.key_mask is None else [self.key_mask]
        if not isinstance(self.call.tail, Clusters):
            return [*tensors, *constants]
        if book is None:
            empty = [self.k.new_zeros(shape, dtype=dtype) for shape, dtype in self.layout(self.ranks.rank)]
            reach = self.k.sum() + self.v.sum()  # no element holds it: gradients find their way
            made = [x + reach for x in empty[2:4]]
            return [*tensors, *made, *constants, *empty[-2:]]
        return [*tensors, book.centres, book.values, *constants, book.label, book.sizes]

    @contextmanager
    def dropping(self, *first: int) -> Iterator[None]:
        """Dropout inside is drawn for the shards that begin at these queries and keys, whenever that is."""
        if not self.call.dropout_p:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(shard_seed(self.dropout_seed, *first)) & (2**63 - 1))
            yield

    def extra_stop(self) -> int:
        """The rank whose keys are attended together with `extra`: the first in a ring that has any."""
        rank, size = self.ranks.rank, self.ranks.size
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
