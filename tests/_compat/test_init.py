"""The private APIs still are what they were on this version, and the fallbacks work."""

import functools
import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import FlopCounterMode

import scram
from scram import _compat

HANDED = {
    "Tensor.backward": (torch.Tensor.backward, lambda x: x.sum().backward()),
    "autograd.backward": (torch.autograd.backward, lambda x: torch.autograd.backward(x.sum())),
    "autograd.grad": (torch.autograd.grad, lambda x: torch.autograd.grad(x.sum(), x)),
}


class Seen(TorchFunctionMode):
    """Keeps what `caller_of_mode` says, and with what arguments."""

    def __init__(self):
        super().__init__()
        self.callers = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        caller = _compat.caller_of_mode("backward", "grad", "softmax")
        if caller is not None:
            self.callers.append((caller, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", HANDED)
def test_the_caller_of_a_mode_is_torchs_own_function(name):
    function, call = HANDED[name]
    with Seen() as seen:
        call(torch.ones(3, requires_grad=True))
    caller, args, kwargs = seen.callers[0]
    assert caller.__code__ is function.__code__
    assert _compat.inside_mode(caller) is not None
    handed = inspect.signature(function).bind(*args, **kwargs).arguments
    for parameter in inspect.signature(function).parameters.values():  # the frame knows no defaults
        assert parameter.name in handed or parameter.default is None


def softmax(x):
    """Another library's function that a mode is given, too."""
    return handle_torch_function(softmax, (x,), x) if has_torch_function_unary(x) else x


def test_other_calls_have_no_caller():
    with Seen() as seen:
        torch.softmax(torch.ones(3), 0) + 1  # from C
        F.relu(torch.ones(3))  # another name
        softmax(torch.ones(3))
    assert not seen.callers


def test_multi_head_attention_is_what_it_was():
    function = _compat.torch_function(F.multi_head_attention_forward, F.__file__)
    assert function is F.multi_head_attention_forward
    assert _compat.reads(function.__code__, "scaled_dot_product_attention")
    assert _compat.SDPA is F.scaled_dot_product_attention
    hidden = functools.partial(function)
    assert _compat.torch_function(hidden, F.__file__) is None
    assert _compat.torch_function(functools.wraps(function)(hidden), F.__file__) is function


@pytest.mark.filterwarnings("ignore:Implicit dimension choice:UserWarning")
def test_a_copy_is_not_handed_over_and_reads_other_names():
    copy = _compat.inside_mode(F.softmax, _get_softmax_dim=lambda *given: 0)
    x = torch.randn(2, 3)
    with Seen() as seen:
        assert (copy(x) == x.softmax(0)).all()
        assert not seen.callers
        assert (F.softmax(x) == x.softmax(1)).all()
        assert len(seen.callers) == 1


def test_a_function_without_a_check_is_not_copied():
    assert _compat.inside_mode(inspect.unwrap) is None


@pytest.mark.parametrize("entry", ["caller_of_mode", "inside_mode"])
def test_the_fallback_computes_the_gradients(monkeypatch, entry):
    """Outside the mode: as torch would, and what is computed again is dense."""
    monkeypatch.setattr(_compat, entry, lambda *args, **kwargs: None)
    q = torch.randn(1, 1, 20, 8, requires_grad=True)
    how = {"radius": 99, "search": scram.Search(sweeps=0), "impl": "reference"}
    with scram.patch_sdpa(grid=(4, 5), **how) as report:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    (want,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
    torch.testing.assert_close(q.grad, want)
    assert report.searched == 1


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def mkl_threads():
    read = getattr(_compat._library(), "MKL_Get_Max_Threads", None)
    return 1 if read is None else read()


@pytest.mark.usefixtures("two_threads")
def test_the_library_of_torchs_threads_is_what_it_was():
    assert _compat._library() is not None


@pytest.mark.usefixtures("two_threads")
def test_operators_take_one_thread_inside_and_as_many_as_before_outside():
    before = mkl_threads()
    with _compat.ONE_THREAD:
        with _compat.ONE_THREAD:
            assert (torch.get_num_threads(), mkl_threads(), _compat.num_threads()) == (1, 1, 2)
        assert (torch.get_num_threads(), mkl_threads(), _compat.num_threads()) == (1, 1, 2)
    assert (torch.get_num_threads(), mkl_threads(), _compat.num_threads()) == (2, before, 2)


@pytest.mark.usefixtures("two_threads")
def test_an_error_inside_gives_the_threads_back():
    with pytest.raises(KeyError), _compat.ONE_THREAD:
        raise KeyError
    assert (torch.get_num_threads(), _compat.num_threads()) == (2, 2)


@pytest.mark.usefixtures("two_threads")
def test_other_python_threads_keep_theirs():
    seen = []
    with _compat.ONE_THREAD:
        other = threading.Thread(target=lambda: seen.append((torch.get_num_threads(), _compat.num_threads())))
        other.start()
        other.join()
    assert seen == [(2, 2)]


@pytest.mark.usefixtures("two_threads")
def test_without_the_library_operators_keep_their_threads(monkeypatch):
    monkeypatch.setattr(_compat, "_library", lambda: None)
    with _compat.ONE_THREAD:
        assert (torch.get_num_threads(), _compat.num_threads()) == (2, 2)
    assert torch.get_num_threads() == 2


def test_a_backward_pass_is_known(monkeypatch):
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda grad: seen.append(_compat.in_backward()))
    y.sum().backward(retain_graph=True)
    assert seen == [True]
    assert not _compat.in_backward()
    monkeypatch.setattr(_compat, "_backward_pass", None)
    y.sum().backward()
    assert seen == [True, False]


def test_what_can_be_measured(monkeypatch):
    seen = []
    torch.vmap(lambda x: seen.append(_compat.measurable()) or x)(torch.zeros(2))
    with FlopCounterMode(display=False):
        seen.append(_compat.measurable())
    assert seen == [False, False]
    monkeypatch.setattr(_compat, "_mode_active", None)
    assert _compat.measurable()


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [True, False])
def test_extents_whose_product_is_fixed_are_fixed_too(fixed):
    graphs = []

    def fix(total):
        graphs.append(total)
        if fixed:
            _compat.fix_extents(total)
        return 0

    torch.compiler.assume_constant_result(fix)

    def function(x):
        return x + fix(len(range(x.flatten().shape[0])))

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for size in ((4, 16), (16, 4), (8, 8), (8, 8)):
        compiled(torch.zeros(size))
    torch._dynamo.reset()
    assert graphs == [64] * (3 if fixed else 2)  # torch takes the second graph for 8 x 8
    _compat.fix_extents(64)  # nothing is traced
