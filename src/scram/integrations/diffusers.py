"""SCRAM as an attention back end of diffusers: `register()`, then `model.set_attention_backend("scram")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat import diffusers as _private
from ..core import checks
from .sdpa import Replacement, Report
from .steps import Steps

NOT_ASKED = (
    "  no layer asked for it: call model.set_attention_backend({!r}); models that call torch themselves (the UNet and "
    "3 of Stable Diffusion, PixArt, CogVideoX, autoencoders) need scram.patch_sdpa"
)
_registered: dict[str, Replacement] = {}


def register(
    name: str = "scram",
    *,
    grid: Any = "auto",
    error: float | None = None,
    dense_steps: int = 0,
    keep: bool = False,
    **settings: Any,
) -> Report:
    """Make SCRAM an attention back end of diffusers, for all models, until `unregister`.

    Then `model.set_attention_backend("scram")`, `with attention_backend("scram"):` and the environment's
    `DIFFUSERS_ATTN_BACKEND=scram` work; for the last, register before a model is imported. Some models do not ask for a
    back end (Stable Diffusion's UNet and 3, CogVideoX, PixArt, autoencoders): there `scram.patch_sdpa` does the same.

    Args:
        name: of the back end; a second registration of the same name replaces the first.
        grid, error, settings: the arguments of `patch_sdpa`, such as min_tokens, dense_layers and plans.
        dense_steps: the first steps of a sampler are left to torch; layers are tuned at the next. Steps are told apart
            by the argument `timestep`. They are counted in eager code: compile a model's blocks, not the model.
        keep: whether each layer starts from the matches and clusters that it had at the step before, in eager code
            without gradients.

    Returns:
        The report of all calls by that name; `report.plans.save(path)` writes the plans of all layers.
    """
    checks.instance("name", name, str, "str", "; for example 'scram'")
    if not name or name != name.lower() or (name not in _registered and name in _private.backends(name)):
        raise ValueError(f"name must be a new one in lower case, got {name!r}; for example 'scram'")
    steps = Steps(checks.whole("dense_steps", dense_steps, 0), checks.flag("keep", keep))
    replacement = Replacement(grid, error=error, steps=steps, **settings)
    _private.add_backend(name, backend(replacement))
    if name in _registered:
        _forget(name)
    replacement.hooks.attach()  # as long as the registration
    replacement.report.silent = NOT_ASKED.format(name)
    _registered[name] = replacement
    return replacement.report


def unregister(name: str = "scram") -> None:
    """No back end of that name: what `register` changed is as it was. Reset models that were set to it."""
    if name in _registered:
        _private.remove_backend(name)
        _forget(name)


def _forget(name: str) -> None:
    replacement = _registered.pop(name)
    replacement.hooks.detach()
    replacement.steps.detach()


def backend(replacement: Replacement) -> Callable[..., Tensor]:
    """The function that diffusers calls."""

    def scram_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        """[B, S, H, D] -> [B, S, H, D]."""
        options = dropout_p, is_causal, scale, enable_gqa
        if _parallel_config is None:
            _without_lse(return_lse)
            return attend(replacement, query, key, value, 1, attn_mask, *options)
        forward, backward = _parallel(replacement)
        tensors = query, key, value, attn_mask
        out: Tensor = _private.context_parallel(
            forward, backward, *tensors, *options, return_lse, config=_parallel_config
        )
        return out

    return scram_attention


def attend(
    replacement: Replacement,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: int,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """query [B, S, H, D], key and value [B, S', Hk, D] -> [B, S, H, D]; a mask [B, S'] is one of keys."""
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = replacement.attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, ranks=ranks)
    return out.transpose(1, 2)


def _without_lse(return_lse: bool) -> None:
    if return_lse:
        raise ValueError(
            "scram returns no lse to diffusers, which a ring needs; use ulysses_degree, or scram.distributed"
        )


def _parallel(replacement: Replacement) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """What diffusers runs on each rank between its exchanges: all tokens of some heads (Ulysses)."""

    def call(config: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        ranks = int(config.context_parallel_config.ulysses_degree)
        return attend(replacement, query, key, value, ranks, *options)

    def forward(
        ctx: Any, *arguments: Any, _save_ctx: bool = True, _parallel_config: Any = None, **named: Any
    ) -> Tensor:
        query, key, value, mask, *options, return_lse = arguments
        _without_lse(return_lse)
        if _save_ctx:
            ctx.save_for_backward(query, key, value)
            ctx.scram = (mask, *options), _parallel_config
        return call(_parallel_config, query, key, value, mask, *options)

    def backward(ctx: Any, grad_out: Tensor, *args: Any, **named: Any) -> tuple[Tensor, ...]:
        options, config = ctx.scram
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = call(config, *leaves, *options)
        return torch.autograd.grad(out, leaves, grad_out)

    return forward, backward
