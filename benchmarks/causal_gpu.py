"""Causal order on a CUDA device: whether it is right, whole calls beside cuDNN, and decoding beside a KV cache.

    python benchmarks/causal_gpu.py right bfloat16      # or float32: against the CPU, and strict order
    python benchmarks/causal_gpu.py masks               # torch's masked kernels and a later key of 1e30
    python benchmarks/causal_gpu.py forward FOLDER      # FOLDER: what `gpu.py prepare` wrote
    python benchmarks/causal_gpu.py decode

Each row is stored when it is measured, in causal_gpu.json; one that fails says why. `--device cpu --shrink 16` tries
all of it on small grids.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_sets import Data
from store import RESULTS, Store
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram
from scram.core import calls
from scram.engines import dispatch

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SIZES = (65536, 16384, 4096, 1024)  # positions of a cache; what is asked about first
SETS = (("stereo", 8.0), ("stereo", 32.0), ("projected", 1.0), ("projected", 8.0))
TAILS = {
    "default": "auto",
    "32 clusters of 1024, 256 keys": scram.Clusters(count=32, keys=256, stretch=1024, seed=0),
    "64 clusters of 1024, 512 keys": scram.Clusters(count=64, keys=512, stretch=1024, seed=0),
    "64 clusters of 2048, 512 keys": scram.Clusters(count=64, keys=512, stretch=2048, seed=0),
}
PER_HEAD = 75  # queries of an error
Options = argparse.Namespace


class Rows:
    """Rows that are stored one by one, each of which may fail alone."""

    def __init__(self, options: Options, part: str) -> None:
        self.store = Store(f"causal_gpu_{part}", options.results)
        self.commit = options.commit
        self.end = time.monotonic() + options.seconds

    def put(self, name: str, call: Callable[[], dict[str, Any]]) -> None:
        begun = time.monotonic()
        if begun > self.end:
            return
        try:
            row = call()
        except Exception as error:
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        row["took_s"] = round(time.monotonic() - begun, 1)
        self.store.put(name, self.commit, **row)
        print(name, row, flush=True)


def drawn(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    """The same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def far(x: Tensor, y: Tensor) -> float:
    """Norm of the difference over that of y, NaN where only one is NaN."""
    x, y = x.double().cpu(), y.double().cpu()
    same = torch.equal(x.isnan(), y.isnan())
    return float((x - y).nan_to_num().norm() / y.nan_to_num().norm()) if same else math.nan


# --- whether it is right ---

TAIL = scram.Clusters(count=8, keys=40, stretch=64, seed=3)
GRIDS = {  # grid, heads, key heads, width, value width, masked
    "rank 1, grouped": ((700,), 4, 2, 64, 64, False),
    "rank 2, masked": ((20, 30), 2, 2, 64, 32, True),
    "rank 3": ((6, 8, 10), 2, 1, 20, 24, False),
}
WAYS: dict[str, dict[str, Any]] = {
    "clusters": {"tail": TAIL},
    "search and clusters": {"search": scram.Search(seed=3), "tail": TAIL},
    "search and drawn keys": {"search": scram.Search(seed=3), "tail": scram.DrawnKeys()},
    "search alone": {"search": scram.Search(seed=3), "tail": None},
    "every key": {"search": None, "tail": None},
}


def problem(name: str, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    grid, heads, key_heads, width, value_width, masked = GRIDS[name]
    sizes = ((heads, width), (key_heads, width), (key_heads, value_width))
    tensors = [drawn(2, h, *grid, w, seed=n, device=device, dtype=dtype) for n, (h, w) in enumerate(sizes)]
    mask = torch.rand(2, *grid, generator=torch.Generator().manual_seed(0)) < 0.8 if masked else None
    return tensors, None if mask is None else mask.to(device)


def beside_the_cpu(name: str, way: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Distance from dense attention in float64, here and by the reference on a CPU."""
    here, mask = problem(name, device, dtype)
    there, cpu_mask = problem(name, "cpu", torch.float64)
    there = [x.to(dtype).double() for x in there]
    exact = scram.exact_attention(*there, causal=True, key_mask=cpu_mask).out
    how = WAYS[way]
    out = scram.attention(*here, causal=True, key_mask=mask, **how)
    impl = {} if way == "every key" else {"impl": "reference"}
    reference = scram.attention(*[x.float() for x in there], causal=True, key_mask=cpu_mask, **how, **impl)
    return {"error": far(out, exact), "error_reference": far(reference, exact), "apart": far(out, reference)}


def strict(name: str, way: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Everything after a position is replaced: do out and lse up to it keep their bits? Do later inputs get zeros?"""
    tensors, mask = problem(name, device, dtype)
    how = WAYS[way]

    def attended(tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
        made = scram.attention(*tensors, causal=True, key_mask=mask, **how, return_lse=way != "every key")
        return [x.reshape(*x.shape[:2], -1, x.shape[-1] if n == 0 else 1) for n, x in enumerate(_several(made))]

    plain = attended(tensors, mask)
    row: dict[str, Any] = {}
    for p in (1, 63, 64, 83, 250, 400):
        for fill in (0.0, 1e30, math.inf, math.nan):
            other = [x.clone() for x in tensors]
            for x in other:
                later = x.flatten(2, -2)[:, :, p:]
                x.flatten(2, -2)[:, :, p:] = later.flip(2) * 3 if fill == 0 else fill
            other_mask = mask if mask is None else mask.clone()
            if other_mask is not None:
                other_mask.flatten(1)[:, p:] ^= True
            found = attended(other, other_mask)
            same = [torch.equal(x[:, :, :p], y[:, :, :p]) for x, y in zip(plain, found, strict=True)]
            if not all(same):
                row[f"changed at {p} by {fill}"] = same
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attended(leaves, mask)[0][:, :, :250].float()
    grads = torch.autograd.grad((out * out).sum(), leaves)
    row["later_gradients"] = [float(x.flatten(2, -2)[:, :, 250:].abs().max()) for x in grads]
    row["gradients_finite"] = [bool(x.isfinite().all()) for x in grads]
    row["strict"] = not any(name.startswith("changed") for name in row) and not any(row["later_gradients"])
    return row


def _several(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)


def decoded(name: str, half: bool, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """A prompt, then tiles and single positions over a border, beside the rows of the whole call."""
    tensors, mask = problem(name, device, dtype)
    whole = scram.attention(*tensors, causal=True, key_mask=mask, tail=TAIL, return_lse=True)
    flat = [x.flatten(2, -2) for x in tensors]
    flat_mask = None if mask is None else mask.flatten(1)
    cache = scram.Cache(GRIDS[name][0], tail=TAIL, half=half)
    rows = []
    for begin, end in ((0, 300), (300, 310), *((i, i + 1) for i in range(310, 400))):
        new = [x[:, :, begin:end] for x in flat]
        cache.append(*new, key_mask=None if flat_mask is None else flat_mask[:, begin:end])
        rows.append(scram.decode(new[0], cache, return_lse=True))
    out, lse = (torch.cat(x, 2) for x in zip(*rows, strict=True))
    want = whole.out.flatten(2, -2)[:, :, :400]
    return {
        "most": float((out.float() - want.float()).abs().max()),
        "apart": far(out, want),
        "lse_most": float((lse - whole.lse.flatten(2)[:, :, :400]).abs().max()),
    }


def right(options: Options) -> None:
    dtype = getattr(torch, options.argument)
    rows = Rows(options, options.argument)
    for name in GRIDS:
        for half in (False, True):
            label = f"decode {name}{', books of 16 bits' * half}"
            rows.put(label, partial(decoded, name, half, options.device, dtype))
    for way in WAYS:
        for name in GRIDS:
            rows.put(f"near {way}, {name}", partial(beside_the_cpu, name, way, options.device, dtype))
            rows.put(f"strict {way}, {name}", partial(strict, name, way, options.device, dtype))


# --- torch's masked kernels ---


def masks(options: Options) -> None:
    """q attends key 0 alone in row 0: a later key of 1e30 must not win there."""
    rows = Rows(options, "masks")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for positions in (83, 88, 512):
            for backend, which in BACKENDS.items():
                name = f"{backend} {str(dtype)[6:]} {positions}"
                rows.put(name, partial(later_key, which, positions, options.device, dtype))
            rows.put(f"ours {str(dtype)[6:]} {positions}", partial(later_key, None, positions, options.device, dtype))


def later_key(backend: SDPBackend | None, positions: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    q, k, v = (drawn(1, 2, positions, 64, seed=n, device=device, dtype=dtype) for n in range(3))
    row: dict[str, Any] = {}
    for large in (1e4, 1e30):
        if large > torch.finfo(dtype).max:
            continue
        spoiled = k.clone(), v.clone()
        for x in spoiled:
            x[:, :, 80:] = large
        made = []
        for keys, values in ((k, v), spoiled):
            if backend is None:
                mask = torch.ones(1, positions, dtype=torch.bool, device=device)
                made.append(scram.exact_attention(q, keys, values, causal=True, key_mask=mask).out)
                made[-1] = _dense(q, keys, values, mask)
            else:
                below = torch.ones(positions, positions, dtype=torch.bool, device=device).tril()[None, None]
                with sdpa_kernel(backend):
                    made.append(F.scaled_dot_product_attention(q, keys, values, below))
        plain, other = (x[:, :, :80].float() for x in made)
        row[f"apart {large:g}"] = far(other, plain)
        row[f"equal {large:g}"] = torch.equal(plain, other)
    return row


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scram.attention(q, k, v, causal=True, key_mask=mask, search=None, tail=None)


# --- times ---


def milliseconds(call: Callable[[], Any], device: str) -> dict[str, float]:
    """Of a replayed CUDA graph, and of calls that are queued one behind the other; medians."""
    call()
    if device != "cuda":
        begun = time.perf_counter()
        call()
        return {"queued_ms": 1e3 * (time.perf_counter() - begun)}
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    found = {"queued_ms": 1e3 * (time.perf_counter() - begun) / 5}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found["graph_ms"] = _replayed(graph)
    except Exception as error:
        found["no_graph"] = str(error)[:200]  # type: ignore[assignment]
    return found


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    each = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        each.append(begin.elapsed_time(end) / 10)
    return statistics.median(each)


def by_backend(backend: SDPBackend | None) -> Any:
    return nullcontext() if backend is None else sdpa_kernel(backend)


def forward(options: Options) -> None:
    """256x256, 8 heads, E=64, bfloat16."""
    rows = Rows(options, "forward")
    data = Data(Path(options.argument), options.device)
    side = 256 // options.shrink
    q, k, v, _ = data.tensors("stereo", side, 64, 8, torch.bfloat16)
    flat = [x.flatten(2, -2) for x in (q, k, v)]

    def dense(backend: SDPBackend) -> Tensor:
        with by_backend(backend if options.device == "cuda" else None):
            return F.scaled_dot_product_attention(*flat, is_causal=True, scale=8.0)

    stretch = {} if options.shrink == 1 else {"stretch": 64, "count": 8, "keys": 16}
    ways: dict[str, Callable[..., Any]] = {}
    for name, tail in TAILS.items():
        used: Any = tail if isinstance(tail, str) or not stretch else scram.Clusters(**stretch, seed=0)
        ways[name] = partial(scram.attention, causal=True, tail=used)
    search = {"search": scram.Search(seed=0)}
    ways["search and clusters"] = partial(scram.attention, causal=True, **search)
    ways["search and drawn keys"] = partial(scram.attention, causal=True, **search, tail=scram.DrawnKeys())
    for backend in ("cudnn", "flash"):
        rows.put(backend, lambda which=BACKENDS[backend]: milliseconds(partial(dense, which), options.device))
    for name, call in ways.items():
        rows.put(name, lambda call=call: milliseconds(partial(call, q, k, v, scale=8.0), options.device))
    if options.device == "cuda":
        rows.put("kernels of the default", lambda: kernels(partial(ways["default"], q, k, v, scale=8.0)))
    at = torch.randperm(side * side, generator=torch.Generator().manual_seed(1))[:PER_HEAD].to(options.device)
    for label, scale in SETS:
        given = data.tensors(label, side, 64, 8, torch.bfloat16)[:3]
        exact = scram.exact_attention(*[x.float() for x in given], causal=True, scale=scale, queries=at).out
        for name, call in ways.items():
            rows.put(f"{name}: {label} {scale:g}", lambda call=call: errors(call, given, scale, at, exact))  # noqa: B023


def errors(call: Callable[..., Any], given: Any, scale: float, at: Tensor, exact: Tensor) -> dict[str, Any]:
    out = call(*given, scale=scale).flatten(2, -2)[:, :, at].float()
    apart = (out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
    return {"error": float(apart.mean()), "error_worst": float(apart.max())}


def kernels(call: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    times = [(x.key[:70], x.device_time_total / 1e3, x.count) for x in seen.key_averages() if x.device_time_total]
    return {"kernels": sorted(times, key=lambda x: -x[1])[:40]}


# --- decoding ---


def bytes_of(*values: Any) -> int:
    """Of tensors, also in tuples."""
    total = 0
    for x in values:
        if isinstance(x, Tensor):
            total += x.numel() * x.element_size()
        elif isinstance(x, tuple):
            total += bytes_of(*x)
    return total


def recorded(cache: scram.Cache, q: Tensor) -> calls.DecodeCall:
    """What `scram.decode` reads."""
    seen: list[calls.DecodeCall] = []
    state = cache._state
    assert state is not None
    engine = dispatch.engine(state.resolved.engine.name)
    before = engine.decode
    try:
        engine.decode = lambda call: (seen.append(call), before(call))[1]  # type: ignore[method-assign]
        scram.decode(q, cache)
    finally:
        engine.decode = before  # type: ignore[method-assign]
    return seen[-1]


def decode(options: Options) -> None:
    """Batch 8, 8 heads, E=64, bfloat16: the last position of a grid with so many."""
    rows = Rows(options, "decode")
    for size in SIZES:
        size //= options.shrink
        shape = (8, 8, size, 64)
        chance = torch.Generator(options.device).manual_seed(0)
        q, k, v = (torch.randn(shape, generator=chance, device=options.device, dtype=torch.bfloat16) for _ in range(3))
        for backend, which in [*BACKENDS.items(), ("products", None)]:
            rows.put(f"dense {backend} {size}", partial(dense_decoding, which, q[:, :, -1:], k, v, options.device))
        for half in (True, False) if size == SIZES[0] // options.shrink else (True,):
            name = f"SCRAM {size}{' books of 16 bits' * half}"
            rows.put(name, partial(our_decoding, q, k, v, half, options.device))


def dense_decoding(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, device: str) -> dict[str, Any]:
    def call() -> Tensor:
        if backend is None:
            return (q @ k.mT / 8).softmax(-1) @ v
        with by_backend(backend if device == "cuda" else None):
            return F.scaled_dot_product_attention(q, k, v)

    return {**milliseconds(call, device), "bytes": bytes_of(q, k, v)}


def our_decoding(q: Tensor, k: Tensor, v: Tensor, half: bool, device: str) -> dict[str, Any]:
    size = q.shape[2]
    tail = scram.Clusters(count=64, keys=512, seed=0)
    cache = scram.Cache((size,), tail=tail, half=half)
    begun = time.perf_counter()
    cache.append(q[:, :, :-64], k[:, :, :-64], v[:, :, :-64])
    if device == "cuda":
        torch.cuda.synchronize()
    row: dict[str, Any] = {"prompt_s": time.perf_counter() - begun}
    times = []
    for place in range(size - 64, size):  # a tile: append, routes and gathering included
        some = slice(place, place + 1)
        begun = time.perf_counter()
        cache.append(q[:, :, some], k[:, :, some], v[:, :, some])
        out = scram.decode(q[:, :, some], cache)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    row |= {"position_ms": statistics.median(times), "first_of_tile_ms": times[0], "tile_mean_ms": sum(times[1:]) / 63}
    last = q[:, :, -1:]
    call = recorded(cache, last)
    row["bytes"] = bytes_of(call)
    row["bytes_each"] = {name: bytes_of(x) for name, x in call._asdict().items() if bytes_of(x)}
    row |= milliseconds(partial(scram.decode, last, cache), device)
    dense = F.scaled_dot_product_attention(last.float(), k.float(), v.float())
    row["error_on_noise"] = far(out, dense)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("right", "masks", "forward", "decode"))
    parser.add_argument("argument", nargs="?", help="a dtype of `right`, the folder of `forward`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--commit", default=os.environ.get("SCRAM_COMMIT"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    {"right": right, "masks": masks, "forward": forward, "decode": decode}[options.part](options)


if __name__ == "__main__":
    main()
