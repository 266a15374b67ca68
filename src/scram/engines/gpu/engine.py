"""The GPU engine's functions by the names of the protocol."""

import torch

from ...core.calls import Found, SearchCall
from .attend.query import attend as attend
from .attend.query_backward import attend_backward as attend_backward
from .cluster.backward import cluster_backward as cluster_backward
from .cluster.forward import cluster as cluster
from .cluster_tail.backward import cluster_tail_backward as cluster_tail_backward
from .cluster_tail.forward import cluster_tail as cluster_tail
from .decode import decode as decode
from .drawn_tail.backward import drawn_tail_backward as drawn_tail_backward
from .drawn_tail.forward import drawn_tail as drawn_tail
from .earlier.backward import earlier_backward as earlier_backward
from .earlier.forward import earlier as earlier
from .route.route import route as route
from .route.start import routed_start as routed_start
from .runtime.launch import clear_caches as clear_caches
from .sample.visits import sample as sample
from .sample.visits import sample_backward as sample_backward
from .search.query import search as query_search
from .search.tile import tile_search
from .window_scores.backward import window_scores_backward as window_scores_backward
from .window_scores.forward import window_scores as window_scores


def search(call: SearchCall) -> Found:
    return tile_search(call) if call.method == "tile" else query_search(call)


def expect(rank: int, dtype: torch.dtype, gradients: bool) -> None:
    """Kernels are compiled one by one: that takes little."""
