"""Transforms of blocks and groups lose nothing."""

import torch

from scram.spec.blocks import cosine, haar, spline


def test_transforms_lose_nothing():
    for size in (1, 2, 8, 32):
        torch.testing.assert_close(haar(size) @ haar(size).T, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(cosine() @ cosine().T, torch.eye(8, dtype=torch.float64))


def test_details_of_a_flat_line_are_nothing():
    made = spline()
    torch.testing.assert_close(made.norm(dim=1), torch.ones(8, dtype=torch.float64))
    assert torch.linalg.cond(made) < 2
    flat = made @ torch.ones(8, dtype=torch.float64)
    torch.testing.assert_close(flat, 8**0.5 * torch.eye(8, dtype=torch.float64)[0], atol=1e-12, rtol=0)
