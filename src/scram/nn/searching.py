"""What the modules share: the settings of a search, and the matches kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core import checks, pipeline
from ..core.bias import width_of
from ..core.decoding import Cache
from ..core.pipeline import Result, execute
from ..core.resolve import Request, as_search
from ..core.tails.base import Tail
from ..core.tails.clusters import Clusters, Codebook
from ..options import IMPLS, Auto, Impl
from ..results import Matches
from ..settings import Search
from ..spec.schedule import TILE_QUERIES
from ..spec.scoring import accumulator


class Searching(nn.Module):
    """A module that searches.

    Args:
        search, radius, tail, impl: as in `scram.attention`; `search` None for dense attention, or beside
            `Clusters` or a `Codebook` for these alone.
        warm_search: settings for calls that start from matches; None: those of `search`.
        keep_matches: whether a call in evaluation mode starts from the matches and clusters of the call before.
    """

    kept_index: Tensor | None  # int32 [B, H, *G, kappa]
    kept_score: Tensor | None  # [B, H, *G, kappa]

    def __init__(
        self,
        *,
        search: Search | Auto | None,
        warm_search: Search | None,
        radius: int | Sequence[int],
        keep_matches: bool,
        tail: Tail | Auto | None,
        impl: Impl,
    ) -> None:
        super().__init__()
        if search is not None:
            as_search(search)
        if warm_search is not None:
            checks.instance("warm_search", warm_search, Search, "scram.Search", "; for example scram.Search(sweeps=2)")
        checks.radius(radius, len(radius) if isinstance(radius, Sequence) else 1)
        self.search = search
        self.warm_search = warm_search
        self.radius = radius
        self.tail = tail
        self.impl = checks.one_of("impl", impl, IMPLS)
        self.keep_matches = checks.flag("keep_matches", keep_matches)
        self.register_buffer("kept_index", None, persistent=False)
        self.register_buffer("kept_score", None, persistent=False)
        self.kept_grid: tuple[int, ...] = ()
        self.codebook: Codebook | None = None  # of the last call in evaluation mode, where `keep_matches` is set

    @property
    def is_dense(self) -> bool:
        """Whether every call is dense attention: there is no search, and no tail is named to stand alone."""
        return self.search is None and (self.tail is None or isinstance(self.tail, str))

    @property
    def matches(self) -> Matches | None:
        """What the last call in evaluation mode found, where `keep_matches` is set."""
        if self.kept_index is None or self.kept_score is None:
            return None
        return Matches(self.kept_index, self.kept_score.float(), self.kept_grid)  # .half() reaches buffers

    def reset(self) -> None:
        """Forget the kept matches and clusters: another video, another picture."""
        self.kept_index = self.kept_score = self.codebook = None

    def _run(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Result:
        """Attention with the module's own settings, from what was kept: `request` has the other options."""
        if self.is_dense:
            return execute(pipeline.run, q, k, v, request._replace(search=None, tail=None))
        request = (
            request._replace(search=None, impl=self.impl) if self.search is None else self._searching(q, k, request)
        )
        request = request._replace(
            tail=self.tail,
            radius=self.radius,
            warm_codebook=self._kept_codebook(k, v, request),
            caller=None if torch.compiler.is_compiling() else id(self),  # compiled, layers share their code
        )
        result = execute(pipeline.run, q, k, v, request)
        if result.matches is not None:
            self._keep(result.matches)
        if self._keeps():
            self.codebook = None if result.codebook is None else result.codebook.detach()
        return result

    def _cache(self, grid: Sequence[int], request: Request, half: bool) -> Cache:
        """A cache with the module's own settings; `request` has the other options."""
        if not request.causal:
            raise ValueError("decoding needs causal order: make the layer with causal=True")
        tail = self.tail
        if self.is_dense:  # one stretch, of which every key is attended
            tail = Clusters(stretch=-(-math.prod(checks.grid(grid)) // TILE_QUERIES) * TILE_QUERIES)
        if tail is None:
            raise ValueError("decoding needs clusters, or every key: make the layer with tail='auto' or search=None")
        return Cache(
            grid,
            tail=tail,
            search=self.search,
            scale=request.scale,
            score=request.score,
            impl=self.impl,
            half=half,
        )

    def _find(self, q: Tensor, k: Tensor, request: Request) -> Matches:
        """The search alone."""
        matches = execute(pipeline.search, q, k, None, self._searching(q, k, request))
        self._keep(matches)
        return matches

    def _searching(self, q: Tensor, k: Tensor, request: Request) -> Request:
        """The request with the settings of the search, from warm matches or from those that were kept."""
        assert self.search is not None
        warm = request.warm
        kept = self.matches if warm is None and self._keeps() else None
        if kept is not None and (kept.index.shape[:-1], kept.key_grid) == (q.shape[:-1], tuple(k.shape[2:-1])):
            warm = kept if kept.index.device == q.device else None
        search = self.search if warm is None or self.warm_search is None else self.warm_search
        return request._replace(search=search, warm=warm, impl=self.impl, keeps_matches=self.keep_matches)

    def _kept_codebook(self, k: Tensor, v: Tensor, request: Request) -> Codebook | None:
        """The clusters of the last call, where they are kept and fit k [B, Hk, *G', E] and v [B, Hk, *G', F].

        Not under causal order: those of another call may come from later keys.
        """
        kept = self.codebook if self._keeps() and not request.causal else None
        if kept is None:
            return None
        if request.score == "dot":
            width = k.shape[-1] + (0 if request.bias is None else width_of(request.bias, k.dtype))
            if kept.centers.shape[-1] != width:
                return None
        same_keys = kept.label.shape == k.shape[:-1] and kept.centers.device == k.device
        same_values = kept.values.shape[-1] == v.shape[-1] and kept.centers.dtype == accumulator(v.dtype)
        return kept if same_keys and same_values else None

    def _keeps(self) -> bool:
        # In training every batch is another picture, and a checkpoint would search again from other matches.
        # An exported program is a function: it keeps nothing.
        return self.keep_matches and not self.training and not torch.compiler.is_exporting()

    def _keep(self, matches: Matches) -> None:
        if self._keeps():
            self.kept_index = matches.index
            self.kept_score = matches.score
            self.kept_grid = matches.key_grid
