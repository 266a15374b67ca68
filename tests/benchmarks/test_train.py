"""A small vision transformer learns as well with SCRAM as with dense attention."""

import importlib
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def train():
    """The benchmark, whose task this is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("train")


@pytest.fixture(scope="module")
def data(train):
    return train.digits()


@pytest.fixture(scope="module")
def models(train, data):
    """Trained with SCRAM and with dense attention, from the same start."""
    return {kind: train.train(train.DIGITS, data, train.SMALL[kind], seed=0)[0] for kind in ("sparse", "dense")}


def test_digits_are_learnt_as_well_as_with_dense_attention(train, data, models):
    right = {kind: train.accuracy(train.logits(model, data), data) for kind, model in models.items()}
    assert right["dense"] > 97
    assert right["sparse"] >= right["dense"] - 1


def test_the_same_weights_give_close_outputs_under_both(train, data, models):
    """Close is a fifth of what lies between two models that were trained to the same accuracy.

    Four matches with radius 2 are at a tenth of it, the few keys of the training at 0.4 of it, by seed and machine.
    """
    between = train.agree(*(train.logits(model, data) for model in models.values()), data)["logits_error"]
    for model in models.values():
        dense, sparse, fewer = (
            train.logits(train.copied(model, train.DIGITS, how), data)
            for how in (train.SMALL["dense"], train.THROUGH["digits"]["4 matches, radius 2"], train.SMALL["sparse"])
        )
        found = train.agree(sparse, dense, data)
        assert found["logits_error"] < between / 5
        assert abs(found["accuracy"] - train.accuracy(dense, data)) <= 1
        # The tolerance tells: the keys of the training are too few for it.
        assert train.agree(fewer, dense, data)["logits_error"] > between / 5


def test_digits_are_learnt_through_the_hybrid_estimator(train, data):
    model = train.train(train.DIGITS, data, train.SMALL["hybrid"], seed=0)[0]
    assert train.accuracy(train.logits(model, data), data) > 95  # 16 drawn keys and 9 around a match, of 64


def test_pictures_survive_packing(train):
    x = torch.randint(32, (5, 32, 32, 3), dtype=torch.uint8).numpy()
    assert (train.sums(train.differences(x)) == x).all()
