"""What a warm start saves on video: `python benchmarks/warm.py VIDEO`, a real camera pan or any other film.

Each frame attends to itself through random projections of its patch features, as a layer of a model would, and to the
first frame. It starts cold, or from the matches of the frame before; both are asked for recall@1. The cost is counted
in scores, so it is the same on every machine. Results: results/warm.json. Needs PyAV (`pip install av`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from counted import counted
from PIL import Image
from store import Store
from torch import Tensor

import scram
from scram.cli.features import PatchFeatures

FRAMES, STEP, SIZE, WIDTH = 6, 1, (72, 128), 32
SWEEPS = (1, 2, 3, 4, 6, 8, 12, 16)


def frames(path: Path) -> list[Tensor]:
    """The first frames of a film, [height, width, 3] in 0..1."""
    import av

    pictures = []
    with av.open(str(path)) as film:
        for n, frame in enumerate(film.decode(video=0)):
            if n % STEP == 0:
                picture = Image.fromarray(frame.to_ndarray(format="rgb24")).resize(SIZE[::-1], Image.Resampling.LANCZOS)
                pictures.append(torch.from_numpy(np.asarray(picture, np.float32) / 255))
            if len(pictures) == FRAMES:
                break
    return pictures


def look(q: Tensor, k: Tensor, sweeps: int, warm: scram.Matches | None) -> tuple[scram.Matches, float, float]:
    """Matches, recall@1 on a sample, and scores computed per query."""
    settings, start = scram.Search(sweeps=sweeps), None if warm is None else warm.index
    found, count = counted(q, k, settings, seed=sweeps, warm=start)
    return found, float(scram.measure.recall(q, k, found, num_queries=1000).mean()), count / found.index.numel()


def main(path: Path) -> None:
    pictures = frames(path)
    features = PatchFeatures.fit(pictures[0], width=WIDTH)
    points = [features(picture) for picture in pictures]
    w_q, w_k = torch.randn(2, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
    kinds = {"self-attention": [(x @ w_q, x @ w_k) for x in points]}
    kinds["matching to the first frame"] = [(x, points[0]) for x in points]
    store = Store("warm")
    print(
        "| attention | sweeps | recall@1 cold | scores cold | recall@1 warm | scores warm |\n|---|---|---|---|---|---|"
    )
    for kind, pairs in kinds.items():
        for sweeps in SWEEPS:
            cold, warm, before = [], [], None
            for q, k in pairs:
                cold.append(look(q, k, sweeps, None)[1:])
                before, *figures = look(q, k, sweeps if before else 8, before)
                warm.append(figures)
            means = [float(np.mean([row[n] for row in rows[1:]])) for rows in (cold, warm) for n in (0, 1)]
            row = dict(zip(("cold_recall", "cold_scores", "warm_recall", "warm_scores"), means, strict=True))
            store.put(f"{kind}, {sweeps} sweeps", **row, frames=len(pictures), grid=SIZE, film=path.name)
            print(f"| {kind} | {sweeps} | " + " | ".join(f"{x:.3f}" if x < 1 else f"{x:.0f}" for x in means) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("film", type=Path)
    main(parser.parse_args().film)
