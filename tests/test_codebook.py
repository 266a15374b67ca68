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
    for name in ("centres", "values", "sizes", "label", "gains", "key_mask"):
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
    ({"tail": 3}, r"tail must be .*scram.Codebook or scram.Hybrid, got int"),
    ({"tail": CLUSTERS}, r"tail must be a scram.Codebook, got Clusters"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=range(len(WRONG)))
def test_a_call_that_does_not_fit_is_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scram.attend(Q, K, V, found(), **({"tail": book()} | changes))


def test_other_grids_widths_and_devices_are_refused():
    made = book()
    with pytest.raises(ValueError, match=r"key grid \(6, 7\), but k is \(2, 2, 7, 6, 8\)"):
        scram.attend(Q.mT.reshape(2, 4, 7, 6, 8), K.reshape(2, 2, 7, 6, 8), V.reshape(2, 2, 7, 6, 3),
                     scram.search(Q.reshape(2, 4, 7, 6, 8), K.reshape(2, 2, 7, 6, 8)), tail=made)  # fmt: skip
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
    with pytest.raises(TypeError, match=r"clusters must be a scram\.Clusters, got Hybrid"):
        book(clusters=scram.Hybrid())
    with pytest.raises(ValueError, match="a score by name"):
        book(score=lambda q, k: (q * k).sum(-1))
    with pytest.raises(ValueError, match=r"warm must have \(B, H, clusters, E, F\) = \(2, 2, 9, 8, 3\)"):
        book(clusters=scram.Clusters(count=9), warm=book())
    with pytest.raises(ValueError, match="sizes of a codebook must be"):
        replace(book(), sizes=torch.zeros(2, 2, 8))
    with pytest.raises(ValueError, match="must be"):
        replace(book(), sizes=torch.zeros(2, 2, 7, dtype=torch.int32))


def test_a_loaded_or_fitted_codebook_is_a_constant():
    k, v = K.clone().requires_grad_(), V.clone().requires_grad_()
    made = scram.cluster(Q, k, v, clusters=CLUSTERS)
    assert made.centres.requires_grad
    assert made.values.requires_grad
    assert not made.detach().centres.requires_grad
    fitted = scram.cluster(Q, k, v, clusters=scram.Clusters(8, fit=8), matches=found(), radius=1)
    assert not fitted.centres.requires_grad
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
