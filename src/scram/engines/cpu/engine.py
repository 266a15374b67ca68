"""The CPU engine's functions by the names of the protocol."""

from .ahead import expect
from .attend import attend
from .attend_backward import attend_backward
from .cluster import cluster
from .cluster_backward import cluster_backward
from .cluster_tail import cluster_tail
from .cluster_tail_backward import cluster_tail_backward
from .decode import decode
from .drawn_tail import drawn_tail, drawn_tail_backward
from .earlier import earlier, earlier_backward
from .route import route, routed_start
from .sample import sample, sample_backward
from .search import search
from .window_scores import window_scores, window_scores_backward

__all__ = [
    "attend",
    "attend_backward",
    "cluster",
    "cluster_backward",
    "cluster_tail",
    "cluster_tail_backward",
    "decode",
    "drawn_tail",
    "drawn_tail_backward",
    "earlier",
    "earlier_backward",
    "expect",
    "route",
    "routed_start",
    "sample",
    "sample_backward",
    "search",
    "window_scores",
    "window_scores_backward",
]


def clear_caches() -> None:
    """It keeps none: compiled code belongs to Numba, in the process and on disk."""
