"""Names that every doctest may use, and when the garbage collector runs."""

import gc

gc.disable()  # until all tests are collected: going through all modules again and again takes two thirds of the time

import pytest  # noqa: E402
import torch  # noqa: E402

import scram  # noqa: E402


def pytest_collection_finish():
    """What is there now stays: the collector does not look at it again. New garbage is looked for less often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    doctest_namespace.update(scram=scram, torch=torch)
