"""The newest positions over a cache in plain torch: as plain loops say."""

import math

import pytest
import torch

from scram.engines.cpu.engine import decode
from scram.engines.reference.engine import decode as plainly
from scram.spec.routing import MOST_RAISED
from support.decode_calls import CASES, decode_call


def by_loops(call):
    """out and lse by the words of DecodeCall."""
    batch, heads, count, _ = call.q.shape
    group = heads // call.k.shape[1]
    out = torch.zeros(batch, heads, count, call.v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, count), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(count):
                out[b, h, i], lse[b, h, i] = one(call, b, h, h // group, i)
    return out, lse


def one(call, b, h, source, i):
    """Of one query, over pairs of a score and a value."""
    q = call.q[b, h, i]
    keys = range(call.k.shape[2] - call.q.shape[2] + i + 1)
    if not q.isfinite().all() or any(call.broken[b, source, j] for j in keys):
        return math.nan, math.nan
    near = [
        (call.scale * float(q @ call.k[b, source, j]), call.v[b, source, j]) for j in keys if call.usable[b, source, j]
    ]
    listed, seen, far = call.listed, call.seen, []
    counts = []  # of clusters in the first-order term
    if listed is not None:
        some = [j for j in range(listed.k.shape[2]) if listed.exists[b, h, j]]
        near += [(call.scale * float(q @ listed.k[b, h, j]), listed.v[b, h, j]) for j in some]
    if seen is not None:
        spread = call.scale**2 * float((q * q) @ seen.variance[b, source])
        for c in range(seen.log_sizes.shape[-1]):
            if listed is not None and listed.chosen[b, h, c]:
                continue
            a = call.scale * float(q @ seen.centers[b, source, c].double()) + float(seen.log_sizes[b, source, c])
            if seen.spreads is not None:
                a += min(spread * float(seen.spreads[b, source, c]), MOST_RAISED) / 2
            far.append((a, seen.values[b, source, c].double()))
            counts.append(1.0 if seen.spreads is None else float(seen.spreads[b, source, c]))
    pairs = near + far
    top = max((a for a, _ in pairs), default=-math.inf)
    if top == -math.inf:
        return 0.0, top
    p = [math.exp(a - top) for a, _ in pairs]
    out = sum(x * value for x, (_, value) in zip(p, pairs, strict=True)) / sum(p)
    if seen is not None and seen.slope is not None:
        share = sum(x * y for x, y in zip(p[len(near) :], counts, strict=True)) / sum(p)
        out = out + share * call.scale / (1 + spread) * (q @ seen.slope[b, source])
    return out, math.log(sum(p)) + top


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_torch_by_loops(case):
    call = decode_call(case, torch.float64)
    for made, want in zip(plainly(call), by_loops(call), strict=True):
        torch.testing.assert_close(made, want, equal_nan=True)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_cpu_engine_is_near(case):
    for made, want in zip(decode(decode_call(case)), plainly(decode_call(case, torch.float64)), strict=True):
        torch.testing.assert_close(made.double(), want, atol=1e-5, rtol=1e-5)
