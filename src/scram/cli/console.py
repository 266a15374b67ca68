"""What the commands share: where they print, and how they fail."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOTDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def console(stderr: bool = False) -> Console:
    """A console on stdout or stderr; wide enough for a table when it is a pipe or a file."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120, soft_wrap=False)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that names the step under way, on a line that is gone when done; silent when no terminal."""
    screen = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda step: bar.update(task, description=step)


def warn(message: str) -> None:
    """Print one line to stderr and go on."""
    typer.echo(f"scram: warning: {' '.join(message.split())}", err=True)


def fail(message: str) -> NoReturn:
    """Print one line to stderr and leave with exit code 2."""
    typer.echo(f"scram: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a user can get wrong (files, sizes, settings) into one line and exit code 2."""
    try:
        yield
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, ModuleNotFoundError) as error:
        fail(str(error))


def writable_folder(folder: Path) -> Path:
    """Make the folder; raise OSError now, not after the work, if nothing can be written there."""
    if folder.is_file():
        raise NotADirectoryError(ENOTDIR, "this is a file, not a folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        return folder


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def chosen_device(name: str) -> torch.device:
    """The device of that name; ValueError where it is not one of cpu and cuda, or has no GPU."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA GPU here; leave --device out to run on the CPU")
    return torch.device(name)
