"""How kernels are launched: what is known goes straight to its compiled code. No GPU is needed to see that."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from scram.engines.gpu import launch


class Code:
    """Compiled code that tells what it was launched with, and by which way."""

    function, packed_metadata = 11, (22,)

    def __init__(self, told):
        self.told = told

    def run(self, *arguments):
        self.told.append(("direct", *arguments))

    def __getitem__(self, grid):
        return lambda *arguments: self.told.append(("by Triton", grid, *arguments))


class Jit:
    """Stands for a kernel: `jit[grid](...)` compiles."""

    arg_names = ("x", "mask", "n", "TILE")

    def __init__(self, told):
        self.told = told

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **flags):
            self.told.append("compiled")
            return Code(self.told)

        return compile_and_launch


@pytest.fixture
def told(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: 33)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_compiled", {})
    return []


def test_a_known_variant_goes_straight_to_its_code(told):
    jit, x = Jit(told), torch.zeros(8)
    kernel = launch.Kernel(jit, 5, {"TILE": 16, "num_warps": 1})
    kernel(x, None, 7)
    kernel(x, None, 8)
    bound = kernel.bind(x, None)
    bound(9)
    start = ("direct", 5, 1, 1, 33, 11, (22,), None, None, None, x.data_ptr(), None)
    assert told == ["compiled", (*start, 8, 16), (*start, 9, 16)]


def test_a_new_number_of_programs_compiles_nothing(told):
    jit, x = Jit(told), torch.zeros(8)
    for programs in (5, 6):
        launch.Kernel(jit, programs, {"TILE": 16})(x, None, 7)
    assert told == ["compiled", ("by Triton", (6, 1, 1), x, None, 7, 16)]


@pytest.mark.parametrize(
    "other",
    [(torch.zeros(8, dtype=torch.float16), None), (torch.zeros(8)[1:], None), (torch.zeros(8), torch.zeros(8))],
    ids=["dtype", "alignment", "a pointer more"],
)
def test_arguments_of_another_kind_are_another_variant(told, other):
    jit = Jit(told)
    launch.Kernel(jit, 5, {"TILE": 16})(torch.zeros(8), None, 7)
    launch.Kernel(jit, 5, {"TILE": 16})(*other, 7)
    assert told == ["compiled", "compiled"]


def test_other_flags_are_another_variant(told):
    jit = Jit(told)
    for tile in (16, 32):
        launch.Kernel(jit, 5, {"TILE": tile})(torch.zeros(8), None, 7)
    assert told == ["compiled", "compiled"]


def test_whoever_watches_launches_sees_them(told, monkeypatch):
    jit, x = Jit(told), torch.zeros(8)
    kernel = launch.Kernel(jit, 5, {"TILE": 16})
    kernel(x, None, 7)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    kernel(x, None, 8)
    assert told[1:] == [("by Triton", (5, 1, 1), x, None, 8, 16)]


def test_interpreted_kernels_are_launched_every_time(told):
    class Interpreted(Jit):
        def __getitem__(self, grid):
            return lambda *arguments, **flags: self.told.append(arguments[-1])

    kernel = launch.Kernel(Interpreted(told), 5, {"TILE": 16})
    bound = kernel.bind(torch.zeros(8), None)
    bound(1)
    bound(2)
    assert told == [1, 2]
