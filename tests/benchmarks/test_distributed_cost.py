"""The cost model: bytes are those that are counted, times are those of its formulae, and it names the bottleneck."""

import dataclasses
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import distributed_cost

    return distributed_cost


def test_a_ring_takes_the_longer_of_compute_and_transfer(cost):
    assert cost.round_trip(1, 2.0, 5.0, 5.0) == 2.0  # nobody to wait for
    assert cost.round_trip(4, 2.0, 1.0) == 8.0
    assert cost.round_trip(4, 2.0, 3.0) == 3 * 3.0 + 2.0  # the last keys are only visited
    # Gradients share the link with keys: each stop but the first waits for both, and the last ones go home.
    assert cost.round_trip(4, 5.0, 1.0, 2.0) == 4 * 5.0 + 2.0
    assert cost.round_trip(3, 1.0, 4.0, 6.0) == 4.0 + (6.0 + 4.0) * 1 + 6.0 + 6.0
    assert cost.round_trip(64, 1.0, 4.0, 6.0) == pytest.approx(64 * 10.0, rel=0.02)


def test_links_of_collectives(cost):
    slow = dataclasses.replace(
        cost.H200, inside=cost.Link("near", 10.0, 1.0), between=cost.Link("far", 1.0, 2.0), per_node=4
    )
    seconds, link = cost.all_gather(slow, 4, 30.0)
    assert (seconds, link.name) == (3 * 1.0 + 3.0, "near")
    seconds, link = cost.all_gather(slow, 8, 70.0)
    assert (seconds, link.name) == (7 * 2.0 + 70.0 / 4, "far")  # four ways to the next node
    seconds, link = cost.all_to_all(slow, 8, 70.0)
    assert (seconds, link.name) == (2.0 + 40.0, "far")  # of 7 parts 4 go to the other node
    assert cost.all_to_all(slow, 1, 0.0)[0] == cost.all_gather(slow, 1, 0.0)[0] == 0.0


def test_bottlenecks(cost):
    alone = cost.predict(1e6, 1)
    assert {one.bottleneck for one in alone.values()} == {"compute"}
    assert all(one.sent == 0 and one.seconds == one.compute for one in alone.values())
    assert cost.predict(1e8, 8, heads=1)["ring"].bottleneck == "compute"
    assert cost.predict(1e8, 64, heads=1)["ring"].bottleneck == "InfiniBand"
    assert not cost.predict(1e10, 8, heads=1)["ring"].fits
    assert (
        cost.predict(1e7, 8)["heads"].seconds
        < cost.predict(1e7, 8)["gather"].seconds
        < cost.predict(1e7, 8)["ring"].seconds
    )
    assert "heads" not in cost.predict(1e7, 64, heads=8)
    assert "heads" not in cost.predict(1e7, 8, heads=8, key_heads=4)


def test_memory_of_a_ring_falls_with_the_ranks(cost):
    held = {ranks: cost.predict(1e8, ranks, backward=True) for ranks in (2, 8, 32)}
    for few, many in ((2, 8), (8, 32)):
        assert held[few]["ring"].memory / held[many]["ring"].memory == pytest.approx(4, rel=0.01)
        assert held[few]["gather"].memory / held[many]["gather"].memory < 1.5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"points": 0}, "points must be 1 or more"), ({"ranks": 0}, "ranks must be"), ({"key_heads": 3}, "a multiple")],
    ids=["points", "ranks", "heads"],
)
def test_refusals(cost, wrong, words):
    with pytest.raises(ValueError, match=words):
        cost.predict(**{"points": 100, "ranks": 2, **wrong})


def test_bytes_are_those_that_were_counted(cost):
    """On the stored rows of `scram bench --distributed`: float32, so that all travels in 4 bytes."""
    rows = json.loads((FOLDER / "results" / "distributed.json").read_text())["rows"].values()
    assert len({(row["contender"], row["ranks"], row["backward"]) for row in rows}) == 18
    for row in rows:
        shape = {"heads": row["heads"], "width": row["width"], "itemsize": 4, "backward": row["backward"]}
        # These rows are older than slopes.
        one = cost.predict(row["size"] ** 2, row["ranks"], first_order=False, **shape)[row["contender"]]
        assert one.sent == pytest.approx(row["sent"], rel=1e-3, abs=1000)
