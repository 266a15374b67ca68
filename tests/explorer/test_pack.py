"""Planes of whole numbers come back as they were, and take about as many bytes as estimated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scram.explorer.pack import BEFORE, LEFT, PLAIN, Packed, entropy, estimated_bytes, rounded, some, unpacked


def back_and_forth(planes, back=0):
    packed = Packed()
    packed.add("other", np.zeros((1, 3), np.int16))
    packed.add("x", planes, back)
    packed.add_floats("f", np.array([[1.5, -2.0]]))
    found = unpacked(packed.entries, packed.text())
    assert found["f"].tolist() == [[1.5, -2.0]]
    assert found["x"].dtype == np.int16
    assert (found["x"] == planes).all()
    return packed.entries[1]


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=7, max_size=7), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_any_planes_come_back(rows, back):
    back_and_forth(np.array(rows, np.int16), back)


def test_each_plane_is_stored_in_the_form_that_packs_best():
    rng = np.random.default_rng(0)
    noise = rng.integers(-90, 90, 4096)
    smooth = np.cumsum(rng.integers(-1, 2, 4096))
    entry = back_and_forth(np.stack([noise, smooth, noise + rng.integers(0, 2, 4096)]).astype(np.int16), back=2)
    assert entry["how"] == [PLAIN, LEFT, BEFORE]


def test_two_packs_become_one():
    first, second = Packed(), Packed()
    first.add("a", np.array([[1, 2]], np.int16))
    second.add("b", np.array([[-3, 4]], np.int16))
    first.append(second)
    found = unpacked(first.entries, first.text())
    assert (found["a"].tolist(), found["b"].tolist()) == ([[1, 2]], [[-3, 4]])
    assert len(first) == sum(entry["bytes"] for entry in first.entries)


@pytest.mark.parametrize("step", [0.01, 0.3, 3.0])
def test_the_estimate_is_near_the_truth(step):
    x = np.random.default_rng(1).standard_normal((4, 30_000)).astype(np.float32) * np.array([[8], [2], [1], [0.2]])
    packed = Packed()
    packed.add("x", rounded(x, step))
    assert len(packed) == pytest.approx(estimated_bytes(x, step), rel=0.12)


def test_entropy_of_two_equal_halves_is_one_bit():
    assert entropy(np.array([0, 7] * 8, np.uint16)) == 1
    assert entropy(np.array([0, 512] * 8, np.uint16)) == 1


def test_rounding_and_sampling():
    assert rounded(np.array([0.24, -0.26, 1e9]), 0.5).tolist() == [0, -1, 32767]
    assert some(np.zeros((3, 100))).shape == (3, 100)
    assert some(np.zeros((3, 100_000))).shape == (3, 4096)
