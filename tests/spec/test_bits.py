"""Flags in words of 32 bits."""

import pytest
import torch

from scram.spec.bits import packed, unpacked
from support.plain_routing import clusters_in, words


@pytest.mark.parametrize("count", [1, 31, 32, 33, 96])
def test_words_are_those_of_plain_python(count):
    size = -(-count // 32) * 32
    flags = torch.zeros(3, 4, size, dtype=torch.bool)
    flags[..., :count] = torch.rand(3, 4, count) < 0.5
    flags[0, 0, :count], flags[0, 1], flags[0, 2, count - 1] = True, False, True  # all, none, the sign
    made = packed(flags)
    assert (made.dtype, made.shape) == (torch.int32, (3, 4, size // 32))
    for one, want in zip(made.flatten(0, 1).tolist(), flags.flatten(0, 1), strict=True):
        names = want.nonzero().flatten().tolist()
        assert one == words(names, count)
        assert clusters_in(one) == set(names)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 96])
def test_unpacked_is_the_inverse(count):
    size = -(-count // 32) * 32
    flags = torch.rand(2, 5, size) < 0.5
    assert torch.equal(unpacked(packed(flags), count), flags[..., :count])


def test_no_word_of_nothing():
    assert packed(torch.zeros(0, 64, dtype=torch.bool)).shape == (0, 2)
    assert unpacked(torch.zeros(2, 0, dtype=torch.int32), 0).shape == (2, 0)
