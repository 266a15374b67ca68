"""Tables as text: rows with aligned columns, and one line for each batch and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from torch import Tensor

from ..core.statistics import CONFIDENCE, Interval

ROWS_SHOWN = 16  # batches and heads
INTERVAL_WIDTH = 20  # of a column of intervals
POINT_VALUE = (
    f"* a point value, dominated by few queries; the others are with {100 * CONFIDENCE:.0f} % intervals over the "
    "sample of queries, which cover no other seed of search and clusters"
)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row; every column is as wide as its widest cell, two spaces are between.

    >>> aligned([("setting", "ms"), ("dense", "12.5")])
    ['setting  ms', 'dense    12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def of_heads(
    columns: Mapping[str, Interval | Tensor], last: Mapping[str, Sequence[Sequence[str]]] | None = None
) -> list[str]:
    """A line for each batch and head, the first of them where there are many.

    Args:
        columns: intervals, or point values [B, H], by their headings; a * at the end of a heading is explained below.
        last: words for each batch and head, by their heading.
    """
    words = last or {}
    shown = [f"{name:{INTERVAL_WIDTH}}" if isinstance(x, Interval) else name for name, x in columns.items()]
    lines = ["  ".join(["batch head", *shown, *words])]
    first = next(iter(columns.values()))
    batch, heads = (first.value if isinstance(first, Interval) else first).shape
    every = list(product(range(batch), range(heads)))
    for b, h in every[:ROWS_SHOWN]:
        cells = [
            f"{x.cell(b, h):{INTERVAL_WIDTH}}" if isinstance(x, Interval) else f"{float(x[b, h]):{len(name)}.4f}"
            for name, x in columns.items()
        ]
        lines.append("  ".join([f"{b:5} {h:4}", *cells, *(x[b][h] for x in words.values())]))
    if len(every) > ROWS_SHOWN:
        lines.append(f"  ... and {len(every) - ROWS_SHOWN} more")
    return [*lines, POINT_VALUE]


def with_interval(error: Sequence[float]) -> str:
    """A value and its ends.

    >>> with_interval((0.05, 0.04, 0.0625))
    '0.0500 [0.0400, 0.0625]'
    """
    value, low, high = error
    return f"{value:.4f} [{low:.4f}, {high:.4f}]"


def percent(share: float) -> str:
    """A share in percent; what would be rounded to nothing is said to be less than that.

    >>> percent(0.1234), percent(0.0004), percent(0.0)
    ('12.3 %', 'under 0.05 %', '0 %')
    """
    if share <= 0:
        return "0 %"
    return "under 0.05 %" if share < 5e-4 else f"{100 * share:.1f} %"


def in_words(seconds: float) -> str:
    """A time with three digits.

    >>> in_words(0.0123456), in_words(12.3456)
    ('12.3 ms', '12.3 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{float(f'{seconds:.3g}'):g} s"
