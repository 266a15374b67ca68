"""torch.compile, autocast, modules and patching on a CUDA device, with the Triton engine."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import scram
from support.compiling import assert_equal, graphs_are, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's compiler warns
]
SEARCH = scram.Search(matches=2, sweeps=2, seed=3)


def leaves(dtype=torch.float32, grid=(8, 9)):
    return [torch.randn(2, 2, *grid, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


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


@pytest.fixture
def repeatable():
    """Sums in a fixed order, so that compiled and eager gradients are the same bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch's own products may vary
    yield
    torch.use_deterministic_algorithms(False)


def test_inductor_equals_eager():
    """Forward and backward in one graph, with what goes into the operators and comes out of them fused."""

    def block(q, k, v):
        return scram.attention(q.tanh(), k.tanh(), v, search=SEARCH).relu()

    tensors = leaves()
    with graphs_are(1):
        ours = results(torch.compile(block, fullgraph=True), tensors)
    torch.testing.assert_close(ours, results(block, tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_for_all_sizes_and_seeds(dtype, repeatable):
    """The query search in float32, the tile search in bfloat16."""

    def attention(q, k, v, search):
        return scram.attention(q, k, v, search=search, tail=scram.Clusters(count=3))

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    with graphs_are(1):
        for seed, grid in enumerate([(8, 9), (8, 13), (17, 6)]):
            tensors, search = leaves(dtype, grid), scram.Search(sweeps=1, seed=seed)
            ours = results(lambda *x, s=search: compiled(*x, s), tensors)
            assert_equal(ours, results(lambda *x, s=search: attention(*x, s), tensors))
        tensors = leaves(dtype)
        assert len({compiled(*tensors, scram.Search(sweeps=1, seed=seed)).sum().item() for seed in range(6)}) > 1
    with graphs_are(1):
        assert len({compiled(*tensors, scram.Search(sweeps=1)).sum().item() for _ in range(6)}) > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_under_autocast_finds_the_same_matches_again(dtype, repeatable):
    layer = scram.nn.GridAttention(32, 2, dropout=0.3, device="cuda")
    x = torch.randn(2, 8, 9, 32, device="cuda", requires_grad=True)
    grads = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype):
            out = call(x)
        assert out.dtype == dtype
        grads.append(torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()]))
    assert_equal(*grads)


def test_inference_mode():
    tensors = leaves()
    wanted = scram.attention(*tensors, search=SEARCH)
    with torch.inference_mode():
        assert_equal([scram.attention(*tensors, search=SEARCH)], [wanted])


def test_patched_attention_with_a_covering_window():
    q, k, v = (torch.randn(2, 2, 1 + 72, 16, device="cuda") for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v)
    with scram.patch_sdpa(grid=(8, 9), before=1, search=scram.Search(), radius=9) as report:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), want, rtol=1e-4, atol=1e-5)
    assert report.searched == 1


def test_modules_keep_matches_and_trust_runs():
    layer = scram.nn.GridAttention(32, 2, keep_matches=True, device="cuda").eval()
    x = torch.randn(2, 8, 9, 32, device="cuda")
    layer(x)
    assert layer(x).shape == x.shape
    assert layer.matches.index.is_cuda
    layer.cpu()(x.cpu())  # what is kept goes along
    assert layer.matches.index.device.type == "cpu"
    q, k, v = leaves()
    assert scram.trust(q, k, v).mass.value.shape == (2, 2)


def test_a_mix_of_devices_is_told():
    q, k, v = leaves()
    with pytest.raises(ValueError, match=r"k must be on q's device cuda:0, got cpu; use k.to\(q.device\)"):
        scram.attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match=r"warm must be on q's device cuda:0, got cpu; use warm.to\(q.device\)"):
        scram.attention(q, k, v, warm=scram.search(q, k).to("cpu"))


def test_an_estimator_compiles_once_for_all_seeds(repeatable):
    def estimate(q, k, v, method):
        found = scram.search(q, k, search=SEARCH)
        return scram.estimate(q, k, v, found, method=method).out

    compiled, tensors = torch.compile(estimate, backend="aot_eager", fullgraph=True, dynamic=True), leaves()
    with graphs_are(1):
        for seed in range(3):
            method = scram.DrawnKeys(samples=16, seed=seed)
            ours = results(lambda *x, m=method: compiled(*x, m), tensors)
            assert_equal(ours, results(lambda *x, m=method: estimate(*x, m), tensors))
