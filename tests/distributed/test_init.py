"""What the package says where torch cannot help, and which names it has."""

import pytest

import scram.distributed
from support.processes import run_python


def test_names():
    assert all(
        getattr(scram.distributed, name).__module__.startswith("scram.distributed")
        for name in scram.distributed.__all__
    )
    with pytest.raises(AttributeError, match=r"module 'scram.distributed' has no attribute 'atention'"):
        scram.distributed.atention  # noqa: B018


@pytest.mark.slow
def test_a_torch_without_distributed_is_named():
    """Only that package needs it."""
    said = run_python("""
        import torch, torch.distributed
        torch.distributed.is_available = lambda: False
        import scram
        q = torch.randn(1, 1, 4, 4, 2)
        print(scram.attention(q, q, q).shape == q.shape)
        try:
            import scram.distributed
        except ImportError as error:
            print(error)
    """)
    assert said.startswith("True\nscram.distributed needs torch.distributed, which this build of torch lacks: ")
    assert "use scram.attention on one machine" in said
