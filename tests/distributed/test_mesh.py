"""Messages, and that no rank waits for one that failed."""

import pytest
import torch

from scram.distributed.mesh import Ranks, layout_of, pack, packed_size, unpack
from support import failing_jobs
from support.sharded import on_ranks


def test_messages_keep_every_tensor():
    tensors = [
        torch.randn(2, 3).to(torch.bfloat16),
        torch.rand(5) < 0.5,
        torch.randn(0, 4),
        torch.randn(3, 2, dtype=torch.float64).T,
        torch.arange(7, dtype=torch.int32),
    ]
    layout = layout_of(tensors)
    message = pack(tensors, packed_size(layout) + 32)
    assert message.dtype == torch.uint8
    for x, found in zip(tensors, unpack(message, layout), strict=True):
        assert found.dtype == x.dtype
        assert torch.equal(found, x)


@pytest.mark.parametrize("mode", ["gather", "ring"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_raises_does_not_hang_the_others(mode, who):
    for change, words in (("width", "ValueError: q and k must share their last axis"), ("score", "no such score")):
        said = on_ranks(3, failing_jobs.raised, change=change, mode=mode, who=who)
        assert words in said[who]
        assert "scram.distributed" not in said[who]
        for rank in {0, 1, 2} - {who}:
            assert f"RuntimeError: scram.distributed.attention failed on rank {who}: " in said[rank]
            assert words in said[rank]


def test_a_rank_that_raises_in_the_backward_pass_of_a_ring():
    said = on_ranks(3, failing_jobs.raised, change="late score", who=1, backward=True)
    assert "failed on rank 1: RuntimeError: too late" in said[0]
    assert "failed on rank 1: RuntimeError: too late" in said[2]
    assert said[1] == "RuntimeError: too late"


def test_mesh_has_one_dimension():
    with pytest.raises(TypeError, match=r"mesh must be a torch DeviceMesh, got int; use .*init_device_mesh"):
        Ranks(4)
    assert all("mesh must have one dimension, got 2" in x for x in on_ranks(2, failing_jobs.two_dimensions))
