"""Models and plans for the tests of error budgets."""

import torch
import torch.nn.functional as F
from torch import nn

import scram
from scram.quality.plan import Plan, Rung, Setting


def planned(dense=False, impl="auto"):
    """In place of `tune`: a plan at once, whose windows cover the grid; counts its calls."""
    seen = []

    def tune(q, k, v, *, error, **how):
        seen.append((tuple(q.shape), how))
        own = Setting(scram.Search(sweeps=0, seed=0), None, 99)
        rungs = Rung(own, 9, 1.0, (0.0, 0.0, 0.0), 0.0, True), Rung(Setting(), 9, 2.0, (0.0,) * 3, 0.0, True)
        return Plan(error, rungs, int(dense), how["causal"], how["scale"], "dot", impl, 9, 9, 0, 0.99, "tensors")

    return tune, seen


class Attention(nn.Module):
    """Tokens [B, N, 16], by torch's function."""

    def __init__(self, function=F.scaled_dot_product_attention):
        super().__init__()
        self.project, self.function = nn.Linear(16, 48), function

    def forward(self, x):
        parts = self.project(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.function(parts[0], parts[1], parts[2]).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers with residuals, of tokens [B, N, 16] or a picture [B, 16, height, width]."""

    def __init__(self, **how):
        super().__init__()
        self.config = {"image_size": 8, "patch_size": 1}
        self.blocks = nn.ModuleList(Attention(**how) for _ in range(2))

    def forward(self, x):
        if x.ndim == 4:
            x = x.flatten(2).mT
        for block in self.blocks:
            x = x + block(x)
        return x


def picture(*size):
    return torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(0))


def tokens(number=65):
    return torch.randn(2, number, 16, generator=torch.Generator().manual_seed(0))
