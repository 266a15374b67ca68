"""The documents are true: their Python runs, their links resolve, DESIGN lists the noise vectors of the tests."""

import re
from pathlib import Path

import pytest
import torch

import scram
from scram.core import resolve
from scram.quality import tune
from support.plain import VECTORS

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(page.relative_to(ROOT).as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))),
]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
# Those of tutorials run in test_tutorials.py, and that of the start page is README's.
BLOCKS = [
    (name, block)
    for name, text in TEXTS.items()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    if not name.startswith("docs/tutorials/") and name != "docs/index.md"
]


PICTURES = {f"docs/{x}.md" for x in ("generate", "inpaint", "retarget")}  # their Python makes a picture
HTML = {"docs/explore.md"}  # its Python makes a page


def test_pages_with_python():
    names = ("bias", "causal", "clusters", "correlation", "models", "estimators", "tune", "gmflow_matching")
    assert {name for name, _ in BLOCKS} == {f"docs/{x}.md" for x in names} | {"README.md"} | PICTURES | HTML
    assert sum(bool(line) for line in BLOCKS[0][1].splitlines()) == 5
    assert "error=" in BLOCKS[0][1]


def words(text):
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_readme_is_short():
    """One screen of text before it says when not to use it, which comes before all results; 1 000 words in all."""
    text = TEXTS["README.md"]
    assert words(text) <= 1000
    before = text[: text.index("\n## ")]
    assert text[len(before) :].startswith("\n## When not to use it")
    assert words(before) <= 300
    assert len(before.splitlines()) <= 50


def test_readme_names_the_two_commands():
    assert all(re.search(rf"^make {name} ", TEXTS["README.md"], re.M) for name in ("demo", "test"))


def test_the_start_page_shows_the_code_of_readme():
    assert f"```python\n{BLOCKS[0][1]}```" in TEXTS["docs/index.md"]


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in BLOCKS if name in PICTURES])
def test_python_of_pages_makes_a_picture(block):
    names = {}
    exec(block, names)
    assert names["out"].shape[-1] == 3
    assert names["out"].isfinite().all()


@pytest.mark.parametrize("block", [pytest.param(block, id=name) for name, block in BLOCKS if name in HTML])
def test_python_of_pages_makes_a_page(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert capsys.readouterr().out.startswith("Explorer(")
    assert [path.suffix for path in tmp_path.iterdir()] == [".html"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [pytest.param(block, id=name) for name, block in BLOCKS if name not in PICTURES | HTML]
)
def test_python_of_pages_runs(block, capsys):
    names = {}
    exec(block, names)
    assert capsys.readouterr().out or "print(" not in block
    floats = [x for x in names.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert floats
    assert all(x.isfinite().all() for x in floats)
    assert all(x.grad.isfinite().all() for x in floats if x.requires_grad and x.is_leaf)


def test_settings_name_the_default():
    for device in ("cpu", "cuda"):
        search, tail = resolve.SEARCHES[device], resolve.CLUSTERS[device]
        searched = f"{search.matches} match, {search.sweeps} sweeps from routed keys, radius 1"
        line = f"| {searched} | {tail.count} clusters and {tail.keys} routed keys, first and second order |"
        assert f"| {'CPU' if device == 'cpu' else 'CUDA'} {line}" in TEXTS["docs/settings.md"]
        assert tail.first_order and tail.second_order  # noqa: PT018 - one claim
    few = resolve.SEARCHES["cuda"]
    assert resolve.SEARCHES["cpu"] == scram.Search(sweeps=few.sweeps)
    assert few == scram.Search(sweeps=few.sweeps, propagate=few.propagate, gossip=few.gossip)
    said = f'`Search(sweeps={few.sweeps}, propagate="{few.propagate}", gossip={few.gossip})`'
    assert said in TEXTS["docs/settings.md"].replace("\n", " ")
    plain = scram.Clusters()
    own = f"`Search()` makes {scram.Search().sweeps} sweeps, "
    own += f"`Clusters()` has {plain.count} clusters and {plain.keys} keys"
    assert own in TEXTS["docs/settings.md"].replace("\n", " ")
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", TEXTS["docs/clusters.md"], re.M)
    assert [(name, repr(getattr(plain, name))) for name, _ in listed] == listed


def test_tune_lists_its_ladder():
    for count, keys in tune.TAILS:
        assert (
            f"{count} clusters + {keys} keys" in TEXTS["docs/tune.md"] or f" {count} + {keys}" in TEXTS["docs/tune.md"]
        )


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


def test_every_command_stands_on_the_page_of_commands():
    app = pytest.importorskip("scram.cli.app").app
    names = {one.callback.__name__ for one in app.registered_commands}
    assert len(names) >= 11
    assert {name for name in names if f"`scram {name}" not in TEXTS["docs/commands.md"]} == set()
    assert {name for name in names if f"| `{name}` |" not in TEXTS["docs/formats.md"]} == set()


def test_every_file_that_a_command_writes_stands_on_the_page_of_formats():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/scram/cli").glob("*.py"))
    names = set(re.findall(r"""out / ["']([\w-]+\.\w+)["']""", sources))
    assert {"match.npz", "denoised.mp4", "bench.json"} <= names
    assert {name for name in names if f"`{name}`" not in TEXTS["docs/formats.md"]} == set()


def test_glossary_says_what_is_good():
    entries = dict(re.findall(r"^### (.+?)\n\n(.*?)(?=^##|\Z)", TEXTS["docs/glossary.md"], re.M | re.S))
    wanted = """Recall@1, Captured mass, Output error, Scale, Width, Sweep, Match, Window, Radius, Tail, Clusters, lse,
        Codebook, Head and row, Key mask, Causal order, Error budget, Warm start"""
    assert {" ".join(name.split()) for name in wanted.split(",")} <= set(entries)
    assert all(len(text.split()) >= 8 for text in entries.values())
