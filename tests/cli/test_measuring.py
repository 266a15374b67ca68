"""Measuring calls: forecasts, memory, slopes."""

import pytest
import torch

import scram
from scram.cli import measuring
from scram.cli.measuring import Case


def test_calls_that_would_take_too_long_are_left_out():
    def row(size, seconds):
        return {"kind": "attention", "contender": "x", "size": size, "width": 3, "backward": False, "seconds": seconds}

    known = {"a": row(64, 0.1), "b": row(128, 1.6)}  # grows as N^2
    assert measuring.forecast(Case("attention", "x", 256, 3), known) == pytest.approx(25.6)
    assert measuring.forecast(Case("attention", "y", 256, 3), known) is None
    assert "skipped" in measuring.run(Case("attention", "x", 256, 3), None, known, measuring.Limits(10.0))


def test_masks_of_the_largest_pictures_are_left_out():
    asked = {(case.contender, case.size) for case in measuring.cases((1024, 2048), (64,), "cuda", ("forward", "flex"))}
    assert {("flex strided", 1024), ("strided", 1024), ("strided", 2048)} <= asked
    assert ("flex strided", 2048) not in asked


def test_what_found_no_memory_is_not_tried_larger():
    small = {
        "kind": "attention",
        "contender": "x",
        "size": 64,
        "width": 3,
        "backward": False,
        "failed": "out of memory: 1",
    }
    row = measuring.run(Case("attention", "x", 128, 3), None, {"a": small}, measuring.Limits(10.0))
    assert row == {"failed": "out of memory: already at 64 x 64"}


def test_slopes_are_exponents():
    rows = [{"size": n, "least": 3e-6 * (n * n) ** 1.25, "device": "cpu"} for n in (64, 128, 256)]
    small = {"size": 16, "least": 1.0, "device": "cpu"}  # a call's fixed cost, left out
    assert measuring.slope([small, *rows]) == pytest.approx(1.25)
    assert measuring.slope(rows[:1]) is None


def test_the_first_call_of_a_contender_makes_clusters(monkeypatch):
    """Or the timed calls would compile for them."""
    seen = []
    monkeypatch.setitem(measuring.rivals.ATTENTIONS, "SCRAM", lambda q, k, v, scale: seen.append(q.shape) or v.clone())
    measuring._attention(Case("attention", "SCRAM", 64, 3), measuring.Pictures(*torch.rand(2, 64, 64, 3), "cpu"))
    assert seen[0][2] * seen[0][3] > scram.Clusters().count
    assert set(seen[1:]) == {(1, 1, 64, 64, 3)}
