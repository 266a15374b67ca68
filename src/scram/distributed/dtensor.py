"""DTensors: each rank calls a function on the rows that it holds, with the noise of the whole call.

q says how. On every dimension of its mesh it is cut along the batch or the heads, or whole; the other tensors lie as q
does, or are whole, and then each rank takes its part of them. Nothing is sent but a seed where none is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..core import dtensors, pipeline
from ..core.pipeline import Stage
from ..core.resolve import Request, automatic_search, default_tail, goes_dense, resolve
from ..core.tails.base import Shard as Part
from ..core.tails.base import Tail, as_tail, draw_seed
from ..core.tails.clusters import Codebook, with_tensors
from ..results import Matches, Routes

Placements = tuple[Placement, ...]
Span = tuple[int, int]  # begin and end
WITHOUT_VALUES = (pipeline.search, pipeline.route)  # stages that read queries and keys alone


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the local calls of a compiled function run as they are
def call_parts(stage: Stage[Any], q: Any, k: Any, v: Any, request: Request) -> Any:
    """What a stage of `pipeline` returns for DTensors: DTensors that lie as q does."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, DTensor) and not (name == "v" and stage in WITHOUT_VALUES):
            raise TypeError(f"{name} must be a DTensor as q is, got {type(x).__name__}")
    held = Held.of(q, k)
    # Whether it is dense is decided by the whole call: what each rank holds of it may be small.
    if v is not None and goes_dense(q, k, v, request):
        request = request._replace(search=None, tail=None)
    elif isinstance(request.search, str):
        tail = _tail_of(q, request)
        search = automatic_search(q.device.type, tail, request)
        request = request._replace(search=search) if search else request._replace(search=None, tail=tail)
    if held.split and v is not None and _tail_of(q, request).needs_all_queries:
        raise ValueError(
            f"{held.key_heads} key heads do not divide among the ranks that {held.shape[1]} heads of q are cut for: "
            "no rank has all queries that clusters of a key head need; use Shard(0), tail=scram.DrawnKeys() or None"
        )
    local = _Local(held, q.ndim - 3)
    own = request._replace(**{name: local.of(name, x) for name, x in request._asdict().items()})
    own_q = local.of("q", q)
    own_k = local.of("k", k)
    own_v = None if v is None else local.of("v", v)
    part = Part(held.rows, lambda: _one_seed(held.mesh, q.device))
    resolved = resolve(own_q, own_k, own_v, own, attends=stage not in WITHOUT_VALUES)
    return _wrapped(stage(resolved, own_q, own_k, own_v, part), held, request.key_mask)


def _tail_of(q: Tensor, request: Request) -> Tail:
    default = default_tail(q.device.type, request.weight, request.causal, request.score)
    return as_tail(request.tail, default, windows=False)


def _one_seed(mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A seed that all ranks of the mesh have, that of the first one; it stays on the device."""
    seed = draw_seed()
    if mesh.size() == 1:
        return seed
    seed = seed.reshape(1).to(device)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.broadcast(seed, group=mesh.get_group(dim), group_src=0)
    return seed.reshape(())


# --- what a rank holds ---


@dataclass(frozen=True)
class Held:
    """What this rank holds of q [B, H, ..], and needs of k and v [B, Hk, ..]."""

    mesh: DeviceMesh
    placements: Placements
    shape: tuple[int, ...]  # B, H
    key_heads: int  # Hk
    batch: Span
    heads: Span
    split: bool  # some key head serves heads of several ranks
    rows: Tensor | None  # int64 [b, h], the numbers of the rows held; None: all

    @staticmethod
    def of(q: DTensor, k: Tensor) -> Held:
        mesh = q.device_mesh
        coordinate = q.device_mesh.get_coordinate()
        if coordinate is None:
            raise ValueError("this rank is not on the mesh of q; call with the ranks of the mesh")
        held = _held(mesh, tuple(coordinate), tuple(q.placements), tuple(q.shape[:2]), k.shape[1], q.device)
        return held if held.mesh is mesh else replace(held, mesh=mesh)  # equal meshes may have other groups

    @property
    def empty(self) -> bool:
        return self.batch[0] == self.batch[1] or self.heads[0] == self.heads[1]

    def heads_of_keys(self) -> Sequence[int]:
        """The key heads that this rank's heads read, each once; where `split`, one for each head or one for all."""
        group = self.shape[1] // self.key_heads
        begin, end = self.heads
        if not self.split:
            return range(begin // group, end // group)
        each = [head // group for head in range(begin, end)]
        return each[:1] if len(set(each)) == 1 else each


@lru_cache(maxsize=256)
def _held(
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    placements: Placements,
    shape: tuple[int, ...],
    key_heads: int,
    device: torch.device,
) -> Held:
    _check_placements("q", placements, 2)
    batch, heads = _spans(shape, mesh, placements)
    cuts = math.prod(mesh.size(dim) for dim, place in enumerate(placements) if place.is_shard(1))
    split = key_heads != shape[1] and key_heads > 0 and key_heads % cuts != 0
    rows = None
    if (batch, heads) != ((0, shape[0]), (0, shape[1])):
        every = torch.arange(shape[0] * shape[1], device="cpu").reshape(shape)
        rows = every[slice(*batch), slice(*heads)].contiguous().to(device)
    return Held(mesh, placements, shape, key_heads, batch, heads, split, rows)


dtensors.caches.append(_held.cache_clear)


def _check_placements(name: str, placements: Placements, axes: int) -> None:
    """Shard along one of the first `axes` axes, or Replicate."""
    allowed = [Replicate(), *(Shard(axis) for axis in range(axes))]
    if not all(place in allowed and type(place) in (Shard, Replicate) for place in placements):
        axis = "Shard(0), along the batch, Shard(1), along the heads," if axes == 2 else "Shard(0), along the batch,"
        raise ValueError(
            f"{name} must be placed by {axis} or Replicate() on every dimension of its mesh, got {placements}; use "
            f"{name}.redistribute(...), or scram.distributed.attention for shards along a grid"
        )


def _spans(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> tuple[Span, Span]:
    """This rank's part of the first two axes, cut as torch cuts: into equal parts, but for the last ones."""
    spans: list[Span] = [(0, shape[0]), (0, shape[1])]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, place in enumerate(placements):
        if isinstance(place, Shard):
            begin, end = spans[place.dim]
            each = -(-(end - begin) // mesh.size(dim))
            first = min(begin + each * coordinate[dim], end)
            spans[place.dim] = first, min(first + each, end)
    return spans[0], spans[1]


class _Local:
    """From the arguments of the whole call to those of this rank; one tensor stays one."""

    def __init__(self, held: Held, rank: int) -> None:
        self.held = held
        self.rank = rank
        self.known = dict[int, Tensor]()

    def of(self, name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(name, x, name in ("k", "v"))
        if isinstance(x, tuple) and x and isinstance(x[0], Tensor):  # extra keys and values
            return tuple(self._tensor(name, one, True) for one in x)
        if isinstance(x, Matches):
            return Matches(self._tensor(name, x.index, False), self._tensor(name, x.score, False), x.key_grid)
        if isinstance(x, Routes):
            return Routes(self._tensor(name, x.bits, False), x.grid, x.count)
        if isinstance(x, Codebook):
            return with_tensors(x, {part: self._of_codebook(name, x, part) for part in _tensors(x)})
        return x

    def _of_codebook(self, name: str, book: Codebook, part: str) -> Tensor:
        if book.grid is not None:
            raise ValueError("a codebook under causal order takes no DTensors; pass tail=scram.Clusters()")
        x = getattr(book, part)
        by_keys = part != "key_mask" and x.shape[1] != self.held.shape[1]
        return self._tensor("key_mask" if part == "key_mask" else name, x, by_keys)

    def _tensor(self, name: str, x: Tensor, by_keys: bool) -> Tensor:
        if id(x) not in self.known:
            self.known[id(x)] = self._part(name, x, by_keys)
        return self.known[id(x)]

    def _part(self, name: str, x: Tensor, by_keys: bool) -> Tensor:
        """This rank's part of x [B, H or Hk, ..], or of a mask [B, *G'] without heads."""
        held = self.held
        axes = 1 if name == "extra_mask" else x.ndim - self.rank if name == "key_mask" else 2
        plainly = axes == 2 and not (held.split or held.empty)
        if plainly and isinstance(x, DTensor) and x.placements == held.placements and x.device_mesh == held.mesh:
            local: Tensor = x.to_local()
            return local
        placements: Placements = (Replicate(),) * held.mesh.ndim
        shape = x.shape
        if isinstance(x, DTensor):
            placements = tuple(x.placements)
            x = self._own(name, x, axes, by_keys)
        elif x.requires_grad:
            raise TypeError(f"{name} must be a DTensor as q is where gradients reach it; use distribute_tensor")
        return self._cut(x, _spans(shape, held.mesh, placements), axes, by_keys)

    def _own(self, name: str, x: DTensor, axes: int, by_keys: bool) -> Tensor:
        """What this rank holds of x; where it is whole and q is cut all ranks add to its gradient."""
        held = self.held
        if x.device_mesh != held.mesh:
            raise ValueError(f"{name} must be on the mesh of q, {held.mesh}, got {x.device_mesh}")
        _check_placements(name, tuple(x.placements), axes)
        same = [
            place_of_x in (place_of_q, Replicate())
            for place_of_x, place_of_q in zip(x.placements, held.placements, strict=True)
        ]
        if not all(same):
            raise ValueError(
                f"{name} must be placed as q is, {held.placements}, or Replicate(), got {tuple(x.placements)}"
            )
        if by_keys and held.split and any(place.is_shard(1) for place in x.placements):
            raise ValueError(
                f"{held.key_heads} key heads do not divide among the ranks that {held.shape[1]} heads of q are cut "
                f"for; place {name} by Replicate()"
            )
        pairs = zip(x.placements, held.placements, strict=True)
        local: Tensor = x.to_local(
            grad_placements=[place_of_x if place_of_x == place_of_q else Partial() for place_of_x, place_of_q in pairs]
        )
        return local

    def _cut(self, x: Tensor, spans: tuple[Span, Span], axes: int, by_keys: bool) -> Tensor:
        """Of a local tensor that holds `spans`, what this rank's rows need."""
        held = self.held
        first, _ = spans[0]
        begin, end = held.batch
        if x.shape[0] != end - begin:
            x = x[begin - first : end - first]
        if axes == 2:
            first = spans[1][0]
            heads = held.heads_of_keys() if by_keys else range(*held.heads)
            if isinstance(heads, range) and x.shape[1] != len(heads):
                x = x[:, heads.start - first : heads.stop - first]
            elif not isinstance(heads, range):
                x = x[:, heads[0] - first : heads[0] - first + 1] if len(heads) == 1 else x[:, list(heads)]
        if not held.empty:
            return x
        # No rows: a batch of none, of all heads.
        every = held.key_heads if by_keys else held.shape[1]
        return x[:0] if axes == 1 else x[:0, :0].reshape(0, every, *x.shape[2:])


def _tensors(x: Any) -> dict[str, Tensor]:
    """The tensors among the fields of a dataclass."""
    return {field.name: value for field in fields(x) if isinstance(value := getattr(x, field.name), Tensor)}


# --- what comes back ---


def _wrapped(value: Any, held: Held, key_mask: Tensor | None) -> Any:
    """A result, or a part of one, as that of the whole call."""
    if isinstance(value, Tensor):
        return _distributed(value, held, held.shape[1])
    if isinstance(value, Codebook):
        own = (held.shape[1] if held.empty else held.heads[1] - held.heads[0]) * value.stretches
        by_keys = value.sizes.shape[1] != own
        heads = (held.key_heads if by_keys else held.shape[1]) * value.stretches
        tensors = {name: x for name, x in _tensors(value).items() if name != "key_mask"}
        whole = {name: _distributed(x, held, heads) for name, x in tensors.items()}
        return with_tensors(value, {**whole, "key_mask": key_mask})
    if isinstance(value, Matches):
        index, score = (_distributed(x, held, held.shape[1]) for x in (value.index, value.score))
        return Matches(index, score, value.key_grid)
    if isinstance(value, Routes):
        return Routes(_distributed(value.bits, held, held.shape[1]), value.grid, value.count)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_wrapped(x, held, key_mask) for x in value))
    return value


def _distributed(local: Tensor, held: Held, heads: int) -> DTensor:
    """The DTensor [B, heads, ..] of which this rank has a part."""
    shape = torch.Size((held.shape[0], heads, *local.shape[2:]))
    if held.empty:
        own = [end - begin for begin, end in (held.batch, held.heads)]
        own[1] = own[1] * heads // held.shape[1]
        local = local.reshape(*own, *local.shape[2:])
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(local, held.mesh, held.placements, run_check=False, shape=shape, stride=stride)
