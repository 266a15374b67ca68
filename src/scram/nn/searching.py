"""What the modules share: the settings of a search, and the matches kept from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import api, errors
from ..estimators import Estimator
from ..layout_hints import accept
from ..types import Matches, Score, Search


class Searching(nn.Module):
    """A module that searches."""

    kept_index: Tensor | None
    kept_score: Tensor | None

    def __init__(
        self, search: Search | None, warm_search: Search | None, radius: int | Sequence[int], keep_matches: bool,
        window: str, impl: str,
    ) -> None:  # fmt: skip
        super().__init__()
        for settings in (search, warm_search):
            if settings is not None:
                errors.settings(settings, Search)
        errors.radius(radius, len(radius) if isinstance(radius, Sequence) else 1)
        self.search, self.warm_search, self.radius = search, warm_search, radius
        self.impl = errors.one_of("impl", impl, errors.IMPLS)
        self.window = errors.one_of("window", window, errors.WINDOWS)
        self.keep_matches = errors.flag("keep_matches", keep_matches)
        self.register_buffer("kept_index", None, persistent=False)
        self.register_buffer("kept_score", None, persistent=False)
        self.kept_grid: tuple[int, ...] = ()

    @property
    def matches(self) -> Matches | None:
        """What the last call in evaluation mode found, where `keep_matches` is set."""
        if self.kept_index is None or self.kept_score is None:
            return None
        return Matches(self.kept_index, self.kept_score.float(), self.kept_grid)  # .half() reaches buffers

    def reset(self) -> None:
        """Forget the kept matches: another video, another picture."""
        self.kept_index = self.kept_score = None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, warm: Matches | None, key_mask: Tensor | None, *,
        causal: bool = False, score: Score = "dot", method: Estimator | None = None, **attends: Any,
    ) -> Tensor:  # fmt: skip
        """Search from `warm` or from what was kept, then attend, or estimate with `method`: out [B, H, *G, F]."""
        legal: dict[str, Any] = {"causal": causal, "key_mask": key_mask, "score": score, "impl": self.impl}
        found, attends = self._find(q, k, warm, legal), {"radius": self.radius, **legal, **attends}
        if method is not None:
            return api.estimate(q, k, v, found, method=method, **attends).out
        return api.attend(q, k, v, found, window=self.window, **attends).out

    def _find(self, q: Tensor, k: Tensor, warm: Matches | None, legal: dict[str, Any]) -> Matches:
        assert self.search is not None
        # In training every batch is another picture, and a checkpoint would search again from other matches.
        # An exported program is a function: it keeps nothing.
        keep = self.keep_matches and not self.training and not torch.compiler.is_exporting()
        kept = self.matches if warm is None and keep else None
        if kept is not None and (kept.index.shape[:-1], kept.key_grid) == (q.shape[:-1], tuple(k.shape[2:-1])):
            warm = kept if kept.index.device == q.device else None
        search = self.search if warm is None or self.warm_search is None else self.warm_search
        accept(q.shape, k.shape)  # the module made them
        found = api.search(q, k, search=search, warm=warm, **legal)
        if keep:
            self.kept_index, self.kept_score, self.kept_grid = found.index, found.score, found.key_grid
        return found
