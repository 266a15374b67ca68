"""The Triton engine's tile search: its kernels, and what its blocks and pieces must not change."""

import pytest
import torch

import scram
from scram.engines.gpu.runtime import block_sizes, launch
from support.cases import make_tensors, named, run_search
from support.in_interpreter import INTERPRETED

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted]


@pytest.mark.parametrize("name", ["rank 1", "bfloat16", "no sweeps", "empty batch"])
def test_kernels_of_a_sweep(name, launched):
    case = named(name, method="tile")
    run_search(case, make_tensors(case, integer=True), "triton")
    swept = case.sweeps if case.batch else 0
    assert launched.count("offer_kernel") == launched.count("score_offers_kernel") == swept
    assert launched.count("exact_kernel") == (case.dtype == torch.float32 and case.batch > 0)


def test_features_wider_than_a_piece(monkeypatch):
    monkeypatch.setattr(block_sizes, "SCORE_PIECE", 32)
    launch.clear_caches()
    case = named("width 60, values 1", method="tile", kappa=1, sweeps=1)
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    launch.clear_caches()
    assert torch.equal(found.index, expected.index)


def test_more_matches_than_a_thread_holds_itself():
    sweeps = 1 if INTERPRETED else 3
    case = named("rank 2", grid=(9, 7), kappa=block_sizes.MOST_SLOTS + 1, separation=1, sweeps=sweeps, method="tile")
    tensors = make_tensors(case, integer=True)
    found, expected = (run_search(case, tensors, impl) for impl in ("triton", "reference"))
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.score, expected.score)


def test_more_matches_than_a_tile_keeps():
    q = torch.randn(1, 1, 8, 8, 16)
    with pytest.raises(ValueError, match="at most 32 matches, got 33"):
        scram.search(q, q, search=scram.Search("tile", matches=33), impl="triton")
