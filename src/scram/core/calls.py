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

import torch
from torch import Tensor

from .._compat import compilable

# A user's own score (q [..., E], k [..., E]) -> [...]; None is the dot product. Never part of an operator.
ScoreFunction = Callable[[Tensor, Tensor], Tensor]


@compilable
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


@compilable
class AttendCall(NamedTuple):
    """Attend to the union of the windows around every query's matches (Algorithm 2), and to the extra keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor  # type: ignore[assignment]  # int32 [B, H, *G, kappa]
    key_mask: Tensor | None
    k_extra: Tensor | None  # [B, Hk, X, E]
    v_extra: Tensor | None  # [B, Hk, X, F]
    label: Tensor | None  # int32 [B, Hc, *G'], the clusters of the keys, beside routes
    routes: Tensor | None  # int32 [B, H, T, W], as in Routed: keys of clusters that a tile routes are left out
    dropout_seed: Tensor | None  # int64 []; None without dropout
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    radius: tuple[int, ...]  # one per axis
    causal: bool
    scale: float
    weight: str
    dropout_p: float
    score: ScoreFunction | None = None


class AttendGrads(NamedTuple):
    """Gradients of an AttendCall; None for the extra keys where there are none."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_extra: Tensor | None
    v_extra: Tensor | None


@compilable
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


@compilable
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


@compilable
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
    """Result of a ClusterCall. A cluster without keys has size 0 and center and value 0.

    Means over the keys are over those that have a label; the last two are constants.
    """

    centers: Tensor  # float32 (float64 for float64) [B, Hk, C, E], mean key
    values: Tensor  # float32 (float64 for float64) [B, Hk, C, F], mean value
    slope: Tensor  # as centers [B, Hk, E, F], mean over the keys of (k - center)^T (v - value)
    sizes: Tensor  # int32 [B, Hk, C]
    label: Tensor  # int32 [B, Hk, *G'], the cluster of each key; -1 for a key that is masked or not finite
    order: Tensor  # int32 [B, Hk, M], the keys by label, ascending; those without one last
    variance: Tensor  # as centers [B, Hk, E], mean over the keys of (k - center)^2
    spreads: Tensor  # as centers [B, Hk, C], how far the scores of a cluster's keys are apart: 1 is the mean


class ClusterGrads(NamedTuple):
    """Gradients of a ClusterCall, given the labels."""

    k: Tensor
    v: Tensor


@compilable
class RouteCall(NamedTuple):
    """Choose the clusters whose keys a tile of queries attends one by one (`routing`)."""

    q: Tensor
    centers: Tensor  # float32 (float64 for float64) [B, Hc, C, E]
    sizes: Tensor  # int32 [B, Hc, C]
    variance: Tensor  # as centers [B, Hc, E]
    spreads: Tensor  # as centers [B, Hc, C]
    keys: int  # of the chosen clusters of a tile, at most
    scale: float

    @property
    def words(self) -> int:
        """W, numbers of 32 bits that hold one bit for each cluster."""
        return -(-self.sizes.shape[-1] // 32)


class Routed(NamedTuple):
    """Result of a RouteCall, for the T tiles of a row."""

    routes: Tensor  # int32 [B, H, T, W], bit c % 32 of word c // 32: whether cluster c was chosen
    number: Tensor  # int32 [B, H, T], keys of the chosen clusters
    lse: Tensor  # as centers [B, H, *G], log of the sum of exp over all clusters; -inf for a query that is not finite


@compilable
class RoutedStartCall(NamedTuple):
    """Find the best of the keys that the tile of each query routes: where a search starts."""

    q: Tensor
    k: Tensor
    order: Tensor  # int32 [B, Hc, M], as in Clustered
    sizes: Tensor  # int32 [B, Hc, C]
    routes: Tensor  # int32 [B, H, T, W]
    keys: int  # of a tile, at most: no tile routes more


@compilable
class ClusterTailCall(NamedTuple):
    """Attend the keys of routed clusters one by one and all others by their clusters, beside the windows.

    Hc, the heads of the clusters, is Hk, or H where heads of queries differ. The windows, `near_out` and `near_lse`,
    are attended apart, without keys of routed clusters; their keys are taken off the sizes of the other clusters.
    With s_i = scale^2 sum_e q_ie^2 variance_e, cluster c with n keys left has the logit
    scale <q_i, center_c> + log n + min(s_i spread_c, MOST_RAISED) / 2, and out_i gets T_i / (1 + s_i) * scale q_i slope
    besides, with T_i the shares of all clusters times their spreads (times 1 without spreads), dropout included.
    """

    q: Tensor
    k: Tensor | None  # [B, Hk, *G', E]; None without routes
    v: Tensor | None  # [B, Hk, *G', F]; None without routes
    index: Tensor | None  # type: ignore[assignment]  # int32 [B, H, *G, kappa]; None without windows
    label: Tensor  # int32 [B, Hc, *G'], -1 for a key in no cluster
    order: Tensor | None  # int32 [B, Hc, M], as in Clustered; None without routes
    centers: Tensor  # float32 (float64 for float64) [B, Hc, C, E]
    values: Tensor  # float32 (float64 for float64) [B, Hc, C, F]
    slope: Tensor | None  # as centers [B, Hc, E, F]; None: no first-order term
    sizes: Tensor  # int32 [B, Hc, C]
    variance: Tensor  # as centers [B, Hc, E]
    spreads: Tensor | None  # as centers [B, Hc, C]; None: no second-order weight
    routes: Tensor | None  # int32 [B, H, T, W], as in Routed; None: no keys one by one
    near_out: Tensor | None  # [B, H, *G, F]; None without windows and extra keys
    near_lse: Tensor | None  # [B, H, *G]
    dropout_seed: Tensor | None  # int64 []; None without dropout
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    radius: tuple[int, ...]
    scale: float
    dropout_p: float
    extras: int  # number of extra keys
    keys: int  # of the routed clusters of a tile, at most; 0 without routes

    @property
    def first_name(self) -> int:
        """The name of cluster 0 in dropout: after those of the keys and extra keys."""
        return math.prod(self.label.shape[2:]) + self.extras

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the output: that of the values."""
        given = [x.dtype for x in (self.near_out, self.v) if x is not None]
        return given[0] if given else self.q.dtype


class ClusterTailGrads(NamedTuple):
    """Gradients of a ClusterTailCall; None for what it does not have."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    centers: Tensor
    values: Tensor
    slope: Tensor | None
    near_out: Tensor | None
    near_lse: Tensor | None


@compilable
class EarlierCall(NamedTuple):
    """Attend every key up to the query's own place: dense attention in causal order, on grids of rank 1.

    Features and values are finite; of a masked key, or of a later one, nothing reaches a query or its gradients.
    """

    q: Tensor  # [B, H, S, E]
    k: Tensor  # [B, Hk, S, E]
    v: Tensor  # [B, Hk, S, F]
    usable: Tensor | None  # bool [B, Hk, S], which keys may be attended
    dropout_seed: Tensor | None  # int64 []; None without dropout
    rows: Tensor | None  # int64 [B, H], as in SearchCall
    scale: float
    dropout_p: float


class EarlierGrads(NamedTuple):
    """Gradients of an EarlierCall."""

    q: Tensor
    k: Tensor
    v: Tensor


class ListedKeys(NamedTuple):
    """The routed keys of the tile of a DecodeCall, which lie together."""

    k: Tensor  # [B, H, K, E], 0 for none
    v: Tensor  # [B, H, K, F]
    exists: Tensor  # bool [B, H, K]
    chosen: Tensor  # bool [B, H, C], clusters that they are of


class SeenClusters(NamedTuple):
    """The clusters of all stretches before that of a DecodeCall, C of them. Each row lies together."""

    centers: Tensor  # float32 (float64 for float64), or bfloat16 [B, Hk, C, E]
    values: Tensor  # like centers [B, Hk, C, F]
    log_sizes: Tensor  # float32 (float64 for float64) [B, Hk, C], -inf for a cluster without keys
    variance: Tensor  # like log_sizes [B, Hk, E]
    spreads: Tensor | None  # like log_sizes [B, Hk, C]; None: no second-order weight
    slope: Tensor | None  # like log_sizes [B, Hk, E, F]; None: no first-order term


@compilable
class DecodeCall(NamedTuple):
    """Attend the newest positions of one tile: the keys of their stretch, routed keys, and clusters for the rest.

    The last query is at the last of the L keys; a query attends the keys up to its own place. Inference only.
    """

    q: Tensor  # [B, H, n, E]
    k: Tensor  # [B, Hk, L, E], 0 where not `usable`; each row lies together
    v: Tensor  # [B, Hk, L, F], likewise
    usable: Tensor  # bool [B, Hk, L], keys that may be attended and are finite
    broken: Tensor  # bool [B, Hk, L], keys that may be attended and are not: later queries are NaN
    seen: SeenClusters | None  # None in the first stretch
    listed: ListedKeys | None  # None without routed keys
    scale: float


@compilable
class WindowScoresCall(NamedTuple):
    """Score the keys of one box per query, on the key grid or beside it."""

    q: Tensor
    k: Tensor
    corner: Tensor  # int32 [B, H, *G, rank], the first place of the box on each axis; it may lie off the grid
    sides: tuple[int, ...]  # of the box, one per axis
    scale: float


class WindowScores(NamedTuple):
    """Result of a WindowScoresCall."""

    scores: Tensor  # float32 (float64 for float64) [B, H, *G, prod(sides)], row-major; 0 for places off the grid


class WindowScoresGrads(NamedTuple):
    """Gradients of a WindowScoresCall."""

    q: Tensor
    k: Tensor


class BlockGroups(NamedTuple):
    """Group blocks of one frame with blocks like them in all frames, shrink each group, and add it to sums.

    A group holds the nearest blocks in order, the reference block before all, a power of two of them. Without guides
    coefficients up to the limit are set to 0; with them a Wiener filter takes their squared coefficients for the signal
    and the limit for the noise. Blocks count by 1 / the sum of the squared factors, for each channel.
    """

    noisy: Tensor  # float32 [frames, C, H, W]
    guides: Tensor | None  # float32 [frames, C, H, W], estimates of them
    features: Tensor  # float32 [frames, h, w, D] of the block at each place; their distance is that of the blocks
    own: int  # the frame whose blocks groups are made for
    rows: Tensor  # int64 [n], lines of the reference blocks
    columns: Tensor  # int64 [m]
    centers: Tensor  # int32 [frames, n, m, 2], where the window of each reference block lies in each frame
    radii: tuple[int, ...]  # of the windows, for each frame
    group: int  # blocks at most, a power of two
    least: int  # a power of two: larger groups hold blocks within `alike` alone; fewer where windows hold fewer
    alike: float  # squared distance
    limits: Tensor  # float32 [C]
    taper: Tensor  # float32 [64], how much each pixel of a block counts
    values: Tensor  # float32 [frames, C, H, W], added to
    weights: Tensor  # float32 [frames, C, H, W], added to
