"""The moves and offers of a sweep, in plain integers."""

import pytest
import torch

import scram
from scram.spec import schedule


def test_every_kind_of_propagation_has_its_moves():
    kinds = {kind for sweeps in schedule.PROPAGATE.values() for both in sweeps for kind in both}
    assert kinds == set(schedule.MOVES)
    assert schedule.moves("shift", 1) == schedule.moves("shift", 2) == (-1,)
    assert schedule.moves("stay", 1) == schedule.moves("stay", 2) == (0,)
    assert schedule.moves("both", 1) == schedule.moves("both", 2) == (-1, 0)
    assert (schedule.moves("turns", 1), schedule.moves("turns", 2)) == ((-1,), (0,))


def test_the_tiles_hold_64_queries():
    for rank in (1, 2, 3, 4):
        assert torch.tensor(schedule.tile_shape(rank)).prod() == schedule.TILE_QUERIES == 64


def test_radii_take_turns_and_cover_all():
    seen = [[o.reach for o in schedule.offers(sweep, (), "both", 0, 1, 100) if o.kind == "random"] for sweep in (1, 2)]
    assert seen == [[100, 25, 6, 1], [50, 12, 3]]


@pytest.mark.parametrize("key_grid", [(1,), (7, 3), (64, 64), (2, 9, 5)], ids=str)
def test_no_two_offers_of_a_sweep_share_a_draw(key_grid):
    """A random key takes a draw for its query and one for each axis."""
    for sweep in (1, 2):
        taken = []
        for offer in schedule.offers(sweep, (4, 1), "both", 3, len(key_grid), max(key_grid)):
            if offer.kind in ("gossip", "random"):
                count = 1 if offer.kind == "gossip" else 1 + len(key_grid)
                taken += range(offer.draw, offer.draw + count)
        assert len(taken) >= 3
        assert len(taken) == len(set(taken))


def test_offers_of_neighbors_go_by_jumps():
    found = [(offer.kind, offer.reach, offer.draw) for offer in schedule.offers(1, (8, 2), "both", 0, 1, 1)]
    assert found[:4] == [("shift", 8, 0), ("stay", 8, 0), ("shift", 2, 1), ("stay", 2, 1)]


@pytest.mark.parametrize("matches", [1, 2, 32])
def test_groups_hold_every_lane_once(matches):
    groups = schedule.lane_groups(matches)
    assert len(groups) == (1 if matches == 1 else schedule.LANE_GROUPS)
    assert sorted(lane for lanes in groups for lane in lanes) == list(range(schedule.TILE_QUERIES))


def test_the_largest_radius_is_no_larger_than_grid_and_reach():
    assert schedule.widest((5, 9), (), True) == schedule.widest((5, 9), (99, 0), True) == 9
    assert schedule.widest((5, 9), (3, 2), True) == 3
    assert schedule.widest((5, 9), (0, 0), True) == schedule.widest((5, 9), (3, 2), False) == 0
    assert not [offer for offer in schedule.offers(1, (), "both", 0, 2, 0) if offer.kind == "random"]


def test_auto_method_is_resolved():
    class Queries:
        """What is read of a tensor, for a device that need not be there."""

        def __init__(self, device, dtype, width):
            self.device, self.dtype, self.shape = torch.device(device), dtype, (1, 1, 4, width)

    def chosen(*q, causal=False):
        return schedule.method_of(scram.Search(), Queries(*q), causal)

    assert chosen("cuda", torch.bfloat16, 64) == chosen("cuda", torch.float16, 16) == "tile"
    assert chosen("cpu", torch.bfloat16, 64) == chosen("cuda", torch.bfloat16, 15) == "query"
    assert chosen("cuda", torch.float32, 32) == "tile"
    assert chosen("cuda", torch.float32, 31) == chosen("cuda", torch.float64, 64) == "query"
    assert chosen("cuda", torch.bfloat16, 64, causal=True) == "query"
    assert schedule.method_of(scram.Search(matches=33), Queries("cuda", torch.bfloat16, 64), False) == "query"
    for settings in (scram.Search.paper(seed=3), scram.Search("tile", seed=3)):
        assert schedule.method_of(settings, Queries("cuda", torch.bfloat16, 64), False) == settings.method
