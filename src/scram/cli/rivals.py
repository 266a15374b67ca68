"""What SCRAM is compared with: dense attention, fixed sparse patterns, brute force, and nearest-neighbor libraries.

Every attention takes q, k, v `[1, H, S, S, E]` of a square picture and returns out; the dense, local and neighborhood
ones take any picture. A pattern also says which pairs it allows, as FlexAttention writes masks; the tests compare it
with a dense masked softmax. The Sparse Transformer's patterns are causal, as published, with the picture's width as
their stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.dense import fused_attention
from ..core.exact import exact_search
from ..core.resolve import CLUSTERS, default_search
from ..core.tails.clusters import Clusters
from ..functional import attend, attention, cluster, search
from ..settings import Search

SUMMARY = 8  # columns of each line that the fixed pattern lets everyone after it see
BLOCK = 8  # side of the local pattern's query blocks
REACH = 4  # how far their keys reach beyond them
NEIGHBORS = 15  # side of NATTEN's neighborhoods, about as many keys as a local block sees
CHUNK = 1 << 26  # elements of a score matrix at a time
SETTINGS = {"SCRAM": Search(seed=0), "SCRAM, paper": Search.paper(seed=0)}  # of a search alone
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Allows = Callable[..., Tensor]


def default_setting(device: str, seed: int) -> tuple[Search, Clusters]:
    """What `scram.attention` runs on that device where it is not dense attention, with a seed."""
    clusters = replace(CLUSTERS.get(device, CLUSTERS["cpu"]), seed=seed)
    return replace(default_search(device, clusters), seed=seed), clusters


def setting(name: str, device: str) -> tuple[Search, Clusters | None]:
    """Search and tail of SCRAM's attention by one of its names; it searches on small grids too."""
    return default_setting(device, 0) if name == "SCRAM" else (SETTINGS[name], None)


def scram(name: str) -> Attention:
    """SCRAM by one of its names, radius 1."""

    def attend_grid(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        looks, tail = setting(name, q.device.type)
        return attention(q, k, v, search=looks, tail=tail, radius=1, scale=scale)

    return attend_grid


def matches_of(name: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The matches int32 [1, H, S, S, 1] that the attention of that name finds."""
    looks, tail = setting(name, q.device.type)
    codebook = None if tail is None else cluster(q, k, v, clusters=tail, scale=scale)
    return search(q, k, search=looks, codebook=codebook, scale=scale).index


def full(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Vanilla attention: the whole N x N map in memory."""
    p = (scale * q.flatten(2, 3) @ k.flatten(2, 3).mT).softmax(-1)
    return (p @ v.flatten(2, 3)).reshape(*q.shape[:-1], v.shape[-1])


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Torch's fused attention, with the backend that torch takes for these tensors."""
    flat = [x.flatten(2, 3) for x in (q, k, v)]
    if q.is_cuda:  # the fastest of its fused kernels need half precision
        flat = [x.to(torch.bfloat16) for x in flat]
    out = fused_attention(flat[0], flat[1], flat[2], scale=scale)
    return out.to(v.dtype).reshape(*q.shape[:-1], v.shape[-1])


def brute_force(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The exact best key of each query, by all N^2 scores in chunks, then the same windows as SCRAM."""
    with torch.no_grad():
        matches = exact_search(q, k)
    return attend(q, k, v, matches, radius=1, scale=scale).out


def strided_allows(size: int) -> Allows:
    """The last `size` points, and every `size`-th one before: the own line and the own column."""
    return lambda b, h, i, j: (j <= i) & ((i - j < size) | ((i - j) % size == 0))


def fixed_allows(size: int) -> Allows:
    """The own line so far, and the last columns of all lines before."""
    return lambda b, h, i, j: (j <= i) & ((i // size == j // size) | (j % size >= size - SUMMARY))


def local_allows(size: int) -> Allows:
    """The block of the query and a rim around it."""

    def allows(b: Any, h: Any, i: Tensor, j: Tensor) -> Tensor:
        row = i // size // BLOCK * BLOCK
        column = i % size // BLOCK * BLOCK
        down = j // size - row
        right = j % size - column
        return (down >= -REACH) & (down < BLOCK + REACH) & (right >= -REACH) & (right < BLOCK + REACH)

    return allows


def strided(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The Sparse Transformer's strided pattern, line by line: O(N sqrt N) time."""
    size = q.shape[3]
    device = q.device
    at = torch.arange(size, device=device)
    # Of the line above only the points right of the query's column are among the last `size`; the rest are its own.
    band = torch.cat((at[None, :] > at[:, None], at[None, :] <= at[:, None]), -1)  # [W, 2 * W]
    lines = []
    for rows in _chunks(q, 3 * size):
        above = [F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, rows] for x in (k, v)]
        near = [torch.cat((up, x[:, :, rows]), 3) for up, x in zip(above, (k, v), strict=True)]
        q_rows = q[:, :, rows] * scale
        allowed = band & ((rows[:, None, None] > 0) | (torch.arange(2 * size, device=device) >= size))
        column = torch.einsum("bhyxe,bhzxe->bhyxz", q_rows, k)  # [B, H, lines, W, W]
        p_near, p_column = _softmax_of_both(q_rows @ near[0].mT, allowed, column, at < rows[:, None, None])
        lines.append(p_near @ near[1] + torch.einsum("bhyxz,bhzxe->bhyxe", p_column, v))
    return torch.cat(lines, 2)


def fixed(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The Sparse Transformer's fixed pattern, line by line: O(N sqrt N) time."""
    size = q.shape[3]
    device = q.device
    at = torch.arange(size, device=device)
    summaries = [x[:, :, :, -SUMMARY:].flatten(2, 3) for x in (k, v)]
    line_of = torch.arange(summaries[0].shape[2], device=device) // min(SUMMARY, size)
    lines = []
    for rows in _chunks(q, size + len(line_of)):
        q_rows = q[:, :, rows] * scale
        line = q_rows @ k[:, :, rows].mT  # [B, H, lines, W, W]
        before = q_rows @ summaries[0].mT.unsqueeze(2)  # [B, H, lines, W, summaries]
        p_line, p_before = _softmax_of_both(line, at <= at[:, None], before, line_of < rows[:, None, None])
        lines.append(p_line @ v[:, :, rows] + p_before @ summaries[1].unsqueeze(2))
    return torch.cat(lines, 2)


def _softmax_of_both(a: Tensor, a_allowed: Tensor, b: Tensor, b_allowed: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of two sets of keys under one softmax, from their scores `[..., n]` and `[..., m]`."""
    masked = (a.masked_fill(~a_allowed, -torch.inf), b.masked_fill(~b_allowed, -torch.inf))
    p = torch.cat(masked, -1).softmax(-1)
    return p[..., : a.shape[-1]], p[..., a.shape[-1] :]


def local(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The Image Transformer's local 2-D blocks: each block of queries sees its own block of keys and a rim: O(N)."""
    size = q.shape[2:4]
    more = [-extent % BLOCK for extent in size]

    def blocks(x: Tensor, rim: int) -> Tensor:
        """`[B, H, *G, E] -> [B * H, blocks, keys of a block, E]`: the fused kernels take four axes."""
        x = F.pad(x, (0, 0, rim, rim + more[1], rim, rim + more[0]))
        side = BLOCK + 2 * rim
        return x.unfold(2, side, BLOCK).unfold(3, side, BLOCK).flatten(2, 3).movedim(3, -1).flatten(3, 4).flatten(0, 1)

    inside = blocks(torch.ones(1, 1, *size, 1, dtype=torch.float32, device=q.device), REACH)[..., 0] > 0
    # An all-padding row of scores would be NaN; a block always holds at least one real key.
    shown = blocks(k, REACH), blocks(v, REACH), inside.unsqueeze(-2)
    out = F.scaled_dot_product_attention(blocks(q, 0), *shown, scale=scale)
    down, across = ((extent + extra) // BLOCK for extent, extra in zip(size, more, strict=True))
    out = out.reshape(*q.shape[:2], down, across, BLOCK, BLOCK, v.shape[-1]).transpose(3, 4)
    return out.flatten(4, 5).flatten(2, 3)[:, :, : size[0], : size[1]].contiguous()


def _chunks(q: Tensor, keys: int) -> list[Tensor]:
    """The lines of the picture in groups whose scores fit in a chunk."""
    size = q.shape[2]
    some = max(1, CHUNK // (q.shape[0] * q.shape[1] * q.shape[3] * keys))
    return [torch.arange(at, min(at + some, size), device=q.device) for at in range(0, size, some)]


@lru_cache(maxsize=3)  # to make a mask takes seconds, and it serves every width
def flex(pattern: str, size: int, device: torch.device, height: int | None = None) -> Attention:
    """A pattern as a FlexAttention mask, compiled, in bfloat16 on a GPU as `sdpa` is; a square without a height."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    points = size * (size if height is None else height)
    torch.compiler.reset()  # each pattern and size is another program, and torch keeps only a few of one function
    make: Any = create_block_mask
    run: Any = flex_attention
    if device.type == "cuda":  # compiled, the mask of all pairs is never in memory
        make, run = (torch.compile(call, dynamic=False) for call in (make, run))
    mask = make(PATTERNS[pattern](size), 1, 1, points, points, device=str(device))

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        flat = [F.pad(x.flatten(2, 3), (0, -x.shape[-1] % 16)) for x in (q, k, v)]
        if q.is_cuda:
            flat = [x.to(torch.bfloat16) for x in flat]
        out: Tensor = run(*flat, block_mask=mask, scale=scale)
        return out[..., : v.shape[-1]].to(v.dtype).reshape(*q.shape[:-1], v.shape[-1])

    return attention


def natten(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """NATTEN's neighborhood attention by its own kernels; on a CPU, where it has none, through FlexAttention."""
    from natten import HAS_LIBNATTEN, na2d

    flat = [F.pad(x, (0, -x.shape[-1] % 32)).movedim(1, 3) for x in (q, k, v)]
    if q.is_cuda:
        if not HAS_LIBNATTEN:
            raise RuntimeError("NATTEN is installed without its kernels")
        flat = [x.to(torch.bfloat16) for x in flat]  # its kernels need half precision and widths of 32, 64, ..
    out: Tensor = na2d(*flat, kernel_size=NEIGHBORS, scale=scale, **({} if q.is_cuda else {"backend": "flex-fna"}))
    return out[..., : v.shape[-1]].to(v.dtype).movedim(3, 1).contiguous()


ATTENTIONS: dict[str, Attention] = {
    **{name: scram(name) for name in SETTINGS},
    "full attention": full,
    "torch SDPA": sdpa,
    "strided": strided,
    "fixed": fixed,
    "local blocks": local,
    "brute-force top-1": brute_force,
}
OPTIONAL: dict[str, Attention] = {"NATTEN": natten}  # packages that install in few places
PATTERNS = {"strided": strided_allows, "fixed": fixed_allows, "local blocks": local_allows}


def peak_bytes(name: str, points: int) -> int:
    """What a contender holds at least, to skip it before a machine without that memory starts to swap."""
    return 2 * 4 * points**2 if name == "full attention" else 0


def faiss(q: Tensor, k: Tensor, effort: int | None) -> Tensor:
    """faiss's graph of 32 links, `effort` is efSearch; None is its exact search."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    index: Any = faiss.IndexFlatIP(q.shape[-1])
    if effort is not None:
        index = faiss.IndexHNSWFlat(q.shape[-1], 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = effort
    index.add(_points(k))
    return torch.from_numpy(index.search(_points(q), 1)[1])


def pynndescent(q: Tensor, k: Tensor, effort: int) -> Tensor:
    """pynndescent's graph; `effort` is 100 times the epsilon of its queries. Unit vectors: its cosine is the dot."""
    from pynndescent import NNDescent

    index = NNDescent(_points(k), metric="cosine", random_state=0, n_jobs=torch.get_num_threads())
    index.prepare()
    return torch.from_numpy(index.query(_points(q), k=1, epsilon=effort / 100)[0].astype(np.int64))


def _points(x: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(x.reshape(-1, x.shape[-1]).float().cpu().numpy())


# Search alone: the call, and the efforts to try until the recall is that of SCRAM.
SEARCHES: dict[str, tuple[Callable[[Tensor, Tensor, int], Tensor], tuple[int, ...], str]] = {
    "faiss flat": (lambda q, k, effort: faiss(q, k, None), (1,), "faiss"),
    "faiss HNSW": (faiss, (4, 8, 16, 32, 64, 128, 256, 512), "faiss"),
    "pynndescent": (pynndescent, (0, 5, 10, 20, 40, 80), "pynndescent"),
}
