"""Codebooks: what they print, files, devices, and calls that do not fit them."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import scram

Q, K, V = (torch.randn(2, 4, 6, 7, 8), torch.randn(2, 2, 6, 7, 8), torch.randn(2, 2, 6, 7, 3))
CLUSTERS = scram.Clusters(count=8, keys=12, seed=0)
TENSORS = ("centers", "values", "sizes", "label", "variance", "spreads", "slope", "key_mask")


@cache
def found():
    return scram.search(Q, K, search=scram.Search(seed=0))


def book(**changes):
    return scram.cluster(Q, K, V, **({"clusters": CLUSTERS} | changes))


def test_it_prints_itself():
    assert repr(book()) == (
        "Codebook(8 clusters of keys on grid (6, 7), batch=2, heads=2, keys=12, score='dot', scale=0.354, cpu)"
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"keys": 0}, {"first_order": False}, {"second_order": False, "keys": 5}],
    ids=lambda change: "-".join(change),
)
@pytest.mark.parametrize("masked", [False, True])
def test_it_survives_a_file(tmp_path, change, masked):
    mask = torch.rand(2, 6, 7) < 0.8 if masked else None
    made = book(clusters=replace(CLUSTERS, **change), key_mask=mask, score="cosine")
    made.save(tmp_path / "book.safetensors")
    again = scram.Codebook.load(tmp_path / "book.safetensors")
    for name in TENSORS:
        a, b = getattr(made, name), getattr(again, name)
        assert a is b is None or torch.equal(a, b)
    for name in ("score", "scale", "keys", "second_order"):
        assert getattr(made, name) == getattr(again, name)
    assert again.order is None  # computed from the labels where it is needed
    out, lse = scram.attend(Q, K, V, found(), tail=again, key_mask=mask, score="cosine")
    want = scram.attend(Q, K, V, found(), tail=made, key_mask=mask, score="cosine")
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
    ({"causal": True}, r"made without causal order"),
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


@pytest.mark.parametrize(
    ("name", "change"),
    [("order", lambda x: x - 1), ("order", lambda x: x + 1), ("sizes", lambda x: x + 1), ("sizes", lambda x: x - 99)],
)
def test_numbers_that_a_kernel_would_read_beside_its_tensors_are_refused(name, change):
    made = book(clusters=scram.Clusters(count=5, keys=8, seed=0)).ordered()
    scram.attend(Q, K, V, found(), tail=made)
    with pytest.raises(ValueError, match=f"{name} of the codebook in tail"):
        scram.attend(Q, K, V, found(), tail=replace(made, **{name: change(getattr(made, name))}))


def test_clustering_that_cannot_be_is_refused():
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


FLOATS = {"variance": (2, 2, 8), "spreads": (2, 2, 8), "slope": (2, 2, 8, 3)}
MISFITS = [
    *(
        ({name: wrong(torch.ones(shape))}, message.format(name=name))
        for name, shape in FLOATS.items()
        for wrong, message in (
            (lambda x: x[:1], "{name} of a codebook must be torch.float32"),
            (lambda x: x[..., :2], "{name} of a codebook must be torch.float32"),
            (lambda x: x.unsqueeze(0), "{name} of a codebook must be torch.float32"),
            (lambda x: x.double(), "{name} of a codebook must be torch.float32 .* got torch.float64"),
            (lambda x: x.int(), "{name} of a codebook must be torch.float32 .* got torch.int32"),
            (lambda x: x.tolist(), "{name} must be a tensor, got list"),
            (lambda x: x.to("meta"), "{name} of a codebook must be on the device of its centers, cpu, got meta"),
        )
    ),
    ({"variance": None}, "variance must be a tensor, got NoneType"),
    ({"spreads": None}, "spreads must be a tensor, got NoneType"),
    ({"order": torch.zeros(2, 2, 41).int()}, r"order of a codebook must be int32 \[B, H, M\] = \(2, 2, 42\), got"),
    ({"order": torch.zeros(2, 2, 6, 7).int()}, "order of a codebook must be int32"),
    ({"order": torch.zeros(2, 2, 42)}, "order of a codebook must be int32 .* got torch.float32"),
    ({"order": [1]}, "order must be a tensor, got list"),
    ({"order": torch.zeros(2, 2, 42, device="meta").int()}, "order of a codebook must be on the device"),
    ({"keys": -1}, "keys must be at least 0, got -1"),
    ({"keys": 1.0}, "keys must be an int, got float"),
    ({"keys": None}, "keys must be an int, got NoneType"),
    ({"second_order": 1}, "second_order must be True or False, got int 1"),
    ({"values": torch.ones(2, 2, 8, 3).double()}, "values of a codebook must have the dtype of its centers"),
    ({"key_mask": torch.ones(2, 6, 7)}, "key_mask of a codebook must be bool"),
    ({"key_mask": torch.ones(2, 7, 6) > 0}, r"key_mask of a codebook must be bool \[B, \*G'\] = \(2, 6, 7\)"),
    ({"key_mask": torch.ones(2, 3, 6, 7) > 0}, "key_mask of a codebook must be bool"),
    ({"key_mask": torch.tensor(True)}, "key_mask of a codebook must be bool"),
    ({"score": "best"}, "score must be one of"),
    ({"scale": float("nan")}, "scale must be positive and finite, got nan"),
    ({"scale": None}, "scale of a codebook must be a float, got None"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=range(len(MISFITS)))
def test_fields_of_unlike_clusters_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(book(), **change)


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


PARTS = ("centers", "values", "sizes", "label", "variance", "spreads", "slope", "order")


def test_what_of_a_codebook_carries_gradients():
    k, v = K.clone().requires_grad_(), V.clone().requires_grad_()
    made = scram.cluster(Q, k, v, clusters=CLUSTERS)
    carries = {name for name in TENSORS if name != "key_mask" and getattr(made, name).requires_grad}
    assert carries == {"centers", "values", "slope"}
    for constant in (made.detach(), made.detach().to("cpu")):
        assert not any(getattr(constant, name).requires_grad for name in TENSORS if name != "key_mask")
    with torch.no_grad():
        assert not scram.cluster(Q, k, v, clusters=CLUSTERS).values.requires_grad


def constants(made):
    """What carries no gradient though it is a function of q and k."""
    return {"variance": made.variance, "spreads": made.spreads}


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("score", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("keys", [0, 4], ids=["centers", "routed"])
def test_gradients_through_clusters_and_windows(impl, score, keys):
    """Labels and routes do not change within the small steps of the check; variance and spreads are kept."""
    shapes = (1, 2, 3, 4, 2), (1, 1, 3, 4, 2), (1, 1, 3, 4, 1), (1, 1, 1, 2), (1, 1, 1, 1)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    matches = scram.search(leaves[0], leaves[1], search=scram.Search(matches=2, seed=0), score=score)
    mask = torch.arange(12).reshape(1, 3, 4) != 5

    how = {"key_mask": mask, "score": score, "impl": impl}
    clusters = scram.Clusters(count=4, keys=keys, seed=0)
    frozen = constants(scram.cluster(*leaves[:3], clusters=clusters, **how))

    def attended(q, k, v, *extra):
        tail = replace(scram.cluster(q, k, v, clusters=clusters, **how), **frozen)
        return tuple(scram.attend(q, k, v, matches, tail=tail, radius=(0, 1), extra=extra, **how))

    assert torch.autograd.gradcheck(attended, leaves)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("keys", [0, 5], ids=["centers", "routed"])
def test_gradients_of_clusters_alone(impl, keys):
    """No search and no windows."""
    shapes = (1, 2, 2, 3, 2), (1, 1, 3, 3, 2), (1, 1, 3, 3, 2)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    clusters = scram.Clusters(count=3, keys=keys, seed=0)
    frozen = constants(scram.cluster(*leaves, clusters=clusters, impl=impl))

    def attended(q, k, v):
        tail = replace(scram.cluster(q, k, v, clusters=clusters, impl=impl), **frozen)
        return tuple(scram.attention(q, k, v, search=None, tail=tail, return_lse=True, impl=impl))

    assert torch.autograd.gradcheck(attended, leaves)
