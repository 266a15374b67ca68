"""What the commands share: where they print and write, and how they fail."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOTDIR
from pathlib import Path
from tempfile import TemporaryFile
from traceback import print_exception
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..images.files import replacing
from . import INTERRUPTED

Numbers = dict[str, Any]
Step = Callable[[str], None]
ALLOCATORS = ("DefaultCPUAllocator", "CUDA out of memory")  # of torch, in RuntimeErrors
MEANING = {
    "recall@1": "share of queries whose best key was found",
    "captured mass": "share of the exact softmax weights that the attended keys hold",
    "output error": "||out - exact|| / ||exact|| over the queries of a head",
}


@dataclass(frozen=True)
class Printout:
    """What a command found: numbers to store, tables to print, and a line that names the written files."""

    numbers: Numbers
    tables: Sequence[Table]
    files: str

    def finish(self, path: Path, as_json: bool) -> None:
        """Store the numbers at that path; print them as JSON, or the tables and the files."""
        text = json.dumps(self.numbers, indent=2, allow_nan=False)
        with replacing(path) as temporary:
            temporary.write_text(text + "\n")
        if as_json:
            typer.echo(text)
            return
        for table in self.tables:
            console().print(table)
        typer.echo(self.files)


def console(stderr: bool = False) -> Console:
    """A console on stdout or stderr; wide enough for a table when it is a pipe or a file."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120, soft_wrap=False)


def numbers_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str, caption: str = "", left: int = 1
) -> Table:
    """A table with names in the first `left` columns and numbers, aligned to the right, in the others."""
    table = Table(title=title, caption=caption or None, show_header=any(headings))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=place == 0)
    for row in rows:
        table.add_row(*row)
    return table


def explained(*names: str) -> str:
    """One line for each measure: its name and what it means."""
    return "\n".join(f"{name}: {MEANING[name]}" for name in names)


@contextmanager
def progress_line(*columns: ProgressColumn, total: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    """A line of progress on stderr that disappears when done; silent where stderr is no terminal."""
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        yield bar, bar.add_task("", total=total)


@contextmanager
def progress() -> Iterator[Step]:
    """Yield a function that names the stage under way; the clock beside it is that of the stage."""
    with progress_line(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as (bar, task):
        yield lambda stage: bar.reset(task, description=stage)


def complain(message: str) -> None:
    """Print one line to stderr and go on; what a terminal would obey, as in names of a file, becomes question marks."""
    words = " ".join(message.split())
    typer.echo("scram: " + "".join(letter if letter.isprintable() else "?" for letter in words), err=True)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one line to stderr and leave with that exit code."""
    complain(message)
    raise typer.Exit(code)


@contextmanager
def one_line_errors(traceback: bool) -> Iterator[None]:
    """Turn Ctrl-C and whatever goes wrong in a command into one line and a code; `traceback` prints one before."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if hasattr(error, "format_message"):  # of the parser, which `Group.main` words
            raise
        if traceback:
            print_exception(error)
        fail(in_one_line(error))


def in_one_line(error: Exception) -> str:
    """What went wrong, and how to see more where the words may not be enough."""
    words = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, MemoryError) or any(name in str(error) for name in ALLOCATORS):
        return f"out of memory{': ' * bool(words)}{words}; give smaller pictures, tensors or sizes"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, (OSError, ValueError, ModuleNotFoundError)):  # what a user can get wrong
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {words}; `scram --traceback COMMAND ...` shows where"


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make the folder before the work, so that an error comes at once; remove it if it stays empty."""
    if folder.is_file():
        raise NotADirectoryError(ENOTDIR, "this is a file, not a folder", str(folder))
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        yield
    finally:
        for path in created:
            with suppress(OSError):  # not empty: keep it
                path.rmdir()


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
