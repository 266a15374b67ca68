"""Tensors that a mesh of processes holds together, torch's DTensors: public functions hand them on.

Imports no torch.distributed: where nobody has imported it there is no DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

caches: list[Callable[[], None]] = []  # what empties those of `distributed.dtensor`, where it is imported


def clear_caches() -> None:
    for clear in caches:
        clear()


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
