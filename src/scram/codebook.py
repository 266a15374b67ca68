"""What clusters of keys look like: the value that `cluster` returns and `attend(tail=...)` takes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import calls, errors, ops
from .inputs import Inputs
from .scoring import prepare_key
from .tails.base import Kind, MadeFor, Tail
from .types import Attended

TENSORS = ("centres", "values", "sizes", "label", "gains", "key_mask")


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
        centres: float32 (float64 for float64) [B, Hc, C, E'], mean of the keys, prepared for the score.
        values: float32 (float64 for float64) [B, Hc, C, F], mean of the values.
        sizes: int32 [B, Hc, C], number of keys; 0 for a cluster without any.
        label: int32 [B, Hc, *G'], the cluster of each key; -1 for a key in none: masked, or not finite.
        score, scale: for which the clusters were made.
        key_mask: bool [B, *G'] or [B, H, *G'], which keys could be attended; None for all.
        gains: as `centres` [B, H, C], fitted factors on the weights of the clusters; None is 1.
        radius: of the windows that the fit leaves out; None without a fit.
        report: how far off fitted clusters are; None without a fit.

    >>> k = torch.randn(1, 2, 16, 16, 8)
    >>> codebook = scram.cluster(k, k, k, clusters=scram.Clusters(count=32, seed=0))
    >>> codebook
    Codebook(32 clusters of keys on grid (16, 16), batch=1, heads=2, score='dot', scale=0.354, cpu)
    >>> int(codebook.sizes.sum())
    512
    """

    centres: Tensor
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

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def key_grid(self) -> tuple[int, ...]:
        """The extents of the key grid."""
        return tuple(self.label.shape[2:])

    @property
    def samples(self) -> int:
        return self.sizes.shape[-1]

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
            centres=self.centres,
            values=self.values,
            sizes=self.sizes,
            gains=self.gains,
            head_out=windows.out,
            head_lse=windows.lse,
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
        tensors = {name: x.to(device) for name in TENSORS if (x := getattr(self, name)) is not None}
        return replace(self, **tensors)

    def detach(self) -> Codebook:
        """The same clusters as constants."""
        return replace(self, centres=self.centres.detach(), values=self.values.detach())

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
        from safetensors.torch import save_file

        tensors = {name: x.detach().contiguous() for name in TENSORS if (x := getattr(self, name)) is not None}
        report = None if self.report is None else asdict(self.report)
        settings = {"score": self.score, "scale": self.scale, "radius": self.radius, "report": report}
        save_file(tensors, path, metadata={"format": "scram.Codebook", "settings": json.dumps(settings)})

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Codebook:
        """Read what `save` wrote. Nothing is unpickled."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != "scram.Codebook":
                    raise ValueError("it holds something else")
                fields: dict[str, Any] = json.loads(metadata["settings"])
                if fields["radius"] is not None:
                    fields["radius"] = tuple(fields["radius"])
                if fields["report"] is not None:
                    pairs: dict[str, Any] = {
                        name: tuple(x) if isinstance(x, list) else x for name, x in fields["report"].items()
                    }
                    fields["report"] = FitReport(**pairs)
                return Codebook(**{name: file.get_tensor(name) for name in file.keys()}, **fields)  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a safetensors file that Codebook.save wrote: {error}") from error

    def __repr__(self) -> str:
        batch, heads, count = self.sizes.shape
        fitted = "" if self.report is None else f", fitted: {self.report}"
        return (
            f"Codebook({count} clusters of keys on grid {self.key_grid}, batch={batch}, heads={heads}, "
            f"score={self.score!r}, scale={self.scale:.3g}, {self.sizes.device}{fitted})"
        )


def _check_fields(book: Codebook) -> None:
    """The tensors of a Codebook have the shapes and dtypes of one and the same clusters."""
    floats = (torch.float32, torch.float64)
    for name, axes in {"centres": 4, "values": 4, "sizes": 3, "label": None}.items():
        x = getattr(book, name)
        errors.instance(name, x, Tensor, "tensor")
        kinds = (torch.int32,) if name in ("sizes", "label") else floats
        if x.dtype not in kinds or (x.ndim != axes if axes else not 3 <= x.ndim <= 2 + errors.MAX_RANK):
            raise ValueError(f"{name} of a codebook must be {kinds[0]} with {axes or '3 to 6'} axes, got {x.dtype} "
                             f"{tuple(x.shape)}; scram.cluster makes one")  # fmt: skip
    shape = book.sizes.shape
    if any(x.shape[:3] != shape for x in (book.centres, book.values)) or book.label.shape[:2] != shape[:2]:
        raise ValueError(
            f"centres {tuple(book.centres.shape)}, values {tuple(book.values.shape)}, sizes {tuple(shape)} and label "
            f"{tuple(book.label.shape)} must be [B, H, C, E], [B, H, C, F], [B, H, C] and [B, H, *G']"
        )


def check_clusters(kind: Kind) -> None:
    """Raise where a call cannot have clusters."""
    if kind.weight != "softmax" or kind.causal or callable(kind.score):
        raise ValueError(
            "clusters of keys need weight='softmax', no causal order and a score by name; use tail=None, or "
            "scram.Hybrid under causal order"
        )


def check_codebook(name: str, q: Tensor, k: Tensor, v: Tensor, call: MadeFor, book: Codebook) -> None:
    """Raise where `book` was not made for keys of these shapes, and for this call."""
    batch, heads = book.sizes.shape[:2]
    if book.key_grid != tuple(k.shape[2:-1]) or batch != k.shape[0] or heads not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"{name} was made for batch {batch}, {heads} heads and key grid {book.key_grid}, but k is {tuple(k.shape)}"
        )
    width = k.shape[-1] if call.score == "dot" else prepare_key(k[:1, :1, ..., :1, :], call.score).shape[-1]
    if (book.centres.shape[-1], book.values.shape[-1]) != (width, v.shape[-1]):
        got = f"{book.centres.shape[-1]} and {book.values.shape[-1]}"
        raise ValueError(f"{name} was made for keys and values of widths {got}, these have {width} and {v.shape[-1]}")
    if (book.centres.dtype == torch.float64) != (v.dtype == torch.float64):
        raise ValueError(f"{name} was made for other dtypes: its centres are {book.centres.dtype}, v is {v.dtype}")
    if book.centres.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {book.centres.device}; use {name}.to(q.device)")
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
    errors.instance("warm", book, Codebook, "scram.Codebook", "; scram.cluster returns one")
    got = (*book.centres.shape, book.values.shape[-1])
    heads = q.shape[1] if book.sizes.shape[1] == q.shape[1] else k.shape[1]
    want = (k.shape[0], heads, min(count, k.shape[2:-1].numel()), k.shape[-1], v.shape[-1])
    if got != want:
        raise ValueError(f"warm must have (B, H, clusters, E, F) = {want}, got {got}; cluster without it")
    if book.centres.device != q.device:
        raise ValueError(f"warm must be on q's device {q.device}, got {book.centres.device}; use warm.to(q.device)")
