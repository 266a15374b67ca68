"""The explorer on the start page: the attention between the two photographs that come with SCRAM, on a small grid.

python docs/_site/explorer.py explorer.html
"""

from __future__ import annotations

import sys
from pathlib import Path

import scram
from scram.cli.features import sample_pair
from scram.cli.pair import pair_of

HEIGHT = 96


def write(path: Path) -> None:
    """One HTML file at that path."""
    pair = pair_of(*sample_pair(HEIGHT))
    found = scram.explore(
        pair.q,
        pair.k,
        pair.v[..., :3],
        scale=40.0,
        pictures=(pair.a, pair.b),
        title="Two photographs",
        budget=1_500_000,
    )
    found.save(path)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
