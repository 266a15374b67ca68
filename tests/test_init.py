"""The package: public names arrive when first used, stay, and are the same in every order of imports."""

import pytest

import scram
from processes import run_python

pytestmark = pytest.mark.slow


def test_names_are_imported_when_first_used():
    """In a process that has never seen torch."""
    code = (
        "import sys, scram; before = 'torch' in sys.modules; listed = set(scram.__all__) <= set(dir(scram)); "
        "scram.attention; print(before, listed, 'torch' in sys.modules, 'attention' in vars(scram))"
    )
    assert run_python(code).strip() == "False True True True"


def test_torch_imported_before_brings_all_names_and_operators():
    code = "import torch, scram; print(set(scram.__all__) <= set(vars(scram)), hasattr(torch.ops.scram, 'search'))"
    assert run_python(code).strip() == "True True"


def test_torch_that_is_not_imported_brings_no_names():
    code = "import sys, scram; print('torch' in sys.modules, 'attention' in vars(scram))"
    assert run_python(code).strip() == "False False"


@pytest.mark.parametrize("name", ["judge", "trust"])
@pytest.mark.parametrize("imports", ["import scram.{0}", "from scram.{0} import {0} as one; import scram",
                                     "import torch, scram.{0}", "from scram import {0}; import scram"])  # fmt: skip
def test_a_function_stays_before_the_module_of_its_name(imports, name):
    code = f"{imports.format(name)}; print(type(scram.{name}).__name__, scram.{name}.__module__)"
    assert run_python(code).strip() == f"function scram.{name}"


def test_every_name_is_what_its_module_defines():
    code = (
        "import scram; from scram import *; print([n for n in scram.__all__ if globals()[n] is not getattr(scram, n)])"
    )
    assert run_python(code).strip() == "[]"
    homes = {getattr(scram, name).__module__ for name in scram.__all__ if hasattr(getattr(scram, name), "__module__")}
    assert all(home.startswith("scram.") for home in homes)
    with pytest.raises(AttributeError, match="module 'scram' has no attribute 'atention'"):
        scram.atention  # noqa: B018


def test_a_compiled_function_may_use_a_name_first():
    code = """
import scram, torch
def attention(q):
    return scram.attention(q, q, q, search=scram.Search(seed=0))
q = torch.randn(1, 1, 8, 8, 4)
compiled = torch.compile(attention, backend="eager", fullgraph=True)(q)
print(torch.equal(compiled, attention(q)))
"""
    assert run_python(code).strip() == "True"


def test_the_old_name_of_dispatch_works_with_a_warning():
    with pytest.warns(
        DeprecationWarning, match=r"scram\.pick is now scram\.dispatch; the old name goes with"
    ) as caught:
        assert scram.pick is scram.dispatch
    assert caught[0].filename == __file__
    assert "pick" not in dir(scram)
