"""Wrong use of the modules is refused in words."""

import pytest
import torch
from torch import nn

from scram.nn import GridAttention, NonLocalBlock


def grids(*shape, width=12):
    return torch.randn(2, *shape, width)


WRONG = [
    (lambda: GridAttention(12, 5), r"num_heads must divide embed_dim, got 5 heads and 12 channels"),
    (lambda: GridAttention(12, 3, batch_first=False), r"batch_first must be True.*use x.movedim\(0, -2\)"),
    (lambda: GridAttention.from_mha(nn.Linear(12, 12)), r"mha must be a torch.nn.MultiheadAttention, got Linear"),
    (lambda: GridAttention(12, 3, radius=-1), r"radius must be at least 0, got -1"),
    (lambda: GridAttention(12, 3, search=3), r"search must be a scram.Search, got int"),
    (lambda: GridAttention(12, 3, scale=-1.0), r"scale must be positive"),
    (lambda: GridAttention(12, 3)(torch.randn(2, 12, 4, 5)), r"channels last.*use x.movedim\(1, -1\)"),
    (lambda: GridAttention(12, 3)(torch.randn(4, 12)), r"query must be \[B, \*G, C\].*add the batch axis"),
    (lambda: GridAttention(12, 3)(grids(4, 5), key_mask=torch.ones(2, 4, dtype=torch.bool)), r"key_mask must be"),
    (lambda: GridAttention(12, 3)(grids(4, 5), key_padding_mask=torch.ones(2, 4, 5)), r"a float mask is a bias"),
    (
        lambda: GridAttention(12, 3)(grids(4, 5), key_padding_mask=torch.ones(4, 5, dtype=torch.bool)),
        r"key_padding_mask must be \[B, \*G'\] = \(2, 4, 5\), got \(4, 5\)",
    ),
    (lambda: GridAttention(12, 3)(grids(4, 5), tokens=torch.randn(3, 1, 12)), r"tokens must be .*\(2, X, 12\)"),
    (lambda: GridAttention(12, 3, vdim=5)(grids(4, 5), grids(4, 5), grids(4, 5, width=5), tokens=grids(1)), r"kdim"),
    (lambda: GridAttention(12, 3)(grids(4, 5), grids(4, 5), grids(4, 6)), r"v must be \[B, Hk, \*G', F\]"),
    (lambda: NonLocalBlock(8, rank=4), r"rank must be 1, 2, 3"),
    (lambda: NonLocalBlock(8, form="softmax"), r"form must be one of 'embedded_gaussian'"),
    (lambda: NonLocalBlock(8)(torch.randn(2, 4, 5, 8)), r"channels first, with C = 8.*use x.movedim\(-1, 1\)"),
    (lambda: NonLocalBlock(8, search=None), r"search must be a scram.Search"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_use_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
