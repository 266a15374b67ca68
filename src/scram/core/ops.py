"""Torch operators made of calls: one factory for schema, shapes for tracing, autograd, refusals and vmap.

`Operator` derives everything from a call type of `calls` and a few lines of data below. The last argument of an
operator names the engine. Their sharding rules are in `distributed.rules`.
Imports neither Numba nor Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor

from .. import _compat
from ..engines import EngineSpec, dispatch
from ..results import Attended
from ..spec.draws import tail_size
from ..spec.grid import grid_of
from ..spec.schedule import tile_count
from ..spec.scoring import accumulator
from . import calls, checks
from .calls import ScoreFunction

SCHEMA = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    tuple[int, ...]: "int[]",
}
# Arguments of a call that torch would only pass on: no subclass of Tensor, no symbolic size.
PLAIN = {Tensor, torch.nn.Parameter, NoneType, int, float, bool, str, tuple}

Result = TypeVar("Result", bound=tuple[Any, ...])


class Operator(Generic[Result]):
    """`scram::name` and, where it is differentiable, `scram::name_backward`.

    Args:
        name: of the operator and of the engine's function; its gradient is the engine's `name_backward`.
        call: the NamedTuple of its arguments. A field `score` is left out: engines know the dot product only.
        result: the NamedTuple of its results; the first ones may carry gradients, the others are diagnostics.
        shapes: call -> empty results, for tracing.
        grads: the NamedTuple of its gradients, with the names of the call's fields; None without gradients.
        keep: names of results that the backward function takes, between the call and the gradients of the first ones.
        differentiable: how many the first ones are.
    """

    def __init__(
        self,
        name: str,
        call: Any,
        result: type[Result],
        shapes: Callable[[Any], tuple[Tensor, ...]],
        grads: Any = None,
        keep: tuple[str, ...] = (),
        differentiable: int = 2,
    ) -> None:
        hints = get_type_hints(call)
        self.name = name
        self.call_type = call
        self.result_type = result
        self.grads_type = grads
        self.keep = keep
        self.grad_names = [f"grad_{field}" for field in result._fields[:differentiable]]  # type: ignore[attr-defined]
        self.shapes = shapes
        self.names = [field for field in call._fields if hints[field] != ScoreFunction | None]
        self.tensor_names = [field for field in self.names if "Tensor" in SCHEMA[hints[field]]]
        setting_names = [field for field in self.names if field not in self.tensor_names]
        assert self.names == self.tensor_names + setting_names, "the tensors of a call come before its settings"
        self.tensors: Callable[[Any], tuple[Tensor | None, ...]] = attrgetter(*self.tensor_names)
        self.settings: Callable[[Any], tuple[Any, ...]] = attrgetter(*setting_names) if setting_names else _no_settings
        schema = ", ".join(f"{SCHEMA[hints[field]]} {field}" for field in self.names)
        returns = ", ".join(["Tensor"] * len(result._fields))  # type: ignore[attr-defined]
        self.op = self._define(name, f"({schema}, str impl) -> ({returns})", self._compute, self._fake)
        if grads is None:
            return
        more = ", ".join(f"Tensor {field}" for field in (*keep, *self.grad_names))
        returns = ", ".join(["Tensor"] * len(grads._fields))
        backward_schema = f"({schema}, {more}, str impl) -> ({returns})"
        name = f"{name}_backward"
        self.backward_op = self._define(name, backward_schema, self._compute_backward, self._backward_shapes)
        torch.library.register_autograd(f"scram::{self.name}", self._differentiate, setup_context=self._save)
        torch.library.register_autograd(f"scram::{name}", _refuse_second, setup_context=_save_engine)
        # torch.func does not take the autograd of a registered operator.
        self.function = _function(self.name, self.op, self._save, self._differentiate)
        self.backward_function = _function(name, self.backward_op, _save_engine, _refuse_second)
        # One that sets its own context costs less: taken where the dispatcher is bypassed.
        parts = {"forward": staticmethod(self._direct_forward), "backward": staticmethod(self._direct_backward)}
        self.direct_function: Any = type(f"{self.name}_direct", (torch.autograd.Function,), parts)

    def __call__(self, spec: EngineSpec, call: Any) -> Result:
        """The result of a call by an engine, differentiable where the operator is."""
        if spec.plain_torch:
            return self._engine(spec.name)(call)  # type: ignore[no-any-return]
        direct = bypasses_dispatcher(call)
        if self.grads_type is None:
            call = self._detached(call, direct)
        elif _compat.has_tangent(call):
            raise checks.reverse_mode_only(spec.name)  # torch would take the derivative for zero
        elif torch.is_grad_enabled() and self._requires_grad(call):
            call = self._without_inference_tensors(call)
            if direct:
                return self.result_type(*self.direct_function.apply(spec, call, *self.tensors(call)))
        if direct:
            return self._engine(spec.name)(call)  # type: ignore[no-any-return]
        run = self.function.apply if self.grads_type is not None and _compat.transformed() else self.op
        return self.result_type(*_several(run(*self._fields(call), spec.name)))

    def _detached(self, call: Any, direct: bool) -> Any:
        """Operators without gradients see constants."""
        given = {name: x for name in self.tensor_names if (x := getattr(call, name)) is not None}
        if direct and not any([x.requires_grad for x in given.values()]):  # noqa: C419 - a list is faster
            return call
        return call._replace(**{name: x.detach() for name, x in given.items()})

    def _requires_grad(self, call: Any) -> bool:
        given = [getattr(call, name) for name in self.grads_type._fields]
        return any([x is not None and x.requires_grad for x in given])  # noqa: C419 - a list is faster

    @staticmethod
    def _define(name: str, schema: str, compute: Any, shapes: Any) -> Any:
        torch.library.define(f"scram::{name}", schema)
        torch.library.impl(f"scram::{name}", ("cpu", "cuda"), compute)
        torch.library.register_fake(f"scram::{name}", shapes)
        op = getattr(torch.ops.scram, name)
        torch.library.register_vmap(op.default, _one_by_one(op))
        return op

    def _call_and_rest(self, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The call, and what follows its fields, of an operator's arguments; the compiler gives lists for tuples."""
        given = [tuple(x) if x.__class__ is list else x for x in arguments]
        return self.call_type(**dict(zip(self.names, given, strict=False))), given[len(self.names) :]

    def _compute(self, *arguments: Any) -> tuple[Tensor, ...] | Tensor:
        call, (impl,) = self._call_and_rest(arguments)
        return _as_torch(self._engine(impl)(call))

    def _compute_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        call, (*rest, impl) = self._call_and_rest(arguments)
        return tuple(call.q.new_empty(0) if x is None else x for x in self._engine_backward(impl)(call, *rest))

    def _engine(self, impl: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(dispatch.loaded.get(impl) or dispatch.engine(impl), self.name)
        return function

    def _engine_backward(self, impl: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(dispatch.engine(impl), f"{self.name}_backward")
        return function

    def _fields(self, call: Any) -> list[Any]:
        return [getattr(call, name) for name in self.names]

    def _direct_forward(self, ctx: Any, spec: EngineSpec, call: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """`tensors` are those of the call: autograd looks for them among the arguments."""
        result = self._engine(spec.name)(call)
        self._keep(ctx, call, result, spec.name)
        return tuple(result)

    def _direct_backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *self._gradients(ctx, grads)

    def _fake(self, *arguments: Any) -> tuple[Tensor, ...] | Tensor:
        *fields, _ = arguments
        return _as_torch(tuple(self.shapes(self.call_type(*fields))))

    def _backward_shapes(self, *arguments: Any) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, arguments, strict=False))
        like = (given[name] for name in self.grads_type._fields)
        return tuple(given["q"].new_empty(0) if x is None else x.new_empty(x.shape) for x in like)

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        *fields, impl = inputs
        self._keep(ctx, self.call_type(*fields), _several(output), impl)

    def _keep(self, ctx: Any, call: Any, output: Sequence[Tensor], impl: str) -> None:
        result = self.result_type(*output)
        ctx.save_for_backward(*self.tensors(call), *[getattr(result, name) for name in self.keep])
        ctx.settings = self.settings(call)
        ctx.impl = impl
        diagnostics = output[len(self.grad_names) :]
        if diagnostics:
            ctx.mark_non_differentiable(*diagnostics)

    def _differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *self._gradients(ctx, grads), *[None] * len(ctx.settings), None

    def _gradients(self, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the call's tensors, from those of its results."""
        saved = iter(ctx.saved_tensors)
        call = self.call_type(*islice(saved, len(self.tensor_names)), *ctx.settings)
        given_grads = list(grads[: len(self.grad_names)])
        if any([x is None for x in given_grads]):  # noqa: C419 - a list is faster
            like = self.shapes(call)
            given_grads = [torch.zeros_like(like[n]) if x is None else x for n, x in enumerate(given_grads)]
        rest = (*saved, *given_grads)  # what is left of them are the results kept
        # Where a graph is made of the backward pass the operator stands in it, to refuse a second derivative.
        if not torch.is_grad_enabled() and bypasses_dispatcher((*call, *rest)):
            call_grads = self._engine_backward(ctx.impl)(call, *rest)
        else:
            run = self.backward_function.apply if _compat.transformed() else self.backward_op
            call_grads = self.grads_type(*run(*self._fields(call), *rest, ctx.impl))
        given = zip(self.tensor_names, self.tensors(call), strict=True)
        return [
            getattr(call_grads, name) if x is not None and name in call_grads._fields else None for name, x in given
        ]

    def _without_inference_tensors(self, call: Any) -> Any:
        """Autograd keeps no tensor made under `torch.inference_mode`: those are copied."""
        if torch.compiler.is_compiling():
            return call
        inference_names = [
            name for name in self.tensor_names if (x := getattr(call, name)) is not None and x.is_inference()
        ]
        return (
            call._replace(**{name: getattr(call, name).clone() for name in inference_names})
            if inference_names
            else call
        )


def bypasses_dispatcher(arguments: Sequence[Any]) -> bool:
    """Whether torch would only pass a call on. Its dispatcher takes longer than a small kernel and is left out then.

    It has more to do when it compiles, traces or transforms, and for subclasses of Tensor.
    """
    return _compat.plain_eager() and all([x.__class__ in PLAIN for x in arguments])  # noqa: C419 - a list is faster


def _no_settings(call: Any) -> tuple[Any, ...]:
    return ()


def _refuse_second(ctx: Any, *_: Tensor | None) -> None:
    raise checks.first_order_only(ctx.impl)


def _refuse_forward(ctx: Any, *_: Tensor | None) -> None:
    raise checks.reverse_mode_only(ctx.impl)


def _save_engine(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    *_, ctx.impl = inputs


def _function(name: str, op: Any, save: Any, differentiate: Any) -> Any:
    """The operator with its gradient, for a transform of torch.func."""
    parts = {"forward": lambda *arguments: op(*arguments), "setup_context": save, "backward": differentiate}
    methods = {part: staticmethod(of) for part, of in {**parts, "jvp": _refuse_forward}.items()}
    return type(name, (torch.autograd.Function,), {"generate_vmap_rule": True, **methods})


def _several(results: Any) -> Any:
    """What an operator returns as a sequence: torch hands on a single tensor as it is."""
    return (results,) if isinstance(results, Tensor) else results


def _as_torch(results: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
    """The reverse of `_several`."""
    return results if len(results) > 1 else results[0]


def _one_by_one(op: Any) -> Any:
    """The vmap rule: sample by sample, so that the noise of each is that of a call of its own."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        def sample(n: int) -> list[Any]:
            return [x.select(d, n) if isinstance(d, int) else x for x, d in zip(arguments, in_dims, strict=True)]

        results = zip(*(_several(op(*sample(n))) for n in range(info.batch_size)), strict=True)
        stacked = tuple(torch.stack(result) for result in results)
        return (stacked, (0,) * len(stacked)) if len(stacked) > 1 else (stacked[0], 0)

    return rule


def _found_shapes(call: calls.SearchCall) -> tuple[Tensor, ...]:
    shape = (*call.q.shape[:-1], call.matches)
    return call.q.new_empty(shape, dtype=torch.int32), call.q.new_empty(shape, dtype=torch.float32)


def _out_shapes(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and a diagnostic like out in the accumulator's dtype."""
    q = call.q
    v = call.v
    wide = accumulator(v.dtype)
    shape = (*q.shape[:-1], v.shape[-1])
    return v.new_empty(shape), v.new_empty(q.shape[:-1], dtype=wide), v.new_empty(shape, dtype=wide)


def _attended_shapes(call: calls.AttendCall | calls.EarlierCall) -> tuple[Tensor, ...]:
    out, lse, _ = _out_shapes(call)
    return out, lse


def _drawn_tail_shapes(call: calls.DrawnTailCall) -> tuple[Tensor, ...]:
    out, lse, variance = _out_shapes(call)
    key_grid = grid_of(call.k)
    if call.stratified:  # the cells follow from the extents by a search, so the graph is for one grid
        key_grid = tuple(int(extent) for extent in key_grid)
    shape = (*call.q.shape[:2], tail_size(key_grid, call.samples, call.stratified))
    names = call.q.new_empty(shape, dtype=torch.int32)
    represents = call.q.new_empty(shape if call.stratified else (*shape[:2], 0), dtype=torch.float32)
    return out, lse, variance, torch.empty_like(lse), names, represents


def _sampled_shapes(call: calls.SampleCall) -> tuple[Tensor, ...]:
    out, lse, variance = _out_shapes(call)
    return out, lse, variance, *(torch.empty_like(lse) for _ in range(3))


def _clustered_shapes(call: calls.ClusterCall) -> tuple[Tensor, ...]:
    k = call.k
    v = call.v
    heads = k.shape[:2]
    width = k.shape[-1]
    value_width = v.shape[-1]

    def floats(*shape: int) -> Tensor:
        return k.new_empty((*heads, *shape), dtype=accumulator(v.dtype))

    def ints(*shape: int) -> Tensor:
        return k.new_empty((*heads, *shape), dtype=torch.int32)

    return (
        floats(call.clusters, width),
        floats(call.clusters, value_width),
        floats(width, value_width),
        ints(call.clusters),
        ints(*grid_of(k)),
        ints(math.prod(grid_of(k))),
        floats(width),
        floats(call.clusters),
    )


def _routed_shapes(call: calls.RouteCall) -> tuple[Tensor, ...]:
    shape = (*call.q.shape[:2], tile_count(grid_of(call.q)))
    return (
        call.q.new_empty((*shape, call.words), dtype=torch.int32),
        call.q.new_empty(shape, dtype=torch.int32),
        call.q.new_empty(call.q.shape[:-1], dtype=call.centers.dtype),
    )


def _start_shapes(call: calls.RoutedStartCall) -> tuple[Tensor, ...]:
    shape = (*call.q.shape[:-1], 1)
    return call.q.new_empty(shape, dtype=torch.int32), call.q.new_empty(shape, dtype=torch.float32)


def _cluster_tail_shapes(call: calls.ClusterTailCall) -> tuple[Tensor, ...]:
    shape = call.q.shape[:-1]
    out = call.q.new_empty((*shape, call.values.shape[-1]), dtype=call.out_dtype)
    return out, call.q.new_empty(shape, dtype=call.centers.dtype)


def _window_shapes(call: calls.WindowScoresCall) -> tuple[Tensor, ...]:
    shape = (*call.q.shape[:-1], math.prod(call.sides))
    return (call.q.new_empty(shape, dtype=accumulator(call.q.dtype)),)


search = Operator("search", calls.SearchCall, calls.Found, _found_shapes)
attend = Operator("attend", calls.AttendCall, Attended, _attended_shapes, calls.AttendGrads, ("out", "lse"))
DRAWN = ("offset", "names", "represents")
drawn_tail = Operator("drawn_tail", calls.DrawnTailCall, calls.DrawnTail, _drawn_tail_shapes, calls.TailGrads, DRAWN)
sample = Operator("sample", calls.SampleCall, calls.Sampled, _sampled_shapes, calls.TailGrads)
CLUSTERED = ("centers", "values", "sizes", "label")
cluster = Operator(
    "cluster", calls.ClusterCall, calls.Clustered, _clustered_shapes, calls.ClusterGrads, CLUSTERED, differentiable=3
)
route = Operator("route", calls.RouteCall, calls.Routed, _routed_shapes)
routed_start = Operator("routed_start", calls.RoutedStartCall, calls.Found, _start_shapes)
cluster_tail = Operator(
    "cluster_tail", calls.ClusterTailCall, Attended, _cluster_tail_shapes, calls.ClusterTailGrads, ("out", "lse")
)
earlier = Operator("earlier", calls.EarlierCall, Attended, _attended_shapes, calls.EarlierGrads, ("out", "lse"))
window_scores = Operator(
    "window_scores",
    calls.WindowScoresCall,
    calls.WindowScores,
    _window_shapes,
    calls.WindowScoresGrads,
    differentiable=1,
)
