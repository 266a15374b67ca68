"""Programs of their own."""

import os
import subprocess
import sys
import textwrap


def run_python(code, **environment):
    """Run a program of its own; its output, or a failure with what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
