"""How far retargeting keeps the shape of what stands out: `python benchmarks/retargeting.py FOLDER`.

FOLDER holds the photographs of Debian's package lomiri-wallpapers-16.04 (usr/share/backgrounds). Settings were chosen
on the first four photographs, by eye; the others were looked at afterwards.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from picture_pages import photograph
from store import Store

from scram.images import retarget
from scram.images.retargeting import shape_error, strips
from scram.images.saliency import saliency

CHOSEN = ("astronaut", "coffee", "rocket", "brick")
REPORTED = ("dogs", "fig", "mountains", "room", "stream", "city")
SIDE = 384
WIDTHS = {"narrower": 273, "wider": 511}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    for name in (*CHOSEN, *REPORTED):
        picture = photograph(name, SIDE, given.folder)
        importance = saliency(picture)
        row: dict[str, dict[str, float]] = {}
        for way, width in WIDTHS.items():
            start = time.process_time()
            retarget(picture, (SIDE, width))
            seconds = time.process_time() - start
            resized = shape_error(importance, torch.ones(1), torch.full((1,), width / SIDE))
            kept = shape_error(importance, *strips(importance, (SIDE, SIDE), (SIDE, width)))
            row[way] = {"retargeted": kept, "resized": resized, "cpu_seconds": seconds}
        print(name, {way: {key: round(value, 3) for key, value in found.items()} for way, found in row.items()})
        Store("retargeting").put(name, chosen=name in CHOSEN, side=SIDE, widths=WIDTHS, shape_error=row)


if __name__ == "__main__":
    main()
