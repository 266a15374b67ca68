"""What a page holds: matches of every sweep, clusters, pictures, and features rounded until all of it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..codebook import Codebook
from ..grid import Grid, rows
from ..types import Matches
from .coordinates import Balanced, Principal
from .pack import Packed, estimated_bytes, rounded

FINEST_SCORE, FINEST_VALUE = 0.04, 0.01  # errors by rounding below which more bits show nothing
COARSEST = 1e4  # times the finest
VALUES_SHARE = 0.25  # of the bytes that are left for features, at most
MATCHES_SHARE = 0.25  # of all bytes, that matches of all sweeps may take; beyond, earlier sweeps keep the best one
CHECKED = 64  # queries of a head whose rounded weights are compared with exact ones


class Attention(NamedTuple):
    """One attention, as the page shows it; sample and batch are chosen, so that there is no batch axis.

    Args:
        q, k, v: [H, N, E], [Hk, M, E] and [Hk, M, F], prepared for the score, the scale in q.
        sweeps: the matches after 0, 1, .. T sweeps, each [1, H, *G, kappa].
        codebook: clusters of the keys, or None.
        pictures: colours of queries and keys, uint8 [N or M, 3]; empty where there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sweeps: Sequence[Matches]
    codebook: Codebook | None
    pictures: Sequence[Tensor]

    @property
    def group(self) -> int:
        """Heads of queries for each head of keys."""
        return len(self.q) // len(self.k)


class Contents(NamedTuple):
    """Packed arrays, and what the page says about them."""

    packed: Packed
    about: dict[str, Any]


def raster_width(grid: Grid) -> int:
    """Points on a line of the picture of a grid: its last axis; a sequence is broken into lines.

    >>> raster_width((6, 8)), raster_width((3, 6, 8)), raster_width((100,))
    (8, 8, 13)
    """
    return grid[-1] if len(grid) > 1 else max(1, math.ceil(math.sqrt(1.6 * grid[0])))


def stored(attention: Attention, most_bytes: int) -> Contents:
    """All of it in at most about so many bytes, before base64."""
    packed = Packed()
    early = _matches(packed, attention.sweeps, most_bytes)
    for name, picture in zip(("picture_queries", "picture_keys"), attention.pictures, strict=False):
        packed.add(name, picture.T.to(torch.int16).numpy())
    if attention.codebook is not None:
        label = attention.codebook.label[0].flatten(1).cpu().to(torch.int16).numpy()
        packed.add("label", label)
    values = [Principal.of(v) for v in attention.v]
    keys = _balanced(attention)
    queries = [q.double() @ keys[h // attention.group].to_queries for h, q in enumerate(attention.q)]
    base = torch.stack([q.double() @ keys[h // attention.group].centre for h, q in enumerate(attention.q)])
    base_step = max(float(base.abs().max()) / 4000, 1e-6)
    packed.add("base", rounded(base.numpy(), base_step))
    left = max(most_bytes - len(packed) - _cluster_bytes(attention), most_bytes // 10)

    def value_bytes(error: float) -> float:
        return sum(estimated_bytes(x.channels.T.numpy(), x.step(error)) for x in values)

    def feature_bytes(error: float) -> float:
        total = sum(estimated_bytes(x.keys.T.numpy(), x.step(error)) for x in keys)
        of = [keys[h // attention.group].step(error) for h in range(len(queries))]
        return total + sum(estimated_bytes(x.T.numpy(), step) for x, step in zip(queries, of, strict=True))

    value_error = _finest(value_bytes, VALUES_SHARE * left, FINEST_VALUE)
    score_error = _finest(feature_bytes, left - value_bytes(value_error), FINEST_SCORE)
    heads = []
    kept_keys, kept_values = [], []
    for g, (key, value) in enumerate(zip(keys, values, strict=True)):
        step, value_step = key.step(score_error), value.step(value_error)
        k, v = rounded(key.keys.T.numpy(), step), rounded(value.channels.T.numpy(), value_step)
        own = [rounded(queries[h].T.numpy(), step) for h in range(g * attention.group, (g + 1) * attention.group)]
        some, some_values = _used(k, *own), _used(v)
        kept_keys.append(some)
        kept_values.append(some_values)
        packed.add(f"k{g}", k[some])
        packed.add(f"v{g}", v[some_values])
        for n, q in enumerate(own):
            packed.add(f"q{g * attention.group + n}", q[some])
            # Steps of the features, of the values; the base of a score.
            heads.append({"step": step, "value_step": value_step, "channels": len(some)})
            heads[-1] |= _off(attention.q[g * attention.group + n], attention.k[g], key.centre, q[some], k[some], step)
    if attention.codebook is not None:
        _clusters(packed, attention, keys, values, kept_keys, kept_values)
    kept = [1 - _lost(x, some, x.step(value_error)) for x, some in zip(values, kept_values, strict=True)]
    about = {"heads": heads, "base_step": base_step, "early_matches": early, "values_kept": min(kept),
             "score_error": score_error, "width": attention.q.shape[-1],
             "channels": [len(some) for some in kept_keys], "value_channels": [len(some) for some in kept_values]}  # fmt: skip
    return Contents(packed, about)


def _balanced(attention: Attention) -> list[Balanced]:
    grouped = attention.q.unflatten(0, (-1, attention.group)).flatten(1, 2)
    return [Balanced.of(q, k) for q, k in zip(grouped, attention.k, strict=True)]


def _finest(size: Callable[[float], float], most: float, finest: float) -> float:
    """The smallest error, from `finest` on, whose size fits."""
    if size(finest) <= most:
        return finest
    low, high = 0.0, math.log(COARSEST)
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if size(finest * math.exp(middle)) <= most else (middle, high)
    return finest * math.exp(high)


def _used(*planes: NDArray[np.int16]) -> list[int]:
    """Channels that are not 0 everywhere in one of these; at least one."""
    used = np.all([(x != 0).any(-1) for x in planes], 0)
    return [int(at) for at in np.flatnonzero(used)] or [0]


def _lost(value: Principal, kept: list[int], step: float) -> float:
    """The share of the values' squares that rounding and left-out channels take away."""
    x = value.channels[:, kept]
    back = torch.from_numpy(rounded(x.numpy(), step).astype(np.float64) * step)
    whole = float(value.channels.square().sum())
    return (whole - float(x.square().sum()) + float((x - back).square().sum())) / whole if whole else 0.0


def _off(
    q: Tensor, k: Tensor, centre: Tensor, q_planes: NDArray[np.int16], k_planes: NDArray[np.int16], step: float
) -> dict[str, float]:
    """How far weights by rounded features are from exact ones: the share of the attention that lies elsewhere."""
    at = torch.linspace(0, len(q) - 1, min(CHECKED, len(q))).long()
    exact = (q[at].double() @ (k.double() - centre).T).softmax(-1)
    own = torch.from_numpy(q_planes[:, at.numpy()].astype(np.float32)).T * step**2
    off = 0.5 * (exact - (own @ torch.from_numpy(k_planes.astype(np.float32))).double().softmax(-1)).abs().sum(-1)
    return {"map_error": float(off.mean()), "map_error_most": float(off.max())}


def _matches(packed: Packed, sweeps: Sequence[Matches], most_bytes: int) -> int:
    """Rows and columns of all matches; how many matches of a query the earlier sweeps keep.

    Planes are in the order of sweeps, last first, then of matches, worst first, then of heads. So that every plane of
    an earlier sweep has its like of the next one a fixed number of places before it.
    """
    last = sweeps[-1]
    width, kappa, heads = raster_width(last.key_grid), last.index.shape[-1], last.index.shape[1]

    def planes(found: Matches, kept: int) -> NDArray[np.int16]:
        index = rows(found.index)[..., :kept].movedim(-1, 0).flip(0).cpu()  # [kept, H, N]
        place = torch.stack((torch.where(index < 0, -1, index // width), torch.where(index < 0, -1, index % width)), 2)
        return place.to(torch.int16).flatten(0, 2).numpy()

    for kept in dict.fromkeys((kappa, 1)):
        trial, earlier = Packed(), [planes(found, kept) for found in reversed(sweeps[:-1])]
        trial.add("matches", np.concatenate([planes(last, kappa), *earlier]), back=2 * heads * kept)
        if len(trial) <= MATCHES_SHARE * most_bytes:
            break
    packed.append(trial)
    return kept


def _cluster_bytes(attention: Attention) -> int:
    book = attention.codebook
    return 0 if book is None else 4 * (book.centres.numel() + book.values.numel())


def _clusters(
    packed: Packed, attention: Attention, keys: Sequence[Balanced], values: Sequence[Principal],
    kept_keys: Sequence[list[int]], kept_values: Sequence[list[int]],
) -> None:  # fmt: skip
    """Centres and mean values in the same coordinates, of each head of clusters."""
    book = attention.codebook
    assert book is not None
    sizes = book.sizes[0].cpu()
    share = len(sizes) // len(keys)
    for c in range(len(sizes)):
        key, value, g = keys[c // share], values[c // share], c // share
        centres = (book.centres[0, c].cpu().double() - key.centre) @ key.to_keys
        means = (book.values[0, c].cpu().double() - value.centre) @ value.axes
        packed.add_floats(f"centres{c}", centres[:, kept_keys[g]].numpy())
        packed.add_floats(f"means{c}", means[:, kept_values[g]].numpy())
    packed.add_floats("sizes", sizes.numpy())
    if book.gains is not None:
        packed.add_floats("gains", book.gains[0].cpu().numpy())
