"""Queries stay, shards of keys travel from rank to rank; at each stop they are searched, attended and joined by lse.

A rank holds its own shards, the keys that are here and those that are coming: memory falls as 1 / ranks. The backward
pass sends the keys round once more, searches them again, and sends their gradients along until they are home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core import pipeline
from ..core.pipeline import execute
from ..core.tails.base import NO_TAIL, Tail
from ..results import Attended
from ..spec.scoring import accumulator
from .clusters import codebook_of, own_clusters, part_of
from .halo import Halo, exchanged, halo_rows, search_shard
from .mesh import pack, packed_size, unpack
from .shards import Shards, shard_seed


def ring_attention(shards: Shards) -> Tensor:
    """out [B, H, queries of this rank, *, F]."""
    shards = replace(shards, apart=True)
    with shards.ranks.together():
        local = own_clusters(shards)
    halo = exchanged(shards, shards.q, halo_rows(shards))
    out: Tensor = _Ring.apply(shards, halo, shards.q, *local, *(shards.request.extra or ()))  # type: ignore[no-untyped-call]
    return out


def attend_shard(
    shards: Shards, halo: Halo | None, origin: int, q: Tensor, keys: list[Tensor], extra: Sequence[Tensor]
) -> Attended:
    """The attention of this rank's queries over the keys of rank `origin` alone, out in float32 at least.

    `extra`: (k_extra, v_extra) too where they belong to this stop, else ().
    """
    k, v, mask, named = shards.arrived(keys)
    first_query = shards.first_query(shards.ranks.rank)
    first_key = shards.first_key(origin)
    tail: Tail
    if shards.call.clusters is not None:
        tail = codebook_of(shards, named, mask, part_of(shards, origin).keys)
    else:
        tail = shards.call.tail.of_part(shard_seed(shards.tail_seed, first_key), shards.share(origin))
    matches = search_shard(shards, halo, shard_seed(shards.seed, first_query, first_key), q, k, mask, tail.codebook)
    request = shards.request._replace(
        search=None,
        tail=None if tail is NO_TAIL else tail,
        key_mask=mask,
        extra=(extra[0], extra[1]) if extra else None,
        matches=matches,
        needs_lse=True,
    )
    with shards.dropping(first_query, first_key):
        result = execute(pipeline.run, q, k, v, request)
    assert result.lse is not None
    return Attended(result.out.to(accumulator(v.dtype)), result.lse)


class _Ring(torch.autograd.Function):
    """The keys of all ranks come by, one shard at a time."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, halo: Halo | None, q: Tensor, *given: Tensor) -> Tensor:
        total = None
        local, extra = _parted(shards, given)

        def visit(origin: int, keys: list[Tensor]) -> None:
            nonlocal total
            part = attend_shard(shards, halo, origin, q, keys, extra if origin == shards.extra_stop() else ())
            total = part if total is None else _joined(total, part)

        shards.ranks.agree(_go_round(shards, local, visit))
        if total is None:
            out = q.new_zeros((*q.shape[:-1], shards.v.shape[-1]), dtype=accumulator(shards.v.dtype))
            total = Attended(out, out.new_full(q.shape[:-1], -torch.inf))
        ctx.shards = replace(shards, q=q.detach(), k=local[0].detach(), v=local[1].detach())
        ctx.halo = halo
        ctx.save_for_backward(q, *given, *total)
        return total.out.to(shards.v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shards: Shards = ctx.shards
        q, *given, out, lse = ctx.saved_tensors
        local, extra = _parted(shards, given)
        of_extra = [torch.zeros_like(x) for x in extra]
        count = shards.differentiable
        wide = out.dtype
        rank = shards.ranks.rank
        grad = grad.to(wide)
        weighed = (grad * out).sum(-1)
        layouts = [[(s, wide) for s, _ in shards.layout(n)[:count]] for n in range(shards.ranks.size)]
        size = max(packed_size(layout) for layout in layouts)
        grad_q = torch.zeros_like(q, dtype=wide)
        message = None  # gradients of the keys of this visit; None: 0
        coming = None

        def visit(origin: int, keys: list[Tensor]) -> None:
            nonlocal message
            extra_inputs = extra if origin == shards.extra_stop() else ()
            own = [x.detach().requires_grad_() for x in (q, *keys[:count], *extra_inputs)]
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                of_keys = [*own[1 : 1 + count], *keys[count:]]
                part = attend_shard(shards, ctx.halo, origin, own[0], of_keys, own[1 + count :])
            share = torch.where(part.lse == -torch.inf, 0, (part.lse - lse).exp()).detach()
            of_lse = share * ((grad * part.out.detach()).sum(-1) - weighed)
            of_out = share.unsqueeze(-1) * grad
            outputs = [
                (x, of) for x, of in zip(part, (of_out, of_lse), strict=True) if x.requires_grad
            ]  # a count does not
            results, grads = zip(*outputs, strict=True)
            input_grads = torch.autograd.grad(results, own, grads, materialize_grads=True)
            del part, outputs, results
            grad_q.add_(input_grads[0])
            message = pack([x.to(wide) for x in input_grads[1 : 1 + count]], size)
            if extra_inputs:
                of_extra[:] = input_grads[1 + count :]

        def after() -> None:
            """The gradients of the keys that were here go with them, after what earlier ranks had for them."""
            nonlocal coming, message
            if message is None:
                message = torch.zeros(size, dtype=torch.uint8, device=q.device)
            if coming is not None:
                message.view(wide).add_(coming.wait().view(wide))
                coming = None
            if shards.ranks.size > 1:
                coming = shards.ranks.pass_on(message)
                message = None

        shards.ranks.agree(_go_round(shards, local, visit, after))
        last_message = message if coming is None else coming.wait()
        assert last_message is not None
        home = unpack(last_message, layouts[rank])
        grads = [x.to(of.dtype) for x, of in zip((grad_q, *home), (q, *local), strict=False)]
        return None, None, *grads, *[None] * (len(local) - count), *of_extra


def _parted(shards: Shards, given: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What travels, and `extra`, () where there is none."""
    count = len(given) - 2 * (shards.request.extra is not None)
    return given[:count], given[count:]


def _joined(total: Attended, part: Attended) -> Attended:
    """`merge`, in the memory of its arguments."""
    top = torch.maximum(total.lse, part.lse)
    top = torch.where(top == -torch.inf, 0, top)  # -inf - -inf is NaN
    mass = (total.lse - top).exp()
    mass_part = (part.lse - top).exp()
    both = mass + mass_part
    safe = torch.where(both == 0, 1, both)
    total.out.mul_((mass / safe).unsqueeze(-1))
    total.out.add_(part.out.mul_((mass_part / safe).unsqueeze(-1)))
    return Attended(total.out, torch.where(both == 0, -torch.inf, safe.log() + top))


def _go_round(
    shards: Shards,
    local: Sequence[Tensor],
    visit: Callable[[int, list[Tensor]], None],
    after: Callable[[], None] | None = None,
) -> Exception | None:
    """Every shard of keys visits this rank, while the next one is on its way.

    An error does not stop the ring, in which other ranks wait: it is returned. A visit without queries or keys is left
    out; `after` comes after each.
    """
    ranks = shards.ranks
    error = None
    current = pack(local, shards.message_size) if ranks.size > 1 else None
    for stop in range(ranks.size):
        origin = (ranks.rank - stop) % ranks.size
        coming = ranks.pass_on(current) if current is not None and stop + 1 < ranks.size else None
        if error is None and shards.q.shape[2] and shards.keys[origin]:
            try:
                visit(origin, list(local) if current is None else unpack(current, shards.layout(origin)))
            except Exception as raised:
                error = raised
        if after is not None:
            after()
        if coming is not None:
            current = coming.wait()
    return error
