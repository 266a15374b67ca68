"""An additive bias: every engine and stage against plain dense attention with it, gradients, 16 bits, refusals."""

import math

import pytest
import torch

import scram
from scram.bias import Bias
from scram.nn import GridAttention, NonLocalBlock
from scram.results import Attended

GRID, KEY_GRID, RANK = (4, 5), (3, 7), 3
SEARCH = scram.Search(matches=1, sweeps=1, seed=0)


def tensors(heads=2, key_heads=2, bias_heads=2, batch=2, extra=0, dtype=torch.float32, grids=(GRID, KEY_GRID)):
    """q, k, v, a, b, and with extra keys k, v and b of them, as leaves."""
    grid, key_grid = grids
    shapes = [(batch, heads, *grid, 6), (batch, key_heads, *key_grid, 6), (batch, key_heads, *key_grid, 4)]
    shapes += [(1, heads if bias_heads > 1 else 1, *grid, RANK), (batch, bias_heads, *key_grid, RANK)]
    if extra:
        shapes += [(batch, key_heads, extra, 6), (batch, key_heads, extra, 4), (1, bias_heads, extra, RANK)]
    made = [2 * torch.randn(shape) for shape in shapes]
    kinds = [dtype if n not in (3, 4, 7) else torch.promote_types(dtype, torch.float32) for n in range(len(made))]
    return [x.to(kind).requires_grad_() for x, kind in zip(made, kinds, strict=True)]


def plain(q, k, v, a, b, k_extra=None, v_extra=None, b_extra=None, scale=None, causal=False, key_mask=None):
    """Attended, by its definition in float64; q, k, v and factors may be of any heads."""
    heads = q.shape[1]

    def every(x):
        return x.double().repeat_interleave(heads // x.shape[1], 1).flatten(2, -2)

    logits = (scale or q.shape[-1] ** -0.5) * every(q) @ every(k).mT + every(a) @ every(b).mT
    if causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask.flatten(1)[:, None, None], -torch.inf)
    values = every(v)
    if k_extra is not None:
        more = (scale or q.shape[-1] ** -0.5) * every(q) @ every(k_extra).mT
        more = more if b_extra is None else more + every(a) @ every(b_extra).mT
        logits, values = torch.cat([logits, more], -1), torch.cat([values, every(v_extra)], 2)
    shape = q.shape[:-1]
    return Attended((logits.softmax(-1) @ values).reshape(*shape, -1), logits.logsumexp(-1).reshape(shape))


def compared(ours, wanted, leaves, tolerance=2e-5):
    """out, lse and every gradient."""
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)
    down = torch.randn(wanted.out.shape, dtype=torch.float64), torch.randn(wanted.lse.shape, dtype=torch.float64)
    grads = [
        torch.autograd.grad((x.out * down[0]).sum() + (x.lse * down[1]).sum(), leaves, allow_unused=True)
        for x in (ours, wanted)
    ]
    for found, exact in zip(*grads, strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), exact.double(), atol=5 * tolerance, rtol=5 * tolerance)


HEADS = {"": (2, 2, 2), "one for all heads": (2, 2, 1), "grouped": (4, 2, 2), "of each query head": (4, 2, 4)}


@pytest.mark.interpreted
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("extra", [0, 3])
def test_windows_over_the_grid_are_dense_attention_with_the_bias(impl, heads, extra):
    leaves = tensors(*heads, extra=extra)
    q, k, v, a, b, *more = leaves
    matches = scram.search(q, k, bias=(a, b), search=SEARCH, impl=impl)
    given = {"bias": (a, b), "extra": tuple(more) or None, "radius": 9, "impl": impl}
    compared(scram.attend(q, k, v, matches, **given), plain(*leaves), leaves)


@pytest.mark.parametrize("order", ["causal", "masked", "scaled"])
def test_order_masks_and_scales(impl, order):
    leaves = tensors(extra=2, grids=(GRID, GRID))
    q, k, v, a, b, *more = leaves
    mask = torch.rand(2, *GRID) < 0.6
    mask[:, 0, 0] = True
    said = {"causal": {"causal": True}, "masked": {"key_mask": mask}, "scaled": {"scale": 0.05}}[order]
    given = {"bias": Bias(a, b), "extra": (more[0], more[1]), **said}
    local = scram.local(q, k, v, radius=9, impl=impl, **given)
    wanted = plain(q, k, v, a, b, more[0], more[1], **said)  # extra keys without a bias
    compared(local, wanted, leaves[:7])


@pytest.mark.interpreted
def test_clusters_of_one_key_each_are_dense_attention_with_the_bias(impl):
    leaves = tensors(4, 2, 4, batch=1)
    q, k, v, a, b = leaves
    tail = scram.Clusters(count=math.prod(KEY_GRID), keys=8, seed=0)
    ours = scram.attention(q, k, v, bias=(a, b), search=None, tail=tail, impl=impl, return_lse=True)
    compared(ours, plain(*leaves), leaves, 1e-4)


def test_dense_calls_and_exact_functions():
    leaves = tensors(4, 2, 2, extra=2)
    q, k, v, a, b, *more = leaves
    wanted = plain(*leaves)
    assert scram.explain(q, k, v, bias=(a, b)).dense
    compared(scram.attention(q, k, v, bias=(a, b), extra=tuple(more), return_lse=True), wanted, leaves)
    compared(scram.exact_attention(q, k, v, bias=(a, b)), plain(q, k, v, a, b), leaves[:5])
    some = torch.tensor([3, 11])
    one = scram.exact_attention(q, k, v, bias=(a, b), queries=some).out
    assert torch.allclose(one.double(), plain(q, k, v, a, b).out.flatten(2, 3)[:, :, some], atol=1e-5)


@pytest.mark.interpreted
def test_a_search_goes_by_the_logit(impl):
    """Where q and k say nothing the bias decides, and `scale` weighs one against the other."""
    a, b = torch.randn(1, 1, 8, 8, RANK), torch.randn(1, 1, 8, 8, RANK)
    nothing = torch.zeros(1, 2, 8, 8, 4)
    how = {"search": scram.Search(sweeps=8, seed=0), "impl": impl}
    found = scram.search(nothing, nothing, bias=(a, b), **how).index.flatten(2)
    best = (a.flatten(2, 3) @ b.flatten(2, 3).mT).argmax(-1)
    assert (found == best).float().mean() > 0.95
    q, k = torch.randn(2, 1, 1, 8, 8, 4).unbind()
    for scale in (0.01, 100.0):
        found = scram.search(q, k, bias=(a, b), scale=scale, **how).index.flatten(2)
        logits = scale * q.flatten(2, 3) @ k.flatten(2, 3).mT + a.flatten(2, 3) @ b.flatten(2, 3).mT
        assert (found == logits.argmax(-1)).float().mean() > 0.8
        exact = scram.exact_search(q, k, bias=(a, b), scale=scale).index
        assert torch.equal(exact.flatten(2).long(), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_keep_their_bits_beside_16(impl, dtype):
    """Logits of some hundred differ by less than one: rounded to 16 bits, factors would miss the whole difference."""
    q, k, v, *_ = (x.detach() for x in tensors(dtype=dtype, batch=1))
    a = torch.rand(1, 2, *GRID, 1) + 300
    b = torch.rand(1, 1, *KEY_GRID, 1) / 100 + 1
    bias = (a.requires_grad_(), b.requires_grad_())
    wanted = plain(q, k, v, a, b)
    matches = scram.search(q, k, bias=bias, search=SEARCH, impl=impl)
    out = scram.attend(q, k, v, matches, radius=9, bias=bias, impl=impl).out
    usual = torch.finfo(dtype).eps
    assert out.dtype == dtype
    assert (out.double() - wanted.out).norm() < 2 * usual * wanted.out.norm()
    dense = scram.attention(q, k, v, bias=bias)
    assert (dense.double() - wanted.out).norm() < 2 * usual * wanted.out.norm()
    for found, exact in zip(
        *(torch.autograd.grad(x.double().square().sum(), bias) for x in (out, wanted.out)), strict=True
    ):
        assert found.dtype == torch.float32
        assert (found - exact).norm() < 4 * usual * exact.norm() + 1e-4


def test_float16_holds_factors_of_any_size():
    q, k, v, a, b = (x.detach() for x in tensors(dtype=torch.float16))
    wanted = plain(q, k, v, a, b).out
    out = scram.attention(q, k, v, bias=(a * 2.0**25, b / 2.0**25))
    assert (out.double() - wanted).norm() < 2e-3 * wanted.norm()


def test_a_codebook_belongs_to_its_bias(impl):
    q, k, v, a, b = (0.4 * x.detach() for x in tensors(batch=1, bias_heads=1, grids=((16, 16), (16, 16))))
    a = 4 * a
    clusters = scram.Clusters(count=48, keys=96, seed=0)
    book = scram.cluster(q, k, v, clusters=clusters, bias=(a, b), impl=impl)
    routes = scram.route(q, k, book, bias=(a, b), impl=impl)
    apart = scram.attend(q, k, v, None, tail=book, routes=routes, bias=(a, b), impl=impl).out
    at_once = scram.attention(q, k, v, search=None, tail=clusters, bias=(a, b), impl=impl)
    torch.testing.assert_close(apart, at_once)
    exact = scram.exact_attention(q, k, v, bias=(a, b)).out
    without = scram.attention(q, k, v, search=None, tail=clusters, impl=impl)
    assert (at_once - exact).norm() < 0.4 * (without - exact).norm()
    with pytest.raises(ValueError, match="was made for keys and values of widths"):
        scram.attend(q, k, v, None, tail=book, impl=impl)


def test_tuned_and_judged_with_the_bias():
    q, k, v, a, b = (x.detach() for x in tensors(batch=1, bias_heads=1, grids=((24, 24), (24, 24))))
    plan = scram.tune(q, k, v, bias=(a, b), error=0.5, num_queries=64)
    assert plan.given == ("bias",)
    assert "bias=bias" in plan.code
    assert "bias=bias" in str(scram.tune(q, k, v, bias=(a, b), error=0.0, num_queries=64).code)
    out = plan(q, k, v, bias=(a, b))
    exact = scram.exact_attention(q, k, v, bias=(a, b)).out
    assert (out - exact).norm() < 0.5 * exact.norm()
    assert plan.check(q, k, v, bias=(a, b), num_queries=64)
    trusted = scram.trust(q, k, v, bias=(a, b), search=SEARCH, radius=24, tail=None, num_queries=64)
    assert float(trusted.output_error.max()) < 1e-5  # windows hold every key


def test_a_kept_plan_belongs_to_the_bias():
    q, k, v, a, b = (x.detach() for x in tensors(batch=1, bias_heads=1))
    exact = scram.exact_attention(q, k, v, bias=(a, b)).out
    for bias in (None, (a, b)):  # a plan without a bias is another one
        out = scram.attention(q, k, v, error=0.1, bias=bias)
    torch.testing.assert_close(out, exact, atol=1e-4, rtol=1e-4)


def test_autocast_leaves_factors_alone():
    q, k, v, *_ = (x.detach() for x in tensors(batch=1))
    a, b = torch.rand(1, 2, *GRID, 1) + 300, torch.rand(1, 1, *KEY_GRID, 1) / 100 + 1
    extra = k.flatten(2, 3)[:, :, :2], v.flatten(2, 3)[:, :, :2], b.flatten(2, 3)[:, :, :2]
    with torch.autocast("cpu", torch.bfloat16):
        out = scram.attention(q, k, v, bias=(a, b), extra=extra)
    wanted = plain(q, k, v, a, b, *extra).out
    assert out.dtype == torch.bfloat16
    assert (out.double() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.slow
def test_compiled_in_one_graph():
    leaves = tensors()
    q, k, v, a, b = leaves
    attend = torch.compile(
        lambda *x: scram.attention(*x[:3], bias=x[3:], search=SEARCH, tail=None, radius=9),
        backend="aot_eager",
        fullgraph=True,
    )
    wanted = plain(*leaves)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (attend(q, k, v, a, b), wanted.out)]
    for found, exact in zip(*grads, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)


def test_modules():
    x = torch.randn(2, *GRID, 12)
    a, b = torch.randn(1, 3, *GRID, RANK).requires_grad_(), torch.randn(2, 1, *GRID, RANK)
    layer = GridAttention(12, 3, radius=9, search=SEARCH, tail=None)
    dense = GridAttention(12, 3, search=None)
    dense.load_state_dict(layer.state_dict())
    outs = [one(x, tokens=x[:, 0, :2], bias=(a, b)) for one in (layer, dense)]
    torch.testing.assert_close(*outs)
    assert not torch.allclose(outs[0], layer(x, tokens=x[:, 0, :2]), atol=1e-3)
    assert torch.autograd.grad(outs[0].sum(), a)[0].norm() > 0
    block = NonLocalBlock(12, rank=2, search=SEARCH, radius=9, norm=False)
    torch.nn.init.normal_(block.out.weight)
    y = x.movedim(-1, 1)
    assert not torch.allclose(block(y), block(y, bias=(a[:, :1], b)), atol=1e-4)


def test_kept_clusters_fit_the_bias():
    x = torch.randn(1, 16, 16, 8)
    a, b = torch.randn(2, 1, 1, 16, 16, RANK).unbind()
    layer = GridAttention(8, 1, search=None, tail=scram.Clusters(count=16, keys=16, seed=0), keep_matches=True).eval()
    with torch.no_grad():
        for bias, width in ((None, 8), ((a, b), 8 + RANK), ((a, b), 8 + RANK), (None, 8)):
            layer(x, bias=bias)
            assert layer.codebook.centers.shape[-1] == width


FACTORS = torch.zeros(1, 2, *GRID, RANK), torch.zeros(1, 2, *KEY_GRID, RANK)
REFUSED = {
    "no pair": (FACTORS[0], {}, TypeError, r"bias must be a scram.bias.Bias or a pair \(a, b\), got Tensor"),
    "another grid": ((FACTORS[0], FACTORS[0]), {}, ValueError, r"b of bias must be \[B, H, \*G', r\] with B = 2 or 1"),
    "other heads": ((FACTORS[0].expand(1, 2, *GRID, 3)[:, :1].expand(1, 3, -1, -1, -1), FACTORS[1]), {}, ValueError,
                    "a of bias must be .* H = 1 or 2"),
    "other ranks": ((FACTORS[0], FACTORS[1][..., :2]), {}, ValueError, "must share their last axis, got 3 and 2"),
    "no features": (tuple(x[..., :0] for x in FACTORS), {}, ValueError, "a of bias must be"),
    "another dtype": ((FACTORS[0].double(), FACTORS[1]), {}, TypeError, "a of bias must be float32"),
    "another score": (FACTORS, {"score": "l2"}, ValueError, "bias needs score='dot', got 'l2'"),
    "a callable score": (FACTORS, {"score": lambda q, k: (q * k).sum(-1)}, ValueError, "got a callable"),
    "another device": ((FACTORS[0].to("meta"), FACTORS[1]), {}, ValueError, "a of bias must be on q's device cpu"),
    "for causal order": (Bias(*FACTORS, causal=True), {}, ValueError, "pass causal=True, or another bias"),
    "extra of other heads": (FACTORS, {"extra": (torch.zeros(2, 2, 3, 6), torch.zeros(2, 2, 3, 4),
                             torch.zeros(1, 3, 3, RANK))}, ValueError, "b_extra of bias must be"),
    "extra of another rank": (FACTORS, {"extra": (torch.zeros(2, 2, 3, 6), torch.zeros(2, 2, 3, 4),
                              torch.zeros(1, 1, 3, 1))}, ValueError, "b_extra must have the last axis of b, 3, got 1"),
}  # fmt: skip


@pytest.mark.parametrize(("bias", "options", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(bias, options, error, message):
    q, k, v = (x.detach() for x in tensors()[:3])
    with pytest.raises(error, match=message):
        scram.attention(q, k, v, bias=bias, **options)


def test_a_b_of_extra_keys_needs_a_bias():
    q, k, v, _, _, *extra = (x.detach() for x in tensors(extra=2))
    with pytest.raises(TypeError, match="a third tensor belongs beside a bias"):
        scram.attention(q, k, v, extra=tuple(extra))
