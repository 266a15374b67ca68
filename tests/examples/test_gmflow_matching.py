"""The example of GMFlow's matching steps: its errors, its homography, SCRAM in the place of the model's own."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import scram

PATH = Path(__file__).parents[2] / "examples" / "gmflow_matching.py"
SPEC = importlib.util.spec_from_file_location("gmflow_matching_example", PATH)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)


def test_distances_from_the_truth_leave_out_what_is_unknown():
    truth = torch.zeros(2, 1, 4)
    truth[:, 0, 3] = torch.nan
    flow = torch.tensor([[[[3.0, 0.0, 8.0, 99.0]], [[4.0, 2.0, 0.0, 99.0]]]])
    assert example.off_truth(flow, truth, 2.0) == {
        "epe": pytest.approx(2.5),
        "median": pytest.approx(2.5),
        "over_3": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("strong", [False, True])
def test_the_flow_of_a_homography_leads_to_the_same_colors(strong):
    a, b, flow = example.warped(0.25, strong)
    assert a.shape == b.shape == (1, 3, 120, 184)
    down, right = torch.meshgrid(torch.arange(120.0), torch.arange(184.0), indexing="ij")
    known = flow.isfinite().all(0)
    assert known.float().mean() > (0.5 if strong else 0.9)
    there = torch.stack(
        (2 * (right + flow[0].nan_to_num(0)) / 183 - 1, 2 * (down + flow[1].nan_to_num(0)) / 119 - 1), -1
    )
    same = F.grid_sample(b, there[None], align_corners=True)
    other = (b - a).abs().mean(1)[0][known].mean()
    assert (same - a).abs().mean(1)[0][known].mean() < 0.3 * other


def test_matched_places_are_right_then_down():
    q = torch.randn(1, 1, 12, 16, 32)
    places, matches = example.match(q, q.roll((2, 5), (2, 3)), radius=1)
    off = (places - example.gm.places(q))[0, 0, :8, :8]
    assert (off.round() == torch.tensor([5.0, 2.0])).all(-1).float().mean() > 0.9
    assert matches.key_grid == (12, 16)


def test_local_correlation_is_replaced_and_put_back(monkeypatch):
    def own(a, b, radius):
        raise AssertionError("the model's own must not run")

    def refine(model, module, fine0, fine1, flow):
        return flow + module.local_correlation_softmax(fine0, fine1, 2)[0]

    module = SimpleNamespace(local_correlation_softmax=own)
    monkeypatch.setattr(example.gm, "refine", refine)
    a, b = torch.randn(2, 1, 8, 9, 10).unbind()
    found = example.local_refine(None, module, a, b, torch.zeros(1, 2, 9, 10))
    assert module.local_correlation_softmax is own
    q, k = example.gm.to_grid(a), example.gm.to_grid(b)
    place = example.gm.places(k)
    near = (place.reshape(90, 1, 2) - place.reshape(1, 90, 2)).abs().amax(-1) <= 2
    weights = (q.reshape(90, 8) @ k.reshape(90, 8).T * 8**-0.5).masked_fill(~near, -torch.inf).softmax(-1)
    mean = (weights @ place.reshape(90, 2) - place.reshape(90, 2)).reshape(9, 10, 2).movedim(-1, 0)
    torch.testing.assert_close(found[0], mean, rtol=1e-4, atol=1e-4)


def test_what_is_spent_is_returned_with_the_result():
    found, seconds, held = example.spent(lambda: scram.Matches.identity((3, 4)).index)
    assert found.shape == (1, 1, 3, 4, 1)
    assert seconds >= 0
    assert held >= 0
