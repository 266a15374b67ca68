"""What every test file shares: the engines under test, few threads, deterministic hypothesis."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.in_interpreter import INTERPRETED, _all_launched, _quick, launched  # noqa: F401 - fixtures of every file
from support.on_device import moved

settings.register_profile(
    "scram", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("scram")
torch.set_num_threads(1)
DEVICE = torch.cuda.is_available() and not INTERPRETED
SPAWNING = ("test_ranks", "test_distributed", "test_distributed_model")
TRITON = pytest.param("triton", marks=pytest.mark.gpu)


@pytest.fixture(params=["reference", "numba", TRITON], scope="session")
def impl(request):
    """Every engine that a test of meaning runs against; Triton on a device, or in its interpreter where marked so."""
    return request.param


@pytest.fixture(scope="session")
def widest(impl):
    """The widest dtype that the engine takes."""
    return torch.float32 if impl == "triton" else torch.float64


@pytest.fixture(params=["numba", TRITON], scope="session")
def engine(request):
    """Every engine but the reference, for tests that compare with it."""
    return request.param


def pytest_addoption(parser):
    parser.addoption("--interpreted-part", default="0/1", help="one of several shares of the tests, such as 0/2")
    parser.addoption("--launched-to", help="a file for the names of the Triton kernels that ran")


def pytest_collection_modifyitems(config, items):
    """Leaves out what needs a device where there is none. In Triton's interpreter leaves out all that is not for it.

    Tests that spawn processes come last: kernels are compiled then, and not by every process at once. On a device those
    that are given more time come first: no worker is to begin one when all others have ended.
    """
    part, parts = map(int, config.getoption("--interpreted-part").split("/"))
    kept = [item for item in items if _runs_here(item)][part::parts]
    left = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = sorted(kept, key=_turn)


def _turn(item):
    if DEVICE and item.get_closest_marker("timeout"):
        return 0
    return 2 if item.path.stem in SPAWNING or item.path.parent.name == "distributed" else 1


def _runs_here(item):
    if not INTERPRETED:
        return DEVICE or item.get_closest_marker("gpu") is None
    given = getattr(item, "callspec", None)
    engines = {given.params[name] for name in ("impl", "engine") if name in given.params} if given else set()
    return item.get_closest_marker("interpreted") is not None and engines <= {"triton"}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def device():
    """Where the tensors of the Triton engine are."""
    return "cuda" if DEVICE else "cpu"


@pytest.fixture(autouse=True)
def _on_device(request, monkeypatch):
    """On a device the Triton engine gets copies there of tensors that tests make and compare on the CPU."""
    if DEVICE and request.node.get_closest_marker("gpu"):
        moved(monkeypatch)
