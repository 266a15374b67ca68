"""The values: Search and Routes check themselves, Matches prints, moves, saves and loads itself."""

import dataclasses
import pickle

import pytest
import torch
from safetensors.torch import save_file

import scram


def some_matches():
    index = torch.tensor([[3, -1], [0, 5], [2, 1]], dtype=torch.int32).reshape(1, 1, 3, 1, 2)
    return scram.Matches(index, torch.rand(1, 1, 3, 1, 2), (2, 3))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "tiles"}, ValueError, "method must be one of 'auto', 'query'.*got 'tiles'"),
        ({"matches": 0}, ValueError, "matches must be at least 1, got 0"),
        ({"matches": 2.0}, TypeError, "matches must be an int, got float 2.0"),
        ({"matches": True}, TypeError, "matches must be an int, got bool True"),
        ({"separation": -1}, ValueError, "separation must be at least 0, got -1"),
        ({"separation": "1"}, TypeError, "separation must be an int, got str '1'"),
        ({"sweeps": -1}, ValueError, "sweeps must be at least 0, got -1"),
        ({"sweeps": None}, TypeError, "sweeps must be an int, got NoneType None"),
        ({"jumps": 8}, TypeError, r"jumps must be a sequence of ints such as \(8, 4, 2, 1\), got 8"),
        ({"jumps": "8421"}, TypeError, "jumps must be a sequence of ints.*got '8421'"),
        ({"jumps": (8, 0)}, ValueError, r"jumps\[1\] must be at least 1, got 0"),
        ({"jumps": (8, 0.5)}, TypeError, r"jumps\[1\] must be an int, got float 0.5"),
        ({"propagate": "none"}, ValueError, "propagate must be one of 'shift', 'stay', 'both', 'turns', got 'none'"),
        ({"gossip": -3}, ValueError, "gossip must be at least 0, got -3"),
        ({"reach": -1}, ValueError, "reach must be at least 0, got -1"),
        ({"reach": (1, -1)}, ValueError, r"reach\[1\] must be at least 0, got -1"),
        ({"reach": 1.5}, TypeError, "reach must be an int, got float 1.5, or one int per grid axis"),
        ({"random": 1}, TypeError, "random must be True or False, got int 1"),
        ({"start": "warm"}, ValueError, "start must be one of 'auto', 'drawn', 'routed', got 'warm'"),
        ({"start": None}, ValueError, "start must be one of 'auto', 'drawn', 'routed', got None"),
        ({"seed": 1.5}, TypeError, "seed must be None, an int or a 0-d int64 tensor, got float 1.5"),
        ({"seed": True}, TypeError, "seed must be None, an int or a 0-d int64 tensor, got bool True"),
        ({"seed": 2**63}, ValueError, "seed must fit a signed 64-bit integer, got 9223372036854775808"),
        ({"seed": -(2**63) - 1}, ValueError, "seed must fit a signed 64-bit integer"),
        ({"seed": torch.zeros(1).long()}, TypeError, r"seed as a tensor must be 0-d int64, got torch.int64 .*\(1,\)"),
        ({"seed": torch.tensor(1.0)}, TypeError, "seed as a tensor must be 0-d int64, got torch.float32"),
    ],
)
def test_search_checks_itself(change, error, message):
    with pytest.raises(error, match=message):
        scram.Search(**change)
    with pytest.raises(error, match=message):
        dataclasses.replace(scram.Search(), **change)


def test_search_is_frozen_and_takes_edges():
    settings = scram.Search(jumps=[4, 1], sweeps=0, gossip=0, seed=-(2**63))
    assert settings.jumps == (4, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.sweeps = 3
    assert scram.Search(jumps=()).jumps == ()
    assert (scram.Search(reach=[2, 0]).reach, scram.Search(reach=3).reach) == ((2, 0), 3)
    assert scram.Search(jumps=(2**63,)).jumps == (2**31,)  # past every grid
    assert scram.Search(matches=2) == scram.Search(matches=2) != scram.Search(matches=3)


def test_defaults():
    settings = scram.Search()
    assert (settings.method, settings.matches, settings.separation, settings.sweeps) == ("auto", 1, 0, 5)
    assert (settings.jumps, settings.propagate, settings.seed) == ((8, 4, 2, 1), "both", None)
    assert (settings.reach, settings.random) == (None, True)


def test_paper_is_algorithm_1():
    assert scram.Search.paper(3, 2, seed=1) == scram.Search(
        "query", 3, 2, sweeps=8, jumps=(8, 4, 2, 1), propagate="shift", gossip=0, start="drawn", seed=1
    )
    assert scram.Search.paper().matches == 1


def test_matches_print_themselves():
    text = repr(some_matches())
    expected = "Matches(3 queries on grid (3, 1), keys on grid (2, 3), kappa=2, batch=1, heads=1, found 83.3 %, cpu)"
    assert text == str(some_matches()) == expected
    empty = torch.zeros(0, 2, 4, 1)
    assert "0 queries" in repr(scram.Matches(empty.int(), empty, (9,)))


def test_matches_move():
    moved = some_matches().to("meta")
    assert moved.index.device.type == moved.score.device.type == "meta"
    assert moved.key_grid == (2, 3)
    assert torch.equal(some_matches().to(torch.device("cpu")).index, some_matches().index)


def test_matches_survive_a_file(tmp_path):
    before = some_matches()
    before.save(tmp_path / "found.safetensors")
    after = scram.Matches.load(tmp_path / "found.safetensors")
    assert torch.equal(before.index, after.index)
    assert torch.equal(before.score, after.score)
    assert (after.key_grid, after.index.dtype) == ((2, 3), torch.int32)
    sliced = scram.Matches(before.index[..., :1], before.score[..., :1], before.key_grid)
    sliced.save(str(tmp_path / "sliced"))
    assert torch.equal(scram.Matches.load(str(tmp_path / "sliced")).index, sliced.index)


def test_load_refuses_what_is_no_safetensors(tmp_path):
    some_matches().save(tmp_path / "whole")
    contents = {
        "empty": b"",
        "text": b"hello",
        "pickle": pickle.dumps(some_matches().index),
        "cut": (tmp_path / "whole").read_bytes()[:-3],
    }
    torch.save(some_matches().index, tmp_path / "torch")
    contents["torch"] = (tmp_path / "torch").read_bytes()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a safetensors file that Matches.save wrote"):
            scram.Matches.load(tmp_path / name)


def test_load_never_unpickles(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    some_matches().save(tmp_path / "found")
    torch.save(some_matches().index, tmp_path / "torch")
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    scram.Matches.load(tmp_path / "found")
    with pytest.raises(ValueError, match="not a safetensors file"):
        scram.Matches.load(tmp_path / "torch")


INDEX, SCORE = torch.zeros(1, 1, 4, 1, dtype=torch.int32), torch.zeros(1, 1, 4, 1)
OURS = {"format": "scram.Matches", "key_grid": "4"}


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        pytest.param({"index": INDEX, "score": SCORE}, None, id="bare"),
        pytest.param({"index": INDEX, "score": SCORE}, {"format": "other", "key_grid": "4"}, id="foreign"),
        pytest.param({"index": INDEX}, OURS, id="half"),
        pytest.param({"index": INDEX, "score": SCORE}, {"format": "scram.Matches"}, id="no grid"),
        pytest.param({"index": INDEX, "score": SCORE}, {**OURS, "key_grid": "4,x"}, id="bad grid"),
        pytest.param({"index": INDEX, "score": SCORE}, {**OURS, "key_grid": "4,4"}, id="other rank"),
        pytest.param({"index": INDEX, "score": SCORE}, {**OURS, "key_grid": "0"}, id="no extent"),
        pytest.param({"index": INDEX.long(), "score": SCORE}, OURS, id="dtype"),
        pytest.param({"index": INDEX, "score": SCORE[..., 0]}, OURS, id="shape"),
    ],
)
def test_load_refuses_foreign_and_broken_files(tmp_path, tensors, metadata):
    save_file(tensors, tmp_path / "file", metadata=metadata)
    with pytest.raises(ValueError, match=r"file is .*not .*Matches\.save wrote"):
        scram.Matches.load(tmp_path / "file")


def some_routes():
    """Of 35 clusters, for the four tiles of a plane."""
    bits = torch.tensor([[1, 0], [-(2**31), 4], [0, 0], [6, 1]], dtype=torch.int32)
    return scram.Routes(bits.reshape(1, 1, 4, 2), (9, 10), 35)


def test_routes_name_clusters_by_bits():
    routes = some_routes()
    named = [one.nonzero().flatten().tolist() for one in routes.chosen[0, 0]]
    assert named == [[0], [31, 34], [], [1, 2, 32]]
    assert routes.chosen.shape == (1, 1, 4, 35)
    assert repr(routes) == "Routes(4 tiles of queries on grid (9, 10), 35 clusters, batch=1, heads=1, cpu)"
    assert routes.to("meta").bits.is_meta
    assert (routes.to("meta").grid, routes.to("meta").count) == ((9, 10), 35)
    with pytest.raises(dataclasses.FrozenInstanceError):
        routes.count = 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bits": [1]}, TypeError, "bits must be a tensor, got list"),
        ({"bits": some_routes().bits.long()}, ValueError, "bits of routes must be int32 .* got torch.int64"),
        ({"bits": some_routes().bits[0]}, ValueError, r"bits of routes must be int32 \[B, H, T, W\]"),
        ({"grid": (9, 17)}, ValueError, r"\(T, W\) = \(6, 2\) for grid \(9, 17\) and 35 clusters"),
        ({"grid": (0, 9)}, ValueError, "grid"),
        ({"grid": 9}, ValueError, "grid must be"),
        ({"count": 65}, ValueError, r"\(T, W\) = \(4, 3\) for grid \(9, 10\) and 65 clusters"),
        ({"count": 32}, ValueError, r"\(T, W\) = \(4, 1\)"),
        ({"count": 0}, ValueError, "count must be at least 1, got 0"),
        ({"count": 35.0}, TypeError, "count must be an int, got float"),
    ],
    ids=str,
)
def test_routes_check_themselves(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(some_routes(), **change)


def test_attended_is_a_pair():
    out, lse = scram.Attended(torch.zeros(2, 3), torch.ones(2))
    assert out.shape == (2, 3)
    assert lse.shape == (2,)
