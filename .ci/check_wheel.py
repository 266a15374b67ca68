"""Check an installed wheel: `PYTHONPATH=FOLDER python check_wheel.py FOLDER BUILT`; BUILT holds the wheel itself."""

import sys
from importlib.metadata import version
from pathlib import Path

import scram

folder = Path(sys.argv[1]).resolve()
package = Path(scram.__file__).resolve().parent
assert package == folder / "scram", f"imported {package}, not the wheel in {folder}"
assert scram.__version__ == version("scram-attention"), f"{scram.__version__} is not {version('scram-attention')}"
assert "scram.cli" not in sys.modules, "import scram must not import the command line"
PAGE = ("page.html", "style.css", "data.js", "attend.js", "colors.js", "pane.js", "numbers.js", "main.js")
for name in ("py.typed", "cli/data/city_a.jpg", "cli/data/city_b.jpg", *(f"explorer/page/{name}" for name in PAGE)):
    assert (package / name).is_file(), f"the wheel lacks scram/{name}"
(wheel,) = Path(sys.argv[2]).glob("*.whl")
assert wheel.stat().st_size < 2_000_000, f"{wheel.name} has {wheel.stat().st_size} bytes, 2 MB are its limit"
print(f"wheel: scram {scram.__version__} imports and is complete")
