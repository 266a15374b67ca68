"""The CPU engine, in Numba."""

from .attend import attend
from .attend_backward import attend_backward
from .search import search
from .tile import tile_search

__all__ = ["attend", "attend_backward", "search", "tile_search"]
