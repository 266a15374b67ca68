"""Products of matrices and transposed copies: any number of rows, any depth, rows that are listed, NaN that is out."""

import numba
import numpy as np
import pytest

from scram._compat.numba import LANES
from scram.engines.cpu import products

DTYPES = (np.float32, np.float64)
RANDOM = np.random.default_rng(0)


def drawn(*shape, dtype=np.float64):
    return RANDOM.standard_normal(shape).astype(dtype)


def listed(rows, number):
    return RANDOM.permutation(rows)[:number].astype(np.int32)


def called(function):
    @numba.njit
    def run(*arguments):
        function(*arguments)

    return run


multiply = called(products.multiply)
add_columns = called(products.add_columns)
add_rows = called(products.add_rows)
add_guarded_columns = called(products.add_guarded_columns)
add_guarded_rows = called(products.add_guarded_rows)
to_columns = called(products.to_columns)
to_rows = called(products.to_rows)


def near(made, true):
    eps = np.finfo(made.dtype).eps
    np.testing.assert_allclose(made, true, rtol=0, atol=200 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("number", "depth", "size"), [(8, 8, 64), (7, 5, 16), (1, 1, 48), (3, 9, 80), (6, 0, 32), (0, 4, 16), (13, 33, 144)]
)
def test_rows_times_columns(dtype, number, depth, size):
    a, b, c = drawn(20, depth, dtype=dtype), drawn(depth + 2, size, dtype=dtype), drawn(number + 3, size, dtype=dtype)
    at, true = listed(15, number), c.copy()
    true[1 : 1 + number] = a[5 + at] @ b[2:]
    multiply(a, 5, np.r_[np.int32(99), at], 1, number, b, 2, c, 1)
    near(c, true)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "number", "size"), [(8, 8, 64), (7, 5, 16), (1, 1, 48), (3, 9, 80), (6, 0, 32), (13, 15, 144)]
)
def test_sums_of_listed_rows(dtype, width, number, size):
    a, b, c = drawn(20, width, dtype=dtype), drawn(number + 2, size, dtype=dtype), drawn(width + 3, size, dtype=dtype)
    at = listed(15, number)
    true = c.copy()
    true[1 : 1 + width] += a[5 + at].T @ b[2:]
    for add in (add_columns, add_guarded_columns):
        made = c.copy()
        add(a, 5, np.r_[np.int32(99), at], 1, number, b, 2, made, 1)
        near(made, true)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("number", "depth", "size"), [(8, 64, 64), (7, 5, 16), (1, 1, 48), (3, 0, 80), (0, 4, 144)])
def test_sums_that_go_to_listed_rows(dtype, number, depth, size):
    a, b, c = drawn(number + 2, 64, dtype=dtype), drawn(depth, size + 3, dtype=dtype), drawn(20, size, dtype=dtype)
    at = listed(15, number)
    true = c.copy()
    true[5 + at] += a[2:, :depth] @ b[:, 3:]
    for add in (add_rows, add_guarded_rows):
        made = c.copy()
        add(a, 2, depth, b, 3, made, 5, np.r_[np.int32(99), at], 1, number)
        near(made, true)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_has_no_weight_may_be_anything(bad):
    every = np.arange(4, dtype=np.int32)
    a, b, c = drawn(4, 3), drawn(4, 16), np.zeros((3, 16))
    a[2], b[2, :8] = bad, 0
    add_guarded_columns(a, 0, every, 0, 4, b, 0, c, 0)
    assert np.isfinite(c[:, :8]).all()
    assert not np.isfinite(c[:, 8:]).any()
    a, b, c = drawn(4, 16), drawn(5, 16), np.zeros((4, 16))
    b[1], a[:2, 1] = bad, 0
    add_guarded_rows(a, 0, 5, b, 0, c, 0, every, 0, 4)
    assert np.isfinite(c[:2]).all()
    assert not np.isfinite(c[2:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("number", "width"), [(64, 64), (16, 16), (17, 33), (5, 3), (0, 7), (63, 1), (48, 96)])
def test_rows_as_columns_and_back(dtype, number, width):
    x, y, at = drawn(90, width, dtype=dtype), np.full((width + 2, 64), 7, dtype), listed(80, number)
    to_columns(x, 5, np.r_[np.int32(99), at], 1, number, y, 1)
    assert (y[1:-1, :number] == x[5 + at].T).all()
    assert (y[1:-1, number:] == 0).all()
    assert (y[0] == 7).all()
    assert (y[-1] == 7).all()
    again = np.full_like(x, 3)
    to_rows(y, 1, again, 5, np.r_[np.int32(99), at], 1, number)
    assert (again[5 + at] == x[5 + at]).all()
    assert (again == 3).all(1).sum() == 90 - number


def test_vectors_of_so_many_elements():
    assert LANES == 16
