"""Dense attention in causal order in Triton: out, lse and gradients as near float64 as the reference's."""

import pytest
import torch

from scram.engines.gpu.engine import earlier, earlier_backward
from scram.engines.reference.earlier import earlier as plainly
from support.cases import assert_as_near_float64, size
from support.earlier_calls import CASES, Earlier, by_engine, differentiated, earlier_call

pytestmark = pytest.mark.gpu
interpreted = pytest.mark.interpreted
# Triton's interpreter cuts bfloat16 off instead of rounding it.
ON_A_DEVICE = [
    Earlier("bfloat16", 700, heads=4, key_heads=2, width=64, value_width=64, dtype=torch.bfloat16),
    Earlier("float16, mask", 300, heads=2, width=64, value_width=32, masked=True, dtype=torch.float16),
    Earlier("bfloat16 pieces", 200, width=160, value_width=200, dtype=torch.bfloat16),
    Earlier("float32", 300, width=64, value_width=64, dropout_p=0.2),
]


def on(device, call):
    return call._replace(
        **{n: x.to(device) for n, x in call._asdict().items() if isinstance(x, torch.Tensor) and x.ndim}
    )


@pytest.mark.parametrize("one", [*(pytest.param(x, marks=interpreted) for x in CASES), *ON_A_DEVICE], ids=str)
def test_as_near_float64_as_the_reference(one, device):
    truth, same = (differentiated(earlier_call(one, dtype), plainly) for dtype in (torch.float64, one.dtype))
    found = by_engine(on(device, earlier_call(one)), earlier, earlier_backward)
    assert_as_near_float64(truth, same, [x.cpu() for x in found], size)


@interpreted
def test_nothing_of_later_keys_is_read(device):
    """However large it is."""
    call = on(device, earlier_call(CASES[1]))
    p = 70
    spoiled = call._replace(**{name: getattr(call, name).clone() for name in "kv"})
    spoiled.k[:, :, p:] = 1e30
    spoiled.v[:, :, p:] = 1e30
    plain, other = (by_engine(x, earlier, lambda *_: ()) for x in (call, spoiled))
    for one, two in zip(plain, other, strict=True):
        assert torch.equal(one[:, :, :p], two[:, :, :p])
