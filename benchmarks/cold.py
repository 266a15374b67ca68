"""The first call of `scram.attention` in a fresh process, with an empty cache of compiled code.

`python benchmarks/cold.py [--only NAME]`; `--table` prints the results. Each row is a process of its own, on all cores
or on one, where no second process compiles. CPU seconds are those of the calling process. Results: results/cold.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from store import Store

PROGRAM = """
import json, os, resource, sys, time
shape, dtype, gradients, cores = json.loads(sys.argv[1])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
import torch, scram
import scram.engines.cpu.engine
q = torch.randn(1, 1, *shape, 64, dtype=getattr(torch, dtype), requires_grad=gradients)
def took(call):
    start, busy = time.perf_counter(), cpu()
    result = call()
    return time.perf_counter() - start, cpu() - busy, result
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
seconds, busy, out = took(lambda: scram.attention(q, q, q))
row = {"seconds": seconds, "own_cpu_seconds": busy}
if gradients:
    row["backward_seconds"], row["backward_own_cpu_seconds"], _ = took(lambda: out.sum().backward())
again, _, _ = took(lambda: scram.attention(q, q, q))
row["again_ms"] = 1e3 * again
print(json.dumps(row))
"""
ROWS = {  # grid, dtype, whether gradients follow, cores
    "64x64, float32": ((64, 64), "float32", False, 2),
    "64x64, float32, one core": ((64, 64), "float32", False, 1),
    "64x64, float32, forward + backward": ((64, 64), "float32", True, 2),
    "4096, float32": ((4096,), "float32", False, 2),
    "16x16x16, float64": ((16, 16, 16), "float64", False, 2),
}


def measured(name: str) -> dict[str, float]:
    """Seconds of one first call."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [sys.executable, "-c", PROGRAM, json.dumps(ROWS[name])]
        given = {**os.environ, "NUMBA_CACHE_DIR": folder}
        row: dict[str, float] = json.loads(subprocess.run(words, env=given, capture_output=True, check=True).stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=tuple(ROWS), help="may be repeated")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    store = Store("cold")
    for name in [] if given.table else given.only or ROWS:
        store.put(name, **measured(name))
    for name, row in store.data.items():
        print(name, {key: round(x, 2) for key, x in row.items() if isinstance(x, float)})


if __name__ == "__main__":
    main()
