"""Which implementation runs a call, and why the others cannot. Capabilities are data; nothing here computes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch

from . import errors
from .types import Score


class Request(NamedTuple):
    """What a call needs of an implementation."""

    device: torch.device
    dtype: torch.dtype
    score: Score = "dot"
    explicit: bool = False
    window: str = "query"


@dataclass(frozen=True)
class Implementation:
    """A named engine and why it cannot serve a request."""

    name: str
    reasons: Callable[[Request], list[str]]


# Asked once: looking takes longer than a small search.
INSTALLED = {package: find_spec(package) is not None for package in ("numba", "triton")}


def _missing(package: str) -> list[str]:
    return [] if INSTALLED[package] else [f"the package {package} is not installed"]


def _not_a_dot_product(request: Request) -> list[str]:
    return ["a callable score runs in the reference only"] if callable(request.score) else []


def _triton_reasons(request: Request) -> list[str]:
    why = _missing("triton") + _not_a_dot_product(request)
    if request.device.type != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not (request.explicit and interpreted and request.device.type == "cpu"):
            why.append(f"it runs on CUDA tensors, these are on {request.device.type}")
    if request.dtype == torch.float64:
        why.append("float64 is not for it: the reference takes it on CUDA")
    return why


def _numba_reasons(request: Request) -> list[str]:
    why = _missing("numba") + _not_a_dot_product(request)
    if request.device.type != "cpu":
        why.append(f"it runs on CPU tensors, these are on {request.device.type}")
    if request.window == "tile":
        why.append("it attends window='query' only; the reference takes window='tile' on a CPU")
    return why


def _reference_reasons(request: Request) -> list[str]:
    return []


# In order of preference.
IMPLEMENTATIONS = (
    Implementation("triton", _triton_reasons),
    Implementation("numba", _numba_reasons),
    Implementation("reference", _reference_reasons),
)


def choose(impl: str, device: torch.device, dtype: torch.dtype, score: Score = "dot", window: str = "query") -> str:
    """The implementation of that name, or for "auto" the first that can run; an error with every reason otherwise.

    >>> choose("auto", torch.device("cpu"), torch.float64, score=lambda q, k: (q - k).abs().sum(-1))
    'reference'
    """
    errors.one_of("impl", impl, errors.IMPLS)
    request = Request(device, dtype, score, explicit=impl != "auto", window=window)
    reasons = {}
    for one in IMPLEMENTATIONS:
        if impl in ("auto", one.name):
            reasons[one.name] = one.reasons(request)
            if not reasons[one.name]:
                return one.name
    raise errors.no_implementation(impl, reasons)


def implementations(device: torch.device | str = "cpu") -> list[tuple[str, list[str]]]:
    """Every implementation with the reasons why it cannot run float32 tensors on `device`; none means it can.

    >>> [name for name, why_not in implementations() if not why_not]
    ['numba', 'reference']
    """
    request = Request(torch.device(device), torch.float32)
    return [(one.name, one.reasons(request)) for one in IMPLEMENTATIONS]
