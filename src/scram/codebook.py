"""What clusters of keys look like: the value that `cluster` returns and `attend(tail=...)` takes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import codebook_fields

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
class Codebook:
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

    def __post_init__(self) -> None:
        codebook_fields(self)

    @property
    def key_grid(self) -> tuple[int, ...]:
        """The extents of the key grid."""
        return tuple(self.label.shape[2:])

    def to(self, device: torch.device | str) -> Codebook:
        """The same clusters on another device."""
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
