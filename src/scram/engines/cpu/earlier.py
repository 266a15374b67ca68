"""Attention of every query over the keys up to its own place: torch's matrix products, block by block."""

from __future__ import annotations

from torch import Tensor

from ...core.calls import EarlierCall, EarlierGrads
from ...results import Attended
from ...spec import earlier as spec


def earlier(call: EarlierCall) -> Attended:
    return Attended(*spec.earlier(call))


def earlier_backward(call: EarlierCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> EarlierGrads:
    return spec.earlier_backward(call, out, grad_out, grad_lse)
