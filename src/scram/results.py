"""Settings and results that users hold, and the glossary of axes.

B batch, H query heads, Hk key heads (Hk divides H), *G query grid, *G' key grid (rank 1..4), N = prod(G) queries,
M = prod(G') keys, E width of q and k, F width of v, kappa matches per query, i a query, j a key. A row is one
(batch, query head), row = b*H + head; there are R = B*H rows. A key is named by its flat row-major index into G'; -1
means "no key".
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core import checks, files
from .core.dtensors import is_dtensor
from .spec import places
from .spec.bits import unpacked
from .spec.schedule import tile_count


@dataclass(frozen=True, eq=False)
class Matches:
    """For every query its best keys, best first: the result of a search.

    Args:
        index: int32 [B, H, *G, kappa], flat row-major index into the key grid, -1 for none; what lies off the grid
            counts as none.
        score: float32 [B, H, *G, kappa], the score of each match before `scale`; -inf for none, and for a key whose
            score is NaN.
        key_grid: the extents of the key grid.

    >>> found = Matches(torch.zeros(1, 1, 4, 1, dtype=torch.int32), torch.ones(1, 1, 4, 1), (6,))
    >>> found
    Matches(4 queries on grid (4,), keys on grid (6,), kappa=1, batch=1, heads=1, found 100.0 %, cpu)
    """

    index: Tensor
    score: Tensor
    key_grid: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "key_grid", checks.matches_fields(self.index, self.score, self.key_grid))

    @staticmethod
    def identity(
        grid: Sequence[int],
        key_grid: Sequence[int] | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str = "cpu",
    ) -> Matches:
        """Each query's own place as its match, on a key grid of other extents the place scaled to it; scores are 0.

        Args:
            grid: the extents of the query grid.
            key_grid: the extents of the key grid; default those of the query grid.
            batch, heads: how many rows of queries share these matches.
            device: where the tensors are made.

        >>> Matches.identity((2, 3)).index.flatten()
        tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
        """
        grid = checks.grid(grid)
        keys = grid if key_grid is None else checks.grid(key_grid, "key_grid")
        places.same_rank("key_grid", keys, len(grid))
        own = places.own_index(grid, keys, device).unsqueeze(-1)
        index = own.expand(checks.whole("batch", batch, 0), checks.whole("heads", heads, 1), *own.shape).contiguous()
        return Matches(index, torch.zeros(index.shape, dtype=torch.float32, device=device), keys)

    @staticmethod
    def from_coords(coords: Tensor, key_grid: Sequence[int] | None = None) -> Matches:
        """The keys nearest to places given by coordinates; scores are 0.

        Args:
            coords: [B, H, *G, kappa, rank], the coordinates of each match on the key grid; halves are rounded up. What
                is not finite, or nearest to a point off the grid, is no match.
            key_grid: the extents of the key grid; default those of the query grid.

        >>> Matches.from_coords(torch.tensor([1.6, 0.2, torch.nan]).reshape(1, 1, 3, 1, 1)).index.flatten()
        tensor([ 2,  0, -1], dtype=torch.int32)
        """
        rank = places.coords_rank(coords)
        keys = checks.grid(coords.shape[2:-2] if key_grid is None else key_grid, "key_grid")
        places.same_rank("key_grid", keys, rank)
        index = places.index_of(coords, keys)
        zero = torch.zeros(index.shape, dtype=torch.float32, device=index.device)
        return Matches(index, zero.masked_fill(index < 0, -torch.inf), keys)

    def coords(self) -> Tensor:
        """The coordinates of each match on the key grid: float32 [B, H, *G, kappa, rank], NaN where there is none.

        >>> Matches.identity((2, 2)).coords()[0, 0, 1, 0]
        tensor([[1., 0.]])
        """
        return places.coords_of(self.index, self.key_grid)

    def upsample(self, grid: Sequence[int], key_grid: Sequence[int] | None = None) -> Matches:
        """The same matches for queries and keys at another resolution: the start of a search there.

        Points are centers of cells that cover the same extent. A new query takes the matches of the old one whose cell
        it lies in, moved by its distance to that one's center; its scores are the old ones. Coarser grids work too.

        Args:
            grid: the extents of the new query grid.
            key_grid: the extents of the new key grid; default the old ones, scaled like the query grid.

        >>> Matches.identity((2, 3)).upsample((4, 6)).index.equal(Matches.identity((4, 6)).index)
        True
        """
        old = tuple(self.index.shape[2:-1])
        grid = checks.grid(grid)
        places.same_rank("grid", grid, len(old))
        if key_grid is None:
            key_grid = [max(1, (2 * k * n + o) // (2 * o)) for k, n, o in zip(self.key_grid, grid, old, strict=True)]
        keys = checks.grid(key_grid, "key_grid")
        places.same_rank("key_grid", keys, len(old))
        return Matches(*places.resampled(self.index, self.score, self.key_grid, grid, keys), keys)

    def inverse(self, matches: int | None = None) -> Matches:
        """The same pairs seen from the keys: for every key the queries that found it, best first; -1 for none.

        Forward matches seed a backward search: `search(k, q, warm=found.inverse())`.

        Args:
            matches: how many queries each key keeps; default kappa.

        >>> found = Matches.from_coords(torch.tensor([2.0, 2.0, 0.0]).reshape(1, 1, 3, 1, 1))
        >>> found.inverse().index.flatten()
        tensor([ 2, -1,  0], dtype=torch.int32)
        """
        kept = self.index.shape[-1] if matches is None else checks.whole("matches", matches, 1)
        index, score = places.inverted(self.index, self.score, self.key_grid, kept)
        return Matches(index, score, tuple(self.index.shape[2:-1]))

    def to(self, device: torch.device | str) -> Matches:
        """The same matches on another device."""
        return Matches(self.index.to(device), self.score.to(device), self.key_grid)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file.

        >>> import tempfile
        >>> found = Matches(torch.zeros(1, 1, 4, 1, dtype=torch.int32), torch.ones(1, 1, 4, 1), (6,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found.save(folder + "/found.safetensors")
        ...     Matches.load(folder + "/found.safetensors").key_grid
        (6,)
        """
        grid = ",".join(map(str, self.key_grid))
        metadata = {"format": "scram.Matches", "key_grid": grid}
        files.save_tensors({"index": self.index, "score": self.score}, metadata, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Matches:
        """Read what `save` wrote; ValueError for any other file. Nothing is unpickled."""

        def build(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Matches:
            grid = tuple(int(extent) for extent in metadata["key_grid"].split(","))
            matches = Matches(tensors["index"], tensors["score"], grid)
            keys = math.prod(grid)
            if bool(((matches.index < -1) | (matches.index >= keys)).any()):
                raise ValueError(f"index must lie in -1..{keys - 1}, the keys of the grid {grid}")
            if bool(matches.score.isnan().any()):
                raise ValueError("score must not be NaN")
            return matches

        return files.load_tensors(path, build, "scram.Matches", ("index", "score")).to(device)

    def __repr__(self) -> str:
        batch, heads, *grid, kappa = self.index.shape
        queries = self.index.numel() // max(kappa, 1)
        if self.index.is_meta or isinstance(self.index, torch._subclasses.FakeTensor) or is_dtensor(self.index):
            share = "?"
        else:
            share = f"{100 * float((self.index >= 0).float().mean()):.1f} %" if self.index.numel() else "-"
        return (
            f"Matches({queries} queries on grid {tuple(grid)}, keys on grid {self.key_grid}, kappa={kappa}, "
            f"batch={batch}, heads={heads}, found {share}, {self.index.device})"
        )


class MatchedPoints(NamedTuple):
    """Some matches as points, what `sample` returns. On planes places are (x, y), the center of the first pixel (0, 0).

    Args:
        a: float32 [..., n, rank], places of the queries; the last axis of the grid is first.
        b: float32 [..., n, rank], where they lie among the keys.
        certainty: float32 [..., n], 0..1.
    """

    a: Tensor
    b: Tensor
    certainty: Tensor


@dataclass(frozen=True, eq=False)
class Routes:
    """Which clusters every tile of 64 queries attends key by key. `scram.route` returns one.

    Tiles are compact blocks of the query grid (8 x 8 on a plane), in row-major order, smaller at its borders.

    Args:
        bits: int32 [B, H, T, W] of T tiles; cluster c is bit c % 32 of word c // 32.
        grid: the extents of the query grid.
        count: clusters of a head.

    >>> q = torch.randn(1, 1, 16, 16, 8)
    >>> codebook = scram.cluster(q, q, q, clusters=scram.Clusters(count=32, keys=64, seed=0))
    >>> routes = scram.route(q, q, codebook)
    >>> routes
    Routes(4 tiles of queries on grid (16, 16), 32 clusters, batch=1, heads=1, cpu)
    >>> routes.chosen.shape
    torch.Size([1, 1, 4, 32])
    """

    bits: Tensor
    grid: tuple[int, ...]
    count: int

    def __post_init__(self) -> None:
        grid = checks.grid(self.grid, "grid")
        count = checks.whole("count", self.count, 1)
        checks.instance("bits", self.bits, Tensor, "tensor")
        want = (tile_count(grid), -(-count // 32))
        if self.bits.ndim != 4 or tuple(self.bits.shape[2:]) != want or self.bits.dtype != torch.int32:
            raise ValueError(
                f"bits of routes must be int32 [B, H, T, W] with (T, W) = {want} for grid {grid} and {count} clusters, "
                f"got {self.bits.dtype} {tuple(self.bits.shape)}"
            )
        object.__setattr__(self, "grid", grid)

    @property
    def chosen(self) -> Tensor:
        """bool [B, H, T, C], whether each tile attends the keys of each cluster one by one."""
        return unpacked(self.bits, self.count)

    def to(self, device: torch.device | str) -> Routes:
        """The same routes on another device."""
        return Routes(self.bits.to(device), self.grid, self.count)

    def __repr__(self) -> str:
        batch, heads, tiles, _ = self.bits.shape
        return (
            f"Routes({tiles} tiles of queries on grid {self.grid}, {self.count} clusters, batch={batch}, "
            f"heads={heads}, {self.bits.device})"
        )


class Attended(NamedTuple):
    """The result of attending: out [B, H, *G, F], and lse [B, H, *G], the log of the normalizer.

    lse is what `merge` needs to join two results exactly, and what tells how much of the attention was captured.
    A query that attends no key has out 0 and lse -inf.

    >>> Attended(torch.zeros(1, 1, 4, 3), torch.zeros(1, 1, 4)).out.shape
    torch.Size([1, 1, 4, 3])
    """

    out: Tensor
    lse: Tensor


def check_matches(name: str, q: Tensor, k: Tensor, matches: Any) -> None:
    """Raise where `matches` were not made for queries q [B, H, *G, E] and keys k [B, Hk, *G', E]."""
    checks.instance(name, matches, Matches, "scram.Matches", "; scram.search returns one")
    index = matches.index
    if index.shape[:-1] != q.shape[:-1]:
        raise ValueError(
            f"{name} must have one entry per query, [B, H, *G] = {tuple(q.shape[:-1])}, got {tuple(index.shape[:-1])}"
        )
    if matches.key_grid != tuple(k.shape[2:-1]):
        raise ValueError(f"{name} was made for key grid {matches.key_grid}, but k has {tuple(k.shape[2:-1])}")
    if index.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {index.device}; use {name}.to(q.device)")


def check_routes(q: Tensor, count: int | None, routes: Any) -> None:
    """Raise where `routes` were not made for queries q [B, H, *G, E] and so many clusters; None: there are none."""
    checks.instance("routes", routes, Routes, "scram.Routes", "; scram.route returns one")
    if count is None:
        raise ValueError("routes need the clusters that they name: pass tail=codebook, the one they were made from")
    got = (tuple(routes.bits.shape[:2]), routes.grid, routes.count)
    want = (tuple(q.shape[:2]), tuple(q.shape[2:-1]), count)
    if got != want:
        raise ValueError(f"routes were made for (B, H), grid and clusters {got}, the call has {want}")
    if routes.bits.device != q.device:
        raise ValueError(f"routes must be on q's device {q.device}, got {routes.bits.device}; use routes.to(q.device)")


def check_attended(name: str, q: Tensor, attended: Any, width: int | None = None) -> None:
    """Raise where `attended` does not hold out and lse of every query of q [B, H, *G, E]."""
    _check_attended(name, attended)
    if attended.lse.shape != q.shape[:-1]:
        raise ValueError(f"{name}.lse must be [B, H, *G] = {tuple(q.shape[:-1])}, got {tuple(attended.lse.shape)}")
    want = (*q.shape[:-1], width)
    if width is not None and attended.out.shape != want:
        raise ValueError(f"{name}.out must be [B, H, *G, F] = {want}, got {tuple(attended.out.shape)}")


def check_mergeable(a: Any, b: Any) -> None:
    """Raise where two results are not of the same queries."""
    _check_attended("a", a)
    _check_attended("b", b)
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape:
        raise ValueError(
            f"merge needs two results of the same queries, got out {tuple(a.out.shape)} and {tuple(b.out.shape)}"
        )
    if a.out.dtype != b.out.dtype or a.out.device != b.out.device:
        raise ValueError(
            f"merge needs results of one dtype and device, got {a.out.dtype} on {a.out.device} "
            f"and {b.out.dtype} on {b.out.device}"
        )


def _check_attended(name: str, value: Any) -> None:
    checks.instance(name, value, Attended, "scram.Attended (out, lse)", "; scram.attend returns one")
