"""A call that knows when it is wrong: the first searched call of a kind measures itself, and warns where it is far off.

After the answer, 64 queries of each head are attended densely. An output error of a head above 25 %: one
warning says so, with the line that mends it. Nothing waits for a GPU: the result is read when it is there, by a later
call or when the process ends. Nothing is measured while torch compiles, captures or transforms.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..spec.scoring import accumulator
from . import checks
from .dense import dense_attention
from .layout_hints import warn_caller
from .statistics import sum_of_squares
from .tails.base import NO_TAIL

if TYPE_CHECKING:
    from .resolve import Resolved

NUM_QUERIES = 64  # of each head
TOLERATED = 0.25
MOST_KINDS = 4096
GOLDEN = (math.sqrt(5) - 1) / 2


class AccuracyWarning(UserWarning):
    """What a call returned is far from dense attention."""


class _Measured(NamedTuple):
    """What a call measured of itself."""

    squares: Tensor  # [2, B, H] on the CPU: |out - exact|^2 and |exact|^2, summed over the queries
    is_there: Callable[[], bool]  # whether it was copied
    what: str  # the call, in words
    mend: str  # what to do


_enabled = True
known_kinds: set[tuple[Any, ...]] = set()  # of calls that were measured
pending: list[_Measured] = []  # what devices have yet to say
_lock = threading.Lock()  # held for a few lines that never wait


def check_first_call(enabled: bool) -> None:
    """Whether the first searched call of a kind measures itself, in the whole process; it does unless told otherwise.

    Args:
        enabled: False for no measurements and no `AccuracyWarning`.

    >>> scram.check_first_call(False)
    >>> scram.check_first_call(True)
    """
    global _enabled
    _enabled = checks.flag("enabled", enabled)


def clear() -> None:
    """Forget what was measured: each kind of call measures itself again."""
    with _lock:
        known_kinds.clear()
        pending.clear()


def measure(resolved: Resolved, kind: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Measures a call that was answered, if it is the first of its kind; reports earlier ones that a device has done.

    Args:
        resolved: the call, a searched one; `request.caller` says who calls.
        kind: what `Resolved.kind` returns.
        q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
        out: [B, H, *G, F].
    """
    if not _enabled:
        return
    if pending:
        look()
    if kind in known_kinds or not _can_be_measured(resolved, q, out):
        return
    with _lock:
        if kind in known_kinds:  # another thread was faster
            return
        if len(known_kinds) >= MOST_KINDS:
            known_kinds.clear()
        known_kinds.add(kind)
    try:
        squares, is_there = _on_the_host(_squares(resolved, q, k, v, out))
    except torch.OutOfMemoryError:  # the answer is there, and fits
        return
    heads = f"q {list(q.shape)}, k {list(k.shape)}, {str(q.dtype).removeprefix('torch.')} on {q.device.type}"
    measured = _Measured(squares, is_there, heads, _mend(resolved))
    if _reads_at_once(q.device):
        _report(measured)
    else:
        with _lock:
            pending.append(measured)


def look() -> None:
    """Reads what is there of the measurements that a device was asked for, and warns; waits for none."""
    if not pending or _captures():
        return
    with _lock:
        ready = [x for x in pending if x.is_there()]
        pending[:] = [x for x in pending if not any(x is one for one in ready)]
    for measured in ready:
        _report(measured)


def _can_be_measured(resolved: Resolved, q: Tensor, out: Tensor) -> bool:
    """Whether dense attention by torch is what the call stands for, and can be computed now."""
    request = resolved.request
    if request.weight != "softmax" or callable(request.score) or request.dropout_p or not out.numel():
        return False
    return q.device.type == "cpu" or (q.is_cuda and not _captures())


def _reads_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _captures() -> bool:
    """Whether a CUDA graph is captured: to look at an event then would end the capture."""
    return torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def _squares(resolved: Resolved, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """|out - exact|^2 and |exact|^2 of each head over a sample of queries, [2, B, H]."""
    request = resolved.request
    queries = sampled(q.shape[2:-1].numel(), q.device)
    exact = dense_attention(
        q,
        k,
        v,
        causal=request.causal,
        key_mask=request.key_mask,
        scale=resolved.scale,
        score=request.score,
        extra=request.extra_pair(),
        extra_mask=request.extra_mask,
        queries=queries,
    )
    wide = accumulator(out.dtype)
    exact = exact.to(wide)
    off = out.flatten(2, -2)[:, :, queries].to(wide) - exact
    return torch.stack([sum_of_squares(x).sum(-1) for x in (off, exact)])


def sampled(points: int, device: torch.device) -> Tensor:
    """Numbers of queries that lie evenly over a grid of so many points, int64 [n], without a draw.

    >>> sampled(10, torch.device("cpu"))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> sampled(4096, torch.device("cpu"))[:4]
    tensor([   0, 2531,  966, 3497])
    """
    number = torch.arange(min(points, NUM_QUERIES), device=device, dtype=torch.int64)
    if points <= NUM_QUERIES:
        return number
    step = round(GOLDEN * points)
    while math.gcd(step, points) > 1:
        step += 1
    return number.mul_(step).remainder_(points)


def _on_the_host(squares: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy on the CPU, and whether it is there: nothing waits for it."""
    if not squares.is_cuda:
        return squares, _at_once
    host = torch.empty(squares.shape, dtype=squares.dtype, device="cpu", pin_memory=True)
    host.copy_(squares, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(squares.device))
    return host, done.query


def _at_once() -> bool:
    return True


def _report(measured: _Measured) -> None:
    """Warns where a head is too far off."""
    off, size = measured.squares  # [B, H] each
    error = (off / size).sqrt().nan_to_num(nan=0.0)  # of no key, or of values that are not finite: says nothing
    worst = int(error.argmax())
    share = float(error.flatten()[worst])
    if share <= TOLERATED:
        return
    batch, head = divmod(worst, error.shape[1])
    warn_caller(
        f"what SCRAM returned is about {share:.0%} off dense attention (output error over {NUM_QUERIES} queries of "
        f"head {head} of batch entry {batch}; {measured.what}). {measured.mend}. Each kind of call is measured once; "
        "scram.check_first_call(False) ends that",
        AccuracyWarning,
    )


def _mend(resolved: Resolved) -> str:
    """What to do where the call is far off."""
    ways = ["error=0.05, which tunes attention for such tensors once"]
    begin = "Pass"
    if resolved.tail is NO_TAIL:
        begin = "Leave out tail=None, which drops every key outside the windows, or pass"
    elif not resolved.request.causal:
        count = max(1024, 2 * resolved.tail.samples)
        keys = max(2048, 2 * resolved.tail.keys)
        ways.append(f"tail=scram.Clusters(count={count}, keys={keys}), which visits more")
    return f"{begin} {', or '.join(ways)}, or search=None, tail=None, which is dense attention"


atexit.register(look)
