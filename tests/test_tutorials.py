"""The tutorials run from top to bottom and print what their pages show."""

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("skimage")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "docs" / "_site"))
    tutorials = importlib.import_module("tutorials")

TEXTS = {name: page.read_text(encoding="utf-8") for name, page in tutorials.pages().items()}


def test_every_page_shows_outputs():
    assert set(TEXTS) == {
        "replace_attention",
        "match_pictures",
        "video",
        "how_good",
        "train",
        "many_machines",
        "causal",
    }
    assert all(text.count("```text") >= 2 for text in TEXTS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_pages_show_what_their_code_prints(name, tmp_path):
    with torch.random.fork_rng():
        made = tutorials.run(TEXTS[name], tmp_path)
    assert tutorials.same(TEXTS[name], made), made


def test_pictures_of_pages_are_stored():
    assert {path.name for path in tutorials.PICTURES.iterdir()} == {"match.jpg"}
    assert "(../images/tutorials/match.jpg)" in TEXTS["match_pictures"]


@pytest.mark.parametrize(
    ("one", "other", "answer"),
    [
        ("recall 0.9", "recall 0.8", True),
        ("recall 0.9", "recall 0.6", False),
        ("28.0 GiB", "29.0 GiB", True),
        ("2 of 2", "1 of 2", False),
        ("kept: True", "kept: False", False),
        ("3 lines", "", False),
    ],
)
def test_outputs_are_the_same_but_for_rounding(one, other, answer):
    assert tutorials.same(one, other) is answer


def test_outputs_are_replaced_and_added(tmp_path):
    page = "```python\nprint(1)\n```\n\n```text\nold\n```\n\nand\n\n```python\nx = 2\n```\n\n```python\nprint(x)\n```\n"
    made = tutorials.run(page, tmp_path)
    assert "old" not in made
    assert made.count("```text\n1\n```") == made.count("```text\n2\n```") == 1
    assert tutorials.run(made, tmp_path) == made
