"""The Python of the tutorials: runs it, and writes into the pages what it prints.

    python docs/_site/tutorials.py            # runs every tutorial and rewrites its outputs and pictures
    python docs/_site/tutorials.py video      # one of them

The blocks of a page run from top to bottom in one namespace, in an empty folder. A block with `title="x.py"` is written
to that file instead; a `console` block runs it by torchrun. What a block prints stands below it, in a `text` block.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
PICTURES = DOCS / "images" / "tutorials"
BLOCK = re.compile(
    r'^```(?P<kind>python|console)(?: title="(?P<file>[\w.]+)")?\n(?P<code>.*?)^```\n'
    r"(?:\n```text\n(?P<out>.*?)^```\n)?",
    re.M | re.S,
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def pages() -> dict[str, Path]:
    return {page.stem: page for page in sorted((DOCS / "tutorials").glob("*.md")) if page.stem != "index"}


def run(text: str, folder: Path) -> str:
    """The page with the outputs that its blocks print now."""
    names: dict[str, Any] = {"__name__": "tutorial"}

    def filled(block: re.Match[str]) -> str:
        if block["file"]:
            (folder / block["file"]).write_text(block["code"], encoding="utf-8")
            printed = ""
        elif block["kind"] == "console":
            printed = torchrun(block["code"], folder)
        else:
            screen, here = io.StringIO(), Path.cwd()
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(screen):
                    exec(compile(block["code"], "<tutorial>", "exec"), names)
            finally:
                os.chdir(here)
            printed = screen.getvalue()
        own = block[0] if block["out"] is None else block[0][: block.start("out") - block.start() - len("\n```text\n")]
        return own + (f"\n```text\n{printed}```\n" if printed else "")

    return BLOCK.sub(filled, text)


def torchrun(line: str, folder: Path) -> str:
    """What `$ torchrun ...` prints, as a program of this Python."""
    command, *arguments = line.strip().removeprefix("$ ").split()
    assert command == "torchrun", line
    places = os.pathsep.join(filter(None, [str(DOCS.parent / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def same(one: str, other: str, off: float = 0.1) -> bool:
    """Whether two pages are the same but for figures that differ by a tenth, or in their last digit."""

    def near(x: str, y: str) -> bool:
        last = 1.01 * 10.0 ** -len(x.partition(".")[2])
        return x == y or ("." in x and abs(float(x) - float(y)) <= max(last, off * abs(float(x))))

    figures, others = NUMBER.findall(one), NUMBER.findall(other)
    return NUMBER.sub("#", one) == NUMBER.sub("#", other) and all(map(near, figures, others))


def main() -> None:
    wanted = sys.argv[1:] or list(pages())
    for name in wanted:
        page = pages()[name]
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            made = run(text, Path(folder))
            for picture in Path(folder).glob("*.jpg"):
                PICTURES.mkdir(exist_ok=True)
                (PICTURES / picture.name).write_bytes(picture.read_bytes())
        page.write_text(made, encoding="utf-8")
        print(f"{page.name}: {'as it was' if made == text else 'written'}")


if __name__ == "__main__":
    main()
