"""Memory that a command needs, compared with what is free before it is taken."""

from __future__ import annotations

from pathlib import Path

from ..images.reading import Shape, shape_of
from ..quality.timing import memory_status
from ..spec.blocks import PIXELS

READING = 16  # bytes of a value while a picture is read: Pillow's, an array's, float32 twice
BLOCK_COPIES = 12  # of a picture beside the features of its blocks, which are held twice
PATCH_COPIES = 8  # of all patches of a picture, as float32, that are held at once
BESIDE = 300  # bytes of a pixel beside its patch: features, matches, weights, what is drawn
REFINEMENT = 500  # bytes of a pixel while matches are made finer than a pixel
SMALLER = "give a smaller picture"
CONTAINER = Path("/sys/fs/cgroup")  # where Linux says how much a container may take


def check(needed: int, what: str, remedy: str) -> None:
    """Raise ValueError where `what` needs more bytes than are free; `remedy` says what to do."""
    free = available()
    if free is not None and needed > free:
        raise ValueError(f"{what} about {in_words(needed)} of memory, and {in_words(free)} are free; {remedy}")


def check_reading(path: str | Path, height: int | None = None) -> Shape:
    """Refuse a picture that would not fit into memory, scaled to that height; its shape then, by its header."""
    shape = shape_of(path)
    scaled = shape.resized(height)
    needed = READING * shape.channels * (shape.pixels + (0 if scaled == shape else scaled.pixels))
    check(needed, f"{path}: reading needs", SMALLER)
    return scaled


def of_patches(channels: int, patch: int, copies: int = PATCH_COPIES) -> int:
    """Bytes of a pixel where the patches of all pixels are held: `denoise`, `generate`."""
    return copies * 4 * channels * patch**2 + BESIDE


def of_blocks(channels: int, frames: int = 1) -> int:
    """Bytes of a pixel where the blocks of all pixels are compared and grouped: `denoise` without `--fast`."""
    return 4 * frames * (2 * PIXELS + BLOCK_COPIES * channels) + BESIDE


def of_resized(channels: int) -> int:
    """Bytes of a pixel, of the source and of the result: `retarget`."""
    return READING * channels


def of_hole(pixels: int, hole: int, channels: int, patch: int) -> int:
    """Bytes where a hole of so many pixels is filled: patches of the picture, and of the hole again: `inpaint`."""
    channels += 2  # how rough the surroundings are
    return pixels * of_patches(channels, patch, 3) + hole * of_patches(channels, patch, 4)


def of_frames(channels: int, patch: int, width: int, frames: int) -> int:
    """Bytes of a pixel where the patches and features of several frames are kept beside those of one: films."""
    return frames * 4 * (channels * patch**2 + width) + of_patches(channels, patch)


def of_features(width: int, matches: int = 1) -> int:
    """Bytes of a pixel that has features and matches, without its patch: as `explore` does."""
    return 16 * width + 16 * matches + BESIDE


def of_matches(width: int, matches: int = 1) -> int:
    """Bytes of a pixel of `match`."""
    return of_features(width, matches) + REFINEMENT


def available() -> int | None:
    """Bytes that this process may still take; None where the system does not say."""
    limits = (memory_status("MemAvailable", "/proc/meminfo"), _container(), _address_space())
    return min((limit for limit in limits if limit is not None), default=None)


def _container() -> int | None:
    """What the container may still take; None outside of one, and where it has no limit."""
    try:
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        lines = (CONTAINER / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no such file, or "max"
        return None
    files = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))  # given back when needed
    return max(0, limit - used + files)


def _address_space() -> int | None:
    """What `ulimit -v` leaves; None without a limit."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ModuleNotFoundError:  # not Unix
        return None
    limit = getrlimit(RLIMIT_AS)[0]
    used = memory_status("VmSize")
    return None if limit == RLIM_INFINITY or used is None else max(0, limit - used)


def in_words(count: int) -> str:
    """Bytes in MB or GB.

    >>> in_words(2_340_000), in_words(12_000_000_000)
    ('2.3 MB', '12.0 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
