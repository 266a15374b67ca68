"""What the CPU engine copies and holds."""

import math
import tracemalloc

import torch

import scram

SETTINGS = scram.Search(matches=2, seed=5, sweeps=3)


def test_sixteen_bit_tensors_are_widened_once():
    q, k, v = (torch.randn(1, 1, 40, 40, 8, dtype=torch.bfloat16) for _ in range(3))
    scram.attention(q, k, v, search=SETTINGS, tail=None, impl="numba")  # the first call of a kind measures itself
    with torch.profiler.profile(record_shapes=True) as profile:
        scram.attention(q, k, v, search=SETTINGS, tail=None, impl="numba")
    copies = [event for event in profile.events() if event.name == "aten::_to_copy"]
    whole = [event for event in copies if math.prod(event.input_shapes[0]) == q.numel()]
    assert len(whole) == 4  # q, k and v to float32, out back


def test_memory_of_the_forward_is_linear_in_the_matches():
    q = torch.randn(1, 1, 256, 256, 4)
    settings = scram.Search(matches=4, sweeps=1, seed=0)
    scram.attention(q, q, q, search=settings, impl="numba")
    tracemalloc.start()
    out = scram.attention(q, q, q, search=settings, impl="numba")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - out.numel() * 4 <= 64 * 256 * 256 * 4
