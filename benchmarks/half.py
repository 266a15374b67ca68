"""Half precision beside float32 on a CPU: `python benchmarks/half.py [--sizes 128,256]`.

The default attention on smooth noise of width 64, forward and with gradients, in float32, bfloat16, float16 by turns.
CPU seconds of all threads, the least of some. Results: results/half_cpu.json, a row for each size and pass.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from store import Store
from torch import Tensor

import scram

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS, WIDTH, SEARCH = 7, 64, scram.Search(seed=0)


def smooth(size: int) -> Tensor:
    """[1, 1, size, size, WIDTH]"""
    small = torch.randn(1, WIDTH, size // 4, size // 4, generator=torch.Generator().manual_seed(0))
    return F.interpolate(small, (size, size), mode="bicubic").movedim(1, -1)[None]


def seconds(x: Tensor, gradients: bool) -> float:
    q, k, v = (x.clone().requires_grad_(gradients) for _ in range(3))
    begin = time.process_time()
    out = scram.attention(q, k, v, search=SEARCH)
    if gradients:
        out.float().square().sum().backward()
    return time.process_time() - begin


def main(sizes: list[int], store: Store) -> None:
    for size in sizes:
        tensors = {name: smooth(size).to(dtype) for name, dtype in DTYPES.items()}
        for gradients in (False, True):
            for x in tensors.values():  # compiles
                seconds(x, gradients)
            rounds = [{name: seconds(x, gradients) for name, x in tensors.items()} for _ in range(REPEATS)]
            row = {name: min(one[name] for one in rounds) for name in tensors}
            name = f"{size}x{size}{', forward + backward' if gradients else ''}"
            print(name, {dtype: f"{1e3 * x:.0f} ms, {x / row['float32']:.2f}" for dtype, x in row.items()}, flush=True)
            store.put(name, seconds=row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="128,256", help="points along a side (default: %(default)s)")
    given = parser.parse_args()
    main([int(x) for x in given.sizes.split(",")], Store("half_cpu"))
