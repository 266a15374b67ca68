"""What a page holds can be read back: matches of every sweep, features, clusters; within the bytes it may take."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import scram
from scram.explorer.contents import Attention, Channels, raster_width, stored, thinned
from scram.explorer.pack import unpacked


def attention(heads=2, key_heads=2, grid=(12, 17), matches=3, sweeps=3):
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, *grid, 8, generator=noise) for h in (heads, key_heads, key_heads))
    found = [scram.search(q, k, search=scram.Search(matches=matches, sweeps=t, seed=0)) for t in range(sweeps + 1)]
    book = scram.cluster(q, k, v, clusters=scram.Clusters(count=40, keys=30, seed=0), scale=1.0)
    routes = scram.route(q, k, book)
    flat = (x[0].flatten(1, -2).double() for x in (k, v))
    return Attention(q[0].double(), *flat, found, book, routes, ())


def held(given, most=10**6, coarsest=math.inf):
    made = stored(given, Channels.of(*given[:3]), most, coarsest)
    return made, unpacked(made.packed.entries, made.packed.text())


@pytest.mark.parametrize("kept", [3, 1])
def test_matches_of_every_sweep_come_back(kept, monkeypatch):
    if kept == 1:
        monkeypatch.setattr("scram.explorer.contents.MATCHES_SHARE", 0.0)
    given = attention()
    made, arrays = held(given)
    assert made.about["early_matches"] == kept
    places = arrays["matches"]
    for sweep, found in enumerate(given.sweeps):
        last = sweep == 3
        block = 0 if last else 2 * 2 * (3 + (2 - sweep) * kept)
        for n in range(3 if last else kept):
            for head in range(2):
                plane = block + 2 * (2 * ((3 if last else kept) - 1 - n) + head)
                index = np.maximum(places[plane].astype(int) * 17 + places[plane + 1], -1)
                assert (index == found.index[0, head, ..., n].flatten().numpy()).all()


def test_features_give_the_scores_and_say_how_far_off():
    given = attention(heads=4)
    made, arrays = held(given)
    for head, about in enumerate(made.about["heads"]):
        g, step = head // 2, about["step"]
        scores = arrays[f"q{head}"].T.astype(float) @ arrays[f"k{g}"].astype(float) * step**2
        scores += arrays["base"][head][:, None] * made.about["base_step"]
        exact = (given.q[head].flatten(0, -2) @ given.k[g].T).numpy()
        assert np.sqrt(np.square(scores - exact).mean()) < 1.3 * made.about["score_error"]
        share = torch.from_numpy(scores).softmax(-1) - torch.from_numpy(exact).softmax(-1)
        assert about["map_error"] == pytest.approx(float(0.5 * share.abs().sum(-1).mean()), rel=0.2)


def test_centers_are_means_of_the_stored_keys():
    made, arrays = held(attention())
    step, value_step = made.about["heads"][1]["step"], made.about["heads"][1]["value_step"]
    inside = arrays["label"][1] == 5
    assert inside.sum() == arrays["sizes"][1, 5] > 0
    center = arrays["centers1"][:, 5] * made.about["center_steps"][1]
    mean = arrays["means1"][:, 5] * made.about["mean_steps"][1]
    np.testing.assert_allclose(center, step * arrays["k1"][:, inside].mean(-1), atol=step)
    np.testing.assert_allclose(mean, value_step * arrays["v1"][:, inside].mean(-1), atol=value_step)


def test_slopes_and_spreads_in_the_stored_coordinates():
    given = attention(heads=4)
    made, arrays = held(given)
    book, channels = given.codebook, Channels.of(*given[:3])
    for head, about in enumerate(made.about["heads"]):
        g = head // 2
        own = arrays[f"q{head}"].T.astype(float) * about["step"] @ arrays[f"slope{g}"]
        whole = given.q[head].flatten(0, -2) @ book.slope[0, g].double() @ channels.principal[g].axes
        assert np.abs(own - whole.numpy()).max() < 0.1 * whole.abs().max()
        spread = (given.q[head].flatten(0, -2).square() * book.variance[0, g]).sum(-1)
        stored_root = arrays["spread"][head] * made.about["spread_step"]
        np.testing.assert_allclose(stored_root, spread.sqrt(), atol=made.about["spread_step"])
    np.testing.assert_array_equal(arrays["spreads"], book.spreads[0])


def test_without_terms_nothing_is_stored_for_them():
    given = attention()
    book = replace(given.codebook, slope=None, second_order=False)
    _, arrays = held(given._replace(codebook=book, routes=None, sweeps=()))
    assert not {"slope0", "spreads", "routes", "matches"} & set(arrays)


def test_routes_come_back_bit_by_bit():
    given = attention()
    _, arrays = held(given)
    chosen = given.routes.chosen[0]  # [H, T, C]
    assert chosen[..., 33:].any()
    words = arrays["routes"].reshape(2, 4, -1)
    for cluster in range(40):
        shown = words[:, cluster // 16] >> cluster % 16 & 1
        assert (shown == chosen[..., cluster].numpy()).all()


def test_fewer_bytes_are_coarser_and_refused_when_too_coarse():
    given = attention()
    fine, _ = held(given)
    coarse, _ = held(given, len(fine.packed) // 2)
    assert len(coarse.packed) < 0.7 * len(fine.packed)
    assert coarse.about["score_error"] > fine.about["score_error"]
    assert coarse.about["map_error"] > fine.about["map_error"]
    assert coarse.about["values_kept"] < fine.about["values_kept"] <= 1
    assert stored(given, Channels.of(*given[:3]), len(fine.packed) // 2, fine.about["score_error"]) is None


def test_every_second_query_of_each_axis():
    given = attention()
    less = given.every(2, one=False)
    assert less.q.shape == (2, 6, 9, 8)
    assert (less.q[:, 1, 2] == given.q[:, 2, 4]).all()
    assert (less.sweeps[-1].index[0, :, 1, 2] == given.sweeps[-1].index[0, :, 2, 4]).all()
    channels = Channels.of(*given[:3])
    some = channels.every(2, (12, 17))
    assert (some.queries[1][:, 1 * 9 + 2] == channels.queries[1][:, 2 * 17 + 4]).all()
    assert some.keys is channels.keys


def test_pictures_of_queries_are_thinned_with_them_but_not_in_one_pane():
    picture = torch.zeros(12, 17, 3, dtype=torch.uint8)
    given = attention()._replace(pictures=[picture, picture])
    assert [tuple(x.shape) for x in given.every(2, one=False).pictures] == [(6, 9, 3), (12, 17, 3)]
    assert [tuple(x.shape) for x in given._replace(pictures=[picture]).every(2, one=True).pictures] == [(12, 17, 3)]


def test_lines_of_a_picture():
    assert [raster_width(grid) for grid in ((1,), (100,), (5, 9), (3, 5, 9), (40_000, 2))] == [2, 13, 9, 9, 358]
    assert thinned(torch.arange(12).reshape(1, 6, 2), 3, 1).tolist() == [[[0, 1], [6, 7]]]
