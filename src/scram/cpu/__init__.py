"""The CPU engine, in Numba."""

from .attend import attend
from .attend_backward import attend_backward
from .search import search

__all__ = ["attend", "attend_backward", "search"]
