"""Calls of the newest positions over a cache: keys of a stretch, routed keys, clusters, each a slice of something."""

from typing import NamedTuple

import torch

from scram.core.calls import DecodeCall, ListedKeys, SeenClusters


class Decoded(NamedTuple):
    name: str
    queries: int = 1
    keys: int = 70
    heads: int = 2
    key_heads: int = 1
    width: int = 20
    value_width: int = 24
    clusters: int = 90  # 0: the first stretch
    routed: int = 40
    spoiled: bool = False  # keys that are masked, and one that is not finite
    plain: bool = False  # neither slope nor spreads
    half_books: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return self.name


CASES = [
    Decoded("one query"),
    Decoded("several queries, grouped heads", queries=5, heads=4, key_heads=2),
    Decoded("a tile in the first stretch", queries=40, clusters=0, routed=0),
    Decoded("clusters alone, without corrections", routed=0, plain=True),
    Decoded("masked keys, one not finite", queries=20, keys=90, spoiled=True),
    Decoded("books of 16 bits", half_books=True, width=70, value_width=5),
]


def decode_call(one, dtype=None):
    dtype = dtype or one.dtype
    wide = torch.promote_types(dtype, torch.float32)
    chance = torch.Generator().manual_seed(11)

    def drawn(*shape, of=one.dtype):
        return torch.randn(shape, generator=chance).to(of)

    def room(x):
        """The same in the middle of something longer, as slices of a cache are."""
        pad = (0, 0) * (x.ndim - 3) + (64, 30)
        return torch.nn.functional.pad(x, pad, value=1)[:, :, 64 : 64 + x.shape[2]]

    size = (2, one.key_heads, one.keys)
    usable = torch.ones(size, dtype=torch.bool)
    broken = torch.zeros(size, dtype=torch.bool)
    q = drawn(2, one.heads, one.queries, one.width)
    if one.spoiled:
        usable = torch.rand(size, generator=chance) < 0.7
        broken[0, 0, one.keys - 7] = True
        usable = usable & ~broken
        usable[1, 0, :-3] = False
        q[1, 1, 3] = torch.inf
    k, v = (torch.where(usable.unsqueeze(-1), drawn(*size, width), 0) for width in (one.width, one.value_width))
    seen = listed = None
    if one.clusters:
        kept = torch.bfloat16 if one.half_books else torch.float32
        centers, values = (drawn(2, one.key_heads, one.clusters, w, of=kept) for w in (one.width, one.value_width))
        sizes = torch.randint(0, 40, (2, one.key_heads, one.clusters), generator=chance)
        spreads = torch.rand(2, one.key_heads, one.clusters, generator=chance)
        seen = SeenClusters(
            centers=room(centers if one.half_books else centers.to(wide)),
            values=room(values if one.half_books else values.to(wide)),
            log_sizes=sizes.to(wide).log(),
            variance=drawn(2, one.key_heads, one.width, of=torch.float32).square().to(wide),
            spreads=None if one.plain else spreads.to(wide),
            slope=None if one.plain else drawn(2, one.key_heads, one.width, one.value_width).to(wide),
        )
    if one.routed:
        exists = torch.arange(one.routed) < torch.tensor([one.routed, one.routed // 2]).reshape(2, 1, 1)
        exists = exists.expand(2, one.heads, -1)
        more = [drawn(2, one.heads, one.routed, w) * exists.unsqueeze(-1) for w in (one.width, one.value_width)]
        chosen = torch.rand(2, one.heads, one.clusters, generator=chance) < 0.2
        listed = ListedKeys(more[0].to(dtype), more[1].to(dtype), exists, chosen)
    return DecodeCall(
        q=q.to(dtype),
        k=room(k.to(dtype)),
        v=room(v.to(dtype)),
        usable=room(usable),
        broken=room(broken),
        seen=seen,
        listed=listed,
        scale=0.3,
    )


def moved(call, device):
    """The call on a device, its slices still slices."""

    def to(x):
        if isinstance(x, torch.Tensor):
            base = x._base if x._base is not None else x
            return base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
        return type(x)(*map(to, x)) if isinstance(x, tuple) else x

    return to(call)
