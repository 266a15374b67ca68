"""The Triton engine's clustered tail: out, lse and gradients as near float64 as the reference's."""

import pytest
import torch

from scram.core.calls import ClusterTailCall, ClusterTailGrads
from scram.engines.gpu.cluster_tail import table
from scram.engines.gpu.engine import cluster_tail, cluster_tail_backward
from scram.engines.reference.cluster_tail import cluster_tail as plain_tail
from support.cases import Case, assert_as_near_float64, size
from support.cluster_calls import Tailed, tail_call

pytestmark = pytest.mark.gpu
interpreted = pytest.mark.interpreted

FLOAT = torch.float32
TAILS = [
    Tailed(Case("rank 2", width=5, value_width=7)),
    Tailed(Case("rank 1", grid=(70,), key_grid=(9,), kappa=3, radius=2, batch=2), clusters=70, keys=5),
    Tailed(Case("rank 3", grid=(2, 3, 4), key_grid=(5, 2, 3), kappa=1), keys=20),
    Tailed(Case("rank 4", grid=(2, 3, 2, 2), radius=(1, 0, 1, 0)), keys=9),
    Tailed(Case("many keys of windows", grid=(5, 5), kappa=3, radius=(2, 2)), keys=8),
    Tailed(Case("grouped heads and dropout", heads=4, key_heads=2, grid=(4, 5), dropout_p=0.4, batch=2), keys=9),
    Tailed(Case("a row fully masked", heads=2, key_heads=1, mask="row", grid=(4, 5)), heads=2, keys=9),
    Tailed(Case("wide", grid=(3, 3), width=70, value_width=130, kappa=1), clusters=40, keys=4),
    Tailed(Case("float16 wide", width=130, value_width=20, dtype=torch.float16, grid=(3, 3), dropout_p=0.3), keys=4),
    Tailed(Case("large common scores", offset=2.0**13), clusters=40, keys=10),
    Tailed(Case("empty batch", batch=0), keys=9),
]
# Triton's interpreter cuts bfloat16 off instead of rounding it.
ON_A_DEVICE = [
    Tailed(Case("bfloat16", width=5, value_width=20, dtype=torch.bfloat16), clusters=70, keys=20),
    Tailed(Case("bfloat16 wide", grid=(20, 21), width=64, value_width=64, dtype=torch.bfloat16, kappa=4), 200, 100),
    Tailed(Case("float16", grid=(20, 21), width=64, value_width=32, dtype=torch.float16, heads=2), 200, 100),
    Tailed(Case("bfloat16 pieces", grid=(20, 21), width=160, value_width=200, dtype=torch.bfloat16), 90, 100),
    Tailed(Case("float32", grid=(20, 21), width=64, value_width=64), clusters=200, keys=100),
]


def on(device, call):
    return ClusterTailCall(*(x.to(device) if isinstance(x, torch.Tensor) and x.ndim else x for x in call))


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves_of(call):
    return [name for name in ClusterTailGrads._fields if getattr(call, name) is not None]


def plainly(call):
    """out, lse and all gradients of the reference."""
    names = leaves_of(call)
    leaves = [getattr(call, name).detach().requires_grad_() for name in names]
    out, lse = plain_tail(call._replace(**dict(zip(names, leaves, strict=True))))
    finite = torch.where(lse == -torch.inf, 0, lse)
    total = (out * drawn(out.shape, 1).to(out)).sum(dtype=torch.float64) + (finite * drawn(lse.shape, 2)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def ours(call, device):
    call = on(device, call)
    out, lse = cluster_tail(call)
    grad_lse = torch.where(lse.cpu() == -torch.inf, 0, drawn(lse.shape, 2))
    given = drawn(out.shape, 1).to(out.dtype), grad_lse.to(lse.dtype)
    grads = cluster_tail_backward(call, out, lse, *(x.to(device) for x in given))
    assert [name for name, x in grads._asdict().items() if x is not None] == leaves_of(call)
    made = {"out": out, "lse": lse, **{name: x for name, x in grads._asdict().items() if x is not None}}
    return {name: x.cpu() for name, x in made.items()}


def in_dtype(results, dtype):
    """Gradients of the clusters as keys and values of that dtype have them."""
    of_clusters = ("centers", "values", "slope") if dtype.itemsize == 2 else ()
    return [x.to(dtype) if name in of_clusters else x for name, x in results.items()]


def given_call(one, dtype):
    """Centers and values that 16 bits hold: kernels keep no more of them beside features of 16 bits."""
    call = tail_call(one, dtype)
    kept = one.case.dtype
    return call._replace(
        **{name: getattr(call, name).to(kept).to(call.centers.dtype) for name in ("centers", "values")}
    )


@pytest.mark.parametrize("one", [*(pytest.param(x, marks=interpreted) for x in TAILS), *ON_A_DEVICE], ids=str)
def test_tails_and_gradients_are_as_near_float64_as_the_reference(one, device):
    dtype = one.case.dtype
    truth, same = (plainly(given_call(one, kind)) for kind in (torch.float64, dtype))
    found = ours(given_call(one, dtype), device)
    assert_as_near_float64(truth.values(), in_dtype(same, dtype), in_dtype(found, dtype), size)


@interpreted
def test_a_cluster_inside_the_windows_contributes_nothing(device):
    one = Tailed(Case("near", grid=(4, 4)), clusters=3)
    call = tail_call(one, FLOAT)
    index = torch.full_like(call.index, 5)
    label = torch.full_like(call.label, 0)
    label[..., :2, :2] = 1  # near the match of every query
    sizes = (label.flatten(2).unsqueeze(-1) == torch.arange(3)).sum(2).int()
    call = call._replace(index=index, label=label, sizes=sizes)
    spoiled = call.centers.clone()
    spoiled[..., 1:, :] = torch.nan
    plain, other = (on(device, call._replace(centers=x)) for x in (call.centers, spoiled))
    for kept, changed in zip(cluster_tail(plain), cluster_tail(other), strict=True):
        assert kept.isfinite().all()
        assert kept.equal(changed)
    grads = cluster_tail_backward(other, *cluster_tail(other), other.near_out, other.near_lse)
    assert all(x.isfinite().all() for x in grads if x is not None)
    assert not grads.centers[..., 1:, :].any()
    assert not grads.values[..., 1:, :].any()


@interpreted
def test_nothing_left_and_no_head_is_no_attention(device):
    one = Tailed(Case("nothing", grid=(4, 4)))
    call = tail_call(one, FLOAT)
    call = call._replace(label=torch.full_like(call.label, -1), sizes=call.sizes * 0)
    same = cluster_tail(on(device, call))
    torch.testing.assert_close(same.out.cpu(), call.near_out)
    torch.testing.assert_close(same.lse.cpu(), call.near_lse)
    alone = cluster_tail(on(device, call._replace(near_lse=torch.full_like(call.near_lse, -torch.inf))))
    assert (alone.out == 0).all()
    assert (alone.lse == -torch.inf).all()


@pytest.mark.parametrize("one", ON_A_DEVICE[:2], ids=str)
def test_repeatable(one, device):
    call = tail_call(one, one.case.dtype)
    first, second = ours(call, device), ours(call, device)
    assert all(x.equal(second[name]) for name, x in first.items())


@interpreted
def test_kernels(launched):
    for keys, lists in ((0, []), (9, ["routed_keys_kernel"])):
        launched.clear()
        ours(tail_call(Tailed(Case("few", grid=(4, 4)), keys=keys), FLOAT), "cpu")
        before = [*lists, "table_kernel", "counts_kernel"]
        gradients = ["tail_queries_kernel", "tail_clusters_kernel", "tail_slope_kernel"]
        of_keys = ["routing_tiles_kernel", "tail_keys_kernel"] if keys else []
        assert launched == [*before, "cluster_tail_kernel", *before, *gradients, *of_keys]


@pytest.mark.parametrize("tiles", [1, 4])
def test_counts_of_few_tiles_at_a_time(tiles, device, monkeypatch):
    """A row of keys has 18 tiles: some four are of two rows. 70 clusters have 4 words, their counts 5 planes."""
    case = Case("some tiles", batch=2, heads=2, key_heads=1, grid=(17, 19), key_grid=(9, 11))
    call = tail_call(Tailed(case, clusters=70, keys=30), FLOAT)
    together = ours(call, device)
    monkeypatch.setattr(table, "COUNT_BYTES", tiles * 4 * 5 * 64 * 4)
    assert table.tiles_at_a_time(call, table.tail_flags(call, (32, 2, 1), (32, 2, 1))["CONFIG"]) == tiles
    for name, apart in ours(call, device).items():
        torch.testing.assert_close(apart, together[name])
