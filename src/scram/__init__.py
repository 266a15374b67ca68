"""SCRAM, Spatially Coherent Randomized Attention Maps: attention over grids in O(n log n)."""

from . import dispatch, measure, nn, patch
from .api import attend, attention, estimate, search
from .estimators import Estimate, Hybrid, MetropolisHastings, Snis
from .exact import exact_attention, exact_search, merge
from .patch import patch_sdpa
from .trust import Trust, trust
from .types import Attended, Matches, Search

__version__ = "0.1.0"
__all__ = [
    "Attended",
    "Estimate",
    "Hybrid",
    "Matches",
    "MetropolisHastings",
    "Search",
    "Snis",
    "Trust",
    "attend",
    "attention",
    "dispatch",
    "estimate",
    "exact_attention",
    "exact_search",
    "measure",
    "merge",
    "nn",
    "patch",
    "patch_sdpa",
    "search",
    "trust",
]
