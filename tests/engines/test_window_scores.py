"""Scores of the keys of one box per query, in every engine, by way of the lookup that reads them."""

import pytest
import torch

import scram
from support.on_threads import assert_same_bits_on_threads

interpreted = pytest.mark.interpreted


def leaves(grid=(3, 4), key_grid=(9, 8), heads=1, key_heads=1, width=5):
    """q, k, and places of which some lie beside the grid of keys."""
    q = torch.randn(2, heads, *grid, width)
    k = torch.randn(2, key_heads, *key_grid, width)
    coords = torch.rand(2, heads, *grid, len(grid)) * 14 - 3
    return [x.requires_grad_() for x in (q, k, coords)]


SHAPES = [
    {"grid": (7,), "key_grid": (11,), "heads": 4, "key_heads": 2},
    {"grid": (2, 3, 2), "key_grid": (4, 5, 3), "heads": 2, "width": 70},
    {"grid": (1, 1, 1, 1), "key_grid": (2, 3, 1, 2), "width": 1},
]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"rank {len(shape['grid'])}")
def test_any_rank_and_grouped_heads(engine, shape):
    given = leaves(**shape)
    ours, plain = (scram.correlation(*given, 1, levels=1, impl=impl) for impl in (engine, "reference"))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    above = torch.randn_like(plain)
    grads, wanted = (torch.autograd.grad((x * above).sum(), given) for x in (ours, plain))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_multiplied_in_32(engine, dtype):
    q, k, coords = (x.detach() for x in leaves(width=64))
    low = scram.correlation(q.to(dtype), k.to(dtype), coords, 1, levels=1, impl=engine)
    assert low.dtype == torch.float32
    want = scram.correlation(q.to(dtype).float(), k.to(dtype).float(), coords, 1, levels=1, impl="reference")
    torch.testing.assert_close(low, want, atol=1e-5, rtol=1e-5)


@interpreted
def test_deterministic_gradients_are_the_same(engine):
    given = leaves()
    above = torch.randn(2, 1, 3, 4, 9)
    wanted = torch.autograd.grad((scram.correlation(*given, 1, levels=1, impl=engine) * above).sum(), given)
    torch.use_deterministic_algorithms(True)
    try:
        grads = torch.autograd.grad((scram.correlation(*given, 1, levels=1, impl=engine) * above).sum(), given)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@interpreted
def test_places_far_away_or_unknown(impl):
    q, k = torch.ones(1, 1, 1, 4, 3), torch.full((1, 1, 5, 5, 3), torch.nan)
    k[..., 2, 2, :] = 1
    far = [[1e30, 2.0], [-1e30, -torch.inf], [torch.nan, 2.0], [2.0, 2.0]]
    found = scram.correlation(q, k, torch.tensor(far).reshape(1, 1, 1, 4, 2), 0, levels=1, impl=impl)
    assert found[0, 0, 0, :2].eq(0).all()  # not the NaN of a key that is not there
    assert found[0, 0, 0, 2].isnan().all()
    whole = scram.correlation(q, torch.ones_like(k), torch.full((1, 1, 1, 4, 2), 2.0), 0, levels=1, impl=impl)
    torch.testing.assert_close(whole, torch.full_like(whole, 3**0.5))


def test_the_same_bits_on_any_number_of_threads():
    given = leaves()
    assert_same_bits_on_threads(
        lambda: torch.autograd.grad(scram.correlation(*given, 1, levels=1, impl="numba").square().sum(), given)
    )


def test_an_empty_batch(impl):
    q, k, coords = (x.detach()[:0].requires_grad_() for x in leaves())
    if impl != "triton":
        found = scram.correlation(q, k, coords, 1, levels=2, impl=impl)
        assert found.shape == (0, 1, 3, 4, 18)
        found.sum().backward()
        assert k.grad.shape == k.shape
