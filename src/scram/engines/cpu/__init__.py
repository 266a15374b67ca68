"""The CPU engine, in Numba."""

from .attend import attend
from .attend_backward import attend_backward
from .drawn_tail import tail, tail_backward
from .sample import sample, sample_backward
from .search import search
from .tile_search import tile_search

__all__ = ["attend", "attend_backward", "sample", "sample_backward", "search", "tail", "tail_backward", "tile_search"]
