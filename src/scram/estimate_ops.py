"""The estimators of the fast engines as torch operators, like `ops`: schemas, shapes for tracing, autograd.

An engine has two more pairs of functions,
    tail(<tensors>, *, samples, stratified, radius, causal, scale) -> out, lse, variance, offset, names, for_keys
    tail_backward(grad_out, grad_lse, <tensors>, offset, names, for_keys, *, ..)
        -> dq, dk, dv, dhead_out, dhead_lse
    sample(<tensors>, *, method, samples, alpha, chains_per_mode, burn_in, causal, scale)
        -> out, lse, variance, ess, acceptance, rhat
    sample_backward(grad_out, grad_lse, <tensors>, *, ..) -> dq, dk, dv, dhead_out or None, dhead_lse or None
with the tensors of the schemas below. `offset` is what a query adds to the scores of its tail, a constant;
`names` and `for_keys` (empty unless stratified) are the shared keys that `draws.shared_tail` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import errors
from .draws import tail_size
from .grid import grid_of
from .ops import (
    _differentiate_again,
    _differentiate_forward,
    _engine,
    _has_tangent,
    _one_by_one,
    _save_name,
    _transformed,
)
from .scoring import accumulator

_TAIL = "Tensor q, Tensor k, Tensor v, Tensor index, Tensor? key_mask, Tensor head_out, Tensor head_lse, Tensor seed, "
_TAIL_HOW = "int samples, bool stratified, int[] radius, bool causal, float scale, str impl"
_TAIL_NAMES = ("samples", "stratified", "radius", "causal", "scale")
_SAMPLE = (
    "Tensor q, Tensor k, Tensor v, Tensor modes, Tensor count, Tensor total, Tensor? order, Tensor? key_mask, "
    "Tensor? head_out, Tensor? head_lse, Tensor seed, Tensor table, "
)
_SAMPLE_HOW = (
    "str method, int samples, float alpha, int chains_per_mode, int burn_in, bool causal, float scale, str impl"
)
_SAMPLE_NAMES = ("method", "samples", "alpha", "chains_per_mode", "burn_in", "causal", "scale")
TAIL_TENSORS, SAMPLE_TENSORS = 8, 12

torch.library.define("scram::tail", f"({_TAIL}{_TAIL_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "scram::tail_backward",
    f"(Tensor grad_out, Tensor grad_lse, {_TAIL}Tensor offset, Tensor names, Tensor for_keys, {_TAIL_HOW}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define("scram::sample", f"({_SAMPLE}{_SAMPLE_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "scram::sample_backward",
    f"(Tensor grad_out, Tensor grad_lse, {_SAMPLE}{_SAMPLE_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def tail(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    head_out: Tensor,
    head_lse: Tensor,
    *,
    key_mask: Tensor | None,
    seed: Tensor,
    samples: int,
    stratified: bool,
    radius: Sequence[int],
    causal: bool,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.tail`, by the engine `impl`."""
    _refuse_tangents(impl, q, k, v, head_out, head_lse)
    how = (samples, stratified, list(radius), causal, scale, impl)
    out, lse, variance, *_ = _run("tail", q, k, v, _kept(index), key_mask, head_out, head_lse, seed, *how)
    return out, lse, variance.detach()


def snis(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modes: Tensor,
    count: Tensor,
    head_out: Tensor | None,
    head_lse: Tensor | None,
    *,
    alpha: float,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.snis`, by the engine `impl`."""
    out, lse, variance, ess, _, _ = _sample_all(q, k, v, modes, count, head_out, head_lse, "snis", alpha, 1, 0, **how)
    return out, lse, variance.detach(), ess.detach()


def metropolis(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modes: Tensor,
    count: Tensor,
    *,
    chains_per_mode: int,
    burn_in: int,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.metropolis`, by the engine `impl`."""
    settings = ("metropolis", 0.0, chains_per_mode, burn_in)
    out, _, _, _, acceptance, rhat = _sample_all(q, k, v, modes, count, None, None, *settings, **how)
    return out, acceptance.detach(), rhat.detach()


def _sample_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modes: Tensor,
    count: Tensor,
    head_out: Tensor | None,
    head_lse: Tensor | None,
    method: str,
    alpha: float,
    chains_per_mode: int,
    burn_in: int,
    *,
    total: Tensor,
    order: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor,
    table: Tensor,
    samples: int,
    causal: bool,
    scale: float,
    impl: str,
) -> tuple[Tensor, ...]:
    _refuse_tangents(impl, q, k, v, head_out, head_lse)
    tensors = (q, k, v, _kept(modes), _kept(count), total, order, key_mask, head_out, head_lse, seed, table)
    how = (method, samples, alpha, chains_per_mode, burn_in, causal, scale, impl)
    return _run("sample", *tensors, *how)


def _refuse_tangents(impl: str, *tensors: Tensor | None) -> None:
    if not torch.compiler.is_compiling() and any(_has_tangent(x) for x in tensors):
        raise errors.reverse_mode_only(impl)  # torch would take the derivative for zero


def _kept(index: Tensor) -> Tensor:
    """A tensor that autograd may keep: not one of inference mode."""
    inference = not torch.compiler.is_compiling() and index.is_inference() and torch.is_grad_enabled()
    return index.clone() if inference else index


def _settings(names: Sequence[str], how: Sequence[Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in zip(names, how, strict=False)}


def _implement(name: str, tensors: int, settings: Sequence[str]) -> None:
    """The operator by the engine that its last argument names."""

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        given, how = arguments[:tensors], arguments[tensors:]
        made = getattr(_engine(how[-1]), name)(*given, **_settings(settings, how))
        return tuple(given[0].new_empty(0) if x is None else x for x in made)

    torch.library.impl(f"scram::{name}", ("cpu", "cuda"), run)


_implement("tail", TAIL_TENSORS, _TAIL_NAMES)
_implement("tail_backward", TAIL_TENSORS + 5, _TAIL_NAMES)
_implement("sample", SAMPLE_TENSORS, _SAMPLE_NAMES)
_implement("sample_backward", SAMPLE_TENSORS + 2, _SAMPLE_NAMES)


def _like_queries(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and variance to be."""
    wide, shape = accumulator(v.dtype), (*q.shape[:-1], v.shape[-1])
    return v.new_empty(shape), v.new_empty(q.shape[:-1], dtype=wide), v.new_empty(shape, dtype=wide)


@torch.library.register_fake("scram::tail")  # type: ignore[untyped-decorator]
def _tail_shapes(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    out, lse, variance = _like_queries(q, v)
    samples, stratified = arguments[5:7]
    # The cells follow from the extents by search, so a graph of a stratified tail is for one grid.
    key_grid = tuple(int(extent) for extent in grid_of(k)) if stratified else grid_of(k)
    shape = (q.shape[0] * q.shape[1], tail_size(key_grid, samples, stratified))
    names = q.new_empty(shape, dtype=torch.int32)
    return (
        out,
        lse,
        variance,
        torch.empty_like(lse),
        names,
        q.new_empty(shape if stratified else 0, dtype=torch.float32),
    )


@torch.library.register_fake("scram::tail_backward")  # type: ignore[untyped-decorator]
def _tail_backward_shapes(grad_out: Tensor, grad_lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (*arguments[:3], *arguments[5:7]))


@torch.library.register_fake("scram::sample")  # type: ignore[untyped-decorator]
def _sample_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    out, lse, variance = _like_queries(q, v)
    return out, lse, variance, *(torch.empty_like(lse) for _ in range(3))


@torch.library.register_fake("scram::sample_backward")  # type: ignore[untyped-decorator]
def _sample_backward_shapes(grad_out: Tensor, grad_lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = (*arguments[:3], *arguments[8:10])
    return tuple(arguments[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _save_tail(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:TAIL_TENSORS], *output[3:])
    ctx.how = inputs[TAIL_TENSORS:]
    ctx.mark_non_differentiable(*output[2:])


def _differentiate_tail(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _given(tensors[0], tensors[2], grad_out, grad_lse)
    dq, dk, dv, dhead_out, dhead_lse = _run("tail_backward", *grads, *tensors, *ctx.how)
    return dq, dk, dv, None, None, dhead_out, dhead_lse, None, *[None] * len(ctx.how)


def _save_sample(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:SAMPLE_TENSORS])
    ctx.how = inputs[SAMPLE_TENSORS:]
    ctx.mark_non_differentiable(*output[2:])


def _differentiate_sample(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _given(tensors[0], tensors[2], grad_out, grad_lse)
    dq, dk, dv, dhead_out, dhead_lse = _run("sample_backward", *grads, *tensors, *ctx.how)
    head = (None, None) if tensors[8] is None else (dhead_out, dhead_lse)
    return dq, dk, dv, *[None] * 5, *head, None, None, *[None] * len(ctx.how)


def _given(q: Tensor, v: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    if grad_out is None:
        grad_out = v.new_zeros(*q.shape[:-1], v.shape[-1])
    if grad_lse is None:
        grad_lse = v.new_zeros(q.shape[:-1], dtype=accumulator(v.dtype))
    return grad_out, grad_lse


def _function(name: str, save: Any, differentiate: Any) -> Any:
    """The operator with its gradient under a transform of torch.func, and its rule of vmap."""
    op = getattr(torch.ops.scram, name)
    torch.library.register_vmap(op.default, _one_by_one(op))
    parts = {"forward": lambda *arguments: op(*arguments), "setup_context": save, "backward": differentiate}
    parts = {part: staticmethod(of) for part, of in {**parts, "jvp": _differentiate_forward}.items()}
    return type(name, (torch.autograd.Function,), {"generate_vmap_rule": True, **parts})


_TRANSFORMED = {
    "tail": _function("tail", _save_tail, _differentiate_tail),
    "tail_backward": _function("tail_backward", _save_name, _differentiate_again),
    "sample": _function("sample", _save_sample, _differentiate_sample),
    "sample_backward": _function("sample_backward", _save_name, _differentiate_again),
}


def _run(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    run = _TRANSFORMED[name].apply if _transformed() else getattr(torch.ops.scram, name)
    return tuple(run(*arguments))


torch.library.register_autograd("scram::tail", _differentiate_tail, setup_context=_save_tail)
torch.library.register_autograd("scram::sample", _differentiate_sample, setup_context=_save_sample)
for _name in ("scram::tail_backward", "scram::sample_backward"):
    torch.library.register_autograd(_name, _differentiate_again, setup_context=_save_name)
