"""The command line, called in this process."""

from typer.testing import CliRunner

from scram.cli.app import app


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr
