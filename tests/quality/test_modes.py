"""Several separate places that share a query's weight: found, and said by trust, tune, plans and surveys."""

import pytest
import torch
from torch import nn

import scram
from scram.quality.modes import note, split_share


def repeated(copies, size=12, width=32, sharpness=40.0):
    """Keys [1, 1, size, copies*size, width] that repeat along the last axis, and queries that match each copy."""
    one = nn.functional.normalize(torch.randn(1, 1, size, size, width), dim=-1)
    return sharpness * one, one.repeat(1, 1, 1, copies, 1)


def test_repeated_structures_share_the_weight():
    every = torch.arange(144)
    assert split_share(*repeated(1), every, scale=1.0) == 0
    assert split_share(*repeated(2), every, scale=1.0) == 1
    assert split_share(*repeated(2, sharpness=0.1), every, scale=1.0) == 0  # diffuse: no place has much
    q, k = repeated(2)
    assert split_share(q, k, every, scale=1.0, score="cosine") == 0
    assert split_share(q, k, every, scale=40.0, score="cosine") == 1


def test_places_that_are_near_are_one():
    q, k = repeated(1)
    twice = k.repeat_interleave(2, 3)  # each key beside its copy
    assert split_share(q, twice, torch.arange(144), scale=1.0) == 0


def test_masked_copies_share_nothing_and_the_worst_head_counts():
    q, k = repeated(2)
    mask = torch.arange(24).expand(1, 12, 24) < 12
    assert split_share(q, k, torch.arange(144), scale=1.0, key_mask=mask) == 0
    single = repeated(1)[0]
    both = torch.cat((q, single), 1), torch.cat((k, torch.cat((single / 40, torch.zeros_like(single)), 3)), 1)
    assert split_share(*both, torch.arange(144), scale=1.0) == 1
    assert split_share(both[0][:, 1:], both[1][:, 1:], torch.arange(144), scale=1.0) == 0


def test_what_has_no_places_is_left_out():
    q, k = repeated(2)
    assert split_share(q, k, torch.arange(0)) == 0
    assert split_share(k, k, torch.arange(9), causal=True) == 0
    assert split_share(q, k, torch.arange(9), score=lambda a, b: (a * b).sum(-1)) == 0


def test_trust_and_tune_say_so(tmp_path):
    q, k = repeated(2)
    v = torch.randn(*k.shape[:-1], 4)
    assert note(scram.trust(q, k, v, scale=1.0, num_queries=64).split) in str(scram.trust(q, k, v, scale=1.0))
    assert "two separate places share the weight" in str(scram.trust(q, k, v, scale=1.0))
    assert "separate places" not in str(scram.trust(q, k[:, :, :, :12], v[:, :, :, :12], scale=1.0))
    plan = scram.tune(q, k, v, scale=1.0)
    assert plan.split == 1
    assert "in 100 % of the queries of a head two separate places" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert scram.Plan.load(tmp_path / "plan.json") == plan


class ByHand(nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT * 0.3, -1) @ x


class Split(nn.Module):
    """Attention whose keys repeat, by torch's function."""

    def forward(self, x):
        one, two = x.unflatten(2, (12, 24)).chunk(2, 3)
        x = torch.cat((one, one), 3).flatten(2, 3)
        return nn.functional.scaled_dot_product_attention(40 * x, x, x, scale=1.0) + two.sum()


def test_a_survey_of_attention_by_hand_says_how_to_wire_it():
    report = scram.survey(ByHand(), torch.randn(1, 2, 100, 8))
    assert report.softmaxes == {(1, 2, 100, 100): 1}
    assert "softmaxes over keys: 1 x [1, 2, 100, 100]" in str(report)
    assert "put scram.attention(q.unflatten(2, grid)" in str(report)
    small = scram.survey(ByHand(), torch.randn(1, 2, 20, 8))
    assert not small.softmaxes
    assert "scram.attention" not in str(small)


def test_a_survey_names_layers_of_repeated_structures():
    x = nn.functional.normalize(torch.randn(1, 1, 288, 32), dim=-1)
    report = scram.survey(Split(), x, grid=(12, 24))
    (layer,) = report.layers.values()
    assert layer.plan.split == 1
    assert f"share the weight of many queries of {layer.name}" in str(report)


@pytest.mark.parametrize("share", [0.0, 0.09])
def test_few_are_not_mentioned(share):
    assert note(share) == ""
