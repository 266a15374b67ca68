"""Principal axes, on one thread."""

import pytest
import torch

from scram.images.pca import principal_axes


@pytest.mark.parametrize("points", [torch.rand(20, 5, dtype=torch.float64), torch.full((20, 5), torch.nan)])
def test_pca_runs_on_one_thread_and_gives_the_others_back(
    points: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, used = torch.linalg.eigh, []

    def eigh(x: torch.Tensor) -> torch.Tensor:
        used.append(torch.get_num_threads())
        return real(x)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        mean, variances, axes = principal_axes(points)
        around = points - mean
        torch.testing.assert_close(axes.T @ (around.T @ around) @ axes / 20, variances.diag())
    except torch.linalg.LinAlgError:
        assert points.isnan().all()
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(before)
    assert (used, after) == ([1], before + 1)
