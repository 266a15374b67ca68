"""The engine for CUDA, in Triton: float16, bfloat16, float32, ranks 1 to 4."""

from .attend import attend
from .attend_backward import attend_backward
from .drawn_tail import tail
from .drawn_tail_backward import tail_backward
from .sample import sample, sample_backward
from .search import search
from .tile_attend import tile_attend
from .tile_attend_backward import tile_attend_backward
from .tile_search import tile_search

__all__ = [
    "attend",
    "attend_backward",
    "sample",
    "sample_backward",
    "search",
    "tail",
    "tail_backward",
    "tile_attend",
    "tile_attend_backward",
    "tile_search",
]
