"""Attention with the signature of torch's: by SCRAM where queries and keys are a grid, by torch where it cannot be."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from .. import _compat
from ..core import checks, pipeline
from ..core.bias import pair_of
from ..core.pipeline import execute
from ..core.resolve import Request, as_search, goes_dense
from ..core.tails.base import NO_TAIL, Tail, as_tail
from ..options import IMPLS, Auto, How, Impl
from ..quality import kept
from ..quality.again import in_a_quiet_moment
from ..quality.plan import GIVEN, Plan
from ..quality.tune import tune
from ..settings import Search
from .auto_grid import CAUSAL, COMPILED, AutoGrids, ModuleCall, compiled_grid, module_calls
from .layers import NO_TOKENS, Hooks, Layer, Plans, Tokens, name_in, table
from .layouts import Grids, KeyMasks, MaskReader, TorchOptions, attend_on_grid, given_tokens
from .steps import Kept, Steps


class Call(NamedTuple):
    """A kind of call of `F.scaled_dot_product_attention`: shapes of q and k, and how it was answered.

    `why_not`: why it was left to torch, "" for those that were not. `how`, of those: "searched", "clustered" (clusters
    without a search), or "dense", because that is faster, or within the budget the only way. A call in a compiled graph
    is noted once, when it is compiled, without its shapes.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    why_not: str
    how: How = "searched"

    @property
    def answer(self) -> str:
        """How it was answered, in words."""
        return f"left to torch: {self.why_not}" if self.why_not else self.how


@dataclass
class Report:
    """Which calls were searched, which ran by clusters alone or dense, which were left to torch and why. Prints itself.

    With an error budget it also says how each layer was tuned.

    Args:
        calls: how often each kind of call came; the memory does not grow with their number.
        warning: what keeps the patch from working as a whole; "" for nothing.
        error: the budget; None where there is none.
        layers: by their names, with a budget.
        known: plans of all layers that have one, whether they were called or not.
        softmaxes: shapes of large softmaxes that were seen outside, which may be attention by hand.
        silent: what to do where no call came; "" for nothing.
    """

    calls: Counter[Call] = field(default_factory=Counter)
    warning: str = ""
    error: float | None = None
    layers: dict[str, Layer] = field(default_factory=dict)
    known: Plans = field(default_factory=Plans)
    softmaxes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    silent: str = ""

    @property
    def searched(self) -> int:
        """How many calls SCRAM searched."""
        return self._count("searched")

    @property
    def clustered(self) -> int:
        """How many calls SCRAM answered by clusters and routed keys, without a search."""
        return self._count("clustered")

    @property
    def dense(self) -> int:
        """How many calls SCRAM gave to dense attention."""
        return self._count("dense")

    def _count(self, how: How) -> int:
        return sum(times for call, times in self.calls.items() if not call.why_not and call.how == how)

    @property
    def left_alone(self) -> int:
        """How many calls were left to torch."""
        return sum(times for call, times in self.calls.items() if call.why_not)

    @property
    def plans(self) -> Plans:
        """The plans of the layers that were tuned: `report.plans.save(path)`."""
        return Plans({name: layer.plan for name, layer in self.layers.items() if layer.plan is not None})

    def __str__(self) -> str:
        total = sum(self.calls.values())
        clustered = f"{self.clustered} clustered, " if self.clustered else ""
        counts = f"{self.searched} searched, {clustered}{self.dense} dense, {self.left_alone} left to torch"
        lines = [f"{total} calls of scaled_dot_product_attention: {counts}"]
        for call, times in self.calls.items():
            shapes = f"q {list(call.q)}" if call.q else "compiled"
            shapes += f", k {list(call.k)}" if call.k != call.q else ""
            lines.append(f"  {times} x {shapes}: {call.answer}")
        if not total and self.softmaxes:
            seen = ", ".join(f"{times} x {list(shape)}" for shape, times in self.softmaxes.items())
            lines += [f"  softmaxes over keys: {seen}", BY_HAND]
        if not total and self.silent:
            lines.append(self.silent)
        if self.error is not None and self.layers:
            lines.append(table(list(self.layers.values()), self.error))
        return "\n".join([*lines, *([f"warning: {self.warning}"] if self.warning else [])])


BY_HAND = (
    "  this model writes its attention out, softmax(q @ k.mT * scale) @ v, which no patch can see. In its code put "
    "scram.attention(q.unflatten(2, grid), k.unflatten(2, grid), v.unflatten(2, grid), scale=scale).flatten(2, -2), or "
    "F.scaled_dot_product_attention(q, k, v, scale=scale), which a patch sees; for places as values scram.nn.Matcher"
)


_reports: WeakValueDictionary[str, Report] = WeakValueDictionary()  # the compiler takes no other object as a constant


def _note_compiled(report: str, layer: str, tokens: tuple[Any, ...], why_not: str, how: How) -> None:
    """Runs while a graph is traced. A count in the graph would make a new graph of every call."""
    into = _reports[report]
    into.calls[Call((), (), why_not, how)] += 1
    if layer:
        plan = into.known.get(layer)
        reason = why_not or ("" if plan else "compiled before it was tuned")
        into.layers.setdefault(layer, Layer(layer, Tokens(*tokens), plan, reason)).count(why_not, how)


def _compiled_tokens(report: str, layer: str, total: int, keys: int, causal: bool) -> tuple[tuple[Any, ...], str]:
    """Tokens and why not of a layer with grid="auto", while a graph is traced: as its last eager call had them.

    Where the compiled model itself is given a picture of as many tokens but other extents, its grid is that.
    """
    layers = _reports[report].layers
    _compat.fix_extents(total)
    tokens, why_not = (NO_TOKENS, CAUSAL) if causal else compiled_grid(total, keys)
    for name in (layer, f"{layer}, {total} tokens"):
        known = layers.get(name)
        if known is not None and (not known.grid or known.tokens.of(total, keys)):
            turned = tokens.grid and tokens == known.tokens._replace(grid=tokens.grid)
            return tuple(tokens if turned else known.tokens), "" if known.grid else known.why_not
    return tuple(tokens), why_not


class Replacement:
    """`F.scaled_dot_product_attention` by SCRAM where it can be; with a budget, each layer by its own plan.

    Args:
        grid, before, after, key_grid: as in `patch_sdpa`.
        min_tokens: calls of fewer tokens are left to torch.
        dense_layers: the first layers with a grid, by the order of their first calls, which are left to torch.
        steps: of a sampler; None: it has none.
        error: the budget of each layer; None for the settings below everywhere.
        plans: of layers that were tuned before.
        replaces: whether SCRAM answers; else its layers are only tuned, and torch does.
        model: whose layers the plans are, for a first call that is compiled.
        search, tail, radius, impl: as in `attention`.
    """

    def __init__(
        self,
        grid: Grids | Auto,
        before: int = 0,
        after: int = 0,
        key_grid: Sequence[int] | None = None,
        error: float | None = None,
        plans: Plans | None = None,
        replaces: bool = True,
        model: nn.Module | None = None,
        *,
        min_tokens: int = 0,
        dense_layers: int = 0,
        steps: Steps | None = None,
        search: Search | Auto | None = "auto",
        tail: Tail | Auto | None = "auto",
        radius: int | Sequence[int] = 1,
        impl: Impl = "auto",
    ) -> None:
        if search is not None:
            as_search(search)
        as_tail(tail, NO_TAIL)
        checks.one_of("impl", impl, IMPLS)
        self.tokens = given_tokens(grid, before, after, key_grid)
        self.min_tokens = checks.whole("min_tokens", min_tokens, 0)
        self.dense_layers = checks.whole("dense_layers", dense_layers, 0)
        self.first: list[str] = []  # names of layers with a grid, in the order of their first calls
        self.steps = steps or Steps()
        rank = len(radius) if isinstance(radius, Sequence) else 1  # of grids that are found
        radii = [checks.radius(radius, len(one.grid)) for one in self.tokens or ()] or [checks.radius(radius, rank)]
        self.settings = Request(
            search=search,
            tail=tail,
            radius=radii[0] if len(self.tokens or ()) == 1 else radius,
            impl=impl,
        )
        if error is not None:
            _budget(error)
            if search != "auto" or tail != "auto":
                raise ValueError("error chooses search and tail; leave them out, or leave error out")
        elif plans is not None:
            raise ValueError("plans keep an error budget; pass error too")
        if plans is not None:
            checks.instance("plans", plans, Plans, "scram.Plans", "; scram.Plans.load(path) reads them")
            loose = [name for name, plan in plans.items() if plan.error > (error or 0.0)]
            if loose:
                name = loose[0]
                raise ValueError(
                    f"plans must keep the error {error:g}, but {name!r} was tuned for {plans[name].error:g}; "
                    "tune it again, or raise the error"
                )
        self.replaces = replaces
        self.hooks = Hooks()
        # What compiled code reads changes in eager calls only.
        self.plans = Plans(plans or {})
        self.lengths: dict[str, int] = {}
        self.report = Report(error=error, known=self.plans)
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.taken: set[str] = set()
        self.report_name = str(id(self.report))
        _reports[self.report_name] = self.report
        for name, module in () if model is None else model.named_modules():
            if name in self.plans:
                self.names[module] = name
                self.taken.add(name)
                self.hooks.add(name, module)
        self.auto = AutoGrids()
        self.masks = MaskReader(error)
        self.warns = False
        for function in (_note_compiled, _compiled_tokens):
            torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call] # loads the compiler

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        ranks: int = 1,
    ) -> Tensor:
        """`F.scaled_dot_product_attention`, by SCRAM where it can be; `ranks`: of whose tokens the call is joined."""
        options = TorchOptions(dropout_p, is_causal, scale, enable_gqa)
        compiling = torch.compiler.is_compiling()
        budget = self.report.error is not None
        named = budget or self.tokens is None or self.dense_layers > 0 or self.steps.counts
        calls = module_calls() if named and not compiling else []
        modules = [call.module for call in calls]
        again = _compat.in_backward()  # a checkpoint: the model around its layers is not running
        if calls and not again:
            self.steps.see(calls[-1].module, calls[-1].places.get("timestep"))
        running = self.hooks.running[-1] if compiling and self.hooks.running else "compiled"
        auto = partial(
            _auto_tokens,
            auto=self.auto,
            calls=calls,
            again=again,
            report=self.report_name,
            layer=running,
            warns=self.warns,
        )
        tokens, masks, why_not = _tokens_of(query, key, value, attn_mask, options, self.tokens, auto, self.masks)
        if not why_not and tokens.total < self.min_tokens:
            why_not = f"{tokens.total} tokens, and min_tokens={self.min_tokens}"
        if not why_not and ranks > 1 and tokens.off:
            why_not = "tokens off the grid stand between those of several ranks"
        layer = self._layer(tokens, modules, query, why_not) if named else ""
        why_not = why_not or self._scheduled(layer)
        if why_not:
            self.note(query, key, layer, tokens, why_not)
            return options.attend(query, key, value, attn_mask)

        def attend(q: Tensor, k: Tensor, v: Tensor, call: Request) -> Tensor | None:
            if budget and not compiling:
                self._tune(self.report.layers[layer], modules, q, k, v, call)
            if not self.replaces:
                self.note(query, key, layer, tokens, "surveyed")
                return None
            plan = self.plans.get(layer)
            if plan is not None and plan.busy and not compiling and not again and not call.dropout_p:
                plan = self._in_a_quiet_moment(layer, plan, q, k, v, call)
            settings = self.settings
            request = call._replace(
                search=settings.search,
                tail=settings.tail,
                radius=settings.radius,
                impl=settings.impl,
                caller=None if compiling else f"{self.report_name} {layer}",
            )
            setting = settings if plan is None else plan.setting
            how = _how(setting.search, setting.tail, plan is None and goes_dense(q, k, v, request))
            self.note(query, key, layer, tokens, "", how)
            if how == "dense" and call.bias is not None:
                return None  # torch adds the mask itself, exactly
            if plan is not None:
                request = plan.setting.applied_to(call)._replace(impl="auto" if plan.dense else plan.impl)
            if how != "dense" and self.steps.keeps and not compiling and not torch.is_grad_enabled():
                return self._from_step_to_step(layer, q, k, v, request)
            return execute(pipeline.run, q, k, v, request).out

        return attend_on_grid(query, key, value, attn_mask, options, tokens, masks, attend)

    def _scheduled(self, layer: str) -> str:
        """Why a call that SCRAM could answer is left to torch for now, "" for no reason."""
        if self.steps.dense:
            return f"one of the first {self.steps.dense_steps} steps"
        if self.dense_layers:
            if layer not in self.first and not torch.compiler.is_compiling():
                self.first.append(layer)
            if layer in self.first[: self.dense_layers]:
                return f"one of the first {self.dense_layers} layers"
        return ""

    def _from_step_to_step(self, layer: str, q: Tensor, k: Tensor, v: Tensor, request: Request) -> Tensor:
        """The call, from the matches and clusters that the layer had at the step before, and they are kept again."""
        rank = 0 if request.bias is None else pair_of(request.bias)[0].shape[-1]
        key = (layer, self.steps.call, q.shape, k.shape, q.dtype, q.device, rank)
        kept = self.steps.kept.get(key)
        if kept is not None:
            request = request._replace(warm=kept.matches, warm_codebook=kept.codebook)
        result = execute(pipeline.run, q, k, v, request)
        self.steps.kept[key] = Kept(result.matches, result.codebook)
        return result.out

    def _layer(self, tokens: Tokens, modules: list[nn.Module], query: Tensor, why_not: str) -> str:
        """The name of the layer that calls; one that is met for the first time is noted."""
        compiling = torch.compiler.is_compiling()
        if compiling:
            name = self.hooks.running[-1] if self.hooks.running else "compiled"
        elif modules:
            name = self._name(modules)
            self.hooks.add(name, modules[0])
        else:
            name = f"no module, q {list(_shape(query))}"
        if why_not:  # on no grid, or not for SCRAM: it says nothing of the layer's other calls
            if not compiling:
                self.report.layers.setdefault(name, Layer(name, why_not=why_not))
            return name
        if self.lengths.get(name, tokens.total) != tokens.total:
            name = f"{name}, {tokens.total} tokens"
        if not compiling:
            self.lengths.setdefault(name, tokens.total)
            layer = self.report.layers.setdefault(name, Layer(name, tokens))
            if not layer.grid:  # its calls so far were left to torch
                layer.why_not = ""
            layer.tokens = tokens  # of its last call: as many may have other extents
            layer.plan = self.plans.get(name)
        return name

    def _name(self, modules: list[nn.Module]) -> str:
        """The name of the module that calls, looked for once; that of another model's module gets a number."""
        inner = modules[0]
        known = self.names.get(inner)
        if known is None:
            known = base = name_in(modules[-1], inner)
            number = 1
            while known in self.taken:
                number += 1
                known = f"{base} ({number})"
            self.names[inner] = known
            self.taken.add(known)
        return known

    def _tune(self, layer: Layer, modules: list[nn.Module], q: Tensor, k: Tensor, v: Tensor, call: Request) -> None:
        """Tune a layer in its first eager call in eval mode."""
        if layer.name in self.plans:
            return
        if not modules:
            layer.why_not = "no module calls; use scram.tune"
        elif modules[0].training:
            layer.why_not = "it is training; tuned in eval mode"
        elif call.dropout_p:
            layer.why_not = "dropout; tuned without it"
        elif q.is_meta or not _compat.measurable():
            layer.why_not = "meta tensors, a dispatch mode or torch.func; tuned outside of them"
        else:
            assert self.report.error is not None
            try:
                with _compat.without_modes():
                    layer.plan = tune(
                        q,
                        k,
                        v,
                        error=self.report.error,
                        radius=self.settings.radius,
                        causal=call.causal,
                        key_mask=call.key_mask,
                        scale=call.scale,
                        extra=call.extra,
                        extra_mask=call.extra_mask,
                        bias=call.bias,
                        impl=self.settings.impl,
                    )
                layer.why_not = ""
                self.plans[layer.name] = layer.plan
            except ValueError as reason:
                layer.why_not = str(reason)

    def _in_a_quiet_moment(self, layer: str, plan: Plan, q: Tensor, k: Tensor, v: Tensor, call: Request) -> Plan:
        """The plan of a layer, measured again where it was measured on a busy machine that is quiet now."""
        with _compat.without_modes():
            found = in_a_quiet_moment(plan, q, k, v, **{name: getattr(call, name) for name in GIVEN})
        if found is not plan:  # another thread may have stored its own
            self.plans[layer] = self.report.layers[layer].plan = found
        return found

    def note(self, query: Tensor, key: Tensor, layer: str, tokens: Tokens, why_not: str, how: How = "searched") -> None:
        if torch.compiler.is_compiling():
            _note_compiled(self.report_name, layer, tuple(tokens), why_not, how)
            return
        self.report.calls[Call(_shape(query), _shape(key), why_not, how)] += 1
        if layer:
            self.report.layers[layer].count(why_not, how)


def _how(search: Search | Auto | None, tail: Tail | Auto | None, goes_dense: bool) -> How:
    """How SCRAM answers a call: without a search clusters stand alone, where they are named."""
    if goes_dense or (search is None and (tail is None or isinstance(tail, str))):
        return "dense"
    return "clustered" if search is None else "searched"


def _shape(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor; only the number of its parts for a nested one of several shapes."""
    return (x.size(0),) if x.is_nested and x.layout == torch.strided else tuple(x.shape)


def _budget(error: Any) -> None:
    checks.real("error", error, 0.0, math.inf, "[0, inf)", "; 0.05 is 5 % of a typical output")


def _tokens_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    options: TorchOptions,
    given: tuple[Tokens, ...] | None,
    auto: Callable[[Tensor, int, bool], tuple[Tokens, str]],
    masks: MaskReader,
) -> tuple[Tokens, KeyMasks, str]:
    """What the tokens of a call are, `given` or found by `auto`, its masks, and why it is left to torch, "" for not."""
    tokens, why_not = _laid_out(query, key, value, options, given, auto)
    why_not = why_not or _why_not(query, key, value, attn_mask, options)
    read = KeyMasks() if why_not else masks.read(attn_mask, query, tokens)
    return (tokens, KeyMasks(), read) if isinstance(read, str) else (tokens, read, why_not)


def _laid_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: TorchOptions,
    given: tuple[Tokens, ...] | None,
    auto: Callable[[Tensor, int, bool], tuple[Tokens, str]],
) -> tuple[Tokens, str]:
    """What the tokens of a call are, and why they are none."""
    if any(x.is_nested or x.layout != torch.strided for x in (query, key, value)):
        return NO_TOKENS, "tensors that are not dense"
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
        return NO_TOKENS, f"{query.ndim} axes, not [B, H, N, E] or [B, N, E]"
    queries, keys = query.shape[-2], key.shape[-2]
    if keys != value.shape[-2]:
        return NO_TOKENS, f"{keys} keys and {value.shape[-2]} values"
    if given is None:
        return auto(query, keys, options.is_causal)
    tokens = next((found for one in given if (found := one.of(queries, keys)) is not None), None)
    if tokens is None:
        grids = "the grid has" if len(given) == 1 else "the grids have"
        return NO_TOKENS, f"{queries} queries and {keys} keys, {grids} {'; '.join(map(str, given))}"
    return tokens, ""


def _auto_tokens(
    query: Tensor,
    keys: int,
    causal: bool,
    auto: AutoGrids,
    calls: Sequence[ModuleCall] = (),
    again: bool = False,
    report: str = "",
    layer: str = "",
    warns: bool = False,
) -> tuple[Tokens, str]:
    """The tokens that grid="auto" finds, and why it finds none."""
    if torch.compiler.is_compiling():
        if not report:
            return NO_TOKENS, COMPILED
        total, keys = (len(range(n)) for n in (query.shape[-2], keys))  # numbers, where sizes are symbols
        tokens, no_grid = _compiled_tokens(report, layer, total, keys, causal)
        return Tokens(*tokens), no_grid
    result = auto.found_before(query, keys, causal, calls) if again else None
    if result is None:
        result = auto.find(query, keys, causal, calls)
    if isinstance(result, str):
        if warns:
            warnings.warn(f"scram.scaled_dot_product_attention leaves a call to torch: {result}", stacklevel=6)
        return NO_TOKENS, result
    return result, ""


def _why_not(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, options: TorchOptions) -> str:
    """The reason to leave a call on a grid to torch, "" for none; its mask is read apart."""
    grouped = query.ndim == 4 and key.shape[1] != query.shape[1]
    if query.shape[0] != key.shape[0] or key.shape[:-1] != value.shape[:-1] or (grouped and not options.enable_gqa):
        return "batches or heads that broadcast"
    if not key.dtype == query.dtype == value.dtype or query.dtype not in checks.DTYPES:
        return f"dtypes {query.dtype}, {key.dtype}, {value.dtype}"
    if not key.device == query.device == value.device:
        return "tensors on several devices"
    if _compat.traced():
        return "torch.jit.trace, which keeps no shapes; use torch.export"
    if options.scale is not None and not options.scale > 0:
        return f"a scale of {options.scale}"
    if not options.dropout_p < 1:
        return f"a dropout of {options.dropout_p}"
    if options.is_causal and attn_mask is not None:
        return "a mask beside causal order"
    if options.is_causal and query.shape[-2] != key.shape[-2]:
        return "causal order of fewer keys"
    return ""


def _attention(q: Tensor, k: Tensor, v: Tensor, call: Request) -> Tensor | None:
    """The default of `attention` on a grid; None where torch adds a float mask itself."""
    if call.bias is not None and goes_dense(q, k, v, call._replace(bias=None)):
        return None
    return execute(pipeline.run, q, k, v, call._replace(caller="scaled_dot_product_attention")).out


_direct: dict[tuple[Any, ...], Replacement] = {}
_auto = AutoGrids()
_masks = MaskReader()


def clear_plans() -> None:
    """Forget the plans of `attention(error=...)` and `scaled_dot_product_attention(error=...)`: all are tuned again."""
    kept.clear()
    for one in _direct.values():
        one.hooks.detach()
    _direct.clear()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    grid: Grids | Auto,
    before: int = 0,
    after: int = 0,
    key_grid: Sequence[int] | None = None,
    error: float | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` for tokens of a grid: where it stood in a model's own code.

    What SCRAM cannot do, such as a mask that differs between queries, torch does. A float mask is read as key mask and
    bias: a table of offsets, or a matrix of low rank, becomes factors with an error of .01, or a quarter of `error`.

    Args:
        query, key, value: [B, H, N, E], [B, Hk, M, E], [B, Hk, M, F]: `before` tokens, the grid row by row, `after`
            tokens.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as torch has them.
        grid, before, after, key_grid: as in `patch_sdpa`.
        error: the module that calls is tuned for this error in its first eager call in eval mode, and keeps its plan
            until `scram.clear_plans()`. None: the default of `scram.attention`.

    With grid="auto" a call whose tokens come from no picture is left to torch, with a warning. So is, without one, a
    model that is compiled before its first call.

    Returns:
        [B, H, N, F].

    >>> q = torch.randn(1, 2, 1 + 64, 8)
    >>> scram.scaled_dot_product_attention(q, q, q, grid=(8, 8), before=1).shape
    torch.Size([1, 2, 65, 8])
    """
    checks.torch_arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given = given_tokens(grid, before, after, key_grid)
    if error is not None:
        _budget(error)
    if given is not None and query.ndim in (3, 4):
        lengths = query.shape[-2], key.shape[-2]
        if all(one.of(*lengths) is None for one in given):
            wanted = "; ".join(map(str, given))
            raise ValueError(
                f"query and key must have the tokens of the grid, {wanted}, got {lengths[0]} and {lengths[1]}"
            )
    kind = given, error
    if kind not in _direct:
        # What is not tuned yet runs the default.
        if torch.compiler.is_compiling() or (error is None and given is not None):
            options = TorchOptions(dropout_p, is_causal, scale, enable_gqa)
            auto = partial(_auto_tokens, auto=_auto)
            tokens, masks, why_not = _tokens_of(query, key, value, attn_mask, options, given, auto, _masks)
            if why_not:
                return options.attend(query, key, value, attn_mask)
            return attend_on_grid(query, key, value, attn_mask, options, tokens, masks, _attention)
        replacement = Replacement(grid, before, after, key_grid, error)
        replacement.hooks.attach()
        replacement.warns = True  # nobody reads its report
        _direct[kind] = replacement
    return _direct[kind].attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
