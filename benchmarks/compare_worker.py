"""What compare.py runs in one process for each source tree: random calls, and calls to be timed.

Only public names of scram are used, so that the two trees may differ in everything else.
"""

from __future__ import annotations

import inspect
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_sets import Data
from torch import Tensor

import scram

# Both trees run the paper's sparse attention; one that is older than tails knows nothing else.
NO_TAIL: dict[str, Any] = {"tail": None} if "tail" in inspect.signature(scram.attention).parameters else {}
OLD_NAMES = {"DrawnKeys": "Hybrid"}
timed: Callable[[], Any] = lambda: None  # noqa: E731 - the call of the row that `prepare` was given last


def serve(tree: str, threads: int) -> None:
    """Answer each pickled (function name, arguments) on stdin by ("ok", result) or ("error", words) on stdout."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    torch.set_num_threads(threads)
    if not Path(scram.__file__).resolve().is_relative_to(Path(tree).resolve()):
        raise SystemExit(f"scram was imported from {scram.__file__}, not from {tree}")
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = "ok", globals()[name](*arguments)
        except Exception as error:
            reply = "error", f"{type(error).__name__}: {error}"
        pickle.dump(reply, replies)
        replies.flush()


def machine(device: str) -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model name")]
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "numba"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": versions,
    }


class Tensors:
    """The tensors of a case, drawn in a fixed order, so that every process has the same."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.dtype, self.device = case, getattr(torch, case["dtype"]), case["device"]
        self.generator = torch.Generator().manual_seed(case["seed"])

    def placed(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if self.case["strided"] and x.ndim > 3 else x
        return x.to(self.device)

    def real(self, *shape: int) -> Tensor:
        return self.placed(torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype))

    def exact(self, *shape: int) -> Tensor:
        """Features with exact scores: whole numbers; for the cosine 1, 4 or 16 entries +-1, of norm 1, 2 or 4."""
        if self.case["score"] != "cosine":
            return self.placed(torch.randint(-3, 4, shape, generator=self.generator).to(self.dtype))
        counts = torch.tensor([count for count in (1, 4, 16) if count <= shape[-1]])
        count = counts[torch.randint(len(counts), shape[:-1], generator=self.generator)]
        place = torch.rand(shape, generator=self.generator).argsort(-1)
        sign = 2 * torch.randint(2, shape, generator=self.generator) - 1
        return self.placed(((place < count[..., None]) * sign).to(self.dtype))

    def matches(self, kappa: int) -> scram.Matches:
        """Anything a caller may pass: repeated keys, -1, and one past the grid."""
        case = self.case
        shape, keys = (case["batch"], case["heads"], *case["grid"], kappa), torch.Size(case["key_grid"]).numel()
        index = torch.randint(-1, keys + 1, shape, generator=self.generator, dtype=torch.int32)
        return scram.Matches(index.to(self.device), torch.zeros(shape, device=self.device), case["key_grid"])

    def mask(self) -> Tensor | None:
        case = self.case
        if case["mask"] == "none":
            return None
        heads = () if case["mask"] == "batch" else (case["heads"],)
        mask = torch.rand((case["batch"], *heads, *case["key_grid"]), generator=self.generator) < 0.6
        if case["mask"] == "row" and case["batch"]:
            mask[-1, -1] = False
        return mask.to(self.device)


def call(case: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Search, then attend or estimate, then backward: (dtype, numpy array) of each result by its name."""
    torch.use_deterministic_algorithms(case["repeatable"])
    make = Tensors(case)
    shape_q = (case["batch"], case["heads"], *case["grid"], case["width"])
    shape_k = (case["batch"], case["key_heads"], *case["key_grid"])
    q, k, mask = make.exact(*shape_q), make.exact(*shape_k, case["width"]), make.mask()
    where = {"causal": case["causal"], "key_mask": mask, "score": case["score"], "impl": case["impl"]}
    settings = scram.Search(**case["search"])
    warm = make.matches(case["warm"]) if case["warm"] else None
    found = scram.search(q, k, search=settings, warm=warm, **where)
    results = {"index": found.index, "match score": found.score}

    whole = case["kind"] == "attention"  # searches too, so its features are the exact ones
    leaves = [q, k] if whole else [make.real(*shape_q), make.real(*shape_k, case["width"])]
    leaves.append(make.real(*shape_k, case["value_width"]))
    if case["extra"]:
        leaves += [make.real(*shape_k[:2], case["extra"], case[width]) for width in ("width", "value_width")]
    for leaf in leaves:
        leaf.requires_grad_()
    where |= {"radius": case["radius"], "scale": case["scale"], "extra": tuple(leaves[3:]) or None}
    if case["matches"] == "random":
        found = make.matches(case["search"]["matches"])
    torch.manual_seed(case["seed"])
    if case["kind"] == "estimate":
        method = _settings(case["estimator"])(**case["estimator_settings"])
        made = scram.estimate(*leaves[:3], found, method=method, **where)
        names = ("out", "lse", "variance", "ess", "acceptance", "rhat")
        results |= {name: x for name in names if (x := getattr(made, name)) is not None}
    else:
        where |= {"weight": case["weight"], "dropout_p": case["dropout_p"]}
        if whole:
            tail = NO_TAIL if case["tail"] is None else {"tail": _settings(case["tail"])(**case["tail_settings"])}
            results["out"] = scram.attention(*leaves[:3], search=settings, warm=warm, **where, **tail)
        else:
            results["out"], results["lse"] = scram.attend(*leaves[:3], found, **where)
    total = torch.zeros((), dtype=torch.float64, device=case["device"])
    for x in (results["out"], results.get("lse")):
        if x is not None and x.requires_grad:
            along = torch.randn(x.shape, generator=make.generator, dtype=torch.float64).to(x.device)
            total = total + (torch.where(x.isfinite(), x, 0) * along).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    results |= zip(("grad q", "grad k", "grad v", "grad k_extra", "grad v_extra"), gradients, strict=False)
    plain = {torch.bfloat16: torch.float32}  # numpy has no bfloat16
    return {
        name: (str(x.dtype).removeprefix("torch."), x.detach().to(plain.get(x.dtype, x.dtype)).cpu().numpy())
        for name, x in results.items()
    }


def knows_tails() -> bool:
    """Whether this tree has tails; calls are compared without them where one has none."""
    return bool(NO_TAIL)


def _settings(name: str) -> Any:
    """Settings of a tail or estimator; an older tree may have another name for them."""
    return getattr(scram, name) if hasattr(scram, name) else getattr(scram, OLD_NAMES[name])


@cache
def _data(folder: str, device: str) -> Data:
    return Data(Path(folder), device)


def prepare(row: dict[str, Any], folder: str, device: str) -> dict[str, float]:
    """Make the call of a row and warm it up; seconds of the first call and of a later one."""
    global timed
    dtype = torch.bfloat16 if device == "cuda" and row["width"] != 3 else torch.float32
    q, k, v, scale = _data(folder, device).tensors("stereo", row["size"], row["width"], row["heads"], dtype)
    leaves = [x.detach().clone().requires_grad_(row["backward"]) for x in (q, k, v)]
    timed = _call_of(row, leaves, scale, device)
    times = []
    while len(times) < 3 or (sum(times[1:]) < 0.2 and len(times) < 30):
        begun = time.perf_counter()
        timed()
        _wait(device)
        times.append(time.perf_counter() - begun)
    return {"first_s": times[0], "later_s": min(times[1:])}


def _call_of(row: dict[str, Any], leaves: list[Tensor], scale: float, device: str) -> Callable[[], Any]:
    q, k, v = leaves
    impl = "triton" if device == "cuda" else "auto"
    # As in gpu.py and cpu.py: a captured graph reads its seed from the device, a call on a CPU has a fixed one.
    seed = torch.zeros((), dtype=torch.int64, device=device) if row["graph"] else None if device == "cuda" else 0
    kind = {"query": scram.Search.paper, "auto": scram.Search, "tile": lambda **how: scram.Search("tile", **how)}
    settings = kind[row["method"]](matches=row["matches"], seed=seed)
    how: dict[str, Any] = {"scale": scale, "impl": impl}
    if row["kind"] in ("attend", "estimate"):
        found = scram.search(q.detach(), k.detach(), search=kind[row["method"]](matches=row["matches"], seed=0))
    if row["kind"] == "estimate":
        method = _settings(row["estimator"])(samples=row["samples"], seed=0)

    def once() -> Any:
        if row["kind"] == "search":
            return scram.search(q, k, search=settings, impl=impl)
        if row["kind"] == "estimate":
            out = scram.estimate(q, k, v, found, method=method, **how).out
        elif row["kind"] == "attend":
            out = scram.attend(q, k, v, found, **how).out
        elif row["kind"] == "default":  # with its tail
            out = scram.attention(q, k, v, search=settings, scale=scale)
        else:
            out = scram.attention(q, k, v, search=settings, **how, **NO_TAIL)
        return torch.autograd.grad(out, leaves, torch.ones_like(out)) if row["backward"] else out

    if not row["graph"]:
        return once
    graph = torch.cuda.CUDAGraph()
    once()
    with torch.cuda.graph(graph):
        kept = once()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(calls: int, device: str, host: bool) -> list[float]:
    """Milliseconds of each call after an untimed one: by CUDA events on a GPU, or until the call returns (`host`).

    On a CPU those that all threads of the process worked: what others do on the machine then counts less.
    """
    timed()
    times = []
    for _ in range(calls):
        _wait(device)
        if device == "cuda" and not host:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            timed()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            clock = time.process_time if device == "cpu" else time.perf_counter
            begun = clock()
            timed()
            times.append(1e3 * (clock() - begun))
    return times
