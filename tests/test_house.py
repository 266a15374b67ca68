"""The rules of the house: imports go one way, importing is light, a search never waits for the device."""

import ast
import functools
from importlib.util import find_spec
from pathlib import Path

import pytest

import scram
from with_torch import printed

PACKAGE = Path(scram.__file__).parent
FOLDERS = ("reference", "cpu", "gpu")
HEAVY = (
    *("numba", "triton", "typer", "rich", "safetensors", "matplotlib"),
    *("scram.engines.cpu.engine", "scram.engines.gpu.engine", "scram.cli", "scram.distributed"),
)
# What each module may import of the package; folders count as one each.
SHARED = {
    "_compat",
    "options",
    "calls",
    "clustering",
    "draws",
    "engines",
    "grid",
    "noise",
    "schedule",
    "scoring",
    "types",
}
BELOW = {
    "_compat": set(),
    "arguments": {"types"},
    "layout_hints": set(),
    "calls": set(),
    "grid": set(),
    "noise": set(),
    "places": {"grid"},
    "options": set(),
    "schedule": set(),
    "errors": {"codebook", "estimators", "options", "types"},
    "codebook": {"errors"},
    "fitting": {"clustering", "codebook", "grid", "noise", "statistics"},
    "statistics": set(),
    "cost": {"codebook", "errors", "estimators", "grid", "schedule", "scoring", "types"},
    "truth": {"dense", "errors", "exact", "grid", "measure", "scoring", "statistics", "types"},
    "plan": {"options", "api", "codebook", "errors", "estimators", "modes", "statistics", "truth", "types"},
    "tune": {
        "options",
        "api",
        "arguments",
        "cost",
        "defaults",
        "errors",
        "estimators",
        "grid",
        "modes",
        "plan",
        "precision",
        "statistics",
    }
    | {"truth", "types", "validate"},
    "types": {"options", "dtensors", "errors", "places", "schedule"},
    "estimators": {"errors"},
    "precision": {"_compat"},
    "scoring": {"errors", "types"},
    "draws": {"grid", "noise"},
    "dtensors": {"distributed"},
    "clustering": {"calls", "grid", "noise", "scoring"},
    "engines": SHARED,
    "reference": SHARED,
    "cpu": SHARED,
    "gpu": SHARED,
    "dispatch": {"options", "cpu", "engines", "errors", "gpu", "reference", "types"},
    "ops": SHARED | {"dispatch", "errors"},
    "dense": {"dtensors", "errors", "scoring", "types"},
    "defaults": {"options", "codebook", "cost", "estimators", "types"},
    "validate": {"options", "defaults", "estimators", "dispatch", "engines", "errors", "layout_hints", "ops", "types"},
    "stages": SHARED | {"codebook", "errors", "estimators", "fitting", "ops", "places"},
    "api": SHARED
    | {"arguments", "codebook", "defaults", "dense", "dispatch", "dtensors", "errors", "estimators"}
    | {"layout_hints", "ops", "precision", "stages", "validate"},
    "modes": {"api", "exact", "grid", "layout_hints", "types"},
    "local": {"options", "api", "arguments", "errors", "grid", "types"},
    "explorer": {
        "options",
        "api",
        "arguments",
        "codebook",
        "defaults",
        "errors",
        "estimators",
        "grid",
        "images",
        "precision",
    }
    | {"scoring", "truth", "types"},
    "exact": {"options", "_compat", "arguments", "errors", "grid", "precision", "scoring", "types"},
    "measure": {"options", "errors", "exact", "grid", "scoring", "types"},
    "timing": set(),
    "judge": {"options", "arguments", "dense", "errors", "grid", "statistics", "timing", "truth"},
    "nn": {"options", "api", "arguments", "codebook", "defaults", "dense", "layout_hints", "errors", "estimators"}
    | {"grid", "places", "scoring", "types"},
    "images": {"options", "api", "exact", "grid", "scoring", "types"},
    "layers": {"layout_hints", "modes", "plan"},
    "distributed": {
        "options",
        "_compat",
        "api",
        "arguments",
        "clustering",
        "codebook",
        "defaults",
        "dense",
        "dtensors",
        "errors",
        "estimators",
        "exact",
        "nn",
        "layout_hints",
        "noise",
    }
    | {"ops", "precision", "scoring", "stages", "types", "validate"},
    "sdpa": {
        "options",
        "_compat",
        "api",
        "defaults",
        "errors",
        "estimators",
        "layers",
        "layout_hints",
        "tune",
        "types",
    },
    "patch": {"options", "_compat", "errors", "estimators", "layers", "sdpa", "types"},
    "trust": {"options", "api", "arguments", "codebook", "cost", "defaults", "errors", "estimators", "measure", "modes"}
    | {"plan", "precision", "scoring", "statistics", "truth", "types"},
}


TESTS = Path(__file__).parent
# Modules without a test file of their own name: which one tests them.
TESTED_IN = {
    "__main__": "cli/test_app.py",
    "_compat/triton": "engines/gpu/test_launch.py",
    "cli/__init__": "cli/test_app.py",
    "dtensors": "distributed/test_dtensor.py",
    "cli/denoise_film": "cli/test_denoise.py",
    "cli/pair": "cli/test_demo.py",
    "explorer/__init__": "explorer/test_api.py",
    "images/__init__": "images/test_match.py",
    "nn/__init__": "nn/test_grid_attention.py",
    "stages": "test_api.py",
    "engines/cpu/cluster_tail_backward": "engines/test_cluster_tail.py",
    **{f"engines/{name}": "engines/test_engine.py" for name in ("__init__", *(f"{x}/__init__" for x in FOLDERS))},
    # A type, and parts of the CPU's kernels that Python cannot call.
    "engines/reference/visited": "engines/test_walk.py",
    "engines/reference/windows": "engines/test_drawn_tail.py",
    "engines/cpu/candidates": "engines/test_search.py",
    "engines/cpu/compiled": "_compat/test_numba.py",
    "engines/cpu/legal": "engines/test_search.py",
    "engines/cpu/windows": "engines/test_attend.py",
    # What kernels of every stage share, and how they are launched.
    "engines/gpu/runtime/__init__": "engines/gpu/test_launch.py",
    "engines/gpu/runtime/block_sizes": "engines/gpu/test_compile.py",
    "engines/gpu/runtime/launch": "engines/gpu/test_launch.py",
    "engines/gpu/runtime/layout": "engines/gpu/test_search.py",
}
# Test files that belong to no single module.
WITHOUT_A_MODULE = {
    "test_house.py": "rules of all sources",
    "test_readme.py": "the documents",
    "test_release.py": "what a release holds",
    "test_site.py": "the documentation site",
    "test_tutorials.py": "the tutorials",
    "engines/gpu/test_compile.py": "every kernel",
    "engines/gpu/test_device.py": "every kernel, on a device",
    "engines/gpu/test_device_estimators.py": "every kernel, on a device",
    "engines/gpu/test_device_torch.py": "every kernel, on a device",
    "engines/gpu/test_interpreter.py": "every kernel, in the interpreter",
    "engines/gpu/test_launch.py": "how kernels are launched",
    "engines/gpu/test_sanitizer.py": "every kernel, on a device",
}


def mirrors_of(path):
    """The files test_x.py and test_x_topic.py of a module x.py; those of engines/ test that stage in every engine.

    A stage of the GPU engine is a folder: its modules are tested under the name of the stage, tile.py of attend/ also
    as tile_attend.
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
def imported(path):
    """Every module that a file imports, absolute: "scram.grid", "numba.np"."""
    return frozenset(_imported(path))


def _imported(path):
    package = ["scram", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def part(module):
    """The part of the package that a module belongs to, None for others and for scram itself."""
    names = module.removeprefix("scram.engines.").removeprefix("scram.").split(".")
    return names[0] if module.startswith("scram.") and names[0] in {*BELOW, "cli"} else None


def sources(name):
    if name == "engines":
        return [PACKAGE / "engines" / "__init__.py"]
    folder = PACKAGE / "engines" / name if name in FOLDERS else PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def test_every_module_has_its_place_in_the_table():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    engines = {path.name for path in (PACKAGE / "engines").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert modules | folders | engines == {*BELOW, "api", "cli"}


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


def test_imports_go_one_way():
    for name, allowed in BELOW.items():
        for path in sources(name):
            found = {part(module) for module in imported(path)} - {None, name}
            assert found <= allowed, f"{path.name} of {name} imports {found - allowed}"


def test_engines_do_not_import_each_other():
    for name in FOLDERS:
        others = {other for other in FOLDERS if other != name}
        for path in sources(name):
            assert not {part(module) for module in imported(path)} & others, path


def test_engine_packages_stay_in_their_folders():
    for path in PACKAGE.rglob("*.py"):
        packages = {module.split(".")[0] for module in imported(path)}
        inside = set(path.relative_to(PACKAGE).parts)
        assert "numba" not in packages or inside & {"cpu", "cli", "_compat"}, path
        assert "triton" not in packages or inside & {"gpu", "cli", "_compat"}, path
        assert "typer" not in packages or "cli" in inside, path


def test_the_rules_see_the_imports():
    assert "scram.grid" in imported(PACKAGE / "engines" / "reference" / "search.py")
    assert part("scram.engines.reference.search") == "reference"
    assert "torch" in imported(PACKAGE / "noise.py")


@pytest.mark.slow
def test_importing_scram_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import scram; "
        f"print([name for name in {HEAVY} if name in sys.modules and name not in before])"
    )
    assert printed(code) == "[]"
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
    assert printed(code).split("\n")[:2] == ["[]", "KeptMatches True"]


def test_search_never_waits_for_the_device():
    waiting = {"nonzero", "item", "tolist", "unique", "masked_select", "cpu", "numpy"}
    for path in (
        PACKAGE / "engines" / "reference" / "search.py",
        PACKAGE / "engines" / "reference" / "tile_search.py",
        PACKAGE / "grid.py",
        PACKAGE / "noise.py",
    ):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = {func.attr for func in calls if isinstance(func, ast.Attribute)}
        assert not named & waiting, path


def test_public_names_are_documented():
    for name in scram.__all__:
        words = getattr(scram, name).__doc__
        assert words, name
        assert not words.startswith(f"{name}("), name  # what a dataclass writes itself


def test_source_files_are_short():
    for path in (*PACKAGE.rglob("*.py"), *(TESTS.parent / "examples").glob("*.py")):
        assert len(path.read_text().splitlines()) <= 620, path
