"""Rooms of the package import one way. A room is a folder, a module at the top, or a part with rules of its own."""

import ast
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import scram

PACKAGE = Path(scram.__file__).parent

# What each room may import of the package, besides itself. Every room stands below those that it imports.
BOTTOM = {"core.checks", "core.files", "core.dtensors", "options"}
SETTINGS = {*BOTTOM, "settings"}
VALUES = {*SETTINGS, "results", "spec"}
ENGINE = {"_compat", "core.calls", "engines", *VALUES}
CALLS = {*VALUES, "_compat", "core.calls", "engines", "engines.dispatch", "core"}
VERSION = "__init__"
USES = {*VALUES, "_compat", "core", "functional"}
ROOMS: dict[str, set[str]] = {
    "_compat": set(),
    "core.checks": set(),
    "core.files": set(),
    "core.dtensors": set(),
    "options": set(),
    "core.calls": set(),
    "settings": BOTTOM,
    "spec": {"core.calls", *SETTINGS},
    "results": {*SETTINGS, "spec"},
    "engines": {"_compat", "core.calls", *VALUES},
    "engines.reference": ENGINE,
    "engines.cpu": ENGINE,
    "engines.gpu": ENGINE,
    "engines.dispatch": {*SETTINGS, "results", "engines", "engines.reference", "engines.cpu", "engines.gpu"},
    "core": CALLS - {"core"},
    "bias": {"core.checks", "core"},
    "functional": CALLS,
    "quality": USES - {"functional"},
    "nn": USES,
    "images": {*USES, "core.calls", "engines.dispatch", "quality"},
    "integrations": {*USES, "bias", "nn", "quality"},
    "distributed": {*USES, "core.calls", "nn", "quality"},
    "explorer": {*USES, VERSION, "images", "quality"},
    "cli": {*USES, VERSION, "distributed", "engines.dispatch", "explorer", "images", "integrations", "nn", "quality"},
}
# Where the package is entered: they load all rooms, by name.
DOORS = {"__init__", "__main__"}
# Rooms loaded by a function when they are first needed, since they are heavy; by whom.
LAZY = {
    *(("cli", "cli"), ("cli", "images"), ("core", "distributed"), ("distributed", "distributed")),
    *(("functional", "quality"), ("images", "engines.cpu")),
}
# Packages that a function may import: they may be missing, or take long to import.
OPTIONAL = {
    *("PIL", "av", "cv2", "diffusers", "faiss", "fcntl", "matplotlib", "natten", "numba", "pynndescent"),
    *("resource", "safetensors", "skimage", "transformers", "triton"),
}
STARTS_WITHOUT_TORCH = "cli"


class Import(NamedTuple):
    path: str  # of the file, "engines/cpu/search.py"
    module: str  # absolute: "scram.spec.grid", "numba.core"
    in_function: bool


def room(parts):
    """The room of a module of the package, given as the names after `scram`: ("engines", "cpu", "search")."""
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    found = next((name for name in names if name in ROOMS), None)
    return found or parts[0]


def module_of(base, name):
    """What `from base import name` imports: the module base.name where there is one, else base."""
    place = PACKAGE.joinpath(*base[1:], name)
    return (*base, name) if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() else base


def imports_of(path, source):
    package = ("scram", *path.relative_to(PACKAGE).parts[:-1])
    name = path.relative_to(PACKAGE).as_posix()

    def visit(node, in_function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(name, alias.name, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else ()
                base = (*above, *(child.module.split(".") if child.module else ()))
                ours = base[0] == "scram"
                modules = [module_of(base, alias.name) if ours else base for alias in child.names]
                yield from (Import(name, ".".join(module), in_function) for module in modules)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from visit(child, in_function or inside)

    return list(visit(ast.parse(source), False))


@functools.cache
def all_imports():
    return [x for path in sorted(PACKAGE.rglob("*.py")) for x in imports_of(path, path.read_text(encoding="utf-8"))]


def parts_of(path):
    """The names of a file after `scram`; those of a folder for its __init__.py."""
    parts = Path(path).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def between_rooms(imports):
    """(import, room of the file, room of what it imports), of the package's own modules."""
    for x in imports:
        first, *rest = x.module.split(".")
        if first == "scram":
            yield x, room(parts_of(x.path)), room(tuple(rest) or ("__init__",))


def violations(imports):
    """Imports that the table does not allow, as "file -> room"."""
    return {
        f"{x.path} -> {theirs}"
        for x, ours, theirs in between_rooms(imports)
        if ours != theirs and ours not in DOORS and theirs not in ROOMS[ours]
        if not (x.in_function and (ours, theirs) in LAZY)
    }


def hidden(imports):
    """Imports inside functions of modules that are neither heavy nor optional: they hide a cycle."""
    own = {
        f"{x.path} -> {theirs}"
        for x, ours, theirs in between_rooms(imports)
        if x.in_function and (ours, theirs) not in LAZY
    }
    others = [x for x in imports if x.in_function and x.module.split(".")[0] not in {"scram", *OPTIONAL}]
    late = {
        f"{x.path} -> {x.module}"
        for x in others
        if not (x.module.split(".")[0] == "torch" and room(parts_of(x.path)) == STARTS_WITHOUT_TORCH)
    }
    return own | late


def test_every_module_is_in_a_room():
    rooms = {room(parts_of(path.relative_to(PACKAGE))) for path in PACKAGE.rglob("*.py")}
    assert rooms - DOORS == set(ROOMS)


def test_the_table_goes_one_way():
    above = {VERSION}
    for name, allowed in ROOMS.items():
        assert allowed <= above, f"{name} imports {allowed - above}, which stand below it"
        above.add(name)


def test_rooms_import_one_way():
    assert violations(all_imports()) == set()


def test_no_import_inside_a_function_hides_a_cycle():
    assert hidden(all_imports()) == set()


def test_engines_stay_apart():
    """None imports another, so that no fast engine imports the reference; packages stay with their engine."""
    engines = {name for name in ROOMS if name.startswith("engines.")} - {"engines.dispatch"}
    for name in engines:
        assert not ROOMS[name] & (engines - {name})
    homes = {"numba": {"engines.cpu", "_compat", "cli"}, "triton": {"engines.gpu", "_compat", "cli"}, "typer": {"cli"}}
    for x in all_imports():
        assert room(parts_of(x.path)) in homes.get(x.module.split(".")[0], set(ROOMS) | DOORS), x


def test_checks_and_values_at_the_bottom_import_nothing():
    assert ROOMS["core.checks"] == ROOMS["_compat"] == set()


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("engines/cpu/a.py", "from ..reference import search", "engines/cpu/a.py -> engines.reference"),
        ("engines/gpu/a.py", "from scram.engines.cpu.search import x", "engines/gpu/a.py -> engines.cpu"),
        ("core/checks.py", "def f():\n    from ..spec.grid import x", "core/checks.py -> spec"),
        ("_compat/a.py", "import scram.nn", "_compat/a.py -> nn"),
        ("nn/a.py", "from .. import images", "nn/a.py -> images"),
        ("nn/a.py", "from scram import attention", "nn/a.py -> __init__"),
    ],
)
def test_a_violation_is_found(path, source, found):
    assert violations(imports_of(PACKAGE / path, source)) == {found}


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("nn/a.py", "def f():\n    from ..spec.grid import x", {"nn/a.py -> spec"}),
        ("nn/a.py", "class A:\n    def f(self):\n        if x:\n            from .b import x", {"nn/a.py -> nn"}),
        ("nn/a.py", "def f():\n    import torch.fx", {"nn/a.py -> torch.fx"}),
        ("nn/a.py", "def f():\n    import json", {"nn/a.py -> json"}),
        ("cli/app.py", "def f():\n    from .match import run\n    import torch.cuda, PIL", set()),
        ("nn/a.py", "from ..spec.grid import x\nimport torch", set()),
    ],
)
def test_a_hidden_import_is_found(path, source, found):
    assert hidden(imports_of(PACKAGE / path, source)) == found


if __name__ == "__main__":
    print(*sorted(violations(all_imports())), "", *sorted(hidden(all_imports())), sep="\n", file=sys.stdout)
