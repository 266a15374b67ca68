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
from ..results import Matches

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


def offsets(matches: Matches, rank: int = 0) -> Tensor:
    """How far each query's match of that rank lies away, (down, right) in pixels `[H, W, 2]`, NaN where none.

    Both grids are 2-D; the first row (batch 0, head 0) is taken.
    """
    index = matches.index[0, 0, ..., rank].cpu().long()
    height, width = index.shape
    down = index // matches.key_grid[1] - torch.arange(height, device=index.device)[:, None]
    right = index % matches.key_grid[1] - torch.arange(width, device=index.device)
    field = torch.stack((down, right), -1).float()
    return torch.where(index[..., None] >= 0, field, torch.nan)


def wheel_limit(*fields: Tensor, share: float = 0.65) -> float:
    """A length that `share` of the offsets stay within, for `wheel_colors`; rounded so that a legend reads well."""
    lengths = torch.cat([field.norm(dim=-1).flatten() for field in fields])
    limit = max(float(lengths.nanquantile(share)), 1.0)
    step = 10 ** np.floor(np.log10(limit))
    return float(np.ceil(limit / step) * step)


def wheel_colors(field: Tensor, limit: float) -> Tensor:
    """Offsets `[H, W, 2]` -> colors `[H, W, 3]`: hue is direction, saturation length.

    Offsets longer than `limit` are darker, NaN is gray.
    """
    down, right = field.unbind(-1)
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


def arrows(picture: Tensor, offset: Tensor, confidence: Tensor, limit: float, across: int = 24) -> Tensor:
    """The picture `[H, W, 3]`, faded, with offsets of the surer half up to `limit` as lines, a dot at the end."""
    height, width = offset.shape[:2]
    step = max(width // across, 1)
    # Thin lines need pixels: small pictures are enlarged first.
    zoom = max(1, round(900 / width))
    faded = _bytes(0.45 + 0.55 * picture.mean(-1, keepdim=True).expand(-1, -1, 3))
    image = Image.fromarray(faded).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
    brush = ImageDraw.Draw(image)
    sure = float(confidence.median())
    for row in range(step // 2, height, step):
        for column in range(step // 2, width, step):
            down, right = offset[row, column].tolist()
            if confidence[row, column] < sure or not down * down + right * right <= limit * limit:
                continue
            start = ((column + 0.5) * zoom, (row + 0.5) * zoom)
            end = (start[0] + right * zoom, start[1] + down * zoom)
            for color, thick in (("white", 2 * zoom + 2), ("#0b5394", max(zoom, 2))):
                brush.line((*start, *end), fill=color, width=thick)
            dot = 1.5 * zoom + 1
            brush.ellipse((end[0] - dot, end[1] - dot, end[0] + dot, end[1] + dot), fill="#e69f00", outline="white")
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
        field = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)
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


def sheet(panels: Sequence[Panel], path: Path, title: str, note: str = "", columns: int = 3) -> None:
    """Write the panels on one page, row by row, as a PNG."""
    rows = -(-len(panels) // columns)
    height, width = panels[0].picture.shape[:2]
    size = (5.0 * columns, rows * (5.0 * height / width + 0.5) + 0.4 + 0.3 * bool(note))  # inches
    figure = Figure(size, dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.08), facecolor="white")
    figure.suptitle(title, fontsize=16, fontweight="bold", color=INK)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.imshow(_bytes(panel.picture), interpolation="nearest")
        axes.set_axis_off()
        axes.set_title(panel.title, fontsize=12, loc="left", color=INK, pad=18)
        axes.text(0, 1.015, panel.note, transform=axes.transAxes, fontsize=9, color="#666666", va="bottom")
        if panel.legend:
            panel.legend(axes)
    if note:
        figure.supxlabel(note, fontsize=10, color="#666666")
    with replacing(path) as temporary:
        figure.savefig(temporary)


def _bytes(picture: Tensor) -> NDArray[np.uint8]:
    return (picture.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
