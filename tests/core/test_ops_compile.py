"""A good citizen of PyTorch: operators, torch.compile, checkpoints, autocast, inference mode, torch.func."""

from functools import partial

import pytest
import torch
from torch import func
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import scram
from scram.core import calls
from scram.core.ops import _several
from scram.spec import draws
from scram.spec.grid import AllowedKeys
from support.compiling import assert_equal, graphs_are, results

# torch's own compiler and its forward derivatives still go through what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
SEARCH = scram.Search(matches=2, sweeps=2, seed=3)
OPS = torch.ops.scram


def leaves(*grid, heads=2, key_heads=2, width=8, dtype=torch.float32):
    """q, k, v that want gradients."""
    shapes = [(2, heads, *grid, width), (2, key_heads, *grid, width), (2, key_heads, *grid, 5)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def op_calls():
    """A call of every operator, with everything that it may be given."""
    q, k, v = leaves(4, 5)
    seed, mask = torch.tensor(3), torch.rand(2, 4, 5) < 0.7
    plain = [x.detach() for x in (q, k)]
    rows = torch.tensor([[3, 4], [8, 9]])
    settings = ("query", 2, 0, 2, [2, 1], "both", 2, [1, 2], True, False, "numba")
    own = torch.arange(20, dtype=torch.int32).reshape(4, 5, 1).expand(2, 2, 4, 5, 1).contiguous()
    index, _ = OPS.search(*plain, seed, mask, None, rows, own, *settings)
    yield "search", (*plain, seed, mask, index, rows, own, *settings)
    for extra in ((None, None), (torch.randn(2, 2, 3, 8, requires_grad=True), torch.randn(2, 2, 3, 5))):
        call = (q, k, v, index, mask, *extra, None, None, seed, rows, [1, 1], False, 0.3, "softmax", 0.2)
        yield from both_passes("attend", call, (0, 1))
    out, lse = OPS.attend(*call, "numba")
    head = (torch.randn_like(out, requires_grad=True), torch.randn_like(lse))
    for stratified, dropout in ((False, (None, 0.0)), (True, (None, 0.0)), (False, (seed, 0.2))):
        call = (
            q,
            k,
            v,
            index,
            mask,
            *head,
            seed,
            dropout[0],
            rows,
            6,
            stratified,
            [1, 1],
            False,
            0.3,
            dropout[1],
        )
        yield from both_passes("drawn_tail", call, (3, 4, 5))
    clustering = (q, k, v, mask, None, None, seed, rows, 6, 2, 0.3)
    yield from both_passes("cluster", clustering, (0, 1, 3, 4), grads=3)
    made = calls.Clustered(*(x.detach() for x in OPS.cluster(*clustering, "numba")))
    routing = (plain[0], made.centers, made.sizes, made.variance, made.spreads, 6, 0.3)
    yield "route", (*routing, "numba")
    routes, _, _ = OPS.route(*routing, "numba")
    yield "routed_start", (*plain, made.order, made.sizes, routes, 6, "numba")
    extra = (torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 5))
    call = (q, k, v, index, mask, *extra, made.label, routes, seed, rows, [1, 1], False, 0.3, "softmax", 0.2)
    yield from both_passes("attend", call, (0, 1))
    leaf = [x.clone().requires_grad_() for x in (made.centers, made.values, made.slope)]
    alone = ((None, None, None, made.label, None), (*leaf[:2], None), None, None, (None, None), None, 0)
    routed = ((k, v, index, made.label, made.order), leaf, made.spreads, routes, head, seed, 6)
    for keys, floats, spreads, words, near, dropout, budget in (alone, routed):
        tensors = (q, *keys, *floats, made.sizes, made.variance, spreads, words, *near, dropout, rows)
        call = (*tensors, [1, 1], 0.3, 0.2 if dropout is not None else 0.0, 3, budget)
        yield from both_passes("cluster_tail", call, (0, 1))
    flat = [x.detach().flatten(2, 3).requires_grad_() for x in (q, k, v)]
    yield from both_passes("earlier", (*flat, torch.rand(2, k.shape[1], 20) < 0.8, seed, rows, 0.3, 0.2), (0, 1))
    corner = torch.randint(-2, 4, (2, 2, 4, 5, 2), dtype=torch.int32)
    yield from both_passes("window_scores", (q, k, corner, [2, 3], 0.3), ())
    legal = AllowedKeys.of(q, k, False, mask)
    total, table = draws.allowed_counts(q, legal), draws.step_table(1.5, (4, 5), q.device)
    for method, given in (("snis", head), ("metropolis", (None, None))):
        tensors = (q, k, v, *draws.modes(index, (4, 5), legal), total, legal.order, mask, *given, seed, table, rows)
        yield from both_passes("sample", (*tensors, method, 8, 0.3, 1, 0, False, 0.3), ())


def both_passes(name, call, kept, grads=2):
    """The arguments of an operator and of its gradient, which takes the results `kept` besides."""
    yield name, (*call, "numba")
    result = [x.detach() for x in _several(getattr(OPS, name)(*call, "numba"))]
    above = [torch.randn_like(x) for x in result[:grads]]
    plain = [x.detach() if torch.is_tensor(x) else x for x in call]
    yield f"{name}_backward", (*plain, *(result[n] for n in kept), *above, "numba")


@pytest.mark.slow
def test_operators_are_what_they_say():
    """Traced by torch with sizes left open, which takes longest, once for each operator: as it is called last."""
    every = ("test_schema", "test_autograd_registration", "test_faketensor")
    last = {}
    for name, arguments in op_calls():
        opcheck(getattr(OPS, name).default, arguments, test_utils=every)
        last[name] = arguments
    for name, arguments in last.items():
        opcheck(getattr(OPS, name).default, arguments, test_utils="test_aot_dispatch_dynamic")
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("scram::")}
    assert registered == set(last)


COMPILED = {
    "plain": {},
    "masks": {"causal": True, "key_mask": torch.arange(2 * 5 * 6).reshape(2, 5, 6) % 7 > 0},
    "other weights": {"score": "cosine", "weight": "relu", "radius": (0, 2)},
    "a limited search": {"search": scram.Search(reach=(2, 1), random=False, seed=0)},
    "extra keys": {"extra": (torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 5)), "scale": 0.2},
    "routed clusters": {"tail": scram.Clusters(count=4, keys=8, seed=0)},
    "clusters alone": {"search": None, "tail": scram.Clusters(count=4, keys=8, seed=0)},
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.slow
def test_compiled_equals_eager(name):
    def attention(q, k, v):
        return scram.attention(q, k, v, **{"search": SEARCH, **COMPILED[name]})

    tensors = leaves(5, 6)
    with graphs_are(1):
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
        assert_equal(results(compiled, tensors), results(attention, tensors))


@pytest.mark.slow
def test_compiled_dropout_beside_drawn_keys_equals_eager():
    how = {"tail": scram.DrawnKeys(samples=9, seed=1), "causal": True, "dropout_p": 0.3, "radius": 0}

    def attention(q, k, v):
        return scram.attention(q, k, v, search=SEARCH, **how)

    def seeded(function):
        torch.manual_seed(3)
        return results(function, tensors)

    tensors = leaves(9, 10)
    with graphs_are(1):
        compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
        ours, theirs = seeded(compiled), seeded(attention)
    assert_equal(ours, theirs)


@pytest.mark.slow
def test_inductor_equals_eager():
    """With what goes into the operators and comes out of them fused by the compiler."""

    def block(q, k, v):
        return scram.attention(q.tanh(), k.tanh(), v, search=SEARCH).relu()

    tensors = leaves(5, 6)
    compiled = torch.compile(block, fullgraph=True, options={"cpp.simdlen": 1})  # plain loops: less to compile
    for ours, theirs in zip(results(compiled, tensors), results(block, tensors), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_compiled_for_any_size_and_seed():
    """One graph for all grids of several tiles and seeds; it draws a new seed at each call where none is given."""

    def attention(q, k, v, search):
        return scram.attention(q, k, v, search=search, tail=scram.Clusters(count=3, keys=4))

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    with graphs_are(1):
        for n, grid in enumerate([(6, 9), (10, 7), (12, 10)]):
            tensors, search = leaves(*grid), scram.Search(seed=n, sweeps=0)
            ours = results(lambda *x, s=search: compiled(*x, s), tensors)
            assert_equal(ours, results(lambda *x, s=search: attention(*x, s), tensors))
        tensors = leaves(5, 9)
        seeds = [*range(5), 2**62, torch.tensor(7), torch.tensor(8)]
        assert len({compiled(*tensors, scram.Search(sweeps=0, seed=seed)).sum().item() for seed in seeds}) == 8
    drawn = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
    with graphs_are(1):
        assert len({drawn(*tensors, scram.Search(sweeps=0)).sum().item() for _ in range(4)}) == 4


@pytest.mark.slow
def test_a_limited_search_compiles_once_for_all_sizes():
    def search(q, k):
        return scram.search(q, k, search=scram.Search(reach=2, seed=0)).index

    compiled = torch.compile(search, backend="aot_eager", fullgraph=True, dynamic=True)
    with graphs_are(1):
        for grid, key_grid in (((6, 7), (9, 5)), ((6, 9), (10, 7)), ((10, 4), (3, 6))):
            q, k = torch.randn(2, 2, *grid, 8), torch.randn(2, 2, *key_grid, 8)
            assert torch.equal(compiled(q, k), search(q, k))


ESTIMATORS = {
    "DrawnKeys": lambda seed: scram.DrawnKeys(samples=5, seed=seed),
    "Snis": lambda seed: scram.Snis(samples=5, seed=seed),
    "MetropolisHastings": lambda seed: scram.MetropolisHastings(samples=6, seed=seed),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_compiles_once_for_all_seeds_and_sizes(name):
    def estimate(q, k, v, method):
        found = scram.search(q, k, search=SEARCH)
        return scram.estimate(q, k, v, found, method=method, radius=0).out

    compiled = torch.compile(estimate, backend="aot_eager", fullgraph=True, dynamic=True)
    tensors = leaves(6, 7)
    with graphs_are(1):
        for seed in (*range(3), 2**62, torch.tensor(7)):
            method = ESTIMATORS[name](seed)
            ours = results(lambda *x, m=method: compiled(*x, m), tensors)
            assert_equal(ours, results(lambda *x, m=method: estimate(*x, m), tensors))
        compiled(*leaves(9, 5), ESTIMATORS[name](3))
    drawn = torch.compile(estimate, backend="aot_eager", fullgraph=True, dynamic=False)
    with graphs_are(1):
        assert len({drawn(*tensors, ESTIMATORS[name](None)).sum().item() for _ in range(4)}) == 4


@pytest.mark.slow
def test_compiled_takes_the_seed_as_an_argument():
    def attention(q, k, v, seed):
        return scram.attention(q, k, v, search=scram.Search(sweeps=1, seed=seed))

    tensors = leaves(5, 6)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    with graphs_are(2):  # one that takes the first for a constant, one for all the rest
        for seed in (5, 6, 7, 8):
            assert_equal([compiled(*tensors, seed)], [attention(*tensors, seed)])


def test_compiled_search_and_attend():
    def both(q, k, v):
        found = scram.search(q, k, search=SEARCH)
        warm = scram.search(q, k, search=SEARCH, warm=found)
        return torch.cat([*scram.attend(q, k, v, warm, radius=0).out.unbind(1)], -1) + warm.score.sum()

    tensors = leaves(5, 6)
    with graphs_are(1):
        compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
        assert_equal(results(compiled, tensors), results(both, tensors))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_finds_the_same_matches_again(reentrant):
    def attention(q, k, v):
        return scram.attention(q, k, v, search=scram.Search(sweeps=0), dropout_p=0.5)

    tensors = leaves(5, 6)
    torch.manual_seed(1)
    plain = results(attention, tensors)
    torch.manual_seed(1)
    assert_equal(results(lambda *x: checkpoint(attention, *x, use_reentrant=reentrant), tensors), plain)


def test_a_compiled_checkpoint_finds_the_same_matches_again():
    """A radius of 0 hands on one value as it is: the output tells which, and where its gradient must go."""

    def glimpse(q, k, v):
        return scram.attention(q, k, v, search=scram.Search(sweeps=0), tail=None, radius=0)

    def block(q, k, v):
        return checkpoint(glimpse, q, k, v, use_reentrant=False).square()

    q, k, _ = leaves(5, 6)
    v = torch.rand(2, 2, 5, 6, 1, requires_grad=True)
    out = torch.compile(block, backend="aot_eager", fullgraph=True)(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), v)
    taken = (out.flatten(2, 3) == v.square().flatten(2, 3).transpose(2, 3)).sum(2).unflatten(2, (5, 6))[..., None]
    torch.testing.assert_close(grad, 2 * v.detach() * taken)


def test_inference_mode():
    tensors = leaves(4, 5)
    wanted = scram.attention(*tensors, search=SEARCH)
    with torch.inference_mode():
        out = scram.attention(*tensors, search=SEARCH)
        assert out.is_inference()
        assert_equal([out, *scram.exact_attention(*tensors)], [wanted, *scram.exact_attention(*tensors)])


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_seeds_live_on_the_cpu_whatever_the_default_device(device):
    tensors = leaves(4, 5)
    with torch.device(device):
        search = scram.Search(sweeps=1, seed=5)
        torch.manual_seed(0)
        out = scram.attention(*tensors, search=search, dropout_p=0.5)
        torch.manual_seed(0)
    assert_equal([out], [scram.attention(*tensors, search=search, dropout_p=0.5)])


def loss(impl, tail="auto"):
    def of(q, k, v):
        return scram.attention(q, k, v, search=SEARCH, tail=tail, impl=impl).square().sum()

    return of


@pytest.mark.parametrize("impl", ["numba", "reference"])
def test_func_takes_gradients(impl):
    tensors = [x.detach() for x in leaves(3, 4)]
    grads = func.grad(loss(impl), argnums=(0, 1, 2))(*tensors)
    asked = [x.clone().requires_grad_() for x in tensors]
    assert_equal(grads, torch.autograd.grad(loss(impl)(*asked), asked))


@pytest.mark.parametrize("impl", ["numba", "reference"])
@pytest.mark.parametrize("tail", [None, "auto", scram.Clusters(count=4, keys=6)], ids=["windows", "auto", "clusters"])
def test_func_maps_over_samples(impl, tail):
    """As calls of their own, gradients too; keys that all samples share are not copied by the caller."""
    q, k, v = (torch.randn(3, *x.shape) for x in leaves(3, 4))
    of = loss(impl, tail)
    each = [func.grad(of, argnums=(0, 1))(one, k[0], value) for one, value in zip(q, v, strict=True)]
    mapped = func.vmap(func.grad(of, argnums=(0, 1)), in_dims=(0, None, 0))(q, k[0], v)
    for n, ours in enumerate(mapped):
        torch.testing.assert_close(ours, torch.stack([grads[n] for grads in each]))


@pytest.mark.parametrize("impl", ["numba", "reference"])
def test_func_jacobian(impl):
    q, k, v = (x.detach() for x in leaves(1, 3))

    def few(q):
        return scram.attention(q, k, v, search=SEARCH, impl=impl)[..., :2]

    ours = func.jacrev(few)(q)
    torch.testing.assert_close(ours, torch.autograd.functional.jacobian(few, q))


def test_func_refuses_what_the_engines_lack():
    q, k, v = (x.detach() for x in leaves(3, 4))

    def one(q):
        return loss("numba")(q, k, v)

    for transform in (lambda: func.jvp(one, (q,), (q,)), lambda: func.hessian(one)(q), lambda: func.jacfwd(one)(q)):
        with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .*use impl='reference'"):
            transform()
    with pytest.raises(NotImplementedError, match="no second derivative; use impl='reference'"):
        func.grad(lambda q: func.grad(one)(q).sum())(q)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_func_goes_through_estimators(name):
    """Gradients of each sample, as of calls of their own; what is missing is told."""
    q, k, v = (torch.randn(3, *x.shape) for x in leaves(3, 4))
    found = scram.search(q[0], k[0], search=SEARCH)

    def of(q, k, v):
        return scram.estimate(q, k, v, found, method=ESTIMATORS[name](5), impl="numba").out.square().sum()

    mapped = func.vmap(func.grad(of, argnums=(0, 1, 2)))(q, k, v)
    for n, sample in enumerate(zip(q, k, v, strict=True)):
        asked = [x.clone().requires_grad_() for x in sample]
        assert_equal([x[n] for x in mapped], torch.autograd.grad(of(*asked), asked))
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .*use impl='reference'"):
        func.jvp(lambda q: of(q, k[0], v[0]), (q[0],), (q[0],))
    with pytest.raises(NotImplementedError, match="no second derivative; use impl='reference'"):
        func.grad(lambda q: func.grad(of)(q, k[0], v[0]).sum())(q[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch loops over the samples of its own attention
def test_func_wants_to_know_about_randomness():
    """torch's own rule for a drawn seed: say whether the samples share it."""
    tensors = [torch.randn(3, *x.shape) for x in leaves(3, 4)]
    with pytest.raises(RuntimeError, match="randomness"):
        func.vmap(partial(scram.attention, search=scram.Search()))(*tensors)
    assert func.vmap(scram.attention)(*tensors).shape == (3, 2, 2, 3, 4, 5)  # dense: nothing is drawn
    searched = partial(scram.attention, search=scram.Search())
    assert func.vmap(searched, randomness="different")(*tensors).shape == (3, 2, 2, 3, 4, 5)
