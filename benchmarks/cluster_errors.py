"""Output errors of windows and a clustered tail on sampled queries, by dense products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sets import gmflow, minisam, projected, stereo, unnormalized
from torch import Tensor

import scram
from scram.core.calls import ClusterCall, Clustered
from scram.engines.reference.attend import expand
from scram.spec import clustering

QUERIES = 1000
SCALES = {"stereo": (1.0, 8.0, 32.0, 100.0), "projected": (0.125, 1.0, 8.0, 32.0), "un-normalized": (0.125, 1.0, 8.0)}
MAKERS = {"stereo": stereo, "projected": projected, "un-normalized": unnormalized}


@dataclass
class Problem:
    """One head on a grid, q, k, v [1, 1, *G, E], at one scale, with the sampled queries of each seed."""

    name: str
    group: str  # problems of a group share q and k, so their searches
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def key_grid(self) -> tuple[int, ...]:
        return tuple(self.k.shape[2:-1])

    def sample(self, seed: int) -> Sample:
        if seed not in self.samples:
            self.samples[seed] = Sample.of(self, seed)
        return self.samples[seed]

    def cluster(self, seed: int, count: int = 256, steps: int = 3) -> Clustered:
        call = ClusterCall(
            self.q,
            self.k,
            self.v,
            None,
            None,
            None,
            torch.tensor(seed),
            None,
            min(count, self.k[..., 0].numel()),
            steps,
            self.scale,
        )
        return clustering.cluster(call)


@dataclass
class Sample:
    """Sampled queries of a problem and their exact attention."""

    queries: Tensor  # [n]
    q: Tensor  # [n, E]
    top: Tensor  # [n, 1], largest score
    out: Tensor  # [n, F]

    @staticmethod
    def of(problem: Problem, seed: int) -> Sample:
        queries = scram.measure.sample_queries(problem.q, QUERIES, seed)
        q, k, v = (x.flatten(0, -2) for x in (problem.q, problem.k, problem.v))
        q = q[queries]
        scores = problem.scale * q @ k.T
        top = scores.amax(-1, keepdim=True)
        weight = scores.sub_(top).exp_()
        return Sample(queries, q, top, weight @ v / weight.sum(-1, keepdim=True))


@dataclass
class Head:
    """The windows of the sampled queries: their keys, and the sums over them."""

    key: Tensor  # [n, K]
    there: Tensor  # [n, K]
    normalizer: Tensor  # [n, 1]
    numerator: Tensor  # [n, F]


def head_of(problem: Problem, sample: Sample, matches: scram.Matches, radius: int) -> Head:
    index = matches.index.flatten(0, -2)[sample.queries].long()
    sides = [min(radius, extent - 1) for extent in problem.key_grid]
    key, there = expand(index, problem.key_grid, sides)
    k, v = problem.k.flatten(0, -2), problem.v.flatten(0, -2)
    scores = problem.scale * (k[key] @ sample.q.unsqueeze(-1)).squeeze(-1)
    weight = torch.where(there, (scores - sample.top).exp(), 0)
    return Head(key, there, weight.sum(-1, keepdim=True), (weight.unsqueeze(1) @ v[key]).squeeze(1))


def error(problem: Problem, sample: Sample, head: Head, made: Clustered | None, gains: Tensor | None = None) -> float:
    """Relative output error over the sampled queries; None is the windows alone."""
    normalizer, numerator = head.normalizer, head.numerator
    if made is not None:
        centers, values, sizes = (x.flatten(0, 1)[0] for x in (made.centers, made.values, made.sizes))
        name = made.label.flatten()[head.key].long()
        taken = torch.zeros(len(sample.q), len(sizes) + 1)
        taken.scatter_add_(1, torch.where(head.there, name, len(sizes)), torch.ones(name.shape))
        weight = (problem.scale * sample.q @ centers.T - sample.top).exp() * (sizes - taken[:, :-1])
        weight = weight if gains is None else weight * gains
        normalizer, numerator = normalizer + weight.sum(-1, keepdim=True), numerator + weight @ values
    return float((numerator / normalizer - sample.out).norm() / sample.out.norm())


def photo_problems(size: int = 128, names: tuple[str, ...] = tuple(SCALES)) -> list[Problem]:
    made = []
    for name in names:
        q, k = MAKERS[name](size)
        made += [Problem(f"{name}, {scale:g}", f"{name} {size}", q, k, k, scale) for scale in SCALES[name]]
    return made


def trained_problems(folder: Path) -> list[Problem]:
    q, k, v = gmflow(folder)
    made = [Problem("GMFlow", "GMFlow", q, k, v, q.shape[-1] ** -0.5)]
    heads = zip(*(x.unbind(1) for x in minisam(folder)), strict=True)
    for number, head in enumerate(heads):
        q, k, v = (x.unsqueeze(1).contiguous() for x in head)
        made.append(Problem(f"MobileSAM, {number}", f"MobileSAM {number}", q, k, v, q.shape[-1] ** -0.5))
    return made


class Searches:
    """Matches by group, setting and seed, each searched once."""

    def __init__(self) -> None:
        self.kept: dict[Any, scram.Matches] = {}

    def of(self, problem: Problem, seed: int, **settings: Any) -> scram.Matches:
        key = (problem.group, seed, *sorted(settings.items()))
        if key not in self.kept:
            self.kept[key] = scram.search(problem.q, problem.k, search=scram.Search(seed=seed, **settings))
        return self.kept[key]


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """Constants of scram.spec.clustering for a while."""
    with mock.patch.multiple(clustering, **values):
        yield
