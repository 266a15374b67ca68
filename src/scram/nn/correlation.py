"""The lookup of RAFT, where RAFT has its correlation block."""

from __future__ import annotations

from torch import Tensor

from ..core import checks
from ..core.checks import explains
from ..core.correlation import lookup, pyramid
from ..core.precision import ignores_autocast
from ..options import Impl


class CorrelationLookup:
    """Takes the place of RAFT's `CorrBlock`: the same arguments and results, memory linear in the size of the pictures.

    The pyramid of keys is made once; every call scores the windows anew. No parameters. Differentiable in both feature
    maps and in the coordinates.

    Args:
        fmap1: features of the first picture, [B, E, h1, w1].
        fmap2: features of the second picture, [B, E, h2, w2].
        num_levels: of the pyramid of the second picture.
        radius: of the window on every level.
        impl: "auto" or the name of an implementation.

    >>> import torch
    >>> fmap1, fmap2 = torch.randn(2, 1, 32, 16, 24).unbind()
    >>> corr_fn = CorrelationLookup(fmap1, fmap2, num_levels=4, radius=4)
    >>> corr_fn(torch.zeros(1, 2, 16, 24)).shape
    torch.Size([1, 324, 16, 24])
    """

    @explains
    def __init__(
        self, fmap1: Tensor, fmap2: Tensor, num_levels: int = 4, radius: int = 4, *, impl: Impl = "auto"
    ) -> None:
        checks.feature_maps(fmap1, fmap2)
        checks.whole("num_levels", num_levels, 1)
        self.radius = checks.count("radius", radius)
        self.impl = impl
        self.queries = _last(fmap1)
        self.levels = pyramid(_last(fmap2), num_levels)

    @ignores_autocast
    def __call__(self, coords: Tensor) -> Tensor:
        """Places (x, y) in the second picture, float32 or float64 [B, 2, h1, w1] -> [B, num_levels * (2b+1)^2, h1, w1].

        The result is float32, float64 for float64 features.
        """
        checks.flow_coords(self.queries, coords)
        own = coords.movedim(1, -1).flip(-1).unsqueeze(1)
        return lookup(self.queries, self.levels, own, self.radius, self.impl).squeeze(1).movedim(-1, 1).contiguous()

    def __repr__(self) -> str:
        grids = " and ".join(" x ".join(map(str, x.shape[2:-1])) for x in (self.queries, self.levels[0]))
        return f"CorrelationLookup({grids}, num_levels={len(self.levels)}, radius={self.radius})"


def _last(fmap: Tensor) -> Tensor:
    """[B, E, h, w] -> [B, 1, h, w, E]"""
    return fmap.movedim(1, -1).unsqueeze(1).contiguous()
