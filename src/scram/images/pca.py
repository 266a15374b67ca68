"""Principal component analysis. Needs torch alone, so it runs anywhere."""

import torch
from torch import Tensor


def principal_axes(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean `[d]` of points `[n, d]`, their variances `[d]` ascending, and the unit axes as columns `[d, d]`.

    The decomposition runs on one thread: on busy cores LAPACK's threads wait for each other (7.5 s, alone 0.1 s).
    """
    mean = points.mean(0)
    covariance = (points - mean).T @ (points - mean) / len(points)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        variances, axes = torch.linalg.eigh(covariance)
    finally:
        torch.set_num_threads(threads)
    return mean, variances, axes
