"""DTensors of batches and heads: the answer of one process, bit for bit on whole numbers, and nothing sent."""

import pytest

from support import dtensor_jobs as jobs
from support.sharded import on_ranks

pytestmark = pytest.mark.slow  # each spawns processes

LAYOUTS = {
    "1": {"place": ["heads"]},
    "2 batch": {"place": ["batch"]},
    "2 heads": {"place": ["heads"]},
    "2 whole": {"place": ["whole"]},
    "3 heads, unequal": {"place": ["heads"]},
    "3 batch, one is empty": {"place": ["batch"]},
    "4 both": {"place": ["batch", "heads"], "shape": (2, 2)},
    "4 heads and whole": {"place": ["heads", "whole"], "shape": (2, 2)},
    "4 heads twice": {"place": ["heads", "heads"], "shape": (2, 2)},
    "4 batch of 3": {"place": ["batch"], "batch": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout):
    for how in (
        ("clusters", "drawn", "tile", "causal", "causal, drawn") if layout == "4 both" else ("clusters", "drawn")
    ):
        on_ranks(int(layout[0]), jobs.attention, how=how, **LAYOUTS[layout])


@pytest.mark.parametrize("place", ["batch", "heads"])
def test_nothing_later_matters_to_the_bit(place):
    for how in ("causal", "causal, drawn", "causal clusters"):
        on_ranks(2, jobs.later_positions, place=place, how=how)


@pytest.mark.parametrize("how", ["clusters", "clusters alone"])
@pytest.mark.parametrize("layout", ["2 batch", "2 heads", "4 both"])
def test_routed_clusters_of_several_tiles(layout, how):
    for key_heads in (4, 2):
        common = {"how": how, "grid": (9, 10), "key_heads": key_heads, "impl": "reference"}
        on_ranks(int(layout[0]), jobs.attention, **LAYOUTS[layout], **common)


@pytest.mark.parametrize("mask", ["keys", "heads"])
def test_masks_and_extra_keys(mask):
    on_ranks(2, jobs.attention, place=["heads"], how="nothing", mask=mask, extra=True)


def test_dropout_has_one_seed():
    """Sent by rank 0, where it is that of one process: no other test of what is sent, then."""
    on_ranks(2, jobs.dropout)


@pytest.mark.parametrize("ranks", [1, 3])
def test_small_grids_are_dense(ranks):
    on_ranks(ranks, jobs.attention, place=["heads"], how="dense", mask="keys")


@pytest.mark.parametrize(
    ("ranks", "key_heads", "how"), [(2, 2, "clusters"), (2, 1, "drawn"), (4, 2, "drawn"), (3, 2, "drawn")]
)
def test_grouped_heads_of_whole_keys(ranks, key_heads, how):
    """Each rank takes the key heads that it needs; their gradients are to be added up."""
    on_ranks(ranks, jobs.attention, place=["heads"], how=how, key_heads=key_heads, keys_whole=True)


def test_grouped_heads_of_keys_that_are_cut():
    on_ranks(2, jobs.attention, place=["heads"], how="clusters", key_heads=2)
    on_ranks(3, jobs.attention, place=["batch"], how="clusters", key_heads=2, batch=4)


@pytest.mark.parametrize("layout", ["1", "2 heads", "3 batch, one is empty", "4 both"])
def test_stages(layout):
    for mask in ("keys", "heads"):
        on_ranks(int(layout[0]), jobs.stages, mask=mask, **LAYOUTS[layout])


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_seed_is_sent(ranks):
    on_ranks(ranks, jobs.one_seed)


@pytest.mark.parametrize("name", ["search", "dense", "kept"])
def test_modules(name):
    import scram

    search = {"search": scram.Search(seed=0), "tail": scram.Clusters(count=6, seed=1)}
    on_ranks(2, jobs.module, how={} if name == "dense" else search, keep=name == "kept")


REFUSED = {
    "grid": "q must be placed by Shard(0), along the batch, Shard(1), along the heads, or Replicate() on every "
    "dimension of its mesh, got (Shard(dim=2),)",
    "partial": "q must be placed by Shard(0)",
    "others": "k must be placed as q is, (Shard(dim=1),), or Replicate(), got (Shard(dim=0),)",
    "q whole": "k must be placed as q is, (Replicate(),), or Replicate(), got (Shard(dim=1),)",
    "split keys": "1 key heads do not divide among the ranks that 4 heads of q are cut for; place k by Replicate()",
    "clusters": "no rank has all queries that clusters of a key head need; use Shard(0), tail=scram.DrawnKeys()",
    "plain": "k must be a DTensor as q is, got Tensor",
    "plain with gradients": "extra must be a DTensor as q is where gradients reach it",
    "mask": "key_mask must be placed by Shard(0), along the batch, or Replicate()",
    "argument": "attention() has no argument attn_mask; use key_mask=",
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused(change):
    assert all(REFUSED[change] in words for words in on_ranks(2, jobs.refused, change=change))


def test_a_compiled_function_runs_the_call_as_it_is():
    on_ranks(2, jobs.compiled)
