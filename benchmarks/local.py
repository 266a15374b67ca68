"""`scram.local` beside FlexAttention, NATTEN and GMFlow's own local matching: `python benchmarks/local.py`.

Each attends the window of the radius around the query's own place. CPU seconds of all threads, the least of some calls,
forward and with gradients where the rival has them. FlexAttention is compiled; NATTEN runs where it is installed (PyPI
has its sources alone; without CUDA it runs FlexAttention, uncompiled). Windows at the border differ: NATTEN moves them
inwards. GMFlow's function takes no values: its output is the mean place. Results: results/local.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from store import Store
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import scram

REPEATS = 5
SHAPES = [  # heads, grid, width, width of values, radius
    (1, (60, 92), 128, 2, 4),
    (1, (120, 184), 128, 2, 4),
    (4, (64, 64), 64, 64, 3),
]
MOST_POINTS = 12000  # FlexAttention makes its mask of blocks from one of all pairs, NATTEN holds all scores


def cpu_seconds(call: Callable[[], Any]) -> float:
    """The least CPU time of some calls, all threads together."""
    call()
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def flex(grid: tuple[int, int], radius: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention with the same windows, compiled."""
    width = grid[1]

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rows, columns = i // width - j // width, i % width - j % width
        return (rows.abs() <= radius) & (columns.abs() <= radius)

    points = grid[0] * grid[1]
    mask = create_block_mask(near, None, None, points, points, device="cpu")
    torch._dynamo.reset()  # or a shape after others may run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(*(x.flatten(2, 3) for x in (q, k, v)), block_mask=mask)
        return out.reshape(*q.shape[:-1], v.shape[-1])

    return attend


def natten(radius: int) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    try:
        from natten import na2d
    except ImportError:
        return None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = [x.movedim(1, 3).contiguous() for x in (q, k, v)]
        out: Tensor = na2d(*given, kernel_size=(2 * radius + 1,) * 2)
        return out.movedim(3, 1)

    return attend


@cache
def example() -> Any:
    """The module of examples/gmflow.py, under a name that is not the model's."""
    path = Path(__file__).parents[1] / "examples" / "gmflow.py"
    spec = importlib.util.spec_from_file_location("gmflow_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def correlation(radius: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """GMFlow's `local_correlation_softmax`, plus each query's own place: the mean place."""
    gmflow = example()
    with tempfile.TemporaryDirectory() as folder:
        module: Any = gmflow.load(gmflow.wheel(gmflow.CACHE), Path(folder))[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flow = module.local_correlation_softmax(gmflow.from_grid(q), gmflow.from_grid(k), radius)[0]
        return gmflow.to_grid(flow) + gmflow.places(q)

    return attend


def measure(heads: int, grid: tuple[int, int], width: int, values: int, radius: int) -> dict[str, Any]:
    """CPU seconds of each, forward and with gradients, and how far each is from `scram.local` away from the border."""
    q, k = torch.randn(2, 1, heads, *grid, width).unbind()
    v = torch.randn(1, heads, *grid, values)
    rivals: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | None] = {
        "scram": lambda q, k, v: scram.local(q, k, v, radius=radius).out,
        "flex": flex(grid, radius) if grid[0] * grid[1] <= MOST_POINTS else None,
        "natten": natten(radius) if grid[0] * grid[1] <= MOST_POINTS else None,
    }
    if values == 2:
        v = example().places(q)
        rivals["gmflow"] = correlation(radius)
    row: dict[str, Any] = {"heads": heads, "grid": grid, "width": width, "values": values, "radius": radius}
    inner = (..., slice(radius, -radius), slice(radius, -radius), slice(None))
    exact = scram.local(q, k, v, radius=radius).out
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for name, attend in rivals.items():
        if attend is None:
            continue
        try:
            with torch.no_grad():
                row[f"{name}_seconds"] = cpu_seconds(lambda attend=attend: attend(q, k, v))
                row[f"{name}_off"] = float((attend(q, k, v) - exact)[inner].abs().max())
            row[f"{name}_both_seconds"] = cpu_seconds(lambda attend=attend: attend(*leaves).sum().backward())
        except Exception as error:  # a rival that cannot: said, not hidden
            row[f"{name}_failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    store = Store("local")
    for shape in SHAPES:
        row = measure(*shape)
        print(row, flush=True)
        store.put(f"{'x'.join(map(str, shape[1]))} radius {shape[4]}", **row)


if __name__ == "__main__":
    main()
