"""What an engine is given and what it returns: one immutable value per operator, one named field per argument.

The public functions validate their arguments and make a call; an engine takes it as its only argument. `ops` derives
the schema of a torch operator from the annotations below, so tensors come first and settings after them.
A call is a NamedTuple: it is made 2.5 times faster than a frozen dataclass (1.6 against 4.1 us for a search).

Shapes: q [B, H, *G, E], k [B, Hk, *G', E], v [B, Hk, *G', F]; q, k and k_extra hold the features prepared for the score
(`scoring`), so engines know the dot product only. `key_mask` is bool [B, *G'] or [B, H, *G']. Indices are int32 flat
row-major indices into the key grid, -1 for none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

# A user's own score (q [..., E], k [..., E]) -> [...]; None is the dot product. Never part of an operator.
ScoreFunction = Callable[[Tensor, Tensor], Tensor]


class SearchCall(NamedTuple):
    """Find `matches` keys of high score for every query (Algorithm 1 for method="query")."""

    q: Tensor
    k: Tensor
    seed: Tensor  # int64 []
    key_mask: Tensor | None
    warm: Tensor | None  # int32 [B, H, *G, any number]: indices to start from
    rows: Tensor | None  # int64 [B, H], the numbers of the rows of q that noise is keyed by; None: b * H + head
    starts: Tensor | None  # int32 [B, H, *G, any number], keys on the grid: a match is near one of them; None: anywhere
    method: str  # "query" or "tile"
    matches: int
    separation: int
    sweeps: int
    jumps: tuple[int, ...]
    propagate: str
    gossip: int
    reach: tuple[int, ...]  # how near, one per axis; () without starts
    random: bool
    causal: bool
    score: ScoreFunction | None = None


class Found(NamedTuple):
    """Result of a search, best match first."""

    index: Tensor  # type: ignore[assignment]  # int32 [B, H, *G, kappa]
    score: Tensor  # float32 [B, H, *G, kappa]


class AttendCall(NamedTuple):
    """Attend to the union of the windows around every query's matches (Algorithm 2), and to the extra keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor  # type: ignore[assignment]  # int32 [B, H, *G, kappa]
    key_mask: Tensor | None
    k_extra: Tensor | None  # [B, Hk, X, E]
    v_extra: Tensor | None  # [B, Hk, X, F]
    dropout_seed: Tensor | None  # int64 []; None without dropout
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    radius: tuple[int, ...]  # one per axis
    causal: bool
    scale: float
    weight: str
    dropout_p: float
    window: str  # "query" or "tile"
    score: ScoreFunction | None = None


class AttendGrads(NamedTuple):
    """Gradients of an AttendCall; None for the extra keys where there are none."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_extra: Tensor | None
    v_extra: Tensor | None


class DrawnTailCall(NamedTuple):
    """Join the attention over the windows (`near_out`, `near_lse`) with keys drawn for all others (`DrawnKeys`)."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor  # type: ignore[assignment]  # int32 [B, H, *G, kappa]
    key_mask: Tensor | None
    near_out: Tensor  # [B, H, *G, F]
    near_lse: Tensor  # [B, H, *G]
    seed: Tensor  # int64 []
    dropout_seed: Tensor | None  # int64 [], that of the head; None without dropout
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    samples: int
    stratified: bool
    radius: tuple[int, ...]
    causal: bool
    scale: float
    dropout_p: float
    window: str  # "query" or "tile"
    score: ScoreFunction | None = None


class DrawnTail(NamedTuple):
    """Result of a DrawnTailCall. The last three fields are kept for the backward pass."""

    out: Tensor  # [B, H, *G, F]
    lse: Tensor  # [B, H, *G]
    variance: Tensor  # [B, H, *G, F], that of the draw; inf, unknown, with dropout
    offset: Tensor  # [B, H, *G], what a query adds to the scores of its tail; a constant
    names: Tensor  # int32 [B, H, m], the keys that the queries of a row share
    represents: Tensor  # float32 [B, H, m], how many keys each stands for; [B, H, 0] unless stratified


class TailGrads(NamedTuple):
    """Gradients of a DrawnTailCall or SampleCall; None for the head where there is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    near_out: Tensor | None
    near_lse: Tensor | None


class SampleCall(NamedTuple):
    """Attend to keys that every query draws ("snis") or walks to ("metropolis") on its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    modes: Tensor  # int32 [B, H, *G, kappa], the matches that exist first
    count: Tensor  # type: ignore[assignment]  # int32 [B, H, *G], how many exist
    total: Tensor  # int32 [B, H, *G], legal keys of each query
    order: Tensor | None  # int64 [B, M] or [B, H, M], as the mask: the legal keys ascending
    key_mask: Tensor | None
    near_out: Tensor | None  # attention over the extra keys
    near_lse: Tensor | None
    seed: Tensor  # int64 []
    table: Tensor  # int32 [2 R + 2], running sums of the weights of the steps -R..R
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    method: str  # "snis" or "metropolis"
    samples: int
    alpha: float
    chains_per_mode: int
    burn_in: int
    causal: bool
    scale: float
    score: ScoreFunction | None = None


class Sampled(NamedTuple):
    """Result of a SampleCall; a diagnostic that the method does not have holds anything."""

    out: Tensor  # [B, H, *G, F]
    lse: Tensor  # [B, H, *G]
    variance: Tensor  # [B, H, *G, F]
    ess: Tensor  # [B, H, *G]
    acceptance: Tensor  # [B, H, *G]
    rhat: Tensor  # [B, H, *G]


class ClusterCall(NamedTuple):
    """Group the keys of every key row by content, as the queries and the values see it (`clustering`)."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None  # bool [B, *G'] or [B, Hk, *G']
    warm_centers: Tensor | None  # [B, Hk, C, E]: where to start
    warm_values: Tensor | None  # [B, Hk, C, F]
    seed: Tensor  # int64 []
    rows: Tensor | None  # int64 [B, H], as in SearchCall; a row of keys takes that of its first row of queries
    count: int  # type: ignore[assignment]  # of clusters; `clusters` where there are fewer keys
    steps: int
    scale: float

    @property
    def clusters(self) -> int:
        """C: not more than there are keys."""
        return min(self.count, math.prod(self.k.shape[2:-1]))


class Clustered(NamedTuple):
    """Result of a ClusterCall. A cluster without keys has size 0 and center and value 0."""

    centers: Tensor  # float32 (float64 for float64) [B, Hk, C, E], mean key
    values: Tensor  # float32 (float64 for float64) [B, Hk, C, F], mean value
    sizes: Tensor  # int32 [B, Hk, C]
    label: Tensor  # int32 [B, Hk, *G'], the cluster of each key; -1 for a key that is masked or not finite


class ClusterGrads(NamedTuple):
    """Gradients of a ClusterCall, given the labels."""

    k: Tensor
    v: Tensor


class ClusterTailCall(NamedTuple):
    """Join the attention over the windows (`near_out`, `near_lse`) with clusters of all keys outside of them.

    Hc, the heads of the clusters, is Hk, or H where heads of queries differ.
    """

    q: Tensor
    index: Tensor  # type: ignore[assignment]  # int32 [B, H, *G, kappa]
    label: Tensor  # int32 [B, Hc, *G'], -1 for a key in no cluster
    centers: Tensor  # float32 (float64 for float64) [B, Hc, C, E]
    values: Tensor  # float32 (float64 for float64) [B, Hc, C, F]
    sizes: Tensor  # int32 [B, Hc, C]
    gains: Tensor | None  # float32 (float64 for float64) [B, Hc, C], factors on the weights of clusters; None is 1
    near_out: Tensor  # [B, H, *G, F]
    near_lse: Tensor  # [B, H, *G]
    dropout_seed: Tensor | None  # int64 []; None without dropout
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    radius: tuple[int, ...]
    scale: float
    dropout_p: float
    extras: int  # number of extra keys
    window: str  # "query" or "tile"

    @property
    def first_name(self) -> int:
        """The name of cluster 0 in dropout: after those of the keys and extra keys."""
        return math.prod(self.label.shape[2:]) + self.extras


class ClusterTailGrads(NamedTuple):
    """Gradients of a ClusterTailCall."""

    q: Tensor
    centers: Tensor
    values: Tensor
    near_out: Tensor
    near_lse: Tensor
