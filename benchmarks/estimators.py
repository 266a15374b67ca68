"""Estimators on trained diffuse attention: errors, intervals, bias, and cost on a CUDA device.

    python benchmarks/estimators.py errors FILE       # error against keys visited, five heads of MobileSAM
    python benchmarks/estimators.py intervals FILE    # how often a nominal 95 % interval holds the truth
    python benchmarks/estimators.py bias FILE         # over thousands of seeds, a multiple of 20
    python benchmarks/estimators.py cost FOLDER       # what `gpu.py prepare` made; needs a CUDA device
    python benchmarks/estimators.py table
    python benchmarks/estimators.py plot docs/images/estimators.png

FILE holds q, k, v [64, 64, 5, 32]. Errors and bias are the same on every machine up to rounding; they run where the
device is. Results: results/estimators.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import store
import torch
from gpu_sets import Data
from torch import Tensor

import scram

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = 5
GROUPS = 20  # of seeds, for the error of a slope
HEAD = scram.Search(matches=8, separation=2, seed=0)  # with radius 1: at most 72 keys
HEAD_KEYS = 72
TAILS = (64, 128, 256, 512, 1024, 2048)
ALPHAS, WIDTHS = (0.05, 0.1, 0.2, 0.3, 0.5), (0.5, 1.0, 2.0, 4.0)
STEPS = (1.0, 2.0, 4.0, 8.0)
LABELS = {  # Okabe and Ito's colors
    "sparse": ("sparse: windows alone", "#999999", "x"),
    "uniform": ("uniform sampling", "#E69F00", "s"),
    "mh": ("Metropolis-Hastings", "#CC79A7", "v"),
    "snis": ("SNIS, best of the sweep", "#56B4E9", "D"),
    "hybrid": ("drawn keys", "#D55E00", "o"),
    "stratified": ("drawn keys, stratified", "#009E73", "^"),
}


class Problem:
    """Five heads of trained self-attention on 64 x 64, their truth and their matches."""

    def __init__(self, file: Path, every: int = 1) -> None:
        data = np.load(file)
        self.q, self.k, self.v = (
            torch.from_numpy(data[name].astype(np.float32)).movedim(2, 0)[None].contiguous().to(DEVICE)
            for name in "qkv"
        )
        self.found = scram.search(self.q, self.k, search=HEAD)
        if every > 1:  # a coarser grid of queries, the same keys
            self.q = self.q[:, :, ::every, ::every].contiguous()
            index, score = (x[:, :, ::every, ::every].contiguous() for x in (self.found.index, self.found.score))
            self.found = scram.Matches(index, score, self.found.key_grid)
        self.truth = scram.exact_attention(self.q, self.k, self.v)

    def estimate(self, method: Any) -> scram.Estimate:
        return scram.estimate(self.q, self.k, self.v, self.found, method=method)

    def error(self, out: Tensor) -> Tensor:
        """Relative error of each head."""
        gap = (out - self.truth.out).flatten(2).norm(dim=-1)
        return (gap / self.truth.out.flatten(2).norm(dim=-1))[0].cpu()

    def median(self, make: Callable[[int], Any]) -> list[float]:
        """Of each head over the seeds."""
        runs = torch.stack([self.error(self.estimate(make(seed)).out) for seed in range(SEEDS)])
        return [round(float(x), 4) for x in runs.median(0).values]


def errors(file: Path, rows: store.Store) -> None:
    problem = Problem(file)

    def put(name: str, method: str, keys: float, by_head: list[float], **more: Any) -> None:
        rows.put(f"error {name}", method=method, keys=keys, by_head=by_head, mean=statistics.mean(by_head), **more)
        print(name, keys, by_head, more, flush=True)

    for matches in (1, 2, 4, 8, 16, 32):
        found = scram.search(problem.q, problem.k, search=scram.Search(matches=matches, separation=2, seed=0))
        out, lse = scram.attend(problem.q, problem.k, problem.v, found, radius=1)
        mass = float((lse - problem.truth.lse).exp().mean())
        by_head = [round(float(x), 4) for x in problem.error(out)]
        put(f"sparse {matches}", "sparse", 9 * matches, by_head, captured_mass=mass)
    at = HEAD_KEYS + 512
    sweep = {
        (alpha, width): problem.median(lambda s, a=alpha, w=width: scram.Snis(at, a, w, seed=s))
        for alpha in ALPHAS
        for width in WIDTHS
    }
    for (alpha, width), by_head in sweep.items():
        put(f"sweep snis {alpha} {width}", "snis sweep", at, by_head, alpha=alpha, bandwidth=width)
    alpha, width = min(sweep, key=lambda key: statistics.mean(sweep[key]))
    walks = {step: problem.median(lambda s, w=step: scram.MetropolisHastings(at, 1, w, seed=s)) for step in STEPS}
    for step, by_head in walks.items():
        put(f"sweep mh {step}", "mh sweep", at, by_head, bandwidth=step)
    step = min(walks, key=lambda key: statistics.mean(walks[key]))
    for tail in TAILS:
        keys = HEAD_KEYS + tail
        methods = {
            "uniform": lambda s, n=keys: scram.Snis(n, 0.0, seed=s),
            "snis": lambda s, n=keys: scram.Snis(n, alpha, width, seed=s),
            "mh": lambda s, n=keys: scram.MetropolisHastings(n, 1, step, seed=s),
            "hybrid": lambda s, n=tail: scram.DrawnKeys(n, seed=s),
            "stratified": lambda s, n=tail: scram.DrawnKeys(n, stratified=True, seed=s),
        }
        for name, make in methods.items():
            put(f"{name} {keys}", name, keys, problem.median(make))
    made = problem.estimate(scram.MetropolisHastings(at, 1, step, seed=0))
    print(made, problem.estimate(scram.Snis(at, alpha, width, seed=0)), sep="\n")


def intervals(file: Path, rows: store.Store) -> None:
    problem = Problem(file)
    methods = {
        "snis 512": lambda s: scram.Snis(512, 0.1, 1.0, seed=s),
        "uniform 512": lambda s: scram.Snis(512, 0.0, seed=s),
        "hybrid 512": lambda s: scram.DrawnKeys(512, seed=s),
        "stratified 512": lambda s: scram.DrawnKeys(512, stratified=True, seed=s),
    }
    for name, make in methods.items():
        shares = []
        for seed in range(20):
            made = problem.estimate(make(seed))
            inside = (made.out - problem.truth.out).abs() <= 1.96 * made.variance.sqrt()
            shares.append(inside.float().mean((0, 2, 3, 4)).cpu())
        by_head = [round(float(x), 4) for x in torch.stack(shares).mean(0)]
        spread = [round(float(torch.stack(shares).min()), 4), round(float(torch.stack(shares).max()), 4)]
        rows.put(f"intervals {name}", seeds=20, by_head=by_head, least_and_most_of_one_seed=spread)
        print("intervals", name, by_head, spread, flush=True)


def bias(file: Path, rows: store.Store, seeds: int) -> None:
    """Of out, with what chance gives to its square taken off; 16 queries of each head.

    (out - truth) times the estimated over the true normalizer has the mean 0, since numerator and normalizer have no
    bias. It is subtracted from out - truth: what is left has the same mean and varies far less.
    """
    problem = Problem(file, every=16)
    truth, true_lse = problem.truth.out.double(), problem.truth.lse.double().unsqueeze(-1)
    methods: dict[str, tuple[Callable[[int, int], Any], tuple[int, ...]]] = {
        "snis": (lambda samples, seed: scram.Snis(samples, 0.1, 1.0, seed=seed), (64, 256, 1024)),
        "hybrid": (lambda samples, seed: scram.DrawnKeys(samples, seed=seed), (32, 64, 128, 256, 512, 1024)),
    }
    for name, (make, numbers) in methods.items():
        groups, variances = [], []  # of seeds: their sums, [groups, numbers, ..]; and the variance of one run
        for samples in numbers:
            sums = torch.zeros(GROUPS, 2, *truth.shape, dtype=torch.float64, device=DEVICE)  # of the rest, its square
            total, squares = torch.zeros_like(truth), torch.zeros_like(truth)
            for seed in range(seeds):
                made = problem.estimate(make(samples, seed))
                assert made.lse is not None
                gap = made.out.double() - truth
                rest = gap * (1 - (made.lse.double().unsqueeze(-1) - true_lse).exp())
                sums[seed % GROUPS] += torch.stack([rest, rest.square()])
                total += gap
                squares += gap.square()
            groups.append(sums)
            variances.append(float(((squares - total.square() / seeds) / (seeds - 1)).sum()))
            square, chance = _squared_bias(sums, seeds)
            rows.put(
                f"bias {name} {samples}",
                samples=samples,
                seeds=seeds,
                bias=max(square, 0.0) ** 0.5,
                deviation=variances[-1] ** 0.5,
                chance=chance,
            )
            print("bias", name, samples, max(square, 0.0) ** 0.5, variances[-1] ** 0.5, chance, flush=True)
        # Drawn without replacement from M keys: 1/m becomes 1/m - 1/M.
        sizes = np.array([1 / (1 / n - (name == "hybrid") / 4096) for n in numbers])
        for label, some in {"": slice(None), " from 128": slice(2, None)}.items():
            if name == "snis" and label:
                continue
            slope, error = _bias_slope(sizes[some], groups[some], seeds)
            spread = float(np.polyfit(np.log(sizes[some]), np.log(variances[some]), 1)[0])
            against = "1/m - 1/M" if name == "hybrid" else "1/T"
            rows.put(f"slopes {name}{label}", bias=slope, bias_error=error, variance=spread, against=against)
            print("slopes", name, label, "bias", slope, "+-", error, "variance", spread, flush=True)


def _squared_bias(sums: Tensor, seeds: float) -> tuple[float, float]:
    """Of the sums over groups of seeds: the squared size of the mean without chance's part, and chance's size."""
    total, squares = sums.sum(0)
    variance = (squares - total.square() / seeds) / (seeds - 1)
    chance = float(variance.sum()) / seeds
    return float((total / seeds).square().sum()) - chance, chance**0.5


def _bias_slope(sizes: Any, groups: list[Tensor], seeds: int) -> tuple[float, float]:
    """In log-log, and its standard error: the jackknife over the groups of seeds."""

    def slope(left_out: list[int]) -> float:
        kept, number = [n for n in range(GROUPS) if n not in left_out], seeds * (1 - len(left_out) / GROUPS)
        squares = [max(_squared_bias(sums[kept], number)[0], 1e-12) for sums in groups]
        return float(np.polyfit(np.log(sizes), np.log(squares), 1)[0]) / 2

    each = np.array([slope([n]) for n in range(GROUPS)])
    return slope([]), float(((GROUPS - 1) * ((each - each.mean()) ** 2).mean()) ** 0.5)


def cost_tensors(data: Data, size: int = 512) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v and the scale that the cost is measured on."""
    return data.tensors("stereo", size, 64, 1, torch.bfloat16)


def cost(folder: Path, rows: store.Store, only: str) -> None:
    from gpu import clock

    q, k, v, scale = cost_tensors(Data(folder))
    search = scram.Search.paper(seed=0)

    def sparse() -> Tensor:
        return scram.attention(q, k, v, search=search, tail=None, scale=scale)

    def hybrid(stratified: bool = False, leaves: tuple[Tensor, ...] = (q, k, v)) -> Tensor:
        found = scram.search(*leaves[:2], search=search)
        return scram.estimate(*leaves, found, method=scram.DrawnKeys(512, stratified, seed=0), scale=scale).out

    found = scram.search(q, k, search=search)
    method = scram.DrawnKeys(512, seed=0)
    ours = scram.estimate(q, k, v, found, method=method, scale=scale)
    some = slice(0, 1)  # row of the grid
    few = scram.Matches(found.index[:, :, some].contiguous(), found.score[:, :, some].contiguous(), found.key_grid)
    truth = scram.estimate(
        q[:, :, some].double(), k.double(), v.double(), few, method=method, scale=scale, impl="reference"
    )
    gap = float((ours.out[:, :, some] - truth.out).norm() / truth.out.norm())
    print("relative distance from the float64 reference", gap)
    leaves = tuple(x.detach().clone().requires_grad_() for x in (q, k, v))

    def trained(make: Callable[[], Tensor]) -> None:
        out = make()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    calls: dict[str, Callable[[], Any]] = {
        "sparse": sparse,
        "hybrid": hybrid,
        "hybrid stratified": lambda: hybrid(True),
        "estimate alone": lambda: scram.estimate(q, k, v, found, method=method, scale=scale),
        "sparse fwd+bwd": lambda: trained(lambda: scram.attention(*leaves, search=search, tail=None, scale=scale)),
        "hybrid fwd+bwd": lambda: trained(lambda: hybrid(leaves=leaves)),
        "snis 64": lambda: scram.estimate(q, k, v, found, method=scram.Snis(64, seed=0), scale=scale),
        "mh 64": lambda: scram.estimate(q, k, v, found, method=scram.MetropolisHastings(64, seed=0), scale=scale),
    }
    for name, call in calls.items():
        if not any(part in name for part in only.split(",")):
            continue
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = clock(call, 0.1)
        peak = torch.cuda.max_memory_allocated() - before
        begun = time.perf_counter()
        for _ in range(10):
            call()
        host = 100 * (time.perf_counter() - begun)  # until the last launch
        torch.cuda.synchronize()
        queued = 100 * (time.perf_counter() - begun)
        ms = statistics.median(times)
        rows.put(
            f"cost {name}",
            ms=ms,
            ms_low=times[0],
            ms_high=times[-1],
            peak_bytes=peak,
            host_ms=host,
            queued_ms=queued,
            shape="512x512 E64 bf16",
            from_float64=gap,
        )
        print("cost", name, ms, times[0], times[-1], peak, "host", host, "queued", queued, flush=True)


def table(rows: dict[str, Any]) -> str:
    lines = ["| keys visited | method | error of each head | mean |", "|---|---|---|---|"]
    for name, row in rows.items():
        if name.startswith("error") and "by_head" in row:
            each = ", ".join(f"{x:.3f}" for x in row["by_head"])
            lines.append(f"| {row['keys']} | {name.removeprefix('error ')} | {each} | {row['mean']:.3f} |")
    for name, row in rows.items():
        if not name.startswith("error"):
            kept = {key: value for key, value in row.items() if key not in ("date", "commit", "machine")}
            lines.append(f"{name}: {kept}")
    return "\n".join(lines)


def plot(rows: dict[str, Any], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for method, (label, color, mark) in LABELS.items():
        line = sorted((row["keys"], row["mean"]) for row in rows.values() if row.get("method") == method)
        axes.plot(*zip(*line, strict=True), color=color, marker=mark, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="keys visited per query, of 4096", ylabel="relative error of the output"
    )
    axes.set_xticks([16, 64, 256, 1024], ["16", "64", "256", "1024"])
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1.0], ["5 %", "10 %", "20 %", "50 %", "100 %"])
    axes.minorticks_off()
    axes.set_title("Trained diffuse attention (MobileSAM, mean of 5 heads)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("errors", "intervals", "bias", "cost"):
        one = commands.add_parser(name)
        one.add_argument("file", type=Path)
        one.add_argument("--commit", help="of the code, where git is missing")
        one.add_argument("--seeds", type=int, default=4000)
        one.add_argument("--only", default="", help="of cost: parts of names, with commas between")
    commands.add_parser("table")
    commands.add_parser("plot").add_argument("picture", type=Path)
    asked = parser.parse_args()
    rows = store.Store("estimators")
    if asked.command == "table":
        print(table(rows.data))
    elif asked.command == "plot":
        plot(rows.data, asked.picture)
    else:
        if asked.commit:
            store.commit = lambda: asked.commit
        own = {"bias": {"seeds": asked.seeds}, "cost": {"only": asked.only}}
        how = own.get(asked.command, {})
        {"errors": errors, "intervals": intervals, "bias": bias, "cost": cost}[asked.command](asked.file, rows, **how)


if __name__ == "__main__":
    main()
