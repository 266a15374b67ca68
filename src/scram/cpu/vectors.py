"""Rows of feature arrays [points, width]: their product, and a multiple of one added to another."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from .compiled import compiled


@compiled
def dot(a, i, b, j):
    total = a.dtype.type(0)
    for e in range(a.shape[1]):
        total += a[i, e] * b[j, e]
    return total


@compiled
def add(a, i, factor, b, j):
    """a[i] += factor * b[j]"""
    for e in range(a.shape[1]):
        a[i, e] += factor * b[j, e]
