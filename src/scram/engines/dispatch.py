"""Which engine runs a call, and why the others cannot. What an engine can do is data beside it, its `SPEC`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import torch

from ..core import checks
from ..options import IMPLS, Impl
from ..settings import Score
from . import Engine, EngineSpec, Needs, cpu, gpu, reference
from .reference import engine as _reference

_FOLDERS = {folder.SPEC.name: folder for folder in (gpu, cpu, reference)}  # in order of preference
ENGINES: dict[str, EngineSpec] = {name: folder.SPEC for name, folder in _FOLDERS.items()}
# Those that were imported. The reference from the start: a traced call cannot import.
loaded: dict[str, Engine] = {reference.SPEC.name: cast(Engine, _reference)}


def engine(name: str) -> Engine:
    """The engine of that name, imported when it is first needed."""
    if name not in loaded:
        loaded[name] = cast(Engine, import_module(f"{_FOLDERS[name].__name__}.engine"))
    return loaded[name]


def choose(
    impl: Impl,
    device: torch.device,
    dtype: torch.dtype,
    score: Score = "dot",
    tile_matches: int = 0,
) -> EngineSpec:
    """The engine of that name, or for "auto" the first that can run; an error with every reason otherwise.

    >>> choose("auto", torch.device("cpu"), torch.float64, score=lambda q, k: (q - k).abs().sum(-1)).name
    'reference'
    """
    checks.one_of("impl", impl, IMPLS)
    needs = Needs(device, dtype, callable(score), impl != "auto", tile_matches)
    reasons = {}
    for name, spec in ENGINES.items():
        if impl in ("auto", name):
            reasons[name] = spec.reasons(needs)
            if not reasons[name]:
                return spec
    raise checks.no_engine(impl, reasons)


def implementations(device: torch.device | str = "cpu") -> list[tuple[str, list[str]]]:
    """Every engine with the reasons why it cannot run float32 tensors on `device`; none means it can.

    >>> [name for name, why_not in implementations() if not why_not]
    ['numba', 'reference']
    """
    needs = Needs(torch.device(device), torch.float32)
    return [(name, spec.reasons(needs)) for name, spec in ENGINES.items()]


def clear_caches() -> None:
    """Empty the caches of the engines that were loaded."""
    for each in loaded.values():
        each.clear_caches()
