"""A small vision transformer under DDP and FSDP2: it trains, and what it keeps is saved on 2 ranks and loaded on 4."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

import scram
from scram.distributed import KeptMatches
from support import training_jobs as jobs
from support.sharded import on_ranks


def kept_model():
    """A layer that keeps matches and clusters of one call."""
    clusters = scram.Clusters(count=4, keys=5, seed=0)
    model = torch.nn.Sequential(
        scram.nn.GridAttention(
            8, 2, impl="reference", keep_matches=True, tail=clusters, search=scram.Search(sweeps=1, seed=0)
        )
    ).eval()
    with torch.no_grad():
        model(torch.randn(2, 3, 4, 8))
    return model


BOOK = {"score": "dot", "scale": 0.5, "keys": 4, "second_order": True}


def odd_settings(**changes):
    return json.dumps({"key_grid": [3, 4], "book": BOOK} | changes)


ODD = {
    "index": ("index", torch.zeros(2, 2, 3, 4, 1)),
    "score of another shape": ("score", torch.zeros(2, 2, 3, 4, 2)),
    "another batch": ("score", torch.zeros(3, 2, 3, 4, 1)),
    "labels": ("book_label", torch.full((2, 2, 3, 4), 4, dtype=torch.int32)),
    "sizes": ("book_sizes", torch.full((2, 2, 4), -1, dtype=torch.int32)),
    "a short slope": ("book_slope", torch.ones(2, 2, 3, 4)),
    "variances": ("book_variance", torch.full((2, 2, 4), -1.0)),
    "no spreads": ("book_spreads", None),
    "more": ("book_more", torch.ones(2, 2, 3)),
    "no clusters": ("book_label", None),
    "no score": ("score", None),
    "no settings": ("settings", "{}"),
    "deep settings": ("settings", "[" * 100_000),
    "a grid": ("settings", odd_settings(key_grid=[3, "x"])),
    "no codebook": ("settings", json.dumps({"key_grid": [3, 4]})),
    "a scale": ("settings", odd_settings(book=BOOK | {"scale": -1.0})),
    "routed keys": ("settings", odd_settings(book=BOOK | {"keys": -1})),
    "a radius": ("settings", odd_settings(book=BOOK | {"radius": 3})),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["whole", *ODD])
def test_what_is_no_kept_matches_is_refused(tmp_path, name):
    """A checkpoint with one entry changed, without ranks."""
    model = kept_model()
    state = KeptMatches(model).state_dict()
    if name != "whole":
        field, value = ODD[name]
        state[f"scram.kept/0/0/{field}"] = value
        state = {entry: x for entry, x in state.items() if x is not None}
    dcp.save({"kept": state}, checkpoint_id=tmp_path, no_dist=True)

    def load():
        dcp.load({"kept": KeptMatches(model, saved=tmp_path)}, checkpoint_id=tmp_path, no_dist=True)

    before = model[0].matches.index.clone()
    book = model[0].codebook
    if name == "whole":
        model[0].reset()
        load()
        assert torch.equal(model[0].matches.index, before)
        jobs.same_book(model[0].codebook, book)
        return
    with pytest.raises(ValueError, match="no kept matches of layer '0' that KeptMatches saved"):
        load()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_saved_on_four_ranks_and_loaded_on_one(tmp_path, plans):
    how = {"folder": str(tmp_path / "saved"), "way": "ddp", "plans": plans}
    kept = on_ranks(4, jobs.save, rows=(1, 1, 1, 1), **how)
    assert on_ranks(1, jobs.load, kept_by_ranks=kept, total=4, **how) == [True]


@pytest.mark.slow
def test_what_does_not_fit_is_said(tmp_path):
    for words in on_ranks(2, jobs.refused, folder=str(tmp_path)):
        assert "without holds no kept matches; save it with KeptMatches(model), or load without them" in words[0]
        assert "has kept matches of ['blocks.0.attention', 'blocks.1.attention'], which are no searching" in words[1]
        assert words[2].startswith("to load kept matches, pass saved=, the checkpoint's folder")


@pytest.mark.slow
def test_unlike_calls_start_without(tmp_path):
    for words in on_ranks(2, jobs.unlike, folder=str(tmp_path / "saved")):
        assert words == [
            f"ranks kept matches of unlike calls in layer 'blocks.{n}.attention': it starts without" for n in (0, 1)
        ]


@pytest.mark.slow
def test_read_under_fsdp():
    on_ranks(2, jobs.reads_under_fsdp)
