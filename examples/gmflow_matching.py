"""GMFlow's matching steps by SCRAM, one at a time, and coarse to fine: errors, CPU time, memory of each beside dense.

    python examples/gmflow_matching.py             # some minutes on two cores; writes the stored results
    python examples/gmflow_matching.py --small     # the pair at its own size alone; stores nothing

The model and the stereo pair are those of `examples/gmflow.py`. Replaced are the global matching (`scram.nn.Matcher`),
the propagation of the flow (`scram.attention`), and the local correlation of the refinement (`scram.local`). Then the
pair at twice its size, with many windows in the transformer, which is cheap and makes features that repeat: dense, by a
search of its own, and by a start from the matches at the pair's own size. The same on a photograph warped by a
homography, whose flow is known everywhere, mild and strong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import scram
from scram.cli.provenance import made_with
from scram.nn import Matcher
from scram.quality.timing import memory_status, reset_peak

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "gmflow_matching.json"
CHEAP_SPLITS = 4  # windows of the transformer along a side, at twice the size: no larger than at its own
SEED = scram.Search(seed=0)
# From the coarse matches: one sweep, two cells around them.
NEAR = scram.Search(sweeps=1, jumps=(1,), gossip=0, reach=2, seed=0)
FAR = scram.Search(sweeps=8, seed=0)
Row = dict[str, Any]


def load_example() -> Any:
    """examples/gmflow.py under a name that is not the model's."""
    spec = importlib.util.spec_from_file_location("gmflow_example", Path(__file__).parent / "gmflow.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gm = load_example()


def spent(call: Callable[[], Any]) -> tuple[Any, float, int]:
    """What a call returns, its CPU seconds, all threads together, and the most bytes that it held."""
    before = reset_peak("cpu")
    begin = time.process_time()
    out = call()
    seconds = time.process_time() - begin
    return out, seconds, max(0, (memory_status("VmHWM") or 0) - before)


def match(q: Tensor, k: Tensor, warm: scram.Matches | None = None, **how: Any) -> tuple[Tensor, scram.Matches]:
    """The mean places (right, down) [1, 1, h, w, 2] by a `Matcher`, and its matches."""
    found = Matcher(search=SEED, **how)(q, k, warm=warm)
    return found.warp, found.matches


def local_refine(model: Any, module: Any, fine0: Tensor, fine1: Tensor, flow: Tensor) -> Tensor:
    """GMFlow's refinement with `scram.local` in the place of its local correlation."""
    before = module.local_correlation_softmax

    def correlation(a: Tensor, b: Tensor, radius: int) -> tuple[Tensor, None]:
        q, k = gm.to_grid(a), gm.to_grid(b)
        return gm.from_grid(scram.local(q, k, gm.places(k), radius=radius).out - gm.places(q)), None

    module.local_correlation_softmax = correlation
    try:
        refined: Tensor = gm.refine(model, module, fine0, fine1, flow)
    finally:
        module.local_correlation_softmax = before
    return refined


def off_truth(flow: Tensor, truth: Tensor, size: float) -> Row:
    """Of a flow [1, 2, H, W] from the truth [2, H, W] (NaN: unknown): mean, median, share over 3, pixels at size 1."""
    off = (flow[0] - truth).norm(dim=0)
    off = off[off.isfinite()] / size
    return {"epe": float(off.mean()), "median": float(off.median()), "over_3": float((off > 3).float().mean())}


def at_own_size(model: Any, module: Any) -> dict[str, Row]:
    """Each step replaced alone, then all."""
    a, b, right = gm.pair(1.0)
    truth = torch.stack((right, torch.where(right.isfinite(), 0.0, torch.nan)))
    coarse0, coarse1, fine0, fine1 = gm.encode(model, module, a, b, gm.SPLITS)
    q, k, v = gm.match_inputs(coarse0, coarse1)
    Matcher(radius=2, search=SEED)(q[:, :, :20, :20], k[:, :, :20, :20])  # compiles
    scram.local(q, k, v, radius=1)
    rows: dict[str, Row] = {}

    def row(
        name: str, matched: Tensor, step: tuple[Any, ...], propagate: Any = gm.own, refine: Any = gm.refine
    ) -> None:
        flow = gm.from_grid(matched - gm.places(q))
        spread, seconds, held = spent(lambda: propagate(*gm.propagate_inputs(model, coarse0, flow)))
        fine, last, most = spent(lambda: refine(model, module, fine0, fine1, gm.from_grid(spread)))
        rows[name] = {
            **off_truth(fine, truth, 1.0),
            "cells_off_dense": float((matched - dense).norm(dim=-1).mean()),
            "matching_seconds": step[0],
            "matching_bytes": step[1],
            "propagation_seconds": seconds,
            "propagation_bytes": held,
            "refine_seconds": last,
            "refine_bytes": most,
        }

    dense, *cost = spent(lambda: gm.own(q, k, v))
    row("dense", dense, tuple(cost))
    for radius in (1, 2, 3, 4):
        (matched, _), *own = spent(partial(match, q, k, radius=radius))
        row(f"matching, radius {radius}", matched, tuple(own))
    propagate = gm.scram_with(gm.PROPAGATION)
    propagate(*(x[:, :, :40, :40].contiguous() for x in gm.propagate_inputs(model, coarse0, gm.from_grid(dense))))
    row("propagation", dense, tuple(cost), propagate)
    row("local correlation", dense, tuple(cost), gm.own, local_refine)
    row("all three", matched, tuple(own), propagate, local_refine)
    return rows


def matches_of(model: Any, module: Any, a: Tensor, b: Tensor) -> scram.Matches:
    """At the pair's own size, as trained."""
    coarse0, coarse1, *_ = gm.encode(model, module, a, b, gm.SPLITS)
    return match(gm.to_grid(coarse0), gm.to_grid(coarse1))[1]


def at_twice_the_size(
    model: Any, module: Any, a: Tensor, b: Tensor, truth: Tensor, start: scram.Matches, *, refined: bool = False
) -> dict[str, Row]:
    """Dense, a search of its own, and starts from the coarse matches, with few sweeps and with many: the flow of the
    cells, interpolated, before and after propagation, and the final flow where `refined`."""
    coarse0, coarse1, fine0, fine1 = gm.encode(model, module, a, b, CHEAP_SPLITS)
    q, k, v = gm.match_inputs(coarse0, coarse1)
    ways: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: gm.sdpa(q, k, v),
        "search": lambda: match(q, k)[0],
        "coarse start, 1 sweep": lambda: match(q, k, start, warm_search=NEAR)[0],
        "coarse start, 8 sweeps within reach": lambda: match(q, k, start, warm_search=replace(FAR, reach=2))[0],
        "coarse start, 8 free sweeps": lambda: match(q, k, start, warm_search=FAR)[0],
    }
    rows = {}
    for name, way in ways.items():
        matched, seconds, held = spent(way)
        flow = gm.from_grid(matched - gm.places(q))
        spread = gm.from_grid(gm.sdpa(*gm.propagate_inputs(model, coarse0, flow)))
        rough, smooth = (
            gm.CELL * F.interpolate(x, a.shape[2:], mode="bilinear", align_corners=False) for x in (flow, spread)
        )
        rows[name] = {
            **off_truth(rough, truth, 2.0),
            "propagated": off_truth(smooth, truth, 2.0),
            "matching_seconds": seconds,
            "matching_bytes": held,
        }
        if refined:
            rows[name]["refined"] = off_truth(local_refine(model, module, fine0, fine1, spread), truth, 2.0)
    return rows


def homography(source: Any, target: Any) -> Any:
    """The matrix [3, 3] that takes four points (right, down) to four others."""
    lines, wanted = [], []
    for (x, y), (u, w) in zip(source, target, strict=True):
        lines += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -w * x, -w * y]]
        wanted += [u, w]
    return np.append(np.linalg.solve(np.array(lines), np.array(wanted)), 1).reshape(3, 3)


def warped(size: float, strong: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A photograph [1, 3, H, W], the same seen through a homography, and the flow [2, H, W]; NaN off the picture."""
    from skimage.data import coffee
    from skimage.transform import ProjectiveTransform, resize, warp

    shape = int(gm.HEIGHT * size), int(gm.WIDTH * size)
    photo = resize(coffee(), shape, anti_aliasing=True)
    height, width = shape
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], float)
    moved = [[0.04, 0.05], [0.97, 0.02], [1.0, 0.96], [0.02, 1.0]]
    if strong:  # turned by a third of a right angle, and half as large
        moved = [[0.42, 0.05], [0.85, 0.45], [0.58, 0.98], [0.12, 0.55]]
    there = ProjectiveTransform(matrix=homography(corners, np.array(moved) * (width, height)))
    second = warp(photo, there.inverse, output_shape=shape, order=3)
    right, down = np.meshgrid(np.arange(width), np.arange(height))
    place = np.stack((right, down), -1).reshape(-1, 2).astype(float)
    flow = (there(place) - place).reshape(height, width, 2)
    inside = ((there(place) >= 0) & (there(place) < (width, height))).all(-1).reshape(height, width, 1)
    a, b = (torch.from_numpy(x).float().movedim(-1, 0)[None].clamp(0, 1) for x in (photo, second))
    return a, b, torch.from_numpy(np.where(inside, flow, np.nan)).float().movedim(-1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the pair at its own size alone; stores nothing")
    parser.add_argument("--coarse", action="store_true", help="the coarse starts alone")
    parser.add_argument("--cache", type=Path, default=gm.CACHE, help="folder for the wheel (default: %(default)s)")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # of the model
    stored: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with torch.no_grad():
        model, module = gm.load(gm.wheel(given.cache), given.cache)

        def keep(group: str, rows: dict[str, Row]) -> None:
            for name, row in rows.items():
                print(f"{group}, {name}: {json.dumps(row)}", flush=True)
                stored[f"{group}, {name}"] = {**row, **made_with("cpu")}
            if not given.small:
                RESULTS.write_text(json.dumps(stored, indent=1) + "\n")

        if not given.coarse:
            keep("own size", at_own_size(model, module))
        if given.small:
            return
        a, b, right = gm.pair(2.0)
        truth = torch.stack((right, torch.where(right.isfinite(), 0.0, torch.nan)))
        start = matches_of(model, module, *gm.pair(1.0)[:2])
        keep("twice the size", at_twice_the_size(model, module, a, b, truth, start, refined=True))
        for strong in (False, True):
            small, large = warped(1.0, strong), warped(2.0, strong)
            start = matches_of(model, module, *small[:2])
            name = f"homography, {'strong' if strong else 'mild'}"
            keep(name, at_twice_the_size(model, module, *large, start))


if __name__ == "__main__":
    main()
