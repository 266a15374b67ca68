"""Launching kernels at little host cost: a variant met before goes straight to its compiled code.

Triton looks at every argument of every launch, which takes longer than a sweep over a small grid. What it looks at,
types, alignment and flags, is the key here too, and addresses take the place of tensors.
Arguments are tensors, numbers, None, and tuples of these. No number is compiled in: Triton is shown others instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

import torch
import triton.language as tl
from torch import Tensor

from ...._compat import triton as compat

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
P = ParamSpec("P")
R = TypeVar("R")
Flags = dict[str, Any]  # constants that a kernel is compiled with, and options of the compiler, by name
PLAIN = {float, bool, type(None)}  # what Triton types by its class alone; isinstance takes ten times as long
_compiled: dict[tuple[Any, ...], Any] = {}  # like Triton's own cache: one entry per variant, never stale
_caches: list[Callable[[], None]] = [_compiled.clear]


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """An lru_cache that `clear_caches` empties."""
    wrapped = lru_cache(maxsize=256)(function)
    _caches.append(wrapped.cache_clear)
    return cast("Callable[P, R]", wrapped)


def clear_caches() -> None:
    """Forget all compiled code and every plan of the engine."""
    for clear in _caches:
        clear()


@cached
def _launches_directly() -> bool:
    return compat.launches_directly()


def fits(number: int) -> bool:
    """Whether Triton types an int as int32; else as int64."""
    return -0x80000000 <= number <= 0x7FFFFFFF


def kinds(*arguments: Any) -> tuple[Any, ...]:
    """What the compiler sees: classes, widths of ints; of tensors the device, the type, the start within 16 bytes."""
    return tuple([None if x is None else _kind(x) for x in arguments])


def _kind(x: Any) -> Any:
    if x.__class__ is int:
        return fits(x)
    if x.__class__ in PLAIN:
        return x.__class__
    return kinds(*x) if isinstance(x, tuple) else (x.device, x.dtype, x.data_ptr() & 15)


def _stand_in(x: Any) -> Any:
    """What to compile with: ints that say nothing, being neither 1 nor a multiple of 16, of the same width."""
    if x.__class__ is int:
        return 3 if fits(x) else 2**31 + 1
    if isinstance(x, tuple):
        parts = map(_stand_in, x)
        return x.__class__(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def _constant(flag: Any) -> Any:
    """A flag as Triton 3.6 needs it: the fields of a NamedTuple are constants too."""
    if hasattr(flag, "_fields") and not INTERPRETED:
        return flag.__class__(*[tl.constexpr(_constant(x)) for x in flag])
    return flag


def _constants(flags: Flags) -> Flags:
    return {name: _constant(flag) for name, flag in flags.items()}


def compiled(kernel: Any, arguments: Iterable[Any], flags: Flags) -> Any:
    """The code of a kernel for arguments of these kinds, launched by none; None in the interpreter."""
    return kernel.warmup(*map(_stand_in, arguments), grid=(1,), **_constants(flags))


def _written(x: Any, name: str) -> tuple[str, list[str]]:
    """Python for what the launcher takes in the place of x, and for whether the ints in it are as wide as those of x.

    To walk over arguments at each launch would take longer than to launch.
    """
    if x.__class__ is int:
        return name, [f"{'' if fits(x) else 'not '}-0x80000000 <= {name} <= 0x7FFFFFFF"]
    if isinstance(x, tuple):
        parts = [_written(part, f"{name}[{n}]") for n, part in enumerate(x)]
        values = "".join(f"{value}, " for value, _ in parts)
        return f"({values})" if "data_ptr" in values else name, [check for _, checks in parts for check in checks]
    return name if x.__class__ in PLAIN else f"{name}.data_ptr()", []


@cached
def _function(source: str) -> Callable[..., Any]:
    function: Callable[..., Any] = eval(source)
    return function


class Kernel:
    """One kernel on a number of programs with fixed flags; called with arguments of one and the same kind."""

    def __init__(self, kernel: Any, programs: int, flags: Flags) -> None:
        self.kernel = kernel
        self.programs = programs
        self.flags = flags
        self.code: Any = None
        self.addresses: Callable[..., Any] | None = None  # written at the second launch: many kernels have but one

    def __call__(self, *arguments: Any) -> None:
        given = self.addresses(*arguments) if self.addresses else None
        if given is None:
            self._compile_and_launch(arguments)
        elif compat.watched():
            self.code[(self.programs, 1, 1)](*arguments, *self.constants)
        else:
            stream = compat.current_stream(self.device)
            self.run(self.programs, 1, 1, stream, *self.behind, *given, *self.constants)

    def bind(self, *first: Any) -> Callable[..., None]:
        """What launches the kernel on the current stream with these arguments and those it is called with."""

        def plainly(*more: Any) -> None:
            self(*first, *more)

        if self.addresses is None or compat.watched():
            return plainly
        split = len(first)
        if split not in self.bound:
            self.bound[split] = self._addresses(0, split), self._launcher(split)
        addresses, launcher = self.bound[split]
        given = addresses(*first)
        if given is None:
            return plainly
        begin = (self.programs, 1, 1, compat.current_stream(self.device), *self.behind, *given)
        launch: Callable[..., None] = launcher(self.run, begin, self.constants, plainly)
        return launch

    def _source(self, start: int, stop: int | None) -> tuple[str, str, str]:
        """Names of these arguments, what the launcher takes for them, and whether ints are as wide as they were."""
        written = self.written[start:stop]
        names = ", ".join([f"a{n}" for n in range(len(self.written))][start:stop])
        checks = [check for _, checks in written for check in checks]
        return names, "".join(f"{value}, " for value, _ in written), " and ".join(checks) or "True"

    def _addresses(self, start: int, stop: int | None) -> Callable[..., Any]:
        """From these arguments to what the launcher takes; None where an int is not as wide as it was."""
        names, values, same = self._source(start, stop)
        return _function(f"lambda {names}: ({values}) if {same} else None")

    def _launcher(self, start: int) -> Callable[..., Any]:
        """Launches with the arguments from `start` on; `other` does where an int is not as wide as it was."""
        names, values, same = self._source(start, None)
        launch = f"lambda {names}: run(*begin, {values}*constants) if {same} else other({names})"
        return _function(f"lambda run, begin, constants, other: {launch}")

    def _compile_and_launch(self, arguments: tuple[Any, ...]) -> None:
        """Launch, and keep the code for the next time."""
        key = (id(self.kernel), *kinds(*arguments), *self.flags.values())
        code = _compiled.get(key)
        launched_before = self.code
        if code is None and _launches_directly():
            code = _compiled[key] = compiled(self.kernel, arguments, self.flags)
        if code is None:  # the interpreter compiles nothing
            self.kernel[(self.programs,)](*arguments, **_constants(self.flags))
            return
        self.constants = [self.flags[name] for name in self.kernel.arg_names[len(arguments) :]]
        code[(self.programs, 1, 1)](*arguments, *self.constants)
        self.code = code
        self.device = compat.current_device()
        if code is launched_before:
            self.run, self.behind = compat.direct(code)
            self.written = [_written(x, f"a{n}") for n, x in enumerate(arguments)]
            self.addresses = self._addresses(0, None)
            self.bound: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of a tensor the current one, where it is not."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
