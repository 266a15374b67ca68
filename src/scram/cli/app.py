"""The `scram` command: one file per subcommand, gathered here."""

from typing import Annotated

import typer

from .. import __version__
from .demo import demo
from .info import info

app = typer.Typer(
    help="Attention over grids at O(N log N) cost: try it, and see what runs on this machine.",
    epilog="Examples:\n\n  scram demo\n\n  scram demo --size 144 --out /tmp/demo --json\n\n  scram info",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(info)


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
