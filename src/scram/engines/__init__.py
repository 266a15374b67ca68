"""The engines: three implementations of one protocol. Folders say where code runs, files say what it does.

An engine is a folder with an `EngineSpec` named `SPEC` in its `__init__`, which imports nothing heavy, and a module
`engine` that implements the protocol `Engine`, loaded when it first runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core import calls
from ..options import Impl
from ..results import Attended


class Engine(Protocol):
    """What computes a call. Engines whose spec says `plain_torch` have no backward functions: autograd sees through."""

    def search(self, call: calls.SearchCall, /) -> calls.Found: ...
    def attend(self, call: calls.AttendCall, /) -> Attended: ...
    def attend_backward(
        self, call: calls.AttendCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, /
    ) -> calls.AttendGrads: ...
    def drawn_tail(self, call: calls.DrawnTailCall, /) -> calls.DrawnTail: ...
    def drawn_tail_backward(
        self,
        call: calls.DrawnTailCall,
        offset: Tensor,
        names: Tensor,
        represents: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor,
        /,
    ) -> calls.TailGrads: ...
    def sample(self, call: calls.SampleCall, /) -> calls.Sampled: ...
    def sample_backward(self, call: calls.SampleCall, grad_out: Tensor, grad_lse: Tensor, /) -> calls.TailGrads: ...
    def cluster(self, call: calls.ClusterCall, /) -> calls.Clustered: ...
    def cluster_backward(
        self,
        call: calls.ClusterCall,
        centers: Tensor,
        values: Tensor,
        sizes: Tensor,
        label: Tensor,
        grad_centers: Tensor,
        grad_values: Tensor,
        grad_slope: Tensor,
        /,
    ) -> calls.ClusterGrads: ...
    def route(self, call: calls.RouteCall, /) -> calls.Routed: ...
    def routed_start(self, call: calls.RoutedStartCall, /) -> calls.Found: ...
    def cluster_tail(self, call: calls.ClusterTailCall, /) -> Attended: ...
    def cluster_tail_backward(
        self, call: calls.ClusterTailCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, /
    ) -> calls.ClusterTailGrads: ...
    def earlier(self, call: calls.EarlierCall, /) -> Attended: ...
    def earlier_backward(
        self, call: calls.EarlierCall, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, /
    ) -> calls.EarlierGrads: ...
    def decode(self, call: calls.DecodeCall, /) -> Attended: ...
    def window_scores(self, call: calls.WindowScoresCall, /) -> calls.WindowScores: ...
    def window_scores_backward(
        self, call: calls.WindowScoresCall, grad_scores: Tensor, /
    ) -> calls.WindowScoresGrads: ...
    def expect(self, rank: int, dtype: torch.dtype, gradients: bool, /) -> None:
        """A call with a search and routed keys begins, on grids of that rank: what it needs can be compiled at once."""

    def clear_caches(self) -> None: ...


class Needs(NamedTuple):
    """What a call needs of an engine."""

    device: torch.device
    dtype: torch.dtype
    callable_score: bool = False
    explicit: bool = False  # the engine was named, not chosen by "auto"
    tile_matches: int = 0  # matches of a tile search, 0 for any other call


# Looked up once: that takes longer than a small search.
INSTALLED = {package: find_spec(package) is not None for package in ("numba", "triton")}


@dataclass(frozen=True)
class EngineSpec:
    """What an engine can do, as data. `reasons` says in words why it cannot serve a call."""

    name: Impl
    package: str | None  # that must be installed
    devices: tuple[str, ...] | None  # None: any
    dtypes: tuple[torch.dtype, ...]
    callable_scores: bool = False
    most_tile_matches: int | None = None  # None: any number, 0: it has no tile search
    wide_inputs: bool = False  # takes float32 and float64 only
    plain_torch: bool = False  # runs without an operator: autograd, torch.func and torch.compile see through it
    interpreter: str | None = None  # environment variable that lets it take CPU tensors when it is named

    def reasons(self, needs: Needs) -> list[str]:
        """Every reason why this engine cannot serve the call; none means it can."""
        why = []
        if self.package and not INSTALLED[self.package]:
            why.append(f"the package {self.package} is not installed")
        if needs.callable_score and not self.callable_scores:
            why.append("a callable score runs in the reference only")
        device = needs.device.type
        interpreted = self.interpreter and os.environ.get(self.interpreter) == "1"
        if self.devices and device not in self.devices and not (needs.explicit and interpreted and device == "cpu"):
            names = " and ".join(name.upper() for name in self.devices)
            why.append(f"it runs on {names} tensors, these are on {device}")
        if needs.dtype not in self.dtypes:
            why.append(f"it does not take {needs.dtype}; the reference does".replace("torch.", ""))
        if self.most_tile_matches == 0 and needs.tile_matches:
            why.append("it has no tile search; the reference does, on any device")
        elif self.most_tile_matches is not None and needs.tile_matches > self.most_tile_matches:
            why.append(
                f"its tile search keeps at most {self.most_tile_matches} matches, got {needs.tile_matches}; "
                "method='query' keeps any number"
            )
        return why
