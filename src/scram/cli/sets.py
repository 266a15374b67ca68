"""Kinds of queries and keys that figures and analyses run on."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import TRAINED
from .features import PatchFeatures, sample_pair

WIDTH = 32
Set = tuple[Tensor, Tensor, float]


def matching(size: int, width: int = WIDTH) -> Set:
    """Patch features of the two sample photographs: each query has a key of its own."""
    a, b = sample_pair(size)
    features = PatchFeatures.fit(a, width)
    return features(a), features(b), 100.0


def projected(size: int, width: int = WIDTH) -> Set:
    """Patch features of one photograph through random Wq and Wk: many queries share few keys, as in attention."""
    a, _ = sample_pair(size)
    x = PatchFeatures.fit(a, width)(a)
    generator = torch.Generator().manual_seed(0)
    w_q, w_k = torch.randn(2, width, width, generator=generator, dtype=torch.float32, device="cpu") / width**0.5
    return x @ w_q, x @ w_k, 100.0


def noise(size: int, width: int = WIDTH) -> Set:
    """Independent unit vectors: no coherence at all."""
    shape = (2, 1, 1, size, size, width)
    generator = torch.Generator().manual_seed(0)
    q, k = F.normalize(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu"), dim=-1)
    return q, k, 100.0


def tensor_sets(size: int, data: Path | None = None) -> dict[str, Set]:
    """All kinds; trained tensors where their folder is given."""
    sets = {"photo pair": matching(size), "projected photo": projected(size)}
    if data is not None:
        flow, sam = (np.load(data / name) for name in TRAINED)
        q, k = (torch.from_numpy(flow[name].astype(np.float32))[None, None] for name in ("q", "k"))
        sets["GMFlow, trained"] = (q, k, q.shape[-1] ** -0.5)
        q, k = (torch.from_numpy(sam[name].astype(np.float32)).movedim(2, 0)[None].contiguous() for name in ("q", "k"))
        sets["MobileSAM, trained"] = (q, k, q.shape[-1] ** -0.5)
    return sets
