"""The Triton engine's clustering: as good as the reference's, and what belongs to no cluster."""

import pytest
import torch

from scram.core.calls import ClusterCall, Clustered
from scram.engines.gpu.engine import clear_caches, cluster, cluster_backward
from scram.spec import clustering
from scram.spec.grid import rows
from support.cluster_calls import cluster_call

pytestmark = pytest.mark.gpu
interpreted = pytest.mark.interpreted


def ours(call, device):
    found = cluster(ClusterCall(*(x.to(device) if isinstance(x, torch.Tensor) and x.ndim else x for x in call)))
    return Clustered(*(x.cpu() for x in found))


def cost(call, made):
    """Squared distances of all keys from their centers, in the reference's space."""
    k, v, label = rows(call.k).double(), rows(call.v).double(), made.label.flatten(2).flatten(0, 1).long()
    total = 0.0
    for row in range(len(k)):
        own = label[row][label[row] >= 0]
        some_k, some_v = k[row][label[row] >= 0], v[row][label[row] >= 0]
        space = clustering.Space.of(call.scale * clustering.queries_of(call, row).double(), some_k, some_v)
        apart = some_k - made.centers.flatten(0, 1)[row].double()[own]
        away = some_v - made.values.flatten(0, 1)[row].double()[own]
        total += float((apart @ space.metric * apart).sum() + space.value_weight * away.square().sum())
    return total


def metric_of(call, row, usable):
    """What a squared distance counts on each axis of the keys, in the reference's space."""
    k, v = rows(call.k).double()[row], rows(call.v).double()[row]
    kept = [torch.where(usable[row].unsqueeze(-1), x, 0) for x in (k, v)]
    return clustering.Start.of(call, row, *kept, usable[row]).space.metric.diagonal()


def apart(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def assert_of_labels(call, made):
    """All else is what the labels say, which all legal keys have."""
    k, v, label = rows(call.k).double(), rows(call.v).double(), made.label.flatten(2).flatten(0, 1).long()
    count = call.clusters
    assert (label < count).all()
    usable = clustering.usable_keys(call, k, v)
    assert ((label >= 0) == usable).all()
    k, v = (torch.where(usable.unsqueeze(-1), x, 0) for x in (k, v))
    centers, values, sizes = clustering.means(k, v, label, count)
    torch.testing.assert_close(made.centers.flatten(0, 1), centers.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.values.flatten(0, 1), values.float(), rtol=1e-5, atol=1e-5)
    assert made.sizes.flatten(0, 1).equal(sizes.int())
    assert made.order.equal(clustering.order_of(made.label))
    metric = torch.stack([metric_of(call, row, usable) for row in range(len(k))]) if count < k.shape[1] else k[:, 0] * 0
    slope, variance, spreads = clustering.moments(k, v, label, centers, values, sizes, metric)
    rough = 1e-2 if call.k.dtype.itemsize == 2 else 1e-4  # of 16 bits slopes are products of such numbers
    scale = k.square().mean().sqrt() * v.square().mean().sqrt() * 1e-7
    assert (made.slope.flatten(0, 1).double() - slope).norm() <= rough * slope.norm() + scale * slope.numel()
    assert apart(made.variance.flatten(0, 1), variance) <= 1e-4
    assert apart(made.spreads.flatten(0, 1), spreads) <= 1e-2  # their metric is that of a sample, of 16 bits
    assert {x.dtype for x in (made.centers, made.values, made.slope, made.variance, made.spreads)} == {torch.float32}


SMALL = [
    {"steps": 3},
    {"batch": 2, "heads": 2, "width": 5, "value_width": 20, "dtype": torch.float16, "mask": "batch", "groups": 300},
    {
        "heads": 2,
        "key_heads": 2,
        "grid": (90,),
        "width": 70,
        "value_width": 130,
        "mask": "head",
        "sample": 64,
        "count": 12,
    },
    {"grid": (3, 4, 5), "dtype": torch.bfloat16, "warm": True, "count": 10, "groups": 10, "steps": 0},
    {"grid": (300,), "dtype": torch.float16, "unit": 64.0, "sample": 128},
]
LARGE = [
    {
        "width": 64,
        "value_width": 64,
        "grid": (200, 200),
        "count": 256,
        "groups": 500,
        "steps": 3,
        "dtype": torch.bfloat16,
    },
    {
        "width": 64,
        "value_width": 32,
        "grid": (200, 200),
        "count": 200,
        "groups": 500,
        "steps": 3,
        "dtype": torch.float16,
    },
    {
        "width": 64,
        "value_width": 64,
        "grid": (100, 100),
        "count": 256,
        "groups": 500,
        "steps": 3,
        "heads": 4,
        "key_heads": 2,
    },
]


@pytest.mark.parametrize("given", [*(pytest.param(x, marks=interpreted) for x in SMALL), *LARGE], ids=str)
def test_clusters_are_as_good_as_the_reference(given, device, monkeypatch):
    given = dict(given)
    monkeypatch.setattr(clustering, "SAMPLED_KEYS", given.pop("sample", clustering.SAMPLED_KEYS))
    clear_caches()
    call = cluster_call(**given)
    theirs, made = clustering.cluster(call), ours(call, device)
    assert_of_labels(call, made)
    assert cost(call, made) <= 1.06 * cost(call, theirs)
    if device == "cuda":  # elsewhere programs run one after the other
        for one, other in zip(made, ours(call, device), strict=True):
            assert one.equal(other)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
def test_what_is_masked_or_not_finite_is_in_no_cluster(device):
    call = cluster_call(grid=(100,), count=7, mask="batch", heads=2)
    call.k[..., 3, 2], call.v[..., 5, 0], call.k[..., 8, 0] = torch.nan, torch.inf, -torch.inf
    call.q[..., 0, 0] = torch.nan
    call.key_mask[..., 3:9] = True
    made = ours(call, device)
    assert_of_labels(call, made)
    assert (made.label[..., [3, 5, 8]] == -1).all()
    assert all(x.isfinite().all() for x in made)
    nothing = ours(call._replace(key_mask=torch.zeros_like(call.key_mask)), device)
    assert (nothing.label == -1).all()
    assert not any(x.any() for x in (*nothing[:4], nothing.variance, nothing.spreads))
    assert nothing.order.equal(torch.arange(100, dtype=torch.int32).expand_as(nothing.order))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copies_have_clusters_of_their_own(dtype, device):
    call = cluster_call(grid=(600,), groups=12, count=48, noise=0.0, steps=3, dtype=dtype)
    made = ours(call, device)
    own = made.label.flatten().long()
    torch.testing.assert_close(made.centers[0, 0][own], call.k[0, 0].float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.values[0, 0][own], call.v[0, 0].float(), rtol=1e-6, atol=1e-6)


@interpreted
def test_an_empty_cluster_moves_to_far_keys(device):
    call = cluster_call(grid=(200,), groups=6, count=6, noise=0.01, steps=3)
    far = torch.full((1, 1, 6, 8), 100.0)
    far[..., 0, :] = 2.0
    made = ours(call._replace(warm_centers=far, warm_values=far), device)
    assert (made.sizes > 0).all()


@interpreted
def test_as_many_clusters_as_keys(device):
    call = cluster_call(grid=(20,), count=20, mask="batch")
    made = ours(call, device)
    assert_of_labels(call, made)
    assert made.label.flatten().equal(torch.where(call.key_mask.flatten(), torch.arange(20), -1).int())


@interpreted
def test_few_legal_keys_are_clusters_of_one(device):
    call = cluster_call(grid=(90,), count=30, mask="batch")
    call.key_mask[..., 25:] = False
    made = ours(call, device)
    assert_of_labels(call, made)
    assert (made.sizes <= 1).all()


@interpreted
def test_one_cluster_has_most_keys(device):
    """More splits than clusters: one cluster has segments in all of them, others are alone in theirs."""
    call = cluster_call(grid=(1100,), count=5, groups=3, steps=0)
    starts = torch.full((1, 1, 5, 8), 1000.0)
    starts[..., 0, :] = 2.0
    starts[..., 1, :] = call.k[0, 0, 700]
    values = torch.where(starts == 1000.0, 1000.0, 2.0)
    values[..., 1, :] = call.v[0, 0, 700]
    made = ours(call._replace(warm_centers=starts, warm_values=values), device)
    assert_of_labels(call, made)
    assert made.sizes.sort().values[..., -2:].sum() == 1100
    assert made.sizes.max() > 300


@interpreted
def test_several_groups_of_clusters(device):
    call = cluster_call(grid=(700,), count=150, groups=200, dtype=torch.float16, steps=1)
    made = ours(call, device)
    assert_of_labels(call, made)
    assert (made.sizes[..., 128:] > 0).any()


@pytest.mark.parametrize("given", [*(pytest.param(x, marks=interpreted) for x in SMALL), *LARGE], ids=str)
def test_gradients_are_those_of_the_formulas(given, device):
    call = cluster_call(**{name: x for name, x in given.items() if name != "sample"})
    call.k[..., 0, 0] = torch.nan
    made = clustering.cluster(call)
    drawn = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in made[:3]]
    drawn[2] *= 100  # of a slope that matters
    given = (made.centers, made.values, made.sizes, made.label, *drawn)
    here = call._replace(k=call.k.to(device), v=call.v.to(device))
    found = cluster_backward(here, *(x.to(device) for x in given))
    wide = call._replace(k=call.k.double(), v=call.v.double())
    in_double = (x.double() if x.is_floating_point() else x for x in given)
    for one, wanted in zip(found, clustering.cluster_backward(wide, *in_double), strict=True):
        assert one.dtype == call.k.dtype
        assert apart(one.cpu(), wanted) <= {4: 1e-5, 2: 1e-2}[call.k.dtype.itemsize]


@interpreted
def test_kernels(launched):
    ours(cluster_call(grid=(40,), count=4, steps=2), "cpu")
    space = ["sample_kernel", "moments_kernel", "metric_kernel", "space_kernel", "forms_kernel"]
    nearest = ["assign_kernel", "label_kernel", "prefix_kernel", "order_kernel"]
    step = [*nearest, "far_kernel", "segments_kernel", "forms_kernel"]
    sums = ["segments_kernel", "products_kernel", "means_kernel", "slope_kernel"]
    assert launched == [*space, *step, *step, *nearest, *sums]
