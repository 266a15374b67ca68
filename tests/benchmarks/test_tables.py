"""The tables of README and docs are those of the stored results, and every stored result says what it was made with."""

import functools
import importlib
import json
import re
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    tables = importlib.import_module("tables")

TEXTS = {page: page.read_text(encoding="utf-8") for page in tables.pages()}
PLACES = [(found[0], page, found[2]) for page, text in TEXTS.items() for found in tables.MARKS.findall(text)]
SHOWN = {name: (page, shown) for name, page, shown in PLACES}
TWICE = ("results-short", "sam2-short")  # in README and on the start page
STORED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tables.table_cells.RESULTS.glob("*.json")}
MADE = {name: functools.cache(make) for name, make in tables.TABLES.items()}
FIGURE = re.compile(r"\d*\.\d+|\d+(?=%| m?s\b)")  # a measured one: not a size, a width or a count in a label


def test_every_table_stands_in_one_page():
    marks = re.findall(r"<!-- table: ([\w-]+) -->", "".join(TEXTS.values()))
    assert sorted(marks) == sorted([*tables.TABLES, *TWICE]) == sorted(name for name, *_ in PLACES)


@pytest.mark.parametrize(
    ("name", "page", "shown"), [pytest.param(*one, id=f"{one[0]}-{one[1].name}") for one in PLACES]
)
def test_pages_show_the_stored_results(name, page, shown):
    assert shown == tables.TABLES[name](), f"{page.name} is out of date: make tables"


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_changed_figure_of_a_page_is_seen(name, monkeypatch):
    """Every figure of the table, one at a time; the stored results stay, so each table is made once."""
    monkeypatch.setattr(tables.table_cells, "load", lambda file: STORED.get(file, {}))
    monkeypatch.setattr(tables, "TABLES", MADE)
    page, shown = SHOWN[name]
    if shown == tables.table_cells.NOT_MEASURED:
        pytest.skip("no results are stored yet")
    figures = list(FIGURE.finditer(shown))
    assert len(figures) >= 4
    for figure in figures:
        digit = str((int(figure[0][-1]) + 1) % 10)
        changed = shown[: figure.end() - 1] + digit + shown[figure.end() :]
        text = TEXTS[page].replace(shown, changed)
        assert text != TEXTS[page]
        assert tables.filled(text) == TEXTS[page]


def leaves(value, path=()):
    """Every number and list of numbers of a stored result, as the keys that lead to it; not those of the machine.

    A table may show the least or the middle of a list, which one of its numbers alone need not change.
    """
    if isinstance(value, dict):
        for key, one in value.items():
            if key != "machine":
                yield from leaves(one, (*path, key))
    elif isinstance(value, list) and not all(isinstance(one, float) for one in value):
        for at, one in enumerate(value):
            yield from leaves(one, (*path, at))
    elif isinstance(value, (float, list)) and value != []:
        yield path


def other(value):
    return [other(one) for one in value] if isinstance(value, list) else 1.5 * value + 0.011


class Watched(dict):
    """A stored result that notes which of its values are looked at, as the keys that lead to them."""

    def __init__(self, value, seen, path=()):
        self.seen, self.path = seen, path
        super().__init__({key: watched(one, seen, (*path, key)) for key, one in value.items()})

    def __getitem__(self, key):
        self.seen.add((*self.path, key))
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.seen.add((*self.path, key))
        return super().get(key, default)

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


def watched(value, seen, path):
    if isinstance(value, dict):
        return Watched(value, seen, path)
    return [watched(one, seen, (*path, at)) for at, one in enumerate(value)] if isinstance(value, list) else value


def looked_at(path, seen):
    """A list is looked at as a whole."""
    while isinstance(path[-1], int):
        path = path[:-1]
    return path in seen


def cells(table):
    return [line.strip("|").split("|") for line in table.splitlines()]


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_changed_result_is_seen(name, monkeypatch):
    """Each number that the table looks at is changed alone; every measured cell follows one of them.

    So none is written by hand. What the table does not look at cannot change it.
    """
    seen = {}

    def load(file):
        seen.setdefault(file, set())
        return Watched(STORED[file], seen[file]) if file in STORED else {}

    shown = cells(tables.TABLES[name]())
    monkeypatch.setattr(tables.table_cells, "load", load)
    assert cells(tables.TABLES[name]()) == shown
    follows = set()
    for file in seen.keys() & STORED.keys():
        changed = json.loads(json.dumps(STORED[file]))
        now = {**STORED, file: changed}
        monkeypatch.setattr(tables.table_cells, "load", lambda file, now=now: now.get(file, {}))
        for *path, last in (path for path in leaves(changed) if looked_at(path, seen[file])):
            row = changed
            for key in path:
                row = row[key]
            was, row[last] = row[last], other(row[last])
            after = cells(tables.TABLES[name]())
            row[last] = was
            follows |= {(i, j) for i, line in enumerate(shown) for j, cell in enumerate(line) if after[i][j] != cell}
    measured = {(i, j) for i, line in enumerate(shown) for j, cell in enumerate(line) if FIGURE.search(cell)}
    versions = {(i, j) for i, j in measured if re.fullmatch(r" \d+\.\d+\.\d+ ", shown[i][j])}
    assert measured - versions <= follows


def test_the_command_finds_and_mends_a_stale_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    page, shown = SHOWN["denoise"]
    stale = tmp_path / "docs" / page.name
    stale.write_text(TEXTS[page].replace(shown, FIGURE.sub("99.9", shown, count=1)), encoding="utf-8")
    (tmp_path / "README.md").write_text(TEXTS[tables.table_cells.RESULTS.parent.parent / "README.md"], encoding="utf-8")
    for argv, code, said in ((["--check"], 1, "out of date"), ([], 0, "written"), (["--check"], 0, "none")):
        monkeypatch.setattr("sys.argv", ["tables.py", *argv])
        assert tables.main() == code
        assert said in capsys.readouterr().out
    assert stale.read_text(encoding="utf-8") == TEXTS[page]


def stamped(value):
    """Every dict that holds a machine, at any depth."""
    if isinstance(value, dict):
        if "machine" in value:
            yield value
        for one in value.values():
            yield from stamped(one)


@pytest.mark.parametrize("file", sorted(STORED))
def test_results_say_what_they_were_made_with(file):
    found = list(stamped(STORED[file]))
    assert found
    assert all(row["commit"] and (row["machine"].get("cpu") or row["machine"].get("gpu")) for row in found)
