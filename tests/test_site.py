"""The documentation site builds offline without a warning, its links lead somewhere, and it answers a stranger."""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import scram
from support.processes import run_program

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
QUESTIONS = (
    "How do I install it?",
    "What does it do to my model?",
    "How wrong is it?",
    "How fast is it?",
    "How do I choose settings?",
    "What is causal?",
    "Why did it go dense?",
    "How do I cite it?",
)


class Page(HTMLParser):
    """What a page links to, fetches and names; its headings with the words that follow each."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched, self.ids, self.sections = [], [], set(), {}
        self.heading = self.place = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given["id"]} if given.get("id") else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.fetched.append(given["src"])
        if tag == "link" and given.get("rel") != "canonical":
            self.fetched.append(given["href"])
        if tag in ("h1", "h2", "h3"):
            self.heading, self.place = "", given.get("id")

    def handle_endtag(self, tag):
        if tag in ("h1", "h2", "h3") and self.heading is not None:
            self.sections[self.heading.replace("¶", "").strip()] = [self.place, ""]
            self.last, self.heading = self.heading.replace("¶", "").strip(), None

    def handle_data(self, data):
        if self.heading is not None:
            self.heading += data
        elif self.sections:
            self.sections[self.last][1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Every page of a strict build, by its path."""
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    places = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": places}
    done = run_program(*command, cwd=ROOT, environment=environment, timeout=250)
    assert "WARNING" not in done.stderr  # not --quiet, which hides warnings from --strict
    return folder, {path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}


def inside(folder, path, link):
    """The page and the anchor that a link leads to; None for one that leaves the site, or holds what it names."""
    if re.match(r"(https?|mailto|data|javascript):", link):
        return None
    target, anchor = urldefrag(link)
    return (path.parent / unquote(target)).resolve() if target else path, unquote(anchor)


def test_every_page_of_docs_is_a_page_of_the_site(site):
    folder, pages = site
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    outside = {"changelog.html", "contributing.html", "security.html", "404.html"}
    assert {p.relative_to(folder).as_posix() for p in pages} >= {p.as_posix() for p in sources} | outside


def test_links_and_anchors_lead_somewhere(site):
    folder, pages = site
    seen = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            found = inside(folder, path, link)
            if found is not None:
                target, anchor = found
                assert target.exists(), (path.name, link)
                assert not anchor or anchor in pages[target].ids or anchor == "__skip", (path.name, link)
                seen += 1
    assert seen > 1000


def test_nothing_is_fetched_from_elsewhere(site):
    folder, pages = site
    for path, page in pages.items():
        for link in page.fetched:
            if path.name != "404.html" and not link.startswith("data:"):
                found = inside(folder, path, link)
                assert found is not None, (path.name, link)
                assert found[0].exists(), (path.name, link)
    for style in folder.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", style.read_text(encoding="utf-8")), style


def test_a_stranger_finds_each_answer_within_two_clicks(site):
    folder, pages = site
    start = folder / "index.html"
    reached, nearest = {start: 0}, [start]
    for clicks in (1, 2):
        targets = [found[0] for path in nearest for link in pages[path].links if (found := inside(folder, path, link))]
        nearest = [path for path in dict.fromkeys(targets) if path in pages and path not in reached]
        reached |= dict.fromkeys(nearest, clicks)
    answers = {heading: text for path in reached for heading, (_, text) in pages[path].sections.items()}
    for question in QUESTIONS:
        assert len(answers[question].split()) >= 10, question
    linked = {urldefrag(link)[1] for link in pages[start].links}
    places = {pages[folder / "faq.html"].sections[question][0] for question in QUESTIONS}
    assert places <= linked  # one click from the start page


def test_the_reference_holds_every_public_name(site):
    pages = site[1]
    ids = set().union(*(page.ids for path, page in pages.items() if path.parent.name == "api"))
    names = {name.rsplit(".", 1)[-1] for name in ids}
    assert set(scram.__all__) <= names


def test_words_of_the_glossary_are_links_where_they_first_stand(site):
    folder, pages = site
    how = (folder / "how.html").read_text(encoding="utf-8")
    assert how.count('class="term" href="glossary.html#sweep"') == 1
    assert 'class="term" href="glossary.html#match"' in how
    assert 'class="term"' not in (folder / "glossary.html").read_text(encoding="utf-8")
    many = sum('class="term"' in path.read_text(encoding="utf-8") for path in pages)
    assert many > 30


def test_cells_of_wide_tables_name_their_column(site):
    """On a phone they are cards; a cell that is empty because the one above holds says what that is."""
    text = (site[0] / "results.html").read_text(encoding="utf-8")
    assert "<table data-wide>" in text
    assert '<td data-label="times faster">' in text
    assert '<td data-label="machine" data-above="H200, cuDNN attention"></td>' in text


def test_docstrings_become_markdown(site):
    folder, _ = site
    text = (folder / "api" / "attention.html").read_text(encoding="utf-8")
    assert "<blockquote>" not in text  # a doctest that stands in no fence
    assert "_shard" not in text
    assert "<code>[B, H, *G, E]</code>" in text
