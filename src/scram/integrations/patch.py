"""SCRAM inside models that call torch's own attention: as a context, and as an implementation for transformers."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _compat
from ..core import checks
from ..core.tails.base import Tail
from ..options import Auto, Impl
from ..settings import Search
from .layers import NO_TOKENS, Plans
from .layouts import Grids
from .sdpa import Replacement, Report

NO_INNER_CALL = (
    f"torch {torch.__version__}: nn.MultiheadAttention does not call scaled_dot_product_attention by that name, so "
    "patch_sdpa leaves it dense; use scram.nn.GridAttention.from_mha"
)

NOT_ASKED = (
    "  no layer asked for it: call model.set_attn_implementation({!r}); models whose code asks for no implementation "
    "need scram.patch_sdpa"
)
FUSED = (
    "torch's fast path of a whole layer, which calls no attention; torch.backends.mha.set_fastpath_enabled(False) "
    "disables it"
)


def patch_sdpa(
    *,
    grid: Grids | Auto,
    before: int = 0,
    after: int = 0,
    key_grid: Sequence[int] | None = None,
    error: float | None = None,
    min_tokens: int = 0,
    dense_layers: int = 0,
    search: Search | Auto | None = "auto",
    radius: int | Sequence[int] = 1,
    tail: Tail | Auto | None = "auto",
    impl: Impl = "auto",
    plans: Plans | None = None,
    model: nn.Module | None = None,
) -> AbstractContextManager[Report]:
    """Inside, calls of `F.scaled_dot_product_attention` on that grid go to SCRAM, whoever makes them in this thread.

    A call is taken when its tokens are `before` tokens, the points of the grid in row-major order, and `after` tokens.
    Tokens off the grid (class, registers, text) are extra keys for every query on it, and as queries attend every key
    densely. Scale, dropout, `is_causal`, grouped heads, masks over the keys and biases of low rank go along. A rough
    float bias, a mask that differs between queries and any other length are left to torch. `torch.compile` sees the
    context where it is entered outside compiled code. A checkpoint computes again in the backward pass: that belongs
    inside too.

    With `error`, each layer is tuned (`scram.tune`) in its first eager call in eval mode and keeps its plan; a layer is
    the module that calls. One that is compiled before it was tuned runs the default, and the report says so.

    Args:
        grid: extents of the grid, of 1 to 4 axes, such as (14, 14); several such grids of one model, told apart by
            their numbers of tokens. "auto" is for layers whose queries come from a picture, a film or latents that the
            model is given. Causal layers, object queries and text are left to torch, and the report says so.
        before, after: tokens before the grid and after it, in every call.
        key_grid: extents of the grid of reduced keys; calls with as many keys as queries have their own grid.
        error: at most this error in 95 % of the queries of each head; None for the settings below.
        min_tokens: calls of fewer tokens are left to torch.
        dense_layers: so many layers with a grid are left to torch, the first that call.
        search, radius, tail, impl: as in `attention`: on a small grid dense attention may be faster, and runs;
            search=None beside `Clusters` runs them without a search. With `error` search and tail are chosen.
        plans: of layers that were tuned before, `report.plans`, `Plans.load(path)`.
        model: whose layers the plans are, where its first call is a compiled one.

    Returns:
        A context that gives a report: which calls were searched, which ran by clusters alone or dense, which were left
        to torch and why. It fills up as the calls come.

    >>> import torch.nn.functional as F
    >>> q = torch.randn(1, 2, 1 + 64, 8)
    >>> with scram.patch_sdpa(grid=(8, 8), before=1) as report:
    ...     _ = F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q[:, :, :9], q[:, :, :9])
    >>> print(report)
    2 calls of scaled_dot_product_attention: 0 searched, 1 dense, 1 left to torch
      1 x q [1, 2, 65, 8]: dense
      1 x q [1, 2, 65, 8], k [1, 2, 9, 8]: left to torch: 65 queries and 9 keys, the grid has 1 + 8 x 8 = 65
    """
    replacement = Replacement(
        grid,
        before,
        after,
        key_grid,
        error,
        plans,
        model=model,
        min_tokens=min_tokens,
        dense_layers=dense_layers,
        search=search,
        tail=tail,
        radius=radius,
        impl=impl,
    )
    return _Patch(replacement)


def survey(
    model: nn.Module,
    inputs: Tensor | Sequence[Any] | dict[str, Any],
    *,
    grid: Grids | Auto = "auto",
    before: int = 0,
    after: int = 0,
    key_grid: Sequence[int] | None = None,
    error: float = 0.05,
    radius: int | Sequence[int] = 1,
    impl: Impl = "auto",
) -> Report:
    """What SCRAM would do to every attention layer of a model: one forward pass in eval mode, nothing is replaced.

    Args:
        model: calls `F.scaled_dot_product_attention`.
        inputs: its argument, its arguments, or its arguments by name.
        grid, before, after, key_grid, error, radius, impl: as in `patch_sdpa`.

    Returns:
        Report, which prints a line per layer; `report.plans` are for `patch_sdpa(plans=...)`.

    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> report = scram.survey(layer, torch.randn(1, 64, 16), grid=(8, 8), error=0.1)
    >>> list(report.layers), report.layers["self_attn"].grid
    (['self_attn'], (8, 8))
    """
    checks.real("error", error, 0.0, math.inf, "[0, inf)", "; 0.05 is 5 % of a typical output")
    checks.instance("model", model, nn.Module, "torch.nn.Module", "")
    replacement = Replacement(grid, before, after, key_grid, error, replaces=False, radius=radius, impl=impl)
    patch = _Patch(replacement)
    training = [module for module in model.modules() if module.training]
    args, kwargs = (
        ((), inputs) if isinstance(inputs, dict) else ((inputs,) if isinstance(inputs, Tensor) else inputs, {})
    )
    try:
        with patch as report, torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for module in training:
            module.training = True
    return report


SOFTMAXES = frozenset({F.softmax, torch.softmax, Tensor.softmax})
LEAST_BY_HAND = 64  # queries and keys of a softmax that may be attention

_registered: dict[str, Replacement] = {}  # names that stand for SCRAM


def register_transformers(name: str = "scram", *, grid: Sequence[int] | Auto, **settings: Any) -> Report:
    """Make SCRAM an attention implementation of the package transformers: `model.set_attn_implementation(name)`.

    What `patch_sdpa` would leave alone runs as transformers' "sdpa" does, with the masks that it makes for it.

    Args:
        name: what `set_attn_implementation` takes; a second registration of the same name replaces the first.
        grid, settings: the arguments of `patch_sdpa`.

    Returns:
        The report of all calls that models make by that name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if name in ("", "eager") or (name in AttentionInterface() and name not in _registered):
        raise ValueError(f"name must be a new one, got {name!r}, which transformers has; for example 'scram'")
    patch = patch_sdpa(grid=grid, **settings)
    assert isinstance(patch, _Patch)
    if name in _registered:
        _registered[name].hooks.detach()
    patch.sdpa.hooks.attach()  # as long as the registration
    patch.report.silent = NOT_ASKED.format(name)
    plain = AttentionInterface()["sdpa"]

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with patch:
            return plain(module, *args, **kwargs)

    _registered[name] = patch.sdpa
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    return patch.report


class _FastPath:
    """torch's fast path of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`, a setting of the whole process.

    It computes attention inside one operator. Eager code leaves it where a mode is entered, compiled code does not.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0  # contexts that are entered, in all threads
        self.was = True

    def disable(self) -> None:
        with self.lock:
            if not self.users:
                self.was = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.users += 1

    def restore(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                torch.backends.mha.set_fastpath_enabled(self.was)


_fast_path = _FastPath()


class _Patch(TorchFunctionMode):
    """Sees every call of a torch function in its thread, also of functions imported by name."""

    def __init__(self, sdpa: Replacement) -> None:
        super().__init__()
        self.sdpa = sdpa
        self.report = sdpa.report
        self.copies: dict[CodeType, Callable[..., Any] | None] = {}
        # torch hands over nn.MultiheadAttention's function whole; a copy has the inner call replaced.
        plain = _compat.torch_function(F.multi_head_attention_forward, F.__file__)
        self.multi_head = None if plain is None else self._copy(plain)

    def __enter__(self) -> Report:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling():
            self.sdpa.hooks.attach()
            _fast_path.disable()
        return self.report

    def __exit__(self, *error: Any) -> None:
        if not torch.compiler.is_compiling():
            _fast_path.restore()
            self.sdpa.hooks.detach()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _compat.SDPA or func is F.scaled_dot_product_attention:
            return self.sdpa.attention(*args, **kwargs)
        if func in _compat.FUSED_LAYERS:
            self.sdpa.note(args[0], args[0], "", NO_TOKENS, FUSED)
        if func in SOFTMAXES and args and not torch.compiler.is_compiling():
            self._see_softmax(args[0])
        caller = None
        if not isinstance(func, _compat.C_FUNCTIONS) and not torch.compiler.is_compiling():
            caller = _compat.caller_of_mode("backward", "grad", "multi_head_attention_forward")
        if func is F.multi_head_attention_forward:
            why_not = "nn.MultiheadAttention returns its weights; pass need_weights=False"
            if kwargs.get("need_weights", True):
                self.sdpa.note(args[0], args[1], "", NO_TOKENS, why_not)
            body = self.multi_head if caller is None else self._copy(caller)
            return (body or func)(*args, **kwargs)
        body = None if caller is None else self._copy(caller)
        if body is None:
            return func(*args, **kwargs)
        with self:  # torch takes a mode off while it handles a call; a checkpoint computes again inside
            return body(*args, **kwargs)

    def _see_softmax(self, x: Tensor) -> None:
        if isinstance(x, Tensor) and x.ndim > 1 and min(x.shape[-2:]) >= LEAST_BY_HAND:
            self.report.softmaxes[tuple(x.shape)] += 1

    def _copy(self, function: FunctionType) -> Callable[..., Any] | None:
        """The body of a torch function, to run it inside the mode; made once."""
        code = function.__code__
        if code not in self.copies:
            self.copies[code] = _compat.inside_mode(function, scaled_dot_product_attention=self.sdpa.attention)
            attends = _compat.reads(code, "scaled_dot_product_attention")
            if code.co_name == "multi_head_attention_forward" and not attends:
                self.report.warning = NO_INNER_CALL
                warnings.warn(NO_INNER_CALL, RuntimeWarning, stacklevel=4)
        return self.copies[code]
