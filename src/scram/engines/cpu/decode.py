"""Attention of the newest positions over a cache, in plain torch: matrix products of rows that lie together."""

from __future__ import annotations

from ...core.calls import DecodeCall
from ...results import Attended
from ...spec import decode as spec


def decode(call: DecodeCall) -> Attended:
    return Attended(*spec.decode(call))
