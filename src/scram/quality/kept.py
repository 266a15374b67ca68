"""Plans that `attention(error=)` keeps: each kind of call is tuned once."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from .. import _compat
from ..core import checks
from ..core.bias import pair_of
from ..core.precision import autocast_device
from ..core.resolve import Request
from .again import in_a_quiet_moment
from .plan import GIVEN, Plan
from .tune import tune

MOST_PLANS = 1000

_plans: dict[tuple[Any, ...], Plan] = {}
_lock = threading.RLock()  # one call tunes at a time: others would disturb its times


def clear() -> None:
    """Forget all plans: each kind of call is tuned again."""
    with _lock:
        _plans.clear()


def kept_plan(q: Tensor, k: Tensor, v: Tensor, request: Request, error: float) -> Plan:
    """The plan of this kind of call, tuned on the tensors of its first one.

    A kind is: the error, shapes, dtypes, device, radius, order, scale, score, engine, and the shapes of mask, extra
    keys and bias.
    """
    checks.real("error", error, 0.0, float("inf"), "[0, inf)", "; 0.05 is 5 % of a typical output")
    _check(request)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "attention(error=) tunes, which torch.compile cannot trace: before, make plan = scram.tune(q, k, v, "
            "error=...), and call plan(q, k, v) in its place"
        )
    checks.values(q, k, v)
    kind = (
        float(error),
        *((x.shape, x.dtype, x.device) for x in (q, k, v)),
        torch.get_autocast_dtype(q.device.type) if _compat.autocast_active() and autocast_device(q) else None,
        request.radius if isinstance(request.radius, int) else tuple(request.radius),
        *(request.causal, request.scale, request.score, request.impl),
        None if request.key_mask is None else request.key_mask.shape,
        None if request.extra is None else tuple(x.shape for x in request.extra),
        request.extra_mask is None,
        None if request.bias is None else tuple(x.shape for x in pair_of(request.bias)),
    )
    plan = _plans.get(kind)
    if plan is not None:
        if plan.busy and not request.dropout_p:
            known = plan
            plan = in_a_quiet_moment(known, q, k, v, **{name: getattr(request, name) for name in GIVEN})
            if plan is not known:  # another thread may have stored its own
                _plans[kind] = plan
        return plan
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention(error=) tunes, which a CUDA graph cannot capture: call it once before")
    with _lock:
        plan = _plans.get(kind)  # of another thread
        if plan is None:
            plan = tune(
                q,
                k,
                v,
                error=error,
                radius=request.radius,
                causal=request.causal,
                key_mask=request.key_mask,
                scale=request.scale,
                score=request.score,
                extra=request.extra,
                extra_mask=request.extra_mask,
                bias=request.bias,
                impl=request.impl,
            )
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            _plans[kind] = plan
    return plan


def _check(request: Request) -> None:
    """Raise where a call says what a plan chooses, or what `tune` cannot have."""
    for name in ("search", "tail"):
        if getattr(request, name) != "auto":
            raise ValueError(f"error chooses search and tail; leave {name} out, or leave error out")
    if request.warm is not None:
        raise ValueError("a plan does not start from warm matches; leave warm out, or leave error out")
    if request.weight != "softmax":
        raise ValueError(f"error needs weight='softmax', got {request.weight!r}; leave error out")
