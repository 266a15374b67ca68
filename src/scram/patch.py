"""SCRAM inside models that call torch's own attention: as a context, and as an implementation for transformers."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import _compat, api, errors
from .defaults import SEARCH
from .estimators import Clusters, Hybrid
from .layout_hints import accept
from .types import Search

NO_INNER_CALL = (
    f"torch {torch.__version__}: nn.MultiheadAttention does not call scaled_dot_product_attention by that name, so "
    "patch_sdpa leaves it dense; use scram.nn.GridAttention.from_mha"
)


class Call(NamedTuple):
    """A kind of call of `F.scaled_dot_product_attention`: shapes of q and k, and why it was left alone ("": replaced).

    A call in a compiled graph is noted once, when it is compiled, without its shapes.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    why_not: str


@dataclass
class Report:
    """What `patch_sdpa` replaced, what not and why. Prints itself.

    Args:
        calls: how often each kind of call came; the memory does not grow with their number.
        warning: what keeps the patch from working as a whole; "" for nothing.
    """

    calls: Counter[Call] = field(default_factory=Counter)
    warning: str = ""

    @property
    def replaced(self) -> int:
        """How many calls went to SCRAM."""
        return sum(times for call, times in self.calls.items() if not call.why_not)

    @property
    def left_alone(self) -> int:
        """How many calls torch answered."""
        return sum(self.calls.values()) - self.replaced

    def __str__(self) -> str:
        total = sum(self.calls.values())
        lines = [f"{self.replaced} of {total} calls of scaled_dot_product_attention went to SCRAM"]
        for call, times in self.calls.items():
            shapes = f"q {list(call.q)}" if call.q else "compiled"
            shapes += f", k {list(call.k)}" if call.k != call.q else ""
            lines.append(f"  {times} x {shapes}: " + (f"left alone: {call.why_not}" if call.why_not else "SCRAM"))
        return "\n".join([*lines, *([f"warning: {self.warning}"] if self.warning else [])])


def patch_sdpa(
    *, grid: Sequence[int], prefix: int = 0, search: Search | str = "auto", radius: int | Sequence[int] = 1,
    tail: Clusters | Hybrid | str | None = "auto", window: str = "query", impl: str = "auto",
) -> AbstractContextManager[Report]:  # fmt: skip
    """Inside, calls of `F.scaled_dot_product_attention` on that grid go to SCRAM, whoever makes them in this thread.

    A call is taken when queries and keys are `prefix` tokens followed by the points of the grid in row-major order. The
    prefix tokens (class, registers) are extra keys for every query, and attend densely as queries. Scale, dropout,
    `is_causal`, grouped heads and a boolean mask over the keys go along. A float bias, a mask that differs between
    queries, a mask beside a prefix and any other length are left to torch. `torch.compile` sees the context. A
    checkpoint computes again in the backward pass: that belongs inside too.

    Args:
        grid: extents of the grid, such as (14, 14).
        prefix: tokens before the grid.
        search, radius, tail, window, impl: as in `attention`: on a small grid dense attention may be faster, and runs.

    Returns:
        A context that gives a report of what was replaced, what not and why, which fills up as the calls come.

    >>> import torch.nn.functional as F
    >>> q = torch.randn(1, 2, 1 + 64, 8)
    >>> with scram.patch_sdpa(grid=(8, 8), prefix=1) as report:
    ...     _ = F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q[:, :, :9], q[:, :, :9])
    >>> print(report)
    1 of 2 calls of scaled_dot_product_attention went to SCRAM
      1 x q [1, 2, 65, 8]: SCRAM
      1 x q [1, 2, 65, 8], k [1, 2, 9, 8]: left alone: 65 queries and 9 keys, the grid has 1 + 8 x 8 = 65
    """
    return _Patch(grid, prefix, search, radius, tail, window, impl)


def _note_compiled(report: str, why_not: str) -> None:
    """Runs while a graph is traced. A count in the graph would make a new graph of every call."""
    _reports[report].calls[Call((), (), why_not)] += 1


_reports: WeakValueDictionary[str, Report] = WeakValueDictionary()  # the compiler takes no other object as a constant


def register_transformers(name: str = "scram", *, grid: Sequence[int], **settings: Any) -> Report:
    """Make SCRAM an attention implementation of the package transformers: `model.set_attn_implementation(name)`.

    What `patch_sdpa` would leave alone runs as transformers' "sdpa" does, with the masks that it makes for it.

    Args:
        name: what `set_attn_implementation` takes; a second registration of the same name replaces the first.
        grid, settings: the arguments of `patch_sdpa`.

    Returns:
        The report of all calls that models make by that name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    patch = patch_sdpa(grid=grid, **settings)
    assert isinstance(patch, _Patch)
    plain = AttentionInterface()["sdpa"]

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with patch:
            return plain(module, *args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    return patch.report


class _Patch(TorchFunctionMode):
    """Sees every call of a torch function in its thread, also of functions imported by name."""

    def __init__(
        self, grid: Sequence[int], prefix: int, search: Search | str, radius: int | Sequence[int],
        tail: Clusters | Hybrid | str | None, window: str, impl: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.grid = errors.grid(grid)
        self.prefix = errors.whole("prefix", prefix, 0)
        errors.search_settings(search, SEARCH)
        errors.tail(tail)
        errors.one_of("impl", impl, errors.IMPLS)
        errors.one_of("window", window, errors.WINDOWS)
        radii = errors.radius(radius, len(self.grid))
        self.settings: dict[str, Any] = {"search": search, "radius": radii, "tail": tail, "window": window}
        self.settings["impl"] = impl
        self.tokens = prefix + math.prod(self.grid)
        self.report = Report()
        self.report_name = str(id(self.report))
        _reports[self.report_name] = self.report
        torch.compiler.assume_constant_result(_note_compiled)  # type: ignore[no-untyped-call] # loads the compiler
        self.copies: dict[CodeType, Callable[..., Any] | None] = {}
        # torch hands over nn.MultiheadAttention's function whole; a copy has the inner call replaced.
        plain = _compat.torch_function(F.multi_head_attention_forward, F.__file__)
        self.multi_head = None if plain is None else self._copy(plain)

    def __enter__(self) -> Report:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self.report

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _compat.SDPA or func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        caller = None
        if not isinstance(func, _compat.C_FUNCTIONS) and not torch.compiler.is_compiling():
            caller = _compat.caller_of_mode("backward", "grad", "multi_head_attention_forward")
        if func is F.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                self._note(args[0], args[1], "nn.MultiheadAttention returns its weights; pass need_weights=False")
            body = self.multi_head if caller is None else self._copy(caller)
            return (body or func)(*args, **kwargs)
        body = None if caller is None else self._copy(caller)
        if body is None:
            return func(*args, **kwargs)
        with self:  # torch takes a mode off while it handles a call; a checkpoint computes again inside
            return body(*args, **kwargs)

    def _copy(self, function: FunctionType) -> Callable[..., Any] | None:
        """The body of a torch function, to run it inside the mode; made once."""
        code = function.__code__
        if code not in self.copies:
            self.copies[code] = _compat.inside_mode(function, scaled_dot_product_attention=self.attention)
            attends = _compat.reads(code, "scaled_dot_product_attention")
            if code.co_name == "multi_head_attention_forward" and not attends:
                self.report.warning = NO_INNER_CALL
                warnings.warn(NO_INNER_CALL, RuntimeWarning, stacklevel=4)
        return self.copies[code]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """`F.scaled_dot_product_attention`, by SCRAM where it can be."""
        how = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        dense = partial(_compat.SDPA, **how)
        why_not = self._why_not(query, key, value, attn_mask, how)
        self._note(query, key, why_not)
        if why_not:
            return dense(query, key, value, attn_mask)
        heads = [x if x.ndim == 4 else x.unsqueeze(1) for x in (query, key, value)]
        first, k_extra, v_extra = (x[:, :, : self.prefix] for x in heads)
        q, k, v = (x[:, :, self.prefix :].reshape(*x.shape[:2], *self.grid, x.shape[-1]) for x in heads)
        accept(q.shape, k.shape)  # the caller gave the grid
        mask = None
        if attn_mask is not None:
            mask = attn_mask.expand(*q.shape[:2], 1, self.tokens).reshape(*q.shape[:2], *self.grid)
        extra = (k_extra, v_extra) if self.prefix else None
        same: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout_p": dropout_p}
        out = api.attention(q, k, v, key_mask=mask, extra=extra, **same, **self.settings).flatten(2, -2)
        if self.prefix:
            seen = self.prefix if is_causal else self.tokens
            out = torch.cat([dense(first, heads[1][:, :, :seen], heads[2][:, :, :seen]), out], 2)
        return out if query.ndim == 4 else out.squeeze(1)

    def _note(self, query: Tensor, key: Tensor, why_not: str) -> None:
        if torch.compiler.is_compiling():
            _note_compiled(self.report_name, why_not)
        else:
            self.report.calls[Call(tuple(query.shape), tuple(key.shape), why_not)] += 1

    def _why_not(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, how: dict[str, Any]) -> str:
        """The reason to leave a call to torch, "" for none."""
        if any(x.is_nested or x.layout != torch.strided for x in (query, key, value)):
            return "tensors that are not dense"
        if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
            return f"{query.ndim} axes, not [B, H, N, E] or [B, N, E]"
        if query.shape[-2] != self.tokens or key.shape[-2] != self.tokens or value.shape[-2] != self.tokens:
            grid = f"{self.prefix} + {' x '.join(map(str, self.grid))} = {self.tokens}"
            return f"{query.shape[-2]} queries and {key.shape[-2]} keys, the grid has {grid}"
        grouped = query.ndim == 4 and key.shape[1] != query.shape[1]
        if query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1] or (grouped and not how["enable_gqa"]):
            return "batches or heads that broadcast"
        if not key.dtype == query.dtype == value.dtype or query.dtype not in errors.DTYPES:
            return f"dtypes {query.dtype}, {key.dtype}, {value.dtype}"
        if not key.device == query.device == value.device:
            return "tensors on several devices"
        if how["scale"] is not None and not how["scale"] > 0:
            return f"a scale of {how['scale']}"
        if not how["dropout_p"] < 1:
            return f"a dropout of {how['dropout_p']}"
        if attn_mask is None:
            return ""
        if attn_mask.dtype != torch.bool:
            return "a float bias, which the search would have to know"
        if self.prefix or how["is_causal"]:
            return "a mask beside prefix tokens or causal order"
        if attn_mask.ndim < 2 or attn_mask.ndim > query.ndim or attn_mask.shape[-2] != 1:
            return "a mask that differs between queries"
        return "a mask over [B, N, E]" if query.ndim == 3 else ""
