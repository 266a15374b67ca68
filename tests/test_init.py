"""The package: public names arrive when first used, stay, and are the same in every order of imports."""

import ast
import inspect
from pathlib import Path

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


def test_importing_loads_the_same_whether_torch_came_first():
    code = "import torch, sys, scram; print([name for name in sys.modules if name.startswith('scram.')])"
    assert run_python(code).strip() == "[]"
    assert run_python(code.replace("torch, ", "")).strip() == "[]"


def test_a_function_brings_the_operators():
    code = "import torch, scram; scram.attention; print(hasattr(torch.ops.scram, 'search'))"
    assert run_python(code).strip() == "True"


def test_torch_that_is_not_imported_brings_no_names():
    code = "import sys, scram; print('torch' in sys.modules, 'attention' in vars(scram))"
    assert run_python(code).strip() == "False False"


def test_every_public_name_is_once_in_the_map_and_once_for_type_checkers():
    tree = ast.parse(Path(scram.__file__).read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.asname for node in checked.body for alias in node.names]
    assert sorted(imported) == sorted([*scram._HOMES, *scram._MODULES])


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
    others = set(dir(scram)) - set(scram.__all__) - set(scram._MODULES)
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
    with pytest.raises(TypeError, match=r"it takes q, k, v.*, impl, return_lse$"):
        scram.attention(torch.zeros(1, 1, 2, 2, 2), None, None, zzz=1)
