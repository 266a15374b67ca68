"""Checks of whole calls: `attention` checks what its parts check, and a valid kind of call only once."""

import pytest
import torch

import scram
from scram.core import resolve as resolving
from scram.core.resolve import Request, resolve
from scram.core.tails.base import Inputs

Q = torch.zeros(2, 4, 5, 6, 8)
K = torch.zeros(2, 2, 7, 3, 8)
V = torch.zeros(2, 2, 7, 3, 9)
MASK = torch.ones(2, 7, 3, dtype=torch.bool)
META = torch.device("meta")
PAIR = (torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 9))


@pytest.mark.parametrize("kind", [Request, Inputs])
def test_what_a_compiler_reads_has_no_properties(kind):
    """torch before 2.11 compiles no property of a tuple."""
    own = set(vars(kind)) - set(kind._fields)
    assert not [name for name in own if isinstance(vars(kind)[name], property)]


def test_attention_checks_what_its_parts_check():
    for how, message in (
        ({"radius": -1}, "radius must be at least 0"),
        ({"key_mask": MASK.float()}, "key_mask must be bool"),
        ({"warm": 3}, "warm must be a scram.Matches"),
        ({"impl": "fast"}, "impl must be one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            scram.attention(Q, K, V, **{"search": scram.Search(sweeps=0), "impl": "reference", **how})
    with pytest.raises(ValueError, match=r"v must be \[B, Hk"):
        scram.attention(Q, K, V[:, :1], impl="reference")


WARM = scram.Matches(torch.zeros(1, 2, 5, 6, 1, dtype=torch.int32), torch.zeros(1, 2, 5, 6, 1), (5, 6))


@pytest.mark.parametrize("tail", [None, "auto", scram.Clusters(count=4, keys=8)], ids=str)
def test_warm_matches_without_a_search_raise(tail):
    q = Q[:1, :2]
    module = scram.nn.GridAttention(8, 2, search=None, tail=tail)
    for call in (
        lambda: scram.attention(q, q, q, search=None, tail=tail, warm=WARM),
        lambda: module(torch.zeros(1, 5, 6, 8), warm=WARM),
    ):
        with pytest.raises(ValueError, match=r"warm needs a search.*got search=None; pass search=scram.Search"):
            call()


def attention(q=Q[:1, :2], k=Q[:1, :2], v=Q[:1, :2], **how):
    return scram.attention(q, k, v, search=scram.Search(sweeps=0, seed=0), impl="reference", **how)


def test_a_valid_kind_of_call_is_checked_once(monkeypatch):
    monkeypatch.setattr(resolving, "_valid", {})
    monkeypatch.setattr(resolving, "MOST_REMEMBERED", 2)
    seen = []
    check = resolving._check
    monkeypatch.setattr(resolving, "_check", lambda *given: seen.append(given[3].causal) or check(*given))
    for how in ({}, {}, {"causal": True}, {"causal": True}, {}, {"radius": 2}, {}):
        attention(**how)
    assert seen == [False, True, False, False]  # the third kind is one too many: all are forgotten


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": Q[:1, :2, 1:], "causal": True},
        {"v": Q[:1, :2, 1:]},
        {"v": Q[:1, :2].double()},
        {"v": Q[:1, :2].to(META)},
        {"v": Q[:1, :2].to_sparse()},
        {"v": Q[:1, :2].numpy()},
        {"causal": 1},
        {"radius": True},
        {"radius": -1},
        {"radius": [1, 1, 1]},
        {"scale": True},
        {"scale": -1.0},
        {"dropout_p": 1.0},
        {"weight": ["softmax"]},
        {"score": "sum"},
        {"key_mask": MASK},
        {"extra": PAIR},
    ],
    ids=str,
)
def test_a_call_like_a_valid_one_is_refused(wrong):
    attention(causal=True, scale=1.0)
    with pytest.raises((TypeError, ValueError), match=r"must|needs"):
        attention(**{"causal": True, "scale": 1.0, **wrong})


def test_a_callable_is_not_kept(monkeypatch):
    monkeypatch.setattr(resolving, "_valid", {})
    scram.attention(Q, K, V, score=lambda q, k: (q * k).sum(-1))
    assert resolving._valid == {}
    scram.attention(Q, K, V)
    assert len(resolving._valid) == 1


def test_a_resolved_call_names_radii_and_engines():
    resolved = resolve(Q, K, V, Request(radius=2))
    assert resolved.radius == (2, 2)
    assert (resolved.search_engine.name, resolved.engine.name) == ("numba", "numba")
    assert resolved.dense  # a small grid
    assert resolved.tail == resolving.CLUSTERS["cpu"]
    assert resolved.search == resolving.SEARCHES["cpu"]


@pytest.mark.parametrize(
    ("said", "dense"),
    [
        ({}, True),
        ({"search": None}, True),
        ({"search": None, "tail": None}, True),
        ({"search": None, "tail": None, "impl": "reference"}, True),
        ({"search": scram.Search()}, False),
        ({"tail": None}, False),
        ({"impl": "reference"}, False),
        ({"keeps_matches": True}, False),
        ({"weight": "relu"}, False),
        ({"search": None, "tail": scram.Clusters()}, False),
        ({"search": None, "tail": "auto", "impl": "reference"}, True),
    ],
    ids=str,
)
def test_what_is_dense(said, dense):
    """One rule for functions, modules, patches, plans, DTensors and shards."""
    assert resolve(Q, K, V, Request(**said)).dense is dense


def test_caches_can_be_emptied():
    scram.attention(Q, K, V)
    assert resolving._valid
    resolving.clear_caches()
    assert not resolving._valid
