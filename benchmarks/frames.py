"""What kept matches save on a film: `python benchmarks/frames.py FILM`, any film PyAV reads.

A `scram.nn.Matcher` matches each frame to the next by patch features, cold, and with matches kept from the pair before
and two sweeps. CPU seconds of all threads, recall@1 against brute force on a sample, of 10 pairs; and the recall of
both over 50 pairs, where an error that stayed would add up. Results: results/frames.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from store import Store
from torch import Tensor

import scram
from scram.cli.features import PatchFeatures
from scram.nn import Matcher

PAIRS, TIMED, SIZE, WIDTH, SAMPLE = 50, 10, (68, 160), 32, 400


def frames(path: Path) -> list[Tensor]:
    """The first frames of a film, [height, width, 3] in 0..1."""
    import av

    made: list[Tensor] = []
    with av.open(str(path)) as film:
        for frame in film.decode(video=0):
            picture = Image.fromarray(frame.to_ndarray(format="rgb24")).resize(SIZE[::-1], Image.Resampling.LANCZOS)
            made.append(torch.from_numpy(np.asarray(picture, np.float32) / 255))
            if len(made) > PAIRS:
                break
    return made


def look(matcher: Matcher, q: Tensor, k: Tensor) -> tuple[float, float]:
    """CPU seconds and recall."""
    begin = time.process_time()
    found = matcher(q, k)
    seconds = time.process_time() - begin
    return seconds, float(scram.measure.recall(q, k, found.matches, sample=SAMPLE).mean())


@torch.no_grad()
def main(path: Path) -> None:
    pictures = frames(path)
    features = PatchFeatures.fit(pictures[0], width=WIDTH)
    points = [features(picture) for picture in pictures]
    options = {"radius": 2, "scale": 20.0}
    cold = Matcher(search=scram.Search(seed=0), **options).eval()  # type: ignore[arg-type]
    kept = Matcher(search=scram.Search(seed=0), keep_matches=True, **options).eval()  # type: ignore[arg-type]
    look(cold, points[0], points[1])  # compiles
    kept(points[0], points[1])
    kept(points[0], points[1])
    kept.reset()
    rows = [(*look(cold, q, k), *look(kept, q, k)) for q, k in pairwise(points)]
    cold_seconds, cold_recall, kept_seconds, kept_recall = (list(column) for column in zip(*rows, strict=True))
    later = slice(1, TIMED)  # the first pair is cold for both
    faster = statistics.median(cold_seconds[later]) / statistics.median(kept_seconds[later])
    row = {
        "grid": SIZE, "width": WIDTH, "cold_seconds": statistics.median(cold_seconds[later]),
        "kept_seconds": statistics.median(kept_seconds[later]), "times_faster": faster,
        "cold_recall": statistics.mean(cold_recall[later]), "kept_recall": statistics.mean(kept_recall[later]),
        "cold_recall_by_pair": cold_recall, "kept_recall_by_pair": kept_recall,
    }  # fmt: skip
    print({name: x for name, x in row.items() if not name.endswith("by_pair")})
    print("pair: cold, kept", [(n, round(cold_recall[n], 3), round(kept_recall[n], 3)) for n in range(0, len(rows), 7)])
    Store("frames").put(path.stem, **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("film", type=Path)
    main(parser.parse_args().film)
