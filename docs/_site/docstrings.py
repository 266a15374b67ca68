"""Docstrings as Markdown: doctests become code blocks, shapes such as [B, H, *G, E] become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*", re.M)
SHAPE = re.compile(r"(?<![`\w])\[[^\[\]`\n]*\*\w[^\[\]`\n]*\](?!`)")


def fenced(text: str) -> str:
    """A docstring whose examples stand in fences and whose shapes stand in backticks.

    >>> print(fenced("x [B, *G] is\\n\\n>>> 1 + 1\\n2"))
    x `[B, *G]` is
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    text = SHAPE.sub(lambda found: f"`{found[0]}`", text)
    return DOCTEST.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class Docstrings(griffe.Extension):
    """Applies `fenced` to every docstring that is read, and leaves out arguments that begin with an underscore."""

    def on_function_instance(self, *, func: Any, **_: Any) -> None:
        for name in [x.name for x in func.parameters if x.name.startswith("_") and x.name != "_"]:
            del func.parameters[name]

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
