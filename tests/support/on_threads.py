"""The same call on several numbers of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NUMBERS = (1, 2, 2)


def assert_same_bits_on_threads(run: Callable[[], Sequence[Tensor]]) -> None:
    """What `run` returns has the same bits on one thread, on two, and again."""
    before, made = torch.get_num_threads(), []
    try:
        for number in NUMBERS:
            torch.set_num_threads(number)
            made.append(run())
    finally:
        torch.set_num_threads(before)
    for again in made[1:]:
        for ours, theirs in zip(again, made[0], strict=True):
            assert torch.equal(ours, theirs)
