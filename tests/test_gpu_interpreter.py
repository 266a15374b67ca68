"""The Triton engine on the CPU, in Triton's interpreter. TRITON_INTERPRET is read when triton is imported, so this file
runs itself in a process of its own."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch

import scram
from cases import assert_as_near_float64, gradients, make_tensors, named, run_attend, run_search

LANES = 128
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")

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
TILES = [
    "rank 1",
    "rank 3",
    "rank 4",
    "unequal grids",
    "more matches than keys",
    "separated",
    "causal, masked, separated",
    "one row fully masked",
    "width 60, values 1",
    "the paper",
    "turns",
    "no sweeps",
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
TILE_WINDOWS = [
    "rank 1",
    "rank 3",
    "rank 4",
    "unequal grids",
    "one key",
    "radius per axis",
    "radius 0, kappa 1",
    "radius over the grid",
    "causal, masked, separated",
    "one key head",
    "width 3, values 60",
    "strided",
    "float16",
    "bfloat16",
    "l2",
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

    from scram.gpu.noise import absorb, row_state, seed_arguments

    @triton.jit
    def noise_kernel(out, SEED, low, high, row, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, absorb(row_state(SEED, low, high, row), i).to(tl.int64))


@pytest.mark.skipif(INTERPRETED, reason="already there")
def test_in_the_interpreter():
    pytest.importorskip("triton")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    # Nothing but this test was skipped.
    assert re.search(r"^\d{3} passed, 1 skipped", done.stdout, re.MULTILINE), done.stdout[-500:]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The interpreter patches triton.language at every call of a device function; once per launch is enough."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    from scram.gpu import tiles

    patch, run = interpreter._patch_lang, interpreter.InterpretedFunction.run
    done = set()

    def patch_once(fn):
        if id(fn.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(fn.__globals__))
        return patch(fn)

    def launch(self, *args, **kwargs):
        done.clear()
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    # Large tiles: the interpreter's time goes by programs, not by lanes.
    block = tiles._block
    monkeypatch.setattr(tiles, "_block", lambda *args: block(*args[:3], max(args[3], LANES), *args[4:]))
    for tile in (tiles.search_tile, tiles.attend_tile, tiles.backward_tile, tiles.collect_tile, tiles.visit_tile):
        tile.cache_clear()
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ran."""
    from scram.gpu import launch

    names = []
    call = launch.Kernel.__call__

    def record(self, *arguments):
        names.append(self.kernel.fn.__name__)
        call(self, *arguments)

    monkeypatch.setattr(launch.Kernel, "__call__", record)
    return names


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
@pytest.mark.parametrize("name", TILES)
def test_field_of_the_tile_search_is_that_of_the_reference(name, launched):
    case = named(name, method="tile")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)
    swept = case.sweeps if case.batch else 0
    assert launched.count("offer_kernel") == launched.count("weigh_kernel") == swept
    assert launched.count("exact_kernel") == (case.dtype == torch.float32 and case.batch > 0)


@interpreted
def test_features_wider_than_a_piece(monkeypatch):
    from scram.gpu import tile, tiles

    monkeypatch.setattr(tiles, "WEIGH_PIECE", 32)
    tiles.weigh_tile.cache_clear()
    tile._plan.cache_clear()
    case = named("width 60, values 1", method="tile", kappa=1, sweeps=1)
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    tiles.weigh_tile.cache_clear()
    tile._plan.cache_clear()
    assert torch.equal(found.index, expected.index)


@interpreted
def test_more_matches_than_a_thread_holds_itself():
    from scram.gpu import tiles

    case = named("rank 2", grid=(9, 7), kappa=tiles.MOST_SLOTS + 1, separation=1, sweeps=3, method="tile")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)


@interpreted
@pytest.mark.parametrize(("width", "large"), [(5, 1500), (140, 300)])
def test_large_whole_numbers_of_float32_in_the_tile_search(width, large):
    case = named("rank 2", grid=(9, 10), width=width, kappa=1, sweeps=3, method="tile")
    tensors = make_tensors(case)
    little = torch.arange(width) % 5 - 2
    for x in (tensors.q, tensors.k):  # of equal sums: the products differ in their last digits
        x.copy_(large + little[torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x))).argsort(-1)])
        large -= 1
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("width", "kappa"), [(16, 1), (140, 3)])
def test_float32_that_is_not_finite_in_the_tile_search(width, kappa):
    case = named("rank 2", grid=(9, 10), key_grid=(11, 9), width=width, kappa=kappa, sweeps=4, method="tile")
    tensors = make_tensors(case, integer=True)
    q, k = tensors.q, tensors.k
    q[q == 0] = 1  # zero times infinity is NaN for the reference too
    k[0, 0, 3, 4, 2], k[0, 0, 8, 8, 1], k[0, 0, 0, 0, 0], k[0, 0, 5, 5, 0] = torch.inf, -torch.inf, 3e38, torch.nan
    q[0, 0, 7, 7, 0], q[0, 0, 2, 2, 1] = torch.inf, torch.nan
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert found.score.isinf().any()


@interpreted
def test_a_row_stops_in_the_tile_search(launched):
    # A few queries would find better keys in later sweeps.
    case = named("rank 2", grid=(23, 23), width=12, kappa=1, jumps=(1,), gossip=1, sweeps=14, method="tile")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)


@interpreted
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_attend_is_as_near_float64_as_the_reference(name, repeatable, launched, monkeypatch):
    from scram.gpu import attend_keys

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    monkeypatch.setattr(attend_keys, "LEAST_SHARE", 20)  # few, so that there may be shares beyond the first
    case = named(name)
    tensors = make_tensors(case)
    truth, same, ours = (
        _everything(case, tensors, impl, dtype)
        for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype))
    )
    assert_as_near_float64(truth, same, ours, _size)
    kernels = ["share_kernel", "collect_kernel", "collect_kernel"] if repeatable else []
    assert launched == (["attend_kernel", "backward_kernel", *kernels] if case.batch else [])


@interpreted
def test_repeatable_gradients_of_a_key_that_all_queries_want(monkeypatch):
    from scram.gpu import attend_keys

    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(attend_keys, "LEAST_SHARE", 5)
    case = named("rank 2", grid=(8, 8), key_grid=(20, 20), kappa=2, sweeps=1)
    tensors = make_tensors(case)
    tensors.matches.index[..., 0] = 131
    tensors.matches.index[..., ::2, :, 1] = 170  # half of them another one, near enough that windows overlap
    truth, same, ours = (
        _everything(case, tensors, impl, dtype)
        for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype))
    )
    assert_as_near_float64(truth, same, ours, _size)


@interpreted
@pytest.mark.parametrize("window", ["query", "tile"])
def test_repeatable_gradients_of_extra_keys_add_up_over_programs(window, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    case = named("extra and a masked row", grid=(9, 9), key_grid=(4, 4), sweeps=1, window=window)
    tensors = make_tensors(case)
    truth, same, ours = (
        _everything(case, tensors, impl, dtype)
        for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype))
    )
    assert_as_near_float64(truth, same, ours, _size)


@interpreted
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [(3, 70, "float32"), (64, 128, "float32"), (66, 64, "float32"), (16, 130, "float16"), (130, 16, "float16")],
)
def test_tiles_with_features_and_values_in_unlike_numbers_of_pieces(
    width, value_width, dtype, repeatable, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    changes = {"width": width, "value_width": value_width, "dtype": getattr(torch, dtype), "extra": 2}
    case = named("rank 1", grid=(20,), kappa=1, window="tile", **changes)
    tensors = make_tensors(case)
    truth, same, ours = (
        _everything(case, tensors, impl, dtype)
        for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype))
    )
    assert_as_near_float64(truth, same, ours, _size)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_minus_infinity_and_near_it_in_a_tile(dtype, causal):
    case = named("rank 1", grid=(6,), width=4, value_width=4, dtype=dtype, kappa=1, causal=causal, window="tile")
    tensors = make_tensors(case)
    tensors.k.abs_().add_(0.1)
    tensors.k[0, 0, 5] = 1e16
    tensors.q[0, 0, 1], tensors.q[0, 0, 2] = -torch.inf, -1e16
    ours, expected = (run_attend(case, tensors, tensors.leaves(dtype), impl) for impl in ("triton", "reference"))
    assert expected.out[0, 0, 1].isnan().all()
    torch.testing.assert_close(ours.out, expected.out, rtol=1e-2, atol=1e-2, equal_nan=True)
    torch.testing.assert_close(ours.lse, expected.lse, rtol=1e-2, atol=1e-2, equal_nan=True)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize("limit", ["causal", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_of_nan_spoils_no_key_that_it_may_not_attend(dtype, limit, repeatable, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    q, k, v = torch.randn(3, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    q[0, 0, 1] = torch.nan
    found = scram.Matches(torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), (4,))
    mask = torch.tensor([[True, True, True, False]])
    how = {"causal": True} if limit == "causal" else {"key_mask": mask}
    spoiled = {}
    for window in ("query", "tile"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = scram.attend(*leaves, found, window=window, impl="triton", radius=3, **how).out
        spoiled[window] = [x.isnan().any(-1).flatten().tolist() for x in torch.autograd.grad(out.sum(), leaves)]
    may = [True, True, False, False] if limit == "causal" else mask[0].tolist()
    assert spoiled["tile"] == spoiled["query"] == [[False, True, False, False], may, may]


@interpreted
@pytest.mark.parametrize("window", ["query", "tile"])
def test_no_extra_keys_at_all_with_repeatable_gradients(window, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    q = torch.randn(1, 1, 200, 4, requires_grad=True)  # several programs
    found = scram.search(q, q, search=scram.Search(sweeps=0, seed=0), impl="triton")
    none = torch.zeros(1, 1, 0, 4, requires_grad=True)
    out = scram.attend(q, q, q, found, extra=(none, none), window=window, impl="triton").out
    assert torch.autograd.grad(out.sum(), none)[0].shape == none.shape


@interpreted
def test_more_matches_than_a_tile_keeps():
    q = torch.randn(1, 1, 8, 8, 16)
    with pytest.raises(ValueError, match="at most 32 matches, got 33"):
        scram.search(q, q, search=scram.Search("tile", matches=33), impl="triton")


@interpreted
@pytest.mark.parametrize(("number", "name"), list(enumerate(TILE_WINDOWS)))
def test_tile_attend_is_as_near_float64_as_the_reference(number, name, launched, monkeypatch):
    repeatable = number % 2 == 1
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    case = named(name, window="tile")
    tensors = make_tensors(case)
    truth, same, ours = (
        _everything(case, tensors, impl, dtype)
        for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype))
    )
    assert_as_near_float64(truth, same, ours, _size)
    kernels = ["cells_kernel", "tile_attend_kernel", "cells_kernel", "tile_backward_kernel"]
    kernels += ["tile_collect_kernel"] * repeatable
    assert launched == (kernels if case.batch else [])


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        {"grid": (9, 8), "key_grid": (20, 27), "kappa": 3},  # several tiles; lists longer than a program takes at once
        {"grid": (8, 9), "key_grid": (10, 14), "radius": 3, "extra": 2},  # cells that do not divide a block
        {"grid": (70,), "key_grid": (300,), "radius": 40},  # cells larger than a block
        {"grid": (70,), "key_grid": (200,), "radius": 40, "repeatable": True},
        {"grid": (9, 9), "kappa": 17},  # more corners than one program sorts
        {"grid": (5, 6), "width": 70, "value_width": 130, "extra": 1},  # pieces of features
    ],
    ids=str,
)
def test_tiles_of_all_sizes(changes, monkeypatch):
    repeatable = changes.pop("repeatable", False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    case = named("rank 2", window="tile", **changes)
    tensors = make_tensors(case)
    truth, same, ours = (
        _everything(case, tensors, impl, dtype)
        for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype))
    )
    assert_as_near_float64(truth, same, ours, _size)


@interpreted
@pytest.mark.parametrize("repeatable", [False, True])
@pytest.mark.parametrize(("gradient", "value"), [(2**-14, 1), (1, 2**-7), (32, 2**9)])
def test_slopes_of_float16_keep_their_digits(gradient, value, repeatable, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeatable)
    case = named("float16", window="tile", extra=0)
    tensors = make_tensors(case)
    tensors.v.mul_(value)
    found = []
    for impl, dtype in (("reference", torch.float64), ("reference", case.dtype), ("triton", case.dtype)):
        leaves = tensors.leaves(dtype)
        out = run_attend(case, tensors, leaves, impl).out
        above = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)) * gradient
        found.append(torch.autograd.grad(out, leaves, above.half().to(dtype)))
    assert_as_near_float64(*found, _size)


@interpreted
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, whose maximum the interpreter takes
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_nan_reaches_no_pair_that_is_none_in_a_tile(causal):
    case = named("rank 1", grid=(70,), kappa=1, causal=causal, window="tile")
    for which in range(3):
        tensors = make_tensors(case)
        tensors.matches.index.copy_(torch.arange(70).reshape(1, 1, 70, 1))
        (tensors.q, tensors.k, tensors.v)[which][0, 0, 40, 1] = torch.nan
        ours, theirs = (
            run_attend(case, tensors, tensors.leaves(torch.float32), impl) for impl in ("triton", "reference")
        )
        assert torch.equal(ours.out.isnan(), theirs.out.isnan())
        assert torch.equal(ours.lse.isnan(), theirs.lse.isnan())
        leaves = tensors.leaves(torch.float32)
        dq, dk, dv = gradients(run_attend(case, tensors, leaves, "triton"), leaves)
        assert dq[0, 0, :40].isfinite().all() == (causal or which == 0)
        assert dq[0, 0, 64:].isfinite().all()
        if causal and which == 0:
            assert dk[0, 0, 41:].isfinite().all()
            assert dv[0, 0, 41:].isfinite().all()


def _everything(case, tensors, impl, dtype):
    leaves = tensors.leaves(dtype)
    attended = run_attend(case, tensors, leaves, impl)
    return [attended.out.detach(), attended.lse.detach(), *gradients(attended, leaves)]


def _size(x):
    return float(torch.where(x.isfinite(), x.double(), 0).norm())


@interpreted
def test_the_real_tiles_cover_a_grid_that_they_do_not_divide(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LANES", 1)
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
    noise_kernel[(1,)](out, *seed_arguments(torch.tensor(seed)), 5, N=16)
    assert torch.equal(out, noise(seed, 5, torch.arange(16)))
