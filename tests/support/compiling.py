"""What tests of torch.compile share: the number of graphs, outputs and gradients, equal bits."""

from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters


def results(function, tensors):
    """The output and the gradients of a fixed functional of it."""
    out = function(*tensors)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for x in tensors:
        x.grad = None
    (out * weights.to(out)).sum().backward()
    return [out.detach(), *(x.grad for x in tensors)]


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def graphs_are(count):
    """What is inside compiles that many graphs."""
    torch._dynamo.reset()
    counters.clear()
    yield
    assert counters["stats"]["unique_graphs"] == count
    torch._dynamo.reset()
