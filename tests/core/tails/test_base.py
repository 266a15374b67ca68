"""The protocol of a tail: what every one defines, and what arguments are taken for one."""

import pytest
import torch

import scram
from scram.core.tails.base import NO_TAIL, Kind, Tail, as_tail, tails_by_name
from support.processes import run_python

X = torch.randn(1, 1, 6, 7, 4)
BOOK = scram.cluster(X, X, X, clusters=scram.Clusters(count=5, seed=0))
TAILS = [NO_TAIL, scram.Clusters(), BOOK, scram.DrawnKeys(), scram.Snis(), scram.MetropolisHastings()]


def named(tail):
    return type(tail).__name__


def test_every_tail_is_in_the_list():
    def below(kind):
        return {kind, *(x for one in kind.__subclasses__() for x in below(one))}

    tails_by_name()  # loads every file
    classes = {kind for kind in below(Tail) if kind.__name__ not in ("Tail", "Sampled")}
    assert {kind for kind in classes if kind.__module__.startswith("scram.")} == {type(tail) for tail in TAILS}


@pytest.mark.slow
def test_the_list_is_the_same_whatever_was_used_before():
    """Messages name every tail, and a stored plan may hold one whose file nobody has imported yet."""
    code = "from scram.core.tails.base import tails_by_name; print(*tails_by_name())"
    assert run_python(code).split() == list(tails_by_name())


@pytest.mark.parametrize("tail", TAILS, ids=named)
def test_every_tail_defines_the_protocol(tail):
    assert isinstance(tail.describe(), str)
    assert 0 <= tail.visited(42, 42) <= 42
    tail.check(Kind("softmax", False, "dot", extra=False, dropout_p=0.0))
    part = tail.of_part(3)
    assert type(part) is type(tail)
    assert not hasattr(tail, "seed") or not tail.joins_windows or int(part.seed_tensor) == 3
    assert as_tail(tail, NO_TAIL, windows=False) is tail


@pytest.mark.parametrize("tail", TAILS[1:], ids=named)
def test_a_tail_is_for_softmax(tail):
    with pytest.raises(ValueError, match="weight='softmax'"):
        tail.check(Kind("mean", False, "dot", extra=False, dropout_p=0.0))


@pytest.mark.parametrize("tail", TAILS, ids=named)
def test_only_tails_that_attend_windows_are_tails_of_attention(tail):
    if tail.joins_windows:
        assert as_tail(tail, NO_TAIL) is tail
    else:
        names = ", ".join(f"scram.{name}" for name in sorted(named(x) for x in TAILS[1:] if x.joins_windows))
        with pytest.raises(TypeError, match=f"one of {names}, got"):
            scram.attention(X, X, X, tail=tail)


@pytest.mark.parametrize("wrong", ["clusters", 3, scram.Search(), scram.Clusters], ids=str)
def test_other_arguments_are_refused(wrong):
    with pytest.raises(TypeError, match="tail must be"):
        as_tail(wrong, NO_TAIL)


def test_none_and_auto():
    default = scram.Clusters()
    assert as_tail(None, default) is NO_TAIL
    assert as_tail("auto", default) is default
