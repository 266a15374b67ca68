"""Draws the pictures of docs/inpaint, docs/retarget and docs/generate, 1000 pixels wide, to be read on a phone too.

    python benchmarks/picture_pages.py FOLDER retarget generate inpaint

FOLDER holds the photographs of Debian's package lomiri-wallpapers-16.04 (usr/share/backgrounds). Nothing is selected
among seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from inpaint import Bytes
from inpaint import photograph as of_scikit_image
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from scram.images import generate, inpaint, retarget
from scram.images.doubts import doubts
from scram.images.pyramid import resize
from scram.images.synthesis import Settings

PAGE = 1000  # pixels across
GAP = 8
FONT = 30  # half of it on a phone
INK = "#222222"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
DEBIAN = {
    "dogs": "friends_by_Aitzol_Berasategi",
    "mountains": "aitzgorri_by_Aitzol_Berasategi",
    "fig": "Picture_0B_by_freespace",
    "room": "Wine_by_Jakkub_Mede",
    "stream": "life_by_Aitzol_Berasategi",
}
CITY = Path(__file__).parents[1] / "src/scram/cli/data/city_a.jpg"


def photograph(name: str, side: int, folder: Path) -> Tensor:
    """The square in the middle of a photograph [side, side, C] in 0..1."""
    if name in DEBIAN or name == "city":
        image = Image.open(CITY if name == "city" else folder / f"{DEBIAN[name]}.jpg").convert("RGB")
        short = min(image.size)
        left, top = (image.width - short) // 2, (image.height - short) // 2
        image = image.crop((left, top, left + short, top + short)).resize((side, side), Image.Resampling.LANCZOS)
        array: Bytes = np.asarray(image)
    else:
        array = of_scikit_image(name, side)
    return torch.from_numpy(array.astype(np.float32) / 255)


Panel = tuple[str, Tensor]  # what stands above, and a picture [H, W, C]


def sheet(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Rows of pictures, each as high as its row allows across the whole page, with words above."""
    font = ImageFont.load_default(size=FONT)
    drawn = []
    for row in rows:
        across = sum(picture.shape[1] / picture.shape[0] for _, picture in row)
        height = min(round((PAGE - GAP * (len(row) - 1)) / across), 480)
        words = FONT + GAP + 4 if any(title for title, _ in row) else 0
        strip = Image.new("RGB", (PAGE, height + words + GAP), "white")
        left = 0.0
        for title, picture in row:
            width = height * picture.shape[1] / picture.shape[0]
            array = (picture.clamp(0, 1) * 255).round().byte().expand(-1, -1, 3).numpy()
            shown = Image.fromarray(array).resize((round(width), height), Image.Resampling.LANCZOS)
            strip.paste(shown, (round(left), words))
            ImageDraw.Draw(strip).text((round(left), 0), title, fill=INK, font=font)
            left += width + GAP
        drawn.append(strip)
    page = Image.new("RGB", (PAGE, sum(strip.height for strip in drawn)), "white")
    top = 0
    for strip in drawn:
        page.paste(strip, (0, top))
        top += strip.height
    page.save(path, quality=82)


def retarget_page(folder: Path) -> None:
    """Narrower: the source, resized, retargeted; and wider."""
    rows: list[list[Panel]] = []
    for name in ("coffee", "rocket", "dogs", "fig", "astronaut"):
        source = photograph(name, 384, folder)
        size = (384, 273)
        titles = ("source", "resized", "retargeted") if not rows else ("", "", "")
        rows.append(list(zip(titles, (source, resize(source, size), retarget(source, size)), strict=True)))
    for name in ("coffee", "dogs"):
        source = photograph(name, 384, folder)
        size = (384, 511)
        titles = ("resized", "retargeted") if name == "coffee" else ("", "")
        rows.append(list(zip(titles, (resize(source, size), retarget(source, size)), strict=True)))
    sheet(rows, IMAGES / "retarget.jpg")


def generate_page(folder: Path) -> None:
    """Textures, two seeds each; and a scene that is refused."""
    rows: list[list[Panel]] = []
    for name, variety in (("gravel", 0.3), ("brick", 0.3), ("immunohistochemistry", 0.3), ("grass", 0.3)):
        source = photograph(name, 256, folder)
        made = [generate(source, None, Settings(iterations=5, seed=seed), variety=variety) for seed in (0, 1)]
        titles = ("source", "seed 0", "seed 1") if not rows else ("", "", "")
        rows.append(list(zip(titles, (source, *made), strict=True)))
    source = photograph("coffee", 256, folder)
    collages = [generate(source, None, Settings(iterations=5, seed=seed), variety=0.2, scenes=True) for seed in (0, 2)]
    rows.append(
        list(zip(("a scene: refused", "--scenes, seed 0", "--scenes, seed 2"), (source, *collages), strict=True))
    )
    sheet(rows, IMAGES / "generate.jpg")


SIDE = 256
# Holes, left, top, width and height in 384ths of the side, chosen before any was filled; the last as a likely failure.
HOLES = {
    "brick": (120, 150, 110, 110),
    "chelsea": (38, 94, 64, 64),
    "coffee": (290, 210, 70, 70),
    "rocket": (170, 190, 56, 70),
    "gravel": (140, 140, 100, 100),
    "coins": (150, 120, 90, 90),
    "city": (150, 110, 80, 80),
    "dogs": (262, 150, 80, 80),
    "fig": (130, 60, 72, 72),
    "mountains": (120, 30, 80, 80),
    "room": (190, 80, 64, 64),
    "astronaut": (105, 85, 60, 55),
}
MARK = torch.tensor([1.0, 0.0, 1.0])


def inpaint_page(folder: Path) -> None:
    """The hole and the result, two photographs a row, what is around the hole alone."""
    panels: list[Panel] = []
    for name, box in HOLES.items():
        left, top, width, height = (round(extent * SIDE / 384) for extent in box)
        picture = photograph(name, SIDE, folder)
        hole = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        hole[top : top + height, left : left + width] = True
        filled = inpaint(torch.where(hole[..., None], 0, picture), hole)
        around = 2 * max(width, height)
        middles = (top + height // 2, left + width // 2)
        first = [min(max(middle - around // 2, 0), SIDE - around) for middle in middles]
        part = tuple(slice(x, x + around) for x in first)
        told = "doubtful: it warns" if doubts(filled, hole) else ""
        panels += [(name, torch.where(hole[..., None], MARK, picture)[part]), (told, filled[part])]
    sheet([panels[n : n + 4] for n in range(0, len(panels), 4)], IMAGES / "inpaint.jpg")


PAGES: dict[str, Callable[[Path], None]] = {
    "retarget": retarget_page,
    "generate": generate_page,
    "inpaint": inpaint_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", default=list(PAGES))
    given = parser.parse_args()
    for page in given.pages:
        PAGES[page](given.folder)


if __name__ == "__main__":
    main()
