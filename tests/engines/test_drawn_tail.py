"""Keys drawn for all queries of a row: the hybrid in plain Python."""

import math

import pytest
import torch

import scram
from scram.core import ops
from scram.core.calls import DrawnTailCall
from scram.core.tails.base import draw_seed
from scram.engines import dispatch
from support import plain
from support.estimates import DROPOUT_SEED
from support.in_interpreter import INTERPRETED
from support.on_device import to
from support.plain_estimators import WORD, assert_close, made_by


@pytest.mark.parametrize(
    "name", ["DrawnKeys-rank-2", "DrawnKeys-causal", "DrawnKeys-mask-of-each-head", "DrawnKeys-radius-per-axis"]
)
def test_hybrid_in_plain_python(impl, widest, name):
    made, rule = made_by(impl, widest, name)
    one, row = rule.one, rule.row
    drawn = drawn_of(rule)
    radius = one.case.radius if isinstance(one.case.radius, tuple) else (one.case.radius,) * len(one.case.grid)
    out, lse, variance = (x.detach().flatten(0, 1)[row] for x in (made.out, made.lse, made.variance))
    out, lse, variance = out.flatten(0, -2), lse.flatten(), variance.flatten(0, -2)
    variances = []
    for i in range(len(out)):
        legal = rule.legal(i)
        head = [
            j
            for j in legal
            if any(
                all(abs(x - y) <= b for x, y, b in zip(rule.places[j], rule.places[m], radius, strict=True))
                for m in rule.matches[i]
            )
        ]
        tail = [j for j in drawn if j in legal and j not in head]
        left = len(legal) - len(head)
        w = torch.cat([rule.a[i, head].exp(), rule.a[i, tail].exp() * left / max(len(tail), 1)])
        p = w / w.sum()
        mean = p @ rule.v[head + tail]
        assert_close(out[i], mean)
        assert_close(lse[i], w.sum().log())
        r = p[len(head) :, None] * (rule.v[tail] - mean)
        m = len(tail)
        expected = torch.zeros_like(mean)
        if m < left:
            spread = (r - r.mean(0)).square().sum(0)
            expected = (1 - m / left) * m / (m - 1) * spread if m >= 2 else expected + torch.inf
        variances.append(expected)
    expected = torch.stack(variances)
    if widest == torch.float64:
        assert_close(variance, expected)
    else:  # of all queries together, as in `estimates`: single ones are small and rounded
        known = expected.isfinite()
        assert torch.equal(variance.isfinite(), known)
        assert (variance - expected)[known].norm() <= 0.01 * expected[known].norm()


def drawn_of(rule):
    """The keys drawn for a row: under causal order of all keys, since the draw reads no mask."""
    case = rule.case
    choices = range(case.keys) if case.causal else plain.allowed(case, rule.tensors, rule.row)
    return sorted(choices, key=lambda j: (rule.bits(j), j))[: rule.one.method.samples]


def head_of(rule, i):
    """The keys of query i's windows."""
    centers = {rule.places[m] for m in rule.matches[i]}
    return [
        j for j in range(rule.case.keys) if any(plain.distance(rule.places[j], m) <= rule.case.radius for m in centers)
    ]


@pytest.mark.parametrize(
    "name", ["DrawnKeys-dropout-of-bfloat16", "DrawnKeys-several-blocks", "DrawnKeys-blocks-in-order"]
)
def test_dropout_in_plain_python(impl, widest, name):
    """A drawn key of dropout is known by its own number; no key of a window is drawn again."""
    made, rule = made_by(impl, widest, name)
    case, row = rule.case, rule.row
    torch.manual_seed(DROPOUT_SEED)
    seed, p = int(draw_seed()), case.dropout_p
    drawn = drawn_of(rule)
    out, lse = (x.detach().flatten(0, 1)[row] for x in (made.out, made.lse))
    out, lse, alone, both = out.flatten(0, -2), lse.flatten(), 0, 0
    for i in range(len(lse)):
        legal = rule.legal(i)
        head = [j for j in head_of(rule, i) if j in legal]
        tail = [j for j in drawn if j in legal and j not in head]
        alone, both = alone + len(tail), both + len({*drawn} & {*head})
        left = len(legal) - len(head)
        w = torch.cat([rule.a[i, head].exp(), rule.a[i, tail].exp() * left / max(len(tail), 1)])
        kept = [plain.noise(seed, row, i, j) >= int(p * WORD) for j in head + tail] if p else [True] * len(w)
        weight = w / w.sum() * torch.tensor(kept).double() / (1 - p)
        assert_close(out[i], weight @ rule.v[head + tail])
        assert_close(lse[i], w.sum().log() if len(w) else torch.tensor(-torch.inf))
    assert alone > 0  # the case has both kinds of drawn keys
    assert both > 0


def far(widest, causal=False, grid=(9, 19), seed=0):
    """Few matches, so that tiles do not attend every key."""
    q, k, v = (features(1, 2, *grid, 4, seed=seed + n).to(widest) for n in range(3))
    found = scram.search(q, k, search=scram.Search(seed=0), causal=causal, impl="numba")
    found.index[features(*found.index.shape, seed=7) < 1.5] = -1
    return q, k, v, found


def many(times, q, k, v, found):
    """A batch of the same, whose rows draw for themselves."""
    q, k, v, index, score = (x.repeat(times, *[1] * (x.ndim - 1)) for x in (q, k, v, found.index, found.score))
    return q, k, v, scram.Matches(index, score, found.key_grid)


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("stratified", [False, True], ids=["", "stratified"])
def test_with_every_key_drawn_dropout_is_that_of_windows_over_the_grid(impl, widest, causal, stratified):
    q, k, v, found = far(widest, causal)
    how = {"causal": causal, "dropout_p": 0.4, "impl": impl}
    torch.manual_seed(5)
    ours = scram.attend(q, k, v, found, tail=scram.DrawnKeys(171, stratified, seed=1), **how)
    torch.manual_seed(5)
    everywhere = scram.Matches(torch.zeros_like(found.index), found.score, found.key_grid)
    dense = scram.attend(q, k, v, everywhere, radius=19, **how)
    torch.testing.assert_close(ours.out, dense.out)
    torch.testing.assert_close(ours.lse, dense.lse)


@pytest.mark.slow
def test_dropout_leaves_the_mean_and_lse_as_they_are(impl, widest):
    q, k, v, found = far(widest, causal=True, grid=(4, 19))
    how = {"causal": True, "tail": scram.DrawnKeys(30, seed=1), "impl": impl}
    q, k, v, found = many(20, q, k, v, found)
    plain_out, plain_lse = scram.attend(q, k, v, found, **how)
    runs = [scram.attend(q, k, v, found, dropout_p=0.3, **how) for _ in range(20)]
    assert all(torch.equal(lse, runs[0].lse) for _, lse in runs)
    torch.testing.assert_close(runs[0].lse, plain_lse)
    apart = torch.cat([out - plain_out for out, _ in runs]).double()
    error, apart = apart.std(0) / len(apart) ** 0.5, apart.mean(0).abs()
    assert (apart <= 5 * error + 1e-6).all()
    assert (apart / error.clamp(min=1e-9)).square().mean() < 1.3  # close to 1


@pytest.mark.slow
@pytest.mark.parametrize(("stratified", "causal"), [(False, False), (True, True)], ids=["plain", "stratified-causal"])
def test_over_draws_the_normalizer_is_unbiased(impl, widest, stratified, causal):
    q, k, v, found = far(widest, causal, grid=(8, 24))
    exact = scram.exact_attention(q, k, v, causal=causal).lse[0].double().exp()
    how = {"causal": causal, "impl": impl}
    q, k, v, found = many(20, q, k, v, found)
    runs = [scram.attend(q, k, v, found, tail=scram.DrawnKeys(24, stratified, seed=n), **how).lse for n in range(15)]
    z = torch.cat(runs).double().exp()
    error = z.std(0) / len(z) ** 0.5
    assert ((z.mean(0) - exact).abs() <= 5 * error + 1e-5 * exact).all()
    assert (error > 0).any()


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_full_tail_beside_any_windows_is_exact(impl, widest, causal):
    q, k, v, found = far(widest, causal)
    ours = scram.attend(q, k, v, found, causal=causal, tail=scram.DrawnKeys(171, seed=1), impl=impl)
    truth = scram.exact_attention(q, k, v, causal=causal)
    torch.testing.assert_close(ours.out, truth.out)
    torch.testing.assert_close(ours.lse, truth.lse)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradcheck(impl, widest, p):
    if widest != torch.float64:
        pytest.skip("needs float64")
    leaves = [features(1, 1, 7, 10, 2, seed=n).requires_grad_() for n in range(3)]
    found = scram.search(*leaves[:2], search=scram.Search(seed=0), causal=True)
    found.index.flatten(2, 3)[..., 4:, :] = -1

    def run(q, k, v):
        torch.manual_seed(1)
        how = {"causal": True, "radius": 0, "tail": scram.DrawnKeys(4, seed=1), "dropout_p": p}
        out, lse = scram.attend(q, k, v, found, impl=impl, **how)
        return out[..., 6, :, :], lse[..., 6, :]  # of two tiles, the second without a match

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_dropout_repeats_bit_for_bit_by_torchs_seed(impl, widest):
    q, k, v, found = far(widest, causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(seed):
        torch.manual_seed(seed)
        how = {"causal": True, "dropout_p": 0.3, "impl": impl}
        out, lse = scram.attend(*leaves, found, tail=scram.DrawnKeys(20, seed=1), **how)
        # Of the tail alone: the gradients of windows on a device are repeatable on request.
        return [out, lse, *torch.autograd.grad(out.square().sum(), leaves[:1])]

    first, again, other = run(3), run(3), run(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.interpreted
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_variance_is_that_of_the_draw(engine, p):
    """Under dropout it is unknown."""
    q, k, v, found = far(torch.float32, causal=True, grid=(4, 19))
    head = features(*q.shape, seed=4).float(), features(*q.shape[:-1], seed=5).float()
    seed = torch.tensor(11)
    how = (seed if p else None, None, 20, False, (1, 1), True, 0.5, p)
    call = DrawnTailCall(q, k, v, found.index, None, *head, seed, *how)
    truth = ops.drawn_tail(dispatch.ENGINES["reference"], call).variance
    if engine == "triton" and not INTERPRETED:
        ours = to(ops.drawn_tail(dispatch.ENGINES[engine], to(call, "cuda")), "cpu").variance
    else:
        ours = ops.drawn_tail(dispatch.ENGINES[engine], call).variance
    known = truth.isfinite()
    assert known.any() == (p == 0)
    assert torch.equal(ours.isfinite(), known)
    assert (ours - truth)[known].norm() <= 0.01 * truth[known].norm()


def features(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(batch=1, heads=2, grid=(7, 8), width=4, kappa=2, causal=False, seed=0, dtype=torch.float64):
    q, k, v = (features(batch, heads, *grid, width, seed=seed + n).to(dtype) for n in range(3))
    found = scram.search(q, k, search=scram.Search(matches=kappa, seed=0), causal=causal, impl="numba")
    return q, k, v, found


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_full_tail_is_exact_with_variance_0(impl, widest, stratified, causal, masked):
    q, k, v, found = problem(causal=causal, dtype=widest)
    mask = features(1, 7, 8, seed=9) < 0.4 if masked else None
    how = {"causal": causal, "key_mask": mask}
    made = scram.estimate(q, k, v, found, method=scram.DrawnKeys(56, stratified, seed=3), impl=impl, **how)
    truth = scram.exact_attention(q, k, v, **how)
    torch.testing.assert_close(made.out, truth.out)
    torch.testing.assert_close(made.lse, truth.lse)
    assert made.variance.eq(0).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [1e-44, 1e-46])
def test_a_scale_that_float32_takes_for_zero_weighs_all_keys_alike(impl, scale):
    """In windows and in the tail: a key that must not count is not multiplied by 0 after it was set to -inf."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 9, 10, 4).unbind())
    found = scram.Matches.identity((9, 10))
    tail = scram.DrawnKeys(samples=90, seed=1)
    out, lse = scram.attend(q, k, v, found, tail=tail, scale=scale, impl=impl)
    torch.testing.assert_close(out, v.mean((2, 3), keepdim=True).expand(out.shape))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(90)))
    dq, dk, dv = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k, v))
    assert max(float(x.abs().max()) for x in (dq, dk)) < 1e-30
    assert dv.isfinite().all()
    head = scram.attend(q, k, v, found, scale=scale, impl=impl)
    assert head.out.isfinite().all()
