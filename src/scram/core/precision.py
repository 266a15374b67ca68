"""Mixed precision by the rules of torch's own attention: under `torch.autocast` inputs take its dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import _compat

P = ParamSpec("P")
R = TypeVar("R")

# Looked up once: torch 2.11 does not compile `is_autocast_available`.
AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))


def autocast_device(x: Any) -> str | None:
    """The type of the device of x, where autocast is on for it."""
    return _autocast_device(x)


def autocast_inputs(device: str, *inputs: Any) -> tuple[Any, ...]:
    """Float tensors, alone or in a tuple, in the dtype of autocast. float64 stays, as everywhere in torch."""
    dtype = torch.get_autocast_dtype(device)
    return tuple(_cast(x, device, dtype) for x in inputs)


def follows_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Under autocast: float arguments, alone or in a tuple, become its dtype, as `scaled_dot_product_attention` has it.

    float64 stays, as everywhere in torch. Inside, autocast is off: accumulators stay float32.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _compat.autocast_active():
            return function(*args, **kwargs)
        device = _autocast_device(*args, *kwargs.values())
        if device is None:
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            plain = [_cast(x, device, dtype) for x in args]
            named = {name: _cast(x, device, dtype) for name, x in kwargs.items()}
            return function(*plain, **named)

    return call


def ignores_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Computes in the dtype of its arguments, under autocast too: for what is called exact."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device = _autocast_device(*args, *kwargs.values())
        if device is None:
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call


def _autocast_device(*arguments: Any) -> str | None:
    """The type of the device of the first tensor, where autocast is on."""
    for x in arguments:
        if isinstance(x, Tensor):
            kind = x.device.type
            return kind if kind in AUTOCAST and torch.is_autocast_enabled(kind) else None
    return None


def _cast(x: Any, device: str, dtype: torch.dtype) -> Any:
    if type(x) is tuple:  # extra keys and values
        return tuple(_cast(one, device, dtype) for one in x)
    if not isinstance(x, Tensor) or x.device.type != device or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(dtype)
