"""What the documents show is true: the README's Python runs, and DESIGN lists the noise that the tests know."""

import re
from pathlib import Path

import pytest
import torch

from test_noise import VECTORS

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_readme_shows_python():
    assert BLOCKS
    assert sum(bool(line) for line in BLOCKS[0].splitlines()) == 8


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_runs(block, capsys):
    names = {}
    exec(block, names)
    assert capsys.readouterr().out
    assert names["out"].isfinite().all()
    assert names["q"].grad.isfinite().all()


def test_readme_finds_what_it_says():
    """Each query of the example has one key that fits it, and the search finds nearly all of them."""
    names = {}
    exec(BLOCKS[0], names)
    height, width = names["q"].shape[2:4]
    moved = torch.arange(height * width).reshape(height, width).roll((5, -9), (0, 1))
    assert (names["found"].index[..., 0] == moved).float().mean() > 0.95


def test_design_lists_the_noise():
    text = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (-?\d+) \| ([\d, ]*)\| (\d+) \|$", text, re.M)
    listed = [(int(seed), tuple(map(int, re.findall(r"\d+", counters))), int(bits)) for seed, counters, bits in rows]
    assert listed == VECTORS


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    document = ROOT / name
    text = document.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+(.*)$", text, re.M)
    }
    for target in re.findall(r"\[[^\]]*\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            assert (document.parent / target).exists(), target
