"""What a page holds: matches of every sweep, clusters, routes, pictures, and features rounded until all of it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.tails.clusters import Codebook
from ..results import Matches, Routes
from ..spec.grid import Grid, rows
from .coordinates import Balanced, Principal
from .pack import Json, Packed, estimated_bytes, rounded

# Errors by rounding below which more bits show nothing.
FINEST_SCORE = 0.04
FINEST_VALUE = 0.01
COARSEST = 1e4  # times the finest
VALUES_SHARE = 0.25  # of the bytes that are left for features, at most
MATCHES_SHARE = 0.25  # of all bytes, that matches of all sweeps may take; beyond, earlier sweeps keep the best one
Floats = NDArray[np.float32]
CHECKED = 64  # queries of a head whose rounded weights are compared with exact ones
CENTER_STEP = 1 / 8  # of the step of features, and of values
SPREAD_STEP = 1 / 64  # of the root of a query's spread: its logits are then off by less than FINEST_SCORE


class Attention(NamedTuple):
    """One attention, as the page shows it; the sample of the batch is chosen, so that there is no batch axis.

    Args:
        q, k, v: [H, *G, E], [Hk, M, E] and [Hk, M, F], prepared for the score, the scale in q.
        sweeps: the matches after 0, 1, .. T sweeps, each [1, H, *G, kappa]; empty without a search.
        codebook: clusters of the keys, or None.
        routes: the clusters that each tile attends key by key, or None.
        pictures: colors of queries [*G, 3] and keys [*G', 3], uint8; empty where there are none, one for both.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sweeps: Sequence[Matches]
    codebook: Codebook | None
    routes: Routes | None
    pictures: Sequence[Tensor]

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return len(self.q) // len(self.k)

    def every(self, stride: int, one: bool) -> Attention:
        """With every stride-th query of each axis; `one`: the picture is that of the keys too, and stays whole."""
        first = [] if one else [thinned(x, stride, 0) for x in self.pictures[:1]]
        sweeps = [Matches(thinned(x.index, stride, 2), thinned(x.score, stride, 2), x.key_grid) for x in self.sweeps]
        return self._replace(
            q=thinned(self.q, stride, 1), sweeps=sweeps, pictures=[*first, *self.pictures[len(first) :]]
        )


class Channels(NamedTuple):
    """Features in the coordinates that they are rounded in: planes [D, N] or [D, M] of each head."""

    balanced: list[Balanced]
    principal: list[Principal]
    queries: list[Floats]
    keys: list[Floats]
    values: list[Floats]
    base: Floats  # [H, N], the part of a query's scores that is the same for all keys

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> Channels:
        """From q [H, *G, E], k [Hk, M, E] and v [Hk, M, F], as in `Attention`."""
        group = len(q) // len(k)
        flat = q.flatten(1, -2).double()  # [H, N, E]
        balanced = [Balanced.of(*pair) for pair in zip(flat.reshape(len(k), -1, flat.shape[-1]), k, strict=True)]
        principal = [Principal.of(x) for x in v]
        queries = [_planes(q @ balanced[h // group].to_queries) for h, q in enumerate(flat)]
        base = _planes(torch.stack([q @ balanced[h // group].center for h, q in enumerate(flat)], 1))
        keys = [_planes(x.keys) for x in balanced]
        values = [_planes(x.channels) for x in principal]
        return Channels(balanced, principal, queries, keys, values, base)

    def every(self, stride: int, grid: Grid) -> Channels:
        """With every stride-th query of each axis of the grid."""

        def some(x: Floats) -> Floats:
            whole = x.reshape(len(x), *grid)[(slice(None), *[slice(None, None, stride)] * len(grid))]
            return np.ascontiguousarray(whole.reshape(len(x), -1))

        return self._replace(queries=[some(x) for x in self.queries], base=some(self.base))

    def value_bytes(self, error: float) -> float:
        """About how many bytes the values take, off by `error` of their size."""
        pairs = zip(self.values, self.principal, strict=True)
        return sum(estimated_bytes(x, principal.step(error)) for x, principal in pairs)

    def score_bytes(self, error: float) -> float:
        """About how many bytes queries and keys take, where scores are off by `error`."""
        group = len(self.queries) // len(self.keys)
        steps = [x.step(error) for x in self.balanced]
        total = sum(estimated_bytes(x, step) for x, step in zip(self.keys, steps, strict=True))
        return total + sum(estimated_bytes(x, steps[h // group]) for h, x in enumerate(self.queries))


class Contents(NamedTuple):
    """Packed arrays, and what the page says about them."""

    packed: Packed
    about: Json


def _planes(x: Tensor) -> Floats:
    return np.ascontiguousarray(x.T.float().numpy())


def thinned(x: Tensor, stride: int, first: int) -> Tensor:
    """Every stride-th point of the axes from `first` to the last but one."""
    at = tuple(slice(None) if axis < first else slice(None, None, stride) for axis in range(x.ndim - 1))
    return x[at].contiguous()


def raster_width(grid: Grid) -> int:
    """Points on a line of the picture of a grid: its last axis; a sequence is broken into lines.

    >>> raster_width((6, 8)), raster_width((3, 6, 8)), raster_width((100,))
    (8, 8, 13)
    """
    points = math.prod(grid)
    return grid[-1] if len(grid) > 1 and points <= 8192 * grid[-1] else max(1, math.ceil(math.sqrt(1.6 * points)))


def stored(attention: Attention, channels: Channels, most_bytes: int, coarsest: float) -> Contents | None:
    """All of it in at most about so many bytes, before base64; None where scores would be off by more than that."""
    packed = Packed()
    early = _matches(packed, attention.sweeps, most_bytes)
    for name, picture in zip(("picture_queries", "picture_keys"), attention.pictures, strict=False):
        packed.add(name, picture.flatten(0, -2).T.to(torch.int16).numpy())
    if attention.codebook is not None:
        packed.add("label", attention.codebook.label[0].flatten(1).cpu().to(torch.int16).numpy())
        packed.add("spread", rounded(_spread(attention, attention.codebook), SPREAD_STEP))
    if attention.routes is not None:
        packed.add("routes", _route_planes(attention.routes))
    base_step = max(float(np.abs(channels.base).max()) / 4000, 1e-6)
    packed.add("base", rounded(channels.base, base_step))
    left = max(most_bytes - len(packed) - _cluster_bytes(attention), most_bytes // 10)
    value_error = _finest(channels.value_bytes, VALUES_SHARE * left, FINEST_VALUE)
    score_error = _finest(channels.score_bytes, left - channels.value_bytes(value_error), FINEST_SCORE)
    if score_error > coarsest:
        return None
    heads = []
    kept_keys = []
    kept_values = []
    lost = []
    for g, (balanced, principal) in enumerate(zip(channels.balanced, channels.principal, strict=True)):
        step = balanced.step(score_error)
        value_step = principal.step(value_error)
        own = range(g * attention.group, (g + 1) * attention.group)
        k = rounded(channels.keys[g], step)
        v = rounded(channels.values[g], value_step)
        qs = [rounded(channels.queries[h], step) for h in own]
        kept_keys.append(_used(k, *qs))
        kept_values.append(_used(v))
        lost.append(_lost(channels.values[g], v[kept_values[g]], kept_values[g], value_step))
        packed.add(f"k{g}", k[kept_keys[g]])
        packed.add(f"v{g}", v[kept_values[g]])
        for h, q in zip(own, qs, strict=True):
            packed.add(f"q{h}", q[kept_keys[g]])
            off = _off(attention.q[h].flatten(0, -2), attention.k[g], balanced.center, q, k, kept_keys[g], step)
            heads.append({"step": step, "value_step": value_step, "channels": len(kept_keys[g]), **off})
    steps = [(head["step"], head["value_step"]) for head in heads[:: attention.group]]
    clusters = _clusters(packed, attention, channels, kept_keys, kept_values, steps)
    about = {
        **clusters,
        "heads": heads,
        "base_step": base_step,
        "spread_step": SPREAD_STEP,
        "early_matches": early,
        "values_kept": 1 - max(lost),
        "score_error": score_error,
        "map_error": max(head["map_error"] for head in heads),
        "width": attention.q.shape[-1],
        "channels": [len(some) for some in kept_keys],
        "value_channels": [len(some) for some in kept_values],
    }
    return Contents(packed, about)


def _finest(size: Callable[[float], float], most: float, finest: float) -> float:
    """The smallest error, from `finest` on, whose size fits."""
    if size(finest) <= most:
        return finest
    low = 0.0
    high = math.log(COARSEST)
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if size(finest * math.exp(middle)) <= most else (middle, high)
    return finest * math.exp(high)


def _used(*planes: NDArray[np.int16]) -> list[int]:
    """Channels that are not 0 everywhere in one of these; at least one."""
    used = np.all([(x != 0).any(-1) for x in planes], 0)
    return [int(at) for at in np.flatnonzero(used)] or [0]


def _lost(whole: Floats, planes: NDArray[np.int16], kept: list[int], step: float) -> float:
    """The share of the values' squares that rounding and left-out channels take away."""
    total, left = (
        float(np.square(x, dtype=np.float64).sum()) for x in (whole, whole[kept] - planes * np.float32(step))
    )
    outside = total - float(np.square(whole[kept], dtype=np.float64).sum())
    return (outside + left) / total if total else 0.0


def _off(
    q: Tensor,
    k: Tensor,
    center: Tensor,
    q_planes: NDArray[np.int16],
    k_planes: NDArray[np.int16],
    kept: list[int],
    step: float,
) -> dict[str, float]:
    """How far weights by rounded features are from exact ones: the share of the attention that lies elsewhere."""
    at = torch.linspace(0, len(q) - 1, min(CHECKED, len(q)), dtype=torch.float32, device=q.device).long()
    exact = (q[at].double() @ (k.double() - center).T).softmax(-1)  # [n, M]
    own = torch.from_numpy(q_planes[kept][:, at.numpy()].astype(np.float32)).T * step**2
    near = (own @ torch.from_numpy(k_planes[kept].astype(np.float32))).double().softmax(-1)
    off = 0.5 * (exact - near).abs().sum(-1)  # [n]
    return {"map_error": float(off.mean()), "map_error_most": float(off.max())}


def _matches(packed: Packed, sweeps: Sequence[Matches], most_bytes: int) -> int:
    """Rows and columns of all matches; how many matches of a query the earlier sweeps keep.

    Planes are in the order of sweeps, last first, then of matches, worst first, then of heads. So that every plane of
    an earlier sweep has its like of the next one a fixed number of places before it.
    """
    if not sweeps:
        return 0
    last = sweeps[-1]
    width = raster_width(last.key_grid)
    kappa = last.index.shape[-1]
    heads = last.index.shape[1]

    def planes(matches: Matches, kept: int) -> NDArray[np.int16]:
        index = rows(matches.index)[..., :kept].movedim(-1, 0).flip(0).cpu()  # [kept, H, N]
        place = torch.stack((torch.where(index < 0, -1, index // width), torch.where(index < 0, -1, index % width)), 2)
        return place.to(torch.int16).flatten(0, 2).numpy()

    for kept in dict.fromkeys((kappa, 1)):
        trial = Packed()
        earlier = [planes(matches, kept) for matches in reversed(sweeps[:-1])]
        trial.add("matches", np.concatenate([planes(last, kappa), *earlier]), back=2 * heads * kept)
        if len(trial) <= MATCHES_SHARE * most_bytes:
            break
    packed.append(trial)
    return kept


def _spread(attention: Attention, book: Codebook) -> Floats:
    """The root of how far the scores of a mean cluster's keys are apart for each query [H, N]."""
    q = attention.q.flatten(1, -2)  # [H, N, E]
    variance = book.variance[0].cpu().double()
    variance = variance.repeat_interleave(len(q) // len(variance), 0)  # [H, E]
    spread = (q.square() @ variance.unsqueeze(-1)).squeeze(-1)  # [H, N]
    return spread.sqrt().float().numpy()


def _route_planes(routes: Routes) -> NDArray[np.int16]:
    """Halves of words [H * 2 W, T]: cluster c of a head is bit c % 16 of its plane c // 16."""
    bits = routes.bits[0].cpu().movedim(-1, 1)  # [H, W, T]
    halves = torch.stack((bits << 16 >> 16, bits >> 16), 2)  # [H, W, 2, T]
    return halves.to(torch.int16).flatten(0, 2).numpy()


def _cluster_bytes(attention: Attention) -> int:
    book = attention.codebook
    if book is None:
        return 0
    slope = 0 if book.slope is None else 4 * book.slope.numel()
    return 3 * (book.centers.numel() + book.values.numel()) // 2 + slope


def _clusters(
    packed: Packed,
    attention: Attention,
    channels: Channels,
    kept_keys: Sequence[list[int]],
    kept_values: Sequence[list[int]],
    steps: Sequence[tuple[float, float]],
) -> Json:
    """Centers, mean values and slopes in the same coordinates, of each head of clusters; the steps of the first two."""
    book = attention.codebook
    center_steps: list[float] = []
    mean_steps: list[float] = []
    if book is None:
        return {"center_steps": center_steps, "mean_steps": mean_steps}
    sizes = book.sizes[0].cpu()
    share = len(sizes) // len(channels.keys)
    for c in range(len(sizes)):
        g = c // share
        key = channels.balanced[g]
        value = channels.principal[g]
        centers = (book.centers[0, c].cpu().double() - key.center) @ key.to_keys
        means = (book.values[0, c].cpu().double() - value.center) @ value.axes
        center_steps.append(_finer(packed, f"centers{c}", centers[:, kept_keys[g]], steps[g][0]))
        mean_steps.append(_finer(packed, f"means{c}", means[:, kept_values[g]], steps[g][1]))
        if book.slope is not None:
            # Queries lie in the coordinates of `to_queries`, so that a slope takes those of keys.
            slope = key.to_keys.T @ book.slope[0, c].cpu().double() @ value.axes
            packed.add_floats(f"slope{c}", slope[kept_keys[g]][:, kept_values[g]].numpy())
    packed.add_floats("sizes", sizes.numpy())
    if book.second_order:
        packed.add_floats("spreads", book.spreads[0].cpu().numpy())
    return {"center_steps": center_steps, "mean_steps": mean_steps}


def _finer(packed: Packed, name: str, x: Tensor, step: float) -> float:
    """Planes of x [C, D] rounded more finely than features, as 16 bits have it; the step."""
    own = max(CENTER_STEP * step, float(x.abs().max()) / 32767)
    packed.add(name, rounded(_planes(x), own))
    return own
