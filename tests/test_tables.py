"""The tables of README and docs are those of the stored results, and every stored result says what it was made with."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("tables", Path(__file__).parent.parent / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_pages_show_the_stored_results(page):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, f"{page.name} is out of date: make tables"


def test_every_table_has_its_place():
    text = "".join(page.read_text(encoding="utf-8") for page in tables.pages())
    assert sorted(re.findall(r"<!-- table: ([\w-]+) -->", text)) == sorted(tables.TABLES)
    assert len(tables.MARKS.findall(text)) == len(tables.TABLES)


def test_a_stale_figure_is_seen():
    text = (tables.ROOT / "docs" / "denoise.md").read_text(encoding="utf-8")
    assert tables.filled(text.replace("| 29.34 |", "| 30.34 |")) == tables.filled(text)


def stamped(value):
    """Every dict that holds a machine, at any depth."""
    if isinstance(value, dict):
        if "machine" in value:
            yield value
        for one in value.values():
            yield from stamped(one)


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_say_what_they_were_made_with(path):
    found = list(stamped(json.loads(path.read_text(encoding="utf-8"))))
    assert found
    assert all(row["commit"] and (row["machine"].get("cpu") or row["machine"].get("gpu")) for row in found)
