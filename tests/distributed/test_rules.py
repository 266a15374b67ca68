"""The operators on DTensors: rules that torch knows, so that nothing is sent."""

import pytest

from scram.distributed.rules import OPERATORS
from support import dtensor_jobs as jobs
from support.sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, {"place": ["batch"]}), (2, {"place": ["heads"]}), (4, {"place": ["heads", "batch"], "shape": (2, 2)})],
    ids=str,
)
def test_every_operator_and_its_gradient(ranks, layout):
    for tested in on_ranks(ranks, jobs.operators, **layout):
        assert tested == sorted(operator.name for operator in OPERATORS)


def test_fewer_key_heads():
    on_ranks(2, jobs.operators, place=["heads"], key_heads=2)
    on_ranks(2, jobs.operators, place=["heads"], heads=6, key_heads=3)  # gathered: 2 and 1 key heads, 3 and 3 heads


def test_without_rows_the_answer_is_still_that_of_one_process():
    """Tensors are gathered then: noise would be that of the wrong rows."""
    on_ranks(2, jobs.operators, place=["heads"], with_rows=False)
