"""The rules of the house: imports go one way, importing is light, a search never waits for the device."""

import ast
import subprocess
import sys
from pathlib import Path

import scram

PACKAGE = Path(scram.__file__).parent
FOLDERS = ("reference", "cpu", "gpu")
HEAVY = (
    "numba",
    "triton",
    "typer",
    "rich",
    "safetensors",
    "matplotlib",
    "scram.engines.cpu",
    "scram.engines.gpu",
    "scram.cli",
)
# What each module may import of the package; the folders count as one each.
BELOW = {
    "check": {"estimators", "schedule", "types"},
    "types": {"check", "schedule"},
    "grid": set(),
    "noise": set(),
    "precision": set(),
    "schedule": set(),
    "scoring": {"check", "types"},
    "pick": {"check", "types"},
    "ops": {"check", "grid", "noise", "scoring", "types"},
    "estimators": {"check"},
    "draws": {"grid", "noise"},
    "estimate_ops": {"check", "draws", "grid", "ops", "scoring"},
    "reference": {"draws", "grid", "noise", "schedule", "scoring", "types"},
    "cpu": {"draws", "grid", "noise", "schedule", "scoring", "types"},
    "gpu": {"draws", "grid", "noise", "schedule", "scoring", "types"},
    "exact": {"check", "grid", "precision", "scoring", "types"},
    "measure": {"check", "exact", "grid", "scoring", "types"},
    "sound": {"check", "ops", "pick", "types"},
    "api": {
        "check",
        "draws",
        "estimate_ops",
        "estimators",
        "grid",
        "noise",
        "ops",
        "pick",
        "precision",
        "reference",
        "scoring",
        "sound",
        "types",
    },
    "nn": {"api", "check", "estimators", "pick", "scoring", "types"},
    "patch": {"api", "check", "types"},
    "trust": {"api", "check", "exact", "grid", "measure", "precision", "schedule", "scoring", "types"},
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
    """The part of the package that "scram.engines.cpu.search" belongs to, None for others and for scram itself."""
    names = module.split(".")
    known = {*BELOW, "cli", "nn"}
    return names[1] if names[0] == "scram" and len(names) > 1 and names[1] in known else None


def sources(name):
    return sorted((PACKAGE / name).rglob("*.py")) if (PACKAGE / name).is_dir() else [PACKAGE / f"{name}.py"]


def test_imports_go_one_way():
    for name, allowed in BELOW.items():
        for path in sources(name):
            if path.exists():
                found = {part(module) for module in imported(path)} - {None, name}
                assert found <= allowed, f"{path.name} of {name} imports {found - allowed}"


def test_engines_are_strangers():
    for name in FOLDERS:
        others = {other for other in FOLDERS if other != name}
        for path in sources(name):
            assert not {part(module) for module in imported(path)} & others, path


def test_engine_packages_stay_in_their_folders():
    for path in PACKAGE.rglob("*.py"):
        packages = {module.split(".")[0] for module in imported(path)}
        inside = path.relative_to(PACKAGE).parts[0]
        assert "numba" not in packages or inside in ("cpu", "cli"), path
        assert "triton" not in packages or inside in ("gpu", "cli"), path
        assert "typer" not in packages or inside == "cli", path


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
