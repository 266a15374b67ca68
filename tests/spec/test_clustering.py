"""Keys grouped by content: sizes and means of the groups, what is left out, starts, and gradients given the groups."""

import pytest
import torch

import scram
from scram.core import ops
from scram.core.calls import ClusterCall
from scram.engines import dispatch
from scram.spec import clustering
from scram.spec.noise import noise
from support import plain_routing as plain
from support.cluster_calls import cluster_call
from support.cluster_tails import run
from support.in_interpreter import INTERPRETED
from support.on_device import to


def clusters_of(q, k, v, count, impl="reference", steps=3, seed=0, mask=None, warm=(None, None)):
    if impl == "triton" and v.dtype == torch.float64:
        pytest.skip("the Triton engine takes no float64")
    place = "cuda" if impl == "triton" and torch.cuda.is_available() and not INTERPRETED else "cpu"
    call = ClusterCall(*to((q, k, v, mask, *warm), place), torch.tensor(seed), None, count, steps, q.shape[-1] ** -0.5)
    return to(ops.cluster(dispatch.ENGINES[impl], call), "cpu")


def grids(*shape, width=8, dtype=torch.float32):
    return torch.randn(*shape, width, dtype=dtype)


@pytest.mark.parametrize(
    "grid", [(70,), pytest.param((9, 8), marks=pytest.mark.interpreted), (4, 5, 4), (2, 3, 4, 3)], ids=len
)
def test_sizes_and_means_are_those_of_the_labels(impl, grid):
    q, k, v = grids(2, 4, *grid), grids(2, 2, *grid), grids(2, 2, *grid, width=3)
    made = clusters_of(q, k, v, 7, impl)
    label = made.label.flatten(2)
    assert made.label.shape == k.shape[:-1]
    assert (label >= 0).all()
    for b, h, c in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(7)).tolist():
        own = label[b, h] == c
        assert made.sizes[b, h, c] == own.sum()
        for mean, x in ((made.centers, k), (made.values, v)):
            want = x[b, h].flatten(0, -2)[own].mean(0) if own.any() else torch.zeros(x.shape[-1])
            torch.testing.assert_close(mean[b, h, c], want, rtol=1e-5, atol=1e-5)


def moments_of(call, made, batch, head):
    """Slope, variance and spreads of a row of keys, in plain Python."""
    k, v = plain.table(call.k, batch, head), plain.table(call.v, batch, head)
    label = made.label[batch, head].flatten().tolist()
    usable = [j for j, name in enumerate(label) if name >= 0]
    return plain.moments(k, v, label, call.clusters, plain.metric(call, batch, head, usable))


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"grid": (30,)},
        {"grid": (30,), "mask": "batch"},
        {"grid": (5, 6), "batch": 2, "heads": 4, "key_heads": 2, "mask": "batch"},
        {"grid": (3, 2, 4), "mask": "head", "key_heads": 2, "heads": 2},
        {"grid": (4, 4), "count": 1},
        {"grid": (3, 3), "count": 9},
    ],
    ids=str,
)
def test_moments_are_those_of_plain_python(impl, how, dtype):
    call = cluster_call(**({"width": 3, "value_width": 2, "count": 5, "dtype": dtype, "query_grid": (7,)} | how))
    call.q[0, 0, 3] = torch.nan
    call.k[0, 0].view(-1, 3)[2, 1] = torch.inf
    call.v[0, 0].view(-1, 2)[4, 0] = torch.nan
    made = run("cluster", call, impl)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    for batch, head in torch.cartesian_prod(torch.arange(call.k.shape[0]), torch.arange(call.k.shape[1])).tolist():
        slope, variance, spreads = moments_of(call, made, batch, head)
        torch.testing.assert_close(made.slope[batch, head], torch.tensor(slope, dtype=dtype), **near)
        torch.testing.assert_close(made.variance[batch, head], torch.tensor(variance, dtype=dtype), **near)
        # An engine may take a key that is not finite for one of 0 where it measures the metric; Triton always does.
        loose = near if call.key_mask is not None else {"rtol": 0.02, "atol": 1e-5}
        loose = {"rtol": 3e-2, "atol": 1e-3} if impl == "triton" else loose
        torch.testing.assert_close(made.spreads[batch, head], torch.tensor(spreads, dtype=dtype), **loose)
    assert made.slope.shape == (*call.k.shape[:2], 3, 2)
    assert made.slope.dtype == made.variance.dtype == made.spreads.dtype == made.centers.dtype == dtype


@pytest.mark.interpreted
def test_clusters_of_one_key_have_no_spread_at_all(impl):
    """Not by a rounding: exactly 0."""
    k, v = 1e3 + grids(1, 2, 5, 6), grids(1, 2, 5, 6, width=3)
    made = clusters_of(grids(1, 2, 5, 6), k, v, 30, impl)
    assert not made.slope.any()
    assert not made.variance.any()
    assert not made.spreads.any()
    made = clusters_of(grids(1, 2, 5, 6), k, v, 20, impl)
    assert (made.sizes == 1).any()
    assert (made.spreads[made.sizes == 1] == 0).all()
    assert (made.spreads[made.sizes > 1] > 0).all()
    assert (made.variance > 0).all()


def test_the_order_is_by_cluster_and_then_by_key(impl):
    q, k, v = grids(2, 4, 9, 8), grids(2, 2, 9, 8), grids(2, 2, 9, 8, width=3)
    mask = torch.rand(2, 9, 8) < 0.8
    for made in (clusters_of(q, k, v, 7, impl, mask=mask), clusters_of(q, k, v, 72, impl, mask=mask)):
        assert made.order.dtype == torch.int32
        for row, label in zip(made.order.flatten(0, 1), made.label.flatten(0, 1).flatten(1), strict=True):
            names = label.tolist()
            assert row.tolist() == sorted(range(72), key=lambda j, of=names: (of[j] < 0, of[j], j))
        assert torch.equal(clustering.order_of(made.label), made.order)


def test_the_mean_spread_is_one(impl):
    q, k, v = grids(1, 2, 12, 13), grids(1, 2, 12, 13), grids(1, 2, 12, 13, width=3)
    made = clusters_of(q, k, v, 9, impl)
    torch.testing.assert_close((made.spreads * made.sizes).sum(-1) / made.sizes.sum(-1), torch.ones(1, 2))


def test_every_key_is_with_the_nearest_center(impl):
    """In the metric of the queries and the spread of the values, for centers that k-means no longer moves."""
    q, k, v = grids(1, 1, 12, 12), grids(1, 1, 12, 12), grids(1, 1, 12, 12)
    made = clusters_of(q, k, v, 6, impl, steps=40)
    keys, values = k.flatten(0, -2), v.flatten(0, -2)
    queries = 8**-0.5 * q.flatten(0, -2)
    queries = queries / (1 + (queries @ keys.T).var(1, correction=0)).sqrt().unsqueeze(1)
    apart = keys[:, None] - made.centers[0, 0]
    off = (apart @ queries.T).square().mean(-1)  # how far the scores are off
    spread = ((keys - keys.mean(0)) @ queries.T).square().mean()
    weight = clustering.VALUE_WEIGHT * spread / (values - values.mean(0)).square().sum(-1).mean()
    off = off + weight * (values[:, None] - made.values[0, 0]).square().sum(-1)
    nearest = off.argmin(1)
    assert (nearest == made.label.flatten()).float().mean() > 0.97


def test_copies_of_few_pairs_are_found_every_one(impl):
    """Of 12 kinds of keys, 48 clusters: starts miss some, and clusters without keys are placed anew at those."""
    kind = torch.randint(12, (1, 1, 16, 16))
    keys, values = torch.randn(12, 8), torch.randn(12, 3)
    k, v = keys[kind], values[kind]
    made = clusters_of(grids(1, 1, 16, 16), k, v, 48, impl)
    of_label = {}
    for one, label in zip(kind.flatten().tolist(), made.label.flatten().tolist(), strict=True):
        assert of_label.setdefault(label, one) == one
    found = scram.Matches(torch.full((1, 1, 16, 16, 1), -1, dtype=torch.int32), torch.zeros(1, 1, 16, 16, 1), (16, 16))
    q = grids(1, 1, 16, 16)
    book = scram.cluster(q, k, v, clusters=scram.Clusters(count=48, seed=0), impl=impl)
    out, lse = scram.attend(q, k, v, found, tail=book, impl=impl)
    exact = scram.exact_attention(q, k, v)
    torch.testing.assert_close(out, exact.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, exact.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [30, 100])
def test_one_cluster_a_key_where_there_are_enough(impl, count):
    k, v = grids(1, 2, 5, 6), grids(1, 2, 5, 6, width=3)
    made = clusters_of(grids(1, 2, 5, 6), k, v, count, impl)
    assert made.sizes.shape == (1, 2, 30)
    assert (made.sizes == 1).all()
    torch.testing.assert_close(
        made.centers[0, :, made.label[0, 0].flatten().long()], k.flatten(2, 3)[0], rtol=0, atol=0
    )


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masked_keys_and_keys_that_are_not_finite_are_in_no_cluster(impl):
    k, v = grids(2, 2, 6, 7), grids(2, 2, 6, 7, width=3)
    k[0, 0, 2, 3, 1], k[1, 1, 0, 0] = torch.inf, torch.nan
    v[0, 1, 5, 5, 2] = torch.nan
    mask = torch.rand(2, 6, 7) < 0.6
    mask[0, 2, 3] = mask[1, 0, 0] = mask[0, 5, 5] = True
    made = clusters_of(grids(2, 4, 6, 7), k, v, 5, impl, mask=mask)
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    assert ((made.label < 0) == (bad | ~mask.unsqueeze(1))).all()
    assert (made.sizes.sum(-1) == (made.label >= 0).flatten(2).sum(-1)).all()
    assert made.centers.isfinite().all()
    assert made.values.isfinite().all()


@pytest.mark.interpreted
def test_no_legal_key_few_keys_one_key_and_an_empty_batch(impl):
    none = clusters_of(
        grids(1, 1, 4, 4), grids(1, 1, 4, 4), grids(1, 1, 4, 4), 3, impl, mask=torch.zeros(1, 4, 4, dtype=torch.bool)
    )
    assert (none.label == -1).all()
    assert not none.sizes.any()
    few = torch.zeros(1, 4, 4, dtype=torch.bool)
    few[0, 1] = True
    made = clusters_of(grids(1, 1, 4, 4), grids(1, 1, 4, 4), grids(1, 1, 4, 4), 6, impl, mask=few)
    assert made.sizes.sum() == 4
    assert (made.sizes <= 1).all()  # every legal key is a start
    one = clusters_of(grids(1, 1, 5), grids(1, 1, 1), grids(1, 1, 1), 3, impl)
    assert one.sizes.tolist() == [[[1]]]
    empty = clusters_of(grids(0, 2, 5, 4), grids(0, 2, 5, 4), grids(0, 2, 5, 4, width=3), 3, impl)
    assert empty.centers.shape == (0, 2, 3, 8)
    assert empty.label.shape == (0, 2, 5, 4)


def test_the_seed_governs_the_groups(impl):
    q, k, v = (grids(1, 2, 12, 13) for _ in range(3))
    first, again, other = (clusters_of(q, k, v, 9, impl, steps=1, seed=seed) for seed in (3, 3, 4))
    assert (first.label == again.label).all()
    assert (first.centers == again.centers).all()
    assert (first.label != other.label).any()


def test_a_warm_start_keeps_what_it_is_given(impl):
    """Without steps every key goes to the nearest of the given centers."""
    q, k, v = (grids(1, 1, 12, 12) for _ in range(3))
    settled = clusters_of(q, k, v, 6, impl, steps=40)
    again = clusters_of(q, k, v, 6, impl, steps=0, seed=99, warm=(settled.centers, settled.values))
    assert (again.label == settled.label).float().mean() > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("count", [4, 20])
def test_gradients_of_centers_values_and_slope_given_the_labels(impl, count):
    """Some keys are in no cluster. The labels do not change within the small steps of the check."""
    q, k, v = (torch.randn(1, h, 3, 4, w, dtype=torch.float64) for h, w in ((2, 2), (1, 2), (1, 3)))
    mask = torch.arange(12).reshape(1, 3, 4) != 5

    def parts(k, v):
        made = clusters_of(q, k, v, count, impl, mask=mask)
        return made.centers, made.values, made.slope

    assert torch.autograd.gradcheck(parts, (k.requires_grad_(), v.requires_grad_()))
    made = clusters_of(q, k, v, count, impl, mask=mask)
    assert not made.variance.requires_grad
    assert not made.spreads.requires_grad


def test_gradients_reach_keys_and_values_through_the_means(impl, widest):
    q, k, v = (grids(1, 2, 5, 6, width=4, dtype=widest) for _ in range(3))
    k, v = k.requires_grad_(), v.requires_grad_()
    made = clusters_of(q, k, v, 4, impl)
    up_k, up_v = torch.randn_like(made.centers), torch.randn_like(made.values)
    grads = torch.autograd.grad((made.centers * up_k).sum() + (made.values * up_v).sum(), (k, v))
    at = made.label.flatten(2).long().unsqueeze(-1).expand(-1, -1, -1, 4)
    for grad, up in zip(grads, (up_k, up_v), strict=True):
        want = (up / made.sizes.clamp(min=1).unsqueeze(-1)).gather(2, at).reshape(grad.shape)
        torch.testing.assert_close(grad, want)


def test_no_gradient_of_keys_in_no_cluster(impl, widest):
    k = grids(1, 1, 5, 6, width=4, dtype=widest).requires_grad_()
    mask = torch.rand(1, 5, 6) < 0.5
    made = clusters_of(k.detach(), k, k.detach(), 4, impl, mask=mask)
    (grad,) = torch.autograd.grad(made.centers.sum(), k)
    assert (grad[0, 0][~mask[0]] == 0).all()
    assert (grad[0, 0][mask[0]] != 0).all()


def test_places_are_drawn_one_from_each_part():
    total = torch.tensor(1000)
    place = clustering.strides(torch.tensor(5), 2, 1, 10, total)
    assert (place // 100 == torch.arange(10)).all()
    assert place.tolist() != clustering.strides(torch.tensor(6), 2, 1, 10, total).tolist()
    assert clustering.strides(torch.tensor(5), 0, 0, 8, torch.tensor(4)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    large = clustering.strides(torch.tensor(0), 0, 0, 4, torch.tensor(2**31))
    assert (large // 2**29 == torch.arange(4)).all()
    assert noise(0, 1).dtype == torch.int64


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_an_empty_batch_has_empty_gradients(impl):
    q, k, v = (torch.zeros(0, 2, 4, 5, 3).requires_grad_() for _ in range(3))
    scram.attention(q, k, v, search=scram.Search(seed=0), tail=scram.Clusters(count=5), impl=impl).sum().backward()
    assert all(x.grad.shape == x.shape for x in (q, k, v))
