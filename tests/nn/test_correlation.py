"""The lookup in the place of RAFT's block."""

import re

import pytest
import torch

import scram
from scram.nn import CorrelationLookup


def test_takes_and_gives_what_the_block_of_raft_does():
    """Channels first, places as (x, y), a result that needs gradients."""
    fmap1, fmap2 = (torch.randn(2, 6, 5, 7, requires_grad=True) for _ in range(2))
    coords = torch.rand(2, 2, 5, 7) * 6
    found = CorrelationLookup(fmap1, fmap2, num_levels=2, radius=3)(coords)
    assert found.shape == (2, 2 * 49, 5, 7)
    assert found.is_contiguous()
    q, k = (x.permute(0, 2, 3, 1).unsqueeze(1) for x in (fmap1, fmap2))
    want = scram.correlation(q, k, coords[:, [1, 0]].permute(0, 2, 3, 1).unsqueeze(1), 3, levels=2)
    assert torch.equal(found, want.squeeze(1).permute(0, 3, 1, 2))
    found.sum().backward()
    assert fmap1.grad.abs().sum() > 0
    assert fmap2.grad.abs().sum() > 0


def test_autocast_leaves_it_as_it_is():
    fmap1, fmap2 = torch.randn(2, 1, 8, 4, 4).unbind()
    coords = torch.rand(1, 2, 4, 4) * 3
    lookup = CorrelationLookup(fmap1, fmap2, 1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lookup(coords), lookup(coords.clone()))
        assert lookup(coords).dtype == torch.float32
    assert repr(lookup) == "CorrelationLookup(4 x 4 and 4 x 4, num_levels=1, radius=1)"


BAD = [
    ((torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)), ValueError, "fmap1 must be [B, E, h, w]"),
    ((torch.zeros(1, 4, 4, 4), torch.zeros(1, 3, 4, 4)), ValueError, "fmap2 must have fmap1's B, E = (1, 4)"),
    ((torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 4, 4).half()), TypeError, "fmap2 must have fmap1's dtype"),
    ((torch.zeros(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)), ValueError, "levels must be at most 2"),
]


@pytest.mark.parametrize(("fmaps", "error", "words"), BAD, ids=["axes", "width", "dtype", "levels"])
def test_bad_features(fmaps, error, words):
    with pytest.raises(error, match=re.escape(words)):
        CorrelationLookup(*fmaps)


def test_bad_places():
    lookup = CorrelationLookup(torch.zeros(1, 4, 8, 9), torch.zeros(1, 4, 8, 9))
    with pytest.raises(ValueError, match=re.escape("coords must be [B, 2, h1, w1] = (1, 2, 8, 9), got (1, 8, 9, 2)")):
        lookup(torch.zeros(1, 8, 9, 2))
