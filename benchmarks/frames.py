"""What kept matches save on a film: `python benchmarks/frames.py FILM [--patches]`, any film PyAV reads.

A `scram.nn.Matcher` matches each frame to the next, cold, and with matches kept from the pair before and two sweeps: by
the trained features of GMFlow (`examples/gmflow.py`), or by patch features, whose best keys change with the noise of
every frame. CPU seconds of all threads, recall@1 against brute force on a sample, of 10 pairs; and the recall of both
over 50 pairs, where an error that stayed would add up. Results: results/frames.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local import example
from PIL import Image
from store import Store
from torch import Tensor

import scram
from scram.cli.features import PatchFeatures
from scram.nn import Matcher

PAIRS, TIMED, REPEATS, WIDTH, SAMPLE = 50, 10, 5, 32, 400
SIZES = {"GMFlow": (208, 480), "patches": (68, 160)}  # of the frames; GMFlow's cells are 8 pixels wide


def frames(path: Path, size: tuple[int, int]) -> list[Tensor]:
    """The first frames of a film, [height, width, 3] in 0..1."""
    import av

    made: list[Tensor] = []
    with av.open(str(path)) as film:
        for frame in film.decode(video=0):
            picture = Image.fromarray(frame.to_ndarray(format="rgb24")).resize(size[::-1], Image.Resampling.LANCZOS)
            made.append(torch.from_numpy(np.asarray(picture, np.float32) / 255))
            if len(made) > PAIRS:
                break
    return made


def look(matcher: Matcher, q: Tensor, k: Tensor) -> tuple[float, float]:
    """CPU seconds of the search alone, the least of some, and the recall of the matcher."""
    before, how = matcher.matches, matcher.warm_search if matcher.matches else matcher.search
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        scram.search(q, k, search=how, warm=before)  # type: ignore[arg-type]
        times.append(time.process_time() - begin)
    return min(times), float(scram.measure.recall(q, k, matcher(q, k).matches, num_queries=SAMPLE).mean())


def pairs_of(path: Path, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Features q, k [1, 1, *G, E] of each frame and the next."""
    pictures = frames(path, SIZES[kind])
    if kind == "patches":
        features = PatchFeatures.fit(pictures[0], width=WIDTH)
        yield from pairwise([features(picture) for picture in pictures])
        return
    gm = example()
    model, module = gm.load(gm.wheel(gm.CACHE), gm.CACHE)
    for a, b in pairwise([x.movedim(-1, 0)[None] for x in pictures]):
        coarse0, coarse1, *_ = gm.encode(model, module, a, b, gm.SPLITS)
        yield gm.to_grid(coarse0), gm.to_grid(coarse1)


@torch.no_grad()
def main(path: Path, kind: str) -> None:
    options: dict[str, Any] = {"radius": 2, "scale": None if kind == "GMFlow" else 20.0}
    cold = Matcher(search=scram.Search(seed=0), **options).eval()
    kept = Matcher(search=scram.Search(seed=0), keep_matches=True, **options).eval()
    rows = []
    for q, k in pairs_of(path, kind):
        if not rows:  # compiles
            look(cold, q, k)
            kept(q, k)
            kept(q, k)
            kept.reset()
        rows.append((*look(cold, q, k), *look(kept, q, k)))
    cold_seconds, cold_recall, kept_seconds, kept_recall = (list(column) for column in zip(*rows, strict=True))
    later = slice(1, TIMED)  # the first pair is cold for both
    faster = statistics.median(cold_seconds[later]) / statistics.median(kept_seconds[later])
    row = {
        "grid": list(q.shape[2:4]),
        "width": q.shape[-1],
        "cold_seconds": statistics.median(cold_seconds[later]),
        "kept_seconds": statistics.median(kept_seconds[later]),
        "times_faster": faster,
        "cold_recall": statistics.mean(cold_recall[later]),
        "kept_recall": statistics.mean(kept_recall[later]),
        "cold_recall_by_pair": cold_recall,
        "kept_recall_by_pair": kept_recall,
    }
    print({name: x for name, x in row.items() if not name.endswith("by_pair")})
    print("pair: cold, kept", [(n, round(cold_recall[n], 3), round(kept_recall[n], 3)) for n in range(0, len(rows), 7)])
    Store("frames").put(f"{path.stem}, {kind}", **row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("film", type=Path)
    parser.add_argument("--patches", action="store_true", help="patch features, not GMFlow's")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # of the model
    main(given.film, "patches" if given.patches else "GMFlow")
