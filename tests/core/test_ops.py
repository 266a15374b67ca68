"""The engines as torch operators: what torch must see, it sees; a plain call bypasses the dispatcher."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import scram
from scram.core import ops

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
    plain = scram.attention(*tensors, search=SETTINGS, impl="numba")  # with clusters
    mode = Seen()
    mode.names = []
    with mode:
        seen = scram.attention(*tensors, search=SETTINGS, impl="numba")
    assert mode.names == ["cluster", "route", "routed_start", "search", "attend", "cluster_tail"]
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


METHODS = {
    "hybrid": scram.DrawnKeys(samples=4, seed=0),
    "snis": scram.Snis(samples=4, seed=0),
    "walks": scram.MetropolisHastings(samples=4, seed=0),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.func itself, at first use
@pytest.mark.parametrize("name", ["attend", *METHODS])
def test_second_derivatives_and_forward_mode_are_refused_in_words(tensors, name):
    q, k, v = tensors
    found = scram.search(q, k, search=SETTINGS, impl="numba")

    def loss(x):
        if name == "attend":
            return scram.attend(x, k, v, found, impl="numba").out.square().sum()
        return scram.estimate(x, k, v, found, method=METHODS[name], impl="numba").out.square().sum()

    with pytest.raises(NotImplementedError, match="impl='numba' has no"):
        torch.func.hessian(loss)(q)
    with pytest.raises(NotImplementedError, match="impl='numba' has no"):
        torch.func.jvp(torch.func.grad(loss), (q,), (q,))
    with pytest.raises(NotImplementedError, match="impl='numba' has no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(q)
    with pytest.raises(NotImplementedError, match="impl='numba' has no forward-mode derivative"):
        torch.func.jvp(loss, (q,), (q,))


@pytest.mark.parametrize("impl", ["reference", "numba"])
@pytest.mark.parametrize("given", ["key_mask", "warm", "matches"])
def test_what_was_made_in_inference_mode_is_taken_in_training(tensors, impl, given):
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    with torch.inference_mode():
        mask = torch.ones(1, 5, 6, dtype=torch.bool)
        found = scram.search(q, k, search=SETTINGS, impl=impl)
    how = {"key_mask": {"key_mask": mask}, "warm": {"warm": found}, "matches": {}}[given]
    if given == "matches":
        out = scram.attend(q, k, v, found, impl=impl).out
        out = out + scram.estimate(q, k, v, found, method=METHODS["hybrid"], impl=impl).out
    else:
        out = scram.attention(q, k, v, search=SETTINGS, impl=impl, **how)
    out.sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (k, v))


def test_a_schema_names_the_fields_of_its_call():
    schema = str(torch.ops.scram.attend.default._schema)
    assert schema.startswith("scram::attend(Tensor q, Tensor k, Tensor v, Tensor index, Tensor? key_mask, ")
    assert schema.endswith("str weight, float dropout_p, str impl) -> (Tensor, Tensor)")
    assert "score" not in schema
