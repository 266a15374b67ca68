"""A plan that was measured on a busy machine is timed again when it is used in a quiet moment."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from .. import _compat
from .baseline import yardstick
from .plan import Plan

PAUSE = 10.0  # seconds after which a busy machine is looked at again

_lock = threading.Lock()
_next_look = 0.0  # on the clock `monotonic`


def in_a_quiet_moment(plan: Plan, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
    """The plan; where it was measured on a busy machine and none is busy now, what is chosen by new times.

    To look takes some milliseconds of dense attention, and is done once in `PAUSE` seconds at most, whatever plans are
    used. One thread looks, others go on. Nothing is timed under `torch.compile`, transforms and dispatch modes.

    Args:
        plan: any.
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        arguments: of the call, as `Plan.check` takes them.
    """
    if not plan.busy or not _compat.plain_eager() or not all(_is_plain(x) for x in (q, k, v)):
        return plan
    if monotonic() < _next_look or not _lock.acquire(blocking=False):
        return plan
    try:
        return _looked(plan, q, k, v, **arguments)
    finally:
        _lock.release()


def _is_plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.__class__ in (Tensor, torch.nn.Parameter)


@torch.no_grad()
def _looked(plan: Plan, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
    global _next_look
    if not yardstick(q, k, v, causal=plan.causal).busy:
        plan = plan.timed_again(q, k, v, **arguments)
    if plan.busy:
        _next_look = monotonic() + PAUSE
    return plan
