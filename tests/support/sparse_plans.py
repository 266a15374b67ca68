"""Plans of layers that are really sparse on small grids, and what their layers return beside torch."""

import math
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

import scram
from scram import _compat
from scram.core.resolve import Resolved
from scram.integrations import sdpa
from scram.quality.plan import Rung, Setting
from scram.quality.timing import Believed

tuning = sys.modules["scram.quality.tune"]  # scram.tune is the function
TAILS = ((8, 16), (16, 32), (32, 64), (48, 128), (48, 192), (64, 192))
BUDGET = 0.05
CLUSTERS = Setting(None, scram.Clusters(count=32, keys=64, seed=0))


def tune_for_error(monkeypatch):
    """Kinds of q of the calls of `tune`. It measures errors; times are made up, dense attention takes the longest."""
    seen = []
    tune = sdpa.tune

    def believed(call, device, limit=math.inf, beside=None):
        resolved = call.args[0]
        work = tuning.Work.of(Setting(resolved.search, resolved.tail)) if isinstance(resolved, Resolved) else None
        return Believed(1e4 if work is None else 1e3 * work.matches + work.tail + work.keys, True), call()

    def counted(q, *args, **how):
        seen.append(tuple(q.shape))
        return tune(q, *args, **how)

    monkeypatch.setattr(tuning, "believed", believed)
    monkeypatch.setattr(tuning, "TAILS", TAILS)
    monkeypatch.setattr(sdpa, "tune", counted)
    monkeypatch.setattr(sdpa, "in_a_quiet_moment", lambda plan, *tensors, **how: plan)  # by the clock
    return seen


def plan_clusters(monkeypatch):
    """Kinds of q of the calls of `tune`, which gives clusters at once, whatever they cost."""
    seen = []
    tune = sdpa.tune

    def planned(q, k, v, **how):
        seen.append(tuple(q.shape))
        plan = tune(q, k, v, **{**how, "error": 0.0})
        rung = Rung(CLUSTERS, 96, 1e-9, (0.0, 0.0, 0.0), 0.0, True)
        return replace(plan, error=how["error"], rungs=(rung, *plan.rungs), chosen=0, busy=False)

    monkeypatch.setattr(sdpa, "tune", planned)
    return seen


def hooked(model):
    """How many hooks the modules of a model have."""
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


def recorded(monkeypatch):
    """Of each call of attention its queries and keys, what SCRAM returned and what torch does."""
    seen = []
    attend = sdpa.Replacement.attention

    def attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *named, ranks=1, **how):
        given = query, key, value, attn_mask, dropout_p, is_causal
        how |= dict(zip(("scale", "enable_gqa"), named, strict=False))
        out = attend(self, *given, **how)
        with _compat.without_modes():
            seen.append((query, key, out, F.scaled_dot_product_attention(*given, **how)))
        return out

    monkeypatch.setattr(sdpa.Replacement, "attention", attention)
    return seen


def p95(out, want):
    """The promised error of the worst head, [B, H, N, F]."""
    off = (out - want).norm(dim=-1) / want.square().sum(-1).mean(-1, keepdim=True).sqrt()
    return float(off.quantile(0.95, -1).max())


def assert_within_the_budget(report, calls):
    """Every call on a grid, and one at least that is not dense; text rows are torch's to rounding."""
    on_grids = {layer.tokens.total: layer.tokens for layer in report.layers.values() if layer.grid}
    errors = []
    for q, k, made, exact in calls:
        tokens = on_grids.get(q.shape[-2])
        if tokens is None or tokens.of(q.shape[-2], k.shape[-2]) is None:
            assert torch.equal(made, exact)  # left to torch
            continue
        grid = slice(tokens.before, tokens.total - tokens.after)
        errors.append(p95(made[:, :, grid], exact[:, :, grid]))
        for text in (slice(tokens.before), slice(tokens.total - tokens.after, None)):
            torch.testing.assert_close(made[:, :, text], exact[:, :, text], rtol=1e-5, atol=1e-5)
    assert 1e-4 < max(errors) <= BUDGET  # not by dense attention, and within the budget
