"""A codebook fitted to some queries of each head that are computed densely, and what is left of its error.

What the windows of a query leave is a sum over clusters of weights x_ic, in units of the query's true normalizer: times
a factor g_c it is their share in the normalizer, times g_c and a value their share in the output. Both are linear in
what is fitted, so that one ridge regression gives both. It is drawn towards g_c = 1 and the mean values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec.clustering import keys_left
from ...spec.grid import coordinates, grid_of, in_windows, key_row, rows
from ...spec.noise import noise, numbered
from ..statistics import ranks
from .codebook import Codebook, FitReport, with_tensors

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the ridge, over the mean square of a query's weights
LEAST_GAIN = 0.05
CHUNK_ELEMENTS = 1 << 23  # of scores at a time


@torch.no_grad()
def fitted(
    book: Codebook,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    radius: tuple[int, ...],
    fit: int,
    seed: Tensor,
    numbers: Tensor | None = None,
) -> Codebook:
    """The codebook with gains and values of every query head, and a report on queries that took no part in the fit.

    Args:
        book: clusters of k and v.
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F]; q and k are prepared for the score.
        index: int32 [B, H, *G, kappa], the matches that `attend` will use.
        radius: of their windows, one per axis.
        fit: queries to fit to; half as many choose the strength of the ridge, half as many report.
        numbers: int [B, H], of the rows of q, which noise is keyed by; None: b * H + head.
    """
    each = q.shape[1] // book.sizes.shape[1]
    names = ("centers", "values", "sizes", "label")
    book = with_tensors(book, {name: getattr(book, name).detach().repeat_interleave(each, 1) for name in names})
    if not q.numel():
        return replace(book, gains=torch.ones_like(book.centers[..., 0]), radius=radius)
    seen = _seen_by_queries(book, q=q, k=k, v=v, index=index, radius=radius, fit=fit, seed=seed, numbers=numbers)
    split = [torch.split(x, seen.parts(fit), 1) for x in seen]
    learn, choose, report = (Seen(*part) for part in zip(*split, strict=True))
    values = book.values.flatten(0, 1).double()  # [R, C, F]
    fits = book.sizes.flatten(0, 1) > 1  # [R, C]
    gains = torch.ones_like(values[..., 0])  # [R, C]
    sums = values
    best = choose.squared_error(gains, values)
    plain = report.squared_error(gains, values)
    for strength in STRENGTHS:
        new_gains, new_sums = learn.ridge(values, fits, strength)
        error = choose.squared_error(new_gains, new_sums)
        better = (error.sum(1) < best.sum(1)).reshape(-1, 1)
        best = torch.where(better, error, best)
        gains = torch.where(better, new_gains, gains)
        sums = torch.where(better.unsqueeze(-1), new_sums, sums)
    wide = book.centers.dtype
    return replace(
        book,
        values=(sums / gains.unsqueeze(-1)).to(wide).reshape(book.values.shape),
        gains=gains.to(wide).reshape(book.sizes.shape),
        radius=radius,
        report=_report(report, report.squared_error(gains, sums), plain),
    )


class Seen(NamedTuple):
    """What some queries of every row attend, in units of their normalizers, float64."""

    exact: Tensor  # [R, n, F], their true outputs
    near: Tensor  # [R, n], share of the windows in the normalizer
    near_out: Tensor  # [R, n, F], share of the windows in the output
    weights: Tensor  # [R, n, C], of the keys that the windows leave of each cluster, all at its center
    counts: Tensor  # [R, n], 1 for a query of finite numbers, else 0 like all of its row above

    def parts(self, fit: int) -> list[int]:
        """How many queries learn, choose and report."""
        total = self.near.shape[1]
        learn = min(fit, max(1, total // 2))
        choose = (total - learn) // 2
        return [learn, choose, total - learn - choose]

    def ridge(self, values: Tensor, fits: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        """Gains [R, C] and gains times values [R, C, F]; clusters that do not fit [R, C] stay as they are."""
        x = self.weights * fits.unsqueeze(1)  # [R, n, C]
        ones = torch.ones_like(values[..., :1])
        missing = torch.cat([(self.counts - self.near).unsqueeze(-1), self.exact - self.near_out], -1)
        missing = missing - self.weights @ torch.cat([ones, values], -1)  # [R, n, 1 + F]
        square = x @ x.transpose(1, 2)  # [R, n, n]
        size = square.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30).reshape(-1, 1, 1)
        square = square + strength * size * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        # Not linalg.solve: MKL's batched LU by several threads returns no valid pivots for 256 x 256 in float64.
        change = x.transpose(1, 2) @ torch.cholesky_solve(missing, torch.linalg.cholesky_ex(square).L)
        gains = (1 + change[..., 0]).clamp(min=LEAST_GAIN)
        sums = values + change[..., 1:]
        return gains, sums

    def squared_error(self, gains: Tensor, sums: Tensor) -> Tensor:
        """|out - exact|^2 of every query [R, n] with gains [R, C] and gains times values [R, C, F]."""
        total = self.near + (self.weights @ gains.unsqueeze(-1)).squeeze(-1)
        out = (self.near_out + self.weights @ sums) / torch.where(total > 0, total, 1).unsqueeze(-1)
        return (out - self.exact).square().sum(-1)


def _seen_by_queries(
    book: Codebook,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    radius: tuple[int, ...],
    fit: int,
    seed: Tensor,
    numbers: Tensor | None,
) -> Seen:
    """Queries drawn for every row, and what they attend, computed densely."""
    q_rows = rows(q)  # [R, N, E]
    k_rows = rows(k)  # [B*Hk, M, E]
    v_rows = rows(v)  # [B*Hk, M, F]
    index_rows = rows(index)  # [R, N, kappa]
    queries = q_rows.shape[1]
    keys = k_rows.shape[1]
    key_grid = grid_of(k)
    row = torch.arange(len(q_rows), device=q.device).unsqueeze(1)
    order = noise(seed, numbered(row, numbers), torch.arange(queries, device=q.device)).argsort(1)[:, : 2 * fit]
    place = coordinates(torch.arange(keys, device=q.device), key_grid)
    source = key_row(row.flatten(), q.shape[1], k.shape[1]).tolist()
    chunks = []
    for r, at in enumerate(order):
        label = book.label.flatten(0, 1)[r].flatten()  # [M]
        sizes = book.sizes.flatten(0, 1)[r]  # [C]
        clustered = label >= 0
        centers = book.centers.flatten(0, 1)[r].double()  # [C, E]
        k_row, v_row = (torch.where(clustered.unsqueeze(-1), x[source[r]], 0).double() for x in (k_rows, v_rows))
        for some in at.split(max(1, CHUNK_ELEMENTS // keys)):
            q_some = q_rows[r, some].double()  # [n, E]
            finite = q_some.isfinite().all(-1, keepdim=True)
            q_some = torch.where(finite, q_some, 0)
            a = (book.scale * q_some @ k_row.T).masked_fill(~clustered, -torch.inf)  # [n, M]
            lse = a.logsumexp(1, keepdim=True)
            lse = torch.where(lse == -torch.inf, 0, lse)
            p = (a - lse).exp() * finite
            in_window = in_windows(index_rows[r, some].long(), place, key_grid, radius) & clustered  # [n, M]
            left = keys_left(sizes, label, in_window)  # [n, C]
            weights = torch.where(left > 0, left * (book.scale * q_some @ centers.T - lse).exp(), 0) * finite
            p_near = p * in_window
            chunks.append((p @ v_row, p_near.sum(1), p_near @ v_row, weights, p.sum(1)))
    shape = order.shape
    return Seen(*(torch.cat(part).reshape(*shape, *part[0].shape[1:]) for part in zip(*chunks, strict=True)))


def _report(report: Seen, error: Tensor, plain: Tensor) -> FitReport | None:
    """The error on queries that neither learned nor chose."""
    size = report.exact.square().sum(-1)
    each = (error / size.mean(1, keepdim=True).clamp(min=1e-300)).sqrt()[report.counts > 0].sort().values
    if not len(each):
        return None

    def interval(share: float) -> tuple[float, float]:
        low, high = ranks(len(each), share, 1 << 40)  # heads are counted together: of any number of queries
        return float(each[max(low, 0)]), float(each[min(high, len(each) - 1)])

    total = size.sum().clamp(min=1e-300)
    overall, before = (float((x.sum() / total).sqrt()) for x in (error, plain))
    return FitReport(error.shape[1], overall, before, interval(0.5), interval(0.95))
