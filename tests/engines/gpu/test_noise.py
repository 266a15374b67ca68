"""The noise in a kernel is that of torch."""

import pytest
import torch
import triton
import triton.language as tl

from scram.engines.gpu.noise import absorb, row_state, seed_argument
from scram.spec.noise import noise

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]


@triton.jit
def noise_kernel(out, seed, row, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, absorb(row_state(seed, row), i).to(tl.int64))


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_noise_is_that_of_torch(seed, device):
    out = torch.empty(16, dtype=torch.int64, device=device)
    noise_kernel[(1,)](out, seed_argument(torch.tensor(seed), None), 5, N=16)
    assert torch.equal(out.cpu(), noise(seed, 5, torch.arange(16)))


def test_noise_is_keyed_by_the_number_of_the_row(device):
    out, rows = torch.empty(16, dtype=torch.int64, device=device), torch.arange(40, 48, device=device).reshape(2, 4)
    noise_kernel[(1,)](out, seed_argument(torch.tensor(7), rows), 5, N=16)
    assert torch.equal(out.cpu(), noise(7, 45, torch.arange(16)))
