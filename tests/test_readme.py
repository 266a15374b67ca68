"""The documents are true: their Python runs, their links resolve, DESIGN lists the noise vectors of the tests."""

import re
from pathlib import Path

import pytest

import scram
from plain import VECTORS

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
BLOCKS = [
    (name, block) for name, text in TEXTS.items() for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
]


PICTURES = {f"docs/{x}.md" for x in ("generate", "inpaint", "retarget")}  # their Python makes a picture


def test_pages_with_python():
    names = ("clusters", "models", "estimators", "tune", "gmflow_matching")
    assert {name for name, _ in BLOCKS} == {f"docs/{x}.md" for x in names} | {"README.md"} | PICTURES
    assert sum(bool(line) for line in BLOCKS[0][1].splitlines()) == 8


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in BLOCKS if name in PICTURES])
def test_python_of_pages_makes_a_picture(block):
    names = {}
    exec(block, names)
    assert names["out"].shape[-1] == 3
    assert names["out"].isfinite().all()


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in BLOCKS if name not in PICTURES])
def test_python_of_pages_runs(block, capsys):
    names = {}
    exec(block, names)
    assert capsys.readouterr().out
    assert names["out"].isfinite().all()
    assert names["q"].grad.isfinite().all()


def test_readme_finds_what_it_says():
    """Each query of the example has one key that fits it, and the search finds nearly all of them."""
    names = {}
    exec(BLOCKS[0][1], names)
    q, k, v = (names[name] for name in "qkv")
    attended = scram.Attended(names["out"], names["out"][..., 0])
    # A query whose key is not found is off by its whole size: 2 % of them make .14.
    assert (scram.measure.output_error(q, k, v, attended, sample=256) < 0.3).all()


def test_design_lists_the_noise():
    rows = re.findall(r"^\| (-?\d+) \| ([\d, ]*)\| (\d+) \|$", TEXTS["docs/DESIGN.md"], re.M)
    listed = [(int(seed), tuple(map(int, re.findall(r"\d+", counters))), int(bits)) for seed, counters, bits in rows]
    assert listed == VECTORS


def test_design_is_short():
    assert len(TEXTS["docs/DESIGN.md"].split()) <= 5000


def anchors(text):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


LINKS = {name: re.findall(r"\[[^\]]*\]\(([^)]+)\)", text) for name, text in TEXTS.items()}


def test_links_are_seen():
    inside = {name: [target for target in found if not target.startswith("https://")] for name, found in LINKS.items()}
    assert len(inside["README.md"]) >= 5
    assert sum(map(len, inside.values())) >= 10


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for target in LINKS[name]:
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            linked = (ROOT / name).parent / path if path else ROOT / name
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target
