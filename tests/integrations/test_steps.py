"""Steps of a sampler: how they are counted, and when it has started again."""

import pytest
import torch
from torch import nn

from scram.integrations.steps import Kept, Run, Steps


@pytest.mark.parametrize(
    ("times", "steps"),
    [
        ([9, 7, 4, 9, 7], [0, 1, 2, 0, 1]),
        ([9, 9, 7, 7, 9, 9], [0, 0, 1, 1, 0, 0]),
        ([1, 4, 7, 1], [0, 1, 2, 0]),  # times that rise
        ([9, 7, 5, 8, 6], [0, 1, 2, 0, 1]),  # a sampler of other times
        ([None, None, None], [0, 1, 2]),
    ],
)
def test_steps_are_told_apart_by_their_times(times, steps):
    run = Run(time=times[0])
    counted = [0]
    for time in times[1:]:
        run.advance(time)
        counted.append(run.step)
    assert counted == steps


def test_calls_of_a_step_are_counted():
    run = Run(time=9.0)
    calls = [run.call]
    for time in (9.0, 9.0, 7.0, 7.0):
        assert not run.advance(time)
        calls.append(run.call)
    assert calls == [0, 1, 2, 0, 1]


class Denoiser(nn.Module):
    def forward(self, x, timestep=None):
        return x


def test_a_model_is_hooked_until_the_end():
    model, steps = Denoiser(), Steps(dense_steps=1, keeps=True)
    steps.see(model, torch.tensor([9.0, 9.0]))
    assert steps.dense
    steps.kept["layer",] = Kept(None, None)
    model(torch.zeros(1), torch.tensor(7.0))  # by its place
    assert not steps.dense
    assert steps.kept
    model(torch.zeros(1), timestep=9)
    assert steps.dense
    assert not steps.kept  # it started again
    steps.detach()
    assert not model._forward_pre_hooks
    assert not steps.dense
    idle = Steps()
    idle.see(model, None)
    assert not model._forward_pre_hooks
