"""Calls for tests: keys to be clustered; drawn clusters with a head from the reference, all in one dtype."""

from dataclasses import dataclass

import torch

from scram.core.calls import ClusterCall, ClusterTailCall
from scram.spec.clustering import order_of
from support.cases import Case, make_tensors, run_attend
from support.plain_routing import drawn_routes


@dataclass(frozen=True)
class Tailed:
    """A case of `attend` with clusters behind it."""

    case: Case
    clusters: int = 5
    keys: int = 0  # of routed clusters, at most
    heads: int = 0  # of the clusters, 0: those of the keys
    skipped: float = 0.1  # share of the keys in no cluster

    def __str__(self) -> str:
        return str(self.case)


def tail_call(one: Tailed, dtype: torch.dtype) -> ClusterTailCall:
    """The call in `dtype`: the same numbers as those of the case's own dtype."""
    case, tensors = one.case, make_tensors(one.case)
    generator = torch.Generator().manual_seed(11)
    heads = one.heads or tensors.k.shape[1]
    shape = (case.batch, heads, *tensors.k.shape[2:-1])
    label = torch.randint(one.clusters, shape, generator=generator)
    label = torch.where(torch.rand(shape, generator=generator) < one.skipped, -1, label)
    names = torch.arange(one.clusters)
    sizes = (label.flatten(2).unsqueeze(-1) == names).sum(2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def drawn(*last: int) -> torch.Tensor:
        return torch.randn((case.batch, heads, one.clusters, *last), generator=generator).to(wide)

    centers, values, spreads = drawn(case.width), drawn(case.value_width), drawn().abs()
    rows = (case.batch, heads, case.width)
    slope = torch.randn((*rows, case.value_width), generator=generator).to(wide)
    variance = (torch.rand(rows, generator=generator) / case.width**0.5).to(wide)
    routes = drawn_routes(sizes.int(), case.heads, case.grid, one.keys, generator) if one.keys else None
    head = run_attend(case, tensors, tensors.leaves(case.dtype), "reference")
    return ClusterTailCall(
        q=tensors.q.to(dtype),
        k=tensors.k.to(dtype) if one.keys else None,
        v=tensors.v.to(dtype) if one.keys else None,
        index=tensors.matches.index,
        label=label.int(),
        order=order_of(label.int()) if one.keys else None,
        centers=centers,
        values=values,
        slope=slope,
        sizes=sizes.int(),
        variance=variance,
        spreads=spreads,
        routes=routes,
        near_out=head.out.detach().to(dtype),
        near_lse=head.lse.detach().float().to(wide),
        dropout_seed=torch.tensor(3) if case.dropout_p else None,
        rows=None,
        radius=(case.radius,) * (tensors.q.ndim - 3) if isinstance(case.radius, int) else tuple(case.radius),
        scale=case.width**-0.5,
        dropout_p=case.dropout_p,
        extras=case.extra,
        keys=one.keys,
    )


def cluster_call(
    *,
    batch: int = 1,
    heads: int = 1,
    key_heads: int = 1,
    query_grid: tuple[int, ...] = (8,),
    grid: tuple[int, ...] = (20, 20),
    width: int = 8,
    value_width: int = 8,
    count: int = 30,
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
    mask: str = "none",
    warm: bool = False,
    groups: int = 20,
    noise: float = 0.3,
    offset: float = 2.0,
    unit: float = 1.0,
) -> ClusterCall:
    """Keys and values around `groups` places, all `offset` away from 0."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    places = drawn(groups, width + value_width)
    own = torch.randint(groups, (batch, key_heads, *grid), generator=generator)
    both = (places[own] + noise * drawn(batch, key_heads, *grid, width + value_width) + offset) * unit
    q, k, v = drawn(batch, heads, *query_grid, width), both[..., :width], both[..., width:]
    key_mask = None
    if mask != "none":
        key_mask = torch.rand((batch, *([] if mask == "batch" else [key_heads]), *grid), generator=generator) < 0.6
    start = [drawn(batch, key_heads, count, x) for x in (width, value_width)] if warm else [None, None]
    given = (x.to(dtype) for x in (q * unit, k, v))
    return ClusterCall(*given, key_mask, *start, torch.tensor(5), None, count, steps, width**-0.5)
