"""`scram coherence`: how much the search gains where neighboring queries match neighboring keys."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from ..functional import attend, search
from ..quality import measure
from ..settings import Search
from . import charts
from .console import Numbers, Printout, explained, numbers_table, progress
from .provenance import made_with
from .sets import matching, projected

SAMPLE = 500
WIDTH = 16
SCALE = 100.0
GOSSIP = 8


def settings(seed: int) -> dict[str, Search]:
    """The ways to search that are compared."""
    by_query = {
        f"{way}{', gossip' * bool(gossip)}": Search(method="query", propagate=way, gossip=gossip, seed=seed)
        for way in ("shift", "stay", "both")
        for gossip in (0, GOSSIP)
    }
    return {**by_query, "tile": Search(method="tile", seed=seed)}


def shuffle_blocks(x: Tensor, side: int, seed: int) -> Tensor:
    """Cut a grid `[1, 1, S, S, E]` into blocks and shuffle these: nothing coheres beyond `side` points."""
    size = x.shape[2]
    width = x.shape[-1]
    if size % side:
        raise ValueError(f"blocks of {side} do not tile a grid of {size}")
    count = size // side
    blocks = x.reshape(count, side, count, side, width).transpose(1, 2).flatten(0, 1)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed), device="cpu")
    shuffled = blocks[order].reshape(count, count, side, side, width).transpose(1, 2)
    return shuffled.reshape(x.shape).contiguous()


def smooth_field(size: int, length: float, seed: int) -> tuple[Tensor, Tensor]:
    """Unit vectors that change over about `length` points, and the same field moved by (5, -9): keys and queries."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, WIDTH, size, size, generator=generator, dtype=torch.float32, device="cpu")
    if length > 0:
        frequency = torch.fft.fftfreq(size)
        damp = torch.exp(-2 * (torch.pi * length / 2) ** 2 * (frequency[:, None] ** 2 + frequency[None] ** 2))
        noise = torch.fft.ifft2(torch.fft.fft2(noise) * damp).real
    k = F.normalize(noise.movedim(1, -1), dim=-1)[None]
    return k.roll((5, -9), (2, 3)).contiguous(), k.contiguous()


def cases(size: int, seed: int) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Kind of tensors, degree of coherence in points, q, k; from none to whole."""
    sides = [side for side in (1, 2, 4, 8, 16, 32, 64, 128) if size % side == 0 and side < size]
    for kind, (q, k, _) in (("photo pair", matching(size, WIDTH)), ("projected photo", projected(size, WIDTH))):
        q, k = (x[:, :, :, :size].contiguous() for x in (q, k))
        for side in (*sides, size):
            yield kind, side, q, k if side == size else shuffle_blocks(k, side, seed)
    for length in (0, 1, 2, 4, 8, 16):
        yield "synthetic field", length, *smooth_field(size, length, seed)


def measure_case(q: Tensor, k: Tensor, settings: Search, seed: int) -> dict[str, float]:
    """Recall of the best key and error of the output, windows of radius 1."""
    matches = search(q, k, search=settings)
    attended = attend(q, k, k, matches, radius=1, scale=SCALE)
    return {
        "recall": float(measure.recall(q, k, matches, num_queries=SAMPLE, seed=seed)),
        "output_error": float(measure.output_error(q, k, k, attended, scale=SCALE, num_queries=SAMPLE, seed=seed)),
    }


def run(out: Path, size: int, seed: int) -> Printout:
    """Run every search on every case, and draw recall and error against the degree of coherence."""
    rows: list[Numbers] = []
    with progress() as step:
        for kind, degree, q, k in cases(size, seed):
            for name, search_settings in settings(seed).items():
                step(f"{kind}, coherent over {degree} points: {name}")
                rows.append(
                    {"kind": kind, "degree": degree, "search": name, **measure_case(q, k, search_settings, seed)}
                )
        step("drawing")
        draw(rows, out / "coherence.png", size)
    numbers = {**made_with("cpu"), "size": size, "width": WIDTH, "seed": seed, "rows": rows}
    tables = [_table(rows, kind) for kind in dict.fromkeys(row["kind"] for row in rows)]
    return Printout(numbers, tables, f"figure: {out / 'coherence.png'}; numbers: {out / 'coherence.json'}")


def draw(rows: list[Numbers], path: Path, size: int) -> None:
    """Two lines of panels: recall, error; one column for each kind of tensors."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    title = f"What the search gains from spatial coherence ({size} x {size}, 8 sweeps)"
    figure = charts.new_figure(5.6 * len(kinds), 8.6, title)
    labels = {"recall": "recall@1", "output_error": "output error"}
    for place, (quantity, kind) in enumerate(product(labels, kinds), 1):
        shuffled = kind != "synthetic field"
        what = "side of the shuffled blocks of keys, points" if shuffled else "correlation length, points"
        values: dict[str, list[tuple[str, float]]] = {}
        for row in (row for row in rows if row["kind"] == kind):
            degree = "whole" if shuffled and row["degree"] == size else str(row["degree"])
            values.setdefault(row["search"], []).append((degree, row[quantity]))
        axes = figure.add_subplot(2, len(kinds), place)
        charts.lines(axes, values, kind, what, labels[quantity])
        axes.set_ylim(-0.02, 1.02 if quantity == "recall" else None)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path)


def _table(rows: list[Numbers], kind: str) -> Table:
    of_kind = [row for row in rows if row["kind"] == kind]
    degrees = dict.fromkeys(str(row["degree"]) for row in of_kind)
    lines = [
        (name, *(f"{row['recall']:.2f}" for row in of_kind if row["search"] == name))
        for name in dict.fromkeys(row["search"] for row in of_kind)
    ]
    title = f"{kind}: recall@1 by degree of coherence in points"
    return numbers_table(("search", *degrees), lines, title, explained("recall@1"))
