"""Picture files to tensors and back: one form for every kind, depth and transparency kept, no half-written file."""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .files import replacing

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 100_000_000  # a file that unpacks to more is refused before it is unpacked
# Kinds that are read. Some of Pillow's others start programs (EPS).
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "PPM", "AVIF", "JPEG2000", "TGA", "ICO")
ORIENTATION = 0x0112  # EXIF's tag


@dataclass(frozen=True)
class Picture:
    """A picture as it was read, upright.

    Args:
        pixels: float32 [H, W, 1] (gray) or [H, W, 3] (red, green, blue), values 0..1.
        alpha: float32 [H, W, 1], 1 = opaque; None where the file has no transparency.
        bits: 8 or 16, the depth of the file.
        profile: its ICC color profile, written back as it is.
        notes: what reading changed, in words: which frame was taken, turned upright, colors converted.

    >>> Picture(torch.zeros(2, 3, 1)).rgb.shape
    torch.Size([2, 3, 3])
    """

    pixels: Tensor
    alpha: Tensor | None = None
    bits: int = 8
    profile: bytes | None = None
    notes: tuple[str, ...] = ()

    @property
    def rgb(self) -> Tensor:
        """[H, W, 3]: gray as three equal colors, transparency left out."""
        return self.pixels.expand(-1, -1, 3)

    @property
    def kind(self) -> str:
        """In words: "16-bit gray with alpha"."""
        return f"{self.bits}-bit {'gray' if self.pixels.shape[-1] == 1 else 'color'}{' with alpha' * self.has_alpha}"

    @property
    def has_alpha(self) -> bool:
        return self.alpha is not None

    def resized(self, height: int) -> Picture:
        """Scaled to that height with its aspect kept."""
        if height < 1:
            raise ValueError(f"the height of a picture must be at least 1, got {height}")
        old, width = self.pixels.shape[:2]
        if height == old:
            return self
        size = (max(round(width * height / old), 1), height)
        if size[0] * size[1] > MOST_PIXELS:
            raise ValueError(f"a picture of {size[0]} x {size[1]} pixels is too large; {MOST_PIXELS} are the most")
        alpha = None if self.alpha is None else _scaled(self.alpha, size, self.bits)
        return replace(self, pixels=_scaled(self.pixels, size, self.bits), alpha=alpha)


def read(path: str | os.PathLike[str], height: int | None = None, *, most_pixels: int = MOST_PIXELS) -> Picture:
    """Read a picture file: PNG, JPEG, TIFF, WebP, GIF, BMP, PPM, AVIF, JPEG 2000, TGA or ICO.

    Sixteen bits are kept (PNG and TIFF). Palettes become colors, CMYK and other color spaces RGB. EXIF orientation is
    applied. Of several frames the first is taken; `notes` says so.

    Args:
        path: the file.
        height: scale to this height in pixels, aspect kept; None keeps the size.
        most_pixels: refuse files that unpack to more.
    """
    path = Path(path)
    with _refusals(path):
        picture = _read(path, most_pixels)
    return picture if height is None else picture.resized(height)


class Shape(NamedTuple):
    """Extents of a picture file in pixels, as stored, and its channels, alpha included; 4 for a palette."""

    height: int
    width: int
    channels: int

    @property
    def pixels(self) -> int:
        return self.height * self.width

    def resized(self, height: int | None) -> Shape:
        """As `Picture.resized` would have it; None keeps the size."""
        width = self.width if height is None else max(round(self.width * height / self.height), 1)
        return self._replace(height=self.height if height is None else height, width=width)


def shape_of(path: str | os.PathLike[str], *, most_pixels: int = MOST_PIXELS) -> Shape:
    """What the header of a picture file says; nothing is unpacked. Refuses what `read` refuses by its header."""
    path = Path(path)
    with _refusals(path), _open(path, most_pixels) as image:
        bands = 4 if "P" in image.mode else len(image.getbands())
        return Shape(image.height, image.width, bands)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Errors of Pillow as a ValueError that names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own, of large files and of odd metadata
            yield
    except _refused() as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = "not a picture of a kind that is read" if "identify" in str(error) else str(error) or "broken file"
        raise ValueError(f"{path}: {reason}; give a PNG or JPEG that other programs open") from error


def _refused() -> tuple[type[Exception], ...]:
    """What Pillow raises for broken and hostile files."""
    from PIL import Image

    broken = (SyntaxError, ValueError, KeyError, IndexError, EOFError, OverflowError, struct.error, zlib.error)
    return (OSError, *broken, Image.DecompressionBombError)


def _open(path: Path, most_pixels: int) -> Image.Image:
    """The file, its size checked, nothing unpacked yet."""
    from PIL import Image

    Image.init()
    image = Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN])
    if image.width * image.height > most_pixels:
        size = f"{image.width} x {image.height}"
        image.close()
        raise ValueError(f"{size} pixels are more than {most_pixels:,}")
    return image


def _read(path: Path, most_pixels: int) -> Picture:
    with _open(path, most_pixels) as image:
        raw = _raw_mode(image)
        notes = []
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            notes.append(f"the first of {frames} frames")
        if raw.endswith(("16B", "16L", "16N")) and raw.startswith(("RGB", "LA")):
            values = _sixteen(path, image, raw, most_pixels)
            scaled = torch.from_numpy(values.astype(np.float32) / 65535)
            bits = 16
        else:
            whole, bits = _one_mode(_upright(image), notes)
            scaled = torch.from_numpy(np.atleast_3d(np.asarray(whole)).astype(np.float32) / (2**bits - 1))
        if image.getexif().get(ORIENTATION, 1) != 1:  # a PNG holds it behind its pixels
            notes.append("turned upright")
        profile = None if any(note.startswith("CMYK") for note in notes) else image.info.get("icc_profile")
    colors = 1 if scaled.shape[-1] < 3 else 3
    alpha = scaled[..., colors:].contiguous() if scaled.shape[-1] > colors else None
    return Picture(scaled[..., :colors].contiguous(), alpha, bits, profile, tuple(notes))


def _raw_mode(image: Any) -> str:
    """How the file stores its pixels, as Pillow names it; "" where it does not say."""
    args = image.tile[0].args if getattr(image, "tile", None) else ""
    first = args[0] if isinstance(args, tuple) and args else args
    return first if isinstance(first, str) else ""


def _upright(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    turned.load()
    return turned


def _one_mode(image: Image.Image, notes: list[str]) -> tuple[Image.Image | NDArray[Any], int]:
    """Any of Pillow's modes as L, LA, RGB or RGBA with 8 bits, or gray with 16."""
    mode = image.mode
    if mode == "F":
        raise ValueError("it holds floats of unknown range; save it with 8 or 16 bits")
    if mode.startswith("I"):
        values = np.asarray(image)
        if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise ValueError("it holds 32-bit integers of unknown range; save it with 8 or 16 bits")
        return values.astype(np.uint16), 16
    see_through = "transparency" in image.info or mode in ("LA", "La", "PA", "RGBA", "RGBa")
    if mode in ("1", "L", "LA", "La") or (mode in ("P", "PA") and _is_gray(image)):
        return image.convert("LA" if see_through else "L"), 8
    if mode not in ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA"):
        notes.append(f"{mode} converted to RGB")
    return image.convert("RGBA" if see_through else "RGB"), 8


def _is_gray(image: Image.Image) -> bool:
    """Whether a palette holds grays alone."""
    colors = np.asarray(image.getpalette("RGB") or ()).reshape(-1, 3)
    return bool((colors == colors[:, :1]).all())


def _sixteen(path: Path, image: Image.Image, raw: str, most_pixels: int) -> NDArray[Any]:
    """Colors or gray + alpha of 16 bits [H, W, C]: Pillow keeps 8 of them, so the file is decoded for either half."""
    first = raw[-1]
    if raw.startswith("LA"):  # four bytes a pixel, which are read as they stand
        _set_raw_mode(image, "RGBA")
        four = np.asarray(_upright(image)).astype(np.uint16)
        return four[..., ::2] << 8 | four[..., 1::2]
    native = "L" if np.little_endian else "B"
    high = np.asarray(_upright(image)).astype(np.uint16)
    other = {"B": "L", "L": "B", "N": "B" if native == "L" else "L"}[first]
    with _open(path, most_pixels) as again:
        _set_raw_mode(again, raw[:-1] + other)  # the other byte order: the lower byte is taken for the upper one
        low = np.asarray(_upright(again))
    return np.asarray(high << 8 | low)


def _set_raw_mode(image: Any, raw: str) -> None:
    """Let Pillow take the pixels of the file for those of another raw mode."""
    image.tile = [
        tile._replace(args=(raw, *tile.args[1:]) if isinstance(tile.args, tuple) else raw) for tile in image.tile
    ]


def _scaled(x: Tensor, size: tuple[int, int], bits: int) -> Tensor:
    """[H, W, C] by Lanczos, channel by channel; 8-bit values stay whole 255ths."""
    from PIL import Image

    values = x.numpy() if bits > 8 else (x * 255).round().byte().numpy()
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(values, -1, 0)]
    resized = [np.asarray(plane.resize(size, Image.Resampling.LANCZOS)) for plane in planes]
    stacked = np.stack(resized, -1).astype(np.float32)
    return torch.from_numpy(stacked.clip(0, 1) if bits > 8 else stacked / 255)


def write(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write a picture with its depth, gray, transparency and profile; the suffix of the path is the format.

    Values are cut to 0..1. An existing file is replaced at once when the new one is whole. Sixteen bits and
    transparency need a format that holds them; PNG holds all.
    """
    path = Path(path)
    parts = [picture.pixels] if picture.alpha is None else [picture.pixels, picture.alpha]
    values = torch.cat([part.detach().float().cpu() for part in parts], -1).nan_to_num(0).clamp(0, 1)
    array = (values * (2**picture.bits - 1)).round().numpy().astype(np.uint16 if picture.bits == 16 else np.uint8)
    suffix = path.suffix.lower()
    if picture.has_alpha and suffix in (".jpg", ".jpeg", ".bmp", ".ppm"):
        raise ValueError(f"{path}: {suffix} holds no transparency; write a .png")
    if picture.bits == 16 and suffix != ".png":
        raise ValueError(f"{path}: 16 bits are written as .png alone")
    with replacing(path) as temporary:
        if picture.bits == 16:
            temporary.write_bytes(_png(array, picture.profile))
            return
        from PIL import Image

        image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)  # [H, W, 2] is gray with alpha
        options: dict[str, Any] = {"quality": 95} if suffix in (".jpg", ".jpeg", ".webp", ".avif") else {}
        if picture.profile is not None:
            options["icc_profile"] = picture.profile
        try:
            image.save(temporary, **options)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; give a name that ends in .png or .jpg") from error


def _png(array: NDArray[np.uint16], profile: bytes | None) -> bytes:
    """A PNG of 16 bits [H, W, 1..4]; each line holds the differences to the one above, which packs better."""
    height, width, channels = array.shape
    lines = array.astype(">u2").reshape(height, -1).view(np.uint8)
    above = np.concatenate((np.zeros_like(lines[:1]), lines[:-1]))
    filtered = np.concatenate((np.full((height, 1), 2, np.uint8), lines - above), 1)  # 2: "up"
    header = struct.pack(">IIBBBBB", width, height, 16, (0, 4, 2, 6)[channels - 1], 0, 0, 0)
    chunks = [(b"IHDR", header)]
    if profile is not None:
        chunks.append((b"iCCP", b"profile\0\0" + zlib.compress(profile)))
    chunks += [(b"IDAT", zlib.compress(filtered.tobytes(), 6)), (b"IEND", b"")]
    sums = [struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks]
    sizes = [struct.pack(">I", len(data)) for _, data in chunks]
    packed = (size + name + data + total for size, (name, data), total in zip(sizes, chunks, sums, strict=True))
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)
