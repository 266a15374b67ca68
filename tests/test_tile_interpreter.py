"""The Triton engine on the CPU, in Triton's interpreter: queries in tiles."""

import pytest
import torch

import scram
from cases import (
    assert_as_near_float64,
    assert_attended_as_near_float64,
    gradients,
    make_tensors,
    named,
    run_attend,
    run_search,
    size,
)
from in_interpreter import interpreted, passes_in_the_interpreter, starts

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


@starts
def test_in_the_interpreter():
    assert passes_in_the_interpreter(__file__) == len(TILES) + len(TILE_WINDOWS) + 48


@interpreted
@pytest.mark.parametrize("name", TILES)
def test_field_of_the_tile_search_is_that_of_the_reference(name, launched):
    case = named(name, method="tile")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)
    swept = case.sweeps if case.batch else 0
    assert launched.count("offer_kernel") == launched.count("score_offers_kernel") == swept
    assert launched.count("exact_kernel") == (case.dtype == torch.float32 and case.batch > 0)


@interpreted
def test_features_wider_than_a_piece(monkeypatch):
    from scram.engines.gpu import block_sizes, launch

    monkeypatch.setattr(block_sizes, "SCORE_PIECE", 32)
    launch.clear_caches()
    case = named("width 60, values 1", method="tile", kappa=1, sweeps=1)
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    launch.clear_caches()
    assert torch.equal(found.index, expected.index)


@interpreted
def test_more_matches_than_a_thread_holds_itself():
    from scram.engines.gpu import block_sizes

    case = named("rank 2", grid=(9, 7), kappa=block_sizes.MOST_SLOTS + 1, separation=1, sweeps=3, method="tile")
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
@pytest.mark.parametrize("window", ["query", "tile"])
def test_repeatable_gradients_of_extra_keys_add_up_over_programs(window, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    case = named("extra and a masked row", grid=(9, 9), key_grid=(4, 4), sweeps=1, window=window)
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


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
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


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
    assert_attended_as_near_float64(case, make_tensors(case), "triton")
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
    assert_attended_as_near_float64(case, make_tensors(case), "triton")


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
    assert_as_near_float64(*found, size)


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
