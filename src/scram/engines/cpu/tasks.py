"""Tasks on all threads. Numba optimises a kernel that is called in a `prange` loop four times over, here once."""

# Numba infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.cgutils import create_struct_proxy
from numba.core.compiler import Flags, compile_extra
from numba.core.types import Array, int64, none
from numba.core.types.containers import BaseTuple
from numba.extending import intrinsic

from .compiled import parallel

TASK, ADDRESS = ir.IntType(64), ir.IntType(8).as_pointer()
KERNEL = ir.FunctionType(ir.VoidType(), (TASK, ADDRESS))


@intrinsic
def _call(typing_context, kernel, data, task):
    """kernel(task, data), both by their address."""

    def generate(context, builder, signature, arguments):
        function = builder.inttoptr(arguments[0], KERNEL.as_pointer())
        builder.call(function, (arguments[2], builder.inttoptr(arguments[1], ADDRESS)))
        return context.get_dummy_value()

    return none(int64, int64, int64), generate


@parallel
def _each(kernel, data, tasks):
    for task in numba.prange(tasks):
        _call(kernel, data, task)


def _compile(typing_context, context, dispatcher, types):
    """A function as a part of what is being compiled; on its own it would be optimised once more."""
    flags = Flags()
    dispatcher.targetdescr.options.parse_as_flags(flags, dispatcher.targetoptions)
    flags.no_compile = True
    return compile_extra(
        typing_context, context, dispatcher.py_func, types, None, flags, {}, context.active_code_library
    )


def _borrowed(context, builder, type_, value):
    """Arrays without an owner: threads that count references to one array wait for each other."""
    if isinstance(type_, BaseTuple):
        for n, part in enumerate(type_):
            lent = _borrowed(context, builder, part, builder.extract_value(value, n))
            value = builder.insert_value(value, lent, n)
    elif isinstance(type_, Array):
        array = create_struct_proxy(type_)(context, builder, value=value)
        array.meminfo, array.parent = (cgutils.get_null_value(field.type) for field in (array.meminfo, array.parent))
        value = array._getvalue()
    return value


@intrinsic
def each_task(typing_context, kernel, tasks, arguments):
    """kernel(task, *arguments) for 0 <= task < tasks on all threads. It returns nothing and must not raise."""
    loop = typing_context.resolve_value_type(_each)
    loop_types = loop.get_call_type(typing_context, (int64, int64, int64), {})

    def generate(context, builder, signature, values):
        compiled = _compile(typing_context, context, kernel.dispatcher, (int64, *arguments))
        kept = cgutils.alloca_once_value(builder, values[2])
        function = ir.Function(builder.module, KERNEL, builder.module.get_unique_name("task"))
        function.linkage = "internal"
        inside = ir.IRBuilder(function.append_basic_block())
        task, data = function.args
        packed = _borrowed(context, inside, arguments, inside.load(inside.bitcast(data, kept.type)))
        unpacked = (task, *cgutils.unpack_tuple(inside, packed, len(arguments)))
        context.call_internal_no_propagate(inside, compiled.fndesc, compiled.signature, unpacked)
        inside.ret_void()
        addresses = [builder.ptrtoint(pointer, TASK) for pointer in (function, kept)]
        context.get_function(loop, loop_types)(builder, (*addresses, values[1]))
        return context.get_dummy_value()

    return none(kernel, int64, arguments), generate
