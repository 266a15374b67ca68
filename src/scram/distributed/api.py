"""The public function: every rank checks its arguments, all ranks learn whether they fit, then one mode runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core import checks, pipeline
from ..core.checks import explains
from ..core.pipeline import execute
from ..core.precision import follows_autocast
from ..core.resolve import Request
from ..core.tails.base import Tail
from ..options import Auto, Impl, Mode, Weight
from ..results import Matches
from ..settings import Score, Search
from .gather import gather_attention
from .heads import alone, fits, heads_attention
from .mesh import Ranks
from .ring import ring_attention
from .shards import FIELDS, Shards, checked

MODES = get_args(Mode)
MOST_GATHERED = 4 << 30  # bytes of keys and values on each rank, beyond which "auto" sends them round


@explains
@follows_autocast
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    mode: Mode = "auto",
    search: Search | Auto | None = "auto",
    radius: int | Sequence[int] = 1,
    tail: Tail | Auto | None = "auto",
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    dropout_p: float = 0.0,
    matches: Matches | None = None,
    warm: Matches | None = None,
    halo: int | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`scram.attention` of tensors that are cut along the first grid axis: each rank of a mesh holds some rows of each.

    All ranks call it, with shards of any size, empty ones included, and the same settings; all run the backward pass,
    or none. Where one rank fails all raise, and say which. Rank 0's seeds count.

    Args:
        q: this rank's queries [B, H, n, *, E].
        k, v: this rank's keys and values [B, Hk, m, *, E] and [B, Hk, m, *, F].
        mesh: a DeviceMesh of one dimension; its ranks hold the rows of the grid in order.
        mode: "heads", all-to-all: each rank has the whole grid of some heads, where ranks divide the key heads;
            "gather": each rank has all keys; "ring": keys travel from rank to rank, memory falls as 1 / ranks; "auto",
            the first of these that fits, "ring" where keys and values would take more than 4 GiB.
        search, radius, scale, score, weight, impl: as in `scram.attention`, `search` None among them.
        tail: as there; a codebook, of the whole key grid and the same on all ranks, in mode "gather" only. In mode
            "ring" each rank makes `count` / sqrt(ranks) clusters of its own keys, and a tile attends `keys` /
            sqrt(ranks) of each rank's keys one by one. Tiles of 64 queries begin at the first row of a shard: they are
            those of one process where shards begin at multiples of a tile's side, 8 rows of a picture.
        causal: in mode "heads" only.
        key_mask: bool [B, m, *] or [B, H, m, *], for this rank's keys; None on some ranks: they mask none.
        extra: (k_extra, v_extra), [B, Hk, X, E] and [B, Hk, X, F], the same on all ranks; its gradient is that of this
            rank's queries. Not in mode "heads".
        dropout_p: as there; rank 0's generator counts. Not in mode "heads".
        matches, warm: of this rank's queries, on the key grid of all ranks, in place of a search or to start it from;
            in mode "gather" only.
        halo: rows of its neighbors' queries, on either side, that a rank searches with its own; None, twice the
            largest jump of the search. Mode "heads" needs none.

    Returns:
        out [B, H, n, *, F], for this rank's queries.
    """
    ranks = Ranks(mesh)
    request = Request(
        search=search,
        tail=tail,
        radius=radius,
        causal=causal,
        key_mask=key_mask,
        scale=scale,
        score=score,
        weight=weight,
        extra=extra,
        dropout_p=dropout_p,
        warm=warm,
        impl=impl,
        matches=matches,
    )
    if halo is None and alone(ranks, mode, q, k, request):
        return execute(pipeline.run, q, k, v, request).out
    try:
        checks.one_of("mode", mode, MODES)
        checked_call = checked(q, k, v, request, halo)
        if q.device.type != ranks.device.type:
            raise ValueError(f"q must be on the mesh's device type {ranks.device.type!r}, got {q.device}")
    except Exception as error:
        ranks.raise_failures(error, ranks.exchange([1] * len(FIELDS)))
        raise
    shards = Shards.of(ranks, q, k, v, key_mask, checked_call)
    chosen = _chosen(mode, shards)
    return {"heads": heads_attention, "gather": gather_attention, "ring": ring_attention}[chosen](shards)


def _chosen(mode: str, shards: Shards) -> str:
    """The mode; all ranks know the same of all shards, so that they choose and refuse alike."""
    request = shards.request
    given = {"extra": request.extra is not None, "dropout_p": bool(request.dropout_p)}
    whole = {"matches": request.matches is not None, "warm": request.warm is not None}
    whole["a Codebook as tail"] = shards.call.codebook is not None
    limited = shards.call.search is not None and shards.call.search.reach is not None
    if mode == "auto":
        if any(whole.values()):
            mode = "gather"
        elif request.causal or limited or (fits(shards) and not any(given.values())):
            mode = "heads"
        else:
            width = shards.k.shape[-1] + shards.v.shape[-1]
            elements = shards.k.shape[0] * shards.k.shape[1] * shards.k.shape[3:-1].numel() * sum(shards.keys) * width
            mode = "ring" if elements * shards.k.dtype.itemsize > MOST_GATHERED else "gather"
    if mode == "heads" and not fits(shards):
        raise ValueError(
            f"mode='heads' needs key heads in multiples of the ranks, got {shards.k.shape[1]} heads on "
            f"{shards.ranks.size} ranks; use mode='gather' or 'ring'" + (", without causal" if request.causal else "")
        )
    if request.causal and mode != "heads":
        raise ValueError(f"mode={mode!r} knows no causal order between shards; use mode='heads'")
    if limited and mode != "heads":
        raise ValueError(f"Search(reach=...) needs the whole grid, got mode={mode!r}; use mode='heads' without warm")
    for name, is_given in whole.items():
        if is_given and mode != "gather":
            raise ValueError(f"{name} is for mode='gather', got mode={mode!r}; leave it out")
    for name, is_given in given.items():
        if is_given and mode == "heads":
            raise ValueError(f"mode='heads' takes no {name}; use mode='gather' or 'ring'")
    return mode
