"""Fields and tensors -> pictures: match fields as color wheels, error maps, sheets with titles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from ..images.files import replacing
from ..images.reading import Picture, write
from ..results import MatchedPoints, Matches

INK = "#222222"


def save(picture: Tensor, path: Path) -> None:
    """Write a picture `[H, W, 3]` with values 0..1 (others are cut)."""
    write(Picture(picture), path)


def save_each(panels: Mapping[str, "Panel"], folder: Path) -> None:
    """Write the picture of every panel under its name."""
    for name, panel in panels.items():
        save(panel.picture, folder / f"{name}.png")


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, of values cut to 0..1."""
    return -10 * log10(max(float((a.clamp(0, 1) - b.clamp(0, 1)).square().mean()), 1e-12))


def grid_of(picture: Tensor) -> str:
    """The size of a picture `[H, W, ...]` in words: "288 x 512"."""
    return " x ".join(map(str, picture.shape[:2]))


def flow_of(matches: Matches, rank: int = 0) -> Tensor:
    """How far each query's match of that rank lies away, (right, down) in pixels `[H, W, 2]`, NaN where none.

    Both grids are 2-D; the first row (batch 0, head 0) is taken.
    """
    index = matches.index[0, 0, ..., rank].cpu().long()
    height, width = index.shape
    down = index // matches.key_grid[1] - torch.arange(height, device=index.device)[:, None]
    right = index % matches.key_grid[1] - torch.arange(width, device=index.device)
    field = torch.stack((right, down), -1).float()
    return torch.where(index[..., None] >= 0, field, torch.nan)


def wheel_limit(*fields: Tensor, share: float = 0.65) -> float:
    """A length that `share` of the flow stays within, for `wheel_colors`; rounded so that a legend reads well."""
    lengths = torch.cat([field.norm(dim=-1).flatten() for field in fields])
    limit = max(float(lengths.nanquantile(share)), 1.0)
    step = 10 ** np.floor(np.log10(limit))
    return float(np.ceil(limit / step) * step)


def wheel_colors(field: Tensor, limit: float) -> Tensor:
    """A flow `[H, W, 2]`, (right, down) -> colors `[H, W, 3]`: hue is direction, saturation length.

    What is longer than `limit` are darker, NaN is gray.
    """
    right, down = field.unbind(-1)
    length = field.norm(dim=-1) / limit
    hue = torch.atan2(-down, right) / (2 * torch.pi) % 1
    value = torch.where(length > 1, torch.full_like(length, 0.55), 0.97)
    colors = torch.stack((hue, length.clamp(max=1), value), -1)
    rgb = torch.from_numpy(hsv_to_rgb(colors.nan_to_num(0).double().numpy())).float()
    return torch.where(length.isnan()[..., None], 0.5, rgb)


def shades(values: Tensor, colormap: str = "magma") -> Tensor:
    """Values 0..1 `[H, W]` -> a color map of matplotlib `[H, W, 3]`, NaN gray."""
    shown = torch.from_numpy(colormaps[colormap](values.nan_to_num(0).clamp(0, 1).cpu().numpy())[..., :3]).float()
    return torch.where(values.isnan().cpu()[..., None], 0.5, shown)


def lines(a: Tensor, b: Tensor, points: MatchedPoints, gap: int = 16) -> Tensor:
    """Pictures `[H, W, 3]` and `[H', W', 3]` side by side, a line from every point (x, y) of A to its match in B.

    Hue goes by the place in A, so that crossing lines can be told apart; B is scaled to A's height.
    """
    zoom = max(1.0, 700 / a.shape[1])  # thin lines need pixels
    height = round(zoom * a.shape[0])
    views = [Image.fromarray(_bytes(0.75 * picture)) for picture in (a, b)]
    views = [view.resize((max(1, round(height * view.width / view.height)), height)) for view in views]
    left, right = views
    image = Image.new("RGB", (left.width + gap + right.width, height), "white")
    image.paste(left, (0, 0))
    image.paste(right, (left.width + gap, 0))
    brush = ImageDraw.Draw(image)
    ratio_b = (right.width / b.shape[1], right.height / b.shape[0])
    ratio_a = (left.width / a.shape[1], left.height / a.shape[0])
    thick = max(2, round(height / 320))
    dot = 1.5 * thick
    for (x, y), (u, v) in zip(points.a.tolist(), points.b.tolist(), strict=True):
        start = ((x + 0.5) * ratio_a[0], (y + 0.5) * ratio_a[1])
        end = (left.width + gap + (u + 0.5) * ratio_b[0], (v + 0.5) * ratio_b[1])
        color = tuple(round(255 * part) for part in hsv_to_rgb((0.85 * y / a.shape[0], 0.75, 1.0)))
        brush.line((*start, *end), fill=color, width=thick)
        for at_x, at_y in (start, end):
            brush.ellipse((at_x - dot, at_y - dot, at_x + dot, at_y + dot), fill=color, outline="black")
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)


@dataclass(frozen=True)
class Panel:
    """One picture `[H, W, 3]` of a sheet, with its title, a line of explanation and something to draw over it."""

    title: str
    picture: Tensor
    note: str = ""
    legend: Callable[[Axes], None] | None = None


def wheel_legend(limit: float) -> Callable[[Axes], None]:
    """Draw a color wheel of that limit into the corner of a panel."""

    def draw(axes: Axes) -> None:
        line = torch.linspace(-1.2, 1.2, 241, dtype=torch.float32, device="cpu") * limit
        field = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
        alpha = (field.norm(dim=-1) <= 1.2 * limit).float()
        inset = axes.inset_axes((0.0, 0.0, 0.24, 0.42), zorder=3)
        inset.imshow(torch.cat((wheel_colors(field, limit), alpha[..., None]), -1).numpy())
        inset.set_axis_off()
        arrow = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        inset.annotate("", (220, 120), (120, 120), arrowprops=arrow)
        inset.text(170, 112, f"{limit:g} px", ha="center", va="bottom", fontsize=7, color=INK)

    return draw


def bar_legend(limit: float, label: str, colormap: str = "magma", low: float = 0.0) -> Callable[[Axes], None]:
    """Draw the scale of `shades`, from low to limit, into the corner of a panel."""

    def draw(axes: Axes) -> None:
        backing = axes.inset_axes((0.01, 0.02, 0.38, 0.3), zorder=2, facecolor=INK)
        backing.set(xticks=[], yticks=[])
        inset = axes.inset_axes((0.05, 0.05, 0.3, 0.05), zorder=3)
        line = torch.linspace(0, 1, 128, dtype=torch.float32, device="cpu")
        bar = shades(line[None], colormap).numpy()
        inset.imshow(bar, aspect="auto", extent=(low, limit, 0, 1))
        inset.set(xticks=[low, limit], xticklabels=[f"{low:.2g}", f"{limit:g}"], yticks=[], title=label)
        inset.xaxis.tick_top()
        for text in (*inset.get_xticklabels(), inset.title):
            text.set(color="white", fontsize=8)

    return draw


def sheet(
    panels: Sequence[Panel], path: Path, title: str, note: str = "", columns: int = 3, first: Panel | None = None
) -> None:
    """Write the panels on one page, row by row, as a PNG; `first` stands above them, as wide as the page."""
    rows = -(-len(panels) // columns)
    heights = [5.0 * panels[0].picture.shape[0] / panels[0].picture.shape[1] + 0.5] * rows  # inches
    if first is not None:
        heights.insert(0, 5.0 * columns * first.picture.shape[0] / first.picture.shape[1] + 0.5)
    size = (5.0 * columns, sum(heights) + 0.4 + 0.3 * bool(note))
    figure = Figure(size, dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.08), facecolor="white")
    figure.suptitle(title, fontsize=16, fontweight="bold", color=INK)
    cells = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    if first is not None:
        _show(figure.add_subplot(cells[0, :]), first)
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        _show(figure.add_subplot(cells[row + len(heights) - rows, column]), panel)
    if note:
        figure.supxlabel(note, fontsize=10, color="#666666")
    with replacing(path) as temporary:
        figure.savefig(temporary)


def _show(axes: Axes, panel: Panel) -> None:
    axes.imshow(_bytes(panel.picture), interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(panel.title, fontsize=12, loc="left", color=INK, pad=18)
    axes.text(0, 1.015, panel.note, transform=axes.transAxes, fontsize=9, color="#666666", va="bottom")
    if panel.legend:
        panel.legend(axes)


def _bytes(picture: Tensor) -> NDArray[np.uint8]:
    return (picture.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
