"""The attention explorer: one HTML page on which every query shows where it attends."""

from .api import Explorer, explore

__all__ = ["Explorer", "explore"]
