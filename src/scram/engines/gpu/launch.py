"""Launching kernels at little host cost: a variant met before goes straight to its compiled code.

Triton looks at every argument of every launch, which takes longer than a sweep over a small grid. What it looks at,
types, alignment and flags, is the key here too, and addresses take the place of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

NO_TENSORS = {int, float, bool, type(None)}  # isinstance takes ten times as long
_compiled: dict[tuple[Any, ...], Any] = {}  # like Triton's own cache: one entry per variant, never stale


def kinds(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What Triton's compiler sees of tensors: where they are, their types, and whether they start at 16 bytes."""
    return tuple([None if x is None else (x.device, x.dtype, x.data_ptr() & 15) for x in tensors])


class Kernel:
    """One kernel on a number of programs with fixed flags; called with arguments of one and the same kind."""

    def __init__(self, kernel: Any, programs: int, flags: dict[str, Any]) -> None:
        self.kernel, self.programs, self.flags = kernel, programs, flags
        self.code: Any = None

    def __call__(self, *arguments: Any) -> None:
        if self.code is None:
            self._find(arguments)
        elif _watched():
            self.code[(self.programs, 1, 1)](*arguments, *self.constants)
        else:
            stream = driver.active.get_current_stream(self.device)
            self.run(self.programs, 1, 1, stream, *self.direct, *self._addresses(arguments), *self.constants)

    def bind(self, *first: Any) -> Callable[..., None]:
        """What launches the kernel on the current stream with these arguments and those it is called with."""
        if self.code is None:
            return lambda *more: self(*first, *more)
        if _watched():
            launch = self.code[(self.programs, 1, 1)]
            return lambda *more: launch(*first, *more, *self.constants)
        run, stream, constants = self.run, driver.active.get_current_stream(self.device), self.constants
        begin = (self.programs, 1, 1, stream, *self.direct, *self._addresses(first))
        return lambda *more: run(*begin, *_addresses(more), *constants)

    def _addresses(self, first: tuple[Any, ...]) -> list[Any]:
        """The first arguments, addresses in the place of tensors."""
        given = [*first]
        for n in self.tensors:
            if n < len(given):
                given[n] = given[n].data_ptr()
        return given

    def _find(self, arguments: tuple[Any, ...]) -> None:
        pointers = [x for x in arguments if x is None or x.__class__ not in NO_TENSORS]
        key = (id(self.kernel), *kinds(*pointers), *self.flags.values())
        code = _compiled.get(key)
        self.constants = [self.flags[name] for name in self.kernel.arg_names[len(arguments) :]]
        if code is None:
            code = self.kernel[(self.programs,)](*arguments, **self.flags)
            if code is None:  # the interpreter compiles nothing
                return
            _compiled[key] = code
        else:
            code[(self.programs, 1, 1)](*arguments, *self.constants)
        self.device = arguments[0].device.index
        self.tensors = [n for n, x in enumerate(arguments) if x.__class__ not in NO_TENSORS]
        self.run, self.direct = code.run, (code.function, code.packed_metadata, None, None, None)
        self.code = code


def _addresses(arguments: tuple[Any, ...]) -> list[Any]:
    return [x if x.__class__ in NO_TENSORS else x.data_ptr() for x in arguments]


def _watched() -> bool:
    """Whether someone, a profiler say, wants to be told of each launch."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of a tensor the current one, where it is not."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
