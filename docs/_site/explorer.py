"""The explorer on the start page: the attention between the two photographs that come with SCRAM, on a small grid."""

from __future__ import annotations

from pathlib import Path

import scram
from scram.cli.features import sample_pair
from scram.cli.pair import pair_of

HEIGHT = 72


def write(path: Path) -> None:
    """One HTML file at that path."""
    pair = pair_of(*sample_pair(HEIGHT))
    found = scram.explore(pair.q, pair.k, pair.v[..., :3], scale=100.0)  # type: ignore[attr-defined]
    found.save(path)
