"""Tables as text: what trust, judgments, plans and surveys print."""

import torch

from scram.core.statistics import Interval
from scram.quality.tables import ROWS_SHOWN, aligned, of_heads


def test_columns_are_aligned_and_nothing_trails():
    assert aligned([("a", "long", ""), ("bcd", "x", "note"), ("", "", "")]) == ["a    long", "bcd  x     note", ""]


def test_a_line_for_each_batch_and_head():
    value = torch.arange(6.0).reshape(2, 3) / 10
    columns = {"error": Interval(value, value / 2, value * 2), "output error*": value}
    lines = of_heads(columns, {"verdict": [["a", "b", "c"], ["d", "e", "f"]]})
    assert lines[0] == "batch head  error                 output error*  verdict"
    assert lines[5] == "    1    1  0.400 [0.200, 0.800]         0.4000  e"
    assert len({line.index("[") for line in lines[1:7]}) == 1
    assert lines[-1].startswith("* a point value")
    assert "no other seed" in lines[-1]
    assert len(lines) == 8


def test_of_many_heads_the_first_are_shown():
    value = torch.zeros(3, 10)
    lines = of_heads({"output error*": value})
    assert len(lines) == 1 + ROWS_SHOWN + 2
    assert lines[-2] == "  ... and 14 more"
    assert lines[ROWS_SHOWN].startswith("    1    5")
