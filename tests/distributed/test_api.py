"""The public function: modes, seeds, defaults, and that `import scram` is without it."""

from types import SimpleNamespace

import pytest
import torch

import sharded_jobs as jobs
from processes import run_python
from scram.distributed.api import _chosen
from sharded import on_ranks


@pytest.mark.parametrize("mode", ["gather", "ring", "heads"])
def test_one_rank_is_the_plain_call(mode):
    for tail in (None, "clusters", "drawn"):
        on_ranks(1, jobs.one_rank_is_scram_attention, mode=mode, tail=tail)


@pytest.mark.parametrize("mode", ["gather", "ring", "heads"])
def test_the_seed_is_that_of_rank_0(mode):
    on_ranks(2, jobs.one_seed_for_all, mode=mode)


def test_defaults_are_exact_on_small_grids():
    on_ranks(3, jobs.auto_works, heads=2)  # gather
    on_ranks(2, jobs.auto_works, heads=2)  # heads


def test_auto_takes_the_first_that_fits():
    def chosen(key_heads=1, rows=4, **call):
        keys = torch.empty(1).expand(1, key_heads, rows, 2**10, 64)
        said = SimpleNamespace(**{"matches": None, "causal": False, **call})
        return _chosen(
            "auto", SimpleNamespace(call=said, k=keys, v=keys, keys=(rows,) * 2, ranks=SimpleNamespace(size=2))
        )

    assert chosen(key_heads=4) == chosen(key_heads=2, causal=True) == "heads"
    assert chosen() == chosen(key_heads=2, matches=1) == chosen(rows=2**12) == "gather"  # 4 GiB
    assert chosen(rows=2**12 + 1) == "ring"
    with pytest.raises(ValueError, match=r"needs key heads in multiples of the ranks.* without causal"):
        chosen(causal=True)


def test_order_and_heads_are_refused_clearly():
    for mode in ("ring", "gather"):
        said = on_ranks(2, jobs.raised, change={"causal": True}, mode=mode)
        assert all(f"mode='{mode}' knows no causal order between shards; use mode='heads'" in x for x in said)
    said = on_ranks(2, jobs.raised, change={}, mode="heads")
    assert all("needs key heads in multiples of the ranks, got 1 heads on 2 ranks" in words for words in said)
    assert all("mode must be one of" in words for words in on_ranks(2, jobs.raised, change={}, mode="tree"))


def test_importing_scram_loads_no_part_of_it():
    code = """
        import sys, torch
        before = set(sys.modules)
        import scram
        print([name for name in sys.modules if "distributed" in name and name not in before])
        import scram.distributed
        print(scram.distributed.attention.__name__)
    """
    assert run_python(code).split("\n")[:2] == ["[]", "attention"]
