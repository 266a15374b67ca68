"""What many ranks find and return is no worse than what one process does; memory of a ring falls with its ranks."""

import pytest
import torch

import scram
import sharded_jobs as jobs
from photos import projected
from sharded import on_ranks

pytestmark = pytest.mark.slow  # spawns processes

SEEDS, BORDER = 3, 8


def rows_of(ranks, way):
    """out of all ranks [seeds, 64, 64, width]."""
    return torch.cat(on_ranks(ranks, jobs.photo_rows, way=way, seeds=SEEDS), 1)


def test_the_field_has_no_seam():
    """Recall in rows near a border: with a halo that of one process, without less."""
    q, k = projected("astronaut", 64)
    best = (q.flatten(2, 3)[0, 0] @ k.flatten(2, 3)[0, 0].T).max(-1).values.reshape(64, 64)
    near = slice(32 - BORDER, 32 + BORDER)

    def recall(key):
        return float(((q[0, 0] * key).sum(-1) >= best - 1e-5)[:, near].float().mean())

    one = torch.stack([
        scram.attention(q, k, k, search=scram.Search(seed=seed), radius=0, tail=None)[0, 0] for seed in range(SEEDS)
    ])  # fmt: skip
    alone, halo, without = recall(one), recall(rows_of(2, "gather")), recall(rows_of(2, "no halo"))
    assert halo > alone - 0.01, (alone, halo, without)
    assert without < halo - 0.01, (alone, halo, without)


def test_a_ring_is_no_further_from_exact_attention():
    q, k = projected("astronaut", 64)
    exact = scram.exact_attention(q, k, k, scale=32.0).out[0, 0]

    def error(out):
        return float(((out - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())

    how = [{"search": scram.Search(seed=seed), "tail": scram.Clusters(64), "scale": 32.0} for seed in range(SEEDS)]
    alone = error(torch.stack([scram.attention(q, k, k, **one)[0, 0] for one in how]))
    assert error(rows_of(2, "ring")) < alone
    assert error(rows_of(4, "ring")) < alone


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_memory_falls_with_the_ranks(backward):
    """Two ranks hold messages that one does not; from then on twice the ranks have half the memory each."""
    two, four = (max(on_ranks(ranks, jobs.most_memory, points=512, backward=backward)) for ranks in (2, 4))
    assert 0.4 * two < four < 0.65 * two, (two, four)
