"""The package: public names arrive when first used, stay, and are the same in every order of imports."""

import inspect

import pytest
import torch

import scram
import scram.distributed
import scram.images
from support.processes import run_python

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
@pytest.mark.parametrize(
    "imports",
    [
        "import scram.{0}",
        "from scram.{0} import {0} as one; import scram",
        "import torch, scram.{0}",
        "from scram import {0}; import scram",
    ],
)
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


def test_dir_lists_public_names_alone():
    assert set(scram.__all__) <= set(dir(scram))
    others = set(dir(scram)) - set(scram.__all__)
    assert [name for name in others if not (name.startswith("__") and name.endswith("__"))] == []


def test_public_signatures_have_no_private_parameter():
    rooms = (scram, scram.nn, scram.images, scram.distributed)
    public = {f"{room.__name__}.{name}": getattr(room, name) for room in rooms for name in room.__all__}
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    for name, one in public.items():
        methods = vars(one) if inspect.isclass(one) else {}
        shown = {key: x for key, x in methods.items() if key == "__init__" or not key.startswith("_")}
        functions |= {f"{name}.{key}": x for key, x in shown.items() if inspect.isfunction(x)}
    signatures = {name: inspect.signature(one) for name, one in functions.items()}
    assert "key_mask" in signatures["scram.attention"].parameters
    private = {name: [p for p in one.parameters if p.startswith("_")] for name, one in signatures.items()}
    assert {name: names for name, names in private.items() if names} == {}
    with pytest.raises(TypeError, match=r"it takes q, k, v.*, impl$"):
        scram.attention(torch.zeros(1, 1, 2, 2, 2), None, None, zzz=1)
