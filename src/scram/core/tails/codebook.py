"""What clusters of keys look like: the value that `cluster` returns and `attend(tail=...)` takes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...options import SCORES
from ...results import Attended
from ...spec.scoring import prepare_key
from .. import calls, checks, files, ops
from ..inputs import Inputs
from .base import Kind, MadeFor, Tail

NEEDED = ("centers", "values", "sizes", "label")
OPTIONAL = ("gains", "key_mask")
TENSORS = NEEDED + OPTIONAL


@dataclass(frozen=True)
class FitReport:
    """How far off the fitted clusters are, on queries that took no part in the fit.

    Args:
        queries: how many queries of each head were computed densely, for the report alone.
        output_error: |out - exact| / |exact| over all of these queries, without the fit and with it.
        plain_error: the same without the fit.
        median, percentile_95: (low, high), 95 % intervals for the median and the 95th percentile over queries of
            |out - exact|, over the root mean square of |exact|.
    """

    queries: int
    output_error: float
    plain_error: float
    median: tuple[float, float]
    percentile_95: tuple[float, float]

    def __post_init__(self) -> None:
        checks.whole_fields(self, queries=1)
        for name in ("output_error", "plain_error"):
            _check_error(name, getattr(self, name))
        for name in ("median", "percentile_95"):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"{name} of a report must be a pair (low, high), got {pair!r}")
            for end in pair:
                _check_error(name, end)
            if pair[0] > pair[1]:
                raise ValueError(f"{name} of a report must be (low, high), got {pair}")

    def __str__(self) -> str:
        low, high = self.percentile_95
        return (
            f"output error {self.output_error:.3f} on {self.queries} queries a head ({self.plain_error:.3f} without "
            f"the fit), median {self.median[0]:.3f}-{self.median[1]:.3f}, 95th percentile {low:.3f}-{high:.3f}"
        )


@dataclass(frozen=True, eq=False)
class Codebook(Tail):
    """Clusters of keys: mean key, mean value and number of keys of each. Hc is Hk, or H where heads of queries differ.

    Args:
        centers: float32 (float64 for float64) [B, Hc, C, E'], mean of the keys, prepared for the score.
        values: float32 (float64 for float64) [B, Hc, C, F], mean of the values.
        sizes: int32 [B, Hc, C], number of keys; 0 for a cluster without any.
        label: int32 [B, Hc, *G'], the cluster of each key; -1 for a key in none: masked, or not finite.
        score, scale: for which the clusters were made.
        key_mask: bool [B, *G'] or [B, H, *G'], which keys could be attended; None for all.
        gains: as `centers` [B, H, C], fitted factors on the weights of the clusters; None is 1.
        radius: of the windows that the fit leaves out; None without a fit.
        report: how far off fitted clusters are; None without a fit.

    >>> k = torch.randn(1, 2, 16, 16, 8)
    >>> codebook = scram.cluster(k, k, k, clusters=scram.Clusters(count=32, seed=0))
    >>> codebook
    Codebook(32 clusters of keys on grid (16, 16), batch=1, heads=2, score='dot', scale=0.354, cpu)
    >>> int(codebook.sizes.sum())
    512
    """

    centers: Tensor
    values: Tensor
    sizes: Tensor
    label: Tensor
    score: str
    scale: float
    key_mask: Tensor | None = None
    gains: Tensor | None = None
    radius: tuple[int, ...] | None = None
    report: FitReport | None = None
    unit: ClassVar[str] = "clusters"
    variable: ClassVar[str] = "codebook"

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def key_grid(self) -> tuple[int, ...]:
        """The extents of the key grid."""
        return tuple(self.label.shape[2:])

    @property
    def is_fitted(self) -> bool:
        return self.gains is not None

    @property
    def samples(self) -> int:
        return self.sizes.shape[-1]

    @property
    def codebook(self) -> Codebook:
        return self

    def check(self, kind: Kind) -> None:
        check_clusters(kind)

    def check_tensors(self, name: str, q: Tensor, k: Tensor, v: Tensor, call: MadeFor) -> None:
        check_codebook(name, q, k, v, call, self)

    def join(self, inputs: Inputs, index: Tensor, seed: Tensor | None) -> Attended:
        """The attention over the windows with clusters for all other keys."""
        windows = inputs.attend_windows(index)
        inputs = inputs.level()
        call = calls.ClusterTailCall(
            q=inputs.q,
            index=index,
            label=self.label,
            centers=self.centers,
            values=self.values,
            sizes=self.sizes,
            gains=self.gains,
            near_out=windows.out,
            near_lse=windows.lse,
            dropout_seed=inputs.draw_dropout_seed(),
            rows=inputs.rows,
            radius=inputs.radius,
            scale=inputs.scale,
            dropout_p=inputs.dropout_p,
            extras=inputs.num_extra,
            window=inputs.window,
        )
        return ops.cluster_tail(inputs.engine, call)

    def describe(self) -> str:
        return f"{self.samples} clusters{', fitted' if self.gains is not None else ''}"

    def to(self, device: torch.device | str) -> Codebook:
        """The same clusters on another device."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"device must be a device, got {device}; the numbers of a codebook keep their dtypes")
        return with_tensors(self, {name: x.to(device) for name in TENSORS if (x := getattr(self, name)) is not None})

    def detach(self) -> Codebook:
        """The same clusters as constants."""
        return replace(self, centers=self.centers.detach(), values=self.values.detach())

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
        report = None if self.report is None else asdict(self.report)
        settings = {"score": self.score, "scale": self.scale, "radius": self.radius, "report": report}
        files.save_tensors(tensors, {"format": "scram.Codebook", "settings": json.dumps(settings)}, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Codebook:
        """Read what `save` wrote; ValueError for any other file. Nothing is unpickled."""

        def build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Codebook:
            return from_settings(tensors, json.loads(metadata["settings"]))

        return files.load_tensors(path, build, "scram.Codebook", NEEDED, OPTIONAL).to(device)

    def __repr__(self) -> str:
        batch, heads, count = self.sizes.shape
        fitted = "" if self.report is None else f", fitted: {self.report}"
        return (
            f"Codebook({count} clusters of keys on grid {self.key_grid}, batch={batch}, heads={heads}, "
            f"score={self.score!r}, scale={self.scale:.3g}, {self.sizes.device}{fitted})"
        )


def with_tensors(book: Codebook, tensors: Mapping[str, Any]) -> Codebook:
    """The same clusters with other tensors, by name."""
    return replace(book, **tensors)


def from_settings(tensors: Mapping[str, Any], settings: dict[str, Any]) -> Codebook:
    """A codebook of what was read: its tensors, and the other fields as JSON has them. Looks at every number."""
    radius = settings.pop("radius")
    report = settings.pop("report", None)
    if report is not None:
        median = tuple(report.pop("median"))
        percentile_95 = tuple(report.pop("percentile_95"))
        report = FitReport(**report, median=median, percentile_95=percentile_95)
    book = Codebook(**tensors, **settings, radius=None if radius is None else tuple(radius), report=report)
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
    for name in ("centers", "values"):
        if not bool(getattr(book, name).isfinite().all()):
            raise ValueError(f"{name} of a codebook must be finite")
    if book.gains is not None and not bool(((book.gains >= 0) & book.gains.isfinite()).all()):
        raise ValueError("gains of a codebook must be finite and not negative")
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
    if book.gains is not None:
        _check_gains(book, book.gains)
    if book.key_mask is not None:
        _check_mask(book, book.key_mask)
    for name in TENSORS:
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
    if book.radius is not None:
        if not isinstance(book.radius, tuple):
            raise TypeError(f"radius of a codebook must be None or a tuple of ints, got {book.radius!r}")
        checks.radius(book.radius, len(book.key_grid))
    if book.report is not None:
        checks.instance("report", book.report, FitReport, "FitReport", "; scram.cluster makes one")


def _check_gains(book: Codebook, gains: Any) -> None:
    checks.instance("gains", gains, Tensor, "tensor")
    if gains.shape != book.sizes.shape or gains.dtype != book.centers.dtype:
        raise ValueError(
            f"gains of a codebook must be {book.centers.dtype} [B, H, C] = {tuple(book.sizes.shape)} like its sizes, "
            f"got {gains.dtype} {tuple(gains.shape)}"
        )


def _check_mask(book: Codebook, mask: Any) -> None:
    checks.instance("key_mask", mask, Tensor, "tensor")
    batch, heads = book.label.shape[:2]
    by_head = mask.ndim == book.label.ndim
    fits = mask.shape[0] == batch and tuple(mask.shape[1 + by_head :]) == book.key_grid if mask.ndim else False
    if by_head:  # heads of queries, of which as many read each head of clusters
        fits = fits and mask.shape[1] % max(heads, 1) == 0
    if mask.dtype != torch.bool or not fits:
        want = (batch, *book.key_grid)
        raise ValueError(
            f"key_mask of a codebook must be bool [B, *G'] = {want} or [B, H, *G'], got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )


def _check_error(name: str, value: Any) -> None:
    """A relative error: not negative, NaN or infinite where outputs overflow."""
    if not isinstance(value, float) or value < 0:
        raise ValueError(f"{name} of a report must be a float that is not negative, got {value!r}")


def check_clusters(kind: Kind) -> None:
    """Raise where a call cannot have clusters."""
    if kind.weight != "softmax" or kind.causal or callable(kind.score):
        raise ValueError(
            "clusters of keys need weight='softmax', no causal order and a score by name; use tail=None, or "
            "scram.DrawnKeys under causal order"
        )


def check_codebook(name: str, q: Tensor, k: Tensor, v: Tensor, call: MadeFor, book: Codebook) -> None:
    """Raise where `book` was not made for keys of these shapes, and for this call."""
    batch, heads = book.sizes.shape[:2]
    if book.key_grid != tuple(k.shape[2:-1]) or batch != k.shape[0] or heads not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"{name} was made for batch {batch}, {heads} heads and key grid {book.key_grid}, but k is {tuple(k.shape)}"
        )
    width = k.shape[-1] if call.score == "dot" else prepare_key(k[:1, :1, ..., :1, :], call.score).shape[-1]
    if (book.centers.shape[-1], book.values.shape[-1]) != (width, v.shape[-1]):
        got = f"{book.centers.shape[-1]} and {book.values.shape[-1]}"
        raise ValueError(f"{name} was made for keys and values of widths {got}, these have {width} and {v.shape[-1]}")
    if (book.centers.dtype == torch.float64) != (v.dtype == torch.float64):
        raise ValueError(f"{name} was made for other dtypes: its centers are {book.centers.dtype}, v is {v.dtype}")
    if book.centers.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {book.centers.device}; use {name}.to(q.device)")
    if book.score != call.score or abs(book.scale - call.scale) > 1e-6 * call.scale:
        raise ValueError(
            f"{name} was made for score={book.score!r}, scale={book.scale:.6g}, the call has score={call.score!r}, "
            f"scale={call.scale}; cluster the keys for it"
        )
    if book.radius not in (None, call.radius):
        raise ValueError(f"{name} was fitted for radius {book.radius}, the call has {call.radius}; fit it for that")
    if not _same_mask(call.key_mask, book.key_mask):
        raise ValueError(f"{name} was made with another key_mask; cluster the keys with the mask of the call")


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
