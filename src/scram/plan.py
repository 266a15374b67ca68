"""What `tune` returns: settings that keep an error budget, how they were found, and a call that uses them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import api, errors, modes
from .codebook import Codebook
from .estimators import Clusters, Hybrid
from .options import Impl, Window
from .statistics import CONFIDENCE
from .tables import aligned, with_interval
from .truth import Errors, Truth, every_key
from .types import Score, Search

VERSION = 1  # of the JSON
TAILS: dict[str, Callable[..., Clusters | Hybrid]] = {"Clusters": Clusters, "Hybrid": Hybrid}
DENSE = "torch.nn.functional.scaled_dot_product_attention(q.flatten(2, -2), {}{}).unflatten(2, q.shape[2:-1])"
GRID_KEYS = "k.flatten(2, -2), v.flatten(2, -2)"
ALL_KEYS = "torch.cat([k.flatten(2, -2), extra[0]], 2), torch.cat([v.flatten(2, -2), extra[1]], 2)"


@dataclass(frozen=True)
class Setting:
    """A way to compute attention: search and tail as in `attention`, or dense attention.

    Args:
        search: None for dense attention, to which the rest does not apply.
        tail, radius, window: as in `attention`.

    >>> print(Setting(Search(matches=4, separation=2), Clusters(count=512)))
    4 matches, 512 clusters
    """

    search: Search | None = None
    tail: Clusters | Codebook | Hybrid | None = None
    radius: int | tuple[int, ...] = 1
    window: Window = "query"

    @property
    def arguments(self) -> dict[str, Any]:
        """What `attention` is given."""
        return {"search": self.search, "tail": self.tail, "radius": self.radius, "window": self.window}

    def code(self, tensors: Sequence[str] = (), grouped: bool = False, **arguments: Any) -> str:
        """A line of Python that does it.

        Args:
            tensors: which of key_mask and extra the call has.
            grouped: whether there are fewer key heads than query heads.
            arguments: the others.

        >>> Setting(Search(matches=4), Clusters(count=512)).code(scale=0.5)
        'scram.attention(q, k, v, search=scram.Search(matches=4), tail=scram.Clusters(count=512), scale=0.5)'
        """
        said = {name: value for name, value in arguments.items() if value not in (None, False, "auto", "dot")}
        passed = "".join(f", {name}={name}" for name in tensors)
        if self.search is None:
            said.pop("impl", None)
            if "extra" in tensors and (len(tensors) > 1 or "score" in said or "causal" in said):
                return f"plan(q, k, v{passed})"  # no one function of torch or of this package does it
            if "key_mask" in tensors or "score" in said:
                return f"scram.exact_attention(q, k, v{passed}{_listed(said)}).out"
            said = {"is_causal" if name == "causal" else name: x for name, x in said.items()}
            said |= {"enable_gqa": True} if grouped else {}
            return DENSE.format(ALL_KEYS if "extra" in tensors else GRID_KEYS, _listed(said))
        own: dict[str, Any] = {"search": self.search, "tail": self.tail}
        own |= {} if self.radius == 1 else {"radius": self.radius}
        own |= {} if self.window == "query" else {"window": self.window}
        return f"scram.attention(q, k, v{_listed(own | said)}{passed})"

    def __str__(self) -> str:
        if self.search is None:
            return "dense attention"
        matches = f"{self.search.matches} match{'es' if self.search.matches > 1 else ''}"
        if self.tail is None:
            return f"{matches}, windows only"
        if isinstance(self.tail, Hybrid):
            return f"{matches}, {self.tail.samples} drawn keys"
        if isinstance(self.tail, Codebook):
            return f"{matches}, {self.tail.sizes.shape[-1]} clusters"
        return f"{matches}, {self.tail.count} clusters{', fitted' if self.tail.fit else ''}"


def _listed(arguments: dict[str, Any]) -> str:
    return "".join(f", {name}={_code(value)}" for name, value in arguments.items())


def _code(value: Any) -> str:
    """Python that makes a value; of settings only what is not the default."""
    if isinstance(value, Codebook):
        return "codebook"
    if not isinstance(value, (Search, Clusters, Hybrid)):
        return getattr(value, "__name__", repr(value))
    given = [(x.name, getattr(value, x.name)) for x in fields(value) if x.init and getattr(value, x.name) != x.default]
    return f"scram.{type(value).__name__}({', '.join(f'{name}={x!r}' for name, x in given)})"


@dataclass(frozen=True)
class Rung:
    """One setting of the ladder and what was measured of it; None where it was not tried.

    Args:
        setting: what was tried.
        keys: keys visited per query, at most.
        seconds: of a call on these tensors.
        error: 95th percentile of the worst head: value, low, high.
        l2: overall L2 error of the worst head; nothing is promised of it.
        keeps: whether the upper end is within the budget in every head.
        note: why it was not tried, or how its time is known.
    """

    setting: Setting
    keys: int
    seconds: float | None = None
    error: tuple[float, float, float] | None = None
    l2: float | None = None
    keeps: bool = False
    note: str = ""


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
        given: which of key_mask and extra the call had; calls of the plan pass their own.
        grouped: whether there were fewer key heads than query heads.
        split: the share of the queries whose weight two separate places share, in the head where it is largest.
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

    @property
    def setting(self) -> Setting:
        """What runs."""
        return self.rungs[self.chosen].setting

    @property
    def dense(self) -> bool:
        """Whether it is dense attention."""
        return self.setting.search is None

    @property
    def speedup(self) -> float:
        """Time of dense attention over that of the plan."""
        return _ratio(self.rungs[-1].seconds, self.rungs[self.chosen].seconds)

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
            arguments: key_mask, extra, dropout_p, warm, and others than the plan's causal, scale, score, impl, as in
                `attention`. Search, tail, radius and window are the plan's.

        Returns:
            out [B, H, *G, F].
        """
        setting = self.setting
        for name in setting.arguments:
            if name in arguments:
                raise TypeError(f"a plan has its own {name}; call scram.attention({name}=...) to choose another")
        given = {"causal": self.causal, "scale": self.scale, "score": self.score, "impl": self.impl, **arguments}
        if setting.search is not None:
            return api.attention(q, k, v, **given, **setting.arguments)
        given.pop("impl")
        given.pop("warm", None)
        return every_key(q, k, v, **given)

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, *, num_queries: int = 2048, seed: int = 0, **arguments: Any
    ) -> Check:
        """Whether the promise holds on other tensors, by the same statistics.

        Args:
            q, k, v: [B, H, *G, E], [B, Hk, *G', E], [B, Hk, *G', F].
            num_queries, seed: the sample, as in `tune`.
            arguments: as in a call of the plan.
        """
        errors.finite_but_for_masked(q, k, v, arguments.get("key_mask"))
        names = ("causal", "key_mask", "scale", "score", "extra")
        given = {"causal": self.causal, "scale": self.scale, "score": self.score, **arguments}
        with torch.no_grad():
            out = self(q, k, v, **arguments)
            same = {name: given[name] for name in names if name in given}
            truth = Truth.of(q, k, v, num_queries=errors.whole("num_queries", num_queries, 1), seed=seed, **same)
            found = truth.errors(out)
        return Check(self.setting, self.error, found, len(truth.queries), truth.points)

    @property
    def reason(self) -> str:
        """Why this one, in words."""
        best = self.rungs[self.chosen]
        tried = [rung for rung in self.rungs[:-1] if rung.error is not None]
        if best.setting.search is not None:
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
        head = ("", "setting", "keys visited", "ms", "of dense", "95th percentile", "L2*", "")
        rows = [self._row(number, rung) for number, rung in enumerate(self.rungs)]
        lines = [f"error at most {self.error:g}, on {self.num_queries} of {self.queries} queries of {self.tensors}"]
        lines += aligned([head, *rows])
        lines += ["* of the worst head, as the 95th percentile; few queries carry it, so nothing is promised of it"]
        return "\n".join([*lines, self.reason, self.code, *filter(None, [modes.note(self.split)])])

    __repr__ = __str__

    def _row(self, number: int, rung: Rung) -> tuple[str, ...]:
        time = "" if rung.seconds is None else _shown(1e3 * rung.seconds)
        share = "" if rung.seconds is None else f"{1 / _ratio(self.rungs[-1].seconds, rung.seconds):.2f}"
        error = "" if rung.error is None else with_interval(rung.error)
        l2 = "" if rung.l2 is None else f"{rung.l2:.4f}"
        mark = "->" if number == self.chosen else ""
        return mark, str(rung.setting), str(rung.keys), time, share, error, l2, rung.note

    def as_dict(self) -> dict[str, Any]:
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
        given.setdefault("split", 0.0)  # plans of earlier versions have none
        missing = {x.name for x in fields(Plan)} ^ set(given)
        if missing:
            raise ValueError(f"fields missing or unknown: {', '.join(sorted(missing))}")
        rungs = tuple(_rung(one) for one in given.pop("rungs"))
        tensors = tuple(errors.one_of("given", name, ("key_mask", "extra")) for name in given["given"])
        plan = Plan(rungs=rungs, **{**given, "error": float(given["error"]), "given": tensors})
        if not 0 <= errors.whole("chosen", plan.chosen, 0) < len(rungs) or rungs[-1].setting.search is not None:
            raise ValueError("chosen must name a rung, and dense attention must be the last")
        errors.real("error", plan.error, 0.0, math.inf, "[0, inf)")
        errors.real("split", plan.split, 0.0, math.inf, "[0, 1]")
        errors.flag("causal", plan.causal)
        errors.flag("grouped", plan.grouped)
        errors.scale(plan.scale)
        errors.one_of("score", plan.score, errors.SCORES)
        errors.one_of("impl", plan.impl, errors.IMPLS)
        return plan

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
        save_json(self.as_dict(), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote."""
        return load_json(path, Plan.from_dict, "is not a plan that Plan.save wrote")


Loaded = TypeVar("Loaded")


def save_json(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    text = json.dumps(data, indent=1, allow_nan=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")


def load_json(path: str | os.PathLike[str], made: Callable[[Any], Loaded], complaint: str) -> Loaded:
    """What `made` makes of a file that `save_json` wrote; ValueError with the complaint where it is another file."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        return made(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} {complaint}: {error}") from error


@dataclass(frozen=True, eq=False)
class Check:
    """Whether a plan keeps its promise on some tensors. True where it does; prints itself.

    Args:
        setting: what ran.
        error: the budget.
        errors: what was measured, of every batch and head.
        num_queries, queries: queries of a head that were compared with dense attention, and queries in all.
    """

    setting: Setting
    error: float
    errors: Errors
    num_queries: int
    queries: int

    @property
    def kept(self) -> bool:
        """Whether the upper end of the 95th percentile is within the budget in every head; dense attention is exact."""
        return self.setting.search is None or self.errors.keeps(self.error)

    def __bool__(self) -> bool:
        return self.kept

    def __str__(self) -> str:
        heads = self.errors.p95.low
        over = int((heads > self.error).sum())
        broken = f"the promise is broken in {over} of {heads.numel()} heads" if over else "open, compare more queries"
        verdict = "the promise is kept" if self.kept else broken
        worst = with_interval(self.errors.worst)
        return (
            f"{self.setting}: {verdict}: error at most {self.error:g}; 95th percentile of the worst head {worst}, "
            f"{CONFIDENCE:.0%} interval, on {self.num_queries} of {self.queries} queries"
        )

    __repr__ = __str__


def _shown(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _ratio(dense: float | None, other: float | None) -> float:
    return 1.0 if not dense or not other else dense / other


def _finite(value: Any) -> Any:
    """JSON has no infinity: a number that is not finite is a string."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _setting_dict(setting: Setting) -> dict[str, Any]:
    def settings(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"kind": type(value).__name__} | {x.name: getattr(value, x.name) for x in fields(value) if x.init}

    return {**asdict(Setting(radius=setting.radius, window=setting.window)),
            "search": settings(setting.search), "tail": settings(setting.tail)}  # fmt: skip


def _rung(data: dict[str, Any]) -> Rung:
    """What `_finite` and `_setting_dict` made."""
    said = dict(data["setting"])
    search, tail = (None if said[name] is None else dict(said[name]) for name in ("search", "tail"))
    if search is not None and search.pop("kind") != "Search":
        raise ValueError("search must be of the kind Search")
    kind = None if tail is None else TAILS[errors.one_of("tail", tail.pop("kind"), TAILS)]
    if search is not None:
        search["jumps"] = tuple(search["jumps"])
        reach = search.get("reach")  # plans of earlier versions have none
        search["reach"] = tuple(reach) if isinstance(reach, list) else reach
    radius = said["radius"]
    setting = Setting(
        search=None if search is None else Search(**search),
        tail=None if kind is None or tail is None else kind(**tail),
        radius=radius if isinstance(radius, int) else errors.radius(radius, len(radius)),
        window=errors.one_of("window", said["window"], errors.WINDOWS),
    )
    error = data["error"]
    numbers = {name: None if data[name] is None else float(data[name]) for name in ("seconds", "l2")}
    triple = None if error is None else tuple(float(x) for x in error)
    return Rung(**{**data, **numbers, "setting": setting, "error": triple})
