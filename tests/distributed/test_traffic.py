"""Bytes that a rank sends: the formulae of docs/distributed.md, mode by mode."""

import pytest

from scram.distributed import traffic
from scram.distributed.traffic import count, waiting
from support import traffic_jobs as jobs
from support.sharded import on_ranks

POINTS, BATCH, HEADS, KEY_HEADS, WIDTH, WIDTH_V = 24, 1, 8, 4, 8, 4
KEYS = 4 * BATCH * KEY_HEADS * POINTS * (WIDTH + WIDTH_V)  # bytes of all keys and values, float32
QUERIES, OUT = (4 * BATCH * HEADS * POINTS * width for width in (WIDTH, WIDTH_V))


def sent(mode, key_rows):
    """Bytes that each rank sends in the forward pass, then in the backward pass."""
    size, shares = len(key_rows), [rows / sum(key_rows) for rows in key_rows]
    if mode == "heads":  # rows of all heads go, but for its own heads; rows of its own heads go, but for its own rows
        to_heads = [(size - 1) / size * share for share in shares]
        to_rows = [(1 - share) / size for share in shares]
        forward = [(QUERIES + KEYS) * a + OUT * b for a, b in zip(to_heads, to_rows, strict=True)]
        backward = [OUT * a + (QUERIES + KEYS) * b for a, b in zip(to_heads, to_rows, strict=True)]
        return [round(x) for x in forward], [round(x) for x in backward]
    longest = round(KEYS * max(shares))  # float32 keys: their gradients are as long
    steps = {"gather": size - 1, "ring": 2 * size - 1 if size > 1 else 0}  # back: gradients go all the way home
    return [(size - 1) * longest] * size, [steps[mode] * longest] * size


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["heads", "gather", "ring"])
@pytest.mark.parametrize("key_rows", [(6,), (3, 3), (4, 2), (2, 1, 1, 2)], ids=str)
def test_bytes_are_those_of_the_formulae(mode, key_rows):
    size = len(key_rows)
    found = on_ranks(size, jobs.bytes_sent, mode=mode, rows=key_rows, shape=(BATCH, HEADS, KEY_HEADS, WIDTH, WIDTH_V))
    forward, backward = sent(mode, key_rows)
    assert [one["forward"]["sent"] for one in found] == forward
    assert [one["backward"]["sent"] for one in found] == backward
    for part in ("forward", "backward"):  # what is sent arrives
        assert sum(one[part]["sent"] for one in found) == sum(one[part]["received"] for one in found)
    if size > 1:
        assert all(one["forward"]["waited"] > 0 for one in found)


def test_counters_are_of_what_is_inside():
    with traffic() as outer:
        count(1, 2)
        with traffic() as inner:
            count(10, 20)
            with waiting():
                pass
        count(100, 200)
    count(1000, 2000)
    assert (outer.sent, outer.received, outer.messages) == (111, 222, 3)
    assert (inner.sent, inner.received, inner.messages) == (10, 20, 1)
    assert outer.waited == inner.waited > 0


def test_two_counters_that_look_alike_are_two():
    with traffic() as outer:
        with traffic() as inner:
            pass
        count(1, 1)
    assert (outer.sent, inner.sent) == (1, 0)
