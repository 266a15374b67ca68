"""Every private or version-bound API of torch, Triton, Numba and llvmlite, in one place.

Each has the versions it was run on, a check that it still is what it was, and a public fallback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _resolve(path: str) -> object | None:
    """The object at a dotted path below torch, None where there is none."""
    found: object | None = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# torch 2.11 to 2.13. Without these the operators always pass through the dispatcher, which is right and slower.
_functorch = _resolve("_C._are_functorch_transforms_active")
_dispatch_mode = _resolve("utils._python_dispatch.is_in_torch_dispatch_mode")
_autocast = _resolve("_C._is_any_autocast_enabled")


def functorch_active() -> bool:
    """Whether a transform of torch.func is at work. Fallback: a grad or vmap level of the public torch.func API."""
    return bool(_functorch()) if callable(_functorch) else True


def dispatch_mode_active() -> bool:
    """Whether a TorchDispatchMode is at work. Fallback: yes, so the dispatcher is used."""
    return bool(_dispatch_mode()) if callable(_dispatch_mode) else True


def transformed() -> bool:
    """Whether a transform of torch.func is at work outside a compiled graph."""
    return not torch.compiler.is_compiling() and functorch_active()


def autocast_active() -> bool:
    """Whether autocast may be on for some device. Fallback: yes, so the device is looked at."""
    return bool(_autocast()) if callable(_autocast) else True


def has_tangent(arguments: Sequence[object]) -> bool:
    """Whether a tensor among them carries a forward-mode derivative."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    duals = (forward_ad.unpack_dual(x) for x in arguments if isinstance(x, Tensor))  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)
