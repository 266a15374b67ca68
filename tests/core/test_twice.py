"""Two stages that read the same tensors: the same values, and one sum of gradients on the calling thread."""

import torch

import scram
from scram._compat import num_threads
from scram.core import twice as module
from scram.core.twice import twice


def test_without_gradients_the_tensors_are_the_same_objects():
    x, y = torch.randn(2, 3, 4).unbind()
    first, second = twice(x, y)
    assert first[0] is second[0] is x
    assert first[1] is second[1] is y
    with torch.no_grad():
        assert twice(x.requires_grad_())[0][0] is x


def test_gradients_of_both_are_added_and_one_that_is_missing_is_none():
    x, y, z = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    first, second = twice(x, y, z)
    assert all(a.data_ptr() == b.data_ptr() == c.data_ptr() for a, b, c in zip(first, second, (x, y, z), strict=True))
    ((2 * first[0]).sum() + (3 * second[0]).sum() + (5 * second[1]).sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 5))
    assert torch.equal(y.grad, torch.full_like(y, 5))
    assert z.grad is None


def test_a_transform_sees_the_tensors_themselves():
    x = torch.randn(3, 4)
    grad = torch.func.grad(lambda x: sum((a * a).sum() for (a,) in twice(x)))(x)
    torch.testing.assert_close(grad, 4 * x)


def test_the_gradients_of_a_call_are_added_on_the_calling_thread(monkeypatch):
    """Its three stages read k and v, two of them q: each sum in torch's threads would wait for a core."""
    seen = []
    sum_of = module._sum

    def looking(a, b):
        if a is not None and b is not None:
            seen.append(torch.get_num_threads())
        return sum_of(a, b)

    monkeypatch.setattr(module, "_sum", looking)
    before = torch.get_num_threads()
    q, k, v = (torch.randn(1, 1, 12, 12, 8, requires_grad=True) for _ in range(3))
    try:
        torch.set_num_threads(2)
        out = scram.attention(q, k, v, search=scram.Search(seed=0), tail=scram.Clusters(8, 16, seed=0), impl="numba")
        torch.autograd.grad(out.sum(), (q, k, v))
        assert num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * 5
