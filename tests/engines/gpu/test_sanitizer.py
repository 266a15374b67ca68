"""Every kernel on a small case under compute-sanitizer: no read or write outside memory, no race in shared memory."""

import shutil
import sys
from pathlib import Path

import pytest

from support.processes import run_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
    pytest.mark.timeout(580),
]

CALLS = """
import torch, scram
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, *grid, 20, device="cuda").to(torch.bfloat16) for grid in ((9, 11), (7, 10), (7, 10)))
extra = tuple(torch.randn(1, 2, 3, 20, device="cuda").to(torch.bfloat16) for _ in range(2))
mask = torch.rand(1, 7, 10, device="cuda") > 0.2
leaves = [x.requires_grad_() for x in (q, k, v)]
for method, matches in (("query", 1), ("query", 3), ("tile", 1), ("tile", 3)):
    search = scram.Search(method, matches=matches, separation=1, sweeps=2, seed=0)
    found = scram.search(q, k, search=search, key_mask=mask, impl="triton")
    for repeatable in (False, True):
        torch.use_deterministic_algorithms(repeatable)
        how = {"key_mask": mask, "extra": extra, "dropout_p": 0.1, "impl": "triton"}
        out, lse = scram.attend(q, k, v, found, **how)
        torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
# float32 in halves; features and values in unlike numbers of pieces.
for width, values, dtype in ((64, 192, torch.bfloat16), (130, 16, torch.bfloat16), (64, 128, torch.float32)):
    wide = [torch.randn(1, 1, 9, 9, n, device="cuda").to(dtype).requires_grad_() for n in (width, width, values)]
    search = scram.Search("tile", matches=12, sweeps=2, seed=0)
    for repeatable in (False, True):
        torch.use_deterministic_algorithms(repeatable)
        out = scram.attention(*wide, search=search, impl="triton")
        torch.autograd.grad(out.float().sum(), wide)
for estimator in (scram.DrawnKeys(samples=40), scram.Snis(samples=8), scram.MetropolisHastings(samples=8)):
    made = scram.estimate(q, k, v, found, method=estimator, key_mask=mask, impl="triton")
    torch.autograd.grad(made.out.float().sum(), leaves)
how = {"key_mask": mask, "extra": extra, "dropout_p": 0.1, "impl": "triton"}
out, lse = scram.attend(q, k, v, found, tail=scram.DrawnKeys(samples=40), **how)
torch.autograd.grad(out.float().sum() + lse.sum(), leaves)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool):
    source = Path(__file__).resolve().parents[3] / "src"
    environment = {"PYTHONPATH": str(source), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CALLS)
    assert "done" in run_program(*command, environment=environment, timeout=None).stdout
