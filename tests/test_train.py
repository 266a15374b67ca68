"""A small vision transformer learns as well with SCRAM as with dense attention."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def train(monkeypatch):
    """The benchmark, whose task this is."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("train")


def test_digits_are_learnt_as_well_as_with_dense_attention(train):
    data = train.digits()
    models = {kind: train.train(train.DIGITS, data, train.SMALL[kind], seed=0)[0] for kind in ("sparse", "dense")}
    logits = {kind: train.logits(model, data) for kind, model in models.items()}
    right = {kind: train.accuracy(found, data) for kind, found in logits.items()}
    assert right["dense"] > 97
    assert right["sparse"] >= right["dense"] - 1
    swapped = train.logits(train.copied(models["sparse"], train.DIGITS, train.SMALL["dense"]), data)
    assert train.agree(logits["sparse"], swapped)["same_class"] > 97


def test_pictures_survive_packing(train):
    x = torch.randint(32, (5, 32, 32, 3), dtype=torch.uint8).numpy()
    assert (train._sums(train._differences(x)) == x).all()
