"""The reference as an engine. Autograd differentiates it, so it has no backward functions."""

import torch

from ...core.calls import Found, SearchCall
from ...spec.clustering import cluster
from ...spec.routing import route, routed_start
from .attend import attend as attend
from .cluster_tail import cluster_tail
from .decode import decode
from .drawn_tail import drawn_tail
from .earlier import earlier
from .sample import sample
from .search import search as query_search
from .tile_search import tile_search
from .window_scores import window_scores

__all__ = [
    "attend",
    "clear_caches",
    "cluster",
    "cluster_tail",
    "decode",
    "drawn_tail",
    "earlier",
    "expect",
    "route",
    "routed_start",
    "sample",
    "search",
    "window_scores",
]


def search(call: SearchCall) -> Found:
    with torch.no_grad():  # a callable score may hold parameters
        return (tile_search if call.method == "tile" else query_search)(
            call._replace(q=call.q.detach(), k=call.k.detach())
        )


def clear_caches() -> None:
    """It keeps none."""


def expect(rank: int, dtype: torch.dtype, gradients: bool) -> None:
    """Nothing is compiled."""
