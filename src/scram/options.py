"""Names of string options, each in one place: the type that signatures show, and the values that are checked."""

from __future__ import annotations

from typing import Literal, get_args
