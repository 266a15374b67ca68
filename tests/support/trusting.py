"""Tensors for tests of trust and tune: sharp and coherent, diffuse and smooth."""

import torch

import scram

SEARCH = scram.Search(seed=0)


def coherent(size=40, sharpness=9.0, noise=0.4, width=24):
    """Each query has a key of its own, a few points away, as in matching; noise makes some of them hard."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 1, size, size, width, generator=generator), dim=-1)
    moved = k.roll((2, 3), (2, 3))
    q = moved + noise * torch.randn(k.shape, generator=generator) * torch.rand(1, 1, size, size, 1, generator=generator)
    v = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1)[None, None].float()
    return sharpness * q, k, v


def diffuse(heads=1, size=24):
    """Attention that spreads, over smooth keys and values; two query heads share a key head."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.nn.functional.interpolate(torch.randn(heads, 8, 6, 6, generator=generator), (size, size))
    keys = keys + 0.3 * torch.randn(keys.shape, generator=generator)
    k = keys.movedim(1, -1)[None]
    q = torch.randn(1, 2 * heads, size, size, 8, generator=generator)
    return q, k, torch.cat([k, torch.ones_like(k)], -1)
