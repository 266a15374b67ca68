"""Programs of their own."""

import os
import subprocess
import sys
import textwrap


def run_program(*words, code=0, environment=(), timeout=500, **given):
    """Run a program to its end: what it printed and what it complained about.

    It fails the test if it ends with another code than this one; with code=None any will do.
    """
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, **dict(environment)},
        capture_output=True,
        text=True,
        timeout=timeout,
        **given,
    )
    assert code in (None, done.returncode), (done.stdout + done.stderr)[-6000:]
    return done


def run_python(source, **environment):
    """What a program in Python prints; its warnings are errors."""
    words = (sys.executable, "-W", "error", "-c", textwrap.dedent(source))
    return run_program(*words, environment=environment).stdout
