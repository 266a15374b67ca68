"""The file: whole, escaped, without network, readable in both themes."""

import re
from importlib.resources import files

import numpy as np
import pytest

from scram.explorer.pack import Packed, unpacked
from scram.explorer.page import SCRIPTS, framed, read_back, written

FOLDER = files("scram.explorer") / "page"
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")


def page(title="T"):
    packed = Packed()
    packed.add("x", np.array([[1, -2, 3]], np.int16))
    return written({"title": title, "notes": ["</script><b>"]}, packed)


def test_the_page_holds_what_it_was_given():
    about, data = read_back(page("<b>@DATA@ & more"))
    assert (about["title"], about["notes"]) == ("<b>@DATA@ & more", ["</script><b>"])
    assert unpacked(about["arrays"], data)["x"].tolist() == [[1, -2, 3]]
    assert "<title>&lt;b&gt;@DATA@ &amp; more" in page("<b>@DATA@ & more")


def test_nothing_is_loaded():
    text = page()
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|src=|fetch\(|XMLHttp|WebSocket", text)


def test_every_file_of_the_folder_is_in_the_page():
    assert {path.name for path in FOLDER.iterdir()} == {"page.html", "style.css", *SCRIPTS}
    text = page()
    for name in SCRIPTS:
        assert (FOLDER / name).read_text(encoding="utf-8") in text


def test_nothing_moves_by_itself():
    assert not re.search(r"transition|animation|@keyframes|setInterval", page())


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(theme):
    """WCAG AA: 4.5 for text, 3 for the borders of controls and the focus."""
    block = STYLE.split("}")[0 if theme == "light" else 1]
    colors = dict(re.findall(r"--(\w+): (#\w{6})", block))
    assert set(colors) == {"ground", "raised", "ink", "soft", "line", "accent", "routed"}
    needed = {
        "ink ground": 7,
        "ink raised": 7,
        "soft ground": 4.5,
        "soft raised": 4.5,
        "line ground": 3,
        "accent ground": 4.5,
        "routed ground": 4.5,
    }
    for pair, least in needed.items():
        low, high = sorted(luminance(colors[name]) for name in pair.split())
        assert (high + 0.05) / (low + 0.05) >= least, pair


def test_a_frame_holds_the_page_escaped():
    frame = framed('<p class="x">&</p>')
    assert 'srcdoc="&lt;p class=&quot;x&quot;&gt;&amp;&lt;/p&gt;"' in frame
    assert 'title="' in frame
