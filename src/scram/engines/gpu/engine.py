"""The GPU engine's functions by the names of the protocol."""

from typing import Any

from torch import Tensor

from ...calls import (
    AttendCall,
    AttendGrads,
    DrawnTail,
    DrawnTailCall,
    Found,
    SampleCall,
    Sampled,
    SearchCall,
    TailGrads,
)
from ...types import Attended
from .attend import attend as _attend
from .attend_backward import attend_backward as _attend_backward
from .drawn_tail import tail
from .drawn_tail_backward import tail_backward
from .launch import clear_caches as clear_caches
from .sample import sample as _sample
from .sample import sample_backward as _sample_backward
from .search import search as _search
from .tile_attend import tile_attend
from .tile_attend_backward import tile_attend_backward
from .tile_search import tile_search


def search(call: SearchCall) -> Found:
    return tile_search(call) if call.method == "tile" else _search(call)


def _args(call: Any, settings: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    how = {n: getattr(call, n) for n in settings}
    first = call._fields.index(
        next(n for n in call._fields if type(getattr(call, n)) in (int, float, bool, str, tuple))
    )
    return list(call)[:first], how


_ATT = ("radius", "causal", "scale", "weight", "dropout_p")
_TAIL = ("samples", "stratified", "radius", "causal", "scale")
_SAMPLE = ("method", "samples", "alpha", "chains_per_mode", "burn_in", "causal", "scale")


def attend(call: AttendCall) -> Attended:
    tensors, how = _args(call, _ATT)
    run = tile_attend if call.window == "tile" else _attend
    return Attended(*run(*tensors, **how))


def attend_backward(call: AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> AttendGrads:
    tensors, how = _args(call, _ATT)
    run = tile_attend_backward if call.window == "tile" else _attend_backward
    return AttendGrads(*run(grad_out, grad_lse, *tensors, out, lse, **how))  # type: ignore


def drawn_tail(call: DrawnTailCall) -> DrawnTail:
    tensors, how = _args(call, _TAIL)
    return DrawnTail(*tail(*tensors, **how))


def drawn_tail_backward(
    call: DrawnTailCall, offset: Tensor, names: Tensor, represents: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> TailGrads:
    tensors, how = _args(call, _TAIL)
    return TailGrads(*tail_backward(grad_out, grad_lse, *tensors, offset, names, represents, **how))  # type: ignore


def sample(call: SampleCall) -> Sampled:
    tensors, how = _args(call, _SAMPLE)
    return Sampled(*_sample(*tensors, **how))


def sample_backward(call: SampleCall, grad_out: Tensor, grad_lse: Tensor) -> TailGrads:
    tensors, how = _args(call, _SAMPLE)
    return TailGrads(*_sample_backward(grad_out, grad_lse, *tensors, **how))  # type: ignore
