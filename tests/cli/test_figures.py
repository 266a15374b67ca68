"""`scram figures` shows what the paper claims."""

import json

import pytest
import torch

from scram.cli import figures as figures_module
from support.command import call

pytestmark = pytest.mark.slow


def test_figures_show_what_the_paper_claims(tmp_path, monkeypatch):
    monkeypatch.setattr(figures_module, "SEEDS", 2)
    monkeypatch.setattr(figures_module, "SAMPLE", 200)  # queries: what is claimed lies several deviations apart
    code, printed, complaints = call("figures", "--size", 64, "--out", tmp_path)
    assert (code, complaints) == (0, "")
    numbers = json.loads((tmp_path / "figures.json").read_text())
    holds = [value for claim, value in numbers["maps"]["claims"].items() if claim.startswith("rows whose maximum")]
    assert len(holds) == 2
    assert min(holds) >= 0.95
    anywhere, apart, more, fewer = numbers["modes"]["claims"].values()
    assert apart > 1.2 * anywhere
    assert more > 3 * fewer
    assert len(numbers["modes"]["rows"]) == 9
    recall = list(numbers["sweeps"]["claims"].values())
    assert recall[0] < 0.05 < recall[2] < recall[3] < recall[4]
    assert recall[4] > 0.85
    for points in numbers["curves"]["lines"]["radius"].values():
        masses = [mass for _, mass in points]
        assert masses == sorted(masses)
    for name in ("maps", "modes", "sweeps", "curves"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000, name
        assert name in printed


def test_low_rank_queries_and_keys_are_the_svd_of_the_picture():
    q, k, picture = figures_module.low_rank()
    u, s, vh = torch.linalg.svd(picture)
    near = (u[:, :4] * s[:4]) @ vh[:4]
    torch.testing.assert_close(q[0, 0, :, 0] @ k[0, 0, :, 0].T, near, rtol=1e-3, atol=1e-3)


def test_blobs_are_connected_regions():
    weights = torch.zeros(6, 7)
    weights[0, 0] = weights[1, 1] = 1.0  # touch at a corner
    weights[4, 3:6] = 0.5
    weights[0, 6] = 0.05  # too faint
    labels = figures_module.blobs(weights)
    assert len(set(labels.flatten().tolist()) - {0}) == 2
    assert labels[0, 0] == labels[1, 1] != labels[4, 4]
