"""Names that every doctest may use."""

import pytest
import torch

import scram


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    doctest_namespace.update(scram=scram, torch=torch)
