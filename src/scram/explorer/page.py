"""The HTML file: its parts, which lie in the folder `page`, put together with the data of one attention."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.resources import files

from .pack import Json, Packed

SCRIPTS = ("data.js", "attend.js", "colors.js", "pane.js", "numbers.js", "main.js")
FRAME_HEIGHT = 760  # pixels, in a notebook


def written(about: Json, packed: Packed) -> str:
    """One HTML file that needs nothing else."""
    folder = files(__package__) / "page"
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "style.css", *SCRIPTS)}
    about = {**about, "arrays": packed.entries}
    slots = {
        "TITLE": escape(about["title"]),
        "STYLE": parts["style.css"],
        "ABOUT": json.dumps(about, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "DATA": packed.text(),
        "SCRIPT": "\n".join(parts[name] for name in SCRIPTS),
    }
    # In one pass, so that a title may hold what looks like a slot.
    return re.sub("@([A-Z]+)@", lambda match: slots[match[1]], parts["page.html"])


def read_back(page: str) -> tuple[Json, str]:
    """What a page holds: its figures, and its data in base64."""
    about, data = (page.split(f'id="{name}">', 1)[1].split("</script>", 1)[0] for name in ("about", "data"))
    return json.loads(about), data


def framed(page: str) -> str:
    """An element that shows the page inside another one."""
    return (
        f'<iframe title="SCRAM attention explorer" srcdoc="{escape(page)}" width="100%" height="{FRAME_HEIGHT}" '
        'style="border:0"></iframe>'
    )
