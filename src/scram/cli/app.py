"""The `scram` command: one file per subcommand, gathered here."""

from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .demo import demo
from .denoise import denoise
from .info import info
from .match import match


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  scram {line}" for line in lines)


app = typer.Typer(
    help="Attention over grids at O(N log N) cost: try it, measure it, and see what runs on this machine.",
    epilog="Examples:\n\n  scram demo\n\n  scram demo --size 144 --out /tmp/demo --json\n\n  scram info",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EXAMPLES = {
    "bench": (
        "bench",
        "bench --sizes 32,64 --widths 3 --out /tmp/b",
        "bench --device cuda --longest 12",
        "bench --resume",
    ),
    "demo": ("demo", "demo --size 144 --out /tmp/demo --json"),
    "info": ("info", "info --json"),
    "denoise": (
        "denoise photo.jpg",
        "denoise camera --add-noise 25",
        "denoise photo.png --sigma 15 --out /tmp/d --json",
    ),
    "match": (
        "match left.png right.png",
        "match --sample motorcycle",
        "match a.jpg b.jpg --size 240 --out /tmp/m --json",
    ),
}
for command in (demo, match, denoise, bench, info):
    app.command(epilog=_examples(*_EXAMPLES[command.__name__]))(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scram {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass
