"""Tensors that a mesh of processes holds together, torch's DTensors: public functions hand them on.

Imports no torch.distributed: where nobody has imported it there is no DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
caches: list[Callable[[], None]] = []  # what empties those of `distributed.dtensor`, where it is imported


def clear_caches() -> None:
    for clear in caches:
        clear()


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def takes_dtensors(function: Callable[P, R]) -> Callable[P, R]:
    """Where the first argument, q, is a DTensor: each rank calls the function on what it holds."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else kwargs.get("q")
        if first.__class__ is Tensor or not is_dtensor(first):
            return function(*args, **kwargs)
        from .distributed.dtensor import run

        found: R = run(function, *args, **kwargs)
        return found

    # Parameters with an underscore, as that of a rank's part of a call, are no part of what users are shown.
    whole = signature(function)
    public = [one for name, one in whole.parameters.items() if not name.startswith("_")]
    call.__signature__ = whole.replace(parameters=public)  # type: ignore[attr-defined]
    return call
