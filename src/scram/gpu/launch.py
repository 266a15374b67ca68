"""Launching kernels at little host cost: a variant met before goes straight to its compiled code.

Triton looks at every argument of every launch, which takes longer than a sweep over a small grid. What it looks at,
types, alignment and flags, is the key here too.
"""

from __future__ import annotations

from typing import Any

NUMBERS = {int, float, bool}
_compiled: dict[tuple[Any, ...], Any] = {}  # like Triton's own cache: one entry per variant, never stale


class Kernel:
    """One kernel on a number of programs with fixed flags; called with arguments of one and the same kind."""

    def __init__(self, kernel: Any, programs: int, flags: dict[str, Any]) -> None:
        self.kernel, self.programs, self.flags = kernel, programs, flags
        self.launch: Any = None

    def __call__(self, *arguments: Any) -> None:
        if self.launch is None:
            self._find(arguments)
        else:
            self.launch(*arguments, *self.constants)

    def _find(self, arguments: tuple[Any, ...]) -> None:
        key = (id(self.kernel), *_kinds(arguments), *self.flags.values())
        self.constants = [self.flags[name] for name in self.kernel.arg_names[len(arguments) :]]
        known = _compiled.get(key)
        if known is not None:
            self.launch = known[(self.programs, 1, 1)]
            self.launch(*arguments, *self.constants)
            return
        known = self.kernel[(self.programs,)](*arguments, **self.flags)
        if known is not None:  # the interpreter compiles nothing
            _compiled[key] = known
            self.launch = known[(self.programs, 1, 1)]


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton's compiler sees of arguments whose values are not specialised; numbers are of one type each."""
    pointers = [x for x in arguments if x.__class__ not in NUMBERS]
    return [arguments[0].device, *(None if x is None else (x.dtype, x.data_ptr() & 15) for x in pointers)]
