"""What is private in Triton, run on 3.6 and 3.9: compiled code is launched without a look at every argument.

Where it is not as it was, `launch` goes the public way, `kernel[grid](...)`. That way is slower, and it compiles anew
for numbers of 1 and multiples of 16: Triton specialises on the ints in tuples, whatever `do_not_specialize` says.
"""

from __future__ import annotations

import inspect
from typing import Any

from triton import knobs
from triton.runtime import driver

# Parameters of a launcher's `__call__` between the grid's three and the kernel's arguments: in 3.6, in 3.9.
LAUNCHERS = (
    ("stream", "function"),
    ("stream", "function", "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"),
)


def launches_directly() -> bool:
    """Whether the device's launcher, its streams and the hooks of launches are as they were."""
    try:
        parameters = tuple(inspect.signature(driver.active.launcher_cls.__call__).parameters)
        return parameters[4:-1] in LAUNCHERS and callable(driver.active.get_current_stream) and watched() in (0, 1)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


def direct(code: Any) -> tuple[Any, tuple[Any, ...]]:
    """(run, behind) of compiled code: `run(*grid, stream, *behind, *arguments)` launches it, by no hook."""
    return code.run, (code.function, code.packed_metadata, None, None, None)


def current_device() -> int:
    number: int = driver.active.get_current_device()
    return number


def current_stream(device: int) -> Any:
    return driver.active.get_current_stream(device)


def watched() -> bool:
    """Whether a hook, a profiler's say, must see each launch."""
    before = knobs.runtime.launch_enter_hook
    after = knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))
