"""The command line. Importing `scram` never imports it: it needs the extra `cli`."""

import sys
from importlib.util import find_spec

INTERRUPTED = 130  # the exit code of a program ended by Ctrl-C
_NEEDS = {"typer": "typer", "rich": "rich", "PIL": "pillow", "matplotlib": "matplotlib"}


def main() -> None:
    """Run `scram`, or say in one line which packages are missing."""
    missing = [package for module, package in _NEEDS.items() if find_spec(module) is None]
    if missing:
        print(f"scram: {not_installed(', '.join(missing), 'cli')}", file=sys.stderr)
        raise SystemExit(2)
    try:
        from .app import app

        app(prog_name="scram")
    except KeyboardInterrupt:
        print("scram: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def not_installed(packages: str, *extras: str) -> str:
    """One line that names the missing packages and how to install SCRAM with the extras that hold them."""
    verb = "are" if ", " in packages else "is"
    return f"{packages} {verb} not installed; in the folder of SCRAM's sources: pip install '.[{','.join(extras)}]'"
