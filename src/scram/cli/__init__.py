"""The command line. Importing `scram` never imports it: it needs the extra `cli`."""

import sys
from importlib.util import find_spec

_NEEDS = {"typer": "typer", "rich": "rich", "PIL": "pillow", "matplotlib": "matplotlib"}


def main() -> None:
    """Run `scram`, or say in one line which packages are missing."""
    missing = [package for module, package in _NEEDS.items() if find_spec(module) is None]
    if missing:
        print(f'scram: missing {", ".join(missing)}; pip install "scram-attention[cli]"', file=sys.stderr)
        raise SystemExit(2)
    try:
        from .app import app
    except KeyboardInterrupt:
        print("scram: stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    app(prog_name="scram")
