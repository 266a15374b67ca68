"""Two source trees of this package on one machine in one run: are the results the same, and is the speed?

    python benchmarks/compare.py same BASE/src NEW/src --calls 500 --impl numba,reference --json same.json
    python benchmarks/compare.py speed BASE/src NEW/src --device cuda --rounds 20 --json speed.json
    python benchmarks/compare.py table same.json speed.json

Each tree has a process of its own, and both stay alive. `same` makes random calls, forward and backward, from the same
seeds. Search fields are compared bit for bit on features whose scores are exact; all else to rounding (TOLERANCE). The
exit code is 1 if anything differs. `speed` times the rows of the README's table and more, the two trees in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from compare_speed import compare_speed
from compare_trees import TREES, Worker, describe, say, store, tracked

# |new - base| may be this times (|base| + root mean square of base), by the dtype of the result.
TOLERANCE = {"float64": 64 * 2.0**-52, "float32": 64 * 2.0**-23, "float16": 2 * 2.0**-10, "bfloat16": 2 * 2.0**-7}
REFUSED = {("error", "error"): "both refuse", ("error", "ok"): "only base refuses"}  # reported, but not a difference
POINTS = {"numba": 900, "reference": 250, "triton": 4000, "interpreter": 30}  # of the largest grid, by implementation


def random_case(seed: str, impl: str, device: str, points: int) -> dict[str, Any]:
    """The parameters of one call, all that the engine takes."""
    rng = random.Random(seed)
    rank, kind = rng.randint(1, 4), rng.choice(["attend", "attend", "attention", "estimate"])
    side = max(2, int(points ** (1 / rank)))
    causal = rng.random() < 0.25
    weight = rng.choice(["softmax", "softmax", "mean", "relu"])

    def extents() -> tuple[int, ...]:
        return tuple(1 if rng.random() < 0.06 else rng.randint(max(1, side // 3), side) for _ in range(rank))

    grid = extents()
    key_grid = grid if causal or rng.random() < 0.4 else extents()
    key_heads = rng.choice([1, 1, 2, 3])
    estimator = rng.choice(["DrawnKeys", "DrawnKeys", "Snis", "MetropolisHastings"])
    drawn: dict[str, Any] = {"samples": rng.choice([1, 5, 16, 33, 64]), "seed": rng.randrange(2**31)}
    if estimator == "DrawnKeys":
        drawn["stratified"] = rng.random() < 0.5
    elif estimator == "Snis":
        drawn |= {"alpha": rng.choice([0.0, 0.2, 0.5]), "bandwidth": rng.choice([0.5, 1.0, 3.0])}
    else:
        drawn |= {"chains_per_mode": rng.randint(1, 2), "burn_in": rng.choice([0, 2]), "bandwidth": 2.0}
    search = {
        "method": rng.choice(["query", "query", "query" if impl == "numba" or causal else "tile"]),
        "matches": rng.randint(1, 6),
        "separation": rng.choice([0, 0, 0, 1, 2, 9]),
        "sweeps": rng.randint(0, 3),
        "jumps": rng.choice([(8, 4, 2, 1), (4, 2, 1), (2, 1), (1, 2), (3,), ()]),
        "propagate": rng.choice(["shift", "stay", "both", "turns"]),
        "gossip": rng.choice([0, 1, 2, 4, 8]),
        "seed": rng.randrange(2**31),
    }
    dtypes = ["float32"] * 3 + ["float16", "bfloat16"] + ["float64"] * (impl != "triton")
    wide = (1, 2, 3, 4, 7, 8, 16, 20) if points < 100 else (1, 2, 3, 4, 7, 8, 16, 20, 32, 33, 60, 64, 128)
    tails: list[tuple[str | None, dict[str, Any]]] = [(None, {})]
    if weight == "softmax":
        tails.append(("DrawnKeys", {"samples": rng.choice([1, 5, 64]), "stratified": rng.random() < 0.5}))
        if not causal:
            tails += [("Clusters", {"count": rng.choice([1, 7, 64]), "steps": rng.randint(0, 2)})] * 3
    tail, tail_settings = rng.choice(tails)
    no_extra = kind == "estimate" and estimator == "MetropolisHastings"
    return {
        "impl": impl,
        "device": device,
        "kind": kind,
        "batch": rng.choice([0, *[1] * 12, *[2] * 7]),
        "heads": key_heads * rng.choice([1, 1, 2, 3]),
        "key_heads": key_heads,
        "grid": grid,
        "key_grid": key_grid,
        "width": rng.choice(wide),
        "value_width": rng.choice(wide),
        "dtype": rng.choice(dtypes),
        "search": search,
        "warm": rng.choice([0, 0, 0, 1, 2, 4]),
        "mask": rng.choice(["none", "none", "none", "batch", "head", "row"]),
        "causal": causal,
        "score": rng.choice(["dot", "dot", "cosine", "l2"]),
        "scale": rng.choice([None, None, 0.5, 2.0]),
        "matches": rng.choice(["found", "random"]),
        "radius": rng.choice([0, 1, 1, 2, tuple(rng.randint(0, 2) for _ in range(rank))]),
        "weight": weight,
        "tail": tail,
        "tail_settings": tail_settings,
        "extra": 0 if no_extra else rng.choice([0, 0, 1, 3]),
        "dropout_p": rng.choice([0.0, 0.0, 0.3]),
        "estimator": estimator,
        "estimator_settings": drawn,
        "strided": rng.random() < 0.2,
        "repeatable": impl != "reference" and rng.random() < 0.3,
        "seed": rng.randrange(2**31),
    }


def differences(base: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[str]]:
    """In words what differs by more than it may, and the names of all results that are not the same to the bit."""
    if base.keys() != new.keys():
        return [f"results: base has {sorted(base)}, new {sorted(new)}"], sorted(base)
    found, rounded = [], []
    for name, (dtype, a) in base.items():
        other, b = new[name]
        if (dtype, a.shape) != (other, b.shape):
            found.append(f"{name}: base is {dtype} {a.shape}, new {other} {b.shape}")
        elif a.tobytes() != b.tobytes():
            rounded.append(name)
            strict = name in ("index", "match score")
            x, y = a.astype(np.float64), b.astype(np.float64)
            finite = np.isfinite(x) & np.isfinite(y)
            gap = np.where(finite, np.abs(np.where(finite, x, 0) - np.where(finite, y, 0)), 0)
            size = np.abs(np.where(finite, x, 0))
            allowed = 0 if strict else TOLERANCE[dtype] * (size + np.sqrt((size**2).mean()))
            bad = (gap > allowed) | ~(finite | (x == y) | (np.isnan(x) & np.isnan(y)))
            if strict or bad.any():
                found.append(f"{name}: {bad.sum()} of {bad.size} {dtype} values differ, by up to {gap.max():.3g}")
    return found, rounded


def compare_results(asked: argparse.Namespace, workers: dict[str, Worker], report: dict[str, Any]) -> int:
    """Make the random calls in both trees; 1 if anything differs, or an implementation had nothing to compare."""
    report |= {"seed": asked.seed, "tolerance": TOLERANCE, "calls": {}, "results": 0, "failures": []}
    report["not the same bits"] = Counter()
    numbers = range(asked.first, asked.first + asked.calls)
    tails = all(worker.ask("knows_tails") for worker in workers.values())
    cases = [(impl, number) for impl in asked.impl for number in numbers]
    for impl, number in tracked(cases, len(cases), "calls"):
        name = "interpreter" if impl == "triton" and asked.device == "cpu" else impl
        case = random_case(f"{asked.seed} {impl} {number}", impl, asked.device, asked.points or POINTS[name])
        if not tails:
            case |= {"tail": None, "tail_settings": {}}
        for worker in workers.values():
            worker.send("call", case)
        (of_base, base), (of_new, new) = (worker.receive() for worker in workers.values())
        answers = (("base", of_base, base), ("new", of_new, new))
        words = [f"{tree} {of}: {what}" for tree, of, what in answers if of != "ok"]
        if not words:
            words, rounded = differences(base, new)
            verdict = "different" if words else "same to rounding" if rounded else "same bits"
            report["results"] += len(base)
            report["not the same bits"].update(rounded)
        elif (of_base, of_new) in REFUSED:
            verdict = REFUSED[of_base, of_new]
        else:
            verdict = f"base {of_base}, new {of_new}"
        report["calls"].setdefault(impl, Counter())[verdict] += 1
        if words:
            report["failures"].append({"call": number, "verdict": verdict, "what": words, "parameters": case})
            say(f"{impl} call {number}, {verdict}: " + "; ".join(words) + f"\n  {case}")
        if number % 20 == 0:
            store(asked.json, report)
    good = {"same bits", "same to rounding"}
    verdicts = [set(count) for count in report["calls"].values()]
    return 0 if all(some & good and some <= good.union(REFUSED.values()) for some in verdicts) else 1


def table(report: dict[str, Any]) -> str:
    machine, commits = report["machine"], report["commits"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    place = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    lines = [f"{report['mode']}: base {commits['base']}, new {commits['new']}"]
    lines.append(f"{place}; {versions}; {report['date']}")
    if report["mode"] == "same":
        for impl, count in report["calls"].items():
            lines.append(f"  {impl:10} " + ", ".join(f"{number} {verdict}" for verdict, number in count.items()))
        rounded = report["not the same bits"]
        names = ", ".join(f"{count} {name}" for name, count in rounded.items())
        bits = report["results"] - sum(rounded.values())
        lines.append(
            f"  {bits} of {report['results']} results are the same to the bit" + f", not {names}" * bool(names)
        )
        for one in report["failures"]:
            where = f"{one['parameters']['impl']} call {one['call']}"
            lines.append(f"  {where}, {one['verdict']}: {'; '.join(one['what'])}")
        return "\n".join(lines)
    wide = max(map(len, report["rows"]), default=30)
    lines.append(f"{'ms, median (10 to 90 %)':{wide}} {'base':>25} {'new':>25}   new / base (95 %)")
    for name, row in report["rows"].items():
        if "failed" in row:
            lines.append(f"{name:{wide}} failed: {row['failed']}")
            continue
        both = ([row[tree][key] for key in ("ms", "ms_low", "ms_high")] for tree in TREES)
        figures = ([f"{ms:.0f}" if ms >= 1000 else f"{ms:.4g}" for ms in three] for three in both)
        times = " ".join(f"{f'{middle} ({low}-{high})':>25}" for middle, low, high in figures)
        lines.append(f"{name:{wide}} {times}   {row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})")
    return "\n".join([*lines, f"features: {report['features']}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="mode", required=True)
    same, speed = (commands.add_parser(name) for name in ("same", "speed"))
    for one in (same, speed):
        one.add_argument("base", type=Path, help="folder that holds the package scram, such as BASE/src")
        one.add_argument("new", type=Path, help="the same of the other tree")
        one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        one.add_argument("--json", type=Path, help="where the results are stored")
        one.add_argument("--commits", nargs=2, metavar=("BASE", "NEW"), help="their names, where git cannot tell")
        one.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of each process")
        one.add_argument("--limit", type=float, default=600, help="seconds that a call may take, compiling included")
    same.add_argument("--impl", type=lambda words: words.split(","), default=["numba"], help="with commas between")
    same.add_argument("--calls", type=int, default=500, help="of each implementation")
    same.add_argument("--first", type=int, default=0, help="number of the first call, to repeat one")
    same.add_argument("--seed", type=int, default=0)
    same.add_argument("--points", type=int, help="of the largest grid; by default what suits the implementation")
    speed.add_argument("--rounds", type=int, default=20, help="turns of each tree, per row")
    speed.add_argument("--seconds", type=float, default=0.3, help="that a turn takes about")
    speed.add_argument("--processes", type=int, default=2, help="over which the rounds are spread, per tree")
    speed.add_argument("--only", default="", help="rows whose name holds this")
    speed.add_argument("--cold", type=int, default=1, help="first calls with an empty cache, per tree")
    speed.add_argument("--imports", type=int, default=10, help="of the package, per tree")
    commands.add_parser("table").add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.mode == "table":
        print("\n\n".join(table(json.loads(path.read_text())) for path in asked.files))
        return 0
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    refused = {"cuda": "numba", "cpu": "" if interpreted else "triton"}[asked.device]
    if asked.mode == "same" and refused in asked.impl:
        parser.error(f"--impl {refused} does not run on --device {asked.device} (triton does under TRITON_INTERPRET=1)")
    commits = asked.commits or [describe(getattr(asked, name)) for name in TREES]
    report: dict[str, Any] = {"mode": asked.mode, "date": date.today().isoformat(), "device": asked.device}
    report["commits"] = dict(zip(TREES, commits, strict=True))
    report["commit"] = report["commits"]["new"]  # as every stored result has it
    workers = {name: Worker(getattr(asked, name), asked.threads, asked.limit) for name in TREES}
    try:
        for worker in workers.values():
            report["machine"] = worker.ask("machine", asked.device)
        failed = (compare_results if asked.mode == "same" else compare_speed)(asked, workers, report)
    finally:
        for worker in workers.values():
            worker.close()
    store(asked.json, report)
    print(table(report))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
