"""The `scram` command: one file per subcommand, gathered here."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .bench import bench
from .coherence import coherence
from .demo import demo
from .denoise import denoise
from .figures import figures
from .info import info
from .match import match


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  scram {line}" for line in lines)


class OneLineErrors(TyperGroup):
    """Options that do not exist or do not fit are one line too, not a box."""

    def main(self, *arguments: Any, **settings: Any) -> Any:
        if not settings.get("standalone_mode", True):
            return super().main(*arguments, **settings)
        try:
            code = super().main(*arguments, **{**settings, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):  # of the parser's errors alone
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]  # no command at all: the help
                sys.exit(2)
            where = getattr(getattr(error, "ctx", None), "command_path", "scram")
            message = " ".join(error.format_message().split())
            typer.echo(f"scram: {message} (`{where} --help` lists what there is)", err=True)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=OneLineErrors,
    help="Attention over grids at O(N log N) cost: try it, measure it, and see what runs on this machine.",
    epilog=_examples("demo", "match left.png right.png", "denoise camera --add-noise 25", "bench", "info"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EXAMPLES = {
    "coherence": ("coherence", "coherence --size 64 --out /tmp/c --json"),
    "figures": ("figures", "figures --only maps,modes --out /tmp/f", "figures --size 288 --json"),
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
for command in (demo, match, denoise, figures, bench, coherence, info):
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
