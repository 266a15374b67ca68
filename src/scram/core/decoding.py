"""One position after another: a cache of what came before, and the attention of the newest positions over it.

The rows are those of the whole call under causal order with clusters (`tails.stretches`). What all queries of a stretch
or of a tile read is computed once for them: the clusters when a stretch is complete, the routed keys at the first
query of a tile. A position then reads its own stretch, the routed keys and the clusters, all of which lie together.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import dispatch
from ..options import Auto, Impl
from ..results import Attended
from ..settings import Score, Search
from ..spec.bits import unpacked
from ..spec.schedule import TILE_QUERIES
from ..spec.scoring import accumulator, prepare_key, prepare_query
from ..spec.stretches import complete_count, fine_features, fine_values, look_back
from . import calls, checks, files, ops
from .resolve import Request, Resolved, resolve
from .tails.base import Tail, draw_seed
from .tails.clusters import Clusters
from .tails.stretches import Prefixes, global_label

HALF = (torch.float16, torch.bfloat16)


class Books(NamedTuple):
    """The clusters of the complete stretches, zeros for those to come; m stretches with C clusters each."""

    centers: Tensor  # [B, Hk, m, C, E]
    values: Tensor  # [B, Hk, m, C, F]
    slope: Tensor  # [B, Hk, m, E, F]
    sizes: Tensor  # int32 [B, Hk, m, C]
    label: Tensor  # int32 [B, Hk, m, S]
    variance: Tensor  # [B, Hk, m, E]
    spreads: Tensor  # [B, Hk, m, C]


class Cache:
    """Queries, keys and values of the positions so far, for attention in causal order one position after another.

    `append` adds positions in row-major order, `scram.decode` attends. The result is that of `scram.attention` with
    causal=True on the whole grid, for the rows that are there.

    Args:
        grid: the extents of the final grid; stretches and what runs follow from it.
        tail: `Clusters`, or "auto": those of `scram.attention` under causal order, and every key where dense attention
            is faster. A seed in it repeats the clusters of a whole call.
        search: "auto" or None: there is none. An explicit search is refused.
        scale, score, impl: as in `scram.attention`.
        half: whether the clusters are kept in 16 bits: half the bytes of them that each position reads.

    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 192, 16).unbind()
    >>> tail = Clusters(count=8, keys=16, stretch=64, seed=0)
    >>> cache = Cache((192,), tail=tail)
    >>> cache.append(q[:, :, :150], k[:, :, :150], v[:, :, :150])
    >>> whole = scram.attention(q, k, v, causal=True, tail=tail)
    >>> bool(torch.allclose(scram.decode(q[:, :, 100:150], cache), whole[:, :, 100:150], atol=1e-5))
    True
    >>> cache
    Cache(150 of 192 positions on grid (192,), 8 clusters of every 64 positions + 16 keys, batch=1, heads=2, cpu)
    """

    def __init__(
        self,
        grid: Sequence[int],
        *,
        tail: Tail | Auto = "auto",
        search: Search | Auto | None = "auto",
        scale: float | None = None,
        score: Score = "dot",
        impl: Impl = "auto",
        half: bool = False,
    ) -> None:
        self.grid = checks.grid(grid)
        if isinstance(search, Search):
            raise ValueError("a cache takes no search: its windows may hold any key; decode with search=None")
        if search not in (None, "auto"):
            raise TypeError(f"search must be None or 'auto', got {type(search).__name__} {search!r}")
        if not (isinstance(tail, Clusters) or tail == "auto"):
            raise TypeError(f"tail of a cache must be scram.Clusters or 'auto', got {type(tail).__name__} {tail!r}")
        if callable(score):
            raise ValueError("a cache takes no callable score: clusters need a score by name")
        self.tail = tail
        self.score: Score = score
        self.scale = scale
        self.impl: Impl = impl
        self.half = checks.flag("half", half)
        self.length = 0
        self._state: _State | None = None

    @property
    def positions(self) -> int:
        """N, of the whole grid."""
        return math.prod(self.grid)

    def append(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> None:
        """Add the next n positions, in row-major order.

        Args:
            q: queries [B, H, n, E]; they choose clusters and routed keys for later positions.
            k: keys [B, Hk, n, E].
            v: values [B, Hk, n, F].
            key_mask: bool [B, n], True = may be attended.
        """
        _check_new(q, k, v, key_mask)
        count = q.shape[2]
        if self.length + count > self.positions:
            raise ValueError(
                f"the grid {self.grid} has {self.positions} positions, {self.length} are there; got {count} more"
            )
        with torch.no_grad():
            if self._state is None:
                self._state = _State.of(self, q, k, v)
            self._state.check(q, k, v)
            self._state.append(self.length, q.detach(), k.detach(), v.detach(), key_mask)
        self.length += count

    def heads_of_keys(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the positions have them, none of them: for checks of more of their kind."""
        assert self._state is not None
        return self._state.k[:, :, :0, : q.shape[-1]], self._state.v[:, :, :0]

    def reset(self) -> None:
        """Forget all positions."""
        self.length = 0
        self._state = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file. Needs at least one position."""
        if self._state is None:
            raise ValueError("an empty cache has nothing to save; append positions first")
        settings = {
            "grid": self.grid,
            "length": self.length,
            "score": self.score,
            "half": self.half,
            **self._state.settings(),
        }
        metadata = {"format": "scram.Cache", "settings": json.dumps(settings)}
        files.save_tensors(self._state.tensors(self.length), metadata, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu", *, impl: Impl = "auto") -> Cache:
        """Read what `save` wrote; ValueError for any other file. Nothing is unpickled."""

        def build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Cache:
            settings = json.loads(metadata["settings"])
            tail = Clusters(**settings["tail"])
            cache = Cache(
                tuple(settings["grid"]),
                tail=tail,
                scale=settings["scale"],
                score=checks.one_of("score", settings["score"], ("dot", "cosine", "l2")),
                impl=impl,
                half=settings["half"],
            )
            moved = {name: x.to(device) for name, x in tensors.items()}
            length = checks.whole("length", settings["length"], 1)
            cache._state = _State.read(cache, moved, length, settings)
            cache.length = length
            return cache

        return files.load_tensors(path, build, "scram.Cache", SAVED)

    def __repr__(self) -> str:
        what = str(self.tail) if self._state is None else self._state.describe()
        shape = "" if self._state is None else self._state.shape()
        return f"Cache({self.length} of {self.positions} positions on grid {self.grid}, {what}{shape})"


SAVED = ("q", "k", "v", "usable", "broken", "centers", "values", "slope", "sizes", "label", "variance", "spreads")


def _check_new(q: Any, k: Any, v: Any, key_mask: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.instance(name, x, Tensor, "tensor")
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, H, n, width], positions in row-major order, got {tuple(x.shape)}")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ValueError(
            f"q, k and v must have as many positions, got {q.shape[2]}, {k.shape[2]} and {v.shape[2]}; append the same"
        )
    if key_mask is None:
        return
    checks.instance("key_mask", key_mask, Tensor, "tensor")
    want = (k.shape[0], k.shape[2])
    if tuple(key_mask.shape) != want or key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool [B, n] = {want}, got {key_mask.dtype} {tuple(key_mask.shape)}")


class _State:
    """The tensors of a cache, once it is known for what."""

    def __init__(self, cache: Cache, resolved: Resolved, q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> None:
        """From some positions, prepared for the score."""
        self.resolved = resolved
        self.cache = cache
        self.batch, self.heads, _, self.width = q.shape
        self.key_heads = k.shape[1]
        self.value_width = v.shape[-1]
        self.device = q.device
        self.dtypes = (q.dtype, k.dtype, v.dtype)
        self.wide = accumulator(v.dtype)
        assert isinstance(resolved.tail, Clusters)
        tail = resolved.tail.in_order(cache.positions)
        whole = -(-cache.positions // TILE_QUERIES) * TILE_QUERIES
        self.tail: Clusters = replace(tail, stretch=whole, seed=seed) if resolved.dense else replace(tail, seed=seed)
        assert self.tail.stretch is not None
        self.stretch: int = min(self.tail.stretch, whole)
        self.complete = complete_count(cache.positions, self.stretch)
        self.count = min(self.tail.count, self.stretch)
        self.back = look_back(cache.grid)
        positions = cache.positions
        # Zeros for what is not finite or masked; as wide as the engine takes them, so that no position converts them.
        size = (self.batch, self.key_heads, positions)
        kept = self.wide if resolved.engine.wide_inputs else None
        self.k = torch.zeros(*size, self.width, dtype=kept or k.dtype, device=self.device)
        self.v = torch.zeros(*size, self.value_width, dtype=kept or v.dtype, device=self.device)
        self.usable = torch.zeros(size, dtype=torch.bool, device=self.device)  # may be attended and are finite
        self.broken = torch.zeros(size, dtype=torch.bool, device=self.device)  # may be attended and are not
        self.room = min(positions, 2 * self.stretch + self.back + TILE_QUERIES) if self.complete else 0
        self.q = q.new_zeros(self.batch, self.heads, self.room, self.width)  # the queries from position `first` on
        self.first = 0
        self.books = self._empty_books()
        self.clustered = 0  # stretches
        self.seen: calls.SeenClusters | None = None
        self.seen_by = -1  # the stretch that sees it
        self.listed: calls.ListedKeys | None = None
        self.listed_for = -1  # the first position of their tile

    @staticmethod
    def of(cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> _State:
        """For the first positions."""
        whole = [x[:, :, :1].reshape(*x.shape[:2], *[1] * len(cache.grid), -1) for x in (q, k, v)]
        if not q.shape[2]:
            raise ValueError("the first positions of a cache must be at least one, got none")
        # Of the whole grid, without its memory.
        shaped_q, shaped_k, shaped_v = (x.expand(*x.shape[:2], *cache.grid, -1) for x in whole)
        request = Request(
            search="auto" if cache.tail == "auto" else None,
            tail=cache.tail,
            causal=True,
            scale=cache.scale,
            score=cache.score,
            impl=cache.impl,
        )
        resolved = resolve(shaped_q, shaped_k, shaped_v, request)
        tail = resolved.tail
        assert isinstance(tail, Clusters)
        seed = draw_seed() if tail.seed_tensor is None else tail.seed_tensor
        return _State(cache, resolved, *_prepared(q, k, v, cache.score), seed)

    def _empty_books(self) -> Books:
        size = (self.batch, self.key_heads, self.complete)
        kept = torch.bfloat16 if self.cache.half else self.wide

        def zeros(*shape: int, dtype: torch.dtype = self.wide) -> Tensor:
            return torch.zeros(*size, *shape, dtype=dtype, device=self.device)

        return Books(
            centers=zeros(self.count, self.width, dtype=kept),
            values=zeros(self.count, self.value_width, dtype=kept),
            slope=zeros(self.width, self.value_width),
            sizes=zeros(self.count, dtype=torch.int32),
            label=zeros(self.stretch, dtype=torch.int32) - 1,
            variance=zeros(self.width),
            spreads=zeros(self.count),
        )

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise where positions are of another kind than those that are there."""
        q, k, v = _prepared(q[:, :, :1], k[:, :, :1], v[:, :, :1], self.cache.score)
        want = (
            (self.batch, self.heads, self.width),
            (self.batch, self.key_heads, self.width),
            (self.batch, self.key_heads, self.value_width),
        )
        for name, x, size, dtype in zip("qkv", (q, k, v), want, self.dtypes, strict=True):
            got = (*x.shape[:2], x.shape[-1])
            if got != size or x.dtype != dtype or x.device != self.device:
                raise ValueError(
                    f"{name} must have (B, heads, width) = {size} as the positions before, {dtype} on {self.device}, "
                    f"got {got}, {x.dtype} on {x.device}"
                )

    def check_queries(self, q: Tensor) -> None:
        got = (*q.shape[:2], q.shape[-1])
        want = (self.batch, self.heads, self.width)
        if got != want or q.dtype != self.dtypes[0] or q.device != self.device:
            raise ValueError(
                f"q must have (B, heads, width) = {want} as the positions before, {self.dtypes[0]} on {self.device}, "
                f"got {got}, {q.dtype} on {q.device}"
            )

    # --- positions that come ---

    def append(self, length: int, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        """Positions from `length` on, one stretch after another."""
        q, k, v = _prepared(q, k, v, self.cache.score)
        end = length + q.shape[2]
        if self.complete:
            self._keep_queries(length, q)
        begin = length
        while begin < end:
            stop = min(end, (begin // self.stretch + 1) * self.stretch)
            some = slice(begin - length, stop - length)
            mask = None if key_mask is None else key_mask[:, some]
            self._add(begin, stop, k[:, :, some], v[:, :, some], mask)
            begin = stop

    def _add(self, begin: int, end: int, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
        """Positions of one stretch."""
        fine = fine_features(k) & fine_values(v)  # [B, Hk, n]
        allowed = torch.ones_like(fine) if key_mask is None else key_mask.unsqueeze(1)
        usable = fine & allowed
        self.k[:, :, begin:end] = torch.where(usable.unsqueeze(-1), k, 0)
        self.v[:, :, begin:end] = torch.where(usable.unsqueeze(-1), v, 0)
        self.usable[:, :, begin:end] = usable
        self.broken[:, :, begin:end] = allowed & ~fine
        if self.clustered < self.complete and end == (self.clustered + 1) * self.stretch:
            self._cluster(self.clustered)
            self.clustered += 1

    def _keep_queries(self, length: int, q: Tensor) -> None:
        """Those of the open stretch, and of as many before the new ones as choose for their tile."""
        end = length + q.shape[2]
        if end - self.first > self.q.shape[2]:
            least = min(self.clustered * self.stretch, max(0, length - self.back - TILE_QUERIES))
            least = max(self.first, least)
            kept = self.q[:, :, least - self.first : length - self.first]
            self.q = q.new_zeros(*q.shape[:2], max(self.room, end - least), self.width)
            self.q[:, :, : length - least] = kept
            self.first = least
        self.q[:, :, length - self.first : end - self.first] = q

    def _cluster(self, number: int) -> None:
        some = slice(number * self.stretch, (number + 1) * self.stretch)
        k = self.k[:, :, some]
        v = self.v[:, :, some]
        q = self.q[:, :, some.start - self.first : some.stop - self.first]
        call = calls.ClusterCall(
            q=torch.where(fine_features(q).unsqueeze(-1), q, 0).to(self.v.dtype),
            k=k.to(self.v.dtype),
            v=v,
            key_mask=self.usable[:, :, some],
            warm_centers=None,
            warm_values=None,
            seed=self._seed(),
            rows=None,
            count=self.tail.count,
            steps=self.tail.steps,
            scale=self.resolved.scale,
        )
        codebook = ops.cluster(self.resolved.engine, call)
        for name, x in self.books._asdict().items():
            x[:, :, number] = getattr(codebook, name)

    def _seed(self) -> Tensor:
        assert self.tail.seed_tensor is not None
        return self.tail.seed_tensor

    # --- positions that attend ---

    def see(self, number: int) -> calls.SeenClusters:
        """What the queries of a stretch see of the clusters."""
        if self.seen is None or self.seen_by != number:
            books = self.books
            slope = books.slope if self.tail.first_order else None
            prefixes = Prefixes.of(books.sizes, books.variance, books.spreads, slope)
            count = number * self.count
            raises = self.tail.raises_weights(self.cache.score)
            self.seen = calls.SeenClusters(
                centers=books.centers.flatten(2, 3)[:, :, :count],
                values=books.values.flatten(2, 3)[:, :, :count],
                log_sizes=prefixes.sizes[:, :, number, :count].to(self.wide).log(),
                variance=prefixes.variance[:, :, number].contiguous(),
                spreads=prefixes.spreads[:, :, number, :count].contiguous() if raises else None,
                slope=None if prefixes.slope is None else prefixes.slope[:, :, number].contiguous(),
            )
            self.sizes = prefixes.sizes[:, :, number, :count]
            self.spreads = prefixes.spreads[:, :, number, :count]
            self.seen_by = number
        return self.seen

    def listed_at(self, tile: int) -> calls.ListedKeys | None:
        """The routed keys of the tile that begins at a position."""
        if not self.tail.keys:
            return None
        if self.listed is None or self.listed_for != tile:
            self.listed = self._list(tile)
            self.listed_for = tile
        return self.listed

    def _list(self, tile: int) -> calls.ListedKeys:
        number = tile // self.stretch
        seen = self.see(number)
        choosing = self.q.new_zeros(self.batch, self.heads, TILE_QUERIES, self.width)
        begin = tile - self.back
        if begin + TILE_QUERIES > 0:
            skipped = max(0, -begin)
            known = self.q[:, :, max(begin, 0) - self.first : begin + TILE_QUERIES - self.first]
            choosing[:, :, skipped:] = torch.where(fine_features(known).unsqueeze(-1), known, 0)
        call = calls.RouteCall(
            q=choosing.to(self.v.dtype),
            centers=seen.centers.to(self.wide),
            sizes=self.sizes,
            variance=seen.variance,
            spreads=self.spreads,
            keys=self.tail.keys,
            scale=self.resolved.scale,
        )
        bits = ops.route(self.resolved.engine, call).routes[:, :, 0]  # [B, H, W]
        chosen = unpacked(bits, self.sizes.shape[-1])  # [B, H, C]
        group = self.heads // self.key_heads
        keys = number * self.stretch
        label = global_label(self.books.label[:, :, :number], self.count, keys).long()
        label = label.repeat_interleave(group, 1)  # [B, H, M], of the keys before the stretch
        counts = (label >= 0) & chosen.gather(2, label.clamp(min=0))
        most = min(self.tail.keys, keys)
        slot = torch.where(counts, counts.cumsum(2) - 1, most).clamp(max=most)
        every = torch.arange(keys, device=label.device).expand_as(label)
        key = torch.full((*label.shape[:2], most + 1), -1, dtype=torch.int64, device=label.device)
        key = key.scatter(2, slot, torch.where(counts, every, -1))[:, :, :most]  # [B, H, K]
        exists = key >= 0
        row = torch.arange(self.heads, device=key.device)[:, None] // group
        batch = torch.arange(self.batch, device=key.device)[:, None, None]
        at = (batch, row, key.clamp(min=0))
        k, v = (torch.where(exists.unsqueeze(-1), x[at], 0) for x in (self.k, self.v))
        return calls.ListedKeys(k, v, exists, chosen)

    # --- what is written and read ---

    def settings(self) -> dict[str, Any]:
        tail = {
            name: getattr(self.tail, name)
            for name in ("count", "keys", "first_order", "second_order", "steps", "stretch")
        }
        return {
            "tail": {**tail, "seed": int(self._seed())},
            "scale": self.resolved.scale,
            "first": self.first,
            "clustered": self.clustered,
        }

    def tensors(self, length: int) -> dict[str, Tensor]:
        return {
            "q": self.q[:, :, : length - self.first] if self.complete else self.q,
            "k": self.k[:, :, :length].to(self.dtypes[1]),
            "v": self.v[:, :, :length].to(self.dtypes[2]),
            "usable": self.usable[:, :, :length],
            "broken": self.broken[:, :, :length],
            **self.books._asdict(),
        }

    @staticmethod
    def read(cache: Cache, tensors: dict[str, Tensor], length: int, settings: dict[str, Any]) -> _State:
        q, k, v = (tensors[name] for name in "qkv")
        _check_new(k, k, v, None)
        if q.ndim != 4 or k.shape[2] != length or length > cache.positions:
            raise ValueError(f"q, k and v must be [B, H, n, width] of {length} positions, got {tuple(k.shape)}")
        if any(
            tensors[name].shape != k.shape[:3] or tensors[name].dtype != torch.bool for name in ("usable", "broken")
        ):
            raise ValueError(f"usable and broken must be bool [B, Hk, n] = {tuple(k.shape[:3])}")
        # What runs follows from the shapes before features were prepared for the score.
        width = k.shape[-1] - (2 if cache.score == "l2" else 0)
        before = (x.new_zeros(*x.shape[:2], 1, size) for x, size in ((q, width), (k, width), (v, v.shape[-1])))
        state = _State.of(cache, *before)
        first = checks.whole("first", settings["first"], 0)
        held = length - first if state.complete else 0
        wrong = held < 0 or q.shape[2] != held
        if wrong or q.shape[:2] != (k.shape[0], state.heads) or q.shape[-1] != k.shape[-1]:
            raise ValueError(f"q must hold the positions from {first} to {length}, got {tuple(q.shape)}")
        clustered = checks.whole("clustered", settings["clustered"], 0)
        if clustered != min(length // state.stretch, state.complete):
            raise ValueError(f"clustered must be the complete stretches of {length} positions, got {clustered}")
        state._take(tensors, length, first, clustered)
        return state

    def _take(self, tensors: dict[str, Tensor], length: int, first: int, clustered: int) -> None:
        for name in ("k", "v", "usable", "broken"):
            getattr(self, name)[:, :, :length] = tensors[name]
        self.first = first
        self._keep_queries(first, tensors["q"])
        self.clustered = clustered
        for name, x in self.books._asdict().items():
            if tensors[name].shape != x.shape or tensors[name].dtype != x.dtype:
                raise ValueError(f"{name} must be {x.dtype} {tuple(x.shape)}, got {tuple(tensors[name].shape)}")
            x.copy_(tensors[name])
        label = self.books.label
        if bool(((label < -1) | (label >= self.count)).any()):
            raise ValueError(f"label must lie in -1..{self.count - 1}")

    def describe(self) -> str:
        return "every key" if not self.complete else str(replace(self.tail, seed=None).describe())

    def shape(self) -> str:
        return f", batch={self.batch}, heads={self.heads}, {self.device}"


def check_newest(cache: Cache, q: Any) -> None:
    """Raise where q is not of the newest positions of a cache."""
    checks.instance("q", q, Tensor, "tensor")
    state = cache._state
    if state is None:
        raise ValueError("the cache is empty; append the keys and values of the positions first")
    if q.ndim != 4 or not 1 <= q.shape[2] <= cache.length:
        raise ValueError(f"q must be [B, H, n, E] of the newest n of {cache.length} positions, got {tuple(q.shape)}")
    state.check_queries(prepare_query(q[:, :, :1], cache.score))


def _prepared(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor, Tensor]:
    return prepare_query(q, score), prepare_key(k, score), v


def decode(cache: Cache, q: Tensor) -> Attended:
    """Of the newest positions q [B, H, n, E]: out [B, H, n, F] and lse [B, H, n]."""
    state = cache._state
    count = q.shape[2]
    assert state is not None
    q = prepare_query(q, cache.score)
    begin = cache.length - count
    outs = []
    sums = []
    while begin < cache.length:
        tile = begin // TILE_QUERIES * TILE_QUERIES
        end = min(tile + TILE_QUERIES, cache.length)
        some = q[:, :, begin - cache.length + count : end - cache.length + count]
        out, lse = _attend(state, some, begin, end)
        outs.append(out)
        sums.append(lse)
        begin = end
    return Attended(torch.cat(outs, 2), torch.cat(sums, 2))


def _attend(state: _State, q: Tensor, begin: int, end: int) -> Attended:
    """Of queries [B, H, n, E] of one tile, at positions begin .. end - 1."""
    number = begin // state.stretch
    some = slice(number * state.stretch, end)
    seen = state.see(number) if state.complete and number else None
    call = calls.DecodeCall(
        q=q,
        k=state.k[:, :, some],
        v=state.v[:, :, some],
        usable=state.usable[:, :, some],
        broken=state.broken[:, :, some],
        seen=seen,
        listed=None if seen is None else state.listed_at(begin // TILE_QUERIES * TILE_QUERIES),
        scale=state.resolved.scale,
    )
    out, lse = dispatch.engine(state.resolved.engine.name).decode(call)
    return Attended(out.to(state.dtypes[2]), lse)
