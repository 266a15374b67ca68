"""Steps of a sampler, seen by a hook on the model that it calls: which are dense, what is kept from one to the next.

A step is a run of calls with one `timestep`; without that argument every call is one. A sampler that starts
again goes back: its timesteps turn around.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..core.tails.clusters import Codebook
from ..results import Matches


@dataclass
class Run:
    """Where a model is in its sampler.

    Args:
        step: from 0.
        time: the timestep; None where the model has none.
        direction: of the timesteps, -1 or 1; 0 before the second.
        call: of the model within the step, as of the two of classifier-free guidance.
    """

    step: int = 0
    time: float | None = None
    direction: int = 0
    call: int = 0

    def advance(self, time: float | None) -> bool:
        """One more call of the model; True where the sampler has started again."""
        if time is None or self.time is None:
            self.step += 1
            self.call = 0
        elif time == self.time:
            self.call += 1
        else:
            direction = 1 if time > self.time else -1
            again = self.direction not in (0, direction)
            self.step = 0 if again else self.step + 1
            self.direction = 0 if again else direction
            self.call = 0
            self.time = time
            return again
        self.time = time
        return False


@dataclass
class Kept:
    """What a layer found at one step, for the next."""

    matches: Matches | None
    codebook: Codebook | None


@dataclass(eq=False)
class Steps:
    """Counts the steps of each model.

    Args:
        dense_steps: the first ones of a sampler, which torch answers.
        keeps: whether layers start from what they found at the step before.
        dense: whether the model that is running is in one of them. Compiled code reads it.
        kept: by layer, shapes and call within the step.
    """

    dense_steps: int = 0
    keeps: bool = False
    dense: bool = False
    kept: dict[tuple[Any, ...], Kept] = field(default_factory=dict)
    _runs: WeakKeyDictionary[nn.Module, Run] = field(default_factory=WeakKeyDictionary)
    _handles: list[Any] = field(default_factory=list)
    _running: Run = field(default_factory=Run)

    @property
    def counts(self) -> bool:
        return bool(self.dense_steps or self.keeps)

    def see(self, model: nn.Module, time: Any) -> None:
        """The model that is running, in eager code. One that is seen for the first time is hooked."""
        if not self.counts or model in self._runs:
            return
        self._runs[model] = Run(time=_time(time))
        self._handles.append(model.register_forward_pre_hook(_Before(self), with_kwargs=True))
        self._set(self._runs[model])

    def before(self, model: nn.Module, time: Any) -> None:
        """Before a call of a model."""
        run = self._runs.setdefault(model, Run())
        if run.advance(_time(time)):
            self.kept.clear()
        self._set(run)

    def _set(self, run: Run) -> None:
        self._running = run
        self.dense = run.step < self.dense_steps

    @property
    def call(self) -> int:
        """Of the running model, within its step."""
        return self._running.call

    def detach(self) -> None:
        """Remove the hooks, and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._runs.clear()
        self.kept.clear()
        self.dense = False


def _time(time: Any) -> float | None:
    """A timestep as a number; that of the noisiest token where tokens differ."""
    if isinstance(time, Tensor):
        return float(time.detach().max()) if time.numel() else None
    return float(time) if isinstance(time, (int, float)) else None


@dataclass(frozen=True, eq=False)
class _Before:
    """A hook before the forward pass. Not a local function: models with hooks are pickled and copied."""

    steps: Steps

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        given = kwargs
        if "timestep" not in kwargs and args:
            names = list(inspect.signature(inspect.unwrap(type(model).forward)).parameters)[1:]
            given = dict(zip(names, args, strict=False))
        self.steps.before(model, given.get("timestep"))
