"""Attention over every key: by torch, and in chunks of queries for what torch's attention does not have."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import _compat
from ..options import Weight
from ..results import Attended
from ..settings import Score
from ..spec.scoring import accumulator, default_scale, prepare_key, prepare_query
from . import checks
from .exact import exact_attention, merge
from .ops import bypasses_dispatcher

# What hides a score whatever its size: cuDNN's kernel adds a finite number to those that a mask hides.
MASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
KEYS_AT_ONCE = 4096  # of few queries: their scores stay in a core's cache
FUSED_STEP = 8  # a multiple of which the widths are that CUDA's fused kernels take


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with widths that torch's fused kernels take; others hold the map of all pairs.

    Args:
        q, k, v: [B, H, N, E], [B, Hk, M, E], [B, Hk, M, F]; padded by zeros to one width, which changes no score.
        mask: True where a query may attend, broadcast to [B, H, N, M].

    Returns:
        out [B, H, N, F].
    """
    width = max(k.shape[-1], v.shape[-1])
    if q.is_cuda:
        width += -width % FUSED_STEP
    wide_q, wide_k, wide_v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        wide_q, wide_k, wide_v, mask, dropout_p, causal, scale=scale, enable_gqa=grouped
    )
    return out if width == v.shape[-1] else out[..., : v.shape[-1]].contiguous()


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    extra: tuple[Tensor, Tensor] | None = None,
    extra_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    queries: Tensor | None = None,
) -> Tensor:
    """Softmax attention over every allowed key by `F.scaled_dot_product_attention`; arguments as in `scram.attention`.

    A query without an allowed key has output 0. What a masked key or its value holds does not matter. Nor does it under
    causal order what later ones hold: torch would multiply them by 0. There a key that is not finite makes NaN of the
    queries from it on, as its value does of the components. With `queries`, flat indices int64 [n], the result is
    theirs: [B, H, n, F], on a CPU without gradients.
    """
    checks.values(q, k, v)
    checks.key_mask(q, k, key_mask)
    if callable(score):
        raise ValueError("torch's own attention takes no callable score; use score='dot' or 'l2'")
    if causal:
        checks.order(q, k, causal)
    grid = q.shape[2:-1] if queries is None else queries.shape
    flat = [x.flatten(2, -2) for x in (q, k, v)]
    if queries is not None:
        flat[0] = flat[0][:, :, queries]
    flat = [x.to(v.dtype) for x in flat]
    if extra is not None:
        extra = extra[0].to(v.dtype), extra[1]
        if extra_mask is not None:
            extra = without_masked(extra, extra_mask)
    mask = None
    if key_mask is not None:  # torch multiplies what is masked by 0, and 0 * NaN is NaN
        heads = q.shape[1] if key_mask.ndim == k.ndim - 1 else 1
        mask = key_mask.reshape(k.shape[0], heads, 1, flat[1].shape[2])
        groups = k.shape[1] if heads > 1 else 1
        read = mask.reshape(k.shape[0], groups, heads // groups, flat[1].shape[2]).any(2)
        flat[1:] = (torch.where(read.unsqueeze(-1), x, 0) for x in flat[1:])
    spoiled = None
    backends: AbstractContextManager[None] = nullcontext()
    if causal:
        flat[1], flat[2], spoiled = in_order(flat[0], flat[1], flat[2], mask)
    if causal and (mask is not None or extra is not None or queries is not None):
        keys = torch.arange(flat[1].shape[2], dtype=torch.int64, device=q.device)  # [M]
        below = keys <= (keys if queries is None else queries).reshape(1, 1, -1, 1)  # [1, 1, N, M]
        mask = below if mask is None else mask & below
        causal = False
        if q.is_cuda:
            backends = sdpa_kernel(MASKED_BACKENDS)
    if extra is not None:
        flat[1], flat[2] = (torch.cat([x, more], 2) for x, more in zip(flat[1:], extra, strict=True))
        if extra_mask is not None:
            if mask is None:
                mask = torch.ones(1, 1, 1, flat[1].shape[2] - extra_mask.shape[1], dtype=torch.bool, device=q.device)
            shape = (q.shape[0], *mask.shape[1:-1])
            more = extra_mask.unsqueeze(1).unsqueeze(1).expand(*shape, -1)
            mask = torch.cat([mask.expand(*shape, -1), more], -1)
        elif mask is not None:
            mask = F.pad(mask, (0, extra[0].shape[2]), value=True)
    if score != "dot":
        flat[:2] = prepare_query(flat[0], score).to(v.dtype), prepare_key(flat[1], score).to(v.dtype)
    factor = default_scale(scale, q.shape[-1], score, "softmax")
    if queries is not None and q.device.type == "cpu":
        out = attend_few(*flat, mask=mask, scale=factor)
    else:
        with backends:
            out = fused_attention(*flat, mask=mask, dropout_p=dropout_p, causal=causal, scale=factor)
    if mask is not None:
        out = torch.where(mask.any(-1, keepdim=True), out, 0)
    if spoiled is not None:
        out = out + (spoiled if queries is None else spoiled[:, :, queries])
    return out.reshape(*out.shape[:2], *grid, out.shape[-1])


@torch.no_grad()
def attend_few(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
    """Dense attention of few queries on a CPU, in half the time that torch's fused kernel takes; without gradients.

    Args:
        q, k, v: [B, H, n, E], [B, Hk, M, E], [B, Hk, M, F].
        mask: True where a query may attend, broadcast to [B, H, n, M].

    Returns:
        out [B, H, n, F]; a query without an allowed key has output 0.
    """
    wide = accumulator(v.dtype)
    batch, heads, count, _ = q.shape
    groups = heads // k.shape[1]
    rows = (q.to(wide) * scale).reshape(batch, k.shape[1], groups * count, -1)
    shown = None if mask is None else mask.expand(batch, heads, count, -1)
    masks = None if shown is None else shown.reshape(batch, k.shape[1], groups * count, -1)
    out = q.new_empty(batch, k.shape[1], groups * count, v.shape[-1], dtype=wide)
    for b in range(batch):
        for h in range(k.shape[1]):
            out[b, h] = _attend_row(rows[b, h], k[b, h], v[b, h], None if masks is None else masks[b, h])
    return out.reshape(batch, heads, count, -1).to(v.dtype)


def _attend_row(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Of one row: q [n, E] with the scale in it, k [M, E], v [M, F], mask [n, M]; out [n, F] in q's dtype."""
    outs, lses = [], []
    for begin in range(0, k.shape[0], KEYS_AT_ONCE):
        part = slice(begin, begin + KEYS_AT_ONCE)
        scores = _compat.product(q, k[part].to(q.dtype))  # [n, m]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, part], -torch.inf)
        best = scores.amax(-1, keepdim=True)
        share = scores.softmax(-1)
        lse = best - share.amax(-1, keepdim=True).log()  # the best key's share is 1 / sum of exp(score - best)
        if mask is not None:
            hidden = best == -torch.inf
            share = share.masked_fill(hidden, 0)
            lse = lse.masked_fill(hidden, -torch.inf)
        outs.append(_compat.product(share, v[part].to(q.dtype).T))
        lses.append(lse)
    if len(outs) == 1:
        return outs[0]
    each = torch.stack(lses)  # [parts, n, 1]
    weights = each.softmax(0).masked_fill((each == -torch.inf).all(0), 0)
    return (weights * torch.stack(outs)).sum(0)


def in_order(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """k and v for causal attention by torch, which multiplies what comes later by 0: zeros for what is not finite.

    Args:
        q, k, v: [B, H, N, E], [B, Hk, N, E], [B, Hk, N, F].
        mask: bool [B, H or 1, 1, N], True where a key may be attended; None: everywhere.

    Returns:
        k, v, and what to add to the output [B, H, N, F]: NaN for the queries from a key that is not finite on, else 0.
        None where all are known to be finite, which is not known on a device and where torch traces.
    """
    if k.device.type == "cpu" and bypasses_dispatcher((k, v)):
        total = sum(float(x.detach().sum(dtype=accumulator(x.dtype))) for x in (k, v))
        if math.isfinite(total):
            return k, v, None
    by_key = v.detach() * 0 + (k.detach() * 0).sum(-1, keepdim=True)  # [B, Hk, N, F], NaN where one is not finite
    by_key = by_key.repeat_interleave(q.shape[1] // k.shape[1], 1)
    if mask is not None:
        by_key = torch.where(mask.transpose(2, 3), by_key, 0)
    return k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0), by_key.cumsum(2)


def every_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    extra_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Dense attention with the arguments of `attention`: by torch; a callable score or another weight in chunks."""
    if isinstance(score, str) and weight == "softmax":
        return dense_attention(
            q,
            k,
            v,
            causal=causal,
            key_mask=key_mask,
            scale=scale,
            score=score,
            extra=extra,
            extra_mask=extra_mask,
            dropout_p=dropout_p,
        )
    if dropout_p:
        raise ValueError("dense attention with a callable score takes no dropout; pass dropout_p=0")
    return attend_every_key(
        q, k, v, causal=causal, key_mask=key_mask, scale=scale, score=score, weight=weight, extra=extra
    ).out


def attend_every_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    score: Score = "dot",
    weight: Weight = "softmax",
    extra: tuple[Tensor, Tensor] | None = None,
    extra_mask: Tensor | None = None,
) -> Attended:
    """out [B, H, *G, F] and lse [B, H, *G] over every key and the extra keys, in chunks of queries."""
    attended = exact_attention(q, k, v, causal=causal, key_mask=key_mask, scale=scale, score=score, weight=weight)
    if extra is None:
        return attended
    checks.extra(q, k, v, extra)
    more = attend_extra(q.flatten(2, -2), extra, extra_mask, scale=scale, score=score, weight=weight)
    shape = attended.out.shape
    return merge(attended, Attended(more.out.reshape(shape), more.lse.reshape(shape[:-1])))


def without_masked(extra: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Extra keys and values, zeros where the mask [B, X] is False: 0 * NaN is NaN."""
    shown = mask.unsqueeze(1).unsqueeze(-1)  # [B, 1, X, 1]
    return torch.where(shown, extra[0], 0), torch.where(shown, extra[1], 0)


def attend_extra(
    q: Tensor,
    extra: tuple[Tensor, Tensor],
    extra_mask: Tensor | None,
    *,
    scale: float | None,
    score: Score,
    weight: Weight = "softmax",
) -> Attended:
    """Dense attention of queries [B, H, n, E] over the extra keys alone, those that the mask [B, X] shows."""
    k_extra, v_extra = extra
    if not k_extra.shape[2]:
        out = v_extra.new_zeros(*q.shape[:-1], v_extra.shape[-1])
        return Attended(out, q.new_full(q.shape[:-1], -torch.inf))
    return exact_attention(q, k_extra, v_extra, key_mask=extra_mask, scale=scale, score=score, weight=weight)
