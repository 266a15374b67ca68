"""Every kernel variant that a launcher can choose compiles for sm_80 and sm_90; no GPU is needed for that.

The launchers run as they are, on CPU tensors; what they would launch is compiled instead.
"""

import sys

import pytest
import torch

from cases import Case, gradients, make_tensors, run_attend, run_search
from estimates import CELLS, HYBRID, SNIS, WALKS, Estimated, run_estimate, tensors_of

triton = pytest.importorskip("triton")

from scram import pick  # noqa: E402
from scram.gpu import launch, sample  # noqa: E402

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
CASES = [
    Case("rank 1", grid=(8,), width=64, value_width=64, dtype=torch.bfloat16),
    Case("rank 2", width=3, value_width=3, kappa=1, propagate="shift", gossip=0),
    Case("rank 3", grid=(2, 3, 4), width=128, value_width=60, dtype=torch.float16, propagate="turns", warm=1),
    Case("rank 4", grid=(2, 2, 2, 2), width=5, mask="head", heads=2, separation=1, extra=1, dropout_p=0.5),
    Case("causal", width=64, value_width=64, causal=True, weight="relu", propagate="stay"),
]


ON = [(case, 90) for case in CASES] + [(case, 80) for case in CASES[:2]]


@pytest.mark.parametrize(("case", "architecture"), ON, ids=str)
def test_compiles(case, architecture, monkeypatch):
    compiled = []

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        assert _compile(self.kernel, arguments, self.flags, architecture).asm["cubin"]

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    triton_first = [pick.Implementation("triton", lambda request: []), *pick.IMPLEMENTATIONS[1:]]
    monkeypatch.setattr(pick, "IMPLEMENTATIONS", triton_first)
    tensors = make_tensors(case)
    run_search(case, tensors, "triton")
    for repeatable in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=repeatable: asked)
        leaves = tensors.leaves(case.dtype)
        gradients(run_attend(case, tensors, leaves, "triton"), leaves)
    wanted = {"start_kernel", "sweep_kernel", "attend_kernel", "backward_kernel", "collect_kernel"}
    wanted |= {"sort_kernel"} if case.kappa > 1 else set()
    wanted |= {"pad_kernel"} if case.width in (3, 5) else set()
    assert set(compiled) == wanted


_seen = {}


def _compile(kernel, arguments, flags, architecture):
    """What `kernel[grid](*arguments, **flags)` would compile."""
    names = kernel.arg_names
    constants = dict(zip(names, arguments, strict=False)) | flags
    signature, attributes, values = {}, {}, {}
    for n, name in enumerate(names):
        value = constants[name]
        if value is None or n >= len(arguments):
            signature[name], values[(n,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(n,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "u1"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if value.bit_length() > 31 else "i32"
    options = {name: value for name, value in flags.items() if name not in names}
    key = (id(kernel), architecture, str(signature), str(values), str(options))
    if key not in _seen:
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
        target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
        _seen[key] = triton.compile(source, target=target, options=options)
    return _seen[key]


ESTIMATED = [
    (Estimated(Case("rank 2", width=64, value_width=64, dtype=torch.bfloat16), HYBRID), "tail"),
    (Estimated(Case("rank 1", grid=(8,), width=5, causal=True, mask="head", heads=2), CELLS), "tail"),
    (Estimated(Case("rank 3", grid=(2, 2, 2), width=64, dtype=torch.float16, mask="batch", causal=True), SNIS), "draw"),
    (Estimated(Case("rank 2", width=32, value_width=32, mask="batch", causal=True), WALKS), "walk"),
]


@pytest.mark.parametrize(("one", "first"), ESTIMATED, ids=str)
def test_estimators_compile(one, first, monkeypatch):
    compiled = []

    def compile_only(self, *arguments):
        compiled.append(self.kernel.fn.__name__)
        assert _compile(self.kernel, arguments, self.flags, 90).asm["cubin"]

    monkeypatch.setattr(launch.Kernel, "__call__", compile_only)
    triton_first = [pick.Implementation("triton", lambda request: []), *pick.IMPLEMENTATIONS[1:]]
    monkeypatch.setattr(pick, "IMPLEMENTATIONS", triton_first)
    monkeypatch.setattr(sys.modules[sample.__module__], "_collect", lambda *_: None)  # no keys were written
    for repeatable in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda asked=repeatable: asked)
        tensors = tensors_of(one)
        leaves = tensors.leaves(one.case.dtype)
        made = run_estimate(one, tensors, leaves, "triton")
        torch.autograd.grad(made.out.sum(), leaves)
    wanted = (
        {"rank_kernel", "queries_kernel", "keys_kernel"}
        if first == "tail"
        else {"visit_kernel", "visit_backward_kernel"}
    )
    assert set(compiled) - {"attend_kernel", "backward_kernel", "collect_kernel"} == wanted | {f"{first}_kernel"}
