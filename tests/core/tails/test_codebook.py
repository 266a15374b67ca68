"""Codebooks: what they print, files, devices, and calls that do not fit them."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import scram

Q, K, V = (torch.randn(2, 4, 6, 7, 8), torch.randn(2, 2, 6, 7, 8), torch.randn(2, 2, 6, 7, 3))
CLUSTERS = scram.Clusters(count=8, seed=0)


@cache
def found():
    return scram.search(Q, K, search=scram.Search(seed=0))


def book(**changes):
    return scram.cluster(Q, K, V, **({"clusters": CLUSTERS} | changes))


def test_it_prints_itself():
    assert repr(book()) == (
        "Codebook(8 clusters of keys on grid (6, 7), batch=2, heads=2, score='dot', scale=0.354, cpu)"
    )
    fitted = book(clusters=replace(CLUSTERS, fit=8), matches=found(), radius=1)
    assert "fitted: output error 0." in repr(fitted)


@pytest.mark.parametrize("fit", [0, 8])
def test_it_survives_a_file(tmp_path, fit):
    mask = torch.rand(2, 6, 7) < 0.8
    made = book(clusters=replace(CLUSTERS, fit=fit), matches=found(), radius=1, key_mask=mask, score="l2")
    made.save(tmp_path / "book.safetensors")
    again = scram.Codebook.load(tmp_path / "book.safetensors")
    for name in ("centers", "values", "sizes", "label", "gains", "key_mask"):
        a, b = getattr(made, name), getattr(again, name)
        assert a is b is None or torch.equal(a, b)
    assert (made.score, made.scale, made.radius, made.report) == (again.score, again.scale, again.radius, again.report)
    out, lse = scram.attend(Q, K, V, found(), tail=again, key_mask=mask, score="l2")
    want = scram.attend(Q, K, V, found(), tail=made, key_mask=mask, score="l2")
    assert torch.equal(out, want.out)
    assert torch.equal(lse, want.lse)


def test_other_files_are_refused(tmp_path):
    found().save(tmp_path / "matches.safetensors")
    (tmp_path / "text").write_text("no tensors")
    for name in ("matches.safetensors", "text"):
        with pytest.raises(ValueError, match=r"not a safetensors file that Codebook\.save wrote"):
            scram.Codebook.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        scram.Codebook.load(tmp_path / "none")


WRONG = [
    ({"scale": 0.5}, r"made for score='dot', scale=0.353553, the call has score='dot', scale=0.5"),
    ({"score": "cosine"}, r"scale"),
    ({"key_mask": torch.ones(2, 6, 7, dtype=torch.bool)}, r"made with another key_mask"),
    ({"causal": True}, r"no causal order"),
    ({"weight": "mean"}, r"weight='softmax'"),
    ({"weight": "relu"}, r"weight='softmax'"),
    ({"score": lambda q, k: (q * k).sum(-1)}, r"a score by name"),
    ({"tail": 3}, r"tail must be .*scram\.Codebook, scram\.DrawnKeys, got int"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=range(len(WRONG)))
def test_a_call_that_does_not_fit_is_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scram.attend(Q, K, V, found(), **({"tail": book()} | changes))


def test_other_grids_widths_and_devices_are_refused():
    made = book()
    with pytest.raises(ValueError, match=r"key grid \(6, 7\), but k is \(2, 2, 7, 6, 8\)"):
        scram.attend(
            Q.mT.reshape(2, 4, 7, 6, 8),
            K.reshape(2, 2, 7, 6, 8),
            V.reshape(2, 2, 7, 6, 3),
            scram.search(Q.reshape(2, 4, 7, 6, 8), K.reshape(2, 2, 7, 6, 8)),
            tail=made,
        )
    with pytest.raises(ValueError, match="widths 8 and 3, these have 8 and 2"):
        scram.attend(Q, K, V[..., :2], found(), tail=made)
    with pytest.raises(ValueError, match=r"use tail\.to\(q\.device\)"):
        scram.attend(Q, K, V, found(), tail=made.to("meta"))
    with pytest.raises(TypeError, match="device must be a device"):
        made.to(torch.float64)
    with pytest.raises(ValueError, match="made for other dtypes"):
        scram.attend(Q.double(), K.double(), V.double(), found(), tail=made)
    with pytest.raises(ValueError, match="fitted for radius"):
        scram.attend(
            Q, K, V, found(), radius=2, tail=book(clusters=scram.Clusters(8, fit=8), matches=found(), radius=1)
        )


def test_clustering_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="needs matches= and radius="):
        book(clusters=scram.Clusters(fit=16))
    with pytest.raises(ValueError, match=r"fit must be 0 or at least 8 queries, got 3"):
        scram.Clusters(fit=3)
    with pytest.raises(ValueError, match="count must be at least 1"):
        scram.Clusters(count=0)
    with pytest.raises(TypeError, match=r"clusters must be a scram\.Clusters, got DrawnKeys"):
        book(clusters=scram.DrawnKeys())
    with pytest.raises(ValueError, match="a score by name"):
        book(score=lambda q, k: (q * k).sum(-1))
    with pytest.raises(ValueError, match=r"warm must have \(B, H, clusters, E, F\) = \(2, 2, 9, 8, 3\)"):
        book(clusters=scram.Clusters(count=9), warm=book())
    with pytest.raises(ValueError, match="sizes of a codebook must be"):
        replace(book(), sizes=torch.zeros(2, 2, 8))
    with pytest.raises(ValueError, match="must be"):
        replace(book(), sizes=torch.zeros(2, 2, 7, dtype=torch.int32))


FIT = scram.core.tails.codebook.FitReport(8, 0.1, 0.2, (0.1, 0.2), (0.3, 0.4))
MISFITS = [
    ({"gains": torch.ones(2, 2, 7)}, r"gains of a codebook must be torch.float32 \[B, H, C\] = \(2, 2, 8\)"),
    ({"gains": torch.ones(2, 2, 8).double()}, "gains of a codebook must be torch.float32"),
    ({"gains": [1.0]}, "gains must be a tensor, got list"),
    ({"gains": torch.ones(2, 2, 8, device="meta")}, "gains of a codebook must be on the device of its centers"),
    ({"values": torch.ones(2, 2, 8, 3).double()}, "values of a codebook must have the dtype of its centers"),
    ({"key_mask": torch.ones(2, 6, 7)}, "key_mask of a codebook must be bool"),
    ({"key_mask": torch.ones(2, 7, 6) > 0}, r"key_mask of a codebook must be bool \[B, \*G'\] = \(2, 6, 7\)"),
    ({"key_mask": torch.ones(2, 3, 6, 7) > 0}, "key_mask of a codebook must be bool"),
    ({"key_mask": torch.tensor(True)}, "key_mask of a codebook must be bool"),
    ({"score": "best"}, "score must be one of"),
    ({"scale": float("nan")}, "scale must be positive and finite, got nan"),
    ({"scale": None}, "scale of a codebook must be a float, got None"),
    ({"radius": 1}, "radius of a codebook must be None or a tuple of ints"),
    ({"radius": (1,)}, r"radius must be an int or one int per grid axis \(2\), got 1"),
    ({"radius": (1, -1)}, r"radius\[1\] must be at least 0"),
    ({"report": "good"}, "report must be a FitReport, got str"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=range(len(MISFITS)))
def test_fields_of_unlike_clusters_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(book(), **change)


@pytest.mark.parametrize(
    "change",
    [{"queries": 0}, {"output_error": -0.1}, {"plain_error": "x"}, {"median": 0.1}, {"percentile_95": (0.4, 0.3)}],
    ids=lambda change: next(iter(change)),
)
def test_reports_check_themselves(change):
    with pytest.raises((TypeError, ValueError), match=next(iter(change))):
        replace(FIT, **change)


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_labels_of_no_cluster_count_as_none(impl):
    """Engines read nothing outside of the clusters, whatever a caller has put into a codebook."""
    made = book()
    far = torch.where(made.label % 3 == 0, torch.tensor([2**31 - 1, -(2**31), 8])[made.label % 3], made.label.long())
    odd = replace(made, label=far.int())
    none = replace(made, label=torch.where((far < 0) | (far >= 8), -1, far).int())
    ours, want = (scram.attend(Q, K, V, found(), radius=1, tail=x, impl=impl) for x in (odd, none))
    assert torch.equal(ours.out, want.out)
    assert torch.equal(ours.lse, want.lse)


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_a_start_of_fewer_or_more_heads(impl):
    """Clusters of key heads start those of query heads, whose masks differ; and the reverse."""
    mask = torch.rand(2, 4, 6, 7, generator=torch.Generator().manual_seed(0)) < 0.8
    of_keys, of_queries = book(impl=impl), book(impl=impl, key_mask=mask)
    assert (of_keys.sizes.shape[1], of_queries.sizes.shape[1]) == (2, 4)
    each = replace(of_keys, **{name: getattr(of_keys, name).repeat_interleave(2, 1) for name in PARTS})
    first = replace(of_queries, key_mask=None, **{name: getattr(of_queries, name)[:, ::2] for name in PARTS})
    for warm, same, how in ((of_keys, each, {"key_mask": mask}), (of_queries, first, {})):
        one, other = (book(impl=impl, warm=x, **how) for x in (warm, same))
        assert torch.equal(one.label, other.label)
        assert torch.equal(one.centers, other.centers)


PARTS = ("centers", "values", "sizes", "label")


def test_a_loaded_or_fitted_codebook_is_a_constant():
    k, v = K.clone().requires_grad_(), V.clone().requires_grad_()
    made = scram.cluster(Q, k, v, clusters=CLUSTERS)
    assert made.centers.requires_grad
    assert made.values.requires_grad
    assert not made.detach().centers.requires_grad
    fitted = scram.cluster(Q, k, v, clusters=scram.Clusters(8, fit=8), matches=found(), radius=1)
    assert not fitted.centers.requires_grad
    with torch.no_grad():
        assert not scram.cluster(Q, k, v, clusters=CLUSTERS).values.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("score", ["dot", "cosine", "l2"])
def test_gradients_through_clusters_and_windows(impl, score):
    """The labels do not change within the small steps of the check."""
    shapes = (1, 2, 3, 4, 2), (1, 1, 3, 4, 2), (1, 1, 3, 4, 1), (1, 1, 1, 2), (1, 1, 1, 1)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    matches = scram.search(leaves[0], leaves[1], search=scram.Search(matches=2, seed=0), score=score)
    mask = torch.arange(12).reshape(1, 3, 4) != 5

    def attended(q, k, v, *extra):
        how = {"key_mask": mask, "score": score, "impl": impl}
        tail = scram.cluster(q, k, v, clusters=scram.Clusters(count=4, seed=0), **how)
        return tuple(scram.attend(q, k, v, matches, tail=tail, radius=(0, 1), extra=extra, **how))

    assert torch.autograd.gradcheck(attended, leaves)
