"""The rules of the house: every module has its tests, importing is light, a search never waits for the device."""

import ast
import functools
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import scram
import scram.core.resolve
import scram.core.tails.base
from support.processes import run_program, run_python

PACKAGE = Path(scram.__file__).parent
FOLDERS = ("reference", "cpu", "gpu")
HEAVY = (
    *("numba", "triton", "typer", "rich", "safetensors", "matplotlib"),
    *("scram.engines.cpu.engine", "scram.engines.gpu.engine", "scram.cli", "scram.distributed"),
)

TESTS = Path(__file__).parent
# Modules without a test file of their own name: which one tests them.
TESTED_IN = {
    "__main__": "cli/test_app.py",
    "_compat/triton": "engines/gpu/test_launch.py",
    "cli/__init__": "cli/test_app.py",
    "core/__init__": "core/test_resolve.py",
    "core/dtensors": "distributed/test_dtensor.py",
    "core/tails/__init__": "core/tails/test_clusters.py",
    "core/tails/drawn": "core/tails/test_estimate.py",
    "core/tails/sampled": "core/tails/test_estimate.py",
    "spec/decode": "engines/test_decode.py",
    "spec/earlier": "engines/test_earlier.py",
    "spec/stretches": "core/tails/test_stretches.py",
    "integrations/__init__": "integrations/test_patch.py",
    "quality/__init__": "quality/test_tune.py",
    "settings": "test_results.py",
    "spec/__init__": "spec/test_grid.py",
    "cli/denoise_film": "cli/test_denoise.py",
    "cli/pair": "cli/test_demo.py",
    "explorer/__init__": "explorer/test_api.py",
    "images/__init__": "images/test_matching.py",
    "nn/__init__": "nn/test_grid_attention.py",
    **{f"engines/{name}": "engines/test_engine.py" for name in ("__init__", *(f"{x}/__init__" for x in FOLDERS))},
    # A type, and parts of the CPU's kernels that Python cannot call.
    "engines/reference/visited": "engines/test_walk.py",
    "engines/reference/windows": "engines/test_drawn_tail.py",
    "engines/cpu/candidates": "engines/test_search.py",
    "engines/cpu/collaborate": "images/test_groups.py",
    "engines/cpu/compiled": "_compat/test_numba.py",
    "engines/cpu/legal": "engines/test_search.py",
    "engines/cpu/windows": "engines/test_attend.py",
    "engines/cpu/cluster_start": "spec/test_clustering.py",
    "engines/cpu/cluster_backward": "spec/test_clustering.py",
    "engines/cpu/route": "spec/test_routing.py",
    **{f"engines/gpu/route/{name}": "spec/test_routing.py" for name in ("__init__", "lists", "route", "start")},
    # What kernels of every stage share, and how they are launched.
    "engines/gpu/runtime/__init__": "engines/gpu/test_launch.py",
    "engines/gpu/runtime/block_sizes": "engines/gpu/test_compile.py",
    "engines/gpu/runtime/launch": "engines/gpu/test_launch.py",
    "engines/gpu/runtime/layout": "engines/gpu/test_search.py",
}
# Test files that belong to no single module.
WITHOUT_A_MODULE = {
    "test_causal_order.py": "every call under causal order",
    "test_house.py": "rules of all sources",
    "test_readme.py": "the documents",
    "test_rooms.py": "imports of all sources",
    "test_release.py": "what a release holds",
    "test_site.py": "the documentation site",
    "test_statements.py": "what README and the start page say",
    "test_torch_defaults.py": "every public call",
    "test_tutorials.py": "the tutorials",
    "engines/gpu/test_compile.py": "every kernel",
    "engines/test_routed_attend.py": "windows less routed keys, in every engine",
    "engines/gpu/test_device.py": "every kernel, on a device",
    "engines/gpu/test_device_estimators.py": "every kernel, on a device",
    "engines/gpu/test_device_torch.py": "every kernel, on a device",
    "engines/gpu/test_interpreter.py": "every kernel, in the interpreter",
    "engines/gpu/test_interpreter_patches.py": "the interpreter as tests use it",
    "engines/gpu/test_launch.py": "how kernels are launched",
    "engines/gpu/test_sanitizer.py": "every kernel, on a device",
}


def mirrors_of(path):
    """The files test_x.py and test_x_topic.py of a module x.py; those of engines/ test that stage in every engine.

    A stage of the GPU engine is a folder: its modules are tested under the name of the stage.
    """
    folder = path.relative_to(PACKAGE).parent
    places = [TESTS / folder, *([TESTS / "engines"] if folder.parts[:1] == ("engines",) else [])]
    names = {path.stem.strip("_")}
    if folder.parts[:2] == ("engines", "gpu") and len(folder.parts) == 3 and folder.name != "runtime":
        places.append(TESTS / folder.parent)
        names = {folder.name, f"{path.stem}_{folder.name}"}
    return {
        found
        for place in places
        for name in names
        for found in (*place.glob(f"test_{name}.py"), *place.glob(f"test_{name}_*.py"))
    }


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_module_has_its_test_file():
    modules = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    without = {name for name, path in modules.items() if not mirrors_of(path)}
    assert without == set(TESTED_IN)
    assert all((TESTS / file).is_file() for file in TESTED_IN.values())


def test_every_test_file_has_its_module():
    theirs = set().union(*(mirrors_of(path) for path in PACKAGE.rglob("*.py")))
    ours = {path for path in TESTS.rglob("test_*.py") if path.parent.name not in ("benchmarks", "examples")}
    assert {path.relative_to(TESTS).as_posix() for path in ours - theirs} == set(WITHOUT_A_MODULE)


def test_every_example_has_its_test_and_its_page():
    root = TESTS.parent
    examples = {path.stem for path in (root / "examples").glob("*.py")}
    listed = (root / "docs" / "examples.md").read_text(encoding="utf-8")
    assert examples == {path.stem.removeprefix("test_") for path in (TESTS / "examples").glob("test_*.py")}
    for name in examples:
        page = (root / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert f"python examples/{name}.py" in page
        line = "(distributed_example.md)" if name == "distributed" else f"({name}.md)"
        assert line in listed
        assert f"examples/{name}.py" in listed
    assert "(docs/examples.md)" in (root / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_importing_scram_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import scram; "
        f"print([name for name in {HEAVY} if name in sys.modules and name not in before])"
    )
    assert run_python(code).strip() == "[]"
    assert all(find_spec(name) for name in HEAVY if name.startswith("scram"))  # none of them was renamed


@pytest.mark.slow
def test_importing_scram_loads_nothing_of_torch_distributed():
    """Beyond what `import torch` loads; nor do its modules and its first call."""
    code = (
        "import sys, torch; before = set(sys.modules); import scram, scram.nn; "
        "[getattr(scram, name) for name in scram.__all__]; q = torch.randn(1, 1, 8, 8, 4); "
        "scram.attention(q, q, q, search=scram.Search(), impl='reference'); "
        "print([name for name in set(sys.modules) - before if name.startswith('torch.distributed')]); "
        "import scram.distributed; print(scram.distributed.KeptMatches.__name__, "
        "any(name.startswith('torch.distributed') for name in set(sys.modules) - before))"
    )
    assert run_python(code).splitlines()[:2] == ["[]", "KeptMatches True"]


def test_search_never_waits_for_the_device():
    waiting = {"nonzero", "item", "tolist", "unique", "masked_select", "cpu", "numpy"}
    for path in (
        PACKAGE / "engines" / "reference" / "search.py",
        PACKAGE / "engines" / "reference" / "tile_search.py",
        PACKAGE / "spec" / "grid.py",
        PACKAGE / "spec" / "noise.py",
    ):
        calls = [node.func for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        named = {func.attr for func in calls if isinstance(func, ast.Attribute)}
        assert not named & waiting, path


def test_public_names_are_documented():
    for name in scram.__all__:
        words = getattr(scram, name).__doc__
        assert words, name
        assert not words.startswith(f"{name}("), name  # what a dataclass writes itself


def words_of(tree):
    """What a module says: names, parts of names, and the words of its texts. Comments are not read."""
    for node in ast.walk(tree):
        name = next((getattr(node, field) for field in ("id", "arg", "attr", "name") if hasattr(node, field)), None)
        text = node.value if isinstance(node, ast.Constant) else name
        if isinstance(text, str):
            yield from re.findall("[a-z]+", text.lower())


def test_legal_is_a_word_of_the_search():
    """As in DESIGN: a key is allowed by grid, mask and order; legal if it is far enough from earlier matches too."""
    sources = [path for path in PACKAGE.rglob("*.py") if "engines" not in path.relative_to(PACKAGE).parts]
    assert [str(path) for path in sources if {"legal", "illegal"} & set(words_of(parsed(path)))] == []


def test_public_classes_and_those_of_the_middle_are_alone_with_their_names():
    names = [
        node.name for path in PACKAGE.rglob("*.py") for node in parsed(path).body if isinstance(node, ast.ClassDef)
    ]
    watched = {*scram.__all__, "Request", "Resolved", "Result", "Tail"}
    assert sorted(name for name in watched if names.count(name) > 1) == []


@functools.cache
def all_nodes(kind):
    """(file, node) of all sources."""
    names = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return [(name, node) for name, path in names.items() for node in walked(path) if isinstance(node, kind)]


@functools.cache
def walked(path):
    return list(ast.walk(parsed(path)))


def test_few_places_ask_which_tail_a_call_has():
    """A tail answers for itself, by the methods of its protocol."""
    of_tails = {scram.core.tails.base.Tail.__name__, *scram.core.tails.base.tails_by_name(), "Codebook"}
    calls = [(name, node) for name, node in all_nodes(ast.Call) if isinstance(node.func, ast.Name)]
    calls = [(name, ast.unparse(node.args[1])) for name, node in calls if node.func.id == "isinstance"]
    asked = [call for call in calls if of_tails & set(re.findall(r"\w+", call[1]))]
    assert 0 < len(asked) <= 10, asked


def test_windows_and_tail_are_joined_in_one_place():
    calls = [(name, node) for name, node in all_nodes(ast.Call) if isinstance(node.func, ast.Attribute)]
    joins = {name for name, node in calls if node.func.attr == "join" and len(node.args) > 2}
    assert {name for name in joins if not name.startswith("core/tails/")} == {"core/pipeline.py"}


def test_one_place_decides_that_a_call_is_dense():
    defined = [(name, node.name) for name, node in all_nodes(ast.FunctionDef)]
    deciding = {"goes_dense", "is_automatic", "dense_is_cheaper"}
    assert {name for name, function in defined if function in deciding} == {"core/resolve.py"}
    readers = {name for name, node in all_nodes(ast.Name) if node.id in {"COSTS", "dense_is_cheaper"}}
    assert readers == {"core/resolve.py"}


def test_few_values_are_dicts_of_anything():
    of_names = [node for _, node in all_nodes(ast.Subscript) if isinstance(node.value, ast.Name)]
    assert [ast.unparse(node) for node in of_names if node.value.id == "dict"].count("dict[str, Any]") <= 45


def test_long_calls_name_their_arguments():
    """But those of kernels."""
    kernels = ("engines/cpu/", "engines/gpu/", "_compat/numba.py")
    long = [f"{name}:{node.lineno}" for name, node in all_nodes(ast.Call) if len(node.args) > 8]
    long = [place for place in long if not place.startswith(kernels)]
    assert long == []


def test_few_lines_assign_many_names():
    assigned = [node for _, node in all_nodes(ast.Assign)]
    parallel = [x for x in assigned if isinstance(x.targets[0], ast.Tuple) and isinstance(x.value, ast.Tuple)]
    assert len(parallel) <= 0.04 * len(assigned)


def test_the_formatter_has_no_exceptions_and_the_top_few_modules():
    assert [str(path) for path in PACKAGE.rglob("*.py") if re.search("fmt: (skip|off)", path.read_text("utf-8"))] == []
    assert len([path for path in PACKAGE.glob("*.py") if path.stem != "__main__"]) <= 8


@pytest.mark.slow
def test_a_warm_call_visits_few_files():
    """One who follows a call of `attention` with the default's stages opens no more."""
    q, k, v = torch.randn(3, 1, 1, 16, 16, 8).unbind()
    defaults = {"search": scram.core.resolve.SEARCHES["cpu"], "tail": scram.core.resolve.CLUSTERS["cpu"]}
    visited = set()

    def visit(frame, event, _):
        if event == "call":
            visited.add(frame.f_code.co_filename)

    for profile in (None, None, visit):
        sys.setprofile(profile)
        try:
            scram.attention(q, k, v, impl="numba", **defaults)
        finally:
            sys.setprofile(None)
    ours = {Path(file).relative_to(PACKAGE).as_posix() for file in visited if Path(file).is_relative_to(PACKAGE)}
    assert {"core/pipeline.py", "engines/cpu/search.py"} <= ours
    assert len(ours) <= 20, sorted(ours)


# Started and not waited for: they are interrupted, or run side by side.
STARTED = {"support/processes.py", "cli/test_app.py", "cli/test_judge.py", "engines/gpu/test_interpreter.py"}


def test_programs_are_run_in_one_way():
    for path in TESTS.rglob("*.py"):
        called = {ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
        ways = {name for name in called if name.startswith(("subprocess.", "os.system", "os.popen"))}
        name = path.relative_to(TESTS).as_posix()
        allowed = (
            {"subprocess.run"} if name == "support/processes.py" else {"subprocess.Popen"} if name in STARTED else set()
        )
        assert ways <= allowed | {"subprocess.CompletedProcess"}, name


def engines_of(test):
    """The fixtures of a test that are engines, one of which needs a device."""
    given = " ".join(ast.unparse(decorator) for decorator in test.decorator_list)
    return {x.arg for x in test.args.args if x.arg in ("impl", "engine") and f"'{x.arg}'" not in given}


def test_make_gpu_looks_wherever_a_test_needs_a_device():
    text = (TESTS.parent / "Makefile").read_text().replace("\\\n", " ")
    left_out = re.search(r"WITHOUT_DEVICE := --ignore=src \$\(addprefix --ignore=tests/,(.*)\)", text)[1].split()
    assert {"benchmarks", "cli"} <= set(left_out)
    for path in (path for folder in left_out for path in (TESTS / folder).rglob("test_*.py")):
        functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
        assert [test.name for test in functions if engines_of(test)] == [], path
        assert "mark.gpu" not in path.read_text(), path


@pytest.mark.slow
def test_a_warning_of_an_installed_plugin_is_no_error(tmp_path):
    """Beside workers too; a warning of a test is one."""
    (tmp_path / "pytest_warns.py").write_text("import warnings\ndef pytest_configure(): warnings.warn('a plugin')\n")
    (tmp_path / "test_one.py").write_text("import warnings\ndef test_one(): pass\ndef test_two(): warnings.warn('x')\n")
    options = ("-c", TESTS.parent / "pyproject.toml", "--noconftest", "-p", "pytest_warns", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", "-q", "-n", "1", *options, tmp_path)
    done = run_program(*command, code=1, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    assert "1 failed, 1 passed" in done.stdout
