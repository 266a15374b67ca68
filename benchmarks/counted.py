"""A search on a CPU that counts the scores it computes: a cost that is the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

import scram
from scram.core.calls import SearchCall
from scram.engines.cpu.search import counted_search

FIELDS = ("matches", "separation", "sweeps", "jumps", "propagate", "gossip", "random")


def counted(
    q: Tensor,
    k: Tensor,
    settings: scram.Search,
    seed: int = 0,
    warm: Tensor | None = None,
    causal: bool = False,
) -> tuple[scram.Matches, int]:
    """The query search for q [1, 1, *G, E] and k [1, 1, *G', E]; and how many scores it computed in all."""
    how = {name: getattr(settings, name) for name in FIELDS}
    call = SearchCall(
        q,
        k,
        torch.tensor(seed),
        key_mask=None,
        warm=warm,
        rows=None,
        starts=None,
        method="query",
        reach=(),
        **how,
        causal=causal,
    )
    found, count = counted_search(call)
    return scram.Matches(found.index, found.score, tuple(k.shape[2:-1])), count
