"""What windows, and windows with a tail, miss of exact attention: measured query by query on dense scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .clustering import keys_left
from .codebook import Codebook
from .estimators import Hybrid
from .exact import _Dense
from .grid import coordinates, in_windows, key_row, rows
from .scoring import normalized_weights, prepare_key
from .types import Matches


class Figures(NamedTuple):
    """Of every query, [B, H, n]; NaN for a query without a key."""

    mass: Tensor  # share of the softmax that the windows hold
    square: Tensor  # |out - exact|^2, out from the windows alone
    tail_square: Tensor  # the same with the tail: measured for clusters, predicted for drawn keys, NaN for none
    size: Tensor  # |exact|^2


class Missed:
    """Exact attention of the sampled queries, split into the keys that SCRAM attends and the rest.

    Args:
        dense: the scores, of the sampled queries.
        v: values [B, Hk, *G', F].
        extra: as in `attention`.
        matches, radius: the windows; one radius per axis.
        scale: on the scores.
        tail: what stands for the other keys.
    """

    def __init__(
        self, dense: _Dense, v: Tensor, extra: tuple[Tensor, Tensor] | None, matches: Matches,
        radius: tuple[int, ...], scale: float, tail: Codebook | Hybrid | None,
    ) -> None:  # fmt: skip
        self.dense, self.values, self.radius, self.scale, self.tail = dense, rows(v), radius, scale, tail
        self.extra = None if extra is None else (rows(prepare_key(extra[0], dense.score)), rows(extra[1]))
        self.index, self.key_grid = matches.index.flatten(0, 1).flatten(1, -2), matches.key_grid
        self.place = coordinates(torch.arange(dense.keys, device=v.device), matches.key_grid)

    def figures(self) -> Figures:
        """Of the sampled queries."""
        parts = zip(*(self._of_each(row, at) for row, at in self.dense.chunks()), strict=True)
        return Figures(*(torch.cat(part).reshape(-1, self.dense.heads, len(self.dense.wanted)) for part in parts))

    def _of_each(self, row: int, at: Tensor) -> tuple[Tensor, ...]:
        """The figures of some queries of a row, each [n]."""
        dense, source = self.dense, self.dense.key_row(row)
        legal, matches = dense.legal(row, at), self.index[row, at].long()
        inside = in_windows(matches, self.place, self.key_grid, self.radius)
        keys, values = dense.shown(dense.k[source], row), dense.shown(self.values[source], row)
        on_grid = inside
        if self.extra is not None:
            keys, values = (torch.cat([x, more[source]]) for x, more in zip((keys, values), self.extra, strict=True))
            more = legal.new_ones(len(at), len(keys) - dense.keys)
            legal, inside = torch.cat([legal, more], 1), torch.cat([inside, more], 1)
        p, lse = normalized_weights(self.scale * dense.scores(dense.q[row, at], keys), legal, "softmax")
        values = values.to(p.dtype)
        exact, near = p @ values, torch.where(inside, p, 0)
        mass = near.sum(-1)
        out = near @ values / mass.clamp(min=torch.finfo(p.dtype).tiny).unsqueeze(-1)
        square, size = (out - exact).square().sum(-1), exact.square().sum(-1)
        if isinstance(self.tail, Codebook):
            joined = self._with_clusters(self.tail, row, at, on_grid, out, mass, lse)
            tail = (joined - exact).square().sum(-1)
        elif self.tail is not None:
            tail = _variance_of_draws(p - near, values, exact, (legal & ~inside).sum(-1), self.tail.samples)
        else:
            tail = torch.full_like(square, torch.nan)
        none = lse == -torch.inf
        return tuple(torch.where(none, torch.nan, x) for x in (mass, square, tail, size))

    def _with_clusters(
        self, book: Codebook, row: int, at: Tensor, inside: Tensor, head: Tensor, mass: Tensor, lse: Tensor
    ) -> Tensor:
        """The output of windows and clusters: head [n, F] with its mass [n], lse [n] of all keys -> [n, F]."""
        source = int(key_row(torch.tensor(row), self.dense.heads, book.sizes.shape[1]))
        label, sizes = book.label.flatten(0, 1)[source].flatten(), book.sizes.flatten(0, 1)[source]
        centres, values = (x.flatten(0, 1)[source].to(head.dtype) for x in (book.centres, book.values))
        count, left = len(sizes), keys_left(sizes, label, inside)
        some = left > 0
        a = self.scale * self.dense.q[row, at].to(head.dtype) @ centres.T - lse.unsqueeze(-1)
        factor = torch.where(some, left, 1).to(head.dtype)
        if book.gains is not None:
            factor = factor * book.gains.flatten(0, 1)[source].to(head.dtype)
        # The windows are one more key: its weight their mass, its value their output.
        weights, _ = normalized_weights(
            torch.cat([a + factor.log(), mass.log().unsqueeze(-1)], 1),
            torch.cat([some, mass.unsqueeze(-1) > 0], 1),
            "softmax",
        )
        return weights[:, :count] @ values + weights[:, count:] * head


def _variance_of_draws(p: Tensor, values: Tensor, exact: Tensor, left: Tensor, samples: int) -> Tensor:
    """Squared error of the output, as expected, if the tail is estimated from a uniform draw without repetition.

    With p [n, M] the weights of the tail, r_j = p_j (v_j - out), T keys left and m drawn, the variance is
    T^2 (1/m - 1/T) times that of r.
    """
    squares = p.square()
    second = squares @ values.square().sum(-1) - 2 * ((squares @ values) * exact).sum(-1)
    second = second + squares.sum(-1) * exact.square().sum(-1)
    first = p @ values - p.sum(-1, keepdim=True) * exact
    count = left.clamp(min=1).to(p.dtype)
    spread = (second / count - first.square().sum(-1) / count.square()).clamp(min=0)
    drawn = count.clamp(max=samples)
    return count.square() * (1 / drawn - 1 / count) * spread
