"""The Triton engine on the CPU, in Triton's interpreter: each query on its own."""

import pytest
import torch

import in_interpreter
import scram
from cases import assert_attended_as_near_float64, make_tensors, named, run_attend, run_search
from in_interpreter import INTERPRETED, interpreted, passes_in_the_interpreter, starts

FIELDS = [
    "rank 1",
    "rank 3",
    "rank 4",
    "unequal grids",
    "runs without a key",
    "separated",
    "causal, masked, separated",
    "one row fully masked",
    "one key head",
    "width 3, values 60",  # padded keys
    "width 60, values 1",
    "the paper",
    "stay",
    "turns",
    "no jumps",
    "warm with fewer",
    "bfloat16",
    "empty batch",
]
WINDOWS = [
    "rank 1",
    "rank 3",
    "radius per axis",
    "causal, masked, separated",
    "width 3, values 60",
    "strided",
    "float16",
    "l2",  # bfloat16 on a device only: the interpreter cuts it instead of rounding
    "large common scores",
    "mean",
    "relu",
    "extra and a masked row",
    "dropout",
    "empty batch",
]

if INTERPRETED:
    import triton
    import triton.language as tl

    from scram.engines.gpu.noise import absorb, row_state, seed_argument

    @triton.jit
    def noise_kernel(out, seed, row, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, absorb(row_state(seed, row), i).to(tl.int64))


@starts
def test_in_the_interpreter():
    assert passes_in_the_interpreter(__file__) == len(FIELDS) + 2 * len(WINDOWS) + 18


@interpreted
@pytest.mark.parametrize("name", FIELDS)
def test_field_is_that_of_the_reference(name, launched):
    case = named(name)
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)
    assert launched.count("sweep_kernel") == (case.kappa * case.sweeps if case.batch else 0)
    assert launched.count("start_kernel") == (case.kappa if case.batch else 0)


@interpreted
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_attend_is_as_near_float64_as_the_reference(name, repeatable, launched, monkeypatch):
    from scram.engines.gpu import attend_keys

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    monkeypatch.setattr(attend_keys, "LEAST_SHARE", 20)  # few, so that there may be shares beyond the first
    case = named(name)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")
    kernels = ["share_kernel", "collect_kernel", "collect_kernel"] if repeatable else []
    assert launched == (["attend_kernel", "backward_kernel", *kernels] if case.batch else [])


@interpreted
def test_repeatable_gradients_of_a_key_that_all_queries_want(monkeypatch):
    from scram.engines.gpu import attend_keys

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(attend_keys, "LEAST_SHARE", 5)
    case = named("rank 2", grid=(8, 8), key_grid=(20, 20), kappa=2, sweeps=1)
    tensors = make_tensors(case)
    tensors.matches.index[..., 0] = 131
    tensors.matches.index[..., ::2, :, 1] = 170  # half of them another one, near enough that windows overlap
    assert_attended_as_near_float64(case, tensors, "triton")


@interpreted
def test_the_real_tiles_cover_a_grid_that_they_do_not_divide(monkeypatch):
    monkeypatch.setattr(in_interpreter, "LEAST_QUERIES", 1)
    case = named("rank 2", grid=(9, 17), kappa=1, sweeps=1, gossip=0, propagate="shift")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)


@interpreted
def test_nan_reaches_no_other_query():
    case = named("rank 2", kappa=1)
    tensors = make_tensors(case, integer=True)
    tensors.q[0, 0, 1, 1] = torch.nan
    tensors.k[0, 0, 4, 4, 0] = torch.nan
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)
    ours, theirs = (run_attend(case, tensors, tensors.leaves(torch.float32), impl) for impl in ("triton", "reference"))
    assert torch.equal(ours.out.isnan(), theirs.out.isnan())
    assert torch.equal(ours.lse.isnan(), theirs.lse.isnan())


@interpreted
@pytest.mark.parametrize(("weight", "dropout_p"), [("softmax", 0.5), ("mean", 0.5), ("relu", 0.0), ("relu", 0.5)])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_nan_reaches_the_gradients_that_it_reaches_in_the_reference(which, weight, dropout_p):
    tensors = make_tensors(named("rank 2"))
    given = [x.float() for x in (tensors.q, tensors.k, tensors.v)]
    given[which][0, 0, 1, 1] = torch.nan
    found = scram.search(tensors.q, tensors.k, search=scram.Search(seed=0), impl="reference")
    grads = []
    for impl in ("triton", "reference"):
        torch.manual_seed(0)  # the same weights are dropped
        leaves = [x.clone().requires_grad_() for x in given]
        out, lse = scram.attend(*leaves, found, weight=weight, dropout_p=dropout_p, impl=impl)
        grads.append(torch.autograd.grad(out.sum() + lse.sum(), leaves))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_noise_is_that_of_torch(seed):
    from scram.noise import noise

    out = torch.empty(16, dtype=torch.int64)
    noise_kernel[(1,)](out, seed_argument(torch.tensor(seed)), 5, N=16)
    assert torch.equal(out, noise(seed, 5, torch.arange(16)))
