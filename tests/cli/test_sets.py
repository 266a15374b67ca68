"""Queries and keys that figures run on."""

import numpy as np
import torch

import scram
from scram.cli import sets
from scram.cli.arguments import TRAINED


def test_features_are_unit_vectors_on_the_grid_of_the_photograph():
    for made in (sets.matching, sets.noise):
        q, k, scale = made(16)
        assert q.shape[:3] == k.shape[:3] == (1, 1, 16)
        assert q.shape[-1] == k.shape[-1] == sets.WIDTH
        assert scale == 100
        for x in (q, k):
            torch.testing.assert_close(x.norm(dim=-1), torch.ones(x.shape[:-1]))


def test_noise_has_no_coherence_and_photographs_have():
    def alike(x):
        return float((x[:, :, :, 1:] * x[:, :, :, :-1]).sum(-1).mean())

    assert alike(sets.noise(16)[0]) < 0.1 < 0.3 < alike(sets.matching(16)[0])


def test_projected_queries_share_keys():
    q, k, _ = sets.projected(16)
    own = scram.exact_search(q, k).index.unique().numel()
    pairs = scram.exact_search(*sets.matching(16)[:2]).index.unique().numel()
    assert own < pairs / 2


def test_trained_tensors_are_read_from_their_folder(tmp_path):
    assert set(sets.tensor_sets(16)) == {"photo pair", "projected photo"}
    np.savez(tmp_path / TRAINED[0], q=np.ones((4, 5, 9), np.float16), k=np.ones((4, 5, 9), np.float16))
    np.savez(tmp_path / TRAINED[1], q=np.ones((4, 5, 2, 16), np.float16), k=np.ones((4, 5, 2, 16), np.float16))
    found = sets.tensor_sets(16, tmp_path)
    q, k, scale = found["GMFlow, trained"]
    assert q.shape == k.shape == (1, 1, 4, 5, 9)
    assert scale == 1 / 3
    q, k, scale = found["MobileSAM, trained"]
    assert q.shape == k.shape == (1, 2, 4, 5, 16)
    assert (q.dtype, scale) == (torch.float32, 1 / 4)
