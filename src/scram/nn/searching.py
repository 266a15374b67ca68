"""What the modules share: the settings of a search, and the matches kept from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import api, errors
from ..codebook import Codebook
from ..defaults import SEARCH, default_tail, goes_dense
from ..estimators import Clusters, Estimator, Hybrid
from ..layout_hints import accept
from ..options import Auto, Impl, Weight, Window
from ..scoring import accumulator
from ..types import Matches, Score, Search

Tail = Estimator | Codebook | Auto | None


class Searching(nn.Module):
    """A module that searches."""

    kept_index: Tensor | None
    kept_score: Tensor | None

    def __init__(
        self, search: Search | Auto | None, warm_search: Search | None, radius: int | Sequence[int], keep_matches: bool,
        tail: Tail, window: Window, impl: Impl,
    ) -> None:  # fmt: skip
        super().__init__()
        if search is not None:
            errors.search_settings(search, SEARCH)
        if warm_search is not None:
            errors.settings(warm_search, Search)
        errors.radius(radius, len(radius) if isinstance(radius, Sequence) else 1)
        self.search, self.warm_search, self.radius, self.tail = search, warm_search, radius, tail
        self.impl = errors.one_of("impl", impl, errors.IMPLS)
        self.window = errors.one_of("window", window, errors.WINDOWS)
        self.keep_matches = errors.flag("keep_matches", keep_matches)
        self.register_buffer("kept_index", None, persistent=False)
        self.register_buffer("kept_score", None, persistent=False)
        self.kept_grid: tuple[int, ...] = ()
        self.codebook: Codebook | None = None  # of the last call in evaluation mode, where `keep_matches` is set

    @property
    def matches(self) -> Matches | None:
        """What the last call in evaluation mode found, where `keep_matches` is set."""
        if self.kept_index is None or self.kept_score is None:
            return None
        return Matches(self.kept_index, self.kept_score.float(), self.kept_grid)  # .half() reaches buffers

    def reset(self) -> None:
        """Forget the kept matches and clusters: another video, another picture."""
        self.kept_index = self.kept_score = self.codebook = None

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, warm: Matches | None, score: Score, weight: Weight = "softmax"
    ) -> bool:  # fmt: skip
        """Whether the call is dense attention: without a search, or where nothing is said and that is cheaper."""
        if self.search is None:
            return True
        said = warm is not None or self.keep_matches or self.impl != "auto"
        automatic = self.search.__class__ is str and self.tail.__class__ is str and not said
        return automatic and goes_dense(q, k, v, weight, score)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, warm: Matches | None, key_mask: Tensor | None, *,
        causal: bool = False, score: Score = "dot", weight: Weight = "softmax", scale: float | None = None,
        dropout_p: float = 0.0, extra: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Search from `warm` or from what was kept, then attend, with a tail or by an estimator: out [B, H, *G, F]."""
        legal: dict[str, Any] = {"key_mask": key_mask, "score": score, "impl": self.impl}
        found = self._find(q, k, warm, {"causal": causal, **legal})
        attends: dict[str, Any] = {"radius": self.radius, "scale": scale, "extra": extra, "causal": causal, **legal}
        tail: Any = self.tail
        if tail.__class__ is str:
            tail = default_tail(weight, causal, score)
        if isinstance(tail, Estimator) and not isinstance(tail, (Clusters, Hybrid)):
            return api.estimate(q, k, v, found, method=tail, **attends).out
        if isinstance(tail, Clusters):
            tail = self._cluster(q, k, v, found, tail, {"scale": scale, **legal})
        attends |= {"weight": weight, "dropout_p": dropout_p, "window": self.window, "tail": tail}
        return api.attend(q, k, v, found, **attends).out

    def _cluster(
        self, q: Tensor, k: Tensor, v: Tensor, found: Matches, clusters: Clusters, how: dict[str, Any]
    ) -> Codebook:  # fmt: skip
        """Clusters of the keys, from those of the last call where they are kept and fit."""
        warm, keep = self.codebook if self._keeps() else None, self._keeps()
        if warm is not None:
            mine = (warm.label.shape, warm.centres.device, warm.values.shape[-1])
            same = mine == (k.shape[:-1], k.device, v.shape[-1]) and warm.centres.dtype == accumulator(v.dtype)
            warm = warm if same and not clusters.fit else None
        fit: dict[str, Any] = {"matches": found, "radius": self.radius} if clusters.fit else {}
        book = api.cluster(q, k, v, clusters=clusters, warm=warm, **fit, **how)
        if keep:
            self.codebook = book.detach()
        return book

    def _keeps(self) -> bool:
        # In training every batch is another picture, and a checkpoint would search again from other matches.
        # An exported program is a function: it keeps nothing.
        return self.keep_matches and not self.training and not torch.compiler.is_exporting()

    def _find(self, q: Tensor, k: Tensor, warm: Matches | None, legal: dict[str, Any]) -> Matches:
        settings = errors.search_settings(self.search, SEARCH)
        kept = self.matches if warm is None and self._keeps() else None
        if kept is not None and (kept.index.shape[:-1], kept.key_grid) == (q.shape[:-1], tuple(k.shape[2:-1])):
            warm = kept if kept.index.device == q.device else None
        search = settings if warm is None or self.warm_search is None else self.warm_search
        accept(q.shape, k.shape)  # the module made them
        found = api.search(q, k, search=search, warm=warm, **legal)
        self._keep(found)
        return found

    def _keep(self, found: Matches) -> None:
        if self._keeps():
            self.kept_index, self.kept_score, self.kept_grid = found.index, found.score, found.key_grid
