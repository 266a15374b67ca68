"""The tail that is none."""

from scram.core.tails.base import NO_TAIL


def test_no_tail_prints_the_same_in_every_process():
    """Ranks compare their settings by how they print."""
    assert repr(NO_TAIL) == "NoTail()"
