"""Queries, keys and values from a file that a user saved: .npz or .safetensors, never unpickled."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.checks import MAX_RANK
from . import memory

STORED = ("axes", "grid", "scale")  # what a file may say about its tensors, by these names
MOST_STORED = 10_000  # bytes of each


@dataclass(frozen=True)
class Layout:
    """How stored tensors lie; None where nothing was said.

    Args:
        axes: a letter for each axis: b batch, h heads, e width, n all points of the grid in row-major order, any other
            an axis of the grid.
        grid: extents of the grid, whose points the stored ones are in row-major order; needed where the axis n stands
            for it.
        scale: factor on the scores.
    """

    axes: str | None = None
    grid: tuple[int, ...] | None = None
    scale: float | None = None

    def over(self, other: Layout) -> Layout:
        """This one, and the other where this one says nothing."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in STORED)
        return Layout(*(second if first is None else first for first, second in pairs))


def read(path: Path, names: tuple[str, str, str], override: Layout) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """q, k, v [B, H, *G, E|F] and the scale, None for the default; `override` goes before what the file says.

    Args:
        names: of the queries, the keys and the values in the file; keys and values may be one tensor.
    """
    tensors, stored = _safetensors(path, names) if path.suffix == ".safetensors" else _npz(path, names)
    layout = override.over(_layout(path, stored))
    for name, x in tensors.items():
        if x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{path}: {name} must hold real numbers, got {str(x.dtype).removeprefix('torch.')}")
    q, k, v = (_laid_out(name, tensors[name], layout) for name in names)
    return q, k, v, layout.scale


def _npz(path: Path, names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    wrong = f"{path} is not an .npz file of arrays, or not a whole one; np.savez writes one"
    with path.open("rb") as raw, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's own, of odd headers
        try:
            file = np.load(raw, allow_pickle=False)
        except Exception:  # a broken file may raise anything
            raise ValueError(wrong) from None
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError(wrong)
        _check_names(path, names, file.files)
        headers = {name: _header(path, file, name) for name in (*names, *STORED) if name in file.files}
        for name in names:
            if headers[name].dtype.kind not in "biufc":
                raise ValueError(f"{path}: {name} must hold real numbers, got {headers[name].dtype}")
        _check_memory(path, [(headers[name].size, headers[name].dtype.itemsize) for name in names])
        stored = {name: _stored(path, file, name, headers[name]) for name in STORED if name in headers}
        arrays = {name: _array(path, file, name) for name in names}
    return {name: torch.from_numpy(_native(x)) for name, x in arrays.items()}, stored


class _Header(NamedTuple):
    """What an .npy file says of its array before the array itself."""

    size: int  # elements
    dtype: np.dtype[Any]


def _header(path: Path, file: Any, name: str) -> _Header:
    """The header alone, compared with the length of what follows it."""
    member = name if name in file.zip.namelist() else f"{name}.npy"
    with _named(path, name), file.zip.open(member) as data:
        version = np.lib.format.read_magic(data)
        if version not in ((1, 0), (2, 0)):
            raise ValueError("is not an array that np.savez writes")
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(data)
        follows = file.zip.getinfo(member).file_size - data.tell()
    if dtype.hasobject:
        raise ValueError(f"{path}: {name} is a pickled object, which is never loaded; save an array of numbers")
    size = prod(shape)
    if min(shape, default=0) < 0 or size * dtype.itemsize != follows:
        raise ValueError(f"{path}: {name} must be {dtype} of shape {shape}, but the file holds {follows} bytes of it")
    return _Header(size, dtype)


def _stored(path: Path, file: Any, name: str, header: _Header) -> Any:
    """A text or numbers of the file, as Python has them."""
    if header.size * header.dtype.itemsize > MOST_STORED:
        raise ValueError(f"{path}: the stored {name} must be {MOST_STORED} bytes at most; it is no {name}")
    return _array(path, file, name).tolist()


def _array(path: Path, file: Any, name: str) -> Any:
    with _named(path, name):
        return file[name]


@contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """Name the file and the array where reading fails: a broken file may raise anything."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: {name} cannot be read: {error or type(error).__name__}") from None


def _check_memory(path: Path, tensors: list[tuple[int, int]]) -> None:
    """Refuse more than fits: tensors of (elements, bytes of one) as read, in order, and as float32 or wider."""
    needed = sum(size * (itemsize + 2 * max(itemsize, 4)) for size, itemsize in tensors)
    memory.check(needed, f"{path}: its tensors need", "cut the batch, heads or grid")


def _native(x: Any) -> Any:
    """In the byte order of this machine; what torch does not know as float32."""
    known = x.dtype.kind in "bc" or (x.dtype.kind == "f" and x.dtype.itemsize <= 8)
    return np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=") if known else np.float32)


def _safetensors(path: Path, names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            stored: dict[str, Any] = {**(file.metadata() or {})}
            _check_names(path, names, list(file.keys()))
            slices = [file.get_slice(name) for name in names]
            _check_memory(path, [(prod(one.get_shape()), 8 if "64" in one.get_dtype() else 4) for one in slices])
            return {name: file.get_tensor(name) for name in names}, {n: stored[n] for n in STORED if n in stored}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole .safetensors file: {error}") from None


def _check_names(path: Path, names: tuple[str, ...], held: list[str]) -> None:
    missing = dict.fromkeys(name for name in names if name not in held)
    if missing:
        raise ValueError(
            f"{path} holds no {' and no '.join(missing)}, but {', '.join(held[:8]) or 'nothing'}; name queries, keys "
            "and values with --names, for example --names q,k,k"
        )


def _layout(path: Path, stored: dict[str, Any]) -> Layout:
    """What a file says; a safetensors file says it in words."""
    axes = stored.get("axes")
    try:
        grid, scale = (json.loads(x) if isinstance(x, str) else x for x in (stored.get("grid"), stored.get("scale")))
        return Layout(
            None if axes is None else str(axes),
            None if grid is None else _extents(grid),
            None if scale is None else float(scale),
        )
    except (TypeError, ValueError, OverflowError, RecursionError):
        wanted = f"a text, 1 to {MAX_RANK} whole numbers above 0, a number"
        raise ValueError(f"{path}: the stored axes, grid and scale must be {wanted}") from None


def _extents(grid: Any) -> tuple[int, ...]:
    extents = tuple(int(extent) for extent in grid)
    if not 1 <= len(extents) <= MAX_RANK or min(extents) < 1 or list(extents) != list(grid):
        raise ValueError
    return extents


def _laid_out(name: str, x: Tensor, layout: Layout) -> Tensor:
    """[B, H, *G, E] from what is stored."""
    axes = layout.axes
    if axes is None:
        axes = "bhne" if layout.grid is not None and x.ndim == 4 else "bhyxe" if x.ndim == 5 else None
    if axes is None:
        raise ValueError(
            f"{name} has {x.ndim} axes {tuple(x.shape)}: say what they are, for example --axes yxhe, "
            "or --grid 64x64 for [B, H, N, E]"
        )
    if len(axes) != x.ndim or len(set(axes)) != len(axes) or "e" not in axes:
        shape = f"{x.ndim} axes {tuple(x.shape)}"
        raise ValueError(f"{name} has {shape}, --axes must name each of them once, with an e: got {axes}")
    for letter in "hb":
        if letter not in axes:
            x = x.unsqueeze(0)
            axes = letter + axes
    points = [letter for letter in axes if letter not in "bhe"]
    x = x.permute([axes.index(letter) for letter in ("b", "h", *points, "e")])
    if layout.grid is not None:
        x = _on_grid(name, x, layout.grid)
    return x.contiguous()


def _on_grid(name: str, x: Tensor, grid: tuple[int, ...]) -> Tensor:
    """[B, H, *G, E] from [B, H, *points, E], the points in row-major order."""
    stored = x.shape[2:-1]
    count = prod(grid)
    if stored.numel() != count:
        extents = " x ".join(map(str, stored))
        points = extents if len(stored) == 1 else f"{extents} = {stored.numel()}"
        shown = " x ".join(map(str, grid))
        raise ValueError(f"{name} has {points} points, but the grid {shown} has {count}")
    return x.reshape(*x.shape[:2], *grid, x.shape[-1])
