"""What tests in Triton's interpreter share. TRITON_INTERPRET is read when triton is imported: they have a process of
their own, which engines/gpu/test_interpreter.py starts."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

LEAST_QUERIES = 128  # of a program
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Without what takes most of the interpreter's time: it patches triton.language at every call of a device function
    (once per launch is enough), reduces element by element, and makes every shape and dtype anew."""
    if INTERPRETED:
        for apply in PATCHES:
            apply(monkeypatch)


def language_once(patch):
    """triton.language is patched once per launch and module, not at every call of a device function."""
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    run = interpreter.InterpretedFunction.run
    done = set()

    def patch_once(fn):
        if id(fn.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(fn.__globals__))
        return patch_language(fn)

    def run_anew(self, *args, **kwargs):
        done.clear()
        return run(self, *args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.InterpretedFunction, "run", run_anew)


def known_dtypes(patch):
    from triton.runtime import interpreter

    patch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))


def reduced_rows(patch):
    from triton.runtime import interpreter

    patch.setattr(interpreter.ReduceOps, "generic_reduce", _by_rows(interpreter.ReduceOps.generic_reduce))


def known_tensor_shapes(patch):
    from triton.runtime.interpreter import tl

    patch.setattr(tl.tensor, "__init__", _shaped_tensor(tl.tensor.__init__))


def known_block_shapes(patch):
    from triton.runtime.interpreter import tl

    patch.setattr(tl.block_type, "__init__", _shaped_type(tl.block_type.__init__))


def blocks_as_they_are(patch):
    """The interpreter's own type of a block is that block's type."""
    from triton.runtime.interpreter import tl

    patch.setattr(tl.block_type, "to_ir", lambda self, builder: self)


def same_dtypes(patch):
    from triton.runtime.interpreter import tl

    patch.setattr(tl.dtype, "__eq__", _same_or(tl.dtype.__eq__))


def alike_broadcast(patch):
    from triton.runtime.interpreter import TritonSemantic

    patch.setattr(TritonSemantic, "broadcast_impl_value", _alike_or(TritonSemantic.broadcast_impl_value))


def alike_operands(patch):
    from triton.runtime.interpreter import TritonSemantic

    checked = _alike_or(TritonSemantic.binary_op_type_checking_impl)
    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", checked)


def known_constants(patch):
    from triton.runtime.interpreter import TritonSemantic

    patch.setattr(TritonSemantic, "scalar_constant", _constant(TritonSemantic.scalar_constant))


def large_blocks(patch):
    """The interpreter's time goes by programs, not by queries."""
    from scram.engines.gpu.runtime import block_sizes, launch

    block = block_sizes._block
    patch.setattr(block_sizes, "_block", lambda rank, queries: block(rank, max(queries, LEAST_QUERIES)))
    launch.clear_caches()


def no_overflow_checks(patch):
    """Their results are read in Triton's debug mode only."""
    from triton.runtime.interpreter import interpreter_builder as builder

    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


# In this order: what is alike is seen by shapes that are one object.
PATCHES = (
    language_once,
    known_dtypes,
    reduced_rows,
    known_tensor_shapes,
    known_block_shapes,
    blocks_as_they_are,
    same_dtypes,
    alike_broadcast,
    alike_operands,
    known_constants,
    large_blocks,
    no_overflow_checks,
)


def _by_name(np_dtype):
    """As given, once for each name of a dtype."""
    known = {}

    def found(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype.scalar)
        return known[name]

    return found


def _by_rows(reduce):
    """As given, in the same order, but all rows at once."""

    def reduce_rows(self, tensors):
        if self.axis is None:
            return reduce(self, tensors)
        data = [x.handle.data for x in tensors]
        total = None
        for n in range(data[0].shape[self.axis]):
            row = [self.to_tensor(x.take(n, self.axis), y.dtype) for x, y in zip(data, tensors, strict=True)]
            total = row if total is None else self.combine_fn.fn(*total, *row)
            total = total if isinstance(total, (tuple, list)) else (total,)
        found = [x.handle.data.reshape(y.take(0, self.axis).shape) for x, y in zip(total, data, strict=True)]
        found = [np.expand_dims(x, self.axis) if self.keep_dims else x for x in found]
        return [self.to_tensor(x, y.dtype) for x, y in zip(found, tensors, strict=True)]

    return reduce_rows


def _shaped_tensor(make):
    """As given, with the shape of the first tensor of that shape."""
    known = {}

    def init(self, handle, type):
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in known:
            make(self, handle, type)
            known[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[shape]

    return init


def _shaped_type(make):
    """As given, with the shape of the first type of that shape."""
    known = {}

    def init(self, element_ty, shape):
        key = type(shape), tuple(getattr(x, "value", x) for x in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, str(self.shape)
        self.shape, self.numel, written = known[key]
        self.element_ty = element_ty
        self.name = f"<{written}, {element_ty}>"

    return init


def _same_or(equal):
    return lambda self, other: self is other or equal(self, other)


def _alike_or(convert):
    """As given, for operands that are not alike yet. A division may convert both."""

    def converted(self, lhs, rhs, *flags, **named):
        alike = getattr(lhs, "shape", 0) is getattr(rhs, "shape", 1) and lhs.dtype is rhs.dtype
        if alike and not lhs.dtype.is_ptr() and not named.get("div_or_mod") and len(flags) < 4:
            return lhs, rhs
        return convert(self, lhs, rhs, *flags, **named)

    return converted


def _constant(make):
    """As given, once for each number. Nothing is written to a tensor."""
    known = {}

    def constant(self, value, dtype):
        key = repr(value), dtype.name
        if key not in known:
            known[key] = make(self, value, dtype)
        return known[key]

    return constant


def _record(patch, names):
    """Until the patch ends, the names of the kernels that run are appended."""
    from scram.engines.gpu.runtime import launch

    call = launch.Kernel.__call__

    def record(self, *arguments):
        names.append(self.kernel.fn.__name__)
        call(self, *arguments)

    patch.setattr(launch.Kernel, "__call__", record)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ran. On a device some go another way."""
    if not INTERPRETED:
        pytest.skip("launches are seen in Triton's interpreter only")
    names = []
    _record(monkeypatch, names)
    return names


@pytest.fixture(autouse=True, scope="session")
def _all_launched(request):
    """Writes the names of all kernels that ran to the file that --launched-to names."""
    file = request.config.getoption("--launched-to")
    names = []
    with pytest.MonkeyPatch.context() as patch:
        if file:
            _record(patch, names)
        yield
    if file:
        Path(file).write_text(json.dumps(sorted(set(names))))
