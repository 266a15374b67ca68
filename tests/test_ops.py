"""The engines as torch operators: what torch must see, it sees; a plain call bypasses the dispatcher."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import scram
from scram import ops

SETTINGS = scram.Search(matches=2, seed=0)


@pytest.fixture
def tensors():
    return torch.randn(3, 1, 2, 5, 6, 4).unbind()


class Seen(TorchDispatchMode):
    """The operators of ours that pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "scram":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_a_mode_sees_the_operators_and_changes_nothing(tensors):
    plain = scram.attention(*tensors, search=SETTINGS, impl="numba")
    mode = Seen()
    mode.names = []
    with mode:
        seen = scram.attention(*tensors, search=SETTINGS, impl="numba")
    assert mode.names == ["search", "attend"]
    assert torch.equal(plain, seen)


def test_plain_tensors_alone_bypass_the_dispatcher(tensors):
    q, k, _ = tensors
    assert ops.bypasses_dispatcher((q, k, None))
    assert ops.bypasses_dispatcher((torch.nn.Parameter(q), k))
    assert not ops.bypasses_dispatcher((q.as_subclass(Subclass), k))
    seen = []
    torch.vmap(lambda x: (seen.append(ops.bypasses_dispatcher((x,))), x)[1])(q)
    assert seen == [False]


@pytest.mark.parametrize("seen", [False, True])
def test_gradients_are_the_same_with_and_without_the_dispatcher(tensors, seen, monkeypatch):
    given = []
    for direct in (True, False):
        leaves = [x.clone().requires_grad_() for x in tensors]
        monkeypatch.setattr(ops, "bypasses_dispatcher", lambda _, direct=direct: direct)
        found = scram.search(*leaves[:2], search=SETTINGS, impl="numba")
        out, lse = scram.attend(*leaves, found, impl="numba")
        given.append(torch.autograd.grad(out.square().sum() + (lse.sum() if seen else 0), leaves))
    for one, other in zip(*given, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_are_refused_without_the_dispatcher_too(tensors):
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    out = scram.attention(q, k, v, search=SETTINGS, impl="numba")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(first.sum(), q)
