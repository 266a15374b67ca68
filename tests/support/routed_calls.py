"""Calls of routed clusters for every implementation: a case of `cases`, clusters of any keys, routes of any tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scram.core.calls import AttendCall, ClusterTailCall, RouteCall, Routed, RoutedStartCall
from scram.spec import clustering
from scram.spec.bits import packed
from scram.spec.grid import rows
from scram.spec.schedule import tile_count
from scram.spec.scoring import accumulator
from support.cases import Case, make_tensors
from support.cluster_tails import run


@dataclass(frozen=True)
class Parts:
    """Which parts a call of the tail has."""

    windows: bool = True
    near: bool = True
    slope: bool = True
    spreads: bool = True
    routes: bool = True

    def __str__(self) -> str:
        return " ".join(name for name in ("windows", "near", "slope", "spreads", "routes") if getattr(self, name))


ALL = Parts()
PARTS = [
    ALL,
    Parts(windows=False, near=False),
    Parts(windows=False),  # extra keys alone
    Parts(routes=False, slope=False, spreads=False),
    Parts(routes=False),
    Parts(slope=False),
    Parts(spreads=False, windows=False, near=False),
]


def clusters_of(case: Case, k: Tensor, v: Tensor, mask: Tensor | None, count: int, seed: int) -> dict[str, Tensor]:
    """Fields of `Clustered` for labels drawn at random, -1 among them; the last cluster is empty."""
    generator = torch.Generator().manual_seed(seed)
    wide = accumulator(v.dtype)
    heads = k.shape[1]
    given = torch.ones(case.batch, heads, *case.keys_grid, dtype=torch.bool)
    if mask is not None:
        given = mask.unsqueeze(1).expand_as(given) if case.mask == "batch" else mask
    heads = given.shape[1]
    label = torch.randint(-1, max(count - 1, 1), given.shape, generator=generator, dtype=torch.int32)
    label[~given] = -1
    k_rows, v_rows = (rows(x.repeat_interleave(heads // x.shape[1], 1)).to(wide) for x in (k, v))
    flat_label = label.flatten(0, 1).flatten(1).long()
    centers, values, sizes = clustering.means(k_rows, v_rows, flat_label, count)
    metric = torch.rand(len(flat_label), k.shape[-1], generator=generator).to(wide)
    slope, variance, spreads = clustering.moments(k_rows, v_rows, flat_label, centers, values, sizes, metric)
    by_row = {"centers": centers, "values": values, "slope": slope, "sizes": sizes.int(), "variance": variance}
    made = {name: x.reshape(case.batch, heads, *x.shape[1:]) for name, x in (by_row | {"spreads": spreads}).items()}
    return made | {"label": label, "order": clustering.order_of(label)}


def routes_of(case: Case, sizes: Tensor, share: float, seed: int) -> tuple[Tensor, int]:
    """Any `share` of the clusters for every tile, and the most keys that a tile has."""
    generator = torch.Generator().manual_seed(seed)
    count = sizes.shape[-1]
    shape = (case.batch, case.heads, tile_count(case.grid), -(-count // 32) * 32)
    chosen = torch.rand(shape, generator=generator) < share
    chosen[..., count:] = False
    each = sizes.repeat_interleave(case.heads // sizes.shape[1], 1).unsqueeze(2)  # [B, H, 1, C]
    chosen[..., :count] &= each > 0
    keys = (chosen[..., :count] * each).sum(-1)
    return packed(chosen), int(keys.max()) if keys.numel() else 0


def tail_call(
    case: Case, parts: Parts = ALL, clusters: int = 11, share: float = 0.3, seed: int = 0, own_heads: bool = False
) -> ClusterTailCall:
    """A head that some queries do not have; `own_heads`: each head of queries has its own clusters."""
    tensors, generator = make_tensors(case, seed), torch.Generator().manual_seed(seed + 1)
    wide = accumulator(tensors.v.dtype)
    k, v = tensors.k, tensors.v
    source = [x.repeat_interleave(case.heads // x.shape[1], 1) for x in (k, v)] if own_heads else [k, v]
    made = clusters_of(case, *source, tensors.key_mask, clusters, seed + 2)
    routes, keys = routes_of(case, made["sizes"], share, seed + 3)
    near_out = torch.randn(*tensors.q.shape[:-1], case.value_width, generator=generator).to(tensors.v.dtype)
    near_lse = 2 * torch.randn(tensors.q.shape[:-1], generator=generator, dtype=wide)
    near_lse[torch.rand(near_lse.shape, generator=generator) < 0.2] = -torch.inf
    return ClusterTailCall(
        q=tensors.q,
        k=k if parts.routes else None,
        v=v if parts.routes else None,
        index=tensors.matches.index if parts.windows else None,
        label=made["label"],
        order=made["order"] if parts.routes else None,
        centers=made["centers"],
        values=made["values"],
        slope=made["slope"] if parts.slope else None,
        sizes=made["sizes"],
        variance=made["variance"],
        spreads=made["spreads"] if parts.spreads else None,
        routes=routes if parts.routes else None,
        near_out=near_out if parts.near else None,
        near_lse=near_lse + case.offset if parts.near else None,
        dropout_seed=torch.tensor(2**40 + 3) if case.dropout_p else None,
        rows=None,
        radius=case.radius if isinstance(case.radius, tuple) else (case.radius,) * len(case.grid),
        scale=case.width**-0.5,
        dropout_p=case.dropout_p,
        extras=2,
        keys=keys if parts.routes else 0,
    )


def route_call(case: Case, clusters: int = 40, keys: int = 20, seed: int = 0) -> RouteCall:
    """Queries and clusters of integers: no two importances are nearly equal."""
    tensors = make_tensors(case, seed)
    made = clusters_of(case, tensors.k, tensors.v, tensors.key_mask, clusters, seed + 2)
    fields = {name: made[name] for name in ("centers", "sizes", "variance", "spreads")}
    return RouteCall(tensors.q, **fields, keys=keys, scale=case.width**-0.5)


def start_call(case: Case, clusters: int = 11, share: float = 0.3, seed: int = 0) -> RoutedStartCall:
    """Integer features: equal scores are common."""
    tensors = make_tensors(case, seed, integer=True)
    made = clusters_of(case, tensors.k, tensors.v, tensors.key_mask, clusters, seed + 2)
    routes, keys = routes_of(case, made["sizes"], share, seed + 3)
    return RoutedStartCall(tensors.q, tensors.k, made["order"], made["sizes"], routes, keys)


def run_route(call: RouteCall, impl: str) -> Routed:
    return run("route", call, impl)


def attend_call(case: Case, clusters: int = 11, share: float = 0.3, seed: int = 0) -> AttendCall:
    """Windows without the keys that the tile of a query routes."""
    tensors = make_tensors(case, seed)
    made = clusters_of(case, tensors.k, tensors.v, tensors.key_mask, clusters, seed + 2)
    routes, _ = routes_of(case, made["sizes"], share, seed + 3)
    k_extra, v_extra = tensors.extra or (None, None)
    return AttendCall(
        q=tensors.q,
        k=tensors.k,
        v=tensors.v,
        index=tensors.matches.index,
        key_mask=tensors.key_mask,
        k_extra=k_extra,
        v_extra=v_extra,
        label=made["label"],
        routes=routes,
        dropout_seed=torch.tensor(2**40 + 3) if case.dropout_p else None,
        rows=None,
        radius=case.radius if isinstance(case.radius, tuple) else (case.radius,) * len(case.grid),
        causal=case.causal,
        scale=case.width**-0.5,
        weight=case.weight,
        dropout_p=case.dropout_p,
    )
