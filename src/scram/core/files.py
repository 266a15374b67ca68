"""Files that values are saved in: written whole or not at all, and read as what a stranger may have written."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

Path = str | os.PathLike[str]
Json = dict[str, Any]  # an object of JSON
Loaded = TypeVar("Loaded")
# What reading data of other types than expected raises.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def malformed(complaint: str) -> Iterator[None]:
    """Within it, data that are not what they should be are a ValueError that begins with the complaint."""
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"{complaint}: it is nested too deeply") from error
    except KeyError as error:
        raise ValueError(f"{complaint}: {error} is missing") from error
    except MALFORMED as error:
        raise ValueError(f"{complaint}: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[str]:
    """A new file beside `path`, which takes its place at the end; an error leaves the old file as it was.

    What is no regular file with a name, such as a pipe, is written to directly.
    """
    target = os.path.realpath(path)  # of a link, the file that it names
    old = os.stat(path) if os.path.exists(path) else None
    named = os.path.exists(target)
    if old is not None and not (named and stat.S_ISREG(old.st_mode)):
        yield os.fspath(path)
        return
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:64]}.{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    mode = stat.S_IMODE((old or os.stat(temporary)).st_mode)
    try:
        yield temporary
        _to_disk(temporary)  # a full disk may say so only now
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _to_disk(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def save_json(data: Json, path: Path) -> None:
    """Write strict JSON: numbers that are not finite are a ValueError."""
    text = json.dumps(data, indent=1, allow_nan=False)
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def load_json(path: Path, make: Callable[[Any], Loaded], complaint: str) -> Loaded:
    """What `make` makes of a file that `save_json` wrote; ValueError with the complaint where it is another file."""
    with open(path, "rb") as file:
        content = file.read()
    with malformed(f"{path} {complaint}"):
        return make(json.loads(content.decode("utf-8")))


def save_tensors(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    whole = {name: x.detach().contiguous() for name, x in tensors.items()}
    with replacing(path) as temporary:
        save_file(whole, temporary, metadata=metadata)


def load_tensors(
    path: Path,
    make: Callable[[dict[str, Tensor], dict[str, str]], Loaded],
    kind: str,
    needed: Collection[str],
    optional: Collection[str] = (),
) -> Loaded:
    """What `make` makes of tensors, on the CPU, and metadata of a file that `save_tensors` wrote.

    Args:
        path: of a safetensors file; nothing is unpickled.
        make: what it raises of data that are not what they should be becomes a ValueError.
        kind: what the metadata name as their format.
        needed, optional: the names of the tensors.
    """
    from safetensors import SafetensorError, safe_open

    with malformed(f"{path} is not a safetensors file that {kind.removeprefix('scram.')}.save wrote"):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                names = set(file.keys())
                if metadata.get("format") != kind:
                    raise ValueError("it holds something else")
                wrong = (set(needed) - names) | (names - {*needed, *optional})
                if wrong:
                    raise ValueError(f"tensors missing or unknown: {', '.join(sorted(wrong))}")
                tensors = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, RuntimeError) as error:  # torch's, of a tensor that does not lie on its own grid
            raise ValueError(str(error)) from error
        return make(tensors, metadata)
