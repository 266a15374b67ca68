"""Two photographs as queries, keys and values, searched and attended in one step: for `scram demo` and figures."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.tails.clusters import Clusters
from ..functional import attend, cluster, search
from ..images.features import PatchFeatures
from ..images.resample import own_places
from ..options import Impl
from ..quality.timing import now
from ..results import Attended, Matches
from ..settings import Search
from .arguments import MATCH_PATCH, MATCH_RADIUS, MATCH_SCALE, MATCH_WIDTH


@dataclass(frozen=True)
class Pair:
    """Photographs A and B `[H, W, 3]`; q from A, k from B `[1, 1, H, W, width]`; v holds B's colors and places.

    The last two channels of v are each key's own (x, y), so that attention returns an expected place in B,
    finer than a pixel.
    """

    a: Tensor
    b: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class PairResult:
    """What a search and an attention over its windows say, and the seconds they took."""

    matches: Matches
    attended: Attended
    seconds: dict[str, float]

    @property
    def rebuilt(self) -> Tensor:
        """A from B's colors at the places found `[H, W, 3]`."""
        return self.attended.out[0, 0, ..., :3].cpu()

    @property
    def warp(self) -> Tensor:
        """(x, y) in B of each pixel of A `[H, W, 2]`, NaN where no key was found."""
        warp = self.attended.out[0, 0, ..., 3:].cpu()
        return torch.where((self.matches.index[0, 0, ..., :1] >= 0).cpu(), warp, torch.nan)


def pair_of(a: Tensor, b: Tensor, patch: int = MATCH_PATCH, width: int = MATCH_WIDTH, device: str = "cpu") -> Pair:
    """Patch features of both photographs from one PCA, fitted on A."""
    a = a.to(device)
    b = b.to(device)
    features = PatchFeatures.fit(a, min(width, 3 * patch * patch), patch)
    places = own_places(*b.shape[:2]).flip(-1).to(device)
    return Pair(a, b, features(a), features(b), torch.cat((b, places), -1)[None, None])


def find(
    pair: Pair,
    setting: Search,
    radius: int = MATCH_RADIUS,
    scale: float = MATCH_SCALE,
    impl: Impl = "auto",
    tail: Clusters | None = None,
) -> PairResult:
    """Search and attend; where there is a tail, cluster first, and start the search from routed keys.

    The seconds of a first call hold what it compiles.
    """
    device = pair.q.device.type
    codebook = None
    seconds = {}
    if tail is not None:
        start = now(device)
        codebook = cluster(pair.q, pair.k, pair.v, clusters=tail, scale=scale, impl=impl)
        seconds["cluster"] = now(device) - start
    start = now(device)
    matches = search(pair.q, pair.k, search=setting, codebook=codebook, scale=scale, impl=impl)
    seconds["search"] = now(device) - start
    start = now(device)
    attended = attend(pair.q, pair.k, pair.v, matches, radius=radius, scale=scale, tail=codebook, impl=impl)
    seconds["attend"] = now(device) - start
    return PairResult(matches, attended, seconds)
