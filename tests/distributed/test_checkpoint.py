"""A small vision transformer under DDP and FSDP2: it trains, and what it keeps is saved on 2 ranks and loaded on 4."""

import pytest
import torch

import scram
import training_jobs as jobs
from sharded import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_trains_as_one_process(way, whole):
    """To rounding, and so alike under both; the whole batch at once where windows hold every key."""
    losses = on_ranks(2, jobs.trains, way=way, whole=whole)
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.8 * losses[0][0]


@pytest.fixture(scope="module")
def plans():
    q = torch.randn(1, 1, 8, 8, 4, generator=torch.Generator().manual_seed(0))
    return scram.Plans(
        {
            f"blocks.{n}.attention": scram.tune(q, q, q, error=error, impl="reference")
            for n, error in enumerate((0.05, 0.5))
        }
    )


@pytest.mark.parametrize(
    ("way", "rows", "tail"),
    [("ddp", (2, 2), "clusters"), ("fsdp", (2, 2), "clusters"), ("ddp", (3, 2), "none"), ("fsdp", (0, 3), "clusters")],
    ids=["ddp", "fsdp", "uneven", "empty"],
)
def test_kept_matches_and_plans_go_from_two_ranks_to_four(tmp_path, plans, way, rows, tail):
    how = {"folder": str(tmp_path / "saved"), "way": way, "plans": plans, "tail": tail}
    kept = on_ranks(2, jobs.save, rows=rows, **how)
    warm = on_ranks(4, jobs.load, kept_by_ranks=kept, total=sum(rows), **how)
    assert way == "fsdp" or any(warm)  # a cold start finds others


def test_saved_on_four_ranks_and_loaded_on_one(tmp_path, plans):
    how = {"folder": str(tmp_path / "saved"), "way": "ddp", "plans": plans}
    kept = on_ranks(4, jobs.save, rows=(1, 1, 1, 1), **how)
    assert on_ranks(1, jobs.load, kept_by_ranks=kept, total=4, **how) == [True]


def test_what_does_not_fit_is_said(tmp_path):
    for words in on_ranks(2, jobs.refused, folder=str(tmp_path)):
        assert "without holds no kept matches; save it with KeptMatches(model), or load without them" in words[0]
        assert "has kept matches of ['blocks.0.attention', 'blocks.1.attention'], which are no searching" in words[1]
        assert words[2].startswith("to load kept matches, pass saved=, the checkpoint's folder")


def test_unlike_calls_start_without(tmp_path):
    for words in on_ranks(2, jobs.unlike, folder=str(tmp_path / "saved")):
        assert words == [
            f"ranks kept matches of unlike calls in layer 'blocks.{n}.attention': it starts without" for n in (0, 1)
        ]


def test_read_under_fsdp():
    on_ranks(2, jobs.reads_under_fsdp)
