"""Principal component analysis. Needs torch alone, so it runs anywhere."""

import torch
from torch import Tensor

from .._compat import ONE_THREAD


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean `[d]` of points `[n, d]`, their variances `[d]` ascending, and the unit axes as columns `[d, d]`.

    It runs on one thread: on busy cores LAPACK's threads wait for each other (7.5 s, alone 0.1 s).
    """
    with ONE_THREAD:
        mean = points.mean(0)
        covariance = (points - mean).T @ (points - mean) / len(points)
        variances, axes = torch.linalg.eigh(covariance)
    return mean, variances, axes
