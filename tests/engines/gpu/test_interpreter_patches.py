"""What tests/support/in_interpreter.py replaces in Triton's interpreter computes the same bits as what it replaces."""

import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import scram
from scram.engines.gpu.runtime import block_sizes, launch
from support import in_interpreter
from support.in_interpreter import INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpreted,
    pytest.mark.skipif(not INTERPRETED, reason="the interpreter is in TRITON_INTERPRET=1 only"),
]

FLOATS = (tl.float16, tl.bfloat16, tl.float32, tl.float64)
INTEGERS = (tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64)
DTYPES = (tl.int1, *INTEGERS, *FLOATS)
POINTERS = tuple(tl.pointer_type(dtype) for dtype in (tl.int1, tl.int32, tl.bfloat16, tl.float32))
SHAPES = ((), (1,), (4,), (2, 1), (1, 4), (2, 4), (4, 2), (2, 1, 4), (1, 2, 4))
TORCH = (torch.float16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def _quick():
    """In place of the fixture of all tests: here each test patches by itself."""


@contextlib.contextmanager
def applied(*patches):
    with pytest.MonkeyPatch.context() as patch:
        for apply in patches:
            apply(patch)
        yield
    launch.clear_caches()


def assert_same(patches, compute):
    """With the patches twice: the second time finds what the first one kept."""
    plain = compute()
    with applied(*patches):
        patched = compute()
        again = compute()
    assert plain  # not empty
    assert patched == plain
    assert again == plain


def block(dtype, shape, seed):
    """A tensor of the interpreter, of any bits: NaN and infinities too."""
    stored = interpreter._get_np_dtype(dtype)
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (*shape, stored.itemsize), np.uint8).view(stored)[..., 0]
    data = generator.integers(0, 2, shape).astype(bool) if dtype == tl.int1 else data
    if dtype in (tl.float16, tl.float32, tl.float64) and data.size > 1:
        data.reshape(-1)[:2] = np.inf, np.nan
    handle = interpreter.TensorHandle(data.reshape(shape or (1,)), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def bits(x):
    """All that a tensor of the interpreter is."""
    shape = tuple(length.value for length in x.shape)
    data = x.handle.data
    return str(x.type), str(x.dtype), shape, x.numel.value, str(data.dtype), data.shape, data.tobytes()


def outcome(function, *arguments, **named):
    """Its tensors, or the kind of its error."""
    try:
        return [bits(x) for x in function(*arguments, **named)]
    except Exception as error:
        return type(error).__name__


def run(kernel, *tensors, **constants):
    """The bits of the last tensor, which the kernel writes."""
    *given, out = tensors
    out = torch.zeros_like(out)
    kernel[(2,)](*given, out, **constants)
    return out.numpy().tobytes()


def values(dtype, *shape):
    """Random numbers, with NaN and infinities among floats."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    if dtype.is_floating_point:
        x = (torch.randn(shape, generator=generator) * 3).to(dtype)
        places = torch.randperm(x.numel(), generator=generator)[:3]
        special = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
        x.view(-1)[places] = special[: len(places)]
    return x


@triton.jit
def _twice(x):
    return _plus(x, x)


@triton.jit
def _plus(x, y):
    return x + y


@triton.jit
def _calls_kernel(x, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    here = tl.load(x + at)
    ordered = tl.sort(here)  # a device function of another module
    tl.store(out + at, _twice(ordered) + tl.flip(here))


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_language_once(dtype):
    x = values(dtype, 2, 8)
    assert_same([in_interpreter.language_once], lambda: run(_calls_kernel, x, x, N=8))


def test_language_once_leaves_the_language_as_it_was():
    def language():
        run(_calls_kernel, torch.ones(2, 8), torch.ones(2, 8), N=8)
        return [getattr(tl, name) for name in ("load", "arange", "static_range")] + [tl.dtype.to_ir]

    assert_same([in_interpreter.language_once], language)


def test_known_dtypes():
    scalars = (*DTYPES, *POINTERS)
    types = (*scalars, *(tl.block_type(dtype, [4, 2]) for dtype in scalars))
    assert_same([in_interpreter.known_dtypes], lambda: [interpreter._get_np_dtype(dtype) for dtype in types])


@triton.jit
def _add_twice(x, y):
    return x + y + y  # neither commutes nor associates


@triton.jit
def _greatest_last(x, n, y, m):
    later = (y > x) | ((y == x) & (m > n))
    return tl.where(later, y, x), tl.where(later, m, n)


@triton.jit
def _reduce_kernel(x, n, out, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    program = tl.program_id(0)
    at = program * R * C + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]  # [R, C]
    here = tl.load(x + at)
    number = tl.load(n + at)
    total = tl.reduce(here, AXIS, _add_twice, KEEP)
    if AXIS is None:  # of one tensor only
        to = tl.zeros([1, 1], tl.int32) if KEEP else 0
    elif KEEP:
        to = tl.arange(0, C)[None, :] if AXIS == 0 else tl.arange(0, R)[:, None]
    else:
        to = tl.arange(0, C if AXIS == 0 else R)
    to += program * 3 * R * C
    tl.store(out + to, total)
    if AXIS is not None:
        best, where = tl.reduce((here, number), AXIS, _greatest_last, KEEP)
        tl.store(out + R * C + to, best)
        tl.store(out + 2 * R * C + to, where.to(here.dtype))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("shape", [(4, 8), (1, 4), (2, 1)], ids=str)
def test_reduced_rows(shape, axis, keep):
    def reduced():
        for dtype in TORCH:
            x = values(dtype, 2, *shape)
            numbers = torch.arange(x.numel(), dtype=torch.int32).view_as(x) % 5
            named = {"R": shape[0], "C": shape[1], "AXIS": axis, "KEEP": keep}
            yield run(_reduce_kernel, x, numbers, x.new_zeros(3 * x.numel()), **named)

    assert_same([in_interpreter.reduced_rows], lambda: list(reduced()))


def test_known_tensor_shapes():
    def made():
        tensors = [block(dtype, shape, n) for dtype in DTYPES for n, shape in enumerate(SHAPES)]
        kinds = [{name: type(value) for name, value in vars(x).items()} for x in tensors]
        return list(map(bits, tensors)), kinds, [[type(s) for s in x.shape] for x in tensors]

    assert_same([in_interpreter.known_tensor_shapes], made)


def test_known_block_shapes():
    lengths = [list(shape) for shape in SHAPES if shape]
    given = [*lengths, *map(tuple, lengths), [tl.constexpr(4), 2], tl.tuple([2, 4]), [2, tl.constexpr(4)]]
    refused = ([], [3], [2, 6], [-2])

    def made():
        for dtype, shape in itertools.product((*DTYPES, *POINTERS), (*given, *refused)):
            try:
                x = tl.block_type(dtype, shape)
            except Exception as error:
                yield type(error).__name__
                continue
            assert all(type(length) is int for length in x.shape)
            yield x.element_ty.name, tuple(x.shape), type(x.shape), x.numel, x.name, str(x), sorted(vars(x))

    assert_same([in_interpreter.known_block_shapes], lambda: list(made()))


def test_blocks_as_they_are():
    def types():
        scope = interpreter._patch_lang(_plus.fn)  # as in a launch
        try:
            made = [tl.block_type(dtype, [4, 2]).to_ir(interpreter.interpreter_builder) for dtype in DTYPES]
        finally:
            scope.restore()
        return [(x.name, x.element_ty, x.shape, x.numel) for x in made]

    assert_same([in_interpreter.blocks_as_they_are], types)


def test_same_dtypes():
    others = (None, 1, "fp32", torch.float32, tl.dtype("fp32"), tl.dtype("int1"), tl.block_type(tl.int32, [4]))
    pairs = list(itertools.product((*DTYPES, *POINTERS, tl.dtype("fp32")), (*DTYPES, *POINTERS, *others)))
    assert_same([in_interpreter.same_dtypes], lambda: [(x == y, x != y, y == x) for x, y in pairs])


@pytest.mark.parametrize(
    ("name", "patch", "flags"),
    [
        ("broadcast_impl_value", in_interpreter.alike_broadcast, ((),)),
        (
            "binary_op_type_checking_impl",
            in_interpreter.alike_operands,
            ((), (True, True), (False, False, False), (False, False, True, True)),
        ),
    ],
)
def test_alike_operands(name, patch, flags):
    generator = random.Random(0)
    kinds = list(itertools.product(DTYPES, SHAPES))
    pairs = [(*generator.choice(kinds), *generator.choice(kinds)) for _ in range(150)]
    pairs += [(*kind, *kind) for kind in kinds]

    def operands():
        scope = interpreter._patch_lang(_plus.fn)
        semantic = interpreter.interpreter_semantic
        try:
            for n, (dtype, shape, other, other_shape) in enumerate(pairs):
                x, y = block(dtype, shape, n), block(other, other_shape, n + 1)
                with np.errstate(all="ignore"):
                    yield [outcome(getattr(semantic, name), x, y, *flag) for flag in flags]
                    if len(flags) > 1:
                        yield outcome(getattr(semantic, name), x, y, div_or_mod=True)
                        yield [outcome(getattr(semantic, name), *both) for both in ((x, 1), (2.5, x), (True, x))]
        finally:
            scope.restore()

    shaped = in_interpreter.known_tensor_shapes  # without it no two shapes are the same object
    assert_same([shaped, patch], lambda: list(operands()))


def test_known_constants():
    numbers = (0, 1, -1, 7, 255, 2**31, 2**40, True, False, 0.0, -0.0, 1.0, 0.1, -2.5, 1e-45, 1e300)
    numbers += (float("nan"), float("inf"), -float("inf"))

    def constants():
        semantic = interpreter.interpreter_semantic
        with np.errstate(all="ignore"):
            for dtype, number in itertools.product(DTYPES, numbers):
                yield outcome(lambda n, dtype=dtype: [semantic.scalar_constant(n, dtype)], number)

    assert_same([in_interpreter.known_constants], lambda: list(constants()))


@triton.jit
def _whole_numbers_kernel(x, y, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    one = tl.load(x + at)
    other = tl.load(y + at)
    tl.store(out + at, (one + other) * one - other * 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_no_overflow_checks(dtype):
    """Also where numbers wrap around."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (2, 2 * 16 * dtype.itemsize), generator=generator, dtype=torch.uint8)
    x, y = data.view(dtype).unbind()

    def computed():
        with np.errstate(all="ignore"):
            return run(_whole_numbers_kernel, x, y, x, N=16)

    assert_same([in_interpreter.no_overflow_checks], computed)


def test_no_overflow_checks_leaves_other_options():
    def options():
        found = dataclasses.asdict(interpreter.interpreter_builder.options)
        return {name: value for name, value in found.items() if name != "sanitize_overflow"}

    assert_same([in_interpreter.no_overflow_checks], options)


@pytest.mark.parametrize("grid", [(19,), (4, 5)], ids=str)
def test_large_blocks(grid):
    """The same bits by fewer programs."""
    q, k, v = torch.randn(3, 1, 1, *grid, 5).unbind()
    programs = []

    def attended():
        launch.clear_caches()
        programs.append(block_sizes.attend_tile(len(grid), (5, 5), (q.dtype, v.dtype))["B"].BLOCK_Q)
        search = scram.Search("query", matches=2, sweeps=1, seed=0)
        found = scram.search(q, k, search=search, impl="triton")
        leaf = q.clone().requires_grad_()
        out, lse = scram.attend(leaf, k, v, found, impl="triton")
        grad = torch.autograd.grad(out.sum(), leaf)[0]
        return [x.detach().numpy().tobytes() for x in (found.index, found.score, out, lse, grad)]

    others = [patch for patch in in_interpreter.PATCHES if patch is not in_interpreter.large_blocks]
    with applied(*others):
        assert_same([in_interpreter.large_blocks], attended)
    assert programs[0] < programs[1] == programs[2] == in_interpreter.LEAST_QUERIES


def test_every_patch_has_its_test():
    names = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tested = {patch.__name__ for patch in in_interpreter.PATCHES} - {"alike_broadcast"}  # a case of alike_operands
    assert tested <= names
