"""Every private API of Numba and llvmlite, with a public fallback for each. Imported with the CPU engine only.

Run with Numba 0.64.0 (llvmlite 0.46.0) to 0.68.1 (llvmlite 0.50.0). `PRIVATE` says whether what is used here still is
what it was; otherwise the fallbacks serve, with the same results: more to compile, and slower.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload

# Without nnan and ninf, which would break tests for NaN and -inf.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
SIMD_WIDTH = 4  # narrower rows are padded to as many elements
ROWS = SIMD_WIDTH**2  # of them are multiplied at a time
LANES = 16  # what matrices are padded to: their rows are multiplied in vectors of so many elements
TILE_ROWS = 4  # of a matrix product that registers hold
PARALLEL = {"parallel": True, "fastmath": FASTMATH, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
LONGEST = 120.0  # seconds that a process waits for another one that compiles the same
LOGGER = logging.getLogger("scram")
_announced = False
_unusable: set[str] = set()  # files and folders of the cache that a warning has named

try:
    from llvmlite import ir
    from llvmlite.binding import get_host_cpu_features
    from numba.core import cgutils
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler
    from numba.core.compiler_machinery import PassManager
    from numba.core.registry import cpu_target
    from numba.core.typed_passes import (
        IRLegalization,
        NativeLowering,
        NoPythonBackend,
        NopythonTypeInference,
        PreLowerStripPhis,
    )
    from numba.core.untyped_passes import FixupArgs, GenericRewrites, IRProcessing, ReconstructSSA, TranslateByteCode

    _library = JITCodeLibrary(cpu_target.target_context.codegen(), "check")
    _used = (
        (_library, "_linking_libraries _final_module _reload_init _finalized"),
        (_library, "_get_module_for_linking _ensure_finalized enable_object_caching"),
        (cgutils, "alloca_once_value create_struct_proxy get_null_value unpack_tuple"),
        (cpu_target.target_context, "push_code_library call_internal_no_propagate"),
        (numba.core.dispatcher.Dispatcher, "get_compile_result"),
    )
    _arguments = ["self", "typingctx", "targetctx", "library", "args", "return_type", "flags", "locals"]
    PRIVATE = list(inspect.signature(Compiler.__init__).parameters) == _arguments
    PRIVATE &= all(hasattr(owner, name) for owner, names in _used for name in names.split())
    # Of a row of a matrix product that registers hold: four of the widest ones, or of two halves two.
    TILE_BYTES = 256 if dict(get_host_cpu_features()).get("avx512f") else 64
except (ImportError, AttributeError, TypeError):
    PRIVATE = False
    TILE_BYTES = 64


def _hash_of_sources() -> str:
    """Of all that kernels are compiled from: Numba itself sees the file of a launcher only."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    kernels = sorted((package / "engines" / "cpu").glob("*.py"))
    try:
        for path in (*kernels, *(package / "spec" / name for name in ("schedule.py", "routing.py")), Path(__file__)):
            digest.update(path.read_bytes())
    except OSError:  # not on disk: they do not change
        pass
    return digest.hexdigest()[:12]


SOURCES = _hash_of_sources()


def cached(function: Callable[..., Any], **options: Any) -> Any:
    """`numba.njit` with what it compiles kept on disk, in a file that is named after the function and the sources."""
    function.__qualname__ += f"_{SOURCES}"
    try:
        return _compiled_by_one(_kept_where_possible(numba.njit(cache=True, **options)(function)))
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(**options)(function)


def _kept_where_possible(dispatcher):
    """What cannot be read from the disk is compiled; what cannot be written stays in memory. Both are said, once.

    Numba itself would end the call: in the middle of a write, or at every call until someone removes the file.
    """
    try:
        cache = dispatcher._cache
        file = dispatcher._cache._cache_file
        load = cache.load_overload
        save = cache.save_overload
        load_data = file._load_data
        index = str(file._index_path)
        data_path = file._data_path
        forget = cache.flush
    except AttributeError:
        return dispatcher
    reading = index  # the file that is read

    def load_data_by_name(name):
        nonlocal reading
        reading = str(data_path(name))
        return load_data(name)

    def load_or_nothing(signature, target):
        nonlocal reading
        reading = index
        try:
            return load(signature, target)
        except Exception as error:  # whatever unpickling of any bytes raises
            _warn_once(reading, f"compiled code in {reading} cannot be read, so it is compiled again", error)
        with contextlib.suppress(OSError):
            forget()  # writes an empty index: what is compiled now takes the place of what cannot be read
        return None

    def save_or_not(signature, compiled):
        try:
            save(signature, compiled)
        except Exception as error:  # it reads the index too
            folder = str(cache.cache_path)
            text = f"compiled code cannot be kept in {folder}, so every process compiles it again; make room there, or "
            _warn_once(folder, text + "set NUMBA_CACHE_DIR to another folder", error)

    file._load_data = load_data_by_name
    cache.load_overload = load_or_nothing
    cache.save_overload = save_or_not
    return dispatcher


def _warn_once(place: str, text: str, error: Exception) -> None:
    if place in _unusable:
        return
    _unusable.add(place)
    warnings.warn(f"{text} ({type(error).__name__}: {error})", RuntimeWarning, stacklevel=2)


def _compiled_by_one(dispatcher):
    """Of processes that need the same code at once one compiles it; others wait, and load it from the disk.

    It holds a lock on a file beside the code, which ends with the process. Where that cannot be had, everyone compiles.
    """
    try:
        import fcntl

        from numba.core.compiler_lock import global_compiler_lock

        compile_ = dispatcher.compile
        load = dispatcher._cache.load_overload
        folder = Path(dispatcher._cache.cache_path)
        name = dispatcher.py_func.__qualname__
    except (ImportError, AttributeError):
        return dispatcher
    held: list[Any] = []

    def load_or_wait(signature, target):
        overload = load(signature, target)
        if overload is None and not held:
            types_ = hashlib.sha256(str(signature).encode()).hexdigest()[:12]
            held.extend(_locked(folder / f"{name}.{types_}.lock", fcntl))
            overload = load(signature, target)
        return overload

    def compile_alone(*arguments):
        with global_compiler_lock, _no_collection():  # of the threads of a process one has `held`
            try:
                return compile_(*arguments)
            finally:
                while held:
                    with held.pop() as file:
                        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a fork has it too

    dispatcher.compile = compile_alone
    dispatcher._cache.load_overload = load_or_wait
    return dispatcher


@contextlib.contextmanager
def _no_collection():
    """Without the garbage collector, which takes a seventh of the time that Numba takes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _locked(path, fcntl):
    """[file], locked, or [] where it cannot be, or where who has the lock seems to have stopped."""
    end = time.monotonic() + LONGEST
    try:
        file = path.open("w")
    except OSError:
        return []
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return [file]
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # the file system has no locks
            break
    file.close()
    return []


def folder_of(dispatcher: Any) -> Path | None:
    """Where the machine code of a `cached` function is kept; None where it is not."""
    path = getattr(getattr(dispatcher, "_cache", None), "cache_path", None)
    return None if path is None else Path(path)


def _announce(kernel: Any, arguments: Any) -> None:
    """Say that a kernel is compiled.

    Called when the types of a launcher are inferred, so not for code that is loaded from the disk cache.
    """
    leaves = list(_leaves(arguments))
    dtype = next((str(x.dtype) for x in leaves if isinstance(x, types.Array) and isinstance(x.dtype, types.Float)), "")
    rank = next((f", rank {len(x)}" for x in leaves if isinstance(x, types.UniTuple)), "")
    stage = kernel.dispatcher.py_func.__module__.rsplit(".", 1)[-1]
    tell(f"compiling the CPU kernels ({stage}) for {dtype}{rank}; this happens once and takes about 10 s")


def tell(text: str) -> None:
    """To the log, and where nobody reads that, once to a terminal or a notebook."""
    global _announced
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info(text)
    elif not _announced and sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        print(f"scram: {text}", file=sys.stderr)
        _announced = True


def _leaves(type_):
    """The types in nested tuples; a tuple of integers counts as one."""
    integers = isinstance(type_, types.UniTuple) and isinstance(type_.dtype, types.Integer)
    if isinstance(type_, types.BaseTuple) and not integers:
        for part in type_:
            yield from _leaves(part)
    else:
        yield type_


if PRIVATE:
    TASK = ir.IntType(64)
    ADDRESS = ir.IntType(8).as_pointer()
    KERNEL = ir.FunctionType(ir.VoidType(), (TASK, ADDRESS))

    class _PartLibrary(JITCodeLibrary):
        """The code of a function that only becomes part of others: neither optimized nor emitted on its own."""

        codegen = SimpleNamespace(set_env=lambda name, environment: None)  # it never runs

        def finalize(self):
            for library in dict.fromkeys(self._linking_libraries):
                self._reload_init.update(library._reload_init)
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)
            self._finalized = True

        def get_pointer_to_function(self, name):
            self._ensure_finalized()
            return 0

    PASSES = (
        TranslateByteCode,
        FixupArgs,
        IRProcessing,
        GenericRewrites,
        ReconstructSSA,
        NopythonTypeInference,
        PreLowerStripPhis,
        IRLegalization,
        NativeLowering,
        NoPythonBackend,
    )

    class _PartCompiler(Compiler):
        def __init__(self, typingctx, targetctx, library, args, return_type, flags, locals):
            if library is None:
                library = _PartLibrary(targetctx.codegen(), "part")
                library.enable_object_caching()
            super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)

        def define_pipelines(self):
            """Numba's own passes without those for what parts do not have: closures, array expressions, raises."""
            passes = PassManager("part")
            for each in PASSES:
                passes.add_pass(each, each.__name__)
            passes.finalize()
            return [passes]

    PART: dict[str, Any] = {
        "pipeline_class": _PartCompiler,
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": True,
        "_nrt": False,  # arrays are lent to them, so that there is nothing to count
    }

    @intrinsic
    def _call(typing_context, kernel, data, task):
        """kernel(task, data), both by their address."""

        def generate(context, builder, signature, arguments):
            function = builder.inttoptr(arguments[0], KERNEL.as_pointer())
            builder.call(function, (arguments[2], builder.inttoptr(arguments[1], ADDRESS)))
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.int64), generate

    def _borrowed(context, builder, type_, value):
        """Arrays without an owner: threads that count references to one array wait for each other."""
        if isinstance(type_, types.BaseTuple):
            for n, part in enumerate(type_):
                lent = _borrowed(context, builder, part, builder.extract_value(value, n))
                value = builder.insert_value(value, lent, n)
        elif isinstance(type_, types.Array):
            array = cgutils.create_struct_proxy(type_)(context, builder, value=value)
            array.meminfo, array.parent = (
                cgutils.get_null_value(field.type) for field in (array.meminfo, array.parent)
            )
            value = array._getvalue()
        return value

    def _task(context, module, compiled, arguments, kept):
        """A function (task, address of the arguments) in the module at hand that calls the kernel."""
        function = ir.Function(module, KERNEL, module.get_unique_name("task"))
        function.linkage = "internal"
        inside = ir.IRBuilder(function.append_basic_block())
        task, data = function.args
        packed = _borrowed(context, inside, arguments, inside.load(inside.bitcast(data, kept.type)))
        unpacked = (task, *cgutils.unpack_tuple(inside, packed, len(arguments)))
        context.call_internal_no_propagate(inside, compiled.fndesc, compiled.signature, unpacked)
        inside.ret_void()
        return function

    @intrinsic
    def each_task(typing_context, kernel, tasks, threads, arguments):
        """kernel(task, *arguments) for 0 <= task < tasks on so many threads. It returns nothing and must not raise.

        Numba optimizes a kernel that is called in a `prange` loop four times over. The only such loop calls an
        address, so kernels are optimized once.
        """
        _announce(kernel, arguments)
        loop = typing_context.resolve_value_type(_each)
        loop_types = loop.get_call_type(typing_context, (types.int64,) * 4, {})

        def generate(context, builder, signature, values):
            compiled = kernel.dispatcher.get_compile_result(types.none(types.int64, *arguments))
            context.active_code_library.add_linking_library(compiled.library)
            kept = cgutils.alloca_once_value(builder, values[3])
            function = _task(context, builder.module, compiled, arguments, kept)
            addresses = [builder.ptrtoint(pointer, TASK) for pointer in (function, kept)]
            context.get_function(loop, loop_types)(builder, (*addresses, values[1], values[2]))
            return context.get_dummy_value()

        return types.none(kernel, types.int64, types.int64, arguments), generate

    def _load(context, builder, signature, arguments, which, index, width):
        """The place of `width` elements of an array argument, taken flat, and what stands there."""
        array = cgutils.create_struct_proxy(signature.args[which])(context, builder, value=arguments[which])
        place = builder.gep(array.data, [index], inbounds=True)
        element = place.type.pointee
        if width > 1:
            place = builder.bitcast(place, ir.VectorType(element, width).as_pointer())
        return place, builder.load(place, align=context.get_abi_sizeof(element))

    def _shuffle(builder, x, y, order):
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order)))

    def _sum_of_pairs(builder, x, y, width):
        """Of x and y one after the other, elements 0 and 1, 2 and 3, and so on. Never reordered: equal rows, equal
        bits."""
        evens, odds = (_shuffle(builder, x, y, range(start, 2 * width, 2)) for start in (0, 1))
        return builder.fadd(evens, odds)

    @intrinsic
    def product(typing_context, a, i, b, j):
        """<a[i], b[j]> of rows of SIMD_WIDTH elements."""

        def generate(context, builder, signature, arguments):
            width = ir.Constant(ir.IntType(64), SIMD_WIDTH)
            left, i, right, j = range(4)
            rows = ((x, builder.mul(arguments[row], width)) for x, row in ((left, i), (right, j)))
            loaded = [_load(context, builder, signature, arguments, x, at, SIMD_WIDTH)[1] for x, at in rows]
            total = builder.fmul(*loaded)
            for _ in range(2):
                total = _sum_of_pairs(builder, total, total, SIMD_WIDTH)
            return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

        return a.dtype(a, types.int64, b, types.int64), generate

    @intrinsic
    def products(typing_context, a, i, b, j, keys, p, result):
        """result[n] = <a[i + n], b[j + keys[n]]> for p <= n < p + ROWS, of rows of SIMD_WIDTH elements."""

        def generate(context, builder, signature, arguments):
            def load(which, index, width):
                return _load(context, builder, signature, arguments, which, index, width)

            def number(n):
                return ir.Constant(ir.IntType(64), n)

            rows = []
            for n in range(ROWS):
                key = builder.sext(load(4, builder.add(arguments[5], number(n)), 1)[1], ir.IntType(64))
                rows.append(load(2, builder.mul(builder.add(arguments[3], key), number(SIMD_WIDTH)), SIMD_WIDTH)[1])
            while len(rows) > SIMD_WIDTH:
                rows = [
                    _shuffle(builder, x, y, range(2 * x.type.count)) for x, y in zip(rows[::2], rows[1::2], strict=True)
                ]
            for n, right in enumerate(rows):
                row = builder.add(builder.add(arguments[1], arguments[5]), number(n * SIMD_WIDTH))
                at = builder.mul(row, number(SIMD_WIDTH))
                rows[n] = builder.fmul(load(0, at, ROWS)[1], right)
            while len(rows) > 1:
                rows = [_sum_of_pairs(builder, x, y, ROWS) for x, y in zip(rows[::2], rows[1::2], strict=True)]
            place, _ = load(6, arguments[5], ROWS)
            builder.store(rows[0], place, align=context.get_abi_sizeof(place.type.pointee.element))
            return context.get_dummy_value()

        return types.none(a, types.int64, b, types.int64, keys, types.int64, result), generate

    def _tile_of_product(whole, listed, adds):
        """An intrinsic for TILE_ROWS rows and TILE_BYTES of each, or LANES elements, of a matrix product.

        c[c_starts[r] + p] = (or +=) the sum over begin <= j < end of a[starts[r] + n] * b[b_start + j * b_step + p],
        with n = j, or listed: at[j] * width. Arrays are taken flat. The sums stay in registers.
        """

        @intrinsic
        def tile(typing_context, a, starts, at, width, b, b_start, b_step, c, c_starts, begin, end):
            def generate(context, builder, signature, arguments):
                names = ("a", "starts", "at", "width", "b", "b_start", "b_step", "c", "c_starts", "begin", "end")
                given = dict(zip(names, arguments, strict=True))
                data = {}
                for name, type_ in zip(names, signature.args, strict=True):
                    if isinstance(type_, types.Array):
                        data[name] = cgutils.create_struct_proxy(type_)(context, builder, value=given[name]).data
                element = data["a"].type.pointee
                size = context.get_abi_sizeof(element)
                vector = ir.VectorType(element, LANES)
                parts = max(1, TILE_BYTES // (size * LANES)) if whole else 1

                def at_place(name, *offsets):
                    place = offsets[0]
                    for more in offsets[1:]:
                        place = builder.add(place, more)
                    return builder.gep(data[name], [place], inbounds=True)

                def number(n):
                    return ir.Constant(TASK, n)

                def part_of(place, n):
                    part = builder.gep(place, [number(n * LANES)], inbounds=True)
                    return builder.bitcast(part, vector.as_pointer())

                rows = range(TILE_ROWS)
                starts = [builder.extract_value(given["starts"], r) for r in rows]
                results = [at_place("c", builder.extract_value(given["c_starts"], r)) for r in rows]
                zero = ir.Constant(vector, [0.0] * LANES)
                sums = [[cgutils.alloca_once(builder, vector) for _ in range(parts)] for _ in rows]
                for r in rows:
                    for n in range(parts):
                        first = builder.load(part_of(results[r], n), align=size) if adds else zero
                        builder.store(first, sums[r][n])
                with cgutils.for_range_slice(builder, given["begin"], given["end"], number(1), TASK) as (j, _):
                    line = at_place("b", given["b_start"], builder.mul(j, given["b_step"]))
                    right = [builder.load(part_of(line, n), align=size) for n in range(parts)]
                    step = j
                    if listed:
                        step = builder.load(builder.gep(data["at"], [j], inbounds=True))
                        step = builder.mul(builder.sext(step, TASK), given["width"])
                    for r in rows:
                        factor = builder.load(at_place("a", starts[r], step))
                        one = builder.insert_element(
                            ir.Constant(vector, ir.Undefined), factor, ir.Constant(ir.IntType(32), 0)
                        )
                        left = _shuffle(builder, one, one, [0] * LANES)
                        for n in range(parts):
                            product = builder.fmul(left, right[n], flags=("contract",))
                            total = builder.fadd(builder.load(sums[r][n]), product, flags=("contract",))
                            builder.store(total, sums[r][n])
                for r in rows:
                    for n in range(parts):
                        builder.store(builder.load(sums[r][n]), part_of(results[r], n), align=size)
                return context.get_dummy_value()

            return types.none(
                a, starts, at, types.int64, b, types.int64, types.int64, c, c_starts, types.int64, types.int64
            ), generate

        return tile

    def _transposed_tile(listed_first):
        """An intrinsic that copies LANES x LANES elements, rows as columns; arrays are taken flat.

        Between x[(first + at[begin + j]) * width + column + i] and y[start + i * step + j] for i, j < LANES: from x to
        y, or back.
        """

        @intrinsic
        def tile(typing_context, x, first, at, begin, width, column, y, start, step):
            def generate(context, builder, signature, arguments):
                x, first, at, begin, width, column, y, start, step = (
                    cgutils.create_struct_proxy(type_)(context, builder, value=value).data
                    if isinstance(type_, types.Array)
                    else value
                    for type_, value in zip(signature.args, arguments, strict=True)
                )
                size = context.get_abi_sizeof(x.type.pointee)
                vector = ir.VectorType(x.type.pointee, LANES).as_pointer()

                def number(n):
                    return ir.Constant(TASK, n)

                def listed(n):
                    name = builder.load(builder.gep(at, [builder.add(begin, number(n))], inbounds=True))
                    row = builder.add(builder.sext(name, TASK), first)
                    place = builder.add(builder.mul(row, width), column)
                    return builder.bitcast(builder.gep(x, [place], inbounds=True), vector)

                def regular(n):
                    place = builder.add(start, builder.mul(step, number(n)))
                    return builder.bitcast(builder.gep(y, [place], inbounds=True), vector)

                source, target = (listed, regular) if listed_first else (regular, listed)
                lines = [builder.load(source(n), align=size) for n in range(LANES)]
                apart = 1
                while apart < LANES:  # swap the blocks of so many elements beside the diagonal
                    upper = [n if n & apart == 0 else LANES + n - apart for n in range(LANES)]
                    lower = [n + apart if n & apart == 0 else LANES + n for n in range(LANES)]
                    for n in range(LANES):
                        if n & apart == 0:
                            pair = (lines[n], lines[n + apart])
                            lines[n] = _shuffle(builder, *pair, upper)
                            lines[n + apart] = _shuffle(builder, *pair, lower)
                    apart *= 2
                for n, line in enumerate(lines):
                    builder.store(line, target(n), align=size)
                return context.get_dummy_value()

            numbers = (types.int64,) * 3
            return types.none(x, types.int64, at, *numbers, y, types.int64, types.int64), generate

        return tile

    @intrinsic
    def keep_highest(typing_context, x, start, name, best, which, p):
        """best[n] = x[start + n - p] and which[n] = name for p <= n < p + LANES where that is higher than best[n].

        The compiler does not trust these arrays to be apart, and would take element by element. Arrays are taken flat.
        """

        def generate(context, builder, signature, arguments):
            def load(which, index):
                return _load(context, builder, signature, arguments, which, index, LANES)

            _, new = load(0, arguments[1])
            best_place, best = load(3, arguments[5])
            which_place, which = load(4, arguments[5])
            first = ir.Constant(ir.IntType(32), 0)
            one = builder.insert_element(ir.Constant(which.type, ir.Undefined), arguments[2], first)
            higher = builder.fcmp_ordered(">", new, best)
            align = context.get_abi_sizeof(new.type.element)
            builder.store(builder.select(higher, new, best), best_place, align=align)
            names = _shuffle(builder, one, one, [0] * LANES)
            builder.store(builder.select(higher, names, which), which_place, align=align)
            return context.get_dummy_value()

        return types.none(x, types.int64, x.dtype, best, which, types.int64), generate

    @intrinsic
    def prefetch(typing_context, x, place):
        """Fetch the line of the cache that holds an element of an array, taken flat, before it is read."""

        def generate(context, builder, signature, arguments):
            array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
            address = builder.bitcast(builder.gep(array.data, [arguments[1]]), ADDRESS)
            number = ir.IntType(32)
            function_type = ir.FunctionType(ir.VoidType(), (ADDRESS, number, number, number))
            function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
            builder.call(function, [address, *(ir.Constant(number, n) for n in (0, 3, 1))])
            return context.get_dummy_value()

        return types.none(x, types.int64), generate

    @intrinsic
    def turn(typing_context, turns, worker, workers):
        """The number of the next item: 0, 1, .. in the order in which workers ask; `turns`: int64 zeros."""

        def generate(context, builder, signature, arguments):
            array = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
            return builder.atomic_rmw("add", array.data, ir.Constant(TASK, 1), "monotonic")

        return types.int64(turns, types.int64, types.int64), generate

    @intrinsic
    def power_of_two(typing_context, n):
        """2^n as float32, n from -126 to 127."""

        def generate(context, builder, signature, arguments):
            biased = builder.add(arguments[0], ir.Constant(ir.IntType(32), 127))
            return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

        return types.float32(types.int32), generate

    def _each(kernel, data, tasks, threads):
        """Tasks are handed out one by one: a thread that does not run delays nobody but for the task that it has."""
        if tasks <= 1 < threads:
            for task in range(tasks):
                _call(kernel, data, task)
            return
        turns = np.zeros(1, np.int64)
        for thread in numba.prange(max(1, min(tasks, threads))):
            task = turn(turns, thread, 1)
            while task < tasks:
                _call(kernel, data, task)
                task = turn(turns, thread, 1)

    _each = cached(_each, **PARALLEL)

else:
    PART = {}

    def each_task(kernel, tasks, threads, arguments):
        """As above, by `prange`. Its loop takes no nested tuples: they are taken apart before and built anew inside."""

    @overload(each_task, jit_options=PARALLEL)
    def _each_task(kernel, tasks, threads, arguments):
        _announce(kernel, arguments)
        scope: dict[str, Any] = {"prange": numba.prange, "call": kernel.dispatcher}
        lines: list[str] = []

        def rebuilt(type_, value):
            if not isinstance(type_, types.BaseTuple):
                lines.append(f"x{len(lines)} = {value}")
                return f"x{len(lines) - 1}"
            parts = "".join(f"{rebuilt(part, f'{value}[{n}]')}, " for n, part in enumerate(type_))
            if not isinstance(type_, types.BaseNamedTuple):
                return f"({parts})"
            name = type_.instance_class.__name__
            scope[name] = type_.instance_class
            return f"{name}({parts})"

        given = rebuilt(types.Tuple(arguments.types), "arguments")
        body = "\n    ".join([*lines, "for task in prange(tasks):", f"    call(task, *{given})"])
        exec(f"def run(kernel, tasks, threads, arguments):\n    {body}", scope)
        return scope["run"]

    @numba.njit
    def product(a, i, b, j):
        return (a[i, 0] * b[j, 0] + a[i, 1] * b[j, 1]) + (a[i, 2] * b[j, 2] + a[i, 3] * b[j, 3])

    @numba.njit
    def products(a, i, b, j, keys, p, result):
        for n in range(p, p + ROWS):
            result[n] = product(a, i + n, b, j + keys[n])

    def _tile_of_product(whole, listed, adds):
        """As above, in plain loops."""

        @numba.njit
        def tile(a, starts, at, width, b, b_start, b_step, c, c_starts, begin, end):
            lanes = max(LANES, TILE_BYTES // b.itemsize) if whole else LANES
            for r in range(TILE_ROWS):
                if r > 0 and c_starts[r] == c_starts[r - 1]:
                    continue
                for p in range(lanes):
                    total = c.flat[c_starts[r] + p] if adds else c.dtype.type(0)
                    for j in range(begin, end):
                        n = at[j] * width if listed else j
                        total += a.flat[starts[r] + n] * b.flat[b_start + j * b_step + p]
                    c.flat[c_starts[r] + p] = total

        return tile

    def _transposed_tile(listed_first):
        """As above, in plain loops."""

        @numba.njit
        def tile(x, first, at, begin, width, column, y, start, step):
            for i in range(LANES):
                for j in range(LANES):
                    one = (first + at[begin + j]) * width + column + i
                    other = start + i * step + j
                    if listed_first:
                        y.flat[other] = x.flat[one]
                    else:
                        x.flat[one] = y.flat[other]

        return tile

    @numba.njit
    def keep_highest(x, start, name, best, which, p):
        for n in range(p, p + LANES):
            one = x.flat[start + n - p]
            which[n] = name if one > best[n] else which[n]
            best[n] = one if one > best[n] else best[n]

    @numba.njit
    def prefetch(x, place):
        pass

    @numba.njit
    def turn(turns, worker, workers):
        turns[worker] += 1
        return worker + (turns[worker] - 1) * workers

    @numba.njit
    def power_of_two(n):
        return math.ldexp(np.float32(1), n)


# Of rows of `a`, and of columns in rows that are listed; of the widest tiles and of narrow ones.
tile_of_rows = _tile_of_product(True, False, False)
narrow_tile_of_rows = _tile_of_product(False, False, False)
added_tile_of_rows = _tile_of_product(True, False, True)
added_narrow_tile_of_rows = _tile_of_product(False, False, True)
added_tile_of_columns = _tile_of_product(True, True, True)
added_narrow_tile_of_columns = _tile_of_product(False, True, True)
tile_to_columns = _transposed_tile(True)
tile_to_rows = _transposed_tile(False)
