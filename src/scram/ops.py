"""The fast engines as torch operators: schemas, shapes for tracing, autograd. Imports neither Numba nor Triton.

`search` and `attend` here have the signatures of the reference; an engine is a package with four functions
    search(q, k, seed, key_mask, warm, *, matches, separation, sweeps, jumps, propagate, gossip, causal) -> index, score
    tile_search(<the same>), where `pick` lets it run
    attend(q, k, v, index, key_mask, k_extra, v_extra, seed, *, radius, causal, scale, weight, dropout_p) -> out, lse
    attend_backward(grad_out, grad_lse, <the tensors of attend>, out, lse, *, <its settings>)
        -> dq, dk, dv, dk_extra or None, dv_extra or None
    tile_attend, tile_attend_backward(<the same>), where `pick` lets them run
on prepared features (q and k of one dtype, v perhaps of another), and is loaded when first called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import errors
from .scoring import accumulator
from .types import Attended, Matches, Score, Search

ENGINES = {"numba": "scram.engines.cpu", "triton": "scram.engines.gpu"}

PLAIN = {Tensor, torch.nn.Parameter}

torch.library.define(
    "scram::search",
    "(Tensor q, Tensor k, Tensor seed, Tensor? key_mask, Tensor? warm, int matches, int separation, int sweeps, "
    "int[] jumps, str propagate, int gossip, bool causal, str method, str impl) -> (Tensor, Tensor)",
)
_ATTEND = (
    "Tensor q, Tensor k, Tensor v, Tensor index, Tensor? key_mask, Tensor? k_extra, Tensor? v_extra, Tensor? seed, "
)
_HOW = "int[] radius, bool causal, float scale, str weight, float dropout_p, str window, str impl"
torch.library.define("scram::attend", f"({_ATTEND}{_HOW}) -> (Tensor, Tensor)")
torch.library.define(
    "scram::attend_backward",
    f"(Tensor grad_out, Tensor grad_lse, {_ATTEND}Tensor out, Tensor lse, {_HOW}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def search(
    q: Tensor,
    k: Tensor,
    settings: Search,
    *,
    seed: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    score: Score,
    warm: Matches | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Index and score as `reference.search` or `reference.tile_search` find them, by the engine `impl`."""
    run: Callable[..., tuple[Tensor, Tensor]] = torch.ops.scram.search
    if idle((q, k, key_mask)):
        run = _search
        if q.requires_grad or k.requires_grad:
            q, k = q.detach(), k.detach()
    else:
        q, k = q.detach(), k.detach()
    return run(
        q,
        k,
        seed,
        key_mask,
        None if warm is None else warm.index,
        settings.matches,
        settings.separation,
        settings.sweeps,
        settings.jumps,
        settings.propagate,
        settings.gossip,
        causal,
        settings.method,
        impl,
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    *,
    radius: Sequence[int],
    causal: bool,
    key_mask: Tensor | None,
    scale: float,
    score: Score,
    weight: str,
    extra: tuple[Tensor, Tensor] | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    window: str,
    impl: str,
) -> Attended:
    """As `reference.attend` or `reference.tile_attend`, by the engine `impl`."""
    k_extra, v_extra = (None, None) if extra is None else extra
    if not torch.compiler.is_compiling():
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in (q, k, v, k_extra, v_extra)):
            raise errors.reverse_mode_only(impl)  # torch would take the derivative for zero
        if index.is_inference() and torch.is_grad_enabled():
            index = index.clone()  # autograd keeps no inference tensor
    tensors = (q, k, v, index, key_mask, k_extra, v_extra, dropout_seed)
    how = (list(radius), causal, scale, weight, dropout_p, window, impl)
    run: Callable[..., tuple[Tensor, Tensor]] = torch.ops.scram.attend
    if _transformed():
        run = _Attend.apply
    elif idle(tensors):
        learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        run = _AttendIdle.apply if learning else _attend
    return Attended(*run(*tensors, *how))


def _transformed() -> bool:
    """Whether a transform of torch.func is at work: they do not take the autograd of a registered operator."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def idle(tensors: Sequence[Tensor | None]) -> bool:
    """Whether torch would only pass a call on: then its dispatcher, slower than a small kernel, is spared.

    It has more to do when it compiles, traces or transforms, and for subclasses of Tensor.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return False
    return all([x is None or x.__class__ in PLAIN for x in tensors])  # noqa: C419 - a list is faster


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


@cache
def _engine(impl: str) -> ModuleType:
    return import_module(ENGINES[impl])


def _search(
    q: Tensor,
    k: Tensor,
    seed: Tensor,
    key_mask: Tensor | None,
    warm: Tensor | None,
    matches: int,
    separation: int,
    sweeps: int,
    jumps: Sequence[int],
    propagate: str,
    gossip: int,
    causal: bool,
    method: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    run = _engine(impl).tile_search if method == "tile" else _engine(impl).search
    result: tuple[Tensor, Tensor] = run(
        q,
        k,
        seed,
        key_mask,
        warm,
        matches=matches,
        separation=separation,
        sweeps=sweeps,
        jumps=tuple(jumps),
        propagate=propagate,
        gossip=gossip,
        causal=causal,
    )
    return result


torch.library.impl("scram::search", ("cpu", "cuda"), _search)


@torch.library.register_fake("scram::search")  # type: ignore[untyped-decorator]
def _search_shapes(q: Tensor, k: Tensor, seed: Tensor, key_mask: Any, warm: Any, matches: int, *_: Any) -> Any:
    shape = (*q.shape[:-1], matches)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape, dtype=torch.float32)


def _settings(how: Sequence[Any]) -> dict[str, Any]:
    radius, causal, scale, weight, dropout_p, *_ = how
    return {"radius": tuple(radius), "causal": causal, "scale": scale, "weight": weight, "dropout_p": dropout_p}


def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, how = arguments[:8], arguments[8:]
    engine = _engine(how[-1])
    run = engine.tile_attend if how[-2] == "tile" else engine.attend
    result: tuple[Tensor, Tensor] = run(*tensors, **_settings(how))
    return result


torch.library.impl("scram::attend", ("cpu", "cuda"), _attend)


@torch.library.register_fake("scram::attend")  # type: ignore[untyped-decorator]
def _attend_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = v.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulator(v.dtype))


def _attend_backward(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, how = arguments[:12], arguments[12:]
    engine = _engine(how[-1])
    run = engine.tile_attend_backward if how[-2] == "tile" else engine.attend_backward
    grads = run(*tensors, **_settings(how))
    return tuple(tensors[2].new_empty(0) if grad is None else grad for grad in grads)


torch.library.impl("scram::attend_backward", ("cpu", "cuda"), _attend_backward)


@torch.library.register_fake("scram::attend_backward")  # type: ignore[untyped-decorator]
def _attend_backward_shapes(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    key_mask: Tensor | None,
    k_extra: Tensor | None,
    v_extra: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(v.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, k_extra, v_extra))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.how, ctx.impl = inputs[8:], inputs[-1]


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    given = (grad_out, grad_lse, *tensors, out, lse)
    run: Callable[..., tuple[Tensor, ...]] = torch.ops.scram.attend_backward
    if _transformed():
        run = _AttendBackward.apply
    elif not torch.is_grad_enabled() and idle(given):  # else the operator stands in the graph, to refuse the next one
        run = _attend_backward
    dq, dk, dv, dk_extra, dv_extra = run(*given, *ctx.how)
    extra = (None, None) if tensors[5] is None else (dk_extra, dv_extra)
    return dq, dk, dv, None, None, *extra, None, *[None] * len(ctx.how)


def _differentiate_again(ctx: Any, *_: Tensor | None) -> None:
    raise errors.first_order_only(ctx.impl)


def _differentiate_forward(ctx: Any, *_: Tensor | None) -> None:
    raise errors.reverse_mode_only(ctx.impl)


def _save_name(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.impl = inputs[-1]


def _one_by_one(op: Any) -> Any:
    """The rule of vmap: sample by sample, so that each one's noise is that of a call of its own."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def sample(n: int) -> list[Any]:
            return [x.select(d, n) if isinstance(d, int) else x for x, d in zip(arguments, in_dims, strict=True)]

        results = zip(*(op(*sample(n)) for n in range(info.batch_size)), strict=True)
        stacked = tuple(torch.stack(result) for result in results)
        return stacked, (0,) * len(stacked)

    return rule


class _AttendIdle(torch.autograd.Function):
    """`scram::attend` with its gradient, where torch is idle: one that sets its context itself costs less."""

    backward = staticmethod(_differentiate)

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        result = _attend(*arguments)
        _save(ctx, arguments, result)
        return result


class _Attend(torch.autograd.Function):
    """The same under a transform of torch.func."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save)
    jvp = staticmethod(_differentiate_forward)
    backward = staticmethod(_differentiate)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.scram.attend(*arguments)
        return result


class _AttendBackward(torch.autograd.Function):
    """`scram::attend_backward` under a transform of torch.func."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save_name)
    jvp = staticmethod(_differentiate_forward)
    backward = staticmethod(_differentiate_again)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.scram.attend_backward(*arguments)
        return result


for _op in (torch.ops.scram.search, torch.ops.scram.attend, torch.ops.scram.attend_backward):
    torch.library.register_vmap(_op.default, _one_by_one(_op))
torch.library.register_autograd("scram::attend", _differentiate, setup_context=_save)
torch.library.register_autograd("scram::attend_backward", _differentiate_again, setup_context=_save_name)
