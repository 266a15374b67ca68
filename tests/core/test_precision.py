"""Mixed precision: under torch.autocast the public functions go by the rules of torch's own attention."""

import pytest
import torch
import torch.nn.functional as F

import scram
from scram.core.precision import follows_autocast, ignores_autocast
from support.compiling import assert_equal, results

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own compiler
SEARCH = scram.Search(matches=2, sweeps=2, seed=3)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def leaves(*grid, heads=2, key_heads=2, width=8, dtype=torch.float32):
    """q, k, v that want gradients."""
    shapes = [(2, heads, *grid, width), (2, key_heads, *grid, width), (2, key_heads, *grid, 5)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["numba", "reference"])
def test_autocast_goes_by_the_rules_of_torch(dtype, impl):
    q, k, v = leaves(4, 5, dtype=dtype)
    extra = torch.randn(2, 2, 1, 8, dtype=dtype), torch.randn(2, 2, 1, 5, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(*(x.flatten(2, 3) for x in (q, k, v))).dtype

    @torch.autocast("cpu", torch.bfloat16)
    def attention(q, k, v):
        return scram.attention(q, k, v, search=SEARCH, extra=extra, impl=impl)

    ours = results(attention, (q, k, v))
    assert ours[0].dtype == wanted
    assert [x.dtype for x in ours[1:]] == [dtype] * 3
    cast_extra = tuple(x.to(wanted) for x in extra)

    def cast(q, k, v):
        return scram.attention(q.to(wanted), k.to(wanted), v.to(wanted), search=SEARCH, extra=cast_extra, impl=impl)

    assert_equal(ours, results(cast, (q, k, v)))


def test_autocast_mends_a_mix_of_dtypes():
    q, k, v = leaves(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = scram.search(q, k.bfloat16(), search=SEARCH)
        out, lse = scram.attend(q, k.bfloat16(), v.half(), found)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
        with torch.autocast("cpu", enabled=False):
            assert scram.attention(q, k, v, search=SEARCH).dtype == torch.float32
    with pytest.raises(TypeError, match=r"k must have q's dtype torch.float32, got torch.bfloat16"):
        scram.search(q, k.bfloat16())


def test_autocast_leaves_the_truth_exact():
    q, k, v = leaves(4, 5)
    plain, best = scram.exact_attention(q, k, v), scram.exact_search(q, k)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(scram.exact_attention(q, k, v), plain)
        assert_equal([scram.exact_search(q, k).score], [best.score])


@pytest.mark.slow
def test_autocast_compiles():
    def attention(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return scram.attention(q, k, v, search=SEARCH)

    tensors = leaves(4, 5)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert_equal(results(compiled, tensors), results(attention, tensors))


CALLS = {
    "windows": {"tail": None},
    "clusters": {"tail": scram.Clusters(count=6, seed=1)},
    "drawn": {"tail": scram.DrawnKeys(samples=6, seed=1), "causal": True},
    "dropout": {"tail": scram.Clusters(count=6, seed=1), "dropout_p": 0.3},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_16_bits_on_a_cpu_are_rounded_once(name, dtype):
    """At the end: out and gradients are those of the same numbers in float32, to the bit."""

    def attention(q, k, v):
        torch.manual_seed(0)  # of dropout
        return scram.attention(q, k, v, search=SEARCH, extra=extra(q), impl="numba", **CALLS[name])

    def extra(q):
        return tuple(x.to(q.dtype) for x in (more[..., :8], more[..., 8:]))

    half = [x.detach().to(dtype).requires_grad_() for x in leaves(4, 5)]
    wide = [x.detach().float().requires_grad_() for x in half]
    more = torch.randn(2, 2, 1, 13).to(dtype)
    out = attention(*half)
    truth = attention(*wide)
    assert torch.equal(out, truth.to(dtype))
    grad = torch.randn_like(out)
    ours, theirs = torch.autograd.grad(out, half, grad), torch.autograd.grad(truth, wide, grad.float())
    assert_equal(ours, [x.to(dtype) for x in theirs])


@pytest.mark.parametrize("method", [scram.Clusters(6), scram.DrawnKeys(6), scram.Snis(6), scram.MetropolisHastings(6)])
def test_estimates_of_16_bits_have_the_dtype_of_their_values(method):
    q, k, v = (x.detach().bfloat16() for x in leaves(4, 5))
    found = scram.search(q, k, search=SEARCH)
    assert scram.estimate(q, k, v, found, method=method).out.dtype == torch.bfloat16
    assert scram.estimate(q, k, v.float(), found, method=method).out.dtype == torch.float32


def seen(*args, **kwargs):
    """The dtypes of the tensors in its arguments, and whether autocast is on."""
    given = [*args, *kwargs.values()]
    flat = [x for one in given for x in (one if isinstance(one, tuple) else (one,)) if isinstance(x, torch.Tensor)]
    return [x.dtype for x in flat], torch.is_autocast_enabled("cpu")


def test_follows_autocast():
    x, index = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    call = follows_autocast(seen)
    assert call(x, extra=(x, x.half())) == ([torch.float32, torch.float32, torch.float16], False)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x, extra=(x, x.half())) == ([torch.bfloat16] * 3, False)
        assert call(x.double(), index, 3, None) == ([torch.float64, torch.int64], False)
        assert call(3) == ([], True)  # no tensor says which device
        assert torch.is_autocast_enabled("cpu")


def test_ignores_autocast():
    x = torch.zeros(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert ignores_autocast(seen)(x, y=x.half()) == ([torch.float32, torch.float16], False)
        assert seen(x) == ([torch.float32], True)
