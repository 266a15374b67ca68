"""How kernels are launched: what is known goes straight to its compiled code. No GPU is needed to see that."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher

from scram._compat import triton as compat
from scram.engines.gpu.runtime import launch

WIDE = 2**31  # the first int that Triton types as int64


class Code:
    """Compiled code that records what it was launched with, and by which way."""

    function, packed_metadata = 11, (22,)

    def __init__(self, log):
        self.log = log

    def run(self, *arguments):
        self.log.append(("direct", *arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("by Triton", grid, *arguments))


class Jit:
    """Stands for a kernel: `warmup` compiles, `jit[grid](...)` compiles and launches."""

    arg_names = ("x", "mask", "n", "TILE")

    def __init__(self, log):
        self.log = log

    def warmup(self, *arguments, grid, **flags):
        self.log.append(("compiled", *arguments[2:]))
        return Code(self.log)

    def __getitem__(self, grid):
        return lambda *arguments, **flags: self.log.append(("public", grid, *arguments, flags))


class Pair(NamedTuple):
    tensor: Any
    number: Any


@pytest.fixture
def log(monkeypatch):
    active = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 33, launcher_cls=CudaLauncher
    )
    monkeypatch.setattr(compat, "driver", SimpleNamespace(active=active))
    launch.clear_caches()
    yield []
    launch.clear_caches()


def kernel_of(log, programs=5, tile=16):
    return launch.Kernel(Jit(log), programs, {"TILE": tile, "num_warps": 1})


def direct(*arguments):
    return ("direct", 5, 1, 1, 33, 11, (22,), None, None, None, *arguments, 16)


def test_triton_launches_as_it_did(log):
    """Of the version installed. If this fails, launches are slower: see `_compat.triton`."""
    assert compat.launches_directly()


def test_a_known_variant_goes_straight_to_its_code(log):
    """From the third launch of a kernel on."""
    kernel, x = kernel_of(log), torch.zeros(8)
    for number in (6, 7, 8):
        kernel(x, None, number)
    bound = kernel.bind(x, None)
    bound(9)
    compiled = [("compiled", 3), *(("by Triton", (5, 1, 1), x, None, number, 16) for number in (6, 7))]
    assert log == [*compiled, direct(x.data_ptr(), None, 8), direct(x.data_ptr(), None, 9)]


def test_tensors_in_tuples_go_by_their_addresses(log):
    kernel, x, y = kernel_of(log), torch.zeros(8), torch.zeros(8)
    for number in (0, 1, 2):
        kernel(Pair(x, (y, number)), None, number + 6)
    kernel.bind(Pair(y, (x, 3)))(None, 9)
    assert log[3:] == [
        direct((x.data_ptr(), (y.data_ptr(), 2)), None, 8),
        direct((y.data_ptr(), (x.data_ptr(), 3)), None, 9),
    ]


def test_no_number_is_compiled_in(log):
    """Triton specialises on 1 and on multiples of 16, in tuples always: it is shown neither."""
    kernel_of(log)(torch.zeros(8), None, Pair(None, (1, 16, 7, WIDE, 2**40, -WIDE)))
    assert log[0] == ("compiled", Pair(None, (3, 3, 3, WIDE + 1, WIDE + 1, 3)))
    kernel_of(log)(torch.zeros(8), None, True)
    assert log[2] == ("compiled", True)


@pytest.mark.parametrize("nested", [False, True])
def test_a_wider_int_is_another_variant(log, nested):
    """Else it would be cut to 32 bits: the code that is known takes no more."""
    wrap = (lambda n: Pair(None, (0, n))) if nested else int
    jit, x = Jit(log), torch.zeros(8)
    for n in (7, WIDE, 8, -WIDE - 1):
        launch.Kernel(jit, 5, {"TILE": 16})(x, None, wrap(n))
    assert [entry[0] for entry in log] == ["compiled", "by Triton", "compiled", "by Triton", "by Triton", "by Triton"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_wider_int_in_a_kernel_that_is_known(log, nested):
    wrap = (lambda n: Pair(None, (0, n))) if nested else int
    kernel, x = kernel_of(log), torch.zeros(8)
    kernel(x, None, wrap(7))
    kernel(x, None, wrap(WIDE))
    assert [entry[0] for entry in log] == ["compiled", "by Triton"] * 2
    kernel(x, None, wrap(WIDE + 1))
    kernel(x, None, wrap(WIDE + 2))
    assert [entry[0] for entry in log[4:]] == ["by Triton", "direct"]
    kernel(x, None, wrap(6))
    assert log[-1][0] == "by Triton"


@pytest.mark.parametrize("first", [True, False], ids=["first", "rest"])
def test_a_wider_int_in_a_bound_kernel(log, first):
    kernel, x = kernel_of(log), torch.zeros(8)
    kernel(x, None, 7)
    if first:
        kernel.bind(x, None, WIDE)()
    else:
        kernel.bind(x, None)(WIDE)
    assert log[2:] == [("compiled", WIDE + 1), ("by Triton", (5, 1, 1), x, None, WIDE, 16)]


def test_a_new_number_of_programs_compiles_nothing(log):
    jit, x = Jit(log), torch.zeros(8)
    for programs in (5, 6):
        launch.Kernel(jit, programs, {"TILE": 16})(x, None, 7)
    assert log[1:] == [("by Triton", (programs, 1, 1), x, None, 7, 16) for programs in (5, 6)]


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(8, dtype=torch.float16), None),
        (torch.zeros(8)[1:], None),
        (torch.zeros(8), torch.zeros(8)),
        (torch.zeros(8), Pair(None, torch.zeros(8))),
        (torch.zeros(8), Pair(None, torch.zeros(8)[1:])),
    ],
    ids=["dtype", "alignment", "a pointer more", "a tuple", "alignment in a tuple"],
)
def test_arguments_of_another_kind_are_another_variant(log, other):
    jit = Jit(log)
    for arguments in ((torch.zeros(8), None), (torch.zeros(8), Pair(torch.zeros(8), None)), other, other):
        launch.Kernel(jit, 5, {"TILE": 16})(*arguments, 7)
    assert [entry[0] for entry in log].count("compiled") == 3


def test_other_flags_are_another_variant(log):
    jit = Jit(log)
    for tile in (16, 32):
        launch.Kernel(jit, 5, {"TILE": tile})(torch.zeros(8), None, 7)
    assert [entry[0] for entry in log].count("compiled") == 2


def test_hooks_see_every_launch(log, monkeypatch):
    kernel, x = kernel_of(log), torch.zeros(8)
    kernel(x, None, 7)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    kernel(x, None, 8)
    kernel.bind(x)(None, 9)
    assert log[2:] == [("by Triton", (5, 1, 1), x, None, n, 16) for n in (8, 9)]


class Renamed:
    def __call__(self, gridX, gridY, gridZ, stream, kernel, *args):
        """A launcher as it may be one day."""


@pytest.mark.parametrize("lost", ["launcher", "stream", "hooks", "device"])
def test_where_triton_launches_otherwise_kernels_go_the_public_way(log, lost, monkeypatch):
    if lost == "launcher":
        compat.driver.active.launcher_cls = Renamed
    elif lost == "stream":
        del compat.driver.active.get_current_stream
    elif lost == "hooks":
        monkeypatch.setattr(compat, "knobs", SimpleNamespace(runtime=SimpleNamespace()))
    else:
        monkeypatch.setattr(compat, "driver", SimpleNamespace())
    kernel, x = kernel_of(log), torch.zeros(8)
    kernel(x, None, 1)
    kernel.bind(x)(None, WIDE)
    flags = {"TILE": 16, "num_warps": 1}
    assert log == [("public", (5,), x, None, n, flags) for n in (1, WIDE)]


def test_interpreted_kernels_are_launched_every_time(log):
    class Interpreted(Jit):
        def warmup(self, *arguments, grid, **flags):
            """The interpreter compiles nothing."""

        def __getitem__(self, grid):
            return lambda *arguments, **flags: self.log.append(arguments[-1])

    kernel = launch.Kernel(Interpreted(log), 5, {"TILE": 16})
    bound = kernel.bind(torch.zeros(8), None)
    bound(1)
    bound(2)
    assert log == [1, 2]


def test_all_caches_are_emptied(log):
    @launch.cached
    def square(n):
        log.append(n)
        return n * n

    jit = Jit(log)
    for _ in range(2):
        assert square(3) == 9
        launch.Kernel(jit, 5, {"TILE": 16})(torch.zeros(8), None, 7)
    assert log.count(3) == 1
    assert launch._compiled
    launch.clear_caches()
    assert not launch._compiled
    square(3)
    assert log.count(3) == 2
    launch._caches.pop()
