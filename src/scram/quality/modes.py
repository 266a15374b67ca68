"""Whether several separate places share a query's attention: repeated structures, whose mean is none of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import pipeline
from ..core.exact import exact_attention, exact_search
from ..core.pipeline import execute
from ..core.resolve import Request
from ..results import Matches
from ..settings import Score
from ..spec.grid import grid_of

AROUND = 2  # the radius of a place; two places are farther apart than windows of it overlap
SECOND = 0.5  # of the weight of the best place that the second must have to count
TOGETHER = 0.5  # of all weight that both must have: diffuse attention has no places
OFTEN = 0.1  # of the queries of a head, from which on it is said
MOST_QUERIES = 128  # that are looked at


@torch.no_grad()
def split_share(
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
) -> float:
    """The share of the queries whose weight two separate places share, in the head where it is largest.

    Args:
        q, k: [B, H, *G, E], [B, Hk, *G', E].
        queries: int64 [n], flat indices; the first of them are looked at.
        causal, key_mask, scale, score: as in `attention`; 0 under causal order and for a callable score.

    >>> k = 9 * torch.eye(16).reshape(1, 1, 16, 16)
    >>> one, two = k[:, :, :1], k[:, :, :1] + k[:, :, 15:]
    >>> [split_share(q, k, torch.arange(1), scale=1.0) for q in (one, two)]
    [0.0, 1.0]
    """
    if causal or callable(score) or not len(queries) or q.numel() == 0:
        return 0.0
    some = queries[:MOST_QUERIES]
    best_keys = exact_search(q, k, matches=2, separation=2 * AROUND, key_mask=key_mask, score=score, queries=some)
    line = (len(some), *[1] * (len(grid_of(q)) - 1))  # a grid of the sampled queries, of the same rank
    drawn = q.flatten(2, -2)[:, :, some].reshape(*q.shape[:2], *line, q.shape[-1])
    values = k[..., :1].contiguous()
    masses = []
    for entry in range(2):
        index = best_keys.index[..., entry : entry + 1]
        mode = Matches(index, best_keys.score[..., entry : entry + 1], best_keys.key_grid)
        request = Request(
            search=None, tail=None, radius=AROUND, scale=scale, key_mask=key_mask, score=score, matches=mode
        )
        lse = execute(pipeline.run, drawn, k, values, request).lse
        assert lse is not None
        masses.append(lse)
    whole = exact_attention(q, k, values, key_mask=key_mask, scale=scale, score=score, queries=some).lse
    best, second = ((lse.reshape(whole.shape).to(whole.dtype) - whole).exp().nan_to_num(0) for lse in masses)
    split = (torch.minimum(best, second) >= SECOND * torch.maximum(best, second)) & (best + second >= TOGETHER)
    return float(split.float().mean(-1).max())


def note(share: float) -> str:
    """What to say of that share; "" where it is small.

    >>> note(0.04), note(0.25)[:49]
    ('', 'note: in 25 % of the queries of a head two separa')
    """
    if share < OFTEN:
        return ""
    return (
        f"note: in {100 * share:.0f} % of the queries of a head two separate places share the weight (repeated "
        "structures). Dense attention returns their mean. For matching that is no truth to be near: start from a "
        "coarser grid and stay near it, see scram.nn.Matcher(scales=...) and scram.Search(reach=...)"
    )
