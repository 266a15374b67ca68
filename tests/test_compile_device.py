"""torch.compile, autocast, modules and patching on a CUDA device, with the Triton engine."""

import pytest
import torch
import torch.nn.functional as F

import scram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's compiler warns
]
SEARCH = scram.Search(matches=2, sweeps=2, seed=3)


def leaves(dtype=torch.float32):
    return [torch.randn(2, 2, 8, 9, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_autocast_goes_by_the_rules_of_torch(autocast, dtype):
    tensors = leaves(dtype)
    with torch.autocast("cuda", autocast):
        out = scram.attention(*tensors, search=SEARCH)
        assert out.dtype == F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in tensors)).dtype == autocast
    assert torch.equal(out, scram.attention(*(x.to(autocast) for x in tensors), search=SEARCH))
    out.float().sum().backward()
    assert all(x.grad.dtype == dtype for x in tensors)


def test_inductor_equals_eager():
    def block(q, k, v):
        return scram.attention(q.tanh(), k.tanh(), v, search=SEARCH).relu()

    tensors, results = leaves(), []
    for call in (torch.compile(block), block):
        out = call(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_patched_attention_with_a_covering_window():
    q, k, v = (torch.randn(2, 2, 1 + 72, 16, device="cuda") for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v)
    with scram.patch_sdpa(grid=(8, 9), prefix=1, radius=9) as report:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), want, rtol=1e-4, atol=1e-5)
    assert report.replaced == 1


def test_modules_keep_matches_and_trust_runs():
    layer = scram.nn.GridAttention(32, 2, keep_matches=True, device="cuda").eval()
    x = torch.randn(2, 8, 9, 32, device="cuda")
    layer(x)
    assert layer(x).shape == x.shape
    assert layer.matches.index.is_cuda
    q, k, v = leaves()
    assert scram.trust(q, k, v).mass.value.shape == (2, 2)
