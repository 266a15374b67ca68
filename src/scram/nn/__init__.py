"""Modules: projections and heads around `search` and `attend`, no mathematics of their own."""

from .correlation import CorrelationLookup
from .grid_attention import GridAttention
from .matcher import Correspondence, Matcher
from .non_local import NonLocalBlock

__all__ = ["CorrelationLookup", "Correspondence", "GridAttention", "Matcher", "NonLocalBlock"]
