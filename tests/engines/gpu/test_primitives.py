"""What the kernels share: the step of the online softmax, the join by lse, division without division."""

import math

import pytest
import torch
import triton
import triton.language as tl

from scram.engines.gpu.primitives import LOWEST, all_finite, divide, finite, join_lse, magic, softmax_step

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]

QUERIES = 16
KEYS = 64
BLOCK = 16


@triton.jit
def softmax_kernel(
    scores,
    out,
    scale,
    N: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    POWER: tl.constexpr,
    FROM_INF: tl.constexpr,
    AXIS: tl.constexpr,
):
    """The maximum and the sum of scores [N, M], a block of keys at a time: out [2, N]."""
    row = tl.arange(0, N)  # [N]
    running_max = tl.full([N], -float("inf") if FROM_INF else LOWEST, tl.float32)  # [N]
    running_sum = tl.zeros([N], tl.float32)  # [N]
    step: tl.constexpr = 1 if AXIS is None else BLOCK
    for begin in range(0, M, step):
        if AXIS is None:
            s = tl.load(scores + row * M + begin)  # [N]
        elif AXIS == 1:
            s = tl.load(scores + row[:, None] * M + begin + tl.arange(0, BLOCK)[None, :])  # [N, BLOCK]
        else:
            s = tl.load(scores + row[None, :] * M + begin + tl.arange(0, BLOCK)[:, None])  # [BLOCK, N]
        running_max, rescale, p = softmax_step(running_max, s, scale, POWER, FROM_INF, AXIS)
        running_sum = running_sum * rescale + (p if AXIS is None else tl.sum(p, AXIS))
    tl.store(out + row, running_max)
    tl.store(out + N + row, running_sum)


def drawn_scores():
    """Scores [N, M] of which the maximum comes early, late, and among keys that do not count; one row has none."""
    scores = 20 * torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(0))
    scores[0] = -torch.inf
    scores[1, :40] = -torch.inf
    scores[2, 10:] = -torch.inf
    scores[3, 60] = 300.0
    return scores


def online_lse(scores, scale, device, **settings):
    out = torch.empty(2, QUERIES, device=device)
    softmax_kernel[(1,)](scores.to(device), out, scale, N=QUERIES, M=KEYS, BLOCK=BLOCK, **settings)
    running_max, running_sum = out.cpu().double()
    unit = math.log(2) if settings["POWER"] == "exp2" else 1.0
    return running_max * unit + running_sum.log()


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize(
    ("power", "scale"), [("exp", None), ("powers", None), ("powers", 0.5), ("exp2", 1 / math.log(2))]
)
def test_the_online_softmax_is_that_of_torch(power, scale, axis, device):
    scores = drawn_scores()
    found = online_lse(scores, scale, device, POWER=power, FROM_INF=True, AXIS=axis)
    wanted = (scores.double() * (scale if power == "powers" and scale else 1.0)).logsumexp(1)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_the_online_softmax_from_a_lowest_score(device):
    scores = drawn_scores()
    found = online_lse(scores, None, device, POWER="powers", FROM_INF=False, AXIS=1)
    torch.testing.assert_close(found, scores.double().logsumexp(1), rtol=1e-6, atol=1e-6)


@triton.jit
def join_kernel(top, total, offset, near_lse, out, N: tl.constexpr):
    """out [4, N]: what `join_lse` returns."""
    i = tl.arange(0, N)
    running_sum = tl.load(total + i)
    factor, near_factor, base, norm = join_lse(
        tl.load(top + i), running_sum, running_sum > 0, tl.load(offset + i), tl.load(near_lse + i)
    )
    tl.store(out + i, factor)
    tl.store(out + N + i, near_factor)
    tl.store(out + 2 * N + i, base)
    tl.store(out + 3 * N + i, norm)


def test_a_tail_and_the_windows_share_one_softmax(device):
    """Both, either, none; scores so large that a float32 has no digits left for the log of a sum."""
    top = torch.tensor([3.0, 1e7, -1e38, -1e38, 5.0, 2.0, -2.0, 0.0])
    total = torch.tensor([2.0, 4.0, 0.0, 0.0, 1.5, 7.0, 1.0, 1.0])
    offset = torch.tensor([0.5, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 1.0])
    near_lse = torch.tensor([4.0, 1e7, 2.0, -torch.inf, -torch.inf, 60.0, -3.0, 0.0])
    out = torch.empty(4, 8, device=device)
    join_kernel[(1,)](*(x.to(device) for x in (top, total, offset, near_lse)), out, N=8)
    factor, near_factor, base, norm = out.cpu().double()
    has_keys = total > 0
    tail = torch.where(has_keys, top.double() + total.double().log() + offset, -torch.inf)
    lse = torch.logaddexp(tail, near_lse.double())
    some = lse > -torch.inf
    assert torch.equal(base, torch.where(has_keys, top, 0).double())
    torch.testing.assert_close((norm * math.log(2))[some], (lse - base)[some], rtol=1e-6, atol=1e-6)
    assert (norm[~some] == -torch.inf).all()
    wanted = torch.where(has_keys, (top + offset - lse).exp(), 0)
    torch.testing.assert_close(factor, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(near_factor[some], (near_lse - lse).exp()[some], rtol=1e-6, atol=1e-6)


@triton.jit
def divide_kernel(n, out, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, divide(tl.load(n + i), factor))


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 512, 513, 65537, 2**31 - 1])
def test_division_by_a_product(divisor, device):
    n = torch.tensor([0, 1, divisor - 1, divisor, 2 * divisor - 1, 10**9 + 7, 2**31 - 2, 2**31 - 1]).clamp(
        max=2**31 - 1
    )
    out = torch.empty(8, dtype=torch.int32, device=device)
    divide_kernel[(1,)](n.int().to(device), out, magic(divisor), BLOCK=8)
    assert torch.equal(out.cpu().long(), n // divisor)


@triton.jit
def finite_kernel(x, zeroed, whole, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    block = tl.load(x + i)
    tl.store(zeroed + i, finite(block))
    tl.store(whole + tl.arange(0, N), all_finite((block, block)).to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_is_zero(dtype, device):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 1] = torch.inf
    x[1, 2] = -torch.inf
    x[3, 0] = torch.nan
    zeroed = torch.empty_like(x, device=device)
    whole = torch.empty(4, dtype=torch.int32, device=device)
    finite_kernel[(1,)](x.to(device), zeroed, whole, N=4)
    assert torch.equal(zeroed.cpu(), torch.where(x.isfinite(), x, 0))
    assert whole.tolist() == [0, 0, 1, 0]
