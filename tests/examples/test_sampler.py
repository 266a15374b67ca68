"""examples/sampler.py: whole call and decoding agree to rounding, pictures are drawn, times are of both."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("sampler", FOLDER / "sampler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(FOLDER))


def test_it_learns_and_draws(example):
    torch.manual_seed(0)
    model = example.Generator(width=16, heads=2, depth=1)
    data = torch.zeros(8, 28, 28, dtype=torch.int64)
    data[:, 10:18] = 5
    losses = example.train(model, data, seconds=2, batch=4)
    assert losses[-1] < losses[0]
    whole, steps = example.bits(model.eval(), data[:2])
    assert steps == pytest.approx(whole, abs=1e-5)
    drawn = example.draw(model, 2)
    assert drawn.shape == (2, 28, 28)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < example.LEVELS
    assert torch.equal(drawn, example.draw(model, 2))


def test_times_are_of_both(example, capsys):
    rows = example.times("cpu", sizes=(1024,), heads=1, width=16)
    assert rows["1024"]["dense_ms"] > 0 < rows["1024"]["scram_ms"]
    assert "1024 positions: dense" in capsys.readouterr().out
