"""The attention explorer: one HTML page on which every query shows where it attends."""

from .explore import Explorer, explore

__all__ = ["Explorer", "explore"]
