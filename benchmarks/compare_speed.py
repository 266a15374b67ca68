"""The part of compare.py that times two source trees in turn; see there."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from compare_trees import TREES, Worker, in_turn, say, store, tracked

PAUSE = 0.3  # seconds on a CPU: the other tree's threads go on spinning for a while after their work is done
COLD = "64x64 E=64, forward + backward, first call"
Times = dict[str, list[list[float]]]  # milliseconds by tree, by round, by call


def rows_of(device: str) -> list[dict[str, Any]]:
    """What is timed: first the rows of the README's table, by the settings of cpu.py and gpu.py."""
    plain = {"kind": "attention", "width": 64, "heads": 1, "matches": 1, "method": "query"}
    plain |= {"backward": False, "graph": False, "host": False}
    backward, narrow, graph = {"backward": True}, {"width": 3}, {"graph": True}
    default = {"kind": "default", "method": "auto"}
    attend = {"kind": "attend", "matches": 4, "method": "auto"}
    estimate = {"kind": "estimate", "matches": 4, "method": "auto"}
    size = 512 if device == "cuda" else 128
    table: list[tuple[str, int, dict[str, Any]]]
    if device == "cuda":
        table = [
            ("E=64, default", 512, default),
            ("E=64, default", 1024, default),
            ("E=64, 8 heads, default", 256, default | {"heads": 8}),
            ("E=64, default, forward + backward", 512, default | backward),
            ("E=64", 512, {}),
            ("E=64", 1024, {}),
            ("E=64, 8 heads", 256, {"heads": 8}),
            ("E=3", 512, narrow),
            ("E=3, CUDA graph", 512, narrow | graph),
            ("E=64, forward + backward", 512, backward),
            ("E=64", 64, {}),
            ("E=64, CUDA graph", 64, graph),
            ("search alone, tile", size, {"kind": "search", "method": "tile"}),
            ("E=64, until the call returns", 64, {"host": True}),
            ("E=64, forward + backward, until the call returns", 64, backward | {"host": True}),
        ]
    else:
        table = [
            ("E=64, default", 128, default),
            ("E=64, default", 256, default),
            ("E=64, default, forward + backward", 256, default | backward),
            ("E=64", 128, {}),
            ("E=64, forward + backward", 128, backward),
            ("E=64", 256, {}),
            ("E=3", 256, narrow),
            ("E=64", 64, {}),
            ("E=64", 8, {}),
        ]
    table += [
        ("default settings", size, {"method": "auto"}),
        ("attend alone, 4 matches", size, attend),
        ("attend alone, 4 matches, forward + backward", size, attend | backward),
        ("estimate alone, DrawnKeys(512)", size, estimate | {"estimator": "DrawnKeys", "samples": 512}),
        ("estimate alone, Snis(64)", size, estimate | {"estimator": "Snis", "samples": 64}),
    ]
    return [{**plain, **changes, "size": n, "name": f"{n}x{n} {words}"} for words, n, changes in table]


def pictures(folder: Path) -> str:
    """Store pictures for `gpu_sets.Data` and say which: scikit-image's stereo pair, or smooth random fields."""
    try:
        from gpu_sets import prepare

        prepare(folder, None)
        return "photographs"
    except Exception:  # not installed, or its pictures are not on this machine
        rng, size = np.random.default_rng(0), 512
        frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]) + 1 / size
        noise = np.fft.rfft2(rng.standard_normal((4, size, size))) / frequency**1.5  # much as in photographs
        *colors, depth = np.fft.irfft2(noise, (size, size))
        left = np.stack([(x - x.min()) / np.ptp(x) for x in colors], -1)
        shift = np.rint(24 * (depth - depth.min()) / np.ptp(depth)).astype(int)
        right = left[np.arange(size)[:, None], (np.arange(size) + shift) % size] + rng.normal(0, 0.01, left.shape)
        fields = [np.rint(255 * x.clip(0, 1)).astype(np.uint8) for x in (left, right)]
        np.savez(folder / "pictures.npz", left=fields[0], right=fields[1])
        return "smooth random fields"


def summary(rounds: Times, seed: int = 0) -> dict[str, Any]:
    """Median and spread of each tree, and new / base by the least of a round: the median, with a 95 % interval."""
    row: dict[str, Any] = {}
    for name, lists in rounds.items():
        low, middle, high = np.percentile(np.concatenate(lists), [10, 50, 90])
        row[name] = {"ms": middle, "ms_low": low, "ms_high": high, "calls": sum(map(len, lists))}
    ratios = np.array([min(new) / min(base) for base, new in zip(*rounds.values(), strict=True)])
    drawn = np.random.default_rng(seed).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(drawn, 1), [2.5, 97.5])
    return {**row, "ratio": float(np.median(ratios)), "low": low, "high": high, "rounds": len(ratios)}


def compare_speed(asked: argparse.Namespace, workers: dict[str, Worker], report: dict[str, Any]) -> int:
    """Time every row, what a first call takes, and the import; 1 if any of it failed."""
    report["rows"] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for row in rows_of(asked.device) if asked.only in row["name"]]
        cold = asked.cold if asked.only in COLD else 0
        report["features"] = pictures(Path(folder)) if rows or cold else None
        times: dict[str, Times] = {row["name"]: {"base": [], "new": []} for row in rows}
        for number, row in enumerate(tracked(rows * asked.processes, len(rows) * asked.processes, "rows")):
            if number % len(rows) == 0:  # a new process lies elsewhere in memory, which alone can change its times
                for worker in workers.values():
                    worker.close()
            if "failed" in report["rows"].get(row["name"], {}):
                continue
            try:
                time_row(row, asked, workers, folder, times[row["name"]])
                report["rows"][row["name"]] = summary(times[row["name"]])
            except RuntimeError as error:
                report["rows"][row["name"]] = {"failed": str(error)}
                say(f"{row['name']} failed: {error}")
            store(asked.json, report)
        try:
            others = first_calls(asked, cold, folder) | imports(asked)
            report["rows"] |= {name: summary(found) for name, found in others.items()}
        except (RuntimeError, subprocess.CalledProcessError) as error:
            report["rows"]["first call, import"] = {"failed": str(error)}
    return int(any("failed" in row for row in report["rows"].values()))


def time_row(
    row: dict[str, Any], asked: argparse.Namespace, workers: dict[str, Worker], folder: str, times: Times
) -> None:
    """Append the rounds of one row."""
    later = [worker.ask("prepare", row, folder, asked.device)["later_s"] for worker in workers.values()]
    calls = max(1, min(200, int(asked.seconds / max(later))))
    for order in in_turn(-(-asked.rounds // asked.processes)):
        taken = {}
        for name in order:
            time.sleep(PAUSE if asked.device == "cpu" else 0)
            taken[name] = workers[name].ask("measure", calls, asked.device, row["host"])
        for name in TREES:
            times[name].append(taken[name])


def first_calls(asked: argparse.Namespace, count: int, folder: str) -> dict[str, Times]:
    """Of a process's first call, forward and backward: with the compiler's cache empty, and filled."""
    row = next(row for row in rows_of(asked.device) if row["size"] == 64) | {"backward": True}
    names = [f"{COLD}, {state} cache" for state in ("empty", "filled")] if count else []
    times: dict[str, Times] = {name: {"base": [], "new": []} for name in names}
    for order in in_turn(count):
        for tree in order:
            with tempfile.TemporaryDirectory() as cache:
                for name in names:
                    say(f"{name}: {tree}")
                    places = {"NUMBA_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
                    worker = Worker(getattr(asked, tree), asked.threads, asked.limit, **places)
                    times[name][tree].append([1e3 * worker.ask("prepare", row, folder, asked.device)["first_s"]])
                    worker.close()
    return times


def imports(asked: argparse.Namespace) -> dict[str, Times]:
    """Of `import scram` where torch is there already, each in a process of its own."""
    if not asked.imports or asked.only not in "import scram":
        return {}
    code = "import time, torch; t = time.perf_counter(); import scram; print(1e3 * (time.perf_counter() - t))"
    times: Times = {"base": [], "new": []}
    for number, order in enumerate(in_turn(1 + asked.imports)):
        for tree in order:
            environment = {**os.environ, "PYTHONPATH": str(getattr(asked, tree).resolve())}
            taken = float(subprocess.check_output([sys.executable, "-c", code], env=environment))
            if number:  # the first pair fills the caches of the disk
                times[tree].append([taken])
    return {"import scram": times}
