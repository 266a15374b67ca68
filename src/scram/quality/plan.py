"""What `tune` returns: settings that keep an error budget, how they were found, and a call that uses them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core import checks, files, pipeline
from ..core.bias import widened
from ..core.checks import unknown_arguments
from ..core.pipeline import execute
from ..core.resolve import Request
from ..core.statistics import CONFIDENCE
from ..core.tails.base import NO_TAIL, Tail, as_tail, tails_by_name
from ..options import IMPLS, Impl
from ..settings import Score, Search
from ..spec.scoring import check_score
from . import modes
from .baseline import dense_baseline, yardstick
from .tables import aligned, with_interval
from .timing import believed
from .truth import Errors, Truth

VERSION = 1  # of the JSON
LEAST_SPEEDUP = 1.1  # over dense attention: what saves less is not chosen
CALL_ARGUMENTS = (
    *("causal", "key_mask", "scale", "score", "weight", "extra", "extra_mask", "bias", "dropout_p", "warm", "impl"),
)
WIDENED = ("causal", "scale", "score", "extra")  # arguments of `widened`
DENSE_ARGUMENTS = ("causal", "key_mask", "scale", "score", "extra", "extra_mask")  # of `dense_baseline`
GIVEN = ("key_mask", "extra", "extra_mask", "bias")  # tensors that a plan may have been measured with
INFINITE = ("inf", "-inf", "nan")  # numbers that JSON has as strings
DENSE = "torch.nn.functional.scaled_dot_product_attention(q.flatten(2, -2), {}{}).unflatten(2, q.shape[2:-1])"
GRID_KEYS = "k.flatten(2, -2), v.flatten(2, -2)"
ALL_KEYS = "torch.cat([k.flatten(2, -2), extra[0]], 2), torch.cat([v.flatten(2, -2), extra[1]], 2)"


@dataclass(frozen=True)
class Setting:
    """A way to compute attention: search and tail as in `attention`, or dense attention.

    Args:
        search: None for no search; then a tail stands alone, or without one it is dense attention.
        tail, radius, window: as in `attention`.

    >>> print(Setting(Search(matches=4, separation=2), scram.Clusters(count=512, keys=1024)))
    4 matches, 512 clusters + 1024 keys
    >>> print(Setting(None, scram.Clusters(count=256, keys=512)))
    no search, 256 clusters + 512 keys
    """

    search: Search | None = None
    tail: Tail | None = None
    radius: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        if self.search is not None:
            checks.instance("search", self.search, Search, "scram.Search", "; for example scram.Search(matches=4)")
        if self.tail is not None:
            checks.instance("tail", self.tail, Tail, "tail", "; for example scram.Clusters(count=256)")
            as_tail(self.tail, NO_TAIL)
            if self.search is None and not self.tail.stands_alone:
                raise ValueError(f"{type(self.tail).__name__} needs a search; scram.Clusters does not")
        if isinstance(self.radius, Sequence):
            checks.grid_rank("radius", self.radius)
            object.__setattr__(self, "radius", checks.radius(self.radius, len(self.radius)))
        else:
            object.__setattr__(self, "radius", checks.radius(self.radius, 1)[0])

    @property
    def dense(self) -> bool:
        """Whether it is dense attention."""
        return self.search is None and self.tail is None

    @property
    def arguments(self) -> dict[str, Any]:
        """What `attention` is given."""
        return {"search": self.search, "tail": self.tail, "radius": self.radius}

    def applied_to(self, request: Request) -> Request:
        """The request with what the setting chooses."""
        return request._replace(search=self.search, tail=self.tail, radius=self.radius)

    def code(self, tensors: Sequence[str] = (), grouped: bool = False, **arguments: Any) -> str:
        """A line of Python that does it.

        Args:
            tensors: which of key_mask, extra, extra_mask and bias the call has.
            grouped: whether there are fewer key heads than query heads.
            arguments: the others.

        >>> Setting(Search(matches=4), scram.Clusters(count=128)).code(scale=0.5)
        'scram.attention(q, k, v, search=scram.Search(matches=4), tail=scram.Clusters(count=128), scale=0.5)'
        """
        options = {name: value for name, value in arguments.items() if value not in (None, False, "auto", "dot")}
        passed = "".join(f", {name}={name}" for name in tensors)
        if self.dense:
            options.pop("impl", None)
            if "extra" in tensors and (len(tensors) > 1 or "score" in options or "causal" in options):
                return f"plan(q, k, v{passed})"  # no one function of torch or of this package does it
            if "key_mask" in tensors or "bias" in tensors or "score" in options:
                return f"scram.exact_attention(q, k, v{passed}{_listed(**options)}).out"
            options = {"is_causal" if name == "causal" else name: x for name, x in options.items()}
            options |= {"enable_gqa": True} if grouped else {}
            return DENSE.format(ALL_KEYS if "extra" in tensors else GRID_KEYS, _listed(**options))
        own = _listed(search=self.search, tail=self.tail)
        own += "" if self.radius == 1 else _listed(radius=self.radius)
        return f"scram.attention(q, k, v{own}{_listed(**options)}{passed})"

    def __str__(self) -> str:
        if self.dense:
            return "dense attention"
        matches = "no search"
        if self.search is not None:
            matches = f"{self.search.matches} match{'es' if self.search.matches > 1 else ''}"
        return f"{matches}, {as_tail(self.tail, NO_TAIL).describe()}"


def _listed(**arguments: Any) -> str:
    """Arguments of a call, each behind a comma."""
    return "".join(f", {name}={_code(value)}" for name, value in arguments.items())


def _code(value: Any) -> str:
    """Python that makes a value; of settings only what is not the default."""
    if not is_dataclass(value):
        return getattr(value, "__name__", repr(value))
    variable = getattr(value, "variable", "")
    if variable:
        return str(variable)
    given = [(x.name, getattr(value, x.name)) for x in fields(value) if x.init and getattr(value, x.name) != x.default]
    return f"scram.{type(value).__name__}({', '.join(f'{name}={x!r}' for name, x in given)})"


@dataclass(frozen=True)
class Rung:
    """One setting of the ladder and what was measured of it; None where it was not tried.

    Args:
        setting: what was tried.
        keys: keys visited per query, at most.
        seconds: of a call on these tensors.
        error: 95th percentile over queries of |out - exact| / RMS |exact|, of the worst head: value, low, high.
        output_error: ||out - exact|| / ||exact|| of the worst head; nothing is promised of it.
        keeps: whether the upper end is within the budget in every head.
        note: why it was not tried, or how its time is known.
    """

    setting: Setting
    keys: int
    seconds: float | None = None
    error: tuple[float, float, float] | None = None
    output_error: float | None = None
    keeps: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        checks.instance("setting", self.setting, Setting, "Setting")
        checks.whole_fields(self, keys=0)
        if self.seconds is not None:
            checks.real("seconds", self.seconds, 0.0, math.inf, "[0, inf)")
        if self.error is not None:
            if not isinstance(self.error, tuple) or len(self.error) != 3:
                raise ValueError(f"error must be None or (value, low, high), got {self.error!r}")
            for x in self.error:
                checks.not_negative("error", x)
        if self.output_error is not None:
            checks.not_negative("output_error", self.output_error)
        checks.flag("keeps", self.keeps)
        checks.instance("note", self.note, str, "str")


@dataclass(frozen=True)
class Plan:
    """The fastest settings that keep an error budget, as `tune` measured them. Prints itself; callable as `attention`.

    The promise: in every head the 95th percentile over queries of |out - exact| / RMS |exact| is at most `error`, with
    confidence 95 % for the tensors that were measured. `check` measures it on others.

    Args:
        error: the budget.
        rungs: what was tried, from cheap to dear, dense attention last.
        chosen: which of them it is.
        causal, scale, score, impl: of the call, as in `attention`; they are defaults of calls of the plan.
        num_queries, queries: queries of a head that were compared with dense attention, and queries in all.
        seed: of the sample, and in the settings.
        confidence: of each interval, so that all together hold with 95 %.
        tensors: what it was measured on, in words.
        given: which of key_mask, extra, extra_mask and bias the call had; calls of the plan pass their own.
        grouped: whether there were fewer key heads than query heads.
        split: the share of the queries whose weight two separate places share, in the head where it is largest.
        busy: whether other programs took the cores while it was measured. `check` measures it again then, and so do
            later calls of `attention(error=)` and of a patched model, in a quiet moment.
    """

    error: float
    rungs: tuple[Rung, ...]
    chosen: int
    causal: bool
    scale: float | None
    score: Score
    impl: Impl
    num_queries: int
    queries: int
    seed: int
    confidence: float
    tensors: str
    given: tuple[str, ...] = ()
    grouped: bool = False
    split: float = 0.0
    busy: bool = False

    def __post_init__(self) -> None:
        checks.real("error", self.error, 0.0, math.inf, "[0, inf)")
        for rung in self.rungs:
            checks.instance("rungs", rung, Rung, "tuple of Rungs")
        self._check_chosen()
        checks.flag("causal", self.causal)
        checks.scale(self.scale)
        check_score(self.score)
        checks.one_of("impl", self.impl, IMPLS)
        checks.whole_fields(self, num_queries=1, queries=1)
        if self.num_queries > self.queries:
            raise ValueError(f"num_queries must be at most queries = {self.queries}, got {self.num_queries}")
        if checks.seed(self.seed) is None:
            raise TypeError("seed of a plan must be an int, got None")
        checks.real("confidence", self.confidence, 0.0, 1.0, "[0, 1)")
        checks.instance("tensors", self.tensors, str, "str")
        for name in self.given:
            checks.one_of("given", name, GIVEN)
        if len(set(self.given)) < len(self.given):
            raise ValueError(f"given must name each tensor once, got {self.given}")
        checks.flag("grouped", self.grouped)
        checks.share("split", self.split)
        checks.flag("busy", self.busy)

    def _check_chosen(self) -> None:
        """It names a rung that was measured and visits no more keys than there are; dense attention is the last."""
        chosen = checks.whole("chosen", self.chosen, 0)
        if chosen >= len(self.rungs) or not self.rungs[-1].setting.dense:
            raise ValueError("chosen must name a rung, and dense attention must be the last")
        best = self.rungs[chosen]
        dense = self.rungs[-1]
        if best.error is None:
            raise ValueError(f"chosen must name a rung that was measured, got {best.setting}: {best.note}")
        if best.keys > dense.keys:
            raise ValueError(
                f"chosen must visit at most the {dense.keys} keys that there are, got {best.keys}; tune again"
            )

    @property
    def setting(self) -> Setting:
        """What runs."""
        return self.rungs[self.chosen].setting

    @property
    def dense(self) -> bool:
        """Whether it is dense attention."""
        return self.setting.dense

    @property
    def speedup(self) -> float:
        """Time of dense attention over that of the plan."""
        return _ratio(self.rungs[-1].seconds, self.rungs[self.chosen].seconds)

    @property
    def time_share(self) -> float:
        """Time of the plan over that of dense attention."""
        return _ratio(self.rungs[self.chosen].seconds, self.rungs[-1].seconds)

    @property
    def code(self) -> str:
        """The line of Python that does what the plan does.

        Dense attention is torch's own function; with v of another width than k the plan pads it and is faster.
        """
        same = {"causal": self.causal, "scale": self.scale, "score": self.score, "impl": self.impl}
        return self.setting.code(self.given, self.grouped, **same)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        """Attention by the plan, for tensors of any size.

        Args:
            q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
            arguments: key_mask, extra, extra_mask, bias, dropout_p, warm, and others than the plan's causal, scale,
                score, impl, as in `attention`. Search, tail, radius and window are the plan's.

        Returns:
            out [B, H, *G, F].
        """
        setting = self.setting
        for name in setting.arguments:
            if name in arguments:
                raise TypeError(f"a plan has its own {name}; call scram.attention({name}=...) to choose another")
        unknown = [name for name in arguments if name not in CALL_ARGUMENTS]
        if unknown:
            raise unknown_arguments("plan", unknown, CALL_ARGUMENTS)
        given = {"causal": self.causal, "scale": self.scale, "score": self.score, "impl": self.impl, **arguments}
        if setting.search is None:
            given |= {"warm": None}
        if setting.dense:
            given |= {"impl": "auto"}
        request = Request(**given, **setting.arguments, hints=True)
        return execute(pipeline.run, q, k, v, request).out

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, *, num_queries: int = 2048, seed: int = 0, **arguments: Any
    ) -> Check:
        """Whether the promise holds on other tensors, by the same statistics.

        A plan that was measured on a busy machine is timed again: `Check.plan` is what is chosen then.

        Args:
            q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
            num_queries, seed: the sample, as in `tune`.
            arguments: as in a call of the plan.
        """
        checks.finite_but_for_masked(q, k, v, arguments.get("key_mask"))
        with torch.no_grad():
            out = self(q, k, v, **arguments)
            again = self.timed_again(q, k, v, **arguments) if self.busy else self
            q, k, v, same = self._without_bias(q, k, v, arguments)
            truth = Truth.of(q, k, v, num_queries=checks.whole("num_queries", num_queries, 1), seed=seed, **same)
            measured = truth.errors(out)
        return Check(self.setting, self.error, measured, len(truth.queries), truth.points, again)

    def timed_again(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
        """The fastest of the rungs that kept the budget and of dense attention, by new times; arguments as `check`."""
        *dense, same = self._without_bias(q, k, v, arguments)
        beside = yardstick(*dense, causal=same["causal"], key_mask=same.get("key_mask"), scale=same["scale"])
        timer = partial(believed, beside=beside)
        rungs = list(self.rungs)
        tried = [n for n, rung in enumerate(rungs[:-1]) if rung.keeps]
        for n in tried:
            time, _ = timer(partial(replace(self, chosen=n), q, k, v, **arguments), q.device)
            rungs[n] = replace(rungs[n], seconds=time.seconds)
        rungs[-1] = replace(rungs[-1], seconds=dense_baseline(*dense, timer=timer, **same).seconds)
        chosen = min((*tried, len(rungs) - 1), key=lambda n: rungs[n].seconds or math.inf)
        if LEAST_SPEEDUP * (rungs[chosen].seconds or 0.0) > (rungs[-1].seconds or 0.0):
            chosen = len(rungs) - 1
        return replace(self, rungs=tuple(rungs), chosen=chosen, busy=beside.busy)

    def _without_bias(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q, k, v and arguments of dense attention, whose bias is part of q and k."""
        given = {"causal": self.causal, "scale": self.scale, "score": self.score, **arguments}
        same = {name: given[name] for name in DENSE_ARGUMENTS if name in given}
        if given.get("bias") is not None:
            wide = widened(q, k, v, given["bias"], **{name: x for name, x in same.items() if name in WIDENED})
            assert wide.v is not None
            q, k, v = wide.q, wide.k, wide.v
            same |= {"scale": wide.scale, "extra": wide.extra}
        return q, k, v, same

    @property
    def reason(self) -> str:
        """Why this one, in words."""
        best = self.rungs[self.chosen]
        tried = [rung for rung in self.rungs[:-1] if rung.error is not None]
        if not best.setting.dense:
            assert best.error is not None
            return (
                f"{best.setting}: 95 % of the queries are at most {best.error[2]:.3g} off in every head, "
                f"{self.speedup:.1f} times as fast as dense attention"
            )
        kept = [rung for rung in tried if rung.keeps]
        if kept:
            return f"dense attention: {kept[0].setting} keeps the budget, but is no faster"
        near = min(tried, key=lambda rung: rung.error or (math.inf,), default=None)
        if near is None or near.error is None:
            return "dense attention: nothing else could be faster"
        return f"dense attention: nothing that could be faster kept {self.error:g}; {near.setting}: {near.error[2]:.3g}"

    def __str__(self) -> str:
        head = ("", "setting", "keys visited", "ms", "of dense", "output error*", "95th percentile", "")
        rows = [self._row(number, rung) for number, rung in enumerate(self.rungs)]
        wanted = f"95 % of the queries of every head at most {self.error:g} off (95th percentile)"
        lines = [f"{wanted}, on {self.num_queries} of {self.queries} queries of {self.tensors}"]
        lines += aligned([head, *rows])
        lines += [
            "both errors are of the worst head; * few queries carry it, so nothing is promised of it",
            "intervals cover the sample of queries and no other seed; the plan keeps its own",
        ]
        doubt = "measured while other programs took the cores; plan.check(q, k, v).plan is measured again"
        notes = filter(None, [modes.note(self.split), doubt if self.busy else ""])
        return "\n".join([*lines, self.reason, self.code, *notes])

    __repr__ = __str__

    def _row(self, number: int, rung: Rung) -> tuple[str, ...]:
        time = "" if rung.seconds is None else _shown(1e3 * rung.seconds)
        share = "" if rung.seconds is None else f"{_ratio(rung.seconds, self.rungs[-1].seconds):.2f}"
        error = "" if rung.error is None else with_interval(rung.error)
        output = "" if rung.output_error is None else f"{rung.output_error:.4f}"
        mark = "->" if number == self.chosen else ""
        return mark, str(rung.setting), str(rung.keys), time, share, output, error, rung.note

    def as_dict(self) -> files.Json:
        """As JSON has it; a callable score has no such form."""
        if not isinstance(self.score, str):
            raise TypeError("a plan with a callable score cannot be saved: JSON holds no functions")
        plain = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "rungs"}
        rungs = [{**vars(rung), "setting": _setting_dict(rung.setting)} for rung in self.rungs]
        return {"format": "scram.Plan", "version": VERSION, **_finite(plain), "rungs": _finite(rungs)}

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """What `as_dict` made; ValueError where it is something else."""
        if not isinstance(data, dict) or data.get("format") != "scram.Plan":
            raise ValueError("it holds something else")
        if data.get("version") != VERSION:
            raise ValueError(f"its version is {data.get('version')!r}, this package reads {VERSION}")
        given = {name: value for name, value in data.items() if name not in ("format", "version")}
        given = {"split": 0.0, "busy": False, **given}  # plans of earlier versions have none
        missing = {x.name for x in fields(Plan)} ^ set(given)
        if missing:
            raise ValueError(f"fields missing or unknown: {', '.join(sorted(missing))}")
        with files.malformed("a field is not what as_dict makes"):
            given["rungs"] = tuple(_rung(one) for one in _list("rungs", given["rungs"]))
            given["given"] = tuple(_list("given", given["given"]))
            if not isinstance(given["score"], str):
                raise TypeError(f"score must be a name, got {given['score']!r}")
            return Plan(**{**given, "error": _number("error", given["error"])})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file.

        >>> import tempfile
        >>> q = torch.randn(1, 1, 16, 16, 8)
        >>> plan = scram.tune(q, q, q)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(folder + "/plan.json")
        ...     scram.Plan.load(folder + "/plan.json") == plan
        True
        """
        files.save_json(self.as_dict(), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote; ValueError for any other file."""
        return files.load_json(path, Plan.from_dict, "is not a plan that Plan.save wrote")


@dataclass(frozen=True, eq=False)
class Check:
    """Whether a plan keeps its promise on some tensors. True where it does; prints itself.

    Args:
        setting: what ran.
        error: the budget.
        errors: what was measured, of every batch and head.
        num_queries, queries: queries of a head that were compared with dense attention, and queries in all.
        plan: the plan; where it was measured on a busy machine, what is chosen by new times.
    """

    setting: Setting
    error: float
    errors: Errors
    num_queries: int
    queries: int
    plan: Plan

    @property
    def kept(self) -> bool:
        """Whether the upper end of the 95th percentile is within the budget in every head; dense attention is exact."""
        return self.setting.dense or self.errors.keeps(self.error)

    def __bool__(self) -> bool:
        return self.kept

    def __str__(self) -> str:
        heads = self.errors.p95.low
        missed = int((heads > self.error).sum())
        broken = (
            f"the promise is broken in {missed} of {heads.numel()} heads" if missed else "open, compare more queries"
        )
        verdict = "the promise is kept" if self.kept else broken
        worst = with_interval(self.errors.worst)
        return (
            f"{self.setting}: {verdict}: error at most {self.error:g}; 95th percentile of the worst head {worst}, "
            f"{CONFIDENCE:.0%} interval, on {self.num_queries} of {self.queries} queries"
        )

    __repr__ = __str__


def _shown(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _ratio(one: float | None, other: float | None) -> float:
    return 1.0 if not one or not other else one / other


def _finite(value: Any) -> Any:
    """JSON has no infinity: a number that is not finite is a string."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _setting_dict(setting: Setting) -> files.Json:
    def settings(value: Any) -> files.Json | None:
        if value is None:
            return None
        return {"kind": type(value).__name__} | {x.name: getattr(value, x.name) for x in fields(value) if x.init}

    return {
        **asdict(Setting(radius=setting.radius)),
        "dense": setting.dense,
        "search": settings(setting.search),
        "tail": settings(setting.tail),
    }


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, got {type(value).__name__}")
    return value


def _number(name: str, value: Any) -> float:
    """A number as `_finite` made it."""
    if isinstance(value, str) and value in INFINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    return float(value)


def _rung(data: files.Json) -> Rung:
    """What `_finite` and `_setting_dict` made."""
    stored = dict(data["setting"])
    search, tail = (None if stored[name] is None else dict(stored[name]) for name in ("search", "tail"))
    if search is not None and search.pop("kind") != "Search":
        raise ValueError("search must be of the kind Search")
    tails: dict[str, Callable[..., Tail]] = {name: x for name, x in tails_by_name().items() if not x.variable}
    kind = None if tail is None else tails[checks.one_of("tail", tail.pop("kind"), tails)]
    if search is not None:
        search["jumps"] = tuple(_list("jumps", search["jumps"]))
        reach = search.get("reach")  # plans of earlier versions have none
        search["reach"] = tuple(reach) if isinstance(reach, list) else reach
    setting = Setting(
        search=None if search is None else Search(**search),
        tail=None if kind is None or tail is None else kind(**tail),
        radius=stored["radius"],
    )
    if setting.dense is not stored["dense"]:
        raise ValueError(f"dense must say whether there is neither a search nor a tail, got {stored['dense']!r}")
    error = data["error"]
    numbers = {name: None if data[name] is None else _number(name, data[name]) for name in ("seconds", "output_error")}
    triple = None if error is None else tuple(_number("error", x) for x in _list("error", error))
    return Rung(**{**data, **numbers, "setting": setting, "error": triple})
