"""Attention to the window around the own place: against a mask on dense attention, in every engine."""

import itertools
import math

import pytest
import torch

import scram
from support.cases import CASES, assert_as_near_float64, gradients, make_tensors, named
from support.on_device import to

GRIDS = [((17,), (17,), 2), ((6, 7), (6, 7), (1, 2)), ((8, 5), (4, 10), 1), ((3, 4, 5), (3, 4, 5), 1)]
GRIDS += [((2, 3, 2, 4), (4, 3, 1, 5), (1, 0, 1, 2)), ((5, 5), (5, 5), 9)]


def windows(grid, key_grid, radius):
    """Which keys each query attends, bool [N, M], by plain loops."""
    radius = (radius,) * len(grid) if isinstance(radius, int) else radius
    table = torch.zeros(math.prod(grid), math.prod(key_grid), dtype=torch.bool)
    keys = list(itertools.product(*map(range, key_grid)))
    for i, place in enumerate(itertools.product(*map(range, grid))):
        own = [(2 * c + 1) * m // (2 * n) for c, n, m in zip(place, grid, key_grid, strict=True)]
        for j, key in enumerate(keys):
            table[i, j] = all(abs(a - b) <= r for a, b, r in zip(own, key, radius, strict=True))
    return table


def dense(q, k, v, allowed):
    """out and lse over the allowed keys [.., N, M]; equal heads."""
    scores = q.flatten(2, -2) @ k.flatten(2, -2).mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    out = scores.softmax(-1).nan_to_num() @ v.flatten(2, -2)
    return out.reshape(*q.shape[:-1], v.shape[-1]), scores.logsumexp(-1).reshape(q.shape[:-1])


@pytest.mark.parametrize(
    ("grid", "key_grid", "radius"),
    [pytest.param(*given, marks=[pytest.mark.slow] * (len(given[0]) > 2)) for given in GRIDS],
    ids=str,
)
def test_it_is_dense_attention_under_a_mask(impl, grid, key_grid, radius):
    q, k, v = (torch.randn(2, 2, *g, 4, requires_grad=True) for g in (grid, key_grid, key_grid))
    mask = torch.rand(2, *key_grid) < 0.7
    for key_mask, causal in ((None, False), (mask, False), (None, True)):
        if causal and grid != key_grid:
            continue
        allowed = windows(grid, key_grid, radius)
        allowed = allowed & mask.reshape(2, 1, 1, -1) if key_mask is not None else allowed
        allowed = allowed.tril() if causal else allowed
        ours = scram.local(q, k, v, radius=radius, key_mask=key_mask, causal=causal, impl=impl)
        theirs = scram.Attended(*dense(q, k, v, allowed))
        leaves = [q, k, v]
        for one, other in zip((*ours, *gradients(ours, leaves)), (*theirs, *gradients(theirs, leaves)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_gradcheck_of_a_local_window(impl):
    if impl == "triton":
        pytest.skip("Triton has no float64")
    q, k, v = (torch.randn(1, 2, 3, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda q, k, v: tuple(scram.local(q, k, v, radius=1, impl=impl)), (q, k, v))


def test_it_takes_what_attend_takes():
    case = next(case for case in CASES if case.name == "all at once")
    given = make_tensors(case)
    own = scram.Matches.identity(case.grid, case.keys_grid, batch=case.batch, heads=case.heads)
    options = {"key_mask": given.key_mask, "extra": given.extra, "score": "l2", "weight": "relu", "scale": 0.3}
    torch.manual_seed(0)
    ours = scram.local(given.q, given.k, given.v, radius=(2, 1), dropout_p=0.3, **options)
    torch.manual_seed(0)
    theirs = scram.attend(given.q, given.k, given.v, own, radius=(2, 1), dropout_p=0.3, **options)
    assert torch.equal(ours.out, theirs.out)
    assert torch.equal(ours.lse, theirs.lse)


@pytest.mark.slow
def test_compiled_equals_eager():
    q, k, v = torch.randn(3, 1, 2, 9, 10, 8).unbind()
    compiled = torch.compile(lambda q, k, v: scram.local(q, k, v, radius=2).out, backend="aot_eager", fullgraph=True)
    for size in (10, 9):
        some = [x[..., :size, :].contiguous() for x in (q, k, v)]
        assert torch.equal(compiled(*some), scram.local(*some, radius=2).out)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"radius": (1, 1, 1)}, ValueError, r"radius must be an int or one int per grid axis \(2\), got 3 values"),
        ({"radius": -1}, ValueError, "radius must be at least 0"),
        ({"k": torch.zeros(1, 1, 4, 3)}, ValueError, "k must have as many axes as q"),
        ({"search": scram.Search()}, TypeError, r"local\(\) has no argument search"),
    ],
)
def test_errors_say_what_was_expected(change, error, message):
    x = torch.zeros(1, 1, 4, 4, 3)
    with pytest.raises(error, match=message):
        scram.local(**{"q": x, "k": x, "v": x, "radius": 1, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_device(dtype):
    case = named("rank 2", grid=(41, 50), width=64, value_width=64, batch=2, heads=2, dtype=dtype)
    given = to(make_tensors(case), "cuda")

    def everything(impl, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (given.q, given.k, given.v)]
        made = scram.Attended(*(x.cpu() for x in scram.local(*leaves, radius=3, impl=impl)))
        return [x.detach().cpu() for x in (*made, *gradients(made, leaves))]

    truth, same = everything("reference", torch.float64), everything("reference", dtype)
    assert_as_near_float64(truth, same, everything("triton", dtype), lambda x: float(x.double().norm()))
