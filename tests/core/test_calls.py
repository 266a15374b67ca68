"""The calls: what `ops` relies on when it makes an operator of one."""

import typing

import pytest
import torch

from scram.core import calls

CALLS = [one for name, one in vars(calls).items() if name.endswith("Call")]
TENSORS = (torch.Tensor, torch.Tensor | None)


def test_the_calls_are_seen():
    names = {"SearchCall", "AttendCall", "DrawnTailCall", "SampleCall", "ClusterCall", "ClusterTailCall"}
    names |= {"RouteCall", "RoutedStartCall", "EarlierCall", "DecodeCall", "WindowScoresCall"}
    assert {call.__name__ for call in CALLS} == names


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_tensors_come_first_and_a_callable_score_last(call):
    hints = typing.get_type_hints(call)
    assert list(hints) == list(call._fields)
    kinds = [hint in TENSORS for hint in hints.values()]
    assert kinds == sorted(kinds, reverse=True)
    assert call._fields[0] == "q"
    if "score" in call._fields:  # clusters and lookups take no callable
        assert (call._fields[-1], call._field_defaults) == ("score", {"score": None})
    else:
        assert call in (
            *(calls.ClusterCall, calls.ClusterTailCall, calls.RouteCall, calls.RoutedStartCall),
            *(calls.EarlierCall, calls.DecodeCall, calls.WindowScoresCall),
        )


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_cannot_be_changed(call):
    made = call(*range(len(call._fields)))
    with pytest.raises(AttributeError):
        made.q = None


def test_gradients_are_named_after_the_tensors_they_belong_to():
    assert set(calls.AttendGrads._fields) < set(calls.AttendCall._fields)
    assert set(calls.ClusterGrads._fields) < set(calls.ClusterCall._fields)
    assert set(calls.ClusterTailGrads._fields) < set(calls.ClusterTailCall._fields)
    for call in (calls.DrawnTailCall, calls.SampleCall):
        assert set(calls.TailGrads._fields) < set(call._fields)
