"""The public function: modes, seeds, defaults, and that `import scram` is without it."""

import pytest
import torch

import scram
from scram.distributed.api import _chosen
from support import failing_jobs
from support import sharded_jobs as jobs
from support.processes import run_python
from support.sharded import on_ranks, shards_of


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
        return _chosen("auto", shards_of(keys, (rows,) * 2, **call))

    k = torch.ones(1, 1, 2, 2, 4)
    book = scram.cluster(k, k, k, clusters=scram.Clusters(2), impl="reference")
    assert chosen(key_heads=4) == chosen(key_heads=2, causal=True) == "heads"
    assert chosen() == chosen(key_heads=2, matches=1) == chosen(rows=2**12) == "gather"  # 4 GiB
    assert chosen(rows=2**12 + 1) == chosen(key_heads=2, rows=2**12 + 1, extra=1) == "ring"
    assert (
        chosen(key_heads=2, dropout_p=0.1) == chosen(key_heads=2, warm=1) == chosen(key_heads=2, tail=book) == "gather"
    )
    with pytest.raises(ValueError, match=r"needs key heads in multiples of the ranks.* without causal"):
        chosen(causal=True)
    near = scram.Search(reach=2)
    assert chosen(key_heads=2, rows=2**13, search=near) == "heads"
    with pytest.raises(ValueError, match=r"reach=...\) needs the whole grid, got mode='gather'; use mode='heads'"):
        chosen(key_heads=2, warm=1, search=near)


def test_order_and_heads_are_refused_clearly():
    for mode in ("ring", "gather"):
        said = on_ranks(2, failing_jobs.raised, change={"causal": True}, mode=mode)
        assert all(f"mode='{mode}' knows no causal order between shards; use mode='heads'" in x for x in said)
    said = on_ranks(2, failing_jobs.raised, change={}, mode="heads")
    assert all("needs key heads in multiples of the ranks, got 1 heads on 2 ranks" in words for words in said)
    assert all("mode must be one of" in words for words in on_ranks(2, failing_jobs.raised, change={}, mode="tree"))


@pytest.mark.slow
def test_arguments_of_one_mode_are_refused_by_others_clearly():
    pair = (torch.zeros(2, 2, 1, 4, dtype=torch.float64), torch.zeros(2, 2, 1, 3, dtype=torch.float64))
    warm = scram.Matches(torch.zeros(2, 4, 2, 3, 1, dtype=torch.int32), torch.zeros(2, 4, 2, 3, 1), (4, 3))
    k = torch.randn(2, 1, 4, 3, 4, dtype=torch.float64)
    book = scram.cluster(k, k, k[..., :3], clusters=scram.Clusters(count=2, seed=0), impl="reference")
    for mode, change, words in (
        ("heads", {"extra": pair}, "mode='heads' takes no extra; use mode='gather' or 'ring'"),
        ("heads", {"dropout_p": 0.5}, "mode='heads' takes no dropout_p; use mode='gather' or 'ring'"),
        ("ring", {"warm": warm}, "warm is for mode='gather', got mode='ring'; leave it out"),
        ("ring", {"matches": warm}, "matches is for mode='gather', got mode='ring'; leave it out"),
        ("ring", {"tail": book}, "a Codebook as tail is for mode='gather', got mode='ring'; leave it out"),
    ):
        said = on_ranks(2, failing_jobs.raised, change=change, mode=mode)
        assert all(words in one for one in said), said
    short = scram.Matches(warm.index[:, :, :1], warm.score[:, :, :1], (4, 3))
    said = on_ranks(2, failing_jobs.raised, change={"warm": short}, mode="gather", who=1)
    assert all("warm must have one entry per query of this rank, (2, 4, 2, 3), got (2, 4, 1, 3)" in x for x in said)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gather", "ring"])
@pytest.mark.parametrize(("rows", "key_rows"), [((3, 4), (3, 4)), ((2, 2, 0), (4, 0, 1))], ids=str)
def test_extra_keys_are_seen_by_all(mode, rows, key_rows):
    on_ranks(len(rows), jobs.extra_keys_are_exact, rows=rows, key_rows=key_rows, mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_dropout(mode):
    on_ranks(2, jobs.dropout_is_dropout, mode=mode)


@pytest.mark.slow
def test_codebook_and_warm_matches_of_the_whole_grid():
    on_ranks(3, jobs.book_and_warm, rows=(3, 0, 4))


def test_kernels_are_compiled_by_one_rank(tmp_path):
    """The others load what it keeps on the disk; a failure ends the lock, and without locks everyone compiles."""
    pytest.importorskip("fcntl")
    assert sum(on_ranks(3, jobs.compiles, folder=str(tmp_path / "a"))) == 1
    assert sum(on_ranks(3, jobs.compiles, folder=str(tmp_path / "b"), fails=True)) == 2
    assert sum(on_ranks(3, jobs.compiles, folder=str(tmp_path / "c"), locks=False)) >= 1


def test_importing_and_calling_scram_loads_no_part_of_it():
    code = """
        import sys, torch
        before = set(sys.modules)
        import scram
        q = torch.zeros(1, 1, 4, 4, 4)
        scram.attention(q, q, q)
        print([name for name in sys.modules if "distributed" in name and name not in before])
        import scram.distributed
        print(scram.distributed.attention.__name__)
    """
    assert run_python(code).splitlines() == ["[]", "attention"]
