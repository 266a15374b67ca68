"""Picture files of every kind, read and written; broken and hostile ones refused in one line."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from scram.images.reading import Picture, read, shape_of, write

RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (9, 12, 3), dtype=np.uint8)
GRAY = RNG.integers(0, 256, (9, 12), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (9, 12), dtype=np.uint8)


def as_array(picture, bits=8):
    parts = [picture.pixels] if picture.alpha is None else [picture.pixels, picture.alpha]
    return (torch.cat(parts, -1) * (2**bits - 1)).round().numpy().astype(int)


@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp", ".bmp", ".ppm", ".gif"])
@pytest.mark.parametrize("color", [True, False], ids=["color", "gray"])
def test_eight_bits(tmp_path, suffix, color):
    array = COLOR if color else GRAY
    Image.fromarray(array).save(tmp_path / f"a{suffix}", **({"lossless": True} if suffix == ".webp" else {}))
    picture = read(tmp_path / f"a{suffix}")
    assert (picture.bits, picture.alpha, picture.notes) == (8, None, ())
    assert picture.rgb.shape == (9, 12, 3)
    assert picture.pixels.dtype == torch.float32
    if suffix == ".webp":  # it knows no gray
        array = np.repeat(array[..., None], 3, -1) if not color else array
    if suffix == ".gif" and color:  # 256 colors: 108 pixels fit
        with Image.open(tmp_path / "a.gif") as image:
            array = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(as_array(picture), np.atleast_3d(array))


def modes():
    color, gray = Image.fromarray(COLOR), Image.fromarray(GRAY)
    with_alpha = color.copy()
    with_alpha.putalpha(Image.fromarray(ALPHA))
    gray_alpha = gray.convert("LA")
    gray_alpha.putalpha(Image.fromarray(ALPHA))
    palette = color.quantize(32)
    return {
        "LA": (gray_alpha, "8-bit gray with alpha", np.stack((GRAY, ALPHA), -1)),
        "RGBA": (with_alpha, "8-bit color with alpha", np.concatenate((COLOR, ALPHA[..., None]), -1)),
        "P": (palette, "8-bit color", np.asarray(palette.convert("RGB"))),
        "1": (gray.convert("1"), "8-bit gray", np.asarray(gray.convert("1"))[..., None] * 255),
        "I;16": (Image.fromarray(GRAY.astype(np.uint16) * 250), "16-bit gray", GRAY[..., None].astype(int) * 250),
    }


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "1", "I;16"])
def test_modes_of_png(tmp_path, mode):
    image, kind, want = modes()[mode]
    image.save(tmp_path / "a.png")
    picture = read(tmp_path / "a.png")
    assert picture.kind == kind
    np.testing.assert_array_equal(as_array(picture, picture.bits), want)
    write(picture, tmp_path / "b.png")
    again = read(tmp_path / "b.png")
    assert again.kind == kind
    assert torch.equal(again.pixels, picture.pixels)


def test_transparent_color_of_a_palette(tmp_path):
    image = Image.fromarray(COLOR).quantize(16)
    image.save(tmp_path / "a.png", transparency=3)
    alpha = read(tmp_path / "a.png").alpha
    np.testing.assert_array_equal(alpha[..., 0].numpy() == 0, np.asarray(image) == 3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_sixteen_bits_there_and_back(tmp_path, channels):
    values = torch.from_numpy(RNG.integers(0, 65536, (7, 5, channels)).astype(np.float32)) / 65535
    colors = 1 if channels < 3 else 3
    before = Picture(values[..., :colors], values[..., colors:] if channels in (2, 4) else None, bits=16)
    write(before, tmp_path / "a.png")
    after = read(tmp_path / "a.png")
    assert after.kind == before.kind
    assert torch.equal(after.pixels, before.pixels)
    assert after.has_alpha == before.has_alpha
    if after.has_alpha:
        assert torch.equal(after.alpha, before.alpha)
    with Image.open(tmp_path / "a.png") as image:  # other programs read it
        assert image.size == (5, 7)
        image.load()
    with pytest.raises(ValueError, match=r"16 bits are written as \.png alone"):
        write(before, tmp_path / "a.tif")


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("channels", [3, 4])
def test_sixteen_bits_of_another_program(tmp_path, suffix, channels):
    cv2 = pytest.importorskip("cv2")
    array = RNG.integers(0, 65536, (9, 11, channels)).astype(np.uint16)
    cv2.imwrite(str(tmp_path / f"a.{suffix}"), array)
    picture = read(tmp_path / f"a.{suffix}")
    assert picture.bits == 16
    order = [2, 1, 0, 3][:channels]  # its colors are blue, green, red
    np.testing.assert_array_equal(as_array(picture, 16), array[..., order])


def test_cmyk_becomes_rgb_and_says_so(tmp_path):
    Image.fromarray(COLOR).convert("CMYK").save(tmp_path / "a.tif")
    picture = read(tmp_path / "a.tif")
    assert picture.notes == ("CMYK converted to RGB",)
    assert np.abs(as_array(picture) - COLOR).mean() < 6
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "red.jpg")
    red = read(tmp_path / "red.jpg").pixels.mean((0, 1))
    assert red[0] > 0.95
    assert red[1:].max() < 0.1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("bits", [8, 16])
def test_exif_orientation(tmp_path, orientation, bits):
    turns = {
        1: lambda x: x,
        2: np.fliplr,
        3: lambda x: np.rot90(x, 2),
        4: np.flipud,
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: np.rot90(x, -1),
        7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
        8: np.rot90,
    }
    scaled = torch.from_numpy(COLOR.astype(np.float32) / 255)
    write(Picture(scaled, bits=bits), tmp_path / "plain.png")
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = b"eXIf", exif.tobytes()[6:] if exif.tobytes().startswith(b"Exif") else exif.tobytes()
    chunk = struct.pack(">I", len(data[1])) + data[0] + data[1] + struct.pack(">I", zlib.crc32(data[0] + data[1]))
    plain = (tmp_path / "plain.png").read_bytes()
    (tmp_path / "turned.png").write_bytes(plain[:33] + chunk + plain[33:])  # behind the header
    picture = read(tmp_path / "turned.png")
    np.testing.assert_array_equal(as_array(picture, 8), turns[orientation](COLOR))
    assert picture.notes == (() if orientation == 1 else ("turned upright",))
    assert picture.bits == bits


def test_of_an_animation_the_first_frame(tmp_path):
    frames = [Image.new("L", (8, 6), value) for value in (50, 100, 150)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    picture = read(tmp_path / "a.gif")
    assert picture.notes == ("the first of 3 frames",)
    assert set(as_array(picture).flatten()) == {50}


def test_a_picture_of_one_pixel(tmp_path):
    write(Picture(torch.full((1, 1, 3), 0.2)), tmp_path / "a.png")
    assert read(tmp_path / "a.png").pixels.shape == (1, 1, 3)
    assert read(tmp_path / "a.png", 4).pixels.shape == (4, 4, 3)


@pytest.mark.parametrize("bits", [8, 16])
def test_resizing_keeps_aspect_and_depth(bits):
    picture = Picture(torch.rand(20, 40, 3), torch.rand(20, 40, 1), bits)
    half = picture.resized(10)
    assert (half.pixels.shape, half.alpha.shape) == ((10, 20, 3), (10, 20, 1))
    assert picture.resized(20) is picture
    area = torch.nn.functional.interpolate(picture.pixels.movedim(-1, 0)[None], (10, 20), mode="area")
    assert float((half.pixels - area[0].movedim(0, -1)).abs().mean()) < 0.1
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        picture.resized(0)


def bomb(side=60000):
    """A PNG that says it has that many pixels on a side."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    chunks = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def saved(image, kind, **how):
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a picture of a kind that is read"),
        (b"hello", "not a picture of a kind that is read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture of a kind that is read"),
        (saved(Image.fromarray(COLOR), "PNG")[:200], "truncated|broken"),
        (bomb(), "pixels"),
        (saved(Image.fromarray(GRAY.astype(np.float32)), "TIFF"), "floats of unknown range"),
        (saved(Image.fromarray(GRAY.astype(np.int32) * 99999), "TIFF"), "32-bit integers of unknown range"),
    ],
    ids=["empty", "text", "program", "cut", "bomb", "floats", "integers"],
)
def test_what_is_refused(tmp_path, content, message):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path / "a.png")
    assert str(caught.value).startswith(str(tmp_path / "a.png"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1"])
def test_the_shape_is_known_without_unpacking(tmp_path, mode):
    Image.fromarray(COLOR).convert(mode).save(tmp_path / "a.png")
    assert shape_of(tmp_path / "a.png") == (9, 12, {"L": 1, "1": 1, "LA": 2, "RGB": 3}.get(mode, 4))
    (tmp_path / "b.png").write_bytes(bomb(9999))
    assert shape_of(tmp_path / "b.png") == (9999, 9999, 3)
    (tmp_path / "b.png").write_bytes(bomb(12000))
    with pytest.raises(ValueError, match=r"b\.png: 12000 x 12000 pixels are more than 100,000,000"):
        shape_of(tmp_path / "b.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "BMP", "PPM", "TGA", "ICO"])
def test_broken_bytes_are_refused(tmp_path, kind):
    """Any byte of a file may be wrong: it is read, or refused as wrong input is."""
    whole = saved(Image.fromarray(COLOR), kind)
    rng = np.random.default_rng(0)
    path = tmp_path / "a"
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            place = rng.integers(min(len(data), 100)) if rng.random() < 0.7 else rng.integers(len(data))
            data[place] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.1 else data)
        try:
            picture = read(path, most_pixels=10_000)
        except ValueError as error:
            assert str(error).startswith(str(path))  # noqa: PT017
        else:
            assert picture.rgb.isfinite().all()


def test_missing_files_and_large_ones(tmp_path):
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "no.png")
    write(Picture(torch.zeros(10, 10, 1)), tmp_path / "a.png")
    with pytest.raises(ValueError, match="10 x 10 pixels are more than 99"):
        read(tmp_path / "a.png", most_pixels=99)


def test_writing_refuses_what_a_format_cannot_hold(tmp_path):
    picture = Picture(torch.rand(4, 4, 3), torch.rand(4, 4, 1))
    with pytest.raises(ValueError, match=r"\.jpg holds no transparency; write a \.png"):
        write(picture, tmp_path / "a.jpg")
    (tmp_path / "a.xyz").write_text("old")
    with pytest.raises(ValueError, match=r"unknown file extension.*; give a name"):
        write(picture, tmp_path / "a.xyz")
    assert (tmp_path / "a.xyz").read_text() == "old"


def test_the_profile_is_kept(tmp_path):
    for bits in (8, 16):
        write(Picture(torch.rand(4, 4, 3), bits=bits, profile=b"a profile"), tmp_path / "a.png")
        assert read(tmp_path / "a.png").profile == b"a profile"


def test_a_picture_is_not_scaled_beyond_memory():
    with pytest.raises(ValueError, match="is too large; 100000000 are the most"):
        Picture(torch.zeros(48, 64, 3)).resized(100_000)
