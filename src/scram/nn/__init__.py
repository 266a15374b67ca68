"""Modules: projections and heads around `search` and `attend`, no mathematics of their own."""

from .grid_attention import GridAttention
from .matcher import Correspondence, Matcher
from .non_local import NonLocalBlock

__all__ = ["Correspondence", "GridAttention", "Matcher", "NonLocalBlock"]
