"""The CPU engine, in Numba."""

from .attend import attend
from .attend_backward import attend_backward
from .hybrid import tail, tail_backward
from .sample import sample, sample_backward
from .search import search

__all__ = ["attend", "attend_backward", "sample", "sample_backward", "search", "tail", "tail_backward"]
