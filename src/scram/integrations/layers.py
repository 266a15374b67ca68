"""Layers of a model that compute attention: how their calls are answered, by which plan; and plans as one file."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn

from ..core import files
from ..options import How
from ..quality import modes
from ..quality.plan import Plan
from ..quality.tables import aligned, with_interval

VERSION = 1  # of the JSON


class Plans(dict[str, Plan]):
    """Plans of the layers of a model by their names; saved and loaded as one JSON file.

    >>> import tempfile
    >>> q = torch.randn(1, 1, 16, 16, 8)
    >>> plans = scram.Plans({"blocks.0.attention": scram.tune(q, q, q)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plans.save(folder + "/plans.json")
    ...     scram.Plans.load(folder + "/plans.json") == plans
    True
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file."""
        files.save_json(self._as_dict(), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plans:
        """Read what `save` wrote; ValueError for any other file."""
        return files.load_json(path, Plans._from_dict, "holds no plans that Plans.save wrote")

    def state_dict(self) -> dict[str, str]:
        """The same as {"json": text}, a part of a checkpoint of torch; `torch.distributed.checkpoint` calls it."""
        return {"json": json.dumps(self._as_dict(), allow_nan=False)}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Hold the plans of a `state_dict`, and no others."""
        with files.malformed("state_dict must be what Plans.state_dict returned"):
            plans = Plans._from_dict(json.loads(state_dict["json"]))
        self.clear()
        self.update(plans)

    def _as_dict(self) -> files.Json:
        layers = {name: plan.as_dict() for name, plan in self.items()}
        return {"format": "scram.Plans", "version": VERSION, "layers": layers}

    @staticmethod
    def _from_dict(data: Any) -> Plans:
        if not isinstance(data, dict) or data.get("format") != "scram.Plans" or data.get("version") != VERSION:
            raise ValueError(f"it holds something else, or its version is not {VERSION}")
        return Plans({name: Plan.from_dict(plan) for name, plan in data["layers"].items()})


class Tokens(NamedTuple):
    """What the tokens of a call are: some before the grid, its points row by row, some after it.

    Args:
        grid: extents; () for no grid.
        before, after: tokens off the grid, of queries and of keys.
        key_grid: of reduced keys; () where it is the grid.
    """

    grid: tuple[int, ...]
    before: int = 0
    after: int = 0
    key_grid: tuple[int, ...] = ()

    @property
    def off(self) -> int:
        """Tokens off the grid."""
        return self.before + self.after

    @property
    def total(self) -> int:
        return self.off + math.prod(self.grid)

    @property
    def keys(self) -> int:
        return self.off + math.prod(self.key_grid or self.grid)

    def of(self, queries: int, keys: int) -> Tokens | None:
        """What a call of so many tokens has; None where they are others."""
        if queries != self.total:
            return None
        if keys == queries:
            return self._replace(key_grid=())
        return self if keys == self.keys else None

    def __str__(self) -> str:
        parts = [self.before, " x ".join(map(str, self.grid)), self.after]
        words = f"{' + '.join(str(part) for part in parts if part)} = {self.total}"
        return words + (f", keys {' x '.join(map(str, self.key_grid))}" if self.key_grid else "")


NO_TOKENS = Tokens(())


@dataclass
class Layer:
    """A layer of a model that calls attention, and how its calls are answered.

    Args:
        name: of the module within the model that was called; of the shapes where no module calls.
        tokens: what its tokens are; its grid is () where every call was left to torch.
        plan: what was tuned; None where nothing was.
        why_not: why nothing was tuned.
        searched, clustered, dense, left_alone: calls that were searched, that ran by clusters without a search, that
            ran dense, and that were left to torch; a compiled call counts once, when it is compiled.
    """

    name: str
    tokens: Tokens = NO_TOKENS
    plan: Plan | None = None
    why_not: str = ""
    searched: int = 0
    clustered: int = 0
    dense: int = 0
    left_alone: int = 0

    @property
    def calls(self) -> int:
        """How often it was called."""
        return self.searched + self.clustered + self.dense + self.left_alone

    def count(self, why_not: str, how: How) -> None:
        """One more call; `why_not`: the reason that it was left to torch, "" for none."""
        if why_not:
            self.left_alone += 1
        elif how == "dense":
            self.dense += 1
        elif how == "clustered":
            self.clustered += 1
        else:
            self.searched += 1

    @property
    def grid(self) -> tuple[int, ...]:
        """The extents of its grid."""
        return self.tokens.grid

    def row(self) -> tuple[str, ...]:
        """Name, grid, setting, keys visited, 95th percentile, time of dense attention's, calls of each kind."""
        calls = str(self.searched), str(self.clustered), str(self.dense), str(self.left_alone)
        if not self.grid:
            return self.name, "", f"left to torch: {self.why_not}", "", "", "", *calls
        grid = str(self.tokens).replace(f" = {self.tokens.total}", "")
        if self.plan is None:
            return self.name, grid, f"default settings: {self.why_not}", "", "", "", *calls
        rung = self.plan.rungs[self.plan.chosen]
        error = "exact" if self.plan.dense else with_interval(rung.error or ())
        return (
            self.name,
            grid,
            str(rung.setting),
            str(rung.keys),
            error,
            f"{self.plan.time_share:.2f}",
            *calls,
        )


def table(layers: Sequence[Layer], error: float) -> str:
    """One line per layer."""
    head = (
        "layer",
        "grid",
        "attention",
        "keys visited",
        "error, 95th percentile",
        "of dense",
        "searched",
        "clustered",
        "dense",
        "to torch",
    )
    lines = aligned([head, *(layer.row() for layer in layers)])
    times = [(layer.plan.rungs[-1].seconds or 0.0, layer.plan.time_share) for layer in layers if layer.plan is not None]
    dense = sum(seconds for seconds, _ in times)
    chosen = sum(seconds * share for seconds, share in times)
    on_grids = sum(bool(layer.grid) for layer in layers)
    others = f", {len(layers) - on_grids} left to torch" if on_grids < len(layers) else ""
    tuned = f"{len(times)} of {on_grids} layers tuned for an error of at most {error:g}{others}"
    total = f": {1e3 * chosen:.3g} ms of attention in place of {1e3 * dense:.3g} ms" if times else ""
    split = [layer.name for layer in layers if layer.plan is not None and modes.note(layer.plan.split)]
    repeats = f"note: two separate places share the weight of many queries of {', '.join(split)}; see their plans"
    return "\n".join([*lines, tuned + total, *([repeats] if split else [])])


def name_in(root: nn.Module, module: nn.Module) -> str:
    """The name of a module within the one that was called first; its class where it is none of its parts."""
    return next((name for name, one in root.named_modules() if one is module), "") or type(module).__name__


@dataclass
class Hooks:
    """Says in compiled code, where frames are not seen, which layer is running: by hooks on the modules of layers.

    Args:
        running: names of layers, the innermost last; only while torch compiles, which one thread does at a time.
    """

    running: list[str] = field(default_factory=list)
    _modules: dict[str, ReferenceType[nn.Module]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _users: int = 0  # contexts that are entered, in all threads
    _lock: Any = field(default_factory=threading.Lock)

    def add(self, name: str, module: nn.Module) -> None:
        """A layer and its module; hooked from now on if hooks are attached."""
        with self._lock:
            known = self._modules.get(name)
            if known is None or known() is not module:
                self._modules[name] = ref(module)
                if self._users:
                    self._hook(name, module)

    def attach(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            for name, one in self._modules.items():
                module = one()
                if module is not None:
                    self._hook(name, module)

    def detach(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self.running.clear()

    def _hook(self, name: str, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(_Enter(self.running, name)),
            module.register_forward_hook(_Leave(self.running)),
        ]


@dataclass(frozen=True, eq=False)
class _Enter:
    """A hook before the forward pass. Not a local function: models with hooks are pickled and copied."""

    running: list[str]
    name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            self.running.append(self.name)


@dataclass(frozen=True, eq=False)
class _Leave:
    """A hook behind the forward pass."""

    running: list[str]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            self.running.pop()
