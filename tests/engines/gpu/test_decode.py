"""The newest positions over a cache in Triton: as near float64 as plain torch."""

import pytest
import torch

from scram.engines.gpu.engine import decode
from scram.spec.decode import decode as plainly
from support.cases import assert_as_near_float64, size
from support.decode_calls import CASES, Decoded, decode_call, moved

pytestmark = pytest.mark.gpu
interpreted = pytest.mark.interpreted
BOTH = {"width": 64, "value_width": 64, "keys": 700, "clusters": 900, "routed": 512}
# Triton's interpreter cuts bfloat16 off instead of rounding it.
ON_A_DEVICE = [
    Decoded("bfloat16", **BOTH, dtype=torch.bfloat16),
    Decoded("bfloat16, books of 16 bits", **BOTH, half_books=True, heads=8, key_heads=2, dtype=torch.bfloat16),
    Decoded("float16, a tile", **BOTH, queries=64, spoiled=True, dtype=torch.float16),
    Decoded("wide float32", width=160, value_width=200),
]


@pytest.mark.parametrize("one", [*(pytest.param(x, marks=interpreted) for x in CASES), *ON_A_DEVICE], ids=str)
def test_as_near_float64_as_plain_torch(one, device):
    truth, same = (list(plainly(decode_call(one, dtype))) for dtype in (torch.float64, one.dtype))
    found = [x.cpu() for x in decode(moved(decode_call(one), device))]
    for x, want in zip(found, truth, strict=True):
        assert torch.equal(x.isnan(), want.isnan())
    assert truth[0].isnan().any() == one.spoiled
    truth, same, found = ([torch.where(x.isnan(), 0, x) for x in xs] for xs in (truth, same, found))
    assert_as_near_float64(truth, same, found, size)
