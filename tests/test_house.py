"""The rules of the house: imports go one way, importing is light, a search never waits for the device."""

import ast
import subprocess
import sys
from pathlib import Path

import scram

PACKAGE = Path(scram.__file__).parent
FOLDERS = ("reference", "cpu", "gpu")
HEAVY = (
    *("numba", "triton", "typer", "rich", "safetensors", "matplotlib"),
    *("scram.engines.cpu.engine", "scram.engines.gpu.engine", "scram.cli"),
)
# What each module may import of the package; folders count as one each.
SHARED = {"_compat", "calls", "draws", "engines", "grid", "noise", "schedule", "scoring", "types"}
BELOW = {
    "_compat": set(),
    "arguments": {"types"},
    "layout_hints": set(),
    "calls": set(),
    "grid": set(),
    "noise": set(),
    "schedule": set(),
    "errors": {"estimators", "types"},
    "types": {"errors", "schedule"},
    "estimators": {"errors"},
    "precision": {"_compat"},
    "scoring": {"errors", "types"},
    "draws": {"grid", "noise"},
    "engines": SHARED,
    "reference": SHARED,
    "cpu": SHARED,
    "gpu": SHARED,
    "dispatch": {"cpu", "engines", "errors", "gpu", "reference", "types"},
    "ops": SHARED | {"dispatch", "errors"},
    "validate": {"dispatch", "engines", "errors", "layout_hints", "ops", "types"},
    "api": SHARED | {"arguments", "dispatch", "errors", "estimators", "layout_hints", "ops", "precision", "validate"},
    "exact": {"_compat", "arguments", "errors", "grid", "precision", "scoring", "types"},
    "measure": {"errors", "exact", "grid", "scoring", "types"},
    "nn": {"api", "arguments", "layout_hints", "dispatch", "errors", "estimators", "scoring", "types"},
    "patch": {"_compat", "api", "errors", "layout_hints", "types"},
    "trust": {"api", "arguments", "errors", "exact", "grid", "measure", "precision", "schedule", "scoring", "types"},
}


def imported(path):
    """Every module that a file imports, absolute: "scram.grid", "numba.np"."""
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
        assert "numba" not in packages or inside & {"cpu", "cli"}, path
        assert "triton" not in packages or inside & {"gpu", "cli"}, path
        assert "typer" not in packages or "cli" in inside, path


def test_the_rules_see_the_imports():
    assert "scram.grid" in set(imported(PACKAGE / "engines" / "reference" / "search.py"))
    assert part("scram.engines.reference.search") == "reference"
    assert "torch" in set(imported(PACKAGE / "noise.py"))


def test_importing_scram_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import scram; "
        f"print([name for name in {HEAVY} if name in sys.modules and name not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
        assert getattr(scram, name).__doc__, name


def test_source_files_are_short():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, path
