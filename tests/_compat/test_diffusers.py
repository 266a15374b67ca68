"""What is private in diffusers: its registry of back ends."""

import warnings

import pytest

from scram._compat import diffusers as private
from support.processes import run_python

pytest.importorskip("diffusers")


@pytest.fixture
def dispatch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing it has to say
        return private.dispatch_of("a test")


def test_a_back_end_is_added_and_removed(dispatch):
    before = private.backends("a test")
    for function in (lambda query: 1, lambda query: 2):  # the second in place of the first
        private.add_backend("a test", function)
        assert private.backends("a test") == {*before, "a test"}
        member = dispatch.AttentionBackendName("a test")
        assert dispatch._AttentionBackendRegistry._backends["a test"] is function
        assert (member.name, member.value, member == "a test") == ("A TEST", "a test", True)
    private.remove_backend("a test")
    private.remove_backend("a test")
    assert private.backends("a test") == before
    assert "a test" not in dispatch._AttentionBackendRegistry._backends


@pytest.mark.parametrize("missing", ["_supported_arg_names", "register"])
def test_another_registry_is_refused(dispatch, monkeypatch, missing):
    monkeypatch.delattr(dispatch._AttentionBackendRegistry, missing)
    with pytest.raises(RuntimeError, match=r"keeps its attention back ends in another way than 0.42; use `with scram"):
        private.dispatch_of("a test")


@pytest.mark.slow
def test_the_environment_may_name_it_before_it_is_there():
    code = (
        "import warnings; warnings.simplefilter('ignore'); "
        "from scram._compat import diffusers as private; private.add_backend('scram', lambda query: 1); "
        "print(private.dispatch_of('scram')._AttentionBackendRegistry._active_backend.value)"
    )
    assert run_python(code, DIFFUSERS_ATTN_BACKEND="scram").split()[-1] == "scram"
