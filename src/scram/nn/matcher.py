"""Dense correspondence: where each query's content lies among the keys, by a search and a softmax around its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import checks, pipeline
from ..core.balanced import balanced
from ..core.checks import explains
from ..core.pipeline import execute
from ..core.resolve import Request, as_search
from ..options import Auto, Impl
from ..results import MatchedPoints, Matches
from ..settings import Score, Search
from ..spec import places
from ..spec.grid import Grid, coordinates, grid_of
from ..spec.scoring import accumulator, check_score, default_scale
from .searching import Searching

# From a start that is near: two sweeps of comparing with the neighbors, and draws around each match.
REFINE = Search(sweeps=2, jumps=(2, 1), gossip=0)


class Correspondence(NamedTuple):
    """What a `Matcher` finds.

    matches: the keys found, best first, [B, H, *G, kappa].
    warp: float32 [B, H, *G, rank], where on the key grid each query lies: the mean place of the keys in the windows
        around the matches, weighted by their softmax (soft-argmax). On planes (x, y): x to the right, y down, the
        center of the first key at (0, 0); on other grids the last axis is first. NaN where no key was found. It
        carries gradients to q and k.
    certainty: float32 [B, H, *G], the weight of the best key among those of the windows, 0..1; 0 where there is none.
    lse: [B, H, *G], the log of the normalizer, with gradients.
    back: for every key the query found, [B, H, *G', 1]; None unless the matcher is bidirectional.
    agrees: bool [B, H, *G], whether the way there and back ends near the query; None unless it is bidirectional.
    """

    matches: Matches
    warp: Tensor
    certainty: Tensor
    lse: Tensor
    back: Matches | None = None
    agrees: Tensor | None = None

    @property
    def flow(self) -> Tensor:
        """`warp` less each query's own place on the key grid: [B, H, *G, rank], (right, down) on planes."""
        return self.warp - self._own_places()

    def sample(self, n: int, *, seed: int = 0) -> MatchedPoints:
        """n matches of every head, drawn by certainty and spread over the grid: [B, H, n, rank] and [B, H, n].

        Where the matcher is bidirectional only matches on which both ways agree are drawn. A head that has fewer holds
        NaN and certainty 0 in their place. Places in the keys carry gradients.

        Args:
            n: how many; at most the queries of a head.
            seed: of the draw; the same on every device.
        """
        queries = math.prod(self.certainty.shape[2:])
        if checks.whole("n", n, 1) > queries:
            raise ValueError(f"n must be at most the {queries} queries of a head, got {n}")
        checks.count("seed", seed)
        certainty = self.certainty if self.agrees is None else self.certainty * self.agrees
        taken = balanced(certainty.flatten(0, 1), n, seed).reshape(*certainty.shape[:2], n)  # [B, H, n]
        there = taken >= 0
        taken = taken.clamp(min=0)
        rank = self.warp.shape[-1]
        every = torch.arange(queries, device=taken.device)
        own = torch.stack(coordinates(every, tuple(certainty.shape[2:])), -1).flip(-1).float()  # [N, rank]
        b = self.warp.flatten(2, -2).gather(2, taken.unsqueeze(-1).expand(*taken.shape, rank))
        return MatchedPoints(
            torch.where(there.unsqueeze(-1), own[taken], torch.nan),
            torch.where(there.unsqueeze(-1), b, torch.nan),
            torch.where(there, certainty.flatten(2).gather(2, taken), 0),
        )

    def _own_places(self) -> Tensor:
        """Each query's own place on the key grid [*G, rank], the last axis first."""
        grid = tuple(self.warp.shape[2:-1])
        keys = self.matches.key_grid
        axes = [
            (torch.arange(n, dtype=torch.float32, device=self.warp.device) + 0.5) * (m / n) - 0.5
            for n, m in zip(grid, keys, strict=True)
        ]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flip(-1)


class Matcher(Searching):
    """Finds for every query its place among the keys: q [B, H, *G, E], k [B, Hk, *G', E] -> `Correspondence`.

    No parameters. Differentiable in q and k through `warp` and `lse`.

    Args:
        radius: of the windows that the mean place is taken from; an int or one per axis. Smaller ones are faster and
            farther from dense attention, see docs/gmflow_matching.md.
        search: how to look where nothing is known.
        warm_search: how to look from matches that are given, kept, or of a coarser scale.
        scales: how much coarser each grid is that is searched, coarse to fine, the last 1: (4, 2, 1). Features are
            averaged over cells. Later scales start from the matches before and stay near them: their reach is twice the
            ratio of the scales.
        bidirectional: also searches from the keys to the queries, starting from the pairs found, and says where both
            ways agree.
        tolerance: how far the way there and back may end from the query, in points on every axis, to agree.
        keep_matches: in evaluation mode a call starts from the matches of the call before, where the shapes are equal:
            the frames of a video. `reset` forgets them.
        scale, score, impl: as in `scram.attend`.

    >>> q = torch.randn(1, 1, 12, 16, 32)
    >>> found = Matcher(search=Search(seed=0))(q, q.roll(3, 3))
    >>> found.flow[0, 0, 5, 5].round().int().tolist()
    [3, 0]
    >>> found.sample(50).b.shape
    torch.Size([1, 1, 50, 2])
    """

    @explains
    def __init__(
        self,
        *,
        radius: int | Sequence[int] = 4,
        search: Search | Auto = "auto",
        warm_search: Search = REFINE,
        scales: Sequence[int] = (1,),
        bidirectional: bool = False,
        tolerance: float = 1.0,
        keep_matches: bool = False,
        scale: float | None = None,
        score: Score = "dot",
        impl: Impl = "auto",
    ) -> None:
        as_search(search)
        checks.instance("warm_search", warm_search, Search, "scram.Search", "; for example scram.Search(sweeps=2)")
        super().__init__(
            search=search,
            warm_search=warm_search,
            radius=radius,
            keep_matches=keep_matches,
            tail=None,
            impl=impl,
        )
        checks.scale(scale)
        check_score(score)
        checks.real("tolerance", tolerance, 0.0, math.inf, "[0, inf)")
        self.scales = _scales(scales)
        self.bidirectional = checks.flag("bidirectional", bidirectional)
        self.tolerance = tolerance
        self.scale = scale
        self.score = score

    @explains
    def forward(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, warm: Matches | None = None
    ) -> Correspondence:
        """Search, then the mean place in the windows around what was found.

        Args:
            q, k: [B, H, *G, E], [B, Hk, *G', E].
            key_mask: bool [B, *G'] or [B, H, *G'], True = may be found.
            warm: matches to start from; those of grids of other extents are resampled first.
        """
        checks.queries_keys(q, k)
        checks.key_mask(q, k, key_mask)
        request = Request(
            tail=None, radius=self.radius, key_mask=key_mask, scale=self.scale, score=self.score, impl=self.impl
        )
        if warm is not None:
            checks.instance("warm", warm, Matches, "scram.Matches", "; scram.search returns one")
            same = tuple(warm.index.shape[2:-1]) == grid_of(q) and warm.key_grid == grid_of(k)
            request = request._replace(warm=warm if same else warm.upsample(grid_of(q), grid_of(k)))
        elif len(self.scales) > 1 and not self._has_kept(q, k):
            return self._joined(q, k, self._from_coarse(q, k, request), request)
        return self._joined(q, k, self._find(q, k, request), request)

    def _has_kept(self, q: Tensor, k: Tensor) -> bool:
        kept = self.matches if self._keeps() else None
        return kept is not None and kept.index.shape[:-1] == q.shape[:-1] and kept.key_grid == grid_of(k)

    def _from_coarse(self, q: Tensor, k: Tensor, request: Request) -> Matches:
        """The matches of the finest scale, each scale from the one before."""
        assert self.search is not None
        assert self.warm_search is not None
        matches: Matches | None = None
        before = self.scales[0]
        for scale in self.scales:
            grid, key_grid = (tuple(-(-n // scale) for n in grid_of(x)) for x in (q, k))
            mask = request.key_mask
            if mask is not None and scale > 1:
                mask = _averaged(mask.float().unsqueeze(-1), key_grid).squeeze(-1) > 0
            near = replace(self.warm_search, reach=2 * -(-before // scale))
            at_scale = request._replace(
                search=self.search if matches is None else near,
                key_mask=mask,
                warm=None if matches is None else matches.upsample(grid, key_grid),
            )
            coarse_q = _averaged(q.detach(), grid)
            coarse_k = _averaged(k.detach(), key_grid)
            matches = execute(pipeline.search, coarse_q, coarse_k, None, at_scale)
            before = scale
        assert matches is not None
        self._keep(matches)
        return matches

    def _joined(self, q: Tensor, k: Tensor, matches: Matches, request: Request) -> Correspondence:
        """The mean places around the matches, and the way back."""
        key_grid = matches.key_grid
        every = torch.arange(math.prod(key_grid), device=k.device)
        place = torch.stack(coordinates(every, key_grid), -1).flip(-1)  # [M, rank], the last axis first
        v = place.to(accumulator(k.dtype)).reshape(*key_grid, -1).expand(*k.shape[:-1], -1)
        result = execute(pipeline.run, q, k, v, request._replace(search=None, warm=None, matches=matches))
        assert result.lse is not None
        exists = matches.index[..., 0] >= 0
        factor = default_scale(self.scale, q.shape[-1], self.score, "softmax")
        certainty = (factor * matches.score[..., 0] - result.lse.detach()).exp().clamp(max=1).nan_to_num(0)
        correspondence = Correspondence(
            matches=matches,
            warp=torch.where(exists.unsqueeze(-1), result.out.float(), torch.nan),
            certainty=torch.where(exists, certainty.float(), 0),
            lse=result.lse,
        )
        return self._checked(q, k, correspondence) if self.bidirectional else correspondence

    def _checked(self, q: Tensor, k: Tensor, correspondence: Correspondence) -> Correspondence:
        """With the matches of the way back, and where both ways agree."""
        forward = correspondence.matches
        best = Matches(forward.index[..., :1], forward.score[..., :1], forward.key_grid)
        every_head = k.detach().repeat_interleave(q.shape[1] // k.shape[1], 1)
        request = Request(search=self.warm_search, warm=best.inverse(), score=self.score, impl=self.impl)
        back = execute(pipeline.search, every_head, q.detach(), None, request)
        key = best.index.flatten(2).long()
        home = back.index.flatten(2).gather(2, key.clamp(min=0)).reshape(best.index.shape[:-1])
        apart = places.coords_of(home, grid_of(q)) - places.coords_of(_own(q), grid_of(q))
        agrees = (best.index[..., 0] >= 0) & (apart.abs().amax(-1) <= self.tolerance)
        return correspondence._replace(back=back, agrees=agrees)

    def extra_repr(self) -> str:
        more = f"scales={self.scales}, bidirectional={self.bidirectional}, keep_matches={self.keep_matches}"
        return f"radius={self.radius}, search={self.search}, warm_search={self.warm_search}, {more}"


def _own(q: Tensor) -> Tensor:
    """int32 [*G], the number of each query."""
    return places.own_index(grid_of(q), grid_of(q), q.device)


def _scales(value: Any) -> tuple[int, ...]:
    """Whole numbers that fall to 1."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"scales must be a sequence of ints such as (4, 2, 1), got {value!r}")
    scales = tuple(checks.whole(f"scales[{n}]", x, 1) for n, x in enumerate(value))
    if scales[-1] != 1 or any(a <= b for a, b in pairwise(scales)):
        raise ValueError(f"scales must fall to 1, coarse to fine, such as (4, 2, 1), got {value!r}")
    return scales


def _averaged(x: Tensor, grid: Grid) -> Tensor:
    """[B, H, *G, width] -> [B, H, *grid, width], or without the heads: means over cells, axis by axis."""
    first = x.ndim - 1 - len(grid)
    for axis, extent in enumerate(grid, first):
        if x.shape[axis] != extent:
            last = x.movedim(axis, -1)
            pooled = F.adaptive_avg_pool1d(last.reshape(-1, 1, last.shape[-1]), extent)
            x = pooled.reshape(*last.shape[:-1], extent).movedim(-1, axis)
    return x.contiguous()
