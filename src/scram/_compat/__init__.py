"""Every private or version-bound API of torch (here), of Triton and of Numba with llvmlite (`triton`, `numba`).

Each entry names the versions it was run on, has a check, and has a public fallback. The three are apart because
`import scram` loads neither Triton nor Numba.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

# --- torch functions that a TorchFunctionMode is given whole (torch 2.11 to 2.13) ---
# Such a function calls `has_torch_function` first and runs its body only where that is False. `patch_sdpa` needs the
# body inside the mode: it runs a copy of the code in which it is False.
# Fallback: the function itself, outside the mode.

C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType)
# What torch passes to a mode, whatever `F.scaled_dot_product_attention` was replaced by.
SDPA: Callable[..., Tensor] = getattr(torch._C._nn, "scaled_dot_product_attention", F.scaled_dot_product_attention)
# What torch runs in place of a whole layer in eval mode without gradients. Fallback: such calls are not reported.
FUSED_LAYERS = tuple(
    getattr(torch, name)
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    if hasattr(torch, name)
)
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HANDLER = getattr(inspect.unwrap(torch.overrides.handle_torch_function), "__code__", None)


def caller_of_mode(*names: str) -> FunctionType | None:
    """The Python function of torch that gave its call to a mode, if it has one of these names.

    To be called in `__torch_function__` itself. The function is found by its frame: the name in torch's module may be
    another library's wrapper. The frame knows no defaults: an argument that torch does not hand on is None.
    """
    handler = sys._getframe(2)
    frame = handler.f_back
    if handler.f_code is not _HANDLER or frame is None:
        return None
    code = frame.f_code
    if code.co_name not in names or code.co_freevars or not code.co_filename.startswith(_TORCH):
        return None
    function = FunctionType(code, frame.f_globals, code.co_name, (None,) * code.co_argcount)
    only_named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    function.__kwdefaults__ = dict.fromkeys(only_named)
    return function


def torch_function(function: Any, filename: str) -> FunctionType | None:
    """The function of torch's file beneath wrappers that keep `__wrapped__`; None where it cannot be seen."""
    function = inspect.unwrap(function)
    is_torch = isinstance(function, FunctionType) and function.__code__.co_filename == filename
    return function if is_torch and not function.__code__.co_freevars else None


def reads(code: CodeType, name: str) -> bool:
    """Whether the code reads the global `name`."""
    return name in code.co_names


def inside_mode(function: FunctionType, **names: Any) -> Callable[..., Any] | None:
    """A copy that does not hand its call over, and whose globals `names` are replaced.

    None where the function has no check of a known name: the copy would hand its call over, without end.
    """
    if not any(reads(function.__code__, check) for check in _CHECKS):
        return None
    scope = {**function.__globals__, **dict.fromkeys(_CHECKS, _no), **names}
    scope.pop("__name__", None)  # torch.compile would look the names up in the module again
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no(*tensors: Any) -> bool:
    return False


# --- calls that no TorchFunctionMode sees (torch 2.11 to 2.13) ---
# Fallback: modes see them, so that a `patch_sdpa` around another one would replace what `tune` compares with.

_without_modes: Callable[[], AbstractContextManager[Any]] | None = getattr(torch._C, "DisableTorchFunction", None)


def without_modes() -> AbstractContextManager[Any]:
    """A context in which torch functions run as if no mode were entered."""
    return nullcontext() if _without_modes is None else _without_modes()


# --- what torch is doing with a call (torch 2.11 to 2.13) ---
# `ops` bypasses the dispatcher where torch would only pass a call on. Fallback: never, which is right and slower.

_transforms_active: Callable[[], bool] | None = getattr(torch._C, "_are_functorch_transforms_active", None)
_mode_active: Callable[[], bool] | None = getattr(torch.utils._python_dispatch, "is_in_torch_dispatch_mode", None)
_autocast_active: Callable[[], bool] | None = getattr(torch._C, "_is_any_autocast_enabled", None)
_backward_pass: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def transforms_active() -> bool:
    """Whether a transform of `torch.func` runs this code. Fallback: whether torch refuses hooks, as all but vmap do."""
    if _transforms_active is not None:
        return _transforms_active()
    try:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            return False
    except RuntimeError:
        return True


def plain_eager() -> bool:
    """Whether nothing of torch looks at a call: no compiler, no dispatch mode, no transform. Fallback: no."""
    if torch.compiler.is_compiling() or _mode_active is None or _transforms_active is None:
        return False
    return not _mode_active() and not _transforms_active()


def transformed() -> bool:
    """Whether a transform of `torch.func` runs this code outside a compiled graph."""
    return not torch.compiler.is_compiling() and transforms_active()


def measurable() -> bool:
    """Whether calls hold numbers and take their own time: outside dispatch modes and transforms. Fallback: yes."""
    return not transforms_active() and not (_mode_active is not None and _mode_active())


def traced() -> bool:
    """Whether `torch.jit.trace` runs this code."""
    return not torch.compiler.is_compiling() and bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def in_backward() -> bool:
    """Whether a backward pass runs this code, as a checkpoint that computes again. Fallback: no, and it raises."""
    return _backward_pass is not None and not torch.compiler.is_compiling() and _backward_pass() != -1


def fix_extents(total: int) -> None:
    """While a graph is traced: it serves no other extents of as many tokens, where torch has made them symbols.

    Fallback: torch guards their product alone, and takes the graph of 4 x 16 tokens for 8 x 8 too.
    """
    context = getattr(torch, "_guards", None) and torch._guards.TracingContext.try_get()
    shapes: Any = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    name = "backed_var_to_val" if hasattr(shapes, "backed_var_to_val") else "var_to_val"
    if not hasattr(shapes, name) or not hasattr(shapes, "guards"):
        return
    equal = import_module("sympy").Eq  # torch depends on it; slow to import
    for symbol in {x for guard in shapes.guards if total in guard.expr.args for x in guard.expr.free_symbols}:
        shapes.evaluate_expr(equal(symbol, getattr(shapes, name)[symbol]))


def autocast_active() -> bool:
    """Whether autocast may be on for some device. Fallback: yes, so that each device is looked at."""
    return True if _autocast_active is None else _autocast_active()


def has_tangent(arguments: Sequence[object]) -> bool:
    """Whether a tensor among them carries a forward-mode derivative. Fallback: every tensor is looked at."""
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", 0) < 0:
        return False
    duals = (forward_ad.unpack_dual(x) for x in arguments if isinstance(x, Tensor))  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)


def recomputed(run: Callable[..., Any], *arguments: Any) -> Any:
    """run(*arguments), computed again in the backward pass in place of kept; under `torch.func` it is kept.

    Transforms refuse the hooks that a checkpoint needs.
    """
    if transformed():
        return run(*arguments)
    return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)


# --- how many threads torch's own operators take, by Python thread (builds with OpenMP and MKL; torch 2.11 to 2.13) ---
# Fallback, where the libraries or their functions are not found or do not do what they should: operators keep their
# threads, which is right and, beside other programs, slower.

_LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}


class _Threads(threading.local):
    """Of one Python thread."""

    depth = 0  # of contexts entered
    number = 1  # of torch, outside
    mkl = 0  # MKL's own, outside; 0: as OpenMP's


_threads = _Threads()


@cache
def _library() -> ctypes.CDLL | None:
    """What sets OpenMP's threads, where torch follows it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARIES.get(sys.platform, "")))
        set_threads = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    set_threads(other)
    follows = torch.get_num_threads() == other
    set_threads(before)
    return library if follows else None


@cache
def _set_mkl_threads() -> Any:
    """MKL's function for this Python thread, which returns what was set before; None without MKL."""
    return getattr(_library(), "MKL_Set_Num_Threads_Local", None)


class _OneThread(ContextDecorator):
    """A context, or a decorator, in which operators that this Python thread calls run on it alone.

    A parallel region of an operator ends when all its threads have run. Beside other programs one of them waits for a
    core, for milliseconds; and it goes on spinning when its work is done, where the engine's own threads would run.
    """

    def __enter__(self) -> None:
        if _threads.depth == 0:
            _threads.number = torch.get_num_threads()
            library = _library() if _threads.number > 1 else None
            if library is not None:
                library.omp_set_num_threads(1)
                set_mkl_threads = _set_mkl_threads()
                _threads.mkl = 0 if set_mkl_threads is None else set_mkl_threads(1)
        _threads.depth += 1

    def __exit__(self, *exception: object) -> None:
        _threads.depth -= 1
        if _threads.depth == 0:
            library = _library() if _threads.number > 1 else None
            if library is not None:
                library.omp_set_num_threads(_threads.number)
                set_mkl_threads = _set_mkl_threads()
                if set_mkl_threads is not None:
                    set_mkl_threads(_threads.mkl)


ONE_THREAD = _OneThread()


def num_threads() -> int:
    """Torch's number of threads, as it is outside of `ONE_THREAD`."""
    return _threads.number if _threads.depth else torch.get_num_threads()
