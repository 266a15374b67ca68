"""What every test file shares: the implementations under test, few threads, deterministic hypothesis."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from cases import IMPLS
from in_interpreter import _quick, launched  # noqa: F401 - fixtures of every file

settings.register_profile(
    "scram", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("scram")
torch.set_num_threads(1)


@pytest.fixture(params=IMPLS, scope="session")
def impl(request):
    """Every implementation that a test of meaning runs against."""
    return request.param


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
