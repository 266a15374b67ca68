"""Clusters of keys for all keys outside the windows: `Clusters` are settings, a `Codebook` is what they make."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import _compat
from ...options import SCORES
from ...results import Attended, Routes
from ...settings import Score
from ...spec.clustering import metric_of, order_of
from ...spec.grid import grid_of
from ...spec.schedule import TILE_QUERIES
from ...spec.scoring import prepare_key
from ...spec.stretches import complete_count, default_stretch
from .. import calls, checks, files, ops
from . import stretches
from .base import ALL, Inputs, Joined, Kind, MadeFor, Tail

NEEDED = ("centers", "values", "sizes", "label", "variance", "spreads")
OPTIONAL = ("slope", "key_mask")
TENSORS = NEEDED + OPTIONAL
CONSTANTS = ("sizes", "label", "variance", "spreads", "order", "key_mask")  # that carry no gradients


@dataclass(frozen=True)
class Clusters(Tail):
    """Keys of the clusters that matter most to a tile of 64 queries one by one, all others by their clusters.

    A cluster stands for its keys with their mean key, mean value and number. Each tile attends exactly, besides the
    windows, all keys of the clusters whose mean would be most wrong for it (routed keys). Right from diffuse to sharp
    attention, and without variance: the same clusters give the same answer.

    Args:
        count: clusters of each key head; as many as there are keys: exact attention.
        keys: that a tile attends one by one, at most; 0: none.
        first_order: whether a cluster's mean value is corrected by how values go with scores inside clusters.
        second_order: whether a cluster's weight is raised by how far the scores of its keys are apart.
        steps: of k-means, on a sample of the keys.
        seed: an int or a 0-d int64 tensor; None takes that of the search, or draws one.
        stretch: under causal order, positions that are clustered together, a multiple of 64; `count` is that of each
            stretch then. None: at most an eighth of the grid.

    >>> Clusters(count=128, seed=0).keys
    512
    """

    count: int = 256
    keys: int = 512
    first_order: bool = True
    second_order: bool = True
    steps: int = 1
    seed: int | Tensor | None = None
    stretch: int | None = None
    seed_tensor: Tensor | None = field(init=False, repr=False, compare=False)  # as in `Search`
    reports: ClassVar[tuple[str, ...]] = ("lse",)
    unit: ClassVar[str] = "clusters"
    needs_all_queries: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = True
    orders_alone: ClassVar[bool] = True
    tuned_sizes: ClassVar[tuple[int, ...]] = (64, 256, 1024)

    def __post_init__(self) -> None:
        checks.whole_fields(self, count=1, keys=0, steps=0)
        checks.flag("first_order", self.first_order)
        checks.flag("second_order", self.second_order)
        if self.stretch is not None and (checks.whole("stretch", self.stretch, 1) % TILE_QUERIES):
            raise ValueError(f"stretch must be a multiple of {TILE_QUERIES}, got {self.stretch}; or None, the default")
        object.__setattr__(self, "seed_tensor", checks.seed(self.seed))

    @property
    def samples(self) -> int:
        return self.count

    def resized(self, samples: int) -> Clusters:
        return replace(self, count=samples)

    def in_order(self, positions: int) -> Clusters:
        return self if self.stretch is not None else replace(self, stretch=default_stretch(positions))

    def check(self, kind: Kind) -> None:
        check_clusters(kind)
        if self.stretch is not None and not kind.causal:
            raise ValueError(f"stretch={self.stretch} cuts a causal order: pass causal=True, or leave it out")

    def _call(self, inputs: Inputs, seed: Tensor | None, warm: Any) -> calls.ClusterCall:
        """Of keys of every key head; of every query head where their masks differ."""
        inputs = inputs.level()
        k = inputs.k
        v = inputs.v
        mask = inputs.key_mask
        group = inputs.q.shape[1] // k.shape[1]
        if group > 1 and mask is not None and mask.ndim == k.ndim - 1:
            k = k.repeat_interleave(group, 1)
            v = v.repeat_interleave(group, 1)
        if warm is not None and inputs.causal:
            raise ValueError("warm clusters under causal order could hold later keys; leave out warm")
        if warm is not None:
            check_warm(inputs.q, inputs.k, inputs.v, self.count, warm)
        return calls.ClusterCall(
            q=inputs.q,
            k=k,
            v=v,
            key_mask=mask,
            warm_centers=None if warm is None else _of_heads(warm.centers, k.shape[1]),
            warm_values=None if warm is None else _of_heads(warm.values, k.shape[1]),
            seed=self.own_seed(inputs, seed),
            rows=inputs.rows,
            count=self.count,
            steps=self.steps if warm is None else min(self.steps, 1),
            scale=inputs.scale,
        )

    def metric(self, inputs: Inputs) -> Tensor:
        """What the squared distance of a score counts on each axis of the keys, [B, Hc, E]; it needs a seed."""
        return metric_of(self._call(inputs, None, None))

    def prepare(self, inputs: Inputs, seed: Tensor | None, warm: Any = None) -> Codebook:
        """Clusters of every key head; of every query head where their masks differ."""
        call = self._call(inputs, seed, warm)
        grid = None
        if inputs.causal:
            grid = grid_of(inputs.k)
            assert self.stretch is not None
            clustered = stretches.cluster(inputs, call, self.stretch)
        else:
            clustered = ops.cluster(inputs.engine, call)
        return Codebook(
            centers=clustered.centers,
            values=clustered.values,
            sizes=clustered.sizes,
            label=clustered.label,
            variance=clustered.variance,
            spreads=clustered.spreads,
            slope=clustered.slope if self.first_order else None,
            order=clustered.order,
            key_mask=inputs.key_mask,
            score=str(inputs.score),
            scale=inputs.scale,
            keys=self.keys,
            second_order=self.raises_weights(inputs.score),
            grid=grid,
        )

    def raises_weights(self, score: Score) -> bool:
        """Whether the second order is in force for a score."""
        # The features of "l2" hold |k|^2, which goes with k: their variances say too much of the scores.
        return self.second_order and score != "l2"

    def join(self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None) -> Joined:
        return self.prepare(inputs, seed).join(inputs, index, seed, routes)

    def visited(self, queries: int, keys: int) -> int:
        if self.stretch is None:
            return min(self.count + self.keys, keys)
        return min(self.stretch + complete_count(keys, self.stretch) * self.count + self.keys, keys)

    def of_part(self, seed: int | Tensor | None, share: Fraction = ALL) -> Clusters:
        # Parts of one grid hold the same content again, so that each needs more than its share of both.
        root = math.sqrt(share)
        return replace(self, seed=seed, count=max(1, round(self.count * root)), keys=round(self.keys * root))

    def describe(self) -> str:
        return _described(self.count, self.stretch, self.keys)


@dataclass(frozen=True, eq=False)
class Codebook(Tail):
    """Clusters of keys: mean key, mean value and number of keys of each. Hc is Hk, or H where heads of queries differ.

    Args:
        centers: float32 (float64 for float64) [B, Hc, C, E'], mean of the keys, prepared for the score.
        values: float32 (float64 for float64) [B, Hc, C, F], mean of the values.
        sizes: int32 [B, Hc, C], number of keys; 0 for a cluster without any.
        label: int32 [B, Hc, *G'], the cluster of each key; -1 for a key in none: masked, or not finite.
        variance: as `centers` [B, Hc, E'], mean over all keys of (key - center)^2.
        spreads: as `centers` [B, Hc, C], how far the scores of a cluster's keys are apart, relative to all clusters.
        score, scale: for which the clusters were made.
        slope: as `centers` [B, Hc, E', F], mean over all keys of (key - center)^T (value - mean value); None: no
            first-order term.
        key_mask: bool [B, *G'] or [B, H, *G'], which keys could be attended; None for all.
        order: int32 [B, Hc, M], the keys by their clusters; None: computed from `label` where it is needed.
        keys: that a tile of 64 queries attends one by one, at most.
        second_order: whether `spreads` raise the weights of clusters.
        grid: of clusters under causal order, the key grid. It is cut into stretches of S positions, m of which another
            follows. Each has clusters of its own: stretch s of head h is head h m + s of all tensors but `key_mask`,
            and `label` is [B, Hc m, S].

    >>> k = torch.randn(1, 2, 16, 16, 8)
    >>> codebook = scram.cluster(k, k, k, clusters=scram.Clusters(count=32, seed=0))
    >>> codebook
    Codebook(32 clusters of keys on grid (16, 16), batch=1, heads=2, keys=512, score='dot', scale=0.354, cpu)
    >>> int(codebook.sizes.sum())
    512
    """

    centers: Tensor
    values: Tensor
    sizes: Tensor
    label: Tensor
    variance: Tensor
    spreads: Tensor
    score: str
    scale: float
    slope: Tensor | None = None
    key_mask: Tensor | None = None
    order: Tensor | None = None
    keys: int = 0
    second_order: bool = True
    grid: tuple[int, ...] | None = None
    unit: ClassVar[str] = "clusters"
    variable: ClassVar[str] = "codebook"
    stands_alone: ClassVar[bool] = True
    orders_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def key_grid(self) -> tuple[int, ...]:
        """The extents of the key grid."""
        return tuple(self.label.shape[2:]) if self.grid is None else self.grid

    @property
    def stretches(self) -> int:
        """m, the stretches of each head under causal order that have clusters; 1 without order."""
        return 1 if self.grid is None else complete_count(math.prod(self.grid), self.label.shape[2])

    @property
    def samples(self) -> int:
        return self.sizes.shape[-1]

    @property
    def codebook(self) -> Codebook:
        return self

    def check(self, kind: Kind) -> None:
        check_clusters(kind)
        if kind.causal != (self.grid is not None):
            made = "with" if self.grid is not None else "without"
            raise ValueError(f"the codebook was made {made} causal order, the call has causal={kind.causal}")

    def check_tensors(self, name: str, q: Tensor, k: Tensor, v: Tensor | None, call: MadeFor) -> None:
        check_codebook(name, q, k, v, call, self)

    def prepare(self, inputs: Inputs, seed: Tensor | None, warm: Any = None) -> Codebook:
        return self.ordered()

    def ordered(self) -> Codebook:
        """The same clusters with the order of their keys, where some are routed."""
        if self.order is not None or not self.keys:
            return self
        return replace(self, order=order_of(self.label))

    def route(self, inputs: Inputs) -> calls.Routed | None:
        if not self.keys or self.grid is not None:  # stretches route as they are joined
            return None
        call = calls.RouteCall(
            q=inputs.level().q,
            centers=self.centers,
            sizes=self.sizes,
            variance=self.variance,
            spreads=self.spreads,
            keys=self.keys,
            scale=inputs.scale,
        )
        return ops.route(inputs.engine, call)

    def start(self, inputs: Inputs, routes: Tensor) -> Tensor:
        assert self.order is not None
        call = calls.RoutedStartCall(
            q=inputs.q, k=inputs.k, order=self.order, sizes=self.sizes, routes=routes, keys=self.keys
        )
        return ops.routed_start(inputs.engine, call).index

    def join(self, inputs: Inputs, index: Tensor | None, seed: Tensor | None, routes: Tensor | None = None) -> Attended:
        """The attention over the windows, over routed keys, and over clusters for all other keys."""
        if self.grid is not None:
            return stretches.join(self, inputs, index)
        near = None
        if index is not None or inputs.num_extra:
            windows, inputs = inputs.twice()
            near = windows.attend_windows(index, self.label if routes is not None else None, routes)
        return self.beside(near, inputs, index, routes)

    def beside(
        self, near: Attended | None, inputs: Inputs, index: Tensor | None = None, routes: Tensor | None = None
    ) -> Attended:
        """`near`, attention over the windows and extra keys, joined with routed keys and with clusters for the rest.

        Args:
            near: [B, H, *G, F] and [B, H, *G]; None where there is nothing near.
            inputs: the call.
            index: int32 [B, H, *G, kappa], the centers of windows; None: no windows.
            routes: int32 [B, H, T, W], what `route` chose; None: no keys one by one.
        """
        inputs = inputs.level()
        call = calls.ClusterTailCall(
            q=inputs.q,
            k=None if routes is None else inputs.k,
            v=None if routes is None else inputs.v,
            index=index,
            label=self.label,
            order=None if routes is None else self.order,
            centers=self.centers,
            values=self.values,
            slope=self.slope,
            sizes=self.sizes,
            variance=self.variance,
            spreads=self.spreads if self.second_order else None,
            routes=routes,
            near_out=None if near is None else near.out,
            near_lse=None if near is None else near.lse,
            dropout_seed=inputs.draw_dropout_seed(),
            rows=inputs.rows,
            radius=inputs.radius,
            scale=inputs.scale,
            dropout_p=inputs.dropout_p,
            extras=inputs.num_extra,
            keys=0 if routes is None else self.keys,
        )
        return ops.cluster_tail(inputs.engine, call)

    def visited(self, queries: int, keys: int) -> int:
        own = 0 if self.grid is None else self.label.shape[2]
        return min(own + self.stretches * self.samples + self.keys, keys)

    def describe(self) -> str:
        return _described(self.samples, None if self.grid is None else self.label.shape[2], self.keys)

    def to(self, device: torch.device | str) -> Codebook:
        """The same clusters on another device."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"device must be a device, got {device}; the numbers of a codebook keep their dtypes")
        names = (*TENSORS, "order")
        return with_tensors(self, {name: x.to(device) for name in names if (x := getattr(self, name)) is not None})

    def detach(self) -> Codebook:
        """The same clusters as constants."""
        slope = None if self.slope is None else self.slope.detach()
        return replace(self, centers=self.centers.detach(), values=self.values.detach(), slope=slope)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file.

        >>> import tempfile
        >>> k = torch.randn(1, 1, 8, 8, 4)
        >>> codebook = scram.cluster(k, k, k, clusters=scram.Clusters(count=4, seed=0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     codebook.save(folder + "/codebook.safetensors")
        ...     scram.Codebook.load(folder + "/codebook.safetensors").key_grid
        (8, 8)
        """
        tensors = {name: x for name in TENSORS if (x := getattr(self, name)) is not None}
        files.save_tensors(tensors, {"format": "scram.Codebook", "settings": json.dumps(settings_of(self))}, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Codebook:
        """Read what `save` wrote; ValueError for any other file. Nothing is unpickled."""

        def build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Codebook:
            return from_settings(tensors, json.loads(metadata["settings"]))

        return files.load_tensors(path, build, "scram.Codebook", NEEDED, OPTIONAL).to(device)

    def __repr__(self) -> str:
        batch, heads, count = self.sizes.shape
        heads //= max(self.stretches, 1)
        each = "" if self.grid is None else f" of every {self.label.shape[2]} positions"
        return (
            f"Codebook({count} clusters of keys{each} on grid {self.key_grid}, batch={batch}, heads={heads}, "
            f"keys={self.keys}, score={self.score!r}, scale={self.scale:.3g}, {self.sizes.device})"
        )


def _described(count: int, stretch: int | None, keys: int) -> str:
    each = "" if stretch is None else f" of every {stretch} positions"
    return f"{count} clusters{each}{f' + {keys} keys' if keys else ''}"


def with_tensors(book: Codebook, tensors: Mapping[str, Any]) -> Codebook:
    """The same clusters with other tensors, by name."""
    return replace(book, **tensors)


def settings_of(book: Codebook) -> dict[str, Any]:
    """The fields that are no tensors, as JSON has them."""
    return {
        "score": book.score,
        "scale": book.scale,
        "keys": book.keys,
        "second_order": book.second_order,
        "grid": book.grid,
    }


def from_settings(tensors: Mapping[str, Any], settings: dict[str, Any]) -> Codebook:
    """A codebook of what was read: its tensors, and the other fields as JSON has them. Looks at every number."""
    grid = settings.pop("grid", None)
    book = Codebook(**tensors, **settings, grid=None if grid is None else tuple(grid))
    _check_numbers(book)
    return book


def _check_numbers(book: Codebook) -> None:
    """What the tensors hold; this waits for the device, so only values that were read are checked."""
    count = book.sizes.shape[-1]
    if bool(((book.label < -1) | (book.label >= count)).any()):
        raise ValueError(f"label of a codebook must lie in -1..{count - 1}, the numbers of its clusters")
    if bool((book.sizes < 0).any()):
        raise ValueError("sizes of a codebook must not be negative")
    label = book.label.flatten(2).long()  # [B, Hc, M]
    slots = torch.zeros(*label.shape[:2], count + 1, dtype=torch.int64, device=label.device)
    counts = slots.scatter_add(2, torch.where(label < 0, count, label), torch.ones_like(label))[..., :count]
    if not torch.equal(counts, book.sizes.long()):
        raise ValueError("sizes of a codebook must be the numbers of keys with each label")
    for name in ("centers", "values", "slope"):
        x = getattr(book, name)
        if x is not None and not bool(x.isfinite().all()):
            raise ValueError(f"{name} of a codebook must be finite")
    for name in ("variance", "spreads"):
        x = getattr(book, name)
        if not bool(((x >= 0) & x.isfinite()).all()):
            raise ValueError(f"{name} of a codebook must be finite and not negative")
    if book.key_mask is not None and bool((book.key_mask.view(torch.uint8) > 1).any()):
        raise ValueError("key_mask of a codebook must hold bytes 0 and 1")


def _check_fields(book: Codebook) -> None:
    """The fields of a Codebook are those of one and the same clusters, by their types, shapes and devices alone."""
    floats = (torch.float32, torch.float64)
    for name, axes in {"centers": 4, "values": 4, "sizes": 3, "label": None}.items():
        x = getattr(book, name)
        checks.instance(name, x, Tensor, "tensor")
        kinds = (torch.int32,) if name in ("sizes", "label") else floats
        if x.dtype not in kinds or (x.ndim != axes if axes else not 3 <= x.ndim <= 2 + checks.MAX_RANK):
            raise ValueError(
                f"{name} of a codebook must be {kinds[0]} with {axes or '3 to 6'} axes, got {x.dtype} "
                f"{tuple(x.shape)}; scram.cluster makes one"
            )
    shape = book.sizes.shape
    if any(x.shape[:3] != shape for x in (book.centers, book.values)) or book.label.shape[:2] != shape[:2]:
        raise ValueError(
            f"centers {tuple(book.centers.shape)}, values {tuple(book.values.shape)}, sizes {tuple(shape)} and label "
            f"{tuple(book.label.shape)} must be [B, H, C, E], [B, H, C, F], [B, H, C] and [B, H, *G']"
        )
    if book.values.dtype != book.centers.dtype:
        raise ValueError(
            f"values of a codebook must have the dtype of its centers, {book.centers.dtype}, got {book.values.dtype}"
        )
    width = book.centers.shape[-1]
    _check_floats(book, "variance", (*shape[:2], width))
    _check_floats(book, "spreads", tuple(shape))
    if book.slope is not None:
        _check_floats(book, "slope", (*shape[:2], width, book.values.shape[-1]))
    if book.key_mask is not None:
        _check_mask(book, book.key_mask)
    if book.order is not None:
        _check_order(book, book.order)
    if book.grid is not None:
        _check_stretches(book)
    checks.count("keys", book.keys)
    checks.flag("second_order", book.second_order)
    for name in (*TENSORS, "order"):
        x = getattr(book, name)
        if x is not None and x.device != book.centers.device:
            raise ValueError(
                f"{name} of a codebook must be on the device of its centers, {book.centers.device}, got {x.device}; "
                "use codebook.to(device)"
            )
    checks.one_of("score", book.score, SCORES, "; clusters are made for a score by name")
    if book.scale is None:
        raise TypeError("scale of a codebook must be a float, got None")
    checks.scale(book.scale)


def _check_stretches(book: Codebook) -> None:
    checks.grid(book.grid, "grid")
    if book.label.ndim != 3 or book.label.shape[2] % TILE_QUERIES or not book.label.shape[2]:
        raise ValueError(
            f"label of a causal codebook must be [B, H m, S] with S a multiple of {TILE_QUERIES}, got "
            f"{tuple(book.label.shape)}"
        )
    if book.label.shape[1] % max(book.stretches, 1) or (book.label.shape[1] and not book.stretches):
        raise ValueError(
            f"a causal codebook of {book.stretches} stretches must have as many clusters of every head, got "
            f"{book.label.shape[1]} in all"
        )


def _check_floats(book: Codebook, name: str, want: tuple[int, ...]) -> None:
    x = getattr(book, name)
    checks.instance(name, x, Tensor, "tensor")
    if tuple(x.shape) != want or x.dtype != book.centers.dtype:
        raise ValueError(
            f"{name} of a codebook must be {book.centers.dtype} {want} beside its centers "
            f"{tuple(book.centers.shape)}, got {x.dtype} {tuple(x.shape)}"
        )


def _check_order(book: Codebook, order: Any) -> None:
    checks.instance("order", order, Tensor, "tensor")
    want = (*book.label.shape[:2], math.prod(book.label.shape[2:]))
    if tuple(order.shape) != want or order.dtype != torch.int32:
        raise ValueError(
            f"order of a codebook must be int32 [B, H, M] = {want}, got {order.dtype} {tuple(order.shape)}"
        )


def _check_mask(book: Codebook, mask: Any) -> None:
    checks.instance("key_mask", mask, Tensor, "tensor")
    batch, heads = book.label.shape[:2]
    heads //= max(book.stretches, 1)
    by_head = mask.ndim == len(book.key_grid) + 2
    fits = mask.shape[0] == batch and tuple(mask.shape[1 + by_head :]) == book.key_grid if mask.ndim else False
    if by_head:  # heads of queries, of which as many read each head of clusters
        fits = fits and mask.shape[1] % max(heads, 1) == 0
    if mask.dtype != torch.bool or not fits:
        want = (batch, *book.key_grid)
        raise ValueError(
            f"key_mask of a codebook must be bool [B, *G'] = {want} or [B, H, *G'], got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )


def check_clusters(kind: Kind) -> None:
    """Raise where a call cannot have clusters."""
    if kind.weight != "softmax" or callable(kind.score):
        raise ValueError("clusters of keys need weight='softmax' and a score by name; use tail=None")


def check_codebook(name: str, q: Tensor, k: Tensor, v: Tensor | None, call: MadeFor, book: Codebook) -> None:
    """Raise where `book` was not made for keys of these shapes, and for this call."""
    batch, heads = book.sizes.shape[:2]
    heads = heads // book.stretches if book.stretches else k.shape[1]
    if book.key_grid != tuple(k.shape[2:-1]) or batch != k.shape[0] or heads not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"{name} was made for batch {batch}, {heads} heads and key grid {book.key_grid}, but k is {tuple(k.shape)}"
        )
    width = k.shape[-1] if call.score == "dot" else prepare_key(k[:1, :1, ..., :1, :], call.score).shape[-1]
    value_width = book.values.shape[-1] if v is None else v.shape[-1]
    dtype = k.dtype if v is None else v.dtype
    if (book.centers.shape[-1], book.values.shape[-1]) != (width, value_width):
        got = f"{book.centers.shape[-1]} and {book.values.shape[-1]}"
        raise ValueError(f"{name} was made for keys and values of widths {got}, these have {width} and {value_width}")
    if (book.centers.dtype == torch.float64) != (dtype == torch.float64):
        raise ValueError(f"{name} was made for other dtypes: its centers are {book.centers.dtype}, v is {dtype}")
    if book.centers.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {book.centers.device}; use {name}.to(q.device)")
    if book.score != call.score or abs(book.scale - call.scale) > 1e-6 * call.scale:
        raise ValueError(
            f"{name} was made for score={book.score!r}, scale={book.scale:.6g}, the call has score={call.score!r}, "
            f"scale={call.scale}; cluster the keys for it"
        )
    if not _same_mask(call.key_mask, book.key_mask):
        raise ValueError(f"{name} was made with another key_mask; cluster the keys with the mask of the call")
    if q.device.type == "cpu" and book.keys and _compat.plain_eager():
        _check_places(name, book)


def _check_places(name: str, book: Codebook) -> None:
    """Raise where kernels would read keys that there are not. On a GPU this would wait for the device."""
    keys = math.prod(book.label.shape[2:])
    if book.order is not None and book.order.numel():
        low, high = book.order.aminmax()
        if int(low) < 0 or int(high) >= keys:
            raise ValueError(f"order of the codebook in {name} must lie in 0..{keys - 1}, the numbers of its keys")
    if book.sizes.numel() and (int(book.sizes.amin()) < 0 or int(book.sizes.sum(-1).amax()) > keys):
        raise ValueError(f"sizes of the codebook in {name} must be the numbers of keys with each label, of {keys} keys")


def check_budget(book: Codebook, routes: Routes) -> None:
    """Raise where a tile routes more keys than the codebook allows, which engines would leave out.

    This waits for the device; where torch compiles or transforms a call it is not looked at.
    """
    if not book.keys:
        raise ValueError("routes need a codebook with keys, got keys=0; make it with scram.Clusters(keys=512)")
    if not _compat.plain_eager() or not routes.bits.numel():
        return
    group = routes.bits.shape[1] // book.sizes.shape[1]
    sizes = book.sizes.repeat_interleave(group, 1).unsqueeze(2)  # [B, H, 1, C]
    most = int(torch.where(routes.chosen, sizes, 0).sum(-1).max())
    if most > book.keys:
        raise ValueError(
            f"routes have a tile with {most} keys, the codebook has keys={book.keys}; pass the codebook that they were "
            "made from"
        )


def _same_mask(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or torch.equal(a, b)


def check_warm(q: Tensor, k: Tensor, v: Tensor, count: int, book: Any) -> None:
    """Clusters to start from: as many as wanted, of prepared keys k and values as wide, on as many heads."""
    checks.instance("warm", book, Codebook, "scram.Codebook", "; scram.cluster returns one")
    got = (*book.centers.shape, book.values.shape[-1])
    heads = q.shape[1] if book.sizes.shape[1] == q.shape[1] else k.shape[1]
    want = (k.shape[0], heads, min(count, k.shape[2:-1].numel()), k.shape[-1], v.shape[-1])
    if got != want:
        raise ValueError(f"warm must have (B, H, clusters, E, F) = {want}, got {got}; cluster without it")
    if book.centers.device != q.device:
        raise ValueError(f"warm must be on q's device {q.device}, got {book.centers.device}; use warm.to(q.device)")


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """Clusters [B, Hc, C, width] for so many heads: of a group the first, or one for each of it."""
    if x.shape[1] > heads:
        return x[:, :: x.shape[1] // heads]
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] < heads else x
