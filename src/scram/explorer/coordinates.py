"""Coordinates in which features are rounded: as few channels and bits as the scores need.

The softmax does not change when all keys move by the same vector, so keys are centered. Keys are then multiplied by a
matrix and queries by its inverse, transposed: scores stay the same, and the second moments of both become one and the
same diagonal matrix (the singular values of the scores). Rounding every channel to one step is then the best use of the
bits, and channels that scores do not need round to 0 everywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..images.pca import principal_axes

SMALLEST = 1e-10  # of the largest singular value; directions below are left out


class Balanced(NamedTuple):
    """The keys and queries of one head of keys, all float64.

    Args:
        keys: [M, D], centered and turned.
        to_queries: [E, D], what turns queries.
        to_keys: [E, D], what turns centered keys.
        center: [E], the mean of the keys.
        spread: sum of the second moments over the channels, of queries and of keys alike.
    """

    keys: Tensor
    to_queries: Tensor
    to_keys: Tensor
    center: Tensor
    spread: float

    @staticmethod
    def of(q: Tensor, k: Tensor) -> Balanced:
        """From queries [n, E], scaled, and keys [M, E]: scores are q @ k.T.

        >>> q, k = torch.randn(50, 4).double(), torch.randn(60, 4).double()
        >>> found = Balanced.of(q, k)
        >>> scores = q @ (k - k.mean(0)).T
        >>> bool(torch.allclose(q @ found.to_queries @ found.keys.T, scores))
        True
        """
        q = q.double()
        k = k.double()
        center, variance, axes = principal_axes(k)
        kept = variance > SMALLEST * variance[-1].clamp(min=1e-300)
        if not bool(kept.any()):  # all keys are equal
            zero = q.new_zeros(q.shape[-1], 1)
            return Balanced(k.new_zeros(len(k), 1), zero, zero, center, 0.0)
        root = axes[:, kept] * variance[kept].sqrt()  # [E, D]
        inverse = axes[:, kept] / variance[kept].sqrt()  # [E, D]
        seen = q @ root  # [n, D]
        value, turn = torch.linalg.eigh(seen.T @ seen / max(len(q), 1))
        singular = value.clamp(min=0).sqrt().flip(0)
        kept = singular > SMALLEST * singular[0].clamp(min=1e-300)
        if not bool(kept.any()):
            kept[0] = True  # all scores are 0
        singular = singular[kept].clamp(min=1e-300)
        turn = turn.flip(1)[:, kept]
        to_keys = inverse @ turn * singular.sqrt()
        to_queries = root @ turn / singular.sqrt()
        return Balanced((k - center) @ to_keys, to_queries, to_keys, center, float(singular.sum()))

    def step(self, error: float) -> float:
        """The step of rounding for which scores are off by `error`, root mean square."""
        return error * math.sqrt(6 / self.spread) if self.spread > 0 else 1.0


class Principal(NamedTuple):
    """Values [M, F] about their mean, by principal axes: float64 channels [M, F], the axes [F, F], the mean [F]."""

    channels: Tensor
    axes: Tensor
    center: Tensor

    @staticmethod
    def of(v: Tensor) -> Principal:
        v = v.double()
        center, _, axes = principal_axes(v)
        axes = axes.flip(1)
        return Principal((v - center) @ axes, axes, center)

    @property
    def size(self) -> float:
        """The root mean square of a value's distance from the mean."""
        return float(self.channels.square().sum(-1).mean().sqrt())

    def step(self, error: float) -> float:
        """The step of rounding for which values are off by `error` of their size, root mean square."""
        return error * self.size * math.sqrt(12 / self.channels.shape[-1]) or 1.0
