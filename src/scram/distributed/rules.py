"""Sharding rules of all operators `torch.ops.scram`, forward and backward: DTensors of batches or heads send nothing.

Rows of queries know nothing of each other, so that all tensors are cut alike: along the batch, or along the heads where
the key heads are cut as the heads are. Noise is keyed by the row: without `rows`, its numbers, nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..core import ops

OPERATORS: tuple[ops.Operator[Any], ...] = (
    ops.search,
    ops.attend,
    ops.drawn_tail,
    ops.sample,
    ops.cluster,
    ops.route,
    ops.routed_start,
    ops.cluster_tail,
    ops.earlier,
    ops.window_scores,
)
WHOLE = {"seed", "dropout_seed", "table"}  # what every row reads
BY_KEYS = ("k", "label", "sizes")  # what may have fewer heads than q

Arguments = dict[str, Any]  # of an operator, by name
Rule = tuple[list[Placement | None], list[Placement | None]]


def register() -> None:
    """Tells torch the rules; once for a process."""
    for operator in OPERATORS:
        names = [*operator.names, "impl"]
        register_sharding(operator.op.default)(_rule(names, _all_made(operator)))
        if operator.grads_type is not None:
            names = [*operator.names, *operator.keep, *operator.grad_names, "impl"]
            register_sharding(operator.backward_op.default)(_rule(names, _made(operator)))


def _all_made(operator: ops.Operator[Any]) -> Callable[[Arguments], list[bool]]:
    """Of the results of an operator, which are there."""
    return lambda given: [True] * len(operator.result_type._fields)


def _made(operator: ops.Operator[Any]) -> Callable[[Arguments], list[bool]]:
    """Of the gradients that a backward operator returns, which are there."""
    return lambda given: [given[name] is not None for name in operator.grads_type._fields]


def _rule(names: list[str], returned: Callable[[Arguments], list[bool]]) -> Callable[..., list[Rule]]:
    def rule(*arguments: Any) -> list[Rule]:
        given = dict(zip(names, arguments, strict=True))
        return [_placed(given, returned(given), axis) for axis in _axes(given)]

    return rule


def _axes(given: Arguments) -> list[int | None]:
    """Along which axes the tensors may be cut; None: all of them whole."""
    drops = given.get("dropout_seed") is not None
    if given.get("rows") is None and (drops or "seed" in given):
        return [None]
    heads = given["q"].shape[1]
    parts = given["q"].mesh.size()
    others = [given[name].shape[1] for name in BY_KEYS if given.get(name) is not None]
    return [None, 0, 1] if all(other in (heads, 0) or other % parts == 0 for other in others) else [None, 0]


def _placed(given: Arguments, returned: list[bool], axis: int | None) -> Rule:
    results: list[Placement | None] = [_place(axis if is_returned else None) for is_returned in returned]
    arguments = [_place_of(name, x, given, axis) for name, x in given.items()]
    return results, arguments


def _place_of(name: str, x: Any, given: Arguments, axis: int | None) -> Placement | None:
    if not hasattr(x, "placements"):
        return None
    headless = {"key_mask": given["q"].ndim - 2, "order": 2}.get(name)  # axes of a mask of all heads
    return _place(None if name in WHOLE or (axis == 1 and x.ndim == headless) else axis)


def _place(axis: int | None) -> Placement:
    return Replicate() if axis is None else Shard(axis)
