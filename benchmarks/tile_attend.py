"""Attention straight from tiles, a prototype beside `scram.attend`: error and time, forward and backward, on a device.

    python benchmarks/tile_attend.py build/gpu_data     # what `gpu.py prepare` has stored

The 64 queries of a tile attend the union of their windows (radius 1, rank 2) by matrix products. The union is a list of
cells of 2x2 keys that the windows touch, sorted and without doubles, so it is a little larger than the windows.
"""

# Kernels carry no types that mypy knows.
from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from store import Store
from tile import SETS, SHARPNESS, call_ms, graph_ms, seeded
from torch import Tensor

import scram

NO_CELL = tl.constexpr(2**31 - 1)
LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def list_kernel(index, cells, count, H, W, KH, KW, KAPPA: tl.constexpr, IDS: tl.constexpr):
    """The distinct cells that the windows of a tile's matches touch, ascending, and how many."""
    tile, across = tl.program_id(0), (W + 7) // 8
    n = tl.arange(0, IDS)
    lane, corner = n // (4 * KAPPA), n % 4
    y, x = tile // across * 8 + lane // 8, tile % across * 8 + lane % 8
    here = (y < H) & (x < W) & (lane < 64)
    key = tl.load(index + (y * W + x) * KAPPA + n // 4 % KAPPA, mask=here, other=-1)
    # Three rows, or columns, of keys touch two of cells.
    down, right = (key // KW + 1) // 2 - 1 + corner // 2, (key % KW + 1) // 2 - 1 + corner % 2
    cells_across = (KW + 1) // 2
    real = (key >= 0) & (down >= 0) & (right >= 0) & (down * 2 < KH) & (right < cells_across)
    ids = tl.sort(tl.where(real, down * cells_across + right, NO_CELL))
    mine = cells + tile.to(tl.int64) * IDS
    tl.store(mine + n, ids)
    tl.debug_barrier()
    before = tl.load(mine + n - 1, mask=n > 0, other=-1)
    tl.debug_barrier()
    new = (ids != before) & (ids < NO_CELL)
    tl.store(mine + tl.cumsum(new.to(tl.int32), 0) - 1, ids, mask=new)
    tl.store(count + tile, tl.sum(new.to(tl.int32), 0))


@triton.jit
def queries_of(tile, H, W, E: tl.constexpr):
    """Of each lane the query, whether it exists, and where its features are."""
    lane, across = tl.arange(0, 64), (W + 7) // 8
    y, x = tile // across * 8 + lane // 8, tile % across * 8 + lane % 8
    return y * W + x, (y < H) & (x < W), (y * W + x).to(tl.int64)[:, None] * E + tl.arange(0, E)[None, :]


@triton.jit
def keys_of(cells, begin, total, KH, KW):
    """64 keys from 16 cells, and which of them exist."""
    c, cells_across = tl.arange(0, 64), (KW + 1) // 2
    cell = tl.load(cells + begin + c // 4, mask=begin + c // 4 < total, other=-1)
    y, x = cell // cells_across * 2 + c % 4 // 2, cell % cells_across * 2 + c % 2
    real = (cell >= 0) & (y < KH) & (x < KW)
    return tl.where(real, y * KW + x, 0).to(tl.int64), real


@triton.jit
def read(pointers, WIDEN: tl.constexpr):
    x = tl.load(pointers)
    return x.to(tl.float32) if WIDEN else x  # Triton's interpreter multiplies no 16-bit types


@triton.jit
def forward_kernel(
    q, k, v, out, lse, cells, count, scale, H, W, KH, KW, E: tl.constexpr, IDS: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    tile, e = tl.program_id(0), tl.arange(0, E)
    query, valid, at = queries_of(tile, H, W, E)
    mine = read(q + tl.where(valid[:, None], at, 0), WIDEN)
    total = tl.load(count + tile)
    top, mass = tl.full([64], -float("inf"), tl.float32), tl.zeros([64], tl.float32)
    mixed = tl.zeros([64, E], tl.float32)
    for begin in range(0, total, 16):
        key, real = keys_of(cells + tile.to(tl.int64) * IDS, begin, total, KH, KW)
        s = tl.dot(mine, read(k + key[None, :] * E + e[:, None], WIDEN)) * scale
        s = tl.where(real[None, :], s, -float("inf"))
        high = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp2((s - high[:, None]) * LOG2E), tl.exp2((top - high) * LOG2E)
        values = read(v + key[:, None] * E + e[None, :], WIDEN)
        mixed = tl.dot(p.to(values.dtype), values, mixed * shrink[:, None])
        mass, top = mass * shrink + tl.sum(p, 1), high
    tl.store(out + at, (mixed / mass[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
    tl.store(lse + query, top + tl.log(mass), mask=valid)


@triton.jit
def backward_kernel(
    q, k, v, grad, out, lse, cells, count, dq, dk, dv, scale, H, W, KH, KW,
    E: tl.constexpr, IDS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile, e = tl.program_id(0), tl.arange(0, E)
    query, valid, at = queries_of(tile, H, W, E)
    safe = tl.where(valid[:, None], at, 0)
    mine, g, o = read(q + safe, WIDEN), read(grad + safe, WIDEN), tl.load(out + safe)
    mean = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    normaliser = tl.load(lse + query, mask=valid, other=float("inf"))
    total = tl.load(count + tile)
    own = tl.zeros([64, E], tl.float32)
    for begin in range(0, total, 16):
        key, real = keys_of(cells + tile.to(tl.int64) * IDS, begin, total, KH, KW)
        to = key[:, None] * E + e[None, :]
        keys, values = read(k + to, WIDEN), read(v + to, WIDEN)
        s = tl.dot(mine, tl.trans(keys)) * scale
        p = tl.where(real[None, :] & valid[:, None], tl.exp2((s - normaliser[:, None]) * LOG2E), 0.0)
        ds = p * (tl.dot(g, tl.trans(values)) - mean[:, None]) * scale
        own = tl.dot(ds.to(keys.dtype), keys, own)
        tl.atomic_add(dv + to, tl.dot(tl.trans(p).to(g.dtype), g), mask=real[:, None], sem="relaxed")
        tl.atomic_add(dk + to, tl.dot(tl.trans(ds).to(mine.dtype), mine), mask=real[:, None], sem="relaxed")
    tl.store(dq + at, own.to(dq.dtype.element_ty), mask=valid[:, None])


class TileAttention:
    """q [H, W, E], k and v [H', W', E], index [H, W, kappa]: softmax over the union of each tile's windows."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> None:
        self.tensors, self.index, self.scale = (q, k, v), index, scale
        self.tiles = (-(-q.shape[0] // 8) * -(-q.shape[1] // 8),)
        self.grids = (*q.shape[:2], *k.shape[:2])
        self.flags = {"E": q.shape[-1], "IDS": triton.next_power_of_2(256 * index.shape[-1]), "WIDEN": INTERPRETED}

    def forward(self) -> tuple[Tensor, Tensor]:
        q, ids = self.tensors[0], self.flags["IDS"]
        self.cells = torch.empty(*self.tiles, ids, dtype=torch.int32, device=q.device)
        self.count = torch.empty(self.tiles, dtype=torch.int32, device=q.device)
        self.out, self.lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
        list_kernel[self.tiles](
            self.index, self.cells, self.count, *self.grids, KAPPA=self.index.shape[-1], IDS=ids, num_warps=4
        )
        forward_kernel[self.tiles](
            *self.tensors, self.out, self.lse, self.cells, self.count, self.scale, *self.grids,
            **self.flags, num_warps=4, num_stages=2,
        )  # fmt: skip
        return self.out, self.lse

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros(k.shape, device=k.device), torch.zeros(v.shape, device=v.device)
        backward_kernel[self.tiles](
            *self.tensors, grad, self.out, self.lse, self.cells, self.count, dq, dk, dv, self.scale, *self.grids,
            **self.flags, num_warps=4, num_stages=1,
        )  # fmt: skip
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> Tensor:
    """The same in plain torch: everything outside a tile's cells is masked."""
    (height, wide, _), (key_height, key_wide, _) = q.shape, k.shape
    rows, columns = (torch.arange(n, device=q.device) for n in (height, wide))
    tile = (rows[:, None] // 8 * -(-wide // 8) + columns // 8).flatten()
    rows, columns = (torch.arange(n, device=q.device) // 2 for n in (key_height, key_wide))
    cells_across = -(-key_wide // 2)
    seen = torch.zeros(int(tile.max()) + 1, -(-key_height // 2) * cells_across, dtype=torch.bool, device=q.device)
    keys = index.reshape(height * wide, -1).long()
    owner = tile[:, None].expand_as(keys)
    for down in (-1, 1):
        for right in (-1, 1):
            y, x = (keys // key_wide + down).clamp(0, key_height - 1), (keys % key_wide + right).clamp(0, key_wide - 1)
            seen[owner[keys >= 0], (y // 2 * cells_across + x // 2)[keys >= 0]] = True
    mask = seen[tile][:, (rows[:, None] * cells_across + columns).flatten()]
    scores = (q.flatten(0, 1) @ k.flatten(0, 1).T * scale).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v.flatten(0, 1)).reshape(q.shape)


def correct(device: str, dtype: torch.dtype, kappa: int, width: int) -> float:
    """The largest relative error of output and gradients against float64."""
    q, k, v = (torch.randn(*grid, width, device=device).to(dtype) for grid in ((20, 27), (17, 25), (17, 25)))
    index = torch.randint(-1, 17 * 25, (20, 27, kappa), device=device, dtype=torch.int32)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    truth, grad = dense(*leaves, index, 0.7), torch.randn_like(q)
    ours = TileAttention(q, k, v, index, 0.7)
    found = [ours.forward()[0], *ours.backward(grad)]
    wanted = [truth.detach(), *torch.autograd.grad(truth, leaves, grad.double())]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def row(data: Any, name: str, kappa: int) -> dict[str, Any]:
    q, k, v, _ = data.tensors(name, 512, 64, 1, torch.bfloat16)
    found = scram.search(q, k, search=replace(seeded(scram.Search("tile"), "cuda"), matches=kappa))

    def measured(attended: scram.Attended) -> dict[str, float]:
        return {
            "output_error": float(scram.measure.output_error(q, k, v, attended, scale=SHARPNESS, sample=1500).mean()),
            "captured_mass": float(scram.measure.captured_mass(q, k, attended, scale=SHARPNESS, sample=1500).mean()),
        }

    def query_forward() -> scram.Attended:
        return scram.attend(q, k, v, found, radius=1, scale=SHARPNESS)

    tiled = TileAttention(q[0, 0], k[0, 0], v[0, 0], found.index[0, 0], SHARPNESS)
    out, lse = tiled.forward()
    grad = torch.randn_like(out)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    attended = scram.attend(*leaves, found, radius=1, scale=SHARPNESS)

    def query_backward() -> Any:
        return torch.autograd.grad(attended.out, leaves, grad[None, None], retain_graph=True)

    tile = measured(scram.Attended(out[None, None], lse[None, None]))
    tile |= {"keys": float(4 * tiled.count.float().mean()), "most_keys": int(4 * tiled.count.max())}
    tile |= {"forward_ms": graph_ms(tiled.forward), "backward_ms": call_ms(lambda: tiled.backward(grad))}
    query = measured(query_forward()) | {"forward_ms": graph_ms(query_forward), "backward_ms": call_ms(query_backward)}
    return {"data": name, "kappa": kappa, "radius": 1, "tile": tile, "query": query}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", help="where git is not there to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    asked = parser.parse_args()
    from gpu_sets import Data

    for kappa in (1, 4):
        error = correct("cuda", torch.bfloat16, kappa, 64)
        print(f"largest error against float64, kappa {kappa}: {error:.1e}")
        assert error < 0.02
    data, store = Data(asked.folder), Store("tile_attend", asked.out)
    for name in SETS:
        for kappa in (1, 4):
            store.put(f"gpu {name} kappa {kappa}", asked.commit, **row(data, name, kappa))
            print(name, kappa, store.data[f"gpu {name} kappa {kappa}"], flush=True)


if __name__ == "__main__":
    main()
